"""Checks that outputs are bit-identical whatever the threads, chunks, drafts, batching, and save and restore, for models of any kind."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hybrid_models import IDS, answer, one_by_one, opened, read, read_afresh
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

FEWER_SETTINGS = ({"threads": 1}, {"threads": 3, "chunk": 512}, {"chunk": 256})
SETTINGS = ({"threads": 1}, {"threads": 2}, {"threads": 3, "chunk": 512}, {"chunk": 256})


@pytest.fixture(scope="module")
def folder(model: tuple[Path, PreTrainedModel]) -> Path:
    """The folder of the test file's fixture `model`, which transformers created."""
    return model[0]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    opened_engine = opened(folder)
    yield opened_engine
    opened_engine.close()


def logits_after(engine: Engine, num_prompt_tokens: int, end: int) -> np.ndarray:
    """Logits after a prompt of `num_prompt_tokens`, then after each single token of IDS up to `end`."""
    return np.stack([read(engine, IDS[:num_prompt_tokens]),
                     *[engine.forward_logits([token])[0].copy() for token in IDS[num_prompt_tokens:end]]])


def assert_threads_and_chunks_change_nothing(folder: Path, end: int = 450, settings_list: Sequence[dict[str, int]] = SETTINGS) -> None:
    results = []
    for settings in settings_list:
        engine = opened(folder, **settings)
        results.append(logits_after(engine, 430, end))
        engine.close()
    assert all(np.array_equal(results[0], other) for other in results[1:])


def assert_last_layers_narrow_exactly(engine: Engine, ids: Sequence[int], num_after: int = 3) -> None:
    """Check that running the last layers for a prompt's last tokens only changes no bit of the logits that follow.

    ids: the prompt, then `num_after` tokens that are decoded one by one.
    """
    run, widths, ends, full_width, length = engine.model.forward, ([], []), [], {"num_states": None}, len(ids) - num_after

    def forward(*args: object, **keywords: object) -> np.ndarray:
        widths[len(ends)].append(len(x := run(*args, **keywords | full_width)))
        return x

    with patch.object(engine.model, "forward", forward):
        for _ in widths:
            engine.reset()
            list(engine.prefill(ids[:length]))
            ends.append([engine._logits.copy(), *(engine.forward_logits([token])[0].copy() for token in ids[length:])])
            full_width.clear()
    is_narrowed = any(narrows_to_last_tokens(engine.config, layer) for layer in range(engine.config.num_hidden_layers))
    limit = MIN_LAST_TOKENS if is_narrowed else length
    assert np.array_equal(*ends) and sum(widths[0]) == length + num_after and widths[1] == [min(limit, width) for width in widths[0]]


def assert_chunks_equal_single_tokens(engine: Engine, num_prompt_tokens: int, count: int = 21) -> None:
    """Check that passes of seven tokens give the bits of single tokens, for `count` tokens after a prompt of `num_prompt_tokens`."""
    rows = []
    for step in (1, 7):
        read_afresh(engine, IDS[:num_prompt_tokens])
        rows.append(np.concatenate([engine.forward_logits(IDS[start : start + step]).copy() for start in range(num_prompt_tokens,
                                                                                                               num_prompt_tokens + count,
                                                                                                               step)]))
    assert np.array_equal(*rows)


def assert_drafts_change_nothing(engine: Engine, num_prompt_tokens: int, accuracy: float) -> None:
    """Check that speculation changes neither the answer to a prompt of `num_prompt_tokens` nor the cache after it.

    accuracy: the share of drafted tokens that are right.
    """
    read_afresh(engine, IDS[:num_prompt_tokens])
    tokens = answer(engine, 60)
    expected = engine.forward_logits([5]).copy()
    read_afresh(engine, IDS[:num_prompt_tokens])
    engine.speculation = Speculation((Guesser(IDS[:num_prompt_tokens] + tokens, accuracy, engine.config.vocab_size),), clock=Ticks())
    try:
        assert answer(engine, 60) == tokens
        assert engine.speculation.counts.drafted and (not accuracy or engine.speculation.counts.accepted)
    finally:
        engine.speculation = None
    assert np.array_equal(engine.forward_logits([5]), expected)


def assert_prefix_is_reused(engine: Engine) -> None:
    """Check that a prompt with the same beginning prefills only its end: a recurrent state is saved shortly before the end of a prompt."""
    fresh_logits = read_afresh(engine, [*IDS[:380], *IDS[500:520]])
    read_afresh(engine, IDS[:400])
    answer(engine, 10)
    continued_logits = read(engine, [*IDS[:380], *IDS[500:520]])
    assert engine.num_cached_tokens == 368 and np.abs(continued_logits - fresh_logits).max() < 0.02 * np.abs(fresh_logits).max()


def assert_batching_changes_nothing(folder: Path, prompts: Sequence[list[int]]) -> None:
    """Check that sequences decoded in one batch give the bits of each decoded alone."""
    engine = opened(folder, parallel=len(prompts))
    expected = []
    for prompt in prompts:
        read_afresh(engine, prompt)
        expected.append([engine.forward_logits([token])[0].copy() for token in IDS[500:540]])
    engines, labels = open_sequences(engine, len(prompts))
    assert not labels
    for sequence, prompt in zip(engines, prompts, strict=True):
        read_afresh(sequence, prompt)
    for step, token in enumerate(IDS[500:540]):
        pending = [PendingToken(sequence, token) for sequence in engines]
        engine.batched_passes.run(pending)
        for token_logits, rows in zip(pending, expected, strict=True):
            assert token_logits.error is None and np.array_equal(token_logits.logits, rows[step])
    for other in engines[1:]:
        other.cache.close()
    engine.close()


def save(engine: Engine, store: SessionStore, name: str = "tale") -> None:
    session_identity = identity(engine)
    with store.writing(name):
        *_, saved = save_cache(engine, store, session_identity, None)
        store.write(SavedSession(name, "hybrid", 1.0, {"messages": []}, saved))


def assert_restored_text_continues(engine: Engine, store: SessionStore, end: int) -> None:
    """Save the engine's sequence, drop and restore it, and check that the tokens of IDS up to `end` give the same bits."""
    saved_tokens = list(engine.tokens)
    save(engine, store)
    expected = [engine.forward_logits([token]).copy() for token in IDS[len(saved_tokens) : end]]
    engine.cache.truncate(0)
    engine.reset()
    for index in engine.cache.indexes:
        index.memory[:] = 255
    restore(engine, store)
    assert engine.tokens == saved_tokens == IDS[: len(saved_tokens)]
    for token, row in zip(IDS[len(saved_tokens) : end], expected, strict=True):
        assert np.array_equal(engine.forward_logits([token]), row)


def assert_session_continues(engine: Engine, folder: Path) -> None:
    """Save after a prompt and three more tokens: a length that completes no page, chunk or block."""
    read_afresh(engine, IDS[:455])
    one_by_one(engine, IDS[455:458])
    assert_restored_text_continues(engine, SessionStore(folder), 480)
