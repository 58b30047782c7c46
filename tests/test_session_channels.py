"""Conversations in the harmony format: reasoning on its own channel, several messages in a turn, several end tokens."""

import json
import shutil
from pathlib import Path

import pytest
from saved_tokenizers import byte_level, special

import effllm
from effllm.runtime.config import read_config
from effllm.runtime.engine import Step, open_engine
from effllm.runtime.events import TextDelta
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
MARKS = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
         "<|call|>")
TEMPLATE = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}<|end|>
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else -%}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
THOUGHT, ANSWER = "The fox is sly.", "Yes, it is."
SCRIPT = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>"


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu")))[-1]
    yield engine
    engine.close()


def write_folder(folder: Path, eos: object) -> Path:
    byte_level(*map(special, MARKS)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    shutil.copy(FABLE / "config.json", folder / "config.json")
    return folder


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.load(write_folder(tmp_path, [258, 257, 264]), read_config(FABLE))


class Scripted:
    """An engine's place: it says what it is told, a token at a time, and remembers what it was asked to read."""

    def __init__(self, engine, ids):
        self._engine, self._ids, self.prompt = engine, list(ids), []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def prefill(self, ids):
        self.prompt = list(ids)
        return self._engine.prefill(ids)

    def generate(self, sampler, max_tokens, stop_ids, ignore_eos=False, may_shift=True):
        for made in range(max_tokens):
            token = self._ids.pop(0)
            self._engine.tokens.append(token)
            yield Step(token, "stop" if token in stop_ids else "length" if made == max_tokens - 1 else None)


def begun(engine, tokenizer, script=SCRIPT, **more) -> Session:
    engine.reset()
    session = Session(engine, tokenizer, SamplerSettings(temperature=0, seed=1), max_tokens=200, **more)
    session.engine = Scripted(engine, tokenizer.encode(script, add_special_tokens=False))
    return session


def said(events, kind="answer") -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.kind == kind)


def test_every_end_that_the_model_names_ends_a_turn_and_a_message_does_not(tokenizer, tmp_path):
    ids = {mark: tokenizer.encode(mark, add_special_tokens=False)[0] for mark in MARKS}
    assert {ids[mark] for mark in ("<|return|>", "<|call|>", "<|endoftext|>")} == {258, 264, 257}
    assert tokenizer.stop_ids >= {258, 264, 257} and ids["<|end|>"] not in tokenizer.stop_ids
    assert tokenizer.channels and tokenizer.thinks
    without = Tokenizer.load(write_folder(tmp_path, None), read_config(FABLE))
    assert {258, 264} <= without.stop_ids and ids["<|end|>"] not in without.stop_ids  # the vocabulary says as much
    own = Tokenizer.load(write_folder(tmp_path, [ids["<|end|>"], 299]), read_config(FABLE))
    assert {ids["<|end|>"], 299} <= own.stop_ids  # what a file names ends it, whatever it is


def test_analysis_is_reasoning_and_final_is_the_answer(engine, tokenizer):
    session = begun(engine, tokenizer)
    events = list(session.ask("Is it?"))
    assert said(events, "thinking") == THOUGHT and said(events) == ANSWER
    assert session.messages[-1] == {"role": "assistant", "content": ANSWER} and session.stats.finish_reason == "stop"
    prompt = tokenizer.decode(session.engine.prompt, skip_special_tokens=False)
    assert prompt.endswith("<|start|>user<|message|>Is it?<|end|><|start|>assistant") and "Reasoning: medium" in prompt
    session.engine = Scripted(engine, tokenizer.encode("<|channel|>final<|message|>No.<|return|>", add_special_tokens=False))
    assert said(session.ask("Sure?")) == "No."
    prompt = tokenizer.decode(session.engine.prompt, skip_special_tokens=False)
    assert f"<|channel|>final<|message|>{ANSWER}<|end|>" in prompt and THOUGHT not in prompt


def test_a_call_of_a_tool_ends_the_turn_and_is_no_answer(engine, tokenizer):
    session = begun(engine, tokenizer, "<|channel|>commentary to=functions.sum <|constrain|>json<|message|>{}<|call|>never")
    events = list(session.ask("Sum?"))
    assert said(events) == "" and said(events, "thinking") == "{}" and session.stats.finish_reason == "stop"


@pytest.mark.parametrize(("think", "effort"), [("on", "high"), ("off", "low"), ("auto", "medium")])
def test_thinking_is_asked_for_as_an_effort(engine, tokenizer, think, effort):
    session = begun(engine, tokenizer, think=think)
    list(session.ask("Is it?"))
    assert f"Reasoning: {effort}<|end|>" in tokenizer.decode(session.engine.prompt, skip_special_tokens=False)


def test_a_system_prompt_is_where_the_template_puts_it(engine, tokenizer):
    session = begun(engine, tokenizer, system="Be brief.")
    list(session.ask("Is it?"))
    prompt = tokenizer.decode(session.engine.prompt, skip_special_tokens=False)
    assert "<|start|>developer<|message|>Be brief.<|end|><|start|>user" in prompt


def test_an_answer_may_be_cut_anywhere_and_continues(engine, tokenizer):
    script = tokenizer.encode(SCRIPT, add_special_tokens=False)
    for cut in range(1, len(script)):
        session = begun(engine, tokenizer)
        session.max_tokens = cut
        first = list(session.ask("Is it?"))
        session.max_tokens = 200
        second = list(session.continue_())
        assert session.engine.prompt[-cut:] == script[:cut], "the tokens themselves are gone on with"
        assert said(first) + said(second) == ANSWER == session.messages[-1]["content"], cut
        assert said(first, "thinking") + said(second, "thinking") == THOUGHT, cut


def test_an_answer_that_was_changed_continues_on_its_own_channel(engine, tokenizer):
    session = begun(engine, tokenizer)
    list(session.ask("Is it?"))
    session.messages[-1] = {"role": "assistant", "content": "Perhaps"}
    session.engine = Scripted(engine, tokenizer.encode(" not.<|return|>", add_special_tokens=False))
    assert said(session.continue_()) == " not." and session.messages[-1]["content"] == "Perhaps not."
    prompt = tokenizer.decode(session.engine.prompt, skip_special_tokens=False)
    assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>Perhaps")


def test_a_raw_text_is_continued_as_it_stands(engine, tokenizer):
    session = begun(engine, tokenizer, " a fox.<|return|>", raw=True)
    assert said(session.complete("Once there was")) == " a fox."
