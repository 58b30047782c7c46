"""A chat and its files, in a pseudo-terminal: attachments, the editor, exports, the status line, markdown.

The terminal here answers the question for the cursor's position, as real ones do: only then is the status line drawn.
"""

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

WAITS, HAS_LINE, WHERE, HERE = "\x1b[?2004h", "\x1b[?2004l", "\x1b[6n", "\x1b[39;1R"
TIMEOUT_S = 90
CTRL_C, CTRL_D = "\x03", "\x04"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")
STORY = "Tell me a story about a fox."


class Chat:
    """A running chat with fable in `folder`; `say` gives what was shown up to the next prompt."""

    def __init__(self, folder: Path, *argv: str, columns: int = 100, **variables: str) -> None:
        self.folder = folder
        environment = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": str(columns)} | variables
        environment = {name: value for name, value in environment.items() if value}
        self.terminal = pexpect.spawn(sys.executable, ["-P", "-m", "effllm", "chat", "fable", "--temp", "0", "-n", "8", *argv], cwd=folder,
                                      env=environment, encoding="utf-8", timeout=TIMEOUT_S, dimensions=(40, columns))
        self.first = self.wait()

    def wait(self) -> str:
        self.terminal.expect_exact(WAITS)
        before = self.terminal.before
        if WHERE not in before:
            self.terminal.expect_exact(WHERE)
        self.terminal.send(HERE)
        return before

    def status(self) -> str:
        """The line below the prompt, raw."""
        self.terminal.expect(r"\d+ of \d+ tokens[^\r\n\x1b]*")
        return self.terminal.after

    def say(self, keys: str) -> str:
        self.terminal.send(keys + "\r")
        self.terminal.expect_exact(HAS_LINE)
        return ESCAPES.sub("", self.wait()).replace("\r\n", "\n")

    def messages(self) -> list[dict]:
        name = f"now-{self.terminal.pid}"  # of this chat alone: over another's it would be asked
        assert "saved" in self.say(f"/save {name}")
        return json.loads((self.folder / "state" / "effllm" / "sessions" / f"{name}.json").read_text())["conversation"]["messages"]

    def leave(self) -> None:
        self.terminal.send(CTRL_D)
        self.terminal.expect(pexpect.EOF)
        self.terminal.close()
        assert self.terminal.exitstatus == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    editor = folder / "editor"
    editor.write_text('#!/bin/sh\ncp "$1" seen.txt\ncat wanted.txt > "$1"\nexit "$(cat code.txt)"\n')
    editor.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Chat]:
    chat = Chat(folder, VISUAL="./editor")
    yield chat
    chat.leave()


@pytest.fixture
def chat(running: Chat) -> Chat:
    running.say("/file off")
    running.say("/clear")
    return running


def test_a_file_goes_with_the_next_message(chat: Chat) -> None:
    (chat.folder / "my notes.txt").write_text("The fox is 狐.\n")
    said = chat.say("/file my notes.txt")
    tokens = int(re.search(r"my notes.txt: (\d+) tokens attached to the next message", said)[1])
    assert 3 < tokens < 30
    assert f"{tokens} more from files" in chat.status()
    chat.say(STORY)
    assert chat.messages()[0]["content"] == f"my notes.txt:\n```\nThe fox is 狐.\n```\n\n{STORY}"
    chat.say("And then?")
    assert chat.messages()[2]["content"] == "And then?", "once"
    chat.say('/file "my notes.txt"')
    assert "no files attached" in chat.say("/file off")


def test_files_that_cannot_go_are_one_line(chat: Chat) -> None:
    (chat.folder / "binary").write_bytes(b"\x89PNG\xff\x00")
    (chat.folder / "zeros.txt").write_bytes(b"a\0b")
    (chat.folder / "empty.txt").write_text("\n")
    (chat.folder / "long.txt").write_text("word " * 3000)
    with (chat.folder / "huge.txt").open("wb") as file:
        file.truncate(17 << 20)
    os.mkfifo(chat.folder / "pipe")
    for name, said in (("binary", "not UTF-8 text"), ("zeros.txt", "null bytes"), ("empty.txt", "is empty"), (".", "is not a file"),
                       ("huge.txt", "larger than 16 MiB"), ("long.txt", r"has \d{4,5} tokens, and 2048 of the context of 2048 are free"),
                       ("absent", "No such file"), ("pipe", "is not a file"), ("/dev/zero", "is not a file"),
                       ("~nobody-here/x", "no such user")):
        answer = chat.say(f"/file {name}")
        assert len(re.findall(r"^effllm: ", answer, re.MULTILINE)) == 1 and re.search(said, answer.replace("\n", " ")), (name, answer)
        assert "Traceback" not in answer
    assert "no files attached" in chat.say("/file")


def test_the_editor_writes_the_message(chat: Chat) -> None:
    wanted, code = chat.folder / "wanted.txt", chat.folder / "code.txt"
    wanted.write_text("One line,\nand another.\n")
    code.write_text("0")
    assert "… One line,\n… and another.\n" in chat.say("/edit a beginning"), "the question stands above its answer"
    assert (chat.folder / "seen.txt").read_text() == "a beginning"
    assert chat.messages()[0]["content"] == "One line,\nand another."
    code.write_text("3")
    assert "./editor exited with code 3: nothing was sent" in chat.say("/edit")
    code.write_text("0")
    wanted.write_text("")
    assert "is empty" in chat.say("/edit").replace("\n", " ")
    assert len(chat.messages()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("editor", "said"), [
    ("", "no editor is named"), ("/no/such/editor", "cannot be started"), ("'open", "cannot be parsed")])
def test_an_editor_that_does_not_start_is_one_line(folder: Path, editor: str, said: str) -> None:
    chat = Chat(folder, VISUAL=editor, EDITOR="")
    answer = chat.say("/edit")
    assert said in answer and answer.count("effllm: ") == 1 and "hint: name one: export EDITOR=nano" in answer
    chat.leave()


def test_a_conversation_is_exported_and_nothing_is_overwritten_unasked(chat: Chat) -> None:
    chat.say(STORY)
    (chat.folder / "out").mkdir(exist_ok=True)
    assert "wrote 2 messages" in chat.say("/export out/talk.md")
    path = chat.folder / "out" / "talk.md"
    text = path.read_text()
    assert text.startswith("# A conversation with fable\n\n## You\n\n" + STORY + "\n\n## Answer\n\n")
    assert "wrote 2 messages" in chat.say("/export out/talk.json")
    exported = json.loads((chat.folder / "out" / "talk.json").read_text())
    assert exported["messages"] == chat.messages() and exported["model"] == "fable"
    assert stat.S_ISREG(path.stat().st_mode) and sorted(each.name for each in path.parent.iterdir()) == ["talk.json", "talk.md"]
    path.write_text("mine")
    for reply, kept in (("n\r", True), ("\r", True), (CTRL_C, True), ("y\r", False)):
        chat.terminal.send("/export out/talk.md\r")
        chat.terminal.expect_exact("Overwrite it? [y/N] ")
        chat.terminal.send(reply)
        answer = ESCAPES.sub("", chat.wait())
        assert ("stays as it is" in answer) == kept == (path.read_text() == "mine"), reply


def test_an_emptied_conversation_takes_the_place_of_a_session_only_where_that_is_wanted(chat: Chat) -> None:
    session = chat.folder / "state" / "effllm" / "sessions" / "kept.json"
    chat.say(STORY)
    assert "saved 2 messages" in chat.say("/save kept")
    chat.say("/clear")
    for reply, messages in (("\r", 2), ("y\r", 0)):
        chat.terminal.send("/save kept\r")
        chat.terminal.expect_exact("exists already. Overwrite it? [y/N] ")
        chat.terminal.send(reply)
        chat.wait()
        assert len(json.loads(session.read_text())["conversation"]["messages"]) == messages


def test_what_a_chat_did_not_save_itself_is_not_saved_over_unasked(chat: Chat) -> None:
    mine, session = chat.folder / "mine.json", chat.folder / "state" / "effllm" / "sessions" / "mine.json"
    chat.say(STORY)
    (chat.folder / "out").mkdir(exist_ok=True)
    assert "saved 2 messages to out/own.json" in chat.say("/save out/own.json") and "saved 2" in chat.say("/save out/own.json"), "its own"
    assert "saved 2 messages" in chat.say("/save first")
    session.write_bytes((session.parent / "first.json").read_bytes().replace(b'"first"', b'"mine"'))
    mine.write_text("mine")
    for command, path in (("/save ./mine.json", mine), ("/save mine", session)):
        before = path.read_bytes()
        for reply, kept in (("\r", True), (CTRL_C, True), ("y\r", False)):
            chat.terminal.send(command + "\r")
            chat.terminal.expect_exact("exists already. Overwrite it? [y/N] ")
            chat.terminal.send(reply)
            answer = ESCAPES.sub("", chat.wait())
            assert ("stays as it is" in answer) == kept == (path.read_bytes() == before), (command, reply)
        assert "saved 2 messages" in chat.say(command), "it is this chat's now"


def test_exports_that_cannot_be_are_one_line(chat: Chat) -> None:
    assert "the conversation is empty" in chat.say("/export talk.md")
    chat.say(STORY)
    (chat.folder / "plain").write_text("a file")
    for name, said in (("talk.txt", "neither .md nor .json"), ("plain/talk.md", "cannot write"), ("/proc/nowhere/talk.md", "cannot write"),
                       ("~nobody-here/talk.md", "no such user"), ("", "needs a file")):
        answer = chat.say(f"/export {name}")
        assert said in answer.replace("\n", " ") and answer.count("effllm: ") == 1 and answer.count("hint: ") == 1, (name, answer)
    for command in ("/save plain/x.json", "/save /proc/nowhere/x.json", "/save ~nobody-here/x.json", "/load ~nobody-here/x.json"):
        answer = chat.say(command)
        assert answer.count("effllm: ") == 1 and answer.count("hint: ") == 1, (command, answer)
    for command in ("/save talsk/x.json", "/export talsk/a/x.md"):
        answer = chat.say(command).replace("\n", " ")
        assert "there is no folder talsk" in answer and "make it: mkdir -p talsk" in answer and not (chat.folder / "talsk").exists()
    assert chat.messages()[0]["content"] == STORY, "the chat went on"


def test_saved_chats_without_a_place_to_live_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    chat = Chat(tmp_path)
    chat.say(STORY)
    answer = chat.say("/save tale")
    assert "session tale cannot be saved: Not a directory" in answer and "hint: check its folder" in answer and "Traceback" not in answer
    chat.leave()


def test_the_status_line_vanishes_when_the_line_is_sent(chat: Chat) -> None:
    assert re.match(r"0 of 2048 tokens · (\d+ tokens/s · )?memory ", chat.status())
    answer = chat.say(STORY)
    assert "of 2048 tokens" not in answer, "what can be copied is what was said"
    shown = chat.status()
    assert re.fullmatch(r"\d\d of 2048 tokens · \d+ tokens/s · memory \d+\.\d+ [MG]iB", shown.strip()), shown
    used = int(shown.split()[0])
    assert used > 8
    chat.say("And then?")
    chat.say("/undo")
    assert abs(int(chat.status().split()[0]) - used) <= 3


@pytest.mark.slow
def test_forty_columns(folder: Path) -> None:
    (folder / "wide.txt").write_text("狐狸 🦊\n")
    chat = Chat(folder, "--markdown", columns=40)
    assert len(chat.status()) < 40
    chat.say("/file wide.txt")
    chat.say(STORY)
    shown = chat.status()
    assert re.match(r"\d+ of 2048 tokens", shown) and len(shown) < 40
    for said in (chat.say("/help"), chat.say("/stats")):
        assert len(said.splitlines()) > 4 and max(map(len, said.splitlines())) <= 40, "broken between words alone"
    chat.say("\x1b[200~🦊狐\nsecond\x1b[201~")
    assert chat.messages()[0]["content"].startswith("wide.txt:\n```\n狐狸 🦊\n```")
    assert chat.messages()[2]["content"] == "🦊狐\nsecond"
    chat.leave()


def test_no_color_has_no_colours(folder: Path) -> None:
    chat = Chat(folder, "--markdown", NO_COLOR="1")
    chat.terminal.send(STORY + "\r")
    chat.terminal.expect_exact(HAS_LINE)
    assert not re.search(r"\x1b\[[0-9;]*(?:3[0-8]|4[0-8]|9[0-7])[0-9;]*m", chat.first + chat.wait() + chat.status())
    chat.leave()


@pytest.mark.slow
def test_what_is_said_behind_a_clear_takes_the_place_of_no_session(tmp_path: Path) -> None:
    def kept(name: str) -> list[dict]:
        return json.loads((tmp_path / "state" / "effllm" / "sessions" / f"{name}.json").read_text())["conversation"]["messages"]

    chat = Chat(tmp_path, "--session", "tale", columns=120)
    chat.say(STORY)
    before = kept("tale")
    chat.say("/clear")
    assert "session tale stays as it was before /clear: the new conversation is saved as tale-2" in chat.say("And then?")
    chat.say("What did the fox say?")
    assert kept("tale") == before and len(kept("tale-2")) == 4
    chat.say("/clear")
    chat.say("/load tale")
    assert "kept as" not in chat.say("And then?"), "it was taken up again"
    chat.leave()
    assert len(kept("tale")) == 4 and len(kept("tale-2")) == 4
    assert sorted(path.stem for path in (tmp_path / "state" / "effllm" / "sessions").glob("*.json")) == ["tale", "tale-2"]
