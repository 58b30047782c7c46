"""Sessions with a GPU to which long prefills copy layers: a reused prefix has the bits of prefilling the whole prompt there."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conversions import FABLE
from gpu_runs import opened, simulated
from session_engines import read, save, tokens

from effllm.kernels.layout import PAGE
from effllm.runtime.engine import Engine
from effllm.runtime.prefill_chunks import chunk_lengths, join_chunks, resumes_alike, same_as_uncached
from effllm.runtime.sessions.saved_cache import identity, kernel_identity
from effllm.runtime.sessions.session_prefix import restore_prefix
from effllm.runtime.sessions.session_store import SessionStore

SINKS, CTX, LINK = 64, 1536, 2e8


@pytest.fixture(scope="module")
def copying() -> Iterator[Engine]:
    engine, _ = opened(FABLE, simulated(4 << 30, LINK), gpu_layers=1, ctx=CTX)
    assert PAGE < engine.model.copied_from < 400 and engine.prepared.chunk == 512
    yield engine
    engine.close()


def pages(engine: Engine, count: int) -> list[np.ndarray]:
    return [data for page in range(count) for data in engine.cache.read(page)]


def test_short_passes_leave_what_a_whole_reading_would_not(copying: Engine) -> None:
    """What is counted as read anew has the bits of reading it at once; short passes, computed on the host, are not counted."""
    ids, few = tokens(1100), copying.model.copied_from - 1
    copying.reset()
    read(copying, ids)
    assert copying.num_fresh_tokens == 960, "the last 140 are fewer than a whole chunk's, on the other side"
    whole = pages(copying, 7)
    copying.reset()
    read(copying, ids[:few])
    assert copying.num_fresh_tokens == 0
    copying.reset()
    for end in (448, 448 + 30, 960):
        read(copying, ids[:end])
    assert copying.num_fresh_tokens == 448
    for own, want in zip(pages(copying, 3), whole):
        np.testing.assert_array_equal(own, want)


@pytest.mark.parametrize(("common", "rest", "lent"),
                         [(1000, 40, 7), (900, 300, 4), (960, 500, 7), (500, 0, 0), (700, 20, 3), (600, 600, 4)])
def test_what_is_lent_has_the_bits_of_a_whole_reading(copying: Engine, tmp_path: Path, common: int, rest: int, lent: int) -> None:
    store, prompt = SessionStore(tmp_path / "sessions"), tokens(1100)[:common] + tokens(rest, 1)
    copying.reset()
    read(copying, tokens(1100))
    save(copying, store, "one")
    copying.reset()
    own = identity(copying)
    copying.extend_prefix = lambda ids, held: restore_prefix(copying, store, own, ids, held)
    try:
        read(copying, prompt)
    finally:
        copying.extend_prefix = lambda ids, held: (held, [])
    reused, got, held = copying.num_cached_tokens, copying._logits.copy(), pages(copying, copying.cache.sealed)
    copying.reset()
    read(copying, prompt)
    np.testing.assert_array_equal(got, copying._logits)
    for own, want in zip(held, pages(copying, copying.cache.sealed)):  # of what was lent a page more may be sealed
        np.testing.assert_array_equal(own, want)
    assert reused == (SINKS + PAGE * lent if lent else 0)


def test_runs_that_copy_otherwise_lend_each_other_nothing(copying: Engine) -> None:
    slow, _ = opened(FABLE, simulated(), gpu_layers=1, ctx=CTX)
    try:
        assert slow.placement.devices == copying.placement.devices and kernel_identity(slow) != kernel_identity(copying)
    finally:
        slow.close()


@pytest.mark.parametrize("copied_from", [2, 60, 100, 300, 449, 500])
def test_the_sides_of_passes(copied_from: int) -> None:
    """A prompt goes on from what is lent where every token is on the side on which reading the prompt whole has it."""
    long = sides(0, 4096, copied_from)
    for total in (*range(70, 1100, 33), 448, 449, 512, 513, 960, 961):
        whole = sides(0, total, copied_from)
        for held in range(SINKS + PAGE, total, PAGE):
            few = total - held <= 16 and held % 512 != 448
            same = long[:held] + sides(held, total, copied_from) == whole
            assert resumes_alike(held, total, SINKS, 512, copied_from) == (same and not few)
            assert resumes_alike(held, total, SINKS, 512, None) != few


def sides(at: int, end: int, copied_from: int) -> list[bool]:
    """Of each token, whether its pass copies layers."""
    return [copied for tokens in join_chunks(chunk_lengths(at, end, SINKS, 512), 512) for copied in [tokens >= copied_from] * tokens]


def test_a_pass_over_two_chunks_counts_where_both_would_be_copied(copying: Engine) -> None:
    copying.reset()
    read(copying, tokens(430))
    for piece, copied_from, alike in ((100, 90, True), (100, 110, False), (100, None, True), (500, 460, False)):
        assert same_as_uncached(copying.cache, piece, 512, copied_from) == alike
