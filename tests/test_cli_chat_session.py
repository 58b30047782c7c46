"""Chats saved as sessions: saved after every turn, continued, and never mixed with another chat's messages."""

import gc
import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest
from command_line import CliRun
from test_cli_session import FLAGS, MINUTE, MORE, STORY, THIRD, _compiled, home, told

from effllm.cli.conversation import Conversation
from effllm.cli.environment import Environment
from effllm.cli.screen import Screen

__all__ = ["_compiled", "home", "told"]  # fixtures

WAITS, HAS_LINE, CTRL_D = "\x1b[?2004h", "\x1b[?2004l", "\x04"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


class Chat:
    def __init__(self, *argv: str) -> None:
        environment = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.terminal = pexpect.spawn(sys.executable, ["-P", "-m", "effllm", "chat", "fable", *FLAGS, *argv], env=environment,
                                      encoding="utf-8", timeout=MINUTE, dimensions=(40, 160))
        self.opening = self._until(WAITS)

    def say(self, keys: str) -> str:
        self.terminal.send(keys + "\r")
        self.terminal.expect_exact(HAS_LINE)
        return self._until(WAITS)

    def leave(self) -> str:
        self.terminal.send(CTRL_D)
        self.terminal.expect(pexpect.EOF)
        self.terminal.close()
        assert self.terminal.exitstatus == 0
        return ESCAPES.sub("", self.terminal.before)

    def _until(self, what: str) -> str:
        self.terminal.expect_exact(what)
        return ESCAPES.sub("", self.terminal.before).replace("\r\n", "\n")


def test_a_chat_is_kept_after_every_turn_and_comes_back(home: Path, told: list[str]) -> None:
    chat = Chat("--session", "tale", "--kv", "4bit")
    assert "session tale is new" in chat.opening
    chat.say(STORY)
    chat.terminal.kill(9)
    chat.terminal.wait()
    again = Chat("--session", "tale", "--kv", "4bit")
    assert re.search(r"session tale: 2 messages, \d+ tokens restored", again.opening)
    again.say(MORE)
    assert int(re.search(r"(\d+) of them cached", again.say("/stats"))[1]) > 30
    assert "saved 4 messages and" in again.say("/save copy") and "as copy" in again.say("/save copy")
    again.say("/undo")
    again.leave()
    saved = {name: json.loads((home / f"{name}.json").read_text())["conversation"]["messages"] for name in ("tale", "copy")}
    assert [message["content"] for message in saved["copy"]] == [STORY, told[0], MORE, told[1]]
    assert saved["tale"] == saved["copy"][:2], "what was taken back is gone from the session too"


def test_of_two_chats_under_one_name_none_loses_the_others_words(home: Path) -> None:
    chat = Chat("--session", "tale")
    chat.say(STORY)
    assert CliRun("session", "rm", "tale", "--cache").code == 0
    assert "meanwhile" not in chat.say(MORE), "the same conversation, without its cache"
    assert CliRun("run", "fable", THIRD, "--session", "tale", *FLAGS).code == 0
    theirs = (home / "tale.json").read_bytes()
    said = " ".join(chat.say("What then?").split())
    assert "another process saved session tale in the meantime: this conversation is saved as tale-2" in said
    assert "meanwhile" not in chat.say("And at last?")
    chat.terminal.send("/save tale\r")
    chat.terminal.expect_exact("Overwrite it?")
    chat.terminal.send("n\r")
    assert "session tale stays as it is" in chat._until(WAITS)
    assert re.search(r"saved \d+ messages and .* as tale-2", chat.say("/save")), "its own by now"
    assert CliRun("run", "fable", THIRD, "--session", "tale-2", *FLAGS).code == 0
    chat.terminal.send("/save\r")
    chat.terminal.expect_exact("Overwrite it?")
    chat.terminal.send("n\r")
    assert "session tale-2 stays as it is" in chat._until(WAITS)
    chat.leave()
    assert (home / "tale.json").read_bytes() == theirs
    said = [message["content"] for message in json.loads((home / "tale-2.json").read_text())["conversation"]["messages"]]
    assert said[::2] == [STORY, MORE, "What then?", "And at last?", THIRD]


@pytest.mark.slow
def test_quotes_make_a_message_of_a_command_and_undo_leaves_nothing_of_the_only_one(home: Path) -> None:
    chat = Chat("--session", "u")
    chat.say('"""/clear me"""')
    path = home / "u.json"
    assert json.loads(path.read_text())["conversation"]["messages"][0]["content"] == "/clear me"
    assert "removed the last" in chat.say("/undo")
    saved = json.loads(path.read_text())
    assert saved["conversation"]["messages"] == [] and not (saved["cache"] or {"tokens": []})["tokens"]
    chat.leave()


@pytest.mark.slow
def test_a_chat_takes_up_another_session_and_continues_with_that(home: Path) -> None:
    assert CliRun("run", "fable", STORY, "--session", "other", *FLAGS).code == 0
    kept = (home / "other.json").read_bytes()
    chat = Chat()
    assert "needs a name" in chat.say("/save") and "needs a name" in chat.say("/load")
    assert re.search(r"session other: 2 messages, \d+ tokens restored", chat.say("/load other"))
    chat.say(MORE)
    assert (home / "other.json").read_bytes() == kept, "without --session nothing is saved by itself"
    chat.leave()
    chat = Chat("--session", "mine")
    chat.say(THIRD)
    chat.say("/load other")
    chat.say(MORE)
    chat.leave()
    messages = {name: len(json.loads((home / f"{name}.json").read_text())["conversation"]["messages"]) for name in ("mine", "other")}
    assert messages == {"mine": 2, "other": 4}, "what is said after /load belongs to the session that was loaded"


@pytest.mark.slow
def test_an_emptied_chat_does_not_empty_its_session(home: Path) -> None:
    chat = Chat("--session", "tale")
    chat.say(STORY)
    chat.say("/clear")
    chat.leave()
    assert len(json.loads((home / "tale.json").read_text())["conversation"]["messages"]) == 2


def test_ctrl_c_while_a_session_is_saved_stops_the_saving_alone(home: Path, tmp_path: Path) -> None:
    """The chat goes on, and the next turn saves."""
    lines = ["/stats", "/help", None]
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), {**os.environ, "XDG_STATE_HOME": str(tmp_path)})
    stopped = []

    class Interrupted:
        name = "tale"

        def keep(self, session: object) -> None:
            stopped.append(session)
            if len(stopped) == 1:
                raise KeyboardInterrupt

    class Typed:
        quoted = False

        def read(self) -> str | None:
            return lines.pop(0)

    class Talk:
        n_ctx, used, messages, engine = 8, 0, (), SimpleNamespace(media=None)

    chat = Conversation("fable", Talk(), Screen(environment), environment.stderr, False, Interrupted())
    chat._editor = Typed()
    gc.freeze()  # what other tests left is not looked through for every line
    assert chat.run() == 0 and len(stopped) == 2 and "/regen" in (said := environment.stderr.getvalue()) and "stopped by Ctrl-C" in said


def test_a_session_of_another_version_costs_no_other_its_cache(home: Path) -> None:
    assert CliRun("run", "fable", STORY * 20, "--session", "old", *FLAGS).code == 0
    path = home / "old.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    assert CliRun("run", "fable", THIRD, "--session", "new", *FLAGS).code == 0
    limit = sum(file.stat().st_size for file in home.rglob("*.kv")) - 1
    ran = CliRun("run", "fable", MORE, "--session", "new", "--session-disk", str(limit),
                 *FLAGS)
    assert ran.code == 0 and "no cache can be removed: session old is unreadable here" in ran.err
    kept = {entry["name"]: entry["tokens"] for entry in json.loads(CliRun("session", "list", "--json").out)["sessions"]}
    assert kept["new"] > 24, "its cache stays"
    assert "pages stay: session old cannot be read here" in CliRun("session", "rm", "new", "-y").err


def test_a_conversation_from_a_file_does_not_replace_the_session(home: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.json"
    chat = Chat("--session", "tale")
    chat.say(STORY)
    assert "saved 2 messages" in chat.say(f"/save {talk}")
    chat.say(MORE)
    kept = (home / "tale.json").read_bytes()
    assert "session tale stays as it is; what follows is kept after /save NAME" in chat.say(f"/load {talk}")
    chat.say(THIRD)
    assert (home / "tale.json").read_bytes() == kept
    assert "needs a name" in chat.say("/save")
    chat.say("/save other")
    chat.say(MORE)
    chat.leave()
    saved = {name: json.loads((home / f"{name}.json").read_text())["conversation"]["messages"] for name in ("tale", "other")}
    assert [each["content"] for each in saved["tale"][::2]] == [STORY, MORE]
    assert [each["content"] for each in saved["other"][::2]] == [STORY, THIRD, MORE], "from /save on it is kept by itself again"


@pytest.mark.slow
def test_a_system_prompt_and_settings_are_kept_though_nothing_is_said_after_them(home: Path) -> None:
    chat = Chat("--session", "tale")
    chat.say(STORY)
    chat.say("/set temp 0.25")
    chat.say("/system Speak of the sea.")
    chat.leave()
    kept = json.loads((home / "tale.json").read_text())["conversation"]
    assert kept["system"] == "Speak of the sea." and kept["settings"]["temperature"] == 0.25 and len(kept["messages"]) == 2
    before = (home / "tale.json").read_bytes()
    again = Chat("--session", "tale")
    assert "Speak of the sea." in again.say("/system")
    again.leave()
    assert (home / "tale.json").read_bytes() == before, "nothing is written where nothing was changed"
