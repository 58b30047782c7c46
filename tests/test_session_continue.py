"""Continuing an answer, undoing one, and the context it then fills: on the real model, with reasoning templates."""

import json
from pathlib import Path

import pytest

import effllm
from effllm import EffllmError
from effllm.runtime.engine import open_engine
from effllm.runtime.events import TextDelta
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.templates.template import ChatTemplate
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
QUESTION = "Tell me a story about the fox and the king."
REASONS = ("{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|assistant|>\n<think>\n' }}{% endif %}")


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu")))[-1]
    yield engine
    engine.close()


@pytest.fixture
def tokenizer(engine):
    return Tokenizer.load(FABLE, engine.config)


@pytest.fixture
def session(engine, tokenizer):
    engine.reset()
    return Session(engine, tokenizer, SamplerSettings(temperature=0, seed=1), max_tokens=12)


def said(events, kind="answer") -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.kind == kind)


def test_a_continued_answer_is_the_one_that_was_never_cut(session):
    session.max_tokens = 36
    whole = said(session.ask(QUESTION))
    session.clear()
    session.max_tokens = 12
    pieces = [said(session.ask(QUESTION)), said(session.continue_()), said(session.continue_())]
    assert "".join(pieces) == whole == session.messages[-1]["content"] and all(pieces)
    assert session.stats.prompt_tokens - session.stats.cached_tokens == 1, "what the cache holds was read again"


def test_reasoning_that_was_cut_continues_as_reasoning(session):
    session.tokenizer.template = ChatTemplate(REASONS, session.tokenizer.special_tokens)
    session.max_tokens = 24
    whole = said(session.ask(QUESTION), "thinking")
    session.clear()
    session.max_tokens = 12
    first = list(session.ask(QUESTION))
    assert said(first) == "" and session.messages[-1] == {"role": "assistant", "content": ""}
    second = list(session.continue_())
    assert said(first, "thinking") + said(second, "thinking") == whole and said(second) == ""
    assert session.stats.cached_tokens >= session.stats.prompt_tokens - 1


class Scripted:
    """An engine's place: it says what it is told, a token at a time, and remembers what it was asked to read."""

    def __init__(self, engine, ids):
        self._engine, self._ids, self.prompt = engine, ids, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def prefill(self, ids):
        self.prompt = list(ids)
        return self._engine.prefill(ids)

    def generate(self, sampler, max_tokens, stop_ids, ignore_eos=False, may_shift=True):
        from effllm.runtime.engine import Step

        count = min(max_tokens, len(self._ids))
        for made in range(count):
            token = self._ids.pop(0)
            self._engine.tokens.append(token)
            yield Step(token, "length" if made == count - 1 else None)


def test_the_border_between_reasoning_and_answer_may_lie_in_the_second_half(session, tokenizer, engine):
    tokenizer.template = ChatTemplate(REASONS, tokenizer.special_tokens)
    script = tokenizer.encode("The fox is sly.</think>\n\nOnce upon a time", add_special_tokens=False)
    for cut in range(1, len(script)):
        engine.reset()
        session.clear()
        session.engine = Scripted(engine, list(script))
        session.max_tokens = cut
        first = list(session.ask(QUESTION))
        session.max_tokens = len(script)
        second = list(session.continue_())
        assert session.engine.prompt[-cut:] == script[:cut], "the tokens themselves are gone on with"
        assert session.messages[-1]["content"] == said(first) + said(second) == "Once upon a time", cut
        thought = said(first, "thinking") + said(second, "thinking")
        assert thought.startswith("The fox is sly") and "Once" not in thought, cut
        engine.reset()


def test_what_was_changed_since_is_not_continued_by_its_tokens(session):
    list(session.ask(QUESTION))
    session.messages[-1] = {"role": "assistant", "content": "A goose"}
    said(session.continue_())
    assert session.messages[-1]["content"].startswith("A goose")
    held = session.tokenizer.decode(session.engine.tokens)
    assert "A goose" in held


def test_a_continuation_without_room_leaves_the_answer_as_it_was(session):
    list(session.ask(QUESTION))
    before = list(session.messages)
    session.max_tokens = 0
    list(session.continue_())
    assert session.messages == before
    session.cancel()
    session.max_tokens = 12
    assert said(session.continue_()) and session.messages[-1]["content"].startswith(before[-1]["content"])


def test_used_follows_what_is_taken_back(session):
    assert session.used == 0
    list(session.ask(QUESTION))
    one = session.used
    assert one == len(session.engine.tokens) > 20
    list(session.ask("And then?"))
    two = session.used
    assert two == len(session.engine.tokens) > one + 12
    session.undo()
    assert abs(session.used - one) <= 3, "the first turn, and what the template puts behind it"
    session.undo()
    assert session.used == 0
    list(session.ask(QUESTION))
    session.system = "Speak of the sea, and of nothing but the sea."
    assert session.used > one + 5


def test_used_is_right_after_load(session, tmp_path):
    list(session.ask(QUESTION))
    list(session.ask("And then?"))
    used = session.used
    session.save(tmp_path / "talk.json")
    session.clear()
    session.load(tmp_path / "talk.json")
    assert abs(session.used - used) <= 3


def test_a_file_is_written_whole_or_not_at_all(session, tmp_path):
    with pytest.raises(EffllmError, match="there is no folder"):
        session.save(tmp_path / "deep" / "er" / "talk.json")
    (tmp_path / "deep").mkdir()
    session.save(tmp_path / "deep" / "talk.json")
    assert json.loads((tmp_path / "deep" / "talk.json").read_text())["format"] == "effllm-session"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["talk.json"]
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("old")
    for bad in (tmp_path / "taken", tmp_path / "file" / "talk.json", Path("/proc/nowhere/talk.json")):
        with pytest.raises(EffllmError, match="cannot write") as caught:
            session.save(bad)
        assert caught.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "file", "taken"] and (tmp_path / "file").read_text() == "old"


class Sampled:
    """A sampler that says what it is given."""

    seed, settings, breakers, logprobs, token_logprobs = 1, SamplerSettings(), None, None, None

    def __init__(self, ids: list[int]) -> None:
        self.ids = iter(ids)

    def sample(self, *_: object) -> int:
        return next(self.ids)


def test_an_answer_that_was_cut_in_a_character_continues_with_the_whole(session, tokenizer):
    """What was shown of it, U+FFFD, gives way; nothing of the question is said again."""
    text = "The fox said 日本 🦊 to him."
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(1, len(ids)):
        session.clear()
        session._sampler = Sampled([*ids, *tokenizer.stop_ids])
        session.max_tokens = cut
        begun = said(session.ask(QUESTION))
        assert begun == tokenizer.decode(ids[:cut]) == session.messages[-1]["content"]
        session.max_tokens = 100
        rest = said(session.continue_())
        assert session.messages[-1]["content"] == text and begun.rstrip("\ufffd") + rest == text


def test_a_stop_string_that_a_cut_went_through_ends_the_answer(session, tokenizer):
    ids = tokenizer.encode("A fox said to the king that he was hungry.", add_special_tokens=False)
    session.stops = ("to the king",)
    cut = next(n for n in range(len(ids)) if tokenizer.decode(ids[:n]).endswith(" to the"))
    session._sampler, session.max_tokens = Sampled(ids), cut
    assert said(session.ask(QUESTION)) == "A fox said to the"
    session.max_tokens = 100
    assert said(session.continue_()) == "" and session.stats.finish_reason == "stop"
    assert session.messages[-1]["content"] == "A fox said "
