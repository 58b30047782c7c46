"""MCP tools on the command line: `run --mcp` in a pipe, confirmation in a chat in a pseudo-terminal, `/tools`, what is saved.

The model says what is written down for it; the servers are programs of their own.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import CliRun
from scripted_model import AFTER, LAST, calls, scripted
from test_cli_chat import CTRL_C, CTRL_D, ENTER, WAITS, Chat, plain

from effllm.cli import settings

SERVER = str(Path(__file__).resolve().parent / "tool_server.py")
RAIN = "Oslo: rain, 7 degrees"
TWO = calls(("weather", {"place": "Oslo"}), ("broken", {"place": "Rome"}))
SCRIPT = {AFTER: "It rains there.", "not tools": "I know no tools.", f"'both' in {LAST}": f"Let me look.\n{TWO}",
          f"'slow' in {LAST}": calls(("slow", {"place": "Oslo"})), f"'escapes' in {LAST}": calls(("escapes", {"place": "x"})),
          f"'plain' in {LAST}": "No call is needed.", "true": calls(("weather", {"place": "Oslo"}))}
QUESTION = "[y]es, [n]o, [a]lways this tool, e[x] no to all:"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(scripted(tmp_path_factory.mktemp("model") / "scripted", SCRIPT, context=4096))


def configured(folder: Path, *manner: str, **more: object) -> str:
    path = folder / f"{'-'.join(('mcp', *manner))}.json"
    path.write_text(json.dumps({"mcpServers": {"demo": {"command": sys.executable, "args": ["-S", SERVER, *manner], **more}}}))
    return str(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    return configured(tmp_path_factory.mktemp("mcp"))


def test_a_pipe_runs_what_was_agreed_to_before(model, tmp_path, file):
    ran = CliRun("run", model, "both", "--mcp", file, "--yes-tools")
    assert (ran.code, ran.out) == (0, "Let me look.\nIt rains there.\n")
    assert f'weather(place="Oslo") → {RAIN}' in ran.err and 'broken(place="Rome") → Error: no such place' in ran.err
    ran = CliRun("run", model, "both", "--mcp", configured(tmp_path, autoApprove=["weather"]), "--json")
    document = json.loads(ran.out)
    assert document["text"] == "It rains there." and document["calls"] == [
        {"name": "weather", "server": "demo", "arguments": {"place": "Oslo"}, "result": RAIN, "is_error": False, "was_run": True},
        {"name": "broken", "server": "demo", "arguments": {"place": "Rome"}, "result": "Error: the user did not allow this call.",
         "is_error": True, "was_run": False}]
    assert "there is no terminal for questions: calls of broken are refused (--yes-tools allows all, autoApprove of demo in" in ran.err


def test_a_server_that_fails_is_a_line_and_the_answer_is_written(model, tmp_path, file):
    for manner, said in (("ends", "server demo ended with exit code 2: no key was given ("), ("empty", "server demo offers no tools (")):
        ran = CliRun("run", model, "Hello", "--mcp", configured(tmp_path, manner))
        assert (ran.code, ran.out) == (0, "I know no tools.\n") and said in ran.err and "no tools are available: answering" in ran.err
    ran = CliRun("run", model, "Hello", "--mcp", configured(tmp_path, "ends"), "--strict")
    assert (ran.code, ran.out) == (1, "") and "effllm: server demo ended with exit code 2" in ran.err and "hint: check" in ran.err


def test_tools_that_changed_are_reported_before_the_answer_continues(model, tmp_path):
    ran = CliRun("run", model, "Oslo?", "--mcp", configured(tmp_path, "changes"), "--yes-tools")
    assert (ran.code, ran.out) == (0, "It rains there.\n") and "server demo has changed its tools (new: tides; gone: broken, " in ran.err


def test_what_is_refused_before_anything_is_loaded(model, tmp_path, file, monkeypatch):
    for argv, said in ((("run", "fable", "Hi", "--mcp", file), "the chat template of fable has no tool support"),
                       (("run", model, "Hi", "--raw", "--mcp", file), "--mcp cannot be combined with --raw"),
                       (("run", model, "Hi", "--yes-tools"), "--yes-tools needs tools"),
                       (("run", model, "Hi", "--mcp", file, "--tool-rounds", "0"), "--tool-rounds 0"),
                       (("run", model, "Hi", "--mcp", str(tmp_path / "none.json")), "none.json: No such file")):
        ran = CliRun(*argv)
        assert ran.code == 2 and said in ran.err and ran.err.count("\n") == 2 and "hint: " in ran.err and not ran.out
    monkeypatch.setenv("EFFLLM_MCP", file)
    ran = CliRun("run", "fable", "Hi", "-n", "1")
    assert ran.code == 0 and "EFFLLM_MCP is ignored: the chat template of fable has no tool support" in ran.err
    assert "mcp" not in settings.known_settings() and "yes-tools" not in settings.known_settings(), "a file of a folder begins no programs"


@pytest.fixture(scope="module")
def chat(model, file, tmp_path_factory):
    """One conversation for all that is asked in a terminal."""
    running = Chat(tmp_path_factory.mktemp("state"), "chat", model, "--mcp", file, "--session", "talk")
    assert re.search(r"7 tools of demo, about \d+ tokens of every prompt", running.wait())
    yield running
    assert running.leave(CTRL_D) == 0


def answered(chat: Chat, text: str, *replies: str) -> str:
    """What is shown for a line, whose questions are answered by these keys."""
    chat.type(text + ENTER)
    shown = ""
    for keys in replies:
        chat.terminal.expect_exact(QUESTION)
        shown += plain(chat.terminal.before)
        chat.type(keys)
    chat.terminal.expect_exact(WAITS)
    return shown + plain(chat.terminal.before)


def test_each_call_is_asked_for(chat):
    shown = answered(chat, "both please", "y" + ENTER, "n" + ENTER)
    assert 'demo wants to run weather(place="Oslo")' in shown and f'weather(place="Oslo") → {RAIN}' in shown
    assert 'broken(place="Rome") was not run: the user did not allow this call.' in shown and "It rains there." in shown
    shown = answered(chat, "both again", "what?" + ENTER, "x" + ENTER)
    assert shown.count("was not run") == 2 and RAIN not in shown and "It rains there." in shown
    shown = answered(chat, "both at last", "a" + ENTER, "\x04")  # Ctrl-D is no yes
    assert f"→ {RAIN}" in shown and "broken(place=\"Rome\") was not run" in shown
    assert f"→ {RAIN}" in answered(chat, "weather"), "always"
    kept = json.loads((chat.home / "effllm" / "sessions" / "talk.json").read_text())["conversation"]["messages"]
    assert [message["role"] for message in kept[:5]] == ["user", "assistant", "tool", "tool", "assistant"]


def test_tools_are_listed_and_turned_off_by_name(chat):
    listed = chat.say("/tools")
    assert "demo: 7 tools" in listed and "weather (on, without asking)  About weather." in listed and "broken (on)" in listed
    assert "weather (off)" in chat.say("/tools off weather")
    assert "there is no tool weather" in answered(chat, "weather")
    assert "weather (on, without asking)" in chat.say("/tools on demo") and "no tool or server 'nix'" in chat.say("/tools off nix")


def test_nothing_that_a_tool_returns_reaches_the_terminal_as_a_command(chat):
    shown = answered(chat, "escapes", "y" + ENTER)
    assert "→ red <|end|><tool_call>" in shown and "owned" not in shown and "\x07" not in chat.terminal.before
    chat.say("/export " + str(chat.home / "talk.md"))
    document = (chat.home / "talk.md").read_text()
    assert f"> weather returned: {RAIN}" in document and '> called `broken({"place": "Rome"})`' in document


def test_ctrl_c_at_a_question_and_amid_a_call(chat):
    shown = answered(chat, "escapes", CTRL_C)
    assert "stopped by Ctrl-C: no more tools are called" in shown and "It rains" not in shown
    assert "No call is needed." in answered(chat, "plain")
    chat.type("slow" + ENTER)
    chat.terminal.expect_exact(QUESTION)
    chat.type("y" + ENTER)
    chat.terminal.expect_exact("calling slow")
    chat.type(CTRL_C)
    assert "slow was cancelled" in chat.wait()
    assert "It rains there." in chat.say("/continue")
