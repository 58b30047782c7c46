"""A chat in limited terminals: one without cursor movement, one whose locale is not UTF-8."""

import os
import sys
import termios
import time
from pathlib import Path

import pexpect
from test_cli_chat import CTRL_D, ENTER, STORY, TIMEOUT_S, Chat


def test_a_dumb_terminal_gets_plain_text(tmp_path: Path) -> None:
    running = Chat(tmp_path, "chat", "fable", "-n", "4", "--temp", "0", TERM="dumb")
    running.terminal.expect_exact("> ")
    assert "\x1b" not in running.terminal.before, "before the first line"
    running.type(STORY + ENTER)
    running.terminal.expect_exact("(-n)")
    assert "\x1b" not in running.terminal.before
    running.terminal.expect_exact("> ")
    until = time.monotonic() + TIMEOUT_S  # here the prompt is written before keys are read one by one: an earlier Ctrl-D ends a line
    while termios.tcgetattr(running.terminal.child_fd)[3] & termios.ICANON and time.monotonic() < until:
        time.sleep(0.01)
    assert running.leave(CTRL_D) == 0


def test_a_dumb_terminal_shows_what_is_typed_and_the_answer_goes_where_it_was_sent(tmp_path: Path) -> None:
    answer = tmp_path / "answer.txt"
    line = f"exec '{sys.executable}' -P -m effllm chat fable -n 4 --temp 0 > '{answer}'"
    terminal = pexpect.spawn("/bin/sh", ["-c", line], encoding="utf-8", timeout=TIMEOUT_S,
                             env={**os.environ, "TERM": "dumb", "XDG_STATE_HOME": str(tmp_path)})
    terminal.expect_exact("> ")
    terminal.send(STORY + ENTER)
    terminal.expect_exact("(-n)")
    assert STORY in terminal.before
    terminal.expect_exact("> ")
    terminal.send("/exit" + ENTER)
    terminal.expect(pexpect.EOF)
    assert STORY not in answer.read_text() and ">" not in answer.read_text() and len(answer.read_text().split()) > 1


def test_letters_that_the_locale_does_not_read_are_refused_and_the_chat_continues(tmp_path: Path) -> None:
    """UTF-8 typed where Python expects ASCII: the model used to get mangled characters, without a notice."""
    running = Chat(tmp_path, "chat", "fable", "-n", "2", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    running.wait()
    said = running.say("Ünïcode")
    assert "this message is not UTF-8 text" in said and "/file PATH" in said
    assert "stopped after 2 tokens" in running.say("plain words") and running.leave(CTRL_D) == 0
