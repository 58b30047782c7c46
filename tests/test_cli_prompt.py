"""Where a prompt comes from, and how a chat parses typed lines: pure text against simulated streams."""

import io
import os
import sys
import threading

import pytest
from test_cli_screen import Terminal, screen, texts

from effllm import ContextOverflow, EffllmError, UsageError
from effllm.cli.attachment import edit_text
from effllm.cli.conversation import next_step
from effllm.cli.editor import is_open, unquoted
from effllm.cli.number_format import margin
from effllm.cli.prompt import read_prompt


def test_the_prompt_is_file_then_argument(tmp_path) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes(b"\xef\xbb\xbfDear all,\r\n")
    assert read_prompt("Answer it.", str(path), screen()) == "Dear all,\n\nAnswer it."
    assert read_prompt(None, str(path), screen()) == "Dear all,"
    assert read_prompt("only this", None, screen()) == "only this"
    assert read_prompt(None, None, screen(stdin=io.StringIO("piped\n"))) == "piped"
    assert read_prompt("then this", "-", screen(stdin=io.StringIO("piped\n"))) == "piped\n\nthen this"


def test_a_user_at_the_terminal_without_a_prompt_wants_to_chat() -> None:
    assert read_prompt(None, None, screen(stdin=Terminal())) is None


@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_an_empty_prompt_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="empty"):
        read_prompt(None, None, screen(stdin=io.StringIO(text)))


def test_a_file_that_is_not_text(tmp_path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8 text .byte 3."):
        read_prompt(None, str(path), screen())
    with pytest.raises(UsageError, match="Is a directory"):
        read_prompt(None, str(tmp_path), screen())


def test_piped_text_comes_before_the_argument_and_a_silent_pipe_is_announced(monkeypatch) -> None:
    monkeypatch.setattr("effllm.cli.prompt.WAIT_S", 0.05)
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "w") as pipe:
            pipe.write("a letter\n")

    timer = threading.Timer(0.3, write)
    timer.start()
    with os.fdopen(reading) as pipe:
        shown = screen(stdin=pipe)
        assert read_prompt("Answer it.", None, shown) == "a letter\n\nAnswer it."
    timer.join()
    assert "waiting for more of the prompt" in texts(shown)[1]


def test_an_argument_does_not_wait_for_a_device() -> None:
    with open(os.devnull) as void:
        assert read_prompt("only this", None, screen(stdin=void)) == "only this"


# ---- several lines in the editor


@pytest.mark.parametrize(("text", "open_"), [('"""', True), ('"""a\nb', True), ('"""a\nb"""', False), ("a", False), ('a"""', False),
                                             ('""""""', False)])
def test_blocks_between_quotes(text: str, open_: bool) -> None:
    assert is_open(text) is open_


def test_quotes_are_taken_off_and_the_text_stays() -> None:
    assert unquoted('"""\n first\nsecond\n"""') == " first\nsecond"
    assert unquoted('say """this"""') == 'say """this"""'


def test_a_full_context_is_left_by_what_a_chat_can_do() -> None:
    full = ContextOverflow("the prompt has 9 tokens", "raise -c")
    assert next_step(full, has_messages=True).startswith("/undo or /clear makes room here; ")
    assert next_step(EffllmError("no", "another way"), has_messages=True) == "another way"


def test_a_first_message_that_is_too_long_is_not_answered_with_taking_back() -> None:
    hint = next_step(ContextOverflow("the prompt has 9 tokens", "raise -c"), has_messages=False)
    assert hint == "send a shorter message; or quit, and for another chat: raise -c"
    as_said = [ContextOverflow("the prompt has 9 tokens", f"shorten it,{more} or --overflow shift") for more in ("", " raise -c,")]
    assert [next_step(full, has_messages=False).partition("another chat: ")[2] for full in as_said] == [
        "--overflow shift", "raise -c, or --overflow shift"], "to shorten it is what is said before"


def test_an_editor_that_leaves_nothing_is_told_of_a_message() -> None:
    with pytest.raises(UsageError, match="^the message is empty: nothing was sent$"):
        edit_text("", {"VISUAL": "true"}, sys.stderr)


def test_a_prediction_never_promises_less_than_nothing() -> None:
    assert margin(0.25) == "± 25%" and margin(0.9) == "± 90%"
    assert margin(0.95) == "within a factor of 1.9" and margin(1.02) == "within a factor of 2.0"


def test_ctrl_c_as_soon_as_a_line_is_seen_takes_it_away() -> None:
    class Pressed(Terminal):
        def write(self, text: str) -> int:
            super().write(text)
            if "asking" in text:
                raise KeyboardInterrupt
            return len(text)

    shown = screen(err=Pressed(), TERM="xterm")
    with pytest.raises(KeyboardInterrupt), shown.waiting("asking a host that says nothing"):
        pytest.fail("it goes on")
    assert texts(shown)[1].endswith("\r\x1b[K")
