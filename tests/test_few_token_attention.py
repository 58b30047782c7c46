"""Attention of a few tokens in one pass: each has the same bits as alone."""

import numpy as np
import pytest

from effllm.kernels.cpu.attention_decode import FEW_BLOCKS, MAX_QUERY_ROWS, max_tokens, partials_floats
from effllm.kernels.cpu.ops import FEW_TOKENS, CpuOps
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.kv import codec
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape

CTX = 8 * PAGE


def opened(heads: int, kv_heads: int, depth: int, kv: str, window: int | None, softcap: float | None) -> KVCache:
    shape = CacheShape(CTX, sink=64, window=128, chunk=PAGE)
    form = codec(kv)
    ops = CpuOps(ThreadPool(2), Dims(heads * depth, heads, kv_heads, depth, 64, 64, PAGE, CTX, 1, packed_kv=form.is_packed))
    return build_cache([ops], [AttnSpec(heads, kv_heads, depth, depth**-0.5, window=window, softcap=softcap)], form, shape)


def filled(cache: KVCache, rng: np.random.Generator, tokens: int) -> None:
    pages = cache.layer(0).pages
    for piece in cache.pieces(tokens):
        cache.begin(piece)
        k, v = (rng.standard_normal((piece, pages.layout.kv_heads * pages.layout.head_dim), np.float32) for _ in range(2))
        pages.write(k, v, cache.step.slots, cache.step.rows)
        cache.commit()


@pytest.mark.parametrize(("heads", "kv_heads", "depth", "kv", "window", "softcap"),
                         [(4, 4, 64, "16bit", None, None), (6, 2, 80, "16bit", None, None), (8, 1, 64, "32bit", 200, None),
                          (4, 2, 128, "16bit", 3, 20.0), (32, 1, 64, "16bit", None, None), (4, 4, 64, "4bit", None, None),
                          (8, 2, 128, "k8v4", None, 20.0), (8, 1, 80, "2bit", 300, None)])
@pytest.mark.parametrize("begun", [0, 60, 5 * PAGE - 3])
def test_a_token_has_the_bits_that_it_has_alone(heads: int, kv_heads: int, depth: int, kv: str, window: int | None, softcap: float | None,
                                                begun: int) -> None:
    rng = np.random.default_rng(begun)
    cache = opened(heads, kv_heads, depth, kv, window, softcap)
    filled(cache, rng, begun)
    cache.begin(FEW_TOKENS)
    pages, step = cache.layer(0).pages, cache.step
    k, v = (rng.standard_normal((FEW_TOKENS, kv_heads * depth), np.float32) for _ in range(2))
    pages.write(k, v, step.slots, step.rows)
    q, sinks = rng.standard_normal((FEW_TOKENS, heads * depth), np.float32), rng.standard_normal(heads).astype(np.float32)
    alone = np.concatenate([pages.attend(q[t : t + 1], step.position + t, step.blocks, sinks).copy() for t in range(FEW_TOKENS)])
    for tokens in range(2, FEW_TOKENS + 1):
        assert np.array_equal(pages.attend(q[:tokens], step.position, step.blocks, sinks), alone[:tokens])
    assert np.isfinite(alone).all() and (begun == 0 or len(np.unique(alone[:, 0])) == FEW_TOKENS)
    pages.ops.pool.close()


@pytest.mark.parametrize("heads", [4, 32])
@pytest.mark.parametrize("blocks", [3, FEW_BLOCKS, 5 * FEW_BLOCKS, 100 * FEW_BLOCKS])
def test_partials_never_outgrow_their_room(heads: int, blocks: int) -> None:
    layout = opened(heads, 4, 64, "16bit", None, None).layer(0).pages.layout
    room = partials_floats(FEW_TOKENS, heads, 64, blocks)
    for used in {1, 2, blocks // 9 + 1, blocks // 2 + 1, blocks}:
        tokens = max_tokens(room, heads, layout, used)
        assert 1 <= tokens and tokens * used * heads * (64 + 2) <= room and (tokens - 1) * heads // 4 < MAX_QUERY_ROWS
        if used <= min(blocks, FEW_BLOCKS):
            assert tokens >= FEW_TOKENS
