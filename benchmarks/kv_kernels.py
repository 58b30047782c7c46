#!/usr/bin/env python3
"""The packed-cache kernels alone: one token's attention over a long cache, next to raw pages and the memory roofline; and sealing a page.

Attention: 32 query and 4 KV heads of 64 (TinyLlama's), 16,384 tokens per layer, cycling through as many layers as make a gigabyte of pages,
so that no page is still cached. Bit widths, raw pages and the roofline alternate in every round; figures are medians over rounds. Sealing:
one page of 22 layers, from 16-bit slots, including headers and checksums.

    python benchmarks/kv_kernels.py [--heads 32 8 128] [--bits 10 8 6 5 4 3 2] [--threads N] [--quick] [--no-results]
"""

import time
from statistics import median
from typing import NamedTuple

import numpy as np

from effllm.kernels.cpu.memory_bandwidth import read_bandwidth
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.offload.memory import anonymous
from effllm.quant.kv import PackedFormat, codec
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape
from report import GIB, Figure, parser_of, publish

TOKENS, LAYERS = 16384, 22
INTRO = ("One token, {} query and {} KV heads of {}, 16,384 tokens, layers in turn over a gigabyte of pages; random keys and values, the "
         "same bits in every head. Roof: a load-only kernel over 1 GiB with the same threads, in the same round.")


class Heads(NamedTuple):
    """A layer's query heads, KV heads, and head size."""

    queries: int
    kv: int
    dim: int


SHAPE = Heads(32, 4, 64)


def opened(pool: ThreadPool, kv: str, layers: int, heads: Heads = SHAPE) -> KVCache:
    form = PackedFormat(10, 10) if kv == "10bit" else codec(kv)  # 10 bits are for profiles to give, not to be asked for
    shape = CacheShape(TOKENS, sink=64, window=128, chunk=PAGE)
    ops = CpuOps(pool, Dims(heads.queries * heads.dim, *heads, 64, 64, PAGE, TOKENS, 1, packed_kv=form.is_packed))
    return build_cache([ops] * layers, [AttnSpec(*heads, heads.dim**-0.5)] * layers, form, shape)


def filled(cache: KVCache, layers: int, heads: Heads = SHAPE) -> list[float]:
    """Fill every layer with the same random pages, all but the last token; returns the seconds each page took to seal in all layers."""
    rng, sealing = np.random.default_rng(0), []
    for piece in cache.pieces(TOKENS - 1):
        cache.begin(piece)
        k, v = (rng.standard_normal((piece, heads.kv * heads.dim), np.float32) for _ in range(2))
        for layer in range(layers):
            pages = cache.layer(layer).pages
            pages.write(k, v, cache.step.slots, cache.step.rows)
        sealed, started = cache.sealed, time.perf_counter()
        cache.commit()
        if cache.sealed > sealed:
            sealing.append(time.perf_counter() - started)
    return sealing


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--heads", nargs=3, type=int, default=SHAPE, metavar=("QUERIES", "KV", "DIM"))
    parser.add_argument("--bits", nargs="+", default=["10", "8", "6", "5", "4", "3", "2"])
    parser.add_argument("--quick", action="store_true", help="a quarter of the pages and fewer rounds")
    options = parser.parse_args()
    pool, heads = ThreadPool(options.threads), Heads(*options.heads)
    names = [f"{bits}bit" for bits in options.bits] + ["16bit"]
    caches, sealing, sizes = {}, {}, {}
    for name in names:
        page = sum(codec.layout(heads.kv, heads.dim).layer_page_nbytes for codec in opened(pool, name, 1, heads).codecs)
        layers = max(2, GIB // (page * TOKENS // PAGE) // (4 if options.quick else 1))
        cache = caches[name] = opened(pool, name, layers, heads)
        sealing[name] = [1e3 * seconds * LAYERS / layers for seconds in filled(cache, layers, heads)]
        cache.begin(1)
        sizes[name] = cache.sealed * page

    q = np.random.default_rng(1).standard_normal((1, heads.queries * heads.dim), np.float32)
    buffer, rates, shares = anonymous(GIB), {name: [] for name in names}, {name: [] for name in names}
    buffer[:] = 1
    for _ in range(3 if options.quick else 7):
        for name, cache in caches.items():
            roof, count = read_bandwidth(pool, buffer), len(cache.codecs)
            with cache.layer(0).pages.ops.collecting():  # as a forward pass does: prepared first, then run in one go
                for layer in range(count):
                    cache.layer(layer).pages.attend(q, cache.step.position, cache.step.blocks)
                started = time.perf_counter()
            seconds = (time.perf_counter() - started) / count
            rates[name].append(1e3 * seconds)
            shares[name].append(sizes[name] / seconds / roof)
    pool.close()

    raw, figures = rates["16bit"], []
    for name in names:
        if name != "16bit":
            ratio = median(b / a for a, b in zip(rates[name], raw, strict=True))
            figures.append(Figure(f"against_raw_{name}", f"--kv {name} against 16bit", "attention", ratio, "x"))
        figures += [Figure(f"ms_{name}", f"--kv {name}", "attention of a layer", median(rates[name]), "ms"),
                    Figure(f"roof_{name}", f"--kv {name}", "of the read roof", median(shares[name]), "x")]
        if name != "16bit":
            figures.append(Figure(f"seal_{name}", f"--kv {name}", f"sealing a page of {LAYERS} layers", median(sealing[name]), "ms"))
    name = "kv-kernels" if heads == SHAPE else f"kv-kernels-{heads.queries}-{heads.kv}-{heads.dim}"
    publish(name, "Kernels of packed caches", INTRO.format(*heads), figures, keep=not options.no_results)


if __name__ == "__main__":
    main()
