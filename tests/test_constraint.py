"""Output constrained by a schema or a grammar: the real model's output conforms, with and without drafts; allowed tokens are those that a
search of the vocabulary finds; reasoning before the answer is free; an invalid constraint is a one-line error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_session_channels import THOUGHT, write_folder
from test_session_continue import REASONS, said
from test_speculation import Ticks

import effllm
from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.constraints.constraint import lark_constraint, read_grammar_flag, read_schema_flag
from effllm.runtime.engine import Engine, Step, open_engine
from effllm.runtime.events import Notice, TextDelta
from effllm.runtime.gguf.tokenizer import load_tokenizer
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation.drafts import SuffixMatch
from effllm.runtime.templates.template import ChatTemplate
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
GPT2 = [path for parent in Path(__file__).resolve().parents if (path := parent / "shared" / "vocabs" / "gpt-2.gguf").is_file()]
SPM = [path for parent in Path(__file__).resolve().parents if (path := parent / "shared" / "vocabs" / "llama-spm.gguf").is_file()]
QUESTION, FOX = "Who is the hero?", '{"enum": ["fox"]}'
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                           "age": {"type": "integer", "minimum": 0, "maximum": 99},
                                           "kind_of_the_animal": {"enum": ["fox", "king"]}, "alive": {"type": "boolean"}},
          "required": ["name", "age", "kind_of_the_animal", "alive"], "additionalProperties": False}


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", spec="lookup")))[-1]
    engine.speculation = Speculation((SuffixMatch(),), clock=Ticks())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", spec="off")))[-1]
    yield engine
    engine.close()


@pytest.fixture
def tokenizer(engine):
    return Tokenizer.load(FABLE, engine.config)


def answered(engine: Engine, tokenizer: Tokenizer, form: str, seed: int = 1, temperature: float = 0.8, tokens: int = 400) -> Session:
    engine.reset()
    session = Session(engine, tokenizer, SamplerSettings(temperature=temperature, seed=seed), max_tokens=tokens,
                      constraint=read_schema_flag(form))
    list(session.ask(QUESTION))
    return session


# ---- the real model


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_of_its_schema_with_drafts_and_without(engine, plain, tokenizer, seed):
    held = [answered(each, tokenizer, json.dumps(PERSON), seed, temperature=0.8 if seed else 0.0).stats for each in (engine, plain)]
    assert held[0].text == held[1].text and held[0].token_ids == held[1].token_ids and held[0].finish_reason == "stop"
    found = json.loads(held[0].text)
    assert [*found] == PERSON["required"] and len(found["name"]) <= 12 and 0 <= found["age"] <= 99
    assert found["kind_of_the_animal"] in ("fox", "king") and type(found["alive"]) is bool


def test_what_leaves_no_choice_is_run_ahead(engine, tokenizer):
    """The name of a property is one guess, which is right but for how the model cuts it into tokens."""
    names = [f"the_name_of_property_number_{number}" for number in range(8)]
    schema = {"type": "object", "properties": dict.fromkeys(names, {"type": "boolean"}), "required": names, "additionalProperties": False}
    drafts = answered(engine, tokenizer, json.dumps(schema), temperature=0.0).stats.speculation
    assert drafts["accepted"] > 20 and drafts["tokens_per_pass"] > 1.3


VALUES = st.recursive(st.sampled_from([{"type": "boolean"}, {"type": "integer", "minimum": -5, "maximum": 120}, {"type": "null"},
                                       {"type": "string", "pattern": "^[a-z]{2,5}$"}, {"enum": ["a b", "ö", 3, None]}]),
                      lambda inner: st.one_of(
                          st.builds(lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(1, 2)),
                          st.dictionaries(st.sampled_from(["x", "längere", 'q"uote', "d e"]), inner, min_size=1, max_size=3).map(
                              lambda each: {"type": "object", "properties": each, "required": [*each], "additionalProperties": False})),
                      max_leaves=4)


def is_of(value: object, schema: dict) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        return [*value] == [*schema["properties"]] and all(is_of(value[name], each) for name, each in schema["properties"].items())
    if schema["type"] == "array":
        return len(value) <= schema["maxItems"] and all(is_of(each, schema["items"]) for each in value)
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if schema["type"] == "string":
        return value.isascii() and value.islower() and 2 <= len(value) <= 5
    return value is None if schema["type"] == "null" else type(value) is bool


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VALUES, st.integers(0, 2**32))
def test_answers_are_of_whatever_schema(engine, tokenizer, schema, seed):
    stats = answered(engine, tokenizer, json.dumps(schema), seed, temperature=2.0).stats
    assert stats.finish_reason == "stop" and is_of(json.loads(stats.text), schema)


def test_an_answer_that_is_cut_says_so_and_continues(engine, tokenizer):
    session = answered(engine, tokenizer, json.dumps(PERSON), tokens=7)
    engine.reset()
    session.clear()
    notices = [event.text for event in session.ask(QUESTION) if isinstance(event, Notice)]
    assert any("--schema" in each for each in notices)
    begun = session.messages[-1]["content"]
    session.max_tokens = 200
    assert not [event for event in session.continue_() if isinstance(event, Notice)]
    text = session.messages[-1]["content"]
    assert text.startswith(begun) and [*json.loads(text)] == PERSON["required"]


def test_what_was_said_otherwise_cannot_continue_as_the_form(engine, tokenizer):
    engine.reset()
    session = Session(engine, tokenizer, SamplerSettings(temperature=0), max_tokens=4, constraint=read_schema_flag("json"))
    session.messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Once upon"}]
    with pytest.raises(EffllmError, match="so far does not match --schema json"):
        list(session.continue_())
    assert session.messages[-1]["content"] == "Once upon"


def test_a_summary_is_free_and_the_next_answer_is_not(engine, tokenizer):
    session = answered(engine, tokenizer, FOX)
    assert session.messages[-1]["content"] == '"fox"'
    list(session.compact())
    list(session.ask(QUESTION))
    assert session.messages[-1]["content"] == '"fox"'


def test_the_end_of_the_form_ends_an_answer_that_ignores_ends(engine, tokenizer):
    engine.reset()
    session = Session(engine, tokenizer, SamplerSettings(temperature=0), max_tokens=50, ignore_eos=True,
                      constraint=read_schema_flag(FOX))
    list(session.ask(QUESTION))
    assert session.stats.text == '"fox"' and session.stats.finish_reason == "stop"


# ---- what may come next


def narrowed(constraint, rows: int) -> set[int]:
    logits = np.zeros(rows, np.float32)
    constraint.mask_logits(logits)
    return set(np.flatnonzero(logits == 0).tolist())


def allowed_after(vocabulary, text: str, inside: bool = True) -> set[int]:
    logits = np.zeros(vocabulary._tokenizer.vocab_size, np.float32)
    vocabulary.begin(text, continues_text=inside).mask_logits(logits)
    return set(np.flatnonzero(logits == 0).tolist())


@pytest.mark.parametrize("before", ["", "y", "ye", "yes", "no, no"])
def test_the_tokens_that_may_come_are_those_that_a_search_finds(engine, tokenizer, before):
    """Every token that goes on with one of the answers, and the end where one is whole."""
    answers = ["yes", "yesterday", "no", "no, no, never"]
    vocabulary = read_grammar_flag('root ::= "yes" | "yesterday" | "no" | "no, no, never"').compile(
        tokenizer, engine.config.vocab_size)
    expected = set(vocabulary.stop_ids) if before in answers else set()
    for number in tokenizer.vocabulary().values():
        text = tokenizer.decode([number], skip_special_tokens=True)
        if text and any(answer.startswith(before + text) for answer in answers):
            expected.add(number)
    assert allowed_after(vocabulary, before) == expected


def test_tokens_that_are_not_allowed_have_no_chance_and_broken_logits_show(engine, tokenizer):
    vocabulary = read_grammar_flag('root ::= "yes" | "no"').compile(tokenizer, engine.config.vocab_size)
    sampler = Sampler(SamplerSettings(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=3), engine.config.vocab_size)
    sampler.mask_logits = vocabulary.begin().mask_logits
    logits = np.random.default_rng(0).standard_normal(engine.config.vocab_size).astype(np.float32) * 5
    assert {sampler.sample(logits) for _ in range(300)} <= allowed_after(vocabulary, "")
    logits[7] = np.nan
    with pytest.raises(EffllmError, match="NaN"):
        sampler.sample(logits)


@pytest.mark.skipif(not SPM, reason="no vocabularies beside the checkout")
def test_the_blank_that_a_text_loses_where_it_begins_is_allowed():
    """Models of SentencePiece begin an answer with a blank that nobody sees."""
    tokenizer = load_tokenizer(SPM[0], 32_000)
    vocabulary, tokens = read_schema_flag("json").compile(tokenizer, 32_000), tokenizer.vocabulary()
    assert allowed_after(vocabulary, "", inside=False) >= {tokens["{"], tokens["▁{"]} and tokens["▁{"] not in allowed_after(vocabulary, "")
    held = vocabulary.begin()
    for token in tokenizer.encode('{"a": "fox"}', add_special_tokens=False):  # the first is ▁{
        logits = np.zeros(32_000, np.float32)
        held.mask_logits(logits)
        assert logits[token] == 0
        held.accept(token, False)
    assert held.is_whole


@pytest.mark.skipif(not GPT2, reason="no vocabularies beside the checkout")
@pytest.mark.parametrize("more", [{"multipleOf": 65536}, {"multipleOf": 80000}, {"multipleOf": 1_000_000},
                                  {"multipleOf": 30030, "minimum": 0}, {"multipleOf": 24000, "minimum": 0, "maximum": 10**6}], ids=str)
def test_a_multiple_is_written_in_tokens_of_many_digits(more):
    """GPT-2 has 1,700 of them: to see where all lead took more than the library's own limit, and ended the answer with an error."""
    tokenizer, schema, of = load_tokenizer(GPT2[0], 50_257), json.dumps({"type": "integer", **more}), more["multipleOf"]
    forms = read_schema_flag(schema), lark_constraint(f"start: %json {schema}", "--grammar", "numbers")
    for vocabulary, number in zip([form.compile(tokenizer, 50_257) for form in forms], (7 * of, 12 * of), strict=True):
        held = vocabulary.begin()
        for token in tokenizer.encode(str(number), add_special_tokens=False):
            assert token in narrowed(held, 50_257)
            held.accept(token, False)
        assert held.is_whole and narrowed(held, 50_257) >= tokenizer.stop_ids
        assert not vocabulary.begin(str(number // 10)).is_whole


# ---- reasoning


class Insisting:
    """An engine whose model wants to say one text, and the next token of it that it is allowed to."""

    def __init__(self, engine: Engine, ids: list[int]) -> None:
        self._engine, self._ids = engine, ids
        self.speculation = None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, sampler, max_tokens, stop_ids, ignore_eos=False, may_shift=True):
        for made in range(max_tokens):
            logits = np.full(self.config.vocab_size, -20, np.float32)
            for rank, token in enumerate(self._ids):
                logits[token] = max(logits[token], 20 - rank)
            token = sampler.sample(logits)
            self._ids = self._ids[self._ids.index(token) + 1 :] if token in self._ids else self._ids
            self._engine.tokens.append(token)
            yield Step(token, "stop" if token in stop_ids else "length" if made == max_tokens - 1 else None)


def reasoning_folder(folder: Path, template: str) -> Tokenizer:
    """A vocabulary that has tags of reasoning as tokens."""
    folder = write_folder(folder, [258])
    raw = json.loads((folder / "tokenizer.json").read_text())
    for number, mark in ((3, "<think>"), (4, "</think>")):  # in the place of marks of channels
        raw["added_tokens"][number] |= {"content": mark, "special": False}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder, read_config(FABLE))


def insisted(engine: Engine, tokenizer: Tokenizer, script: str, think: str = "auto") -> tuple[str, str]:
    """What is shown as reasoning and as the answer."""
    engine.reset()
    session = Session(engine, tokenizer, SamplerSettings(temperature=0), max_tokens=60, think=think, constraint=read_schema_flag(FOX))
    session.engine = Insisting(engine, tokenizer.encode(script, add_special_tokens=False))
    events = list(session.ask(QUESTION))
    return said((each for each in events if isinstance(each, TextDelta)), "thinking"), said(events)


def test_reasoning_that_the_template_opens_is_free(engine, tokenizer):
    tokenizer.template = ChatTemplate(REASONS, tokenizer.special_tokens)
    thought, answer = insisted(engine, tokenizer, 'A fox, or not.</think>\n\nIt is "fox"')
    assert thought == "A fox, or not." and answer == '"fox"'


@pytest.mark.parametrize(("think", "thought"), [("auto", THOUGHT), ("off", "")])
def test_reasoning_that_the_model_opens_is_free_unless_none_is_wanted(engine, tmp_path, think, thought):
    tokenizer = reasoning_folder(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokenizer.think_tags is not None and not tokenizer.channels
    shown, answer = insisted(engine, tokenizer, f'<think>{THOUGHT}</think>\n"fox" and so on', think)
    assert shown == thought and answer == '"fox"'


@pytest.mark.parametrize("opened", ["", "<think>"])
def test_reasoning_comes_once(engine, tmp_path, opened):
    tokenizer = reasoning_folder(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}" + opened)
    script = f'{"" if opened else "<think>"}{THOUGHT}</think><think>once more</think>"fox"'
    assert insisted(engine, tokenizer, script) == (THOUGHT, '"fox"')


def test_on_channels_the_last_message_alone_is_held(engine, tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path, [258, 257, 264]), read_config(FABLE))
    script = f'<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>It is "fox".<|return|>'
    assert insisted(engine, tokenizer, script) == (THOUGHT, '"fox"')


# ---- vocabularies, ends, the command line


@pytest.mark.parametrize("fewer", [1, 100])
def test_a_vocabulary_of_more_tokens_than_the_model_has_rows(engine, tokenizer, fewer):
    """Text models of vision-language models have no row for the image token."""
    rows = engine.config.vocab_size - fewer
    held = read_schema_flag(FOX).compile(tokenizer, rows).begin()
    for token in tokenizer.encode('"fox"', add_special_tokens=False):
        assert token in narrowed(held, rows)
        held.accept(token, False)
        assert all(each < rows for each in held.forced(8))
    assert held.is_whole and narrowed(held, rows) == {end for end in tokenizer.stop_ids if end < rows}


@pytest.mark.slow
@pytest.mark.skipif(not SPM, reason="no vocabularies beside the checkout")
def test_which_token_comes_first_does_not_matter():
    """Vocabularies are in no order, a token of blanks alone and one of nothing too."""
    tokenizer = load_tokenizer(SPM[0], 32_000)
    expected = read_schema_flag("json").compile(tokenizer, 32_000).without_space
    for first in ("▁▁▁▁", "▁", "▁the", ""):
        words = {first: tokenizer.vocabulary().get(first, 31_999), **tokenizer.vocabulary()}
        tokenizer.vocabulary = lambda words=words: words
        assert read_schema_flag("json").compile(tokenizer, 32_000).without_space.items() >= expected.items() and len(expected) > 5000


@pytest.mark.parametrize("tokens", range(1, 12))
def test_an_answer_that_was_cut_in_a_character_continues(plain, tokenizer, tokens):
    plain.reset()
    session = Session(plain, tokenizer, SamplerSettings(temperature=0), max_tokens=tokens,
                      constraint=read_grammar_flag('root ::= "日本語😀ä."'))
    list(session.ask(QUESTION))
    session.max_tokens = 50
    list(session.continue_())
    assert session.messages[-1]["content"] == "日本語😀ä."


def test_an_answer_that_speaks_of_a_mark_continues(engine, tokenizer):
    vocabulary = read_schema_flag('{"type": "string"}').compile(tokenizer, engine.config.vocab_size)
    assert vocabulary.begin('"it ends by <|end|>"').is_whole
    with pytest.raises(EffllmError, match="so far does not match"):
        vocabulary.begin('"it ends"<|end|>')


@pytest.mark.parametrize("stops", [['"age"'], []])
def test_an_answer_that_something_else_ends_says_so(plain, tokenizer, stops):
    plain.reset()
    session = Session(plain, tokenizer, SamplerSettings(seed=1), max_tokens=300, stops=stops,
                      constraint=read_schema_flag(json.dumps(PERSON)))
    notices = [event.text for event in session.ask(QUESTION) if isinstance(event, Notice)]
    assert session.stats.finish_reason == "stop" and any("before it was complete" in each for each in notices) == bool(stops)


def test_from_the_command_line_to_the_answer(user, tmp_path):
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    told = user.run("run", "fable", QUESTION, "--schema", tmp_path / "person.json", "--seed", "1")
    assert [*json.loads(told.out)] == PERSON["required"]
    told = user.run("run", "fable", "Once", "--raw", "--grammar", 'root ::= "yes" | "no"', "--json")
    assert json.loads(told.out)["text"] in ("yes", "no")
    told = user.run("run", "fable", QUESTION, "--schema", tmp_path / "person.json", "-n", "5")
    assert "the answer ended before it was complete" in told.err and told.code == 1
    for words, whole, code in ((("-n", "5"), False, 1), (("-n", "0"), False, 0), (("-n", "300"), True, 0)):
        told = user.run("run", "fable", QUESTION, "--schema", tmp_path / "person.json", "--seed", "1", "--json", *words)
        assert (json.loads(told.out)["whole"], told.code) == (whole, code), words
    assert json.loads(user.run("run", "fable", QUESTION, "-n", "5", "--json").out)["whole"] is None, "nothing was asked of it"
    told = user.run("run", "fable", QUESTION, "--schema", "nowhere.json")
    assert told.code == 2 and told.err.splitlines()[0] == "effllm: --schema: cannot read nowhere.json: No such file or directory"


@pytest.mark.slow
def test_what_was_typed_holds_against_a_setting(user):
    no = 'root ::= "no"'

    def ran(*words: str, **variables: str) -> tuple[str, str, int]:
        process = user.start("run", "fable", QUESTION, *words, **variables)
        return *process.communicate(), process.returncode

    assert json.loads(ran(EFFLLM_SCHEMA=FOX)[0]) == "fox"
    assert ran("--grammar", no, EFFLLM_SCHEMA=FOX)[0].strip() == "no"
    _, told, code = ran(EFFLLM_SCHEMA=FOX, EFFLLM_GRAMMAR=no)
    assert code == 2 and "contradict each other" in told
    _, told, code = ran(EFFLLM_SCHEMA="nowhere.json")
    assert code == 2 and told.startswith("effllm: the variable EFFLLM_SCHEMA: --schema: cannot read nowhere.json")
