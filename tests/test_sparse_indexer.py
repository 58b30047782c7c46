"""The sparse-attention indexer and attention over the keys it selects: kernels against their definition, and bits independent of
chunking."""


import numpy as np
import pytest

from effllm.kernels import reference
from effllm.kernels import reference_indexer as meaning
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import FEW_TOKENS, CpuOps
from effllm.kernels.indexer_shape import IndexShape
from effllm.kernels.layout import F16, F32, PAGE
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.kv import RawCodec
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape

CTX, TEXT = 768, 700
# One choice for all heads by tokens, as DeepSeek's, whose keys are values; a choice for each head of keys by blocks, as MiniMax's.
TOKENS, BLOCKS = IndexShape(9, 40, 16, 100), IndexShape(2, 24, 8, 3, block_size=64, per_head=True, local_blocks=1)
CASES = {"tokens, keys are values": (TOKENS, 13, 1, 72, True), "tokens": (TOKENS, 4, 2, 24, False), "blocks": (BLOCKS, 6, 2, 80, False),
         "blocks of a page, near ones": (IndexShape(3, 16, 4, 4, block_size=PAGE, per_head=True, local_blocks=2), 6, 3, 64, False)}


class Text:
    """Random queries, keys and values of a text and of its index, and what a layer made of them. Those of the index are whole numbers: many
    tokens are as good as one another, and none nearly."""

    def __init__(self, name: str, seed: int = 1) -> None:
        self.shape, self.heads, self.kv_heads, self.depth, self.latent = CASES[name]
        rng = np.random.default_rng(seed)
        widths = self.heads * self.depth, self.kv_heads * self.depth, self.kv_heads * self.depth
        self.q, self.k, self.v = (rng.standard_normal((TEXT, width), np.float32) for width in widths)
        self.v = self.k if self.latent else self.v
        own = self.shape
        for kept in (self.k, self.v):
            kept[:] = kept.astype(np.float16)
        self.index = [rng.integers(-3, 4, (TEXT, width)).astype(np.float32) for width in (own.heads * own.width, own.width, own.heads)]

    def cache(self, pool: ThreadPool, stored: int = F32, sink: int = 64, only: str | None = None) -> KVCache:
        dims = Dims(8, self.heads, self.kv_heads, self.depth, 8, 8, chunk=512, ctx=CTX, logit_rows=1, indexer=self.shape)
        spec = AttnSpec(self.heads, self.kv_heads, self.depth, self.depth**-0.5, None, None, self.shape, True, self.latent)
        return build_cache([CpuOps(pool, dims, default_registry(only))], [spec], RawCodec(stored), CacheShape(CTX, sink))

    def through(self, cache: KVCache, *cuts: int) -> np.ndarray:
        """What every token attends to, of a text that comes in such pieces."""
        out = []
        for cut in cuts:
            for piece in cache.pieces(cut):
                span = slice(cache.n, cache.n + piece)
                cache.begin(piece)
                q, k, v, *index = (np.ascontiguousarray(part[span]) for part in (self.q, self.k, self.v, *self.index))
                layer = cache.layer(0)
                layer.choose(*index[:2], None if self.shape.per_head else index[2])
                out.append(layer.attend(q, k, v).copy())
                cache.commit()
        return np.concatenate(out)

    def meant(self, tokens: int) -> np.ndarray:
        """The same by the references."""
        own, (q, k, weights) = self.shape, (part[:tokens] for part in self.index)
        chosen = meaning.choose(meaning.scores(q, k, None if own.per_head else weights, 0, own), own)
        seen = meaning.seen(chosen, tokens, self.kv_heads, own)
        q, k, v = (part[:tokens].reshape(tokens, -1, self.depth) for part in (self.q, self.k, self.v))
        return reference.attend(q, k, v, 0, np.arange(tokens), self.depth**-0.5, None, None, seen=seen).reshape(tokens, -1)


def test_the_meaning_of_a_choice() -> None:
    """By hand: relu, weights of heads, the earlier of equal ones, and blocks by their best token with the own one always in."""
    own = IndexShape(2, 1, 0, 2)
    q, k, weights = np.array([[1.0, -1.0]]), np.array([[3.0], [-1.0], [2.0], [-1.0]]), np.array([[1.0, 5.0]])
    found = meaning.scores(q, k, weights, 3, own)
    assert found.tolist() == [[[3.0, 5.0, 2.0, 5.0]]] and meaning.choose(found, own).tolist() == [[[1, 3]]]
    assert meaning.scores(q, k, weights, 1, own)[0, 0].tolist() == [3.0, 5.0, -np.inf, -np.inf]
    assert meaning.choose(np.array([[[1.0, 2.0, 1.0, 1.0]]]), own).tolist() == [[[0, 1]]]
    blocks = IndexShape(1, 1, 0, 2, block_size=2, per_head=True, local_blocks=1)
    found = meaning.scores(np.ones((1, 1)), np.array([[1.0], [4.0], [2.0], [3.0], [-9.0]]), None, 4, blocks)
    assert found.tolist() == [[[4.0, 3.0, np.inf]]] and meaning.choose(found, blocks).tolist() == [[[0, 2]]]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("stored", "only"), [pytest.param(F32, None, marks=pytest.mark.slow), (F32, "reference"), (F16, None)])
def test_attention_over_what_is_chosen(pool: ThreadPool, name: str, stored: int, only: str | None) -> None:
    text = Text(name)
    meant = text.meant(TEXT)
    for cuts in ([TEXT], [300, 1, 1, FEW_TOKENS, 1, 150, TEXT - 461]) if only is None else ([TEXT],):
        assert np.abs(text.through(text.cache(pool, stored, only=only), *cuts) - meant).max() < 1e-5
    whole = reference.attend(*(part.reshape(TEXT, -1, text.depth) for part in (text.q, text.k, text.v)), 0, np.arange(TEXT),
                             text.depth**-0.5, None, None).reshape(TEXT, -1)
    differs = np.abs(whole - meant).max(1) > 1e-3
    assert not differs[: text.shape.dense_tokens].any() and differs[text.shape.dense_tokens + PAGE :].all()


@pytest.mark.parametrize("name", CASES)
def test_neither_threads_nor_pieces_change_a_bit(name: str) -> None:
    """Nor where pages begin, of tokens that choose."""
    text, found = Text(name), []
    for threads, cuts, sink in ((1, [TEXT], 64), (2, [TEXT], 64), (3, [400, *[1] * 9, 5, 2, TEXT - 416], 64), (2, [TEXT], 0),
                                (2, [TEXT], 128)):
        pool = ThreadPool(threads)
        found.append(text.through(text.cache(pool, F16, sink), *cuts)[text.shape.dense_tokens :])
        pool.close()
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("stored", [F32, F16])
def test_keys_of_tokens_are_read_and_written_as_they_lie(pool: ThreadPool, stored: int) -> None:
    text = Text("tokens")
    cache = text.cache(pool, stored)
    text.through(cache, 333)
    (index,), kind = cache.indexes, np.float32 if stored == F32 else np.float16
    assert np.array_equal(index.keys(333), text.index[1][:333].astype(kind))
    assert np.array_equal(index.read(100, 300).view(kind).reshape(200, -1), index.keys(333)[100:300])
    other = text.cache(pool, stored)
    for begin, end in ((0, 64), (64, 192), (192, 333)):
        other.indexes[0].write(begin, index.read(begin, end))
    assert np.array_equal(other.indexes[0].keys(333), index.keys(333))
    assert cache.index_nbytes == 3 * PAGE * 40 * np.dtype(kind).itemsize


def test_scores_that_are_not_finite_choose_as_many(pool: ThreadPool) -> None:
    text = Text("tokens")
    text.index[1][50] = np.nan
    text.index[0][200, 0] = np.inf
    cache = text.cache(pool)
    text.through(cache, 250)
    assert all(len(set(units)) == text.shape.top_k and units.max() < 250 for units in cache.chosen.units[-20:])
