"""Stateless chat requests (all messages each time) on the real model: what reaches the template, what of the cache is reused, and that
nothing leaks from one request into the next."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import effllm
from effllm import ContextOverflow, EffllmError, UsageError
from effllm.runtime.constraints.constraint import read_grammar_flag, read_schema_flag
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Done, Notice, Progress, PromptRead, TextDelta
from effllm.runtime.generation.served_model import GenerationOptions, ServedModel
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.templates.prompt_builder import NO_SYSTEM_ROLE, NO_TEMPLATE
from effllm.runtime.templates.template import ChatTemplate
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tool_calls.tool_calling import tools_of

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
QUESTION = "Tell me a story about the fox and the king."
GREEDY = GenerationOptions(SamplerSettings(temperature=0), max_tokens=24)
ASKED = {"role": "user", "content": QUESTION}
SHOW_ALL = "{{ {'messages': messages, 'tools': tools, 'mood': mood, 'think': enable_thinking} | tojson }}"
SHOW_CONTENT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu")))[-1]
    yield engine
    engine.close()


@pytest.fixture
def tokenizer(engine):
    engine.reset()
    return Tokenizer.load(FABLE, engine.config)


@pytest.fixture
def replies(engine, tokenizer):
    return ServedModel(engine, tokenizer)


def text_of(events) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.kind == "answer")


def read_by_model(replies, monkeypatch, *messages, template=SHOW_CONTENT, **more) -> str:
    """The prompt that is made of messages by a template."""
    replies.tokenizer.template = ChatTemplate(template)
    seen = []
    monkeypatch.setattr(replies._prompts, "tokenize", lambda prompt: seen.append(prompt) or [1, 2, 3])
    list(replies.reply(messages, replace(GREEDY, max_tokens=0), **more))
    return seen[0]


def test_an_answer_is_that_of_a_conversation(replies, engine, tokenizer):
    events = list(replies.reply([{"role": "system", "content": "Be brief."}, ASKED], GREEDY))
    engine.reset()
    session = Session(engine, tokenizer, GREEDY.settings, system="Be brief.", max_tokens=24)
    assert text_of(events) == text_of(session.ask(QUESTION)) == events[-1].stats.text != ""
    assert isinstance(events[-1], Done) and events[-1].stats.token_ids == session.stats.token_ids


def test_what_the_cache_holds_of_a_conversation_is_not_read_again(replies):
    asked = {"role": "user", "content": QUESTION * 3}
    first = list(replies.reply([asked], GREEDY))[-1].stats
    assert first.cached_tokens == 0
    messages = [asked, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
    second = list(replies.reply(messages, GREEDY))[-1].stats
    assert second.cached_tokens >= first.prompt_tokens + len(first.token_ids) - 1
    assert 0 < second.prompt_tokens - second.cached_tokens < 15
    again = list(replies.reply([asked], GREEDY))[-1].stats
    assert again.text == first.text and again.cached_tokens == first.prompt_tokens - 17  # no few tokens alone, which another kernel takes
    assert list(replies.complete("Once upon a time", GREEDY))[-1].stats.cached_tokens <= 1


def test_nothing_of_a_request_leaks_into_the_next(replies):
    plain = list(replies.reply([ASKED], GREEDY))[-1].stats
    held = GenerationOptions(SamplerSettings(temperature=1.5, seed=3, frequency_penalty=1.0), stops=("e",), max_tokens=9, ignore_eos=True,
                             constraint=read_grammar_flag('root ::= "yes" | "no"'))
    assert text_of(replies.reply([ASKED], held)) in ("y", "yes", "no")
    after = list(replies.reply([ASKED], GREEDY))[-1].stats
    assert (after.text, after.token_ids) == (plain.text, plain.token_ids)
    seeded = replace(GREEDY, settings=SamplerSettings(temperature=1.0, seed=5))
    assert text_of(replies.reply([ASKED], seeded)) == text_of(replies.reply([ASKED], seeded)) != plain.text


def test_one_form_after_the_other(replies):
    schema = read_schema_flag('{"type": "object", "properties": {"fox": {"type": "boolean"}}, "required": ["fox"], '
                              '"additionalProperties": false}')
    for _ in range(2):
        assert set(json.loads(text_of(replies.reply([ASKED], replace(GREEDY, constraint=schema))))) == {"fox"}
        assert text_of(replies.reply([ASKED], replace(GREEDY, constraint=read_grammar_flag('root ::= "king"')))) == "king"


def test_messages_and_variables_reach_the_template_as_they_are(replies, monkeypatch):
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {"role": "assistant", "content": "2", "reasoning_content": "hm"}, {"role": "user", "content": "three", "name": "f"}]
    wish, variables = replace(GREEDY, think="off", max_tokens=0), {"mood": "good"}
    replies.tokenizer.template = ChatTemplate(SHOW_ALL)
    seen = []
    monkeypatch.setattr(replies._prompts, "tokenize", lambda prompt: seen.append(json.loads(prompt)) or [1])
    list(replies.reply(messages, wish, None, variables))
    list(replies.reply(messages, wish, None, {"enable_thinking": True, "mood": "bad"}))
    assert seen[0]["messages"] == [{**messages[0], "content": "one\ntwo"}, *messages[1:]] and seen[0]["tools"] is None
    assert (seen[0]["mood"], seen[0]["think"]) == ("good", False) and (seen[1]["tools"], seen[1]["think"]) == (None, True)


def test_keys_that_say_nothing_do_not_reach_the_template(replies, monkeypatch):
    """Clients send back what they got, whose fields of other answers are null; some templates ask only whether there is such a key."""
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": None},
                {"role": "user", "content": "two", "name": "f"}]
    seen = read_by_model(replies, monkeypatch, *messages, template="{{ messages | tojson }}")
    assert [sorted(message) for message in json.loads(seen)] == [["content", "role"], ["content", "role"], ["content", "name", "role"]]
    assert json.loads(seen)[1]["content"] == "", "templates add texts up"


def test_system_prompts_are_put_where_the_template_has_a_place_for_them(replies, monkeypatch):
    system = [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}]
    assert read_by_model(replies, monkeypatch, *system, ASKED) == f"system: Be kind.\n\nBe brief.\nuser: {QUESTION}\n"
    knows = SHOW_CONTENT + "{# developer #}"
    assert read_by_model(replies, monkeypatch, *system, ASKED, template=knows).startswith("system: Be kind.\ndeveloper: Be brief.\n")
    without = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SHOW_CONTENT
    assert read_by_model(replies, monkeypatch, *system, ASKED, template=without) == f"user: Be kind.\n\nBe brief.\n\n{QUESTION}\n"
    said = [event.text for event in replies.reply([*system, ASKED], replace(GREEDY, max_tokens=0)) if isinstance(event, Notice)]
    assert said == [NO_SYSTEM_ROLE]
    with pytest.raises(EffllmError, match="no system"):
        list(replies.reply(system, GREEDY))


def test_an_answer_that_is_the_last_message_is_resumed(replies, tokenizer):
    whole = list(replies.reply([ASKED], GREEDY))[-1].stats
    begun = tokenizer.decode(whole.token_ids[:10])
    rest = text_of(replies.reply([ASKED, {"role": "assistant", "content": begun}], replace(GREEDY, max_tokens=14)))
    assert whole.text == begun + rest


def test_texts_and_tokens_are_continued(replies, engine, tokenizer):
    text = "Once upon a time"
    said = text_of(replies.complete(text, GREEDY))
    engine.reset()
    session = Session(engine, tokenizer, GREEDY.settings, max_tokens=24, raw=True)
    assert said == text_of(replies.complete(tokenizer.encode(text), GREEDY)) == text_of(session.complete(text)) != ""


def test_a_base_model_continues_with_what_was_said(replies, engine, tokenizer):
    tokenizer.template = None
    events = list(ServedModel(engine, tokenizer).reply([{"role": "user", "content": "Once upon a time"}], GREEDY))
    assert [event.text for event in events if isinstance(event, Notice)] == [NO_TEMPLATE]
    assert text_of(events) == text_of(replies.complete("Once upon a time", GREEDY))


def test_what_cannot_be_answered_is_reported_and_the_next_is_answered(replies, monkeypatch):
    good = text_of(replies.reply([ASKED], GREEDY))
    for messages in ([], [{"role": "system", "content": ""}], [{"role": "assistant", "content": "So"}]):
        with pytest.raises(UsageError, match="no messages"):
            list(replies.reply(messages, GREEDY))
    with pytest.raises(UsageError, match="empty"):
        list(replies.complete([], GREEDY))
    for token in (10**6, -1):
        with pytest.raises(UsageError, match=f"token id {token} is outside the vocabulary of 4096"):
            list(replies.complete([token], GREEDY))
    with pytest.raises(ContextOverflow, match=r"the prompt has \d+ tokens and the context holds 2048"):
        list(replies.reply([{"role": "user", "content": "fox " * 3000}], GREEDY))
    assert text_of(replies.reply([ASKED], GREEDY)) == good
    monkeypatch.setattr(replies.engine.model, "logits", broken(replies.engine.model.logits))
    with pytest.raises(OSError):
        list(replies.reply([{"role": "user", "content": "Who are you?"}], GREEDY))
    assert replies.engine.tokens == [] and text_of(replies.reply([ASKED], GREEDY)) == good


def broken(logits):
    """The disk fails once, behind the third token."""
    calls = iter(range(99))

    def fail_once(x):
        if next(calls) == 3:
            raise OSError(5, "Input/output error")
        return logits(x)

    return fail_once


def test_an_answer_that_is_left_or_cancelled_leaves_the_engine_whole(replies):
    good, long = text_of(replies.reply([ASKED], GREEDY)), [{"role": "user", "content": QUESTION * 60}]
    for events in (replies.reply([ASKED], replace(GREEDY, max_tokens=None)), replies.reply(long, GREEDY)):
        next(events)
        events.close()
        assert text_of(replies.reply([ASKED], GREEDY)) == good
    said = list(replies.reply([ASKED], replace(GREEDY, max_tokens=None), cancelled=lambda: True))
    assert said[-1].stats.finish_reason == "cancelled" and said[-1].stats.token_ids == ()
    calls = iter(range(99))
    said = list(replies.reply([ASKED], replace(GREEDY, max_tokens=None), cancelled=lambda: next(calls) > 9))
    assert said[-1].stats.finish_reason == "cancelled" and 1 < len(said[-1].stats.token_ids) <= 10
    assert text_of(replies.reply([ASKED], GREEDY)) == good


def test_a_text_that_is_much_too_long_is_refused_before_it_is_cut(replies, tokenizer, monkeypatch):
    text = "The fox ran. " * 400_000
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("made tokens of it"))
    for events in (replies.complete(text, GREEDY), replies.reply([{"role": "user", "content": text}], GREEDY)):
        with pytest.raises(ContextOverflow, match=r"the prompt has at least \d{6} tokens and the context holds 2048"):
            list(events)


def test_tokens_are_counted_as_they_are_read(replies):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    begun = [ASKED, {"role": "assistant", "content": "It is"}]
    briefly = [{"role": "system", "content": "Be brief."}, ASKED]
    for messages, tools, think in (([ASKED], None, "auto"), (begun, None, "off"), (briefly, tools_of([tool]), "on")):
        events = list(replies.reply(messages, replace(GREEDY, think=think, max_tokens=1), tools))
        assert replies.count(messages, think, tools) == events[-1].stats.prompt_tokens
    with pytest.raises(UsageError, match="no messages"):
        replies.count([])


def test_what_was_read_is_reported_before_the_first_text(replies):
    for most in (24, 0):
        for _ in range(2):
            answer = replies.reply([{"role": "user", "content": QUESTION * 3}], replace(GREEDY, max_tokens=most))
            events = [event for event in answer if not isinstance(event, Progress)]
            stats = events[-1].stats
            assert events[0] == PromptRead(stats.prompt_tokens, stats.cached_tokens) and stats.stop_string is None
            assert sum(isinstance(event, PromptRead) for event in events) == 1
        assert stats.cached_tokens > 0


def test_the_stop_string_that_ended_an_answer_is_reported(replies):
    text = list(replies.reply([ASKED], GREEDY))[-1].stats.text
    stats = list(replies.reply([ASKED], replace(GREEDY, stops=("\x00", text[10:14]))))[-1].stats
    assert (stats.stop_string, stats.finish_reason, stats.text) == (text[10:14], "stop", text.partition(text[10:14])[0])
