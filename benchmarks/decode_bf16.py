#!/usr/bin/env python3
"""Decode speed of unquantized bf16 weights against the memory roofline, at depth 0 and at depth 1,024, in one run.

Random weights of the shape of TinyLlama-1.1B. Each round reads a weight-sized buffer with a load-only kernel (the roofline), decodes at one
depth, then at the other, and reads again; figures are medians over rounds, ratios are taken within a round, so that interference affects
both sides. Takes about a minute and 5 GiB of memory; wants the machine to itself.

    python benchmarks/decode_bf16.py [--shape tinyllama-1.1b] [--rounds 60] [--tokens 4]
"""

import argparse
import sys
import time
from statistics import median

import numpy as np

from effllm.kernels.cpu.memory_bandwidth import read_bandwidth
from effllm.offload.memory import anonymous
from effllm.runtime.engine import Engine, open_prepared
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.planning.needed_kernels import Needs, kernel_kinds
from effllm.runtime.prepare import EngineOptions
from report import GIB, Figure, publish

DEEP = 1024
INTRO = ("Random bf16 weights, 16-bit KV cache, token by token with logits. "
         "Roof: a load-only kernel over 1 GiB with the same threads, in the same round.")


def decode(engine: Engine, ids: list[int]) -> float:
    """Seconds per token, continuing the engine's context."""
    started = time.perf_counter()
    for token in ids:
        engine.forward_logits([token])
    return (time.perf_counter() - started) / len(ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    options = EngineOptions(device="cpu", ctx=2048, threads=arguments.threads)
    engine = list(open_prepared(lambda: prepare_synthetic(arguments.shape, options), kernel_kinds(Needs(), options)))[-1]
    pool, ids = engine.backends["cpu"].pool, np.random.default_rng(0).integers(0, engine.config.vocab_size, DEEP + 64).tolist()
    buffer = anonymous(GIB)
    buffer.view(np.uint64)[:] = 0x0123456789ABCDEF
    nbytes = engine.model.bytes_per_pass
    figures: dict[str, list[float]] = {"roof": [], "shallow": [], "deep": []}
    # One model and two caches: both depths are at hand, and a round is over before the machine changes its mind.
    caches = {"shallow": engine.cache, "deep": engine.new_cache()}
    engine.cache = caches["deep"]
    for _ in engine.prefill(ids[:DEEP]):
        continue
    for round_ in range(arguments.rounds + 1):
        roof = read_bandwidth(pool, buffer, passes=2)
        seconds = {}
        for depth in ("shallow", "deep"):
            engine.cache = caches[depth]
            if depth == "shallow":
                engine.cache.clear()
            seconds[depth] = decode(engine, ids[DEEP : DEEP + arguments.tokens])
        roof = (roof + read_bandwidth(pool, buffer, passes=2)) / 2
        caches["deep"].truncate(DEEP)
        if round_:  # the first round warms up
            figures["roof"].append(roof)
            for depth, value in seconds.items():
                figures[depth].append(value)
    shallow, deep, roof = figures["shallow"], figures["deep"], figures["roof"]
    fractions = [nbytes / seconds / roof for seconds, roof in zip(shallow, roof)]
    slowdowns = [d / s - 1 for s, d in zip(shallow, deep)]
    conditions = f"{arguments.shape}, bf16, {pool.workers} threads, median of {arguments.rounds} rounds of {arguments.tokens} tokens"
    publish("decode-bf16", "Decode of bf16 weights", INTRO, [
        Figure("roof_fraction", "share of the read roof, depth 0", conditions, median(fractions), ""),
        Figure("slower_at_1024", "slower at depth 1,024 than at 0", conditions, 100 * median(slowdowns), "%"),
        Figure("decode_tps", "decode, depth 0", conditions, 1 / median(shallow), "tokens/s"),
        Figure("decode_tps_1024", "decode, depth 1,024", conditions, 1 / median(deep), "tokens/s"),
        Figure("weights_gbps", "weights read, depth 0", f"{nbytes / 1e9:.2f} GB a token", nbytes / median(shallow) / 1e9, "GB/s"),
        Figure("roof_gbps", "read roof", f"load only, {pool.workers} threads, same run", median(roof) / 1e9, "GB/s"),
    ])
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
