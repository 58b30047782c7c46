"""Conversations on the real model: turns, the reused cache, interrupting, regenerating, saving."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

import effllm
from effllm import ContextOverflow, EffllmError, UsageError
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Done, Notice, TextDelta
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import NO_SYSTEM_ROLE, NO_TEMPLATE, Session
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
QUESTION = "Tell me a story about the fox and the king."


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu")))[-1]
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(engine):
    return Tokenizer.load(FABLE, engine.config)


@pytest.fixture
def start(engine, tokenizer):
    def make(seed=1, **options):
        engine.reset()
        options.setdefault("max_tokens", 40)
        return Session(engine, tokenizer, SamplerSettings(temperature=0.8, top_k=50, seed=seed), **options)

    return make


def text_of(events) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_a_turn_streams_what_it_says(start):
    session = start()
    events = list(session.ask(QUESTION))
    stats = events[-1].stats
    assert isinstance(events[-1], Done) and text_of(events) == stats.text == session.messages[-1]["content"]
    assert session.messages[0] == {"role": "user", "content": QUESTION}
    assert stats.finish_reason in ("stop", "length") and len(stats.token_ids) <= 40 and stats.seed == 1
    assert set(stats.to_json()) == {"text", "token_ids", "finish_reason", "seed", "usage", "timings", "memory", "io", "placement",
                                    "truncated", "speculation", "whole"}
    json.dumps(stats.to_json())


def test_same_seed_same_text(start):
    first, second, other = (text_of(start(seed).ask(QUESTION)) for seed in (5, 5, 6))
    assert first == second != other


def test_the_next_turn_prefills_only_what_is_new(start):
    session = start()
    list(session.ask(QUESTION))
    held = session.used
    stats = list(session.ask("Go on."))[-1].stats
    assert stats.cached_tokens >= held and stats.prompt_tokens - stats.cached_tokens < 15


def test_history_and_fresh_cache_agree(start):
    """A conversation continued with the kept cache says what one replayed from nothing says."""
    session = start(3)
    list(session.ask(QUESTION))
    kept = text_of(session.ask("Go on."))
    again = start(3)
    list(again.ask(QUESTION))
    again.engine.reset()
    assert text_of(again.ask("Go on.")) == kept


def test_cancel_keeps_the_partial_text(start):
    session = start(max_tokens=None)
    said = []
    for event in session.ask(QUESTION):
        if isinstance(event, TextDelta):
            said.append(event.text)
            if len(said) == 5:
                session.cancel()
    assert event.stats.finish_reason == "cancelled" and session.messages[-1]["content"] == "".join(said) != ""
    session.max_tokens = 10
    before = session.messages[-1]["content"]
    events = list(session.continue_())
    assert session.messages[-1]["content"] == before + text_of(events) and len(session.messages) == 2


def test_leaving_in_mid_answer_keeps_the_partial_text(start):
    session = start()
    events = session.ask(QUESTION)
    for event in events:
        if isinstance(event, TextDelta) and event.text.strip():
            break
    events.close()
    assert session.messages[-1]["role"] == "assistant" and session.messages[-1]["content"].strip()


def test_stop_strings_never_leak(start):
    whole = text_of(start(max_tokens=60).ask(QUESTION))
    stop = whole[20:25]
    session = start(max_tokens=60, stops=(stop,))
    stats = list(session.ask(QUESTION))[-1].stats
    assert stats.text == whole.partition(stop)[0] and stats.finish_reason == "stop"


def test_nothing_is_generated_for_zero_tokens(start):
    session = start(max_tokens=0)
    stats = list(session.ask(QUESTION))[-1].stats
    assert stats.text == "" and stats.token_ids == () and stats.finish_reason == "length" and stats.prompt_tokens == 17


def test_regenerate_undo_clear(start):
    session = start()
    first = text_of(session.ask(QUESTION))
    again = text_of(session.regenerate())
    assert again != first and [m["role"] for m in session.messages] == ["user", "assistant"]
    assert session.messages[-1]["content"] == again
    assert session.undo() and session.messages == [] and not session.undo()
    with pytest.raises(UsageError, match="nothing to answer again"):
        list(session.regenerate())
    with pytest.raises(UsageError, match="no answer to continue"):
        list(session.continue_())
    list(session.ask(QUESTION))
    session.clear()
    assert session.messages == [] and session.used == 0


def test_the_system_prompt_comes_first(start, tokenizer):
    session = start(system="You are a wolf.", max_tokens=2)
    list(session.ask("Hello."))
    said = tokenizer.decode(session.engine.tokens, skip_special_tokens=False)
    assert said.startswith("<|system|>\nYou are a wolf.<|end|><|user|>\nHello.")


def test_empty_and_too_long_prompts_leave_the_history_alone(start):
    session = start()
    with pytest.raises(UsageError, match="the prompt is empty"):
        list(session.ask("  \n"))
    with pytest.raises(ContextOverflow, match="tokens and the context holds 2048"):
        list(session.ask("word " * 5000))
    assert session.messages == []
    assert text_of(session.ask(QUESTION))


def test_compact_replaces_the_history_or_says_that_it_could_not(start):
    session = start(max_tokens=200)
    list(session.ask(QUESTION))
    before = list(session.messages)
    events = list(session.compact())
    if session.stats.finish_reason == "stop":
        assert len(session.messages) == 2 and session.messages[1]["content"] == session.stats.text.strip()
    else:
        assert session.messages == before and any(isinstance(event, Notice) for event in events)
    before, events = list(session.messages), []
    for event in session.compact():
        events.append(event)
        session.cancel()
    assert session.stats.finish_reason == "cancelled"
    assert session.messages == before and any(isinstance(event, Notice) and "is unchanged" in event.text for event in events)


def test_a_summary_has_room_of_its_own(start):
    session = start(max_tokens=3)
    list(session.ask(QUESTION))
    list(session.compact())
    assert len(session.stats.token_ids) > 3 and session.max_tokens == 3
    session.max_tokens = None
    with closing(session.compact()) as events:
        next(events)
        assert session.max_tokens is None
    assert session.max_tokens is None


def test_save_and_load(start, tmp_path):
    session = start(system="You are a wolf.")
    list(session.ask(QUESTION))
    session.save(tmp_path / "talk.json")
    other = start()
    other.load(tmp_path / "talk.json")
    assert other.messages == session.messages and other.system == "You are a wolf." and other.settings == session.settings
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    with pytest.raises(EffllmError, match="cannot write"):
        session.save(tmp_path / "talk.json" / "nowhere.json")
    for path, said in (("absent.json", "absent.json: No such file or directory"), (".", ": Is a directory")):
        with pytest.raises(EffllmError) as refused:
            other.load(tmp_path / path)
        assert refused.value.message.endswith(said) and refused.value.hint
    (tmp_path / "letter.txt").write_text("Dear fox")
    with pytest.raises(EffllmError, match="letter.txt is not a conversation$"):
        other.load(tmp_path / "letter.txt")
    for content in ("{", "[]", '{"format": "effllm-session", "version": 2}',
                    '{"format": "effllm-session", "version": 1, "messages": [{"role": 1}]}',
                    '{"format": "effllm-session", "version": 1, "messages": [], "settings": {"heat": 1}}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(EffllmError):
            other.load(tmp_path / "bad.json")
    assert other.messages == session.messages


def test_a_raw_completion_takes_the_text_as_it_stands(start, tokenizer):
    session = start(max_tokens=5, raw=True)
    list(session.complete("Once upon a time"))
    assert tokenizer.decode(session.engine.tokens, skip_special_tokens=False).startswith("Once upon a time") and session.messages == []


def test_a_base_model_completes_raw_and_says_so(tmp_path):
    folder = Path(shutil.copytree(FABLE, tmp_path / "base"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = list(open_engine(folder, EngineOptions(device="cpu")))[-1]
    session = Session(engine, Tokenizer.load(folder, engine.config), SamplerSettings(seed=1), max_tokens=5)
    events = list(session.ask("Once upon a time"))
    assert [event.text for event in events if isinstance(event, Notice)] == [NO_TEMPLATE]
    assert not [event for event in session.ask("there") if isinstance(event, Notice)]
    engine.close()


def test_ignore_eos_continues(start):
    session = start(max_tokens=400)
    while (stats := list(session.ask("And then?"))[-1].stats).finish_reason != "stop" and session.used < 1500:
        continue
    session = start(max_tokens=400, ignore_eos=True)
    stats = list(session.ask("And then?"))[-1].stats
    assert stats.finish_reason == "length" and len(stats.token_ids) == 400


STRICT = (
    "{% for m in messages %}"
    "{% if m['role'] != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def strict(session):
    from effllm.runtime.templates.template import ChatTemplate

    session.tokenizer.template = ChatTemplate(STRICT, session.tokenizer.special_tokens)
    return session


# As Gemma's: no system role, and the assistant is called model.
NO_SYSTEM = (
    "{{ bos_token or '' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DROPS_SYSTEM = "{% for m in messages if m['role'] != 'system' %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


@pytest.mark.parametrize("source", [NO_SYSTEM, DROPS_SYSTEM], ids=["refuses", "drops"])
def test_a_template_without_a_system_role_gets_it_in_front_of_the_first_message(start, tokenizer, monkeypatch, source):
    from effllm.runtime.templates.template import ChatTemplate

    monkeypatch.setattr(tokenizer, "template", ChatTemplate(source, tokenizer.special_tokens))
    session = start(system="Answer in rhymes.", max_tokens=3)
    events = list(session.ask(QUESTION))
    assert [event.text for event in events if isinstance(event, Notice)] == [NO_SYSTEM_ROLE]
    assert session.messages[0] == {"role": "user", "content": QUESTION}  # the history keeps what was said
    again = list(session.ask("Go on."))
    assert not [event for event in again if isinstance(event, Notice)], "said once"
    prompt = session._prompt()
    assert prompt.count("Answer in rhymes.") == 1 and f"Answer in rhymes.\n\n{QUESTION}" in prompt
    session.system = None
    assert "rhymes" not in session._prompt()


def test_folding_hides_no_other_refusal(start, tokenizer, monkeypatch):
    from effllm.runtime.templates.template import ChatTemplate

    monkeypatch.setattr(tokenizer, "template", ChatTemplate(NO_SYSTEM, tokenizer.special_tokens))
    session = start(system="Answer in rhymes.")
    session.messages = [{"role": "user", "content": "one"}]
    with pytest.raises(EffllmError, match="must alternate"):
        list(session.ask("two"))
    assert session.messages == [{"role": "user", "content": "one"}]


def test_a_template_with_a_system_role_is_left_alone(start):
    session = start(system="Answer in rhymes.", max_tokens=3)
    assert not [event for event in session.ask(QUESTION) if isinstance(event, Notice)]
    assert session._prompt().count("Answer in rhymes.") == 1 and f"rhymes.\n\n{QUESTION}" not in session._prompt()


def test_a_turn_that_says_nothing_leaves_no_question_behind(start, tokenizer):
    usual = tokenizer.template
    try:
        session = strict(start(max_tokens=0))
        list(session.ask(QUESTION))
        assert session.messages == []
        session.max_tokens = 3
        seen = []
        for event in session.ask(QUESTION):
            session.cancel()
            seen.append(event)
        assert seen[-1].stats.finish_reason == "cancelled"
        assert [m["role"] for m in session.messages] in ([], ["user", "assistant"])
        assert text_of(session.ask(QUESTION))
    finally:
        tokenizer.template = usual


def test_cancelling_while_the_prompt_is_rendered_counts(start, monkeypatch):
    session = start(max_tokens=40)
    render = session.tokenizer.render_chat

    def interrupted(*arguments, **options):
        session.cancel()
        return render(*arguments, **options)

    monkeypatch.setattr(session.tokenizer, "render_chat", interrupted)
    assert list(session.ask(QUESTION))[-1].stats.finish_reason == "cancelled"


def test_a_failed_regenerate_or_continue_keeps_the_answer(start):
    session = start()
    list(session.ask(QUESTION))
    before = list(session.messages)
    session.system = "word " * 5000
    for again in (session.regenerate, session.continue_):
        with pytest.raises(ContextOverflow):
            list(again())
        assert session.messages == before


def test_cached_tokens_are_those_that_were_not_run(start):
    session = start()
    list(session.ask(QUESTION * 3))
    stats = list(session.regenerate())[-1].stats
    assert stats.cached_tokens == stats.prompt_tokens - 17  # a few tokens alone would go to another kernel than they did
    session.undo()
    stats = list(session.ask("Something else altogether, if you please, about a goose."))[-1].stats
    assert stats.cached_tokens <= 3 and stats.to_json()["timings"]["prefill_tps"] > 0


def test_a_surrogate_survives_saving(start, tmp_path):
    session = start()
    session.messages = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "ok"}]
    session.save(tmp_path / "talk.json")
    other = start()
    other.load(tmp_path / "talk.json")
    assert other.messages == session.messages
    (tmp_path / "bad.json").write_text('{"format": "effllm-session", "version": 1, "messages": [], "system": 5}')
    with pytest.raises(EffllmError):
        other.load(tmp_path / "bad.json")
