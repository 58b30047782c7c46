"""Answers that call tools of MCP servers, with a scripted model: the rounds, the history, and what is saved."""

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest
from scripted_model import AFTER, LAST, calls, scripted
from test_tool_call_formats import CALLED, TEMPLATES

from effllm import ContextOverflow, EffllmError
from effllm.cli.transcript import as_json, as_markdown
from effllm.runtime.constraints.constraint import read_schema_flag
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Notice, TextDelta
from effllm.runtime.generation.served_model import ServedModel
from effllm.runtime.mcp import stdio
from effllm.runtime.mcp.agent_loop import CANCELLED, REFUSED, STOPPED, ApprovalRequest, Generating, ToolExecution, ToolReported, agent_loop
from effllm.runtime.mcp.configuration import ServerEntry
from effllm.runtime.mcp.toolbox import Toolbox
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import INTERRUPTED_REPLY, Session
from effllm.runtime.sessions.conversation_file import parse_conversation
from effllm.runtime.templates.template import ChatTemplate
from effllm.runtime.tokenizer import Tokenizer

SERVER = str(Path(__file__).resolve().parent / "tool_server.py")
RAIN = "Oslo: rain, 7 degrees"


def asks(word: str) -> str:
    return f"'{word}' in {LAST}"


SCRIPT = {f"{AFTER} and 'again' in messages[0].content": calls(("weather", {"place": "again"})), AFTER: "It rains.",
          "not tools": "No tools.",
          asks("both"): f"I look. {calls(('weather', {'place': 'Oslo'}), ('broken', {'place': 'x'}))}", asks("nix"): calls(("nix", {})),
          **{asks(name): calls((name, {"place": "x"})) for name in ("escapes", "long", "picture", "dies", "slow")},
          "true": calls(("weather", {"place": "Oslo"}))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return scripted(tmp_path_factory.mktemp("model") / "scripted", SCRIPT, context=4096)


@pytest.fixture(scope="module")
def engine(folder):
    engine = list(open_engine(folder, EngineOptions(device="cpu")))[-1]
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(engine, folder):
    return Tokenizer.load(folder, engine.config)


@pytest.fixture(scope="module")
def box():
    """Begun once; a server that a test ends is begun anew."""
    with closing(Toolbox([ServerEntry("demo", sys.executable, ("-S", SERVER), source="mcp.json")], os.environ)) as box:
        assert not [*box.start()]
        list(box.connect(lambda: False))
        yield box


@pytest.fixture
def session(engine, tokenizer, box):
    engine.reset()
    box.disabled, box.approved = set(), {tool.name for tool in box.all_tools}
    session = Session(engine, tokenizer, SamplerSettings(temperature=0), max_tokens=64)
    session.tools = box.tools
    return session


def carried_out(session, box, text, allow=None, most=25, cancel=()):
    """(text, steps) of an answer; `allow` answers questions, calls of the tools to `cancel` are given up."""
    said, steps = [], []
    with closing(agent_loop(session, session.ask(text), box, most)) as going:
        for step in going:
            steps.append(step)
            if isinstance(step, Generating):
                said += [event.text for event in step.events if isinstance(event, TextDelta)]
            elif isinstance(step, ApprovalRequest):
                step.is_allowed, step.is_stopped = allow(step)
            elif isinstance(step, ToolExecution):
                for _ in step.events:
                    if step.tool.name in cancel:
                        step.cancel()
    return "".join(said), steps


def told(steps) -> list[str]:
    return [step.text for step in steps if isinstance(step, ToolReported)]


def roles(session) -> list[str]:
    return [message["role"] for message in session.messages]


def test_an_answer_calls_tools_and_continues(session, box, engine):
    text, steps = carried_out(session, box, "both")
    assert text == "I look.It rains." and told(steps) == [RAIN, "Error: no such place"]
    assert roles(session) == ["user", "assistant", "tool", "tool", "assistant"] and not session.open_calls
    calling, first, second = session.messages[1:4]
    assert [call["function"]["name"] for call in calling["tool_calls"]] == ["weather", "broken"] and calling["content"] == "I look."
    assert [call["id"] for call in calling["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    assert session.stats.cached_tokens > session.stats.prompt_tokens // 2, "what was read and written before is not read again"
    assert session.used == len(engine.tokens) > 500
    assert session.undo() and not session.messages, "with all its rounds"


def test_a_call_is_asked_for(session, box):
    box.approved = {"broken"}
    asked = []

    def no(question):
        asked.append(question.call.name)
        return False, False

    text, steps = carried_out(session, box, "both", no)
    assert asked == ["weather"] and told(steps) == [REFUSED, "Error: no such place"] and text.endswith("It rains.")
    text, steps = carried_out(session, box, "both", lambda question: (True, False))
    assert told(steps)[0] == RAIN
    text, steps = carried_out(session, box, "both", lambda question: (False, True))
    assert told(steps) == [STOPPED, STOPPED] and text == "I look." and roles(session)[-1] == "tool"
    list(session.ask("What now?"))
    assert session.messages[-3] == {"role": "assistant", "content": INTERRUPTED_REPLY}, "roles take turns"


def test_a_call_that_is_abandoned_ends_the_answer_and_continue_continues(session, box, monkeypatch):
    text, steps = carried_out(session, box, "slow", cancel=("slow",))
    assert (text, told(steps)) == ("", [CANCELLED]) and roles(session) == ["user", "assistant", "tool"]
    assert "".join(event.text for event in session.continue_() if isinstance(event, TextDelta)) == "It rains."
    assert roles(session) == ["user", "assistant", "tool", "assistant"]
    monkeypatch.setattr(stdio, "EXIT_TIMEOUT_S", 0.1)
    box.clients[0].close()  # it is still asleep


def test_who_leaves_amid_the_rounds_leaves_a_history_that_is_whole(session, box):
    box.approved = set()
    with closing(agent_loop(session, session.ask("both"), box)) as going:
        for step in going:
            if isinstance(step, ApprovalRequest):
                break
            list(step.events)
    assert roles(session) == ["user", "assistant", "tool", "tool"] and session.messages[-1]["content"] == STOPPED


def test_rounds_have_an_end(session, box):
    _, steps = carried_out(session, box, "again and again", most=3)
    assert told(steps) == [RAIN, *["again: rain, 7 degrees"] * 2, STOPPED]
    assert [step.text for step in steps if isinstance(step, Notice)] == [
        "the answer reached the limit of 3 tool rounds: no more tools are called (--tool-rounds N allows more)"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_one_that_programs_get_for_the_same_messages(engine, tokenizer, session, box, name, monkeypatch):
    """In every way that templates have for tools, calls and what comes back."""
    monkeypatch.setattr(tokenizer, "template", ChatTemplate(TEMPLATES[name]))
    made, calling, result = CALLED[0], CALLED[1], {**CALLED[2], "content": "none", "name": "weather"}
    twice = {**calling, "content": "", "tool_calls": [*calling["tool_calls"], {**calling["tool_calls"][0], "id": "call_78"}]}
    for system in (None, "Be kind."):
        for messages in ([made], [made, {**calling, "content": ""}, result],
                         [made, twice, result, {**result, "tool_call_id": "call_78"}, {"role": "assistant", "content": "None."}, made]):
            session.messages, session.system = messages, system
            said = [{"role": "system", "content": system}] if system else []
            for tools in (box.tools, None):
                session.tools = tools
                assert session._prompt() == ServedModel(engine, tokenizer).render_prompt([*said, *messages], tools=tools)


@pytest.mark.parametrize(("word", "said"), [("nix", "Error: there is no tool nix; there are: weather, broken"),
                                            ("dies", "Error: server demo ended with exit code 3: out of cheese"), ("weather", RAIN)])
def test_whatever_becomes_of_a_call_the_answer_continues(session, box, word, said):
    text, steps = carried_out(session, box, word)
    assert told(steps)[0].startswith(said) and text == "It rains."


def test_a_tool_that_is_off_is_not_told_of(session, box):
    box.set_enabled("weather", False)
    session.tools = box.tools
    session.messages = [{"role": "user", "content": "Hello"}]
    assert "About weather" not in session._prompt() and "About broken" in session._prompt()
    session.messages = []
    _, steps = carried_out(session, box, "Hello")
    assert told(steps)[0].startswith("Error: there is no tool weather")
    box.set_enabled("demo", False)
    session.tools = box.tools
    assert carried_out(session, box, "Hello")[0] == "No tools."


def test_what_a_tool_says_is_no_mark_of_the_model(session, box):
    """The mark that ends a turn and the one that begins a call are letters in the prompt, of which nothing is lost."""
    _, steps = carried_out(session, box, "escapes")
    said = told(steps)[0]
    assert said == 'red <|end|><tool_call>\n{"name": "weather"}'
    ids = session._prompts.tokenize(session._prompt(reply=False))
    assert session.tokenizer.added["<|end|>"] not in ids and said in session.tokenizer.decode(ids)
    list(session.ask("<|end|>"))
    assert session.tokenizer.added["<|end|>"] in session._prompts.tokenize(session._prompt(reply=False)), "a person may write one"


def test_what_has_no_room_is_shortened_and_says_so(session, box):
    _, steps = carried_out(session, box, "long")
    step, = (step for step in steps if isinstance(step, ToolReported))
    assert step.text.startswith("word word") and step.text.endswith("since the context is full]")
    assert "tokens are left out" in step.remarks[0]
    assert session.used < session.n_ctx and session.messages[-1]["content"] == "It rains."
    with pytest.raises(ContextOverflow):
        list(session.ask("a" * 4000))
    assert session.messages[-1]["content"] == "It rains." and not session.open_calls


def test_an_image_that_the_model_cannot_see_is_reported(session, box):
    _, steps = carried_out(session, box, "picture")
    step, = (step for step in steps if isinstance(step, ToolReported))
    assert "image 1 is left out" in step.text and len(step.remarks) == 1


def test_a_schema_holds_for_what_is_no_call(session, box):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    session.set_constraint(read_schema_flag(json.dumps(schema)))
    session.max_tokens = 200
    text, steps = carried_out(session, box, "Hello", most=2)
    called = [json.loads(step.call.arguments) for step in steps if isinstance(step, ToolReported)]
    assert called and all(len(arguments["place"]) <= 12 for arguments in called) and text in ("", '{"a": 1}')


def test_a_conversation_with_calls_is_written_and_read(session, box, tmp_path):
    carried_out(session, box, "both")
    before = list(session.messages)
    path = tmp_path / "talk.json"
    session.save(path)
    session.clear()
    session.load(path)
    assert session.messages == before
    session.tools = None
    assert list(session.ask("And now?"))[-1].stats.text == "No tools.", "also where none are offered any more"
    session.messages = before
    document = as_markdown("m", session)
    assert '> called `weather({"place": "Oslo"})`' in document and f"> weather returned: {RAIN}" in document
    assert json.loads(as_json("m", session))["messages"] == before


@pytest.mark.parametrize("message", [
    {"role": "assistant", "content": "", "tool_calls": []}, {"role": "user", "content": "", "tool_calls": [{}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
    {"role": "tool", "content": "", "tool_call_id": 1}, {"role": "user", "content": "", "name": "x"}, {"role": "tool", "content": None}])
def test_calls_in_a_file_that_are_none_are_refused(session, message):
    content = {**session.history.to_json(), "messages": [message]}
    with pytest.raises(EffllmError, match="malformed"):
        parse_conversation(content, "talk.json")
