"""`/copy` in a chat, in a pseudo-terminal: what a clipboard program receives, or the escape sequence sent to the terminal."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_model import LAST, scripted
from test_cli_chat import CTRL_D, Chat

CODE = 'print("a line that is longer than the terminal is wide, ' + "and stays in one piece, " * 4 + '")\n\nprint("fin")'
SAID = f"First:\n\n```sh\npip install it\n```\n\nthen:\n\n```python\n{CODE}\n```\n\nThat is all."
WORDS = "It begins with " + "words that go over the edge " * 6 + "and ends."
OSC_52 = re.compile(r"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07")
NOWHERE = {name: "" for name in ("TMUX", "WAYLAND_DISPLAY", "DISPLAY", "SSH_CONNECTION", "SSH_TTY")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = {f"'code' in {LAST}": SAID, f"'words' in {LAST}": WORDS, "true": "\x1b[31mred"}
    return scripted(tmp_path_factory.mktemp("scripted") / "model", script)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs for the clipboard, each of which writes down what it is called with and given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("xclip", "tmux"):
        (folder / name).write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/{name}.called"\n/bin/cat > "{tmp_path}/{name}"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def chats(model: Path, tmp_path: Path, programs: Path) -> Iterator:
    begun = []

    def chat(**variables: str) -> Chat:
        begun.append(Chat(tmp_path, "chat", str(model), **{"PATH": str(programs), **NOWHERE, **variables}))
        begun[-1].wait()
        return begun[-1]

    yield chat
    assert [each.leave(CTRL_D) for each in begun] == [0] * len(begun)


def sent(chat: Chat, line: str) -> str:
    """What a terminal finds in its clipboard after a line."""
    assert "sent to the terminal" in chat.say(line)
    return base64.b64decode(OSC_52.search(chat.terminal.before)[1]).decode()


def test_a_program_gets_the_answer_without_the_breaks_of_the_terminal(chats, tmp_path: Path) -> None:
    chat = chats(DISPLAY=":0")
    assert "there is no answer yet" in chat.say("/copy")
    assert WORDS not in chat.say("words"), "the terminal broke it"
    assert f"{len(WORDS)} characters are in the clipboard (xclip)" in chat.say("/copy")
    assert (tmp_path / "xclip").read_text() == WORDS and (tmp_path / "xclip.called").read_text() == "-selection clipboard\n"
    assert "the last answer has no code block" in chat.say("/copy code") and "takes code or nothing" in chat.say("/copy it")
    chat.say("code")
    chat.say("/copy code")
    assert (tmp_path / "xclip").read_text() == CODE
    chat.say("/copy")
    assert (tmp_path / "xclip").read_text() == SAID


def test_tmux_is_asked_far_away_and_where_there_is_nothing_better(chats, tmp_path: Path) -> None:
    far = chats(DISPLAY=":0", TMUX="/tmp/tmux,1,0", SSH_CONNECTION="a 1 b 2")
    far.say("code")
    assert "tmux buffer" in far.say("/copy code")
    assert (tmp_path / "tmux").read_text() == CODE and not (tmp_path / "xclip").exists()
    here = chats(DISPLAY=":0", TMUX="/tmp/tmux,1,0")
    here.say("words")
    assert "(xclip)" in here.say("/copy") and (tmp_path / "xclip").read_text() == WORDS and (tmp_path / "tmux").read_text() == CODE


@pytest.mark.parametrize("variables", [{}, {"DISPLAY": ":0", "SSH_TTY": "/dev/pts/1"}, {"WAYLAND_DISPLAY": "wayland-0"}],
                         ids=["no window system", "far away", "no program for it"])
def test_the_terminal_is_sent_what_no_program_here_can_take(chats, tmp_path: Path, variables: dict[str, str]) -> None:
    chat = chats(**variables)
    chat.say("code")
    assert sent(chat, "/copy code") == CODE and sent(chat, "/copy") == SAID and not (tmp_path / "xclip").exists()
    chat.say("else")
    assert sent(chat, "/copy") == "red", "what a terminal would take for a command goes into no clipboard"


def test_a_program_that_fails_leaves_it_to_the_terminal(chats, programs: Path) -> None:
    (programs / "xclip").write_text("#!/bin/sh\nexit 1\n")
    chat = chats(DISPLAY=":0")
    chat.say("words")
    assert sent(chat, "/copy") == WORDS
