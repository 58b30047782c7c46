#!/usr/bin/env python3
"""One layer's attention for one token, with tokens selected by an indexer against full attention, by context length.

Head shapes are those of published models, keys and values are random 16-bit numbers, so no model has to be read. Both sides, and the
selection by itself, alternate over the same pages; figures are medians.

    python benchmarks/sparse_attention.py [--shape NAME ...] [--depth 2048 8192 32768 131072] [--rounds 15] [--no-results]

Needs 0.6 GB of memory for DeepSeek's shape at the largest depth, and half a minute.
"""

from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import numpy as np

from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.indexer_shape import IndexShape
from effllm.kernels.layout import F16, PAGE
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.kv import RawCodec
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape
from report import Figure, parser_of, publish

DEPTHS, WARM = (2048, 8192, 32_768, 131_072), 2
INTRO = ("Attention of one layer for one token, with an indexer and its choice, against the same over all tokens: {threads} threads, "
         "random numbers in 16 bits, both and the choice alone by turns, medians of {rounds}. Up to 2,048 tokens a model sees all without "
         "choosing; that row shows what choosing costs by itself.")


@dataclass(frozen=True)
class Shape:
    """A model's heads and its indexer; `latent`: keys double as values."""

    heads: int
    kv_heads: int
    head_dim: int
    index: IndexShape
    latent: bool


SHAPES = {"deepseek-v3.2": Shape(128, 1, 576, IndexShape(64, 128, 64, 2048), True),
          "glm-5": Shape(64, 1, 576, IndexShape(32, 128, 64, 2048), True),
          "minimax-m3": Shape(64, 4, 128, IndexShape(4, 128, 64, 16, PAGE, True, 1), False)}


class Side:
    """A layer that holds `depth` tokens."""

    def __init__(self, shape: Shape, depth: int, pool: ThreadPool) -> None:
        self.shape, ctx, index_shape = shape, depth + 2 * PAGE, shape.index
        self.ops = CpuOps(pool, Dims(PAGE, shape.heads, shape.kv_heads, shape.head_dim, PAGE, PAGE, PAGE, ctx, 1, indexer=index_shape))
        spec = AttnSpec(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, None, None, index_shape, True, shape.latent)
        self.cache = build_cache([self.ops], [spec], RawCodec(F16), CacheShape(ctx, chunk=PAGE))
        self.cache.adopt(depth, self.cache.shape.sealed_at(depth))
        self.layer = self.cache.layer(0)
        self.dense = replace(self.layer, token_selection=None)
        rng = np.random.default_rng(0)
        drawn = rng.standard_normal(1 << 20).astype(np.float16)
        for memory in (self.layer.pages.exact, self.layer.pages.sealed, self.layer.token_selection.index.memory):
            halves = memory.view(np.float16)
            for at in range(0, len(halves), len(drawn)):
                halves[at : at + len(drawn)] = drawn[: len(halves) - at]
        widths = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, index_shape.heads * index_shape.width, index_shape.width,
                  index_shape.heads)
        self.q, self.k, *self.index = (rng.standard_normal((1, width), np.float32) for width in widths)

    def seconds(self, chooses: bool, attends: bool) -> float:
        """Time of a token that `chooses` and `attends`, or does only one of them."""
        started = perf_counter()
        with self.ops.collecting():
            self.cache.begin(1)
            if chooses:
                self.layer.choose(*self.index[:2], None if self.shape.index.per_head else self.index[2])
            if attends:
                (self.layer if chooses else self.dense).attend(self.q, self.k, self.k)
        return perf_counter() - started


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--depth", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    pool, figures = ThreadPool(options.threads), []
    for name in options.shape:
        for depth in options.depth:
            side, timings = Side(SHAPES[name], depth, pool), []
            for _ in range(WARM + options.rounds):
                timings.append([side.seconds(*flags) for flags in ((False, True), (True, True), (True, False))])
            dense, chosen, choice = (1000 * median(times) for times in zip(*timings[WARM:], strict=True))
            where = f"{depth:,} tokens held"
            figures += [Figure(f"ratio_{name}_{depth}", f"{name}: seeing all, of choosing", where, dense / chosen, "x"),
                        Figure(f"all_{name}_{depth}", f"{name}: seeing all", where, dense, "ms"),
                        Figure(f"chosen_{name}_{depth}", f"{name}: choosing, and seeing what is chosen", where, chosen, "ms"),
                        Figure(f"choice_{name}_{depth}", f"{name}: choosing alone", where, choice, "ms")]
    pool.close()
    publish("chosen-tokens", "Attention to chosen tokens", INTRO.format(threads=options.threads, rounds=options.rounds), figures,
            not options.no_results)


if __name__ == "__main__":
    main()
