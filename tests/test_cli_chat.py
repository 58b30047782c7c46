"""A chat as a user sees it: the real program in a pseudo-terminal with the real model, keys typed and output read back.

prompt_toolkit switches bracketed paste on when it waits for a line and off when it has one: what stands between is the answer.
"""

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pexpect
import psutil
import pytest
from endless_model import endless

NUMBERS = count()
WAITS, HAS_LINE = "\x1b[?2004h", "\x1b[?2004l"
TIMEOUT_S = 90
ENTER, CTRL_C, CTRL_D, ALT_ENTER, UP, TAB = "\r", "\x03", "\x04", "\x1b\r", "\x1b[A", "\t"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")
STORY = "Tell me a story about a fox."


class Chat:
    """A running `effllm` in a terminal of 100 columns whose state lives in `home`."""

    def __init__(self, home: Path, *argv: str, **variables: str) -> None:
        self.home = home
        environment = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(home), **variables}
        self.terminal = pexpect.spawn(sys.executable, ["-P", "-m", "effllm", *argv], env=environment, encoding="utf-8", timeout=TIMEOUT_S,
                                      dimensions=(40, 100))

    def wait(self) -> str:
        """Until the next line can be typed; what was shown before, without escape codes."""
        self.terminal.expect_exact(WAITS)
        return plain(self.terminal.before)

    def say(self, keys: str) -> str:
        """Type a line; the answer to it. The program waits for it, so pexpect need not pause before it types, a twentieth of a second."""
        pause, self.terminal.delaybeforesend = self.terminal.delaybeforesend, None
        self.type(keys + ENTER)
        self.terminal.delaybeforesend = pause
        self.terminal.expect_exact(HAS_LINE)
        return self.wait()

    def begin(self, keys: str) -> None:
        """Type a line, until some words of its answer are there."""
        self.type(keys + ENTER)
        self.terminal.expect_exact(HAS_LINE)
        self.terminal.expect(r"\S+ \S+ \S+ \S+ \S+ \S+")

    def type(self, keys: str) -> None:
        self.terminal.send(keys)

    def leave(self, keys: str) -> int:
        """Type what ends the program; its exit code."""
        self.type(keys)
        self.terminal.expect(pexpect.EOF)
        self.last = plain(self.terminal.before)
        self.terminal.wait()  # else `close` ends a program that is slow to go, by a signal
        self.terminal.close()
        return self.terminal.exitstatus

    def saved(self, name: str = "") -> dict:
        """The conversation as it is stored, under a name that nothing has."""
        name = name or f"chat-{next(NUMBERS)}"
        assert f"as {name}" in self.say(f"/save {name}")
        return json.loads((self.home / "effllm" / "sessions" / f"{name}.json").read_text())["conversation"]

    def used(self) -> int:
        return int(re.search(r"context (\d+) of 2048 tokens", self.say("/show"))[1])


def plain(text: str) -> str:
    return ESCAPES.sub("", text).replace("\r\n", "\n")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def chat(home: Path) -> Iterator[Chat]:
    """One conversation for the tests below; each begins with an empty history."""
    running = Chat(home, "chat", "fable", "--temp", "0", "--seed", "5", "-n", "24")
    assert "fable, context 2048 tokens" in running.wait()
    yield running
    assert running.leave(CTRL_D) == 0


@pytest.fixture
def endless_chat(tmp_path: Path) -> Chat:
    """A conversation whose answers have no end."""
    running = Chat(tmp_path, "chat", str(endless(tmp_path / "endless")), "--seed", "5", "--overflow", "shift")
    running.wait()
    return running


@pytest.fixture(autouse=True)
def _cleared(request: pytest.FixtureRequest) -> None:
    if "chat" in request.fixturenames:
        running = request.getfixturevalue("chat")
        running.say("/clear")
        running.say("/set temp 0")


def test_turns_are_answered_and_only_what_is_new_is_read(chat: Chat) -> None:
    first = chat.say(STORY)
    assert len(first.split()) > 8 and "stopped after 24 tokens (-n)" in first
    assert "cached" not in chat.say("/stats")
    used = chat.used()
    assert used > 24
    assert chat.say("And then?").split() != first.split()
    cached = re.search(r"prompt (\d+) tokens, (\d+) of them cached", chat.say("/stats"))
    assert cached and int(cached[2]) >= used - 1 > 24, "the first turn was read again"
    roles = [message["role"] for message in chat.saved()["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"]


def test_ctrl_c_stops_an_answer_and_keeps_what_was_written(endless_chat: Chat) -> None:
    endless_chat.begin(STORY)
    endless_chat.type(CTRL_C)
    assert "stopped by Ctrl-C after" in endless_chat.wait()
    said = endless_chat.saved()["messages"][-1]
    assert said["role"] == "assistant" and len(said["content"]) > 20
    endless_chat.say("/set predict 24")
    endless_chat.say("/set temp 0")
    assert "stopped after 24 tokens" in endless_chat.say("And then?"), "the chat goes on after a stopped answer"
    assert endless_chat.leave(CTRL_D) == 0


def test_ctrl_c_at_the_prompt_empties_the_line(chat: Chat) -> None:
    chat.type("half a thought" + CTRL_C)
    chat.terminal.expect_exact(HAS_LINE)
    assert "Ctrl-D or /exit quits" in chat.wait()
    chat.type("another one" + CTRL_C)
    chat.terminal.expect_exact(HAS_LINE)
    assert "Ctrl-D or /exit quits" in chat.wait(), "a line was typed since: this empties it, and does not leave"
    assert chat.saved()["messages"] == []


def test_colours_in_text_that_is_pasted_without_brackets_are_no_mouse(chat: Chat) -> None:
    """A terminal that knows no brackets types a paste: a colour then looks like an old report of the mouse."""
    shown = chat.say("a \x1b[31mred\x1b[0m fox")
    assert "Unhandled" not in shown and "Press ENTER" not in shown
    assert chat.saved()["messages"][0]["content"] == "a red fox"


def test_an_answer_that_is_at_its_end_is_not_continued_in_silence(chat: Chat) -> None:
    chat.say("/set predict -1")
    chat.say("/set temp 0.3")
    before, said = None, chat.say(STORY)
    while (now := chat.saved()["messages"]) != before:
        assert "at its end" not in said
        before, said = now, chat.say("/continue")
    assert said.strip() == "the answer is complete: the model adds nothing (/regen writes another one)"
    chat.say("/set predict 24")


@pytest.mark.parametrize("keys", [
    "one\\" + ENTER + "two", "one" + ALT_ENTER + "two", '"""one' + ENTER + 'two"""', "\x1b[200~one\ntwo\x1b[201~"],
    ids=["backslash", "alt-enter", "quotes", "paste"])
def test_several_lines_are_one_message(chat: Chat, keys: str) -> None:
    chat.say(keys)
    assert chat.saved()["messages"][0] == {"role": "user", "content": "one\ntwo"}


def test_regen_undo_continue(chat: Chat) -> None:
    answer = chat.say(STORY)
    assert chat.say("/regen") == answer, "greedy: the same question has the same answer"
    assert len(chat.saved()["messages"]) == 2
    before = chat.saved()["messages"][-1]["content"]
    chat.say("/continue")
    assert chat.saved()["messages"][-1]["content"].startswith(before) and len(chat.saved()["messages"][-1]["content"]) > len(before)
    assert "removed the last" in chat.say("/undo")
    assert chat.saved()["messages"] == []
    for command in ("/undo", "/regen", "/continue", "/compact"):
        assert "the conversation is empty" in chat.say(command), command


def test_settings_change_what_follows(chat: Chat) -> None:
    listed = chat.say("/set")
    for name in ("temp", "top-k", "repeat-penalty", "seed", "predict", "think", "markdown"):
        assert re.search(rf"^\s*{name} ", listed, re.MULTILINE), name
    assert "temp is 0.5" in chat.say("/set temp 0.5") and "temp is 0.5" in chat.say("/set temp")
    assert "schema is json" in chat.say("/set format json") and "schema is off" in chat.say("/set schema off")
    assert "cannot read nowhere" in chat.say("/set grammar nowhere") and "grammar is off" in chat.say("/set grammar")
    assert "grammar is set" in chat.say('/set grammar root ::= "yes"') and "grammar is off" in chat.say("/set grammar off")
    assert "reasoning-budget is 64" in chat.say("/set reasoning-budget 64") and "-2 is out of range" in chat.say("/set reasoning-budget -2")
    assert "did you mean temp?" in chat.say("/set tmep 1")
    assert "/set schema off" in chat.say("/set noformat") and "lines break between words" in chat.say("/set nowordwrap")
    assert "file history" in chat.say("/set nohistory") and "chat MODEL --stats" in chat.say("/set quiet")
    assert "top-k takes a whole number, not 'many'" in (said := chat.say("/set top-k many")) and "hint: /set top-k 50" in said
    assert "hint: /set seed 5" in chat.say("/set seed x") and "hint: /set reasoning-budget 64" in chat.say("/set reasoning-budget x")
    assert "top-p must be above 0 and at most 1 (off), not 7.0" in (said := chat.say("/set top-p 7")) and "hint: /set top-p " in said
    assert all("seed is random" in chat.say(f"/set seed {value}") for value in ("-1", "random"))
    assert "seed is 5" in chat.say("/set seed 5")
    assert "dry-multiplier is 0.8" in chat.say("/set dry_multiplier 0.8") and "top-nsigma is 2.0" in chat.say("/set top_n_sigma 2")
    assert 'dry-sequence-breaker is \\n : " *' in chat.say("/set dry-sequence-breaker")
    assert "dry-sequence-breaker is \\n fox" in chat.say("/set dry-sequence-breaker \\n fox")
    assert "dry-sequence-breaker is none" in chat.say("/set dry_sequence_breakers none")
    assert "xtc-threshold must be" in chat.say("/set xtc-threshold 3")
    assert 'stop is "END" "\\n\\n"' in chat.say('/set parameter stop END "\\n\\n"') and "is not a quoted string" in chat.say('/set stop "a')
    said = chat.say('/set stop ""')
    assert "a stop string is empty" in said and "/set stop END" in said and "--stop" not in said
    assert 'stop is "END"' in chat.say("/set stop")
    assert 'stop is "e"' in chat.say('/set stop "e"') and "e" not in chat.say(STORY).splitlines()[-1]
    assert "stop is off" in chat.say("/set stop off")
    chat.say("/set dry-multiplier 0")
    chat.say("/set top-nsigma -1")
    chat.say("/set temp 0")
    chat.say("/set predict 3")
    assert "stopped after 3 tokens" in chat.say(STORY)
    chat.say("/set predict 24")


def test_settings_are_known_by_ollamas_names_too(chat: Chat) -> None:
    assert "temp is 0.7" in chat.say("/set parameter temperature 0.7") and "top-k is 7" in chat.say("/set top_k 7")
    assert "predict is 24" in chat.say("/set num_predict 24")
    assert "predict is 24" in chat.say("/set n 24")
    assert "/system TEXT" in chat.say("/set system be kind")
    assert all("effllm chat MODEL -c" in chat.say(f"/set {name} 4096") for name in ("num_ctx", "ctx"))
    assert "--kv is set at the start" in chat.say("/set kv 4bit") and "effllm chat MODEL" in chat.say("/model llama3")
    chat.say("/set temp 0")


def test_the_system_prompt_can_be_set_shown_and_dropped(chat: Chat) -> None:
    assert "no system prompt" in chat.say("/system")
    assert "system prompt: Speak of the sea." in chat.say("/system Speak of the sea.")
    assert chat.saved()["system"] == "Speak of the sea."
    assert "no system prompt" in chat.say("/system off")


def test_saved_chats_come_back(chat: Chat) -> None:
    chat.say(STORY)
    kept = chat.saved("tale")["messages"]
    chat.say("/clear")
    assert "there is no session 'tail'" in chat.say("/load tail") and "tale" in chat.say("/load tail")
    assert re.search(r"session tale: 2 messages, \d+ tokens restored", chat.say("/load tale"))
    assert chat.saved()["messages"] == kept
    assert "saved 2 messages to" in chat.say(f"/save {chat.home}/tale.json")
    assert "loaded 2 messages" in chat.say(f"/load {chat.home}/tale.json")
    assert "needs a name without --session" in chat.say("/save")
    assert f"there is no file {chat.home}/gone.json" in chat.say(f"/load {chat.home}/gone.json")
    assert "effllm:" in chat.say("/save /proc/nowhere/all.json")


def test_a_full_context_is_reported_and_the_chat_continues(chat: Chat) -> None:
    long = "word " * 1500
    answer = chat.say("\x1b[200~" + long + "\n" + long + "\x1b[201~")
    assert "effllm: the prompt has" in answer and "2048" in answer
    assert chat.saved()["messages"] == []
    assert "stopped after 24 tokens" in chat.say(STORY)


def test_commands_are_listed_completed_and_corrected(chat: Chat) -> None:
    listed = chat.say("/help")
    for name in ("help", "exit", "bye", "clear", "regen", "undo", "compact", "system", "set", "show", "stats", "save", "load", "edit",
                 "file", "copy", "export", "retry", "continue"):
        assert f"/{name}" in listed, name
    assert "did you mean /regen?" in chat.say("/regne") and "/regen, /retry" in chat.say("/help regenerate")
    for typed, meant in (("/temp 0.1", "/set temp 0.1"), ("/temperature 0", "/set temp 0"), ("/top_k", "/set top-k"),
                         ("/think on", "/set think on")):
        assert f"there is no command {typed.split()[0]}, did you mean {meant}?" in chat.say(typed)
    chat.type("/sho" + TAB)
    chat.terminal.expect("/sho.*w")
    assert "model fable: llama" in chat.say("")
    assert chat.say(" /clear is a word here").strip(), "a space before the slash sends the line to the model"


def test_history_is_private_and_comes_back(home: Path) -> None:
    first = Chat(home, "chat", "fable", "-n", "4", "--temp", "0")
    first.wait()
    first.say("an unusual question")
    assert first.leave("/bye" + ENTER) == 0
    path = home / "effllm" / "history"
    assert "an unusual question" in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    second = Chat(home, "run", "fable", "-n", "4", "--temp", "0")  # without a prompt, at a terminal: a chat
    second.wait()
    second.say(UP + UP)
    assert second.saved("again")["messages"][0]["content"] == "an unusual question"
    second.type(CTRL_C)
    second.terminal.expect_exact(HAS_LINE)
    second.wait()
    assert second.leave(CTRL_C) == 130, "the second Ctrl-C in a row leaves"


def test_a_history_that_cannot_be_written_is_one_remark(tmp_path: Path) -> None:
    (tmp_path / "effllm").mkdir()
    (tmp_path / "effllm" / "history").symlink_to("/dev/full")
    chat = Chat(tmp_path, "chat", "fable", "-n", "4", "--temp", "0")
    chat.wait()
    assert "input history is not saved" in chat.say(STORY)
    again = chat.say("And then?")
    assert "not saved" not in again and "stopped after 4 tokens" in again
    assert chat.leave(CTRL_D) == 0 and "Traceback" not in chat.last


def test_a_summary_takes_the_place_of_the_conversation_or_nothing_does(chat: Chat) -> None:
    chat.say(STORY)
    before = chat.saved()["messages"]
    answer = chat.say("/compact")
    assert "(-n)" not in answer and len(answer.split()) > 24, "the 24 tokens of an answer are no limit of a summary"
    assert ("the conversation is now this summary" in answer) == (chat.saved()["messages"] != before)
    assert len(chat.saved()["messages"]) == 2
    assert "stopped after 24 tokens" in chat.say("And then?"), "the limit of the answers is still theirs"


@pytest.mark.slow
def test_a_summary_that_is_stopped_leaves_the_conversation_as_it_was(endless_chat: Chat) -> None:
    endless_chat.say("/set predict 24")
    endless_chat.say(STORY)
    before = endless_chat.saved()["messages"]
    endless_chat.begin("/compact")
    endless_chat.type(CTRL_C)
    assert "the history is unchanged" in endless_chat.wait()
    assert endless_chat.saved()["messages"] == before
    assert endless_chat.leave(CTRL_D) == 0


@pytest.mark.slow
def test_another_ctrl_c_after_a_stopped_answer_leaves(endless_chat: Chat) -> None:
    for line in (STORY, "And then?"):
        endless_chat.begin(line)
        endless_chat.type(CTRL_C)
        assert re.search(r"stopped by Ctrl-C after \d+ tokens; Ctrl-C again quits\n", endless_chat.wait())
    endless_chat.type("half a thought" + CTRL_C)
    endless_chat.terminal.expect_exact(HAS_LINE)
    endless_chat.wait()
    endless_chat.begin("/regen")
    endless_chat.type(CTRL_C + CTRL_C)  # as like as not one signal
    endless_chat.terminal.expect([re.escape(WAITS), pexpect.EOF])
    assert endless_chat.terminal.after is pexpect.EOF or endless_chat.leave(CTRL_C) == 130


def test_words_after_a_command_that_takes_none_are_answered(chat: Chat) -> None:
    said = chat.say("/undo 2")
    assert "/undo takes no arguments, not '2'" in said and "the conversation is empty" not in said
    assert "/exit takes no arguments" in chat.say("/exit now"), "it stays"
    assert "layers on" in (shown := chat.say("/show info")) and "6 layers, weights 11.01 MiB" in shown
    assert "--template" in chat.say("/show template")
    assert chat.say("/help set").split()[0] == "/set" and "there is no command /sett, did you mean /set?" in chat.say("/help sett")
    assert "-n 0 leaves no room for an answer" in chat.say("/set predict 0") and "-n -5 is out of range" in chat.say("/set predict -5")
    assert "predict is 24" in chat.say("/set predict")


def test_a_chat_of_empty_answers_does_not_begin(tmp_path: Path) -> None:
    assert "-n 0 leaves no room for an answer" in (refused := Chat(tmp_path, "chat", "fable", "-n", "0")).terminal.read()
    refused.terminal.close()
    assert refused.terminal.exitstatus == 2


def test_without_a_model_fable_is_offered(tmp_path: Path) -> None:
    asked = Chat(tmp_path, "run")
    asked.terminal.expect(r"fable is packaged with\s+effllm and works offline\. Use it\? \[Y/n\] ")
    assert asked.leave("n\r") == 2
    asked = Chat(tmp_path, "run")
    asked.terminal.expect_exact("[Y/n] ")
    asked.type(ENTER)
    assert "fable, context" in asked.wait()
    assert asked.leave(CTRL_D) == 0


def test_what_is_typed_during_an_answer_waits(endless_chat: Chat) -> None:
    endless_chat.say("/set predict 600")  # long enough to type something, however fast the machine is
    endless_chat.type(STORY + ENTER)
    endless_chat.terminal.expect_exact(HAS_LINE)
    endless_chat.type("/stats" + ENTER)
    assert "/stats" not in endless_chat.wait(), "it was echoed into the answer"
    endless_chat.terminal.expect_exact(HAS_LINE)
    assert "first token" in endless_chat.wait()
    assert endless_chat.leave(CTRL_D) == 0


@pytest.mark.slow
@pytest.mark.parametrize("line", ["/stats", "Tell me of fox {}."])
def test_a_long_chat_takes_no_more_memory_a_line(tmp_path: Path, line: str) -> None:
    """The first hundred lines fill Python's own stores, 20 to 60 KiB a line, and the next some; what goes on growing would be ours."""
    running = Chat(tmp_path, "chat", "fable", "-n", "1", "--temp", "0", "--overflow", "shift")
    running.wait()
    process, seen = psutil.Process(running.terminal.pid), []
    for number in range(500):
        running.say(line.format(number))
        if number in (299, 499):
            seen.append(process.memory_info().rss)
    assert seen[1] - seen[0] < 200 * (4 << 10), seen
    assert running.leave(CTRL_D) == 0
