"""Conversations that take turns: the cache of each is restored when it continues, and its answer is the same as without the switch."""

from pathlib import Path

import pytest

import effllm
from effllm import UsageError
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Done, Notice, TextDelta
from effllm.runtime.generation.served_model import GenerationOptions, ServedModel
from effllm.runtime.images.mrope import FIRST_MEDIA_ID
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.sessions import prompt_cache
from effllm.runtime.sessions.prompt_cache import MIN_RECOMPUTED_TOKENS, PREFIX, PromptCache
from effllm.runtime.sessions.saved_sessions import SavedSessions
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
WISH = GenerationOptions(SamplerSettings(temperature=0.8, seed=3), max_tokens=40)
FOX, SEA = ("The fox asked the king for bread and the king gave him none. " * 24,
            "The sea was calm and the boat was far from the shore. " * 30)
BUDGET = 1 << 30


@pytest.fixture(params=[pytest.param("16bit", marks=pytest.mark.slow), "4bit"])
def engine(request):
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", kv=request.param)))[-1]
    yield engine
    engine.close()


def replies(engine, folder: Path | None, budget: int = BUDGET) -> ServedModel:
    engine.reset()
    kept = folder and PromptCache(engine, SavedSessions(SessionStore(folder), "fable", budget))
    return ServedModel(engine, Tokenizer.load(FABLE, engine.config), kept)


class Talk:
    """A conversation of a program, which sends all messages each time."""

    def __init__(self, about: str) -> None:
        self.messages, self.stats, self.said = [{"role": "user", "content": about}], None, []

    def go_on(self, replies: ServedModel, message: str = "") -> str:
        if message:
            self.messages.append({"role": "user", "content": message})
        events = list(replies.reply(self.messages, WISH))
        self.said = [event.text for event in events if isinstance(event, Notice)]
        self.stats = next(event.stats for event in events if isinstance(event, Done))
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        self.messages.append({"role": "assistant", "content": text})
        return text


def alone(engine, about: str, *messages: str) -> tuple[list[str], list[int]]:
    """A conversation that nothing comes between: its answers, and how many tokens of each prompt were held."""
    one, talk = replies(engine, None), Talk(about)
    answers, held = [], []
    for message in ("", *messages):
        answers.append(talk.go_on(one, message))
        held.append(engine.num_cached_tokens)
    return answers, held


def test_conversations_that_take_turns_are_what_they_are_alone(engine, tmp_path):
    expected = {about: alone(engine, about, "Go on.", "And then?") for about in (FOX, SEA)}
    one, talks = replies(engine, tmp_path), {about: Talk(about) for about in (FOX, SEA)}
    for turn, message in enumerate(("", "Go on.", "And then?")):
        for about, talk in talks.items():
            answers, held = expected[about]
            assert talk.go_on(one, message) == answers[turn]
            assert turn == 0 or engine.num_cached_tokens == held[turn] > MIN_RECOMPUTED_TOKENS
    # one session for each, that of a beginning goes when what goes on from it is saved
    assert len([name for name in one.prompt_cache.sessions.store.names() if name.startswith(PREFIX)]) == 2


def test_the_next_process_continues(engine, tmp_path):
    (first, second), _ = alone(engine, FOX, "Go on.")
    one, talk, other = replies(engine, tmp_path), Talk(FOX), Talk(SEA)
    assert talk.go_on(one) == first
    other.go_on(one)
    assert talk.go_on(replies(engine, tmp_path), "Go on.") == second and engine.num_cached_tokens > MIN_RECOMPUTED_TOKENS


def test_a_short_prompt_and_one_that_continues_are_not_kept(engine, tmp_path):
    one, talk = replies(engine, tmp_path), Talk("Tell me of the fox.")
    talk.go_on(one)
    Talk("Tell me of the sea.").go_on(one)
    long = Talk(FOX)
    long.go_on(one)
    long.go_on(one, "Go on.")
    assert not one.prompt_cache.sessions.store.names()


def test_a_completion_is_kept_by_its_tokens(engine, tmp_path):
    one = replies(engine, tmp_path)
    for text in (FOX, SEA, FOX + "Then"):
        list(one.complete(text, WISH))
    assert engine.num_cached_tokens > MIN_RECOMPUTED_TOKENS


def test_what_is_damaged_is_read_again_and_said(engine, tmp_path):
    (first, second), _ = alone(engine, FOX, "Go on.")
    one, talk = replies(engine, tmp_path), Talk(FOX)
    assert talk.go_on(one) == first
    Talk(SEA).go_on(one)
    for path in (tmp_path / "pages").glob("*/*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert talk.go_on(one, "Go on.") == second and any("the prompt is read" in line for line in talk.said)


def test_a_cache_larger_than_all_may_take_leaves_nothing(engine, tmp_path):
    one, talk = replies(engine, tmp_path, budget=1000), Talk(FOX)
    talk.go_on(one)
    other = Talk(SEA)
    other.go_on(one)
    assert not one.prompt_cache.sessions.store.names() and any("--session-disk" in line for line in other.said)


def test_a_folder_that_takes_nothing_costs_reading_alone(engine, tmp_path):
    (tmp_path / "sessions").write_text("in the way")
    one, talk, other = replies(engine, tmp_path / "sessions"), Talk(FOX), Talk(SEA)
    talk.go_on(one)
    assert other.go_on(one) and any("is recomputed" in line for line in other.said)


def test_caches_that_are_not_exact_are_refused(tmp_path):
    *_, engine = open_engine(FABLE, EngineOptions(device="cpu", kv="4bit+zipcache"))
    with pytest.raises(UsageError, match=r"4bit\+zipcache"):
        replies(engine, tmp_path)
    engine.close()


def test_prompts_that_made_room_for_others_leave_nothing(engine, tmp_path):
    """Neither files without a cache nor a notice for each."""
    one = replies(engine, tmp_path)
    Talk(FOX).go_on(one)
    Talk(SEA).go_on(one)
    store = one.prompt_cache.sessions.store
    one, said = replies(engine, tmp_path, budget=int(store.nbytes() * 1.9)), []
    for about in (FOX, SEA, "A bird sang in the tree. " * 50, FOX, SEA, FOX):
        talk = Talk(about)
        talk.go_on(one)
        said += talk.said
        assert len(store.names()) == len(one.prompt_cache._all()) <= 1
    assert store.names() and not [line for line in said if "--session-disk" in line or "the prompt is read" in line]


def test_what_is_looked_for_has_a_bound_and_the_newest_is_found(engine, tmp_path, monkeypatch):
    one, talks = replies(engine, tmp_path), [Talk(about) for about in (FOX, SEA, "A bird sang in the tree. " * 50)]
    for talk in talks:
        talk.go_on(one)
    Talk("The end.").go_on(one)
    assert len(one.prompt_cache._all()) == 3
    monkeypatch.setattr(prompt_cache, "MAX_TOKENS", 900)  # of two
    again = replies(engine, tmp_path)
    assert len(again.prompt_cache._all()) == 2
    for talk, is_found in ((talks[2], True), (talks[0], False)):
        talk.go_on(again, "Go on.")
        assert (engine.num_cached_tokens > MIN_RECOMPUTED_TOKENS) == is_found
    Talk("The end.").go_on(again)
    assert len(again.prompt_cache._all()) == 2 and sum(len(each.tokens) for each in again.prompt_cache._all().values()) <= 900


def test_a_prompt_with_an_image_is_kept_as_any_other(engine, tmp_path):
    """A media id has 63 bits, and the cache entry's name is derived from it too."""
    one = replies(engine, tmp_path)
    Talk(FOX).go_on(one)
    engine.tokens[300] = FIRST_MEDIA_ID | 1 << 30
    Talk(SEA).go_on(one)
    (saved,) = tmp_path.glob(f"{PREFIX}*")
    assert one.prompt_cache.sessions.store.read(saved.stem).cache.tokens[300] == FIRST_MEDIA_ID | 1 << 30
