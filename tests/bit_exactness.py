"""Checks that outputs are bit-identical whatever the threads, chunks, drafts, batching, and save and restore, for models of any kind."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hybrid_models import IDS, anew, answer, one_by_one, opened, read
from session_engines import restore
from test_speculation import Guesser, Ticks
from transformers import PreTrainedModel

from effllm.runtime.engine import Engine
from effllm.runtime.generation.batching import PendingToken, open_sequences
from effllm.runtime.last_layers import MIN_LAST_TOKENS, narrows_to_last_tokens
from effllm.runtime.sessions.saved_cache import identity, save_cache
from effllm.runtime.sessions.session_format import SavedSession
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.speculate import Speculation

FEWER = ({"threads": 1}, {"threads": 3, "chunk": 512}, {"chunk": 256})
WAYS = ({"threads": 1}, {"threads": 2}, {"threads": 3, "chunk": 512}, {"chunk": 256})


@pytest.fixture(scope="module")
def folder(model: tuple[Path, PreTrainedModel]) -> Path:
    """Of the test file's own `model`, created with transformers."""
    return model[0]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = opened(folder)
    yield made
    made.close()


def rows_of(engine: Engine, held: int, end: int) -> np.ndarray:
    """Logits after a prompt of `held` tokens, then after each single one up to `end`."""
    return np.stack([read(engine, IDS[:held]), *[engine.forward_logits([token])[0].copy() for token in IDS[held:end]]])


def assert_threads_and_chunks_change_nothing(folder: Path, end: int = 450, ways: Sequence[dict[str, int]] = WAYS) -> None:
    results = []
    for settings in ways:
        engine = opened(folder, **settings)
        results.append(rows_of(engine, 430, end))
        engine.close()
    assert all(np.array_equal(results[0], other) for other in results[1:])


def assert_a_prompt_ends_as_a_whole_one(engine: Engine, ids: Sequence[int], behind: int = 3) -> None:
    """As if all of it went through every layer, the last of `ids` being what comes `behind` it: the last layers run for its last tokens
    alone, and not a bit of what comes next depends on that."""
    run, widths, ends, seen_state, length = engine.model.forward, ([], []), [], {"num_states": None}, len(ids) - behind

    def forward(*args: object, **rest: object) -> np.ndarray:
        widths[len(ends)].append(len(x := run(*args, **rest | seen_state)))
        return x

    with patch.object(engine.model, "forward", forward):
        for _ in widths:
            engine.reset()
            list(engine.prefill(ids[:length]))
            ends.append([engine._logits.copy(), *(engine.forward_logits([token])[0].copy() for token in ids[length:])])
            seen_state.clear()
    is_narrowed = any(narrows_to_last_tokens(engine.config, layer) for layer in range(engine.config.num_hidden_layers))
    limit = MIN_LAST_TOKENS if is_narrowed else length
    assert np.array_equal(*ends) and sum(widths[0]) == length + behind and widths[1] == [min(limit, width) for width in widths[0]]


def assert_tokens_at_once_are_tokens_one_by_one(engine: Engine, held: int, count: int = 21) -> None:
    """For `count` tokens, sevens, after a prompt of `held`."""
    rows = []
    for step in (1, 7):
        anew(engine, IDS[:held])
        rows.append(np.concatenate([engine.forward_logits(IDS[at : at + step]).copy() for at in range(held, held + count, step)]))
    assert np.array_equal(*rows)


def assert_drafts_change_nothing(engine: Engine, held: int, right: float) -> None:
    """Neither the answer behind a prompt of `held` tokens nor what the cache holds after it; `right`: the share of guesses that are."""
    anew(engine, IDS[:held])
    tokens = answer(engine, 60)
    after = engine.forward_logits([5]).copy()
    anew(engine, IDS[:held])
    engine.speculation = Speculation((Guesser(IDS[:held] + tokens, right, engine.config.vocab_size),), clock=Ticks())
    try:
        assert answer(engine, 60) == tokens
        assert engine.speculation.counts.drafted and (not right or engine.speculation.counts.accepted)
    finally:
        engine.speculation = None
    assert np.array_equal(engine.forward_logits([5]), after)


def assert_another_question_reads_that_alone(engine: Engine) -> None:
    """Behind a prompt that was read and answered: a state is kept a little before the end of it."""
    fresh_logits = anew(engine, [*IDS[:380], *IDS[500:520]])
    anew(engine, IDS[:400])
    answer(engine, 10)
    continued_logits = read(engine, [*IDS[:380], *IDS[500:520]])
    assert engine.num_cached_tokens == 368 and np.abs(continued_logits - fresh_logits).max() < 0.02 * np.abs(fresh_logits).max()


def assert_company_changes_nothing(folder: Path, prompts: Sequence[list[int]]) -> None:
    """Texts continued together in one pass, against each alone."""
    engine = opened(folder, parallel=len(prompts))
    alone = []
    for prompt in prompts:
        anew(engine, prompt)
        alone.append([engine.forward_logits([token])[0].copy() for token in IDS[500:540]])
    engines, labels = open_sequences(engine, len(prompts))
    assert not labels
    for sequence, prompt in zip(engines, prompts, strict=True):
        anew(sequence, prompt)
    for step, token in enumerate(IDS[500:540]):
        wants = [PendingToken(sequence, token) for sequence in engines]
        engine.batched_passes.run(wants)
        for want, rows in zip(wants, alone, strict=True):
            assert want.error is None and np.array_equal(want.logits, rows[step])
    for other in engines[1:]:
        other.cache.close()
    engine.close()


def save(engine: Engine, store: SessionStore, name: str = "tale") -> None:
    own = identity(engine)
    with store.writing(name):
        *_, saved = save_cache(engine, store, own, None)
        store.write(SavedSession(name, "hybrid", 1.0, {"messages": []}, saved))


def assert_a_saved_text_goes_on(engine: Engine, store: SessionStore, end: int) -> None:
    """What the engine holds of IDS up to `end` is saved, dropped, and restored."""
    held = list(engine.tokens)
    save(engine, store)
    expected = [engine.forward_logits([token]).copy() for token in IDS[len(held) : end]]
    engine.cache.truncate(0)
    engine.reset()
    for index in engine.cache.indexes:
        index.memory[:] = 255
    restore(engine, store)
    assert engine.tokens == held == IDS[: len(held)]
    for token, row in zip(IDS[len(held) : end], expected, strict=True):
        assert np.array_equal(engine.forward_logits([token]), row)


def assert_a_session_goes_on(engine: Engine, folder: Path) -> None:
    """Saved behind a prompt and a few tokens, which end amid whatever is made of several."""
    anew(engine, IDS[:455])
    one_by_one(engine, IDS[455:458])
    assert_a_saved_text_goes_on(engine, SessionStore(folder), 480)
