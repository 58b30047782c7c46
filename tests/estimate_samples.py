"""Page estimates (of pages that are not read) checked against their definition in float64; also run by child processes for other
instruction sets."""

from __future__ import annotations

import numpy as np

from effllm.kernels.cpu.attention_decode import attend_decode_scratch
from effllm.kernels.cpu.kv import chunk_softmax, selective
from effllm.kernels.cpu.kv import page_estimates as kernels
from effllm.kernels.cpu.kv import sign_products as sign_sums
from effllm.kernels.cpu.kv.sign_products import LARGEST, TABLE
from effllm.kernels.layout import PAGE
from effllm.kernels.lazy_numba import compiler
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import address

SHAPES = ((64, 4), (128, 3), (80, 6), (20, 1), (256, 8))  # head size, query heads of a KV head
LEAD, CHUNK, CHUNKS = 2, chunk_softmax.CHUNK, chunk_softmax.CHUNKS
MAX_WORKERS, GUARD = 3, 64  # that share the scratch of a sample; floats behind each one's


@compiler().njit("float32(int64, int64, int64)", error_model="numpy")
def make_tables(query, tables, depth):
    return sign_sums.make_tables(query, tables, depth)


@compiler().njit("void(int64, int64, int64, int64, int64, int64, int64)", error_model="numpy")
def scores_of_four(sides, far, tables, steps, more, out, pairs):
    sign_sums.sign_scores_4(sides, far, tables, steps, more, out, pairs)


@compiler().njit("void(int64, int64, int64, int64, int64, int64, int64)", error_model="numpy")
def scores_of_one(sides, far, tables, steps, more, out, pairs):
    sign_sums.sign_scores_1(sides, far, tables, steps, more, out, pairs)


def rounded(query: np.ndarray) -> tuple[np.ndarray, float]:
    """A query [D] as integers, and their scale."""
    fours = np.abs(np.pad(query, (0, -len(query) % 4))).reshape(-1, 4)
    step = fours.astype(np.float64).sum(1).max() / (LARGEST - 2)
    return np.rint(query / step) if step else np.zeros_like(query), step


def signs(sides: np.ndarray, depth: int) -> np.ndarray:
    """Bytes [..., pairs, PAGE] as 1 and -1, [..., PAGE, D]."""
    return 2.0 * np.unpackbits(np.moveaxis(sides, -2, -1), axis=-1, bitorder="little")[..., :depth] - 1


def check_sums() -> None:
    """Integers: the same on every instruction set. Includes the largest possible, and zeros."""
    rng = np.random.default_rng(3)
    for depth, _ in SHAPES:
        pairs = -(-depth // 8)
        queries = rng.standard_normal((4, depth)).astype(np.float32)
        queries[1], queries[2], queries[3, 1:] = 1, 0, 0
        sides, far = rng.integers(0, 256, (pairs, PAGE)).astype(np.uint8), rng.integers(0, 256, PAGE).astype(np.uint8)
        sides[:, 0], sides[:, 1], far[:2] = 255, 0, 255
        tables, ones, zeros = np.zeros((4, pairs, TABLE), np.uint8), np.ones(4, np.float32), np.zeros(4, np.float32)
        results, alone = np.zeros((2, 4, PAGE), np.float32)
        for row in range(4):
            step = make_tables(address(queries[row]), address(tables[row]), depth)
            np.testing.assert_allclose(step, rounded(queries[row])[1], rtol=1e-6)
        at, counted = (address(sides), address(far)), (address(ones), address(zeros))
        scores_of_four(*at, address(tables), *counted, address(results), pairs)
        for row in range(4):
            scores_of_one(*at, address(tables[row]), *counted, address(alone[row]), pairs)
        expected = np.stack([rounded(query)[0] for query in queries]) @ signs(sides, depth).T * far
        assert np.array_equal(results, expected) and np.array_equal(alone, expected)
        for bad in (np.nan, np.inf):
            queries[0, depth - 1] = bad
            assert np.isnan(make_tables(address(queries[0]), address(tables[0]), depth))


class Pages:
    """Random page summaries, the kernels' output for them, and the expected output."""

    def __init__(self, depth: int, group: int, kv_heads: int = 2, pages: int = 19, softcap: float = 0.0) -> None:
        rng = self.rng = np.random.default_rng(depth)
        self.depth, self.group, self.kv_heads, self.pages, self.softcap = depth, group, kv_heads, pages, softcap
        shape, pairs = (kv_heads, pages), -(-depth // 8)
        self.q = rng.standard_normal((kv_heads, group, depth)).astype(np.float32)
        self.sides, self.far = (rng.integers(0, 256, (*shape, *inner, PAGE)).astype(np.uint8) for inner in ((pairs,), ()))
        self.means, self.values = (rng.integers(-127, 128, (*shape, *inner, depth)).astype(np.int8) for inner in ((), (CHUNKS,)))
        self.steps = (0.01 * rng.random((*shape, kernels.STEP_SLOTS))).astype(np.float32)
        self.rotation = np.pad(selective.key_basis(depth), ((0, 0), (0, -depth % selective.TILE_COLUMNS)))
        self.picked, self.blocks = np.zeros(pages, np.uint8), LEAD + pages + 1
        self.partials = np.full((kv_heads, self.blocks, group, depth + 2), 7.0, np.float32)
        self.block = np.zeros(kernels.ESTIMATE_SLOTS, np.int64)
        scratch_floats = attend_decode_scratch(1, kv_heads * group, kv_heads, depth)  # what a run gives them
        self.scratch = np.full((MAX_WORKERS, scratch_floats + GUARD), 5.0, np.float32)
        slots = {kernels.E_Q: self.q, kernels.E_PARTIALS: self.partials, kernels.E_PICKED: self.picked, kernels.E_SIDES: self.sides,
                 kernels.E_FAR: self.far, kernels.E_MEANS: self.means, kernels.E_VALUES: self.values, kernels.E_STEPS: self.steps,
                 kernels.E_TURN: self.rotation, kernels.E_SCRATCH: self.scratch}
        for slot, array in slots.items():
            self.block[slot] = address(array)
        self.block[kernels.E_HEADS], self.block[kernels.E_KV_HEADS], self.block[kernels.E_DIM] = kv_heads * group, kv_heads, depth
        self.block[kernels.E_BLOCKS], self.block[kernels.E_FROM], self.block[kernels.E_TO] = self.blocks, 3, 3 + pages
        self.block[kernels.E_FIRST], self.block[kernels.E_COUNT], self.block[kernels.E_LEAD] = 3, pages, LEAD - 3
        self.block[kernels.E_SCRATCH_STRIDE] = self.scratch.strides[0]
        self.block.view(np.float64)[[kernels.E_SCALE, kernels.E_SOFTCAP]] = depth**-0.5, softcap

    def run(self, pool: ThreadPool) -> None:
        assert pool.workers <= MAX_WORKERS
        pool.run(kernels.estimate_pages, address(self.block))
        self.promised = self.partials[:, LEAD : LEAD + self.pages].copy()
        pool.run(kernels.estimate_outputs, address(self.block))
        assert (self.scratch[:, -GUARD:] == 5).all(), "a worker wrote behind its scratch"

    def scores(self) -> np.ndarray:
        """[KVH, pages, rows, PAGE], by the definition."""
        rotated = self.q.astype(np.float64) @ self.rotation[:, : self.depth]
        rounded_queries = np.stack([[number * step for number, step in map(rounded, head)] for head in rotated])
        far = self.steps[..., 0, None].astype(np.float64) * self.far
        sums = np.einsum("hrd,hptd->hprt", rounded_queries, signs(self.sides, self.depth)) * far[:, :, None]
        means = np.einsum("hrd,hpd->hpr", rotated, self.steps[..., 1, None].astype(np.float64) * self.means)
        scores = self.depth**-0.5 * (sums + means[..., None])
        return self.softcap * np.tanh(scores / self.softcap) if self.softcap else scores


def check_pages(pool: ThreadPool, depth: int, group: int, softcap: float = 0.0) -> None:
    """Masses of pages, and the outputs of those that are not read; the partials of the others and of other blocks stay what they are."""
    pages = Pages(depth, group, softcap=softcap)
    pages.picked[[1, 4, *range(8, 16)]] = 1  # some of a run, all of one
    pages.run(pool)
    scores = pages.scores()
    maxima = scores.max(-1)
    weights = np.exp(scores - maxima[..., None])
    np.testing.assert_allclose(pages.promised[..., depth], maxima, atol=2e-5)
    np.testing.assert_allclose(pages.promised[..., depth + 1], weights.sum(-1), rtol=1e-4)
    partials = pages.partials.astype(np.float64)
    assert (partials[:, [0, 1, -1]] == 7).all() and np.array_equal(partials[:, LEAD:-1][:, pages.picked > 0],
                                                                   pages.promised[:, pages.picked > 0])
    values = pages.steps[..., kernels.VALUE_STEPS :, None].astype(np.float64) * pages.values
    outputs = np.einsum("hprc,hpcd->hprd", weights.reshape(*weights.shape[:-1], CHUNKS, CHUNK).sum(-1), values)
    for begin in range(0, pages.pages, kernels.RUN):
        unread = [page for page in range(begin, min(begin + kernels.RUN, pages.pages)) if not pages.picked[page]]
        if not unread:
            continue
        top = maxima[:, unread].max(1)
        factor = np.exp(maxima[:, unread] - top[:, None])
        estimates = partials[:, LEAD + unread[0]]
        np.testing.assert_allclose(estimates[..., depth], top, atol=2e-5)
        np.testing.assert_allclose(estimates[..., depth + 1], (weights.sum(-1)[:, unread] * factor).sum(1), rtol=1e-4)
        np.testing.assert_allclose(estimates[..., :depth], (outputs[:, unread] * factor[..., None]).sum(1), atol=2e-4)
        assert all((partials[:, LEAD + page, :, depth + 1] == 0).all() for page in unread[1:])


def check_all() -> None:
    check_sums()
    pool = ThreadPool(2)
    for depth, group in SHAPES:
        check_pages(pool, depth, group)
    check_pages(pool, 64, 2, softcap=2.0)
    pool.close()


def bits(workers: int) -> bytes:
    """The kernels' output bits for one sample, with this many threads."""
    pool, pages = ThreadPool(workers), Pages(64, 4)
    pages.picked[5:9] = 1
    pages.run(pool)
    pool.close()
    return pages.promised[..., -2:].tobytes() + pages.partials.tobytes()
