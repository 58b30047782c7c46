"""Reasoning limited to a number of tokens: between tags and on channels, with constrained output after it, by a request and by a flag."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from server_process import MESSAGES, serving
from test_constraint import FOX, QUESTION, Insisting, reasoning_folder
from test_serve_tools import knowing_folder
from test_session_channels import write_folder
from test_session_continue import said

import effllm
from effllm.cli.options import AnswerFlags
from effllm.cli.serve import default_options
from effllm.cli.server.generation_options import NO_REASONING, reasoning_notice
from effllm.cli.server.messages_requests import MessagesRequest
from effllm.cli.server.messages_requests import chat_of as chat_of_message
from effllm.cli.server.openai_requests import ChatRequest
from effllm.cli.server.problems import Problem
from effllm.cli.server.reasoning import BUDGETS, reasoning_settings
from effllm.cli.server.responses_requests import ResponsesRequest
from effllm.cli.server.responses_requests import chat_of as chat_of_response
from effllm.runtime.config import read_config
from effllm.runtime.constraints.constraint import read_schema_flag
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Notice, TextDelta
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.sampling.reasoning_budget import ReasoningBudget
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import NOTHING_TO_LIMIT, Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LONG = "The fox is sly, and so on and on, without an end."
ENDED = "reasoning was ended after {} tokens (--reasoning-budget)"


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu")))[-1]
    yield engine
    engine.close()


def told(engine, tokenizer: Tokenizer, script: str, most: int | None, form: str | None = None) -> tuple[str, str, list[str]]:
    """Reasoning, the answer, and what is remarked, of a model that wants to say a text; vocabularies here have a token for each letter."""
    engine.reset()
    session = Session(engine, tokenizer, SamplerSettings(temperature=0), max_tokens=120, max_reasoning_tokens=most,
                      constraint=form and read_schema_flag(form))
    session.engine = Insisting(engine, tokenizer.encode(script, add_special_tokens=False))
    events = [*session.ask(QUESTION)]
    texts = [each for each in events if isinstance(each, TextDelta)]
    return said(texts, "thinking"), said(events), [each.text for each in events if isinstance(each, Notice)]


@pytest.mark.parametrize("opened", ["", "<think>"])
@pytest.mark.parametrize("most", [None, 0, 1, 7, len(LONG), len(LONG) + 1])
def test_between_tags_it_is_closed_after_so_many(engine, tmp_path, opened, most):
    tokenizer = reasoning_folder(tmp_path, PLAIN + opened)
    script = f"{'' if opened else '<think>'}{LONG}</think>#"
    thought, answer, remarks = told(engine, tokenizer, script, most)
    if most is None or most > len(LONG):
        assert (thought, answer, remarks) == (LONG, "#", [])
    else:
        assert (thought, answer) == (LONG[:most].rstrip(), "#") and remarks == [ENDED.format(most)]


def test_a_form_holds_the_answer_after_it(engine, tmp_path):
    tokenizer = reasoning_folder(tmp_path, PLAIN)
    assert told(engine, tokenizer, f"<think>{LONG}</think>It is \"fox\"", 3, FOX)[:2] == (LONG[:3], '"fox"')


def test_on_channels_the_next_message_is_not_reasoning_again(engine, tmp_path):
    """Of a model that was cut off and would reason on; whether it answers or calls it may choose."""
    tokenizer = Tokenizer.load(write_folder(tmp_path, [258, 257, 264]), read_config(FABLE))
    script = f"<|channel|>analysis<|message|>{LONG}<|end|><|start|>assistant<|channel|>final<|message|>#<|return|>"
    assert told(engine, tokenizer, script, 9) == (LONG[:9], "#", [ENDED.format(9)])
    assert told(engine, tokenizer, script, len(LONG) + 1) == (LONG, "#", [])

    think = SimpleNamespace(is_thinking=True)
    limit, ids = ReasoningBudget(0, tokenizer, think), partial(tokenizer.encode, add_special_tokens=False)
    for token in ids("<|end|><|start|>assistant"):
        assert allowed(limit, tokenizer) == {token}
        limit.accept(token)
    think.is_thinking = False
    everything = set(range(tokenizer.vocab_size))
    assert allowed(limit, tokenizer) == everything
    for token in ids("<|channel|>"):
        limit.accept(token)
    assert allowed(limit, tokenizer) == everything - {*ids("analysis")[:1]}
    limit.accept(ids("f")[0])
    assert allowed(limit, tokenizer) == everything


def allowed(limit: ReasoningBudget, tokenizer: Tokenizer) -> set[int]:
    """The tokens that it leaves."""
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    limit.mask_logits(logits)
    return {*np.flatnonzero(np.isfinite(logits)).tolist()}


def of_chat(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({"messages": [], **fields}))


@pytest.mark.parametrize(("fields", "switch", "effort", "budget"), [
    ({}, None, None, None), *(({name: 5}, None, None, 5) for name in BUDGETS), *(({name: 0}, False, None, 0) for name in BUDGETS),
    ({"thinking_budget": -1}, None, None, -1), ({"enable_thinking": False}, False, None, None), ({"think": True}, True, None, None),
    ({"think": "low"}, True, "low", None), ({"reasoning": {"effort": "none"}}, False, "none", None),
    ({"reasoning": {"effort": "high"}}, True, "high", None), ({"reasoning": {"enabled": False}}, False, None, None),
    ({"reasoning": {"max_tokens": 7}}, None, None, 7), ({"thinking": {"type": "disabled"}}, False, None, None),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True, None, 9), ({"thinking": {"type": "auto"}}, None, None, None),
    ({"reasoning": "off"}, False, "none", None), ({"reasoning": True}, True, "medium", None), ({"reasoning": "low"}, True, "low", None),
    ({"thinking": False}, False, None, None),
    ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, True, "low", None),
    ({"chat_template_kwargs": {"enable_thinking": True}, "think": False}, True, None, None)])
def test_how_programs_ask_for_reasoning(fields, switch, effort, budget):
    made = reasoning_settings(of_chat(**fields), fields.get("chat_template_kwargs", {}))
    assert (made.switch, made.effort, made.budget) == (switch, effort, budget)


def test_other_apis_ask_for_it_too():
    asked = MessagesRequest(max_tokens=1, messages=[], thinking={"type": "enabled", "budget_tokens": 9})
    chat = chat_of_message(asked)[0]
    assert reasoning_settings(chat, chat.chat_template_kwargs).budget == 9
    assert reasoning_settings(chat, chat.chat_template_kwargs).switch is True
    chat = chat_of_response(ResponsesRequest(input="x", reasoning={"effort": "low"}, thinking_budget_tokens=4))[0]
    assert (reasoning_settings(chat, {}).budget, reasoning_settings(chat, {}).effort) == (4, "low")
    for fields, param in (({"thinking_budget": -2}, "thinking_budget"), ({"reasoning": {"max_tokens": -9}}, "reasoning.max_tokens")):
        with pytest.raises(Problem, match="0 or more, or -1") as raised:
            reasoning_settings(of_chat(**fields), {})
        assert raised.value.param == param


def test_a_model_that_does_not_reason_is_told_of_once(engine):
    """In a conversation, by a flag of a server, which answers nothing by it then; a setting for all models is nothing to this one."""
    engine.reset()
    session = Session(engine, Tokenizer.load(FABLE, engine.config), SamplerSettings(temperature=0), max_tokens=2, max_reasoning_tokens=5)
    told = [[each.text for each in session.ask(QUESTION) if isinstance(each, Notice)] for _ in range(2)]
    assert told == [[NOTHING_TO_LIMIT], []]
    notes = []
    for from_settings, thinks, most, said_ in (((), False, None, [NOTHING_TO_LIMIT]), ((), True, 5, []),
                                         (("reasoning_budget",), False, None, []), (("reasoning_budget",), True, 5, [])):
        answer = AnswerFlags(reasoning_budget=5, from_settings=frozenset(from_settings))
        wish = default_options(answer, SamplerSettings(), None, thinks, SimpleNamespace(note=notes.append))
        assert wish.max_reasoning_tokens == most and notes == said_
        notes.clear()


@pytest.mark.parametrize(("fields", "is_told"), [
    ({}, False), ({"thinking_budget": 0}, False), ({"thinking_budget": -1}, False), ({"reasoning_effort": "none"}, False),
    ({"enable_thinking": False}, False), *(({name: 9}, True) for name in BUDGETS), ({"reasoning_effort": "low"}, True),
    ({"reasoning": {"max_tokens": 7}}, True), ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True), ({"think": True}, True),
    ({"chat_template_kwargs": {"enable_thinking": True}}, True)])
def test_a_request_for_reasoning_that_there_is_none_of(fields, is_told):
    tokenizer = SimpleNamespace(thinks=False, template=SimpleNamespace(variables=frozenset()))
    assert reasoning_notice(of_chat(**fields), tokenizer) == (NO_REASONING if is_told else None)
    assert reasoning_notice(of_chat(**fields), SimpleNamespace(thinks=True, template=None)) is None
    knows = SimpleNamespace(thinks=False, template=SimpleNamespace(variables=frozenset({"reasoning_effort"})))
    assert reasoning_notice(of_chat(reasoning_effort="low"), knows) is None  # which its template is told


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The packaged model, behind an opening tag, reasons without an end: of what it would say the beginning comes."""
    folder = Path(knowing_folder(tmp_path_factory.mktemp("model") / "thinker"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    with serving("--reasoning-budget", "12", model=str(folder)) as served:
        yield served


def test_a_request_and_a_flag_of_the_server(server):
    def thought(**fields: object) -> tuple[str, str]:
        message = server.chat(max_tokens=40, **fields).json["choices"][0]["message"]
        return message.get("reasoning_content") or "", message["content"]

    whole, nothing = thought(thinking_budget_tokens=-1)
    assert not nothing
    usual, answer = thought()
    assert answer and whole.startswith(usual) and len(usual) < len(whole)
    fewer, answer = thought(thinking_token_budget=3)
    assert answer and usual.startswith(fewer) and len(fewer) < len(usual)
    assert thought(thinking_budget=0)[0] == ""
    blocks = server.message(max_tokens=40, thinking={"type": "enabled", "budget_tokens": 3}).json["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"] and blocks[0]["thinking"] == fewer
    streamed = server.chat(MESSAGES, max_tokens=40, stream=True, thinking_budget_tokens=3).events
    deltas = [event["choices"][0]["delta"] for event in streamed]
    assert "".join(each.get("reasoning_content") or "" for each in deltas) == fewer
    server.wait_for_output(ENDED.format(12))
    assert server.chat(thinking_budget_tokens=-7).error["param"] == "thinking_budget_tokens"


def test_a_stop_string_ends_the_answer_and_not_its_reasoning(server):
    """In every API, whole and as a stream."""
    message = server.chat(max_tokens=40).json["choices"][0]["message"]
    thought, answer = message["reasoning_content"], message["content"]
    within = next(word for word in thought.split() if len(word) > 2 and word not in answer)
    stop = answer[8:14]
    assert stop not in answer[:13] and stop in answer
    expected = thought, answer[: answer.index(stop)]
    choice, = server.chat(max_tokens=40, stop=[within, stop]).json["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"], choice["finish_reason"]) == (*expected, "stop")
    deltas = [event["choices"][0]["delta"] for event in server.chat(max_tokens=40, stop=[within, stop], stream=True).events]
    assert tuple("".join(each.get(name) or "" for each in deltas) for name in ("reasoning_content", "content")) == expected
    items = server.respond(max_output_tokens=40, stop=[within, stop]).json["output"]
    assert tuple(item["content"][0]["text"] for item in items) == expected
    made = server.message(max_tokens=40, stop_sequences=[within, stop]).json
    assert tuple(block.get("thinking", block.get("text")) for block in made["content"]) == expected and made["stop_sequence"] == stop
    asked = {"messages": MESSAGES, "stream": False, "options": {"temperature": 0, "num_predict": 40, "stop": [within, stop]}}
    said_ = server.request("POST", "/api/chat", asked).json["message"]
    assert (said_["thinking"], said_["content"]) == expected
