#!/usr/bin/env python3
"""Memory of a KV cache against its plan: the bytes it allocates, and how much a process grows from 1k to 32k tokens.

Random 4-bit weights of the shape of TinyLlama 1.1B, `--kv` 16bit, 8bit, 4bit and 2bit, each context in its own process, full except for one
token: the first 1,023 tokens are read, the following pages are copies of the first, and the last tokens are read at their depth. RSS is
counted page by page (`smaps_rollup`), since VmRSS misses what each CPU has not reported yet. It is taken when the context is full, so both
processes have loaded, compiled and computed the same, and differ by the cache.

    python benchmarks/kv_memory.py [--kv 16bit 8bit 4bit 2bit] [--ctx 32768] [--no-results]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from effllm.runtime.engine import Engine, open_prepared
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.planning.needed_kernels import Needs, kernel_kinds
from effllm.runtime.prepare import EngineOptions
from kv_offload import opened, repeat_page
from report import Figure, parser_of, publish

SHAPE, SHORT, LONG = "tinyllama-1.1b", 1024, 32768
MIB = 1 << 20
INTRO = ("Random weights of 4 bits at the shape of TinyLlama 1.1B, contexts of {short:,} and {long:,} tokens, each full but for a token in "
         "a process of its own. Planned: the cache's bytes as `effllm plan` says them. Set aside: the memory of exact tokens and of the "
         "page pool, counted by the cache. A layer's pages lie in one extent, from 2 MiB up on huge pages: where a long context holds few "
         "tokens, the first 2 MiB of each layer are there all the same, so a process grows by less from there than from a short context.")


def rss() -> int:
    """Resident bytes of this process, counting every page."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def read(engine: Engine, ids: list[int]) -> None:
    for _ in engine.prefill(ids):
        continue


def counted(kv: str, ctx: int, threads: int) -> dict[str, int]:
    """Bytes of a full context of `ctx` tokens: planned, set aside by the cache, used by what it holds, of this process; in `rss_short`
    of this process when it held SHORT tokens."""
    options = EngineOptions(device="cpu", ctx=ctx, kv=kv, kernel="dot", threads=threads, force=True)
    engine = opened(open_prepared(lambda: prepare_synthetic(SHAPE, options, "4bit"), kernel_kinds(Needs(True), options)))
    cache = engine.cache
    read(engine, np.random.default_rng(0).integers(0, engine.config.vocab_size, SHORT - 1).tolist())
    short = rss()
    if ctx > SHORT:
        repeat_page(engine)
        read(engine, engine.tokens + engine.tokens[: ctx - 1 - cache.n])
    if cache.n != ctx - 1:
        raise RuntimeError(f"{cache.n} tokens are held, not {ctx - 1}")
    counts = {"planned": engine.placement.kv_bytes, "set_aside": cache.pool.nbytes + sum(map(len, cache.slots.memory)),
              "used": cache.allocated_nbytes, "rss": rss(), "rss_short": short}
    engine.close()
    return counts


def child(kv: str, ctx: int, threads: int) -> dict[str, int]:
    """`counted` in a process of its own. Raises CalledProcessError where it fails."""
    command = [sys.executable, __file__, "--threads", str(threads), "--one", kv, str(ctx)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def figures(kv: str, long: int, threads: int) -> Iterator[Figure]:
    short_run, long_run = (child(kv, ctx, threads) for ctx in (SHORT, long))
    grown = {name: long_run[name] - short_run[name] for name in long_run}
    planned, name = grown["planned"], f"--kv {kv}"
    yield Figure(f"{kv}_set_aside_off", f"{name}: set aside less planned", f"{SHORT} tokens and {long}, the larger of the two",
                 max(abs(run["set_aside"] - run["planned"]) for run in (short_run, long_run)), "bytes")
    yield Figure(f"{kv}_planned_mib", f"{name}: planned for {long} tokens", "first and newest tokens exact", long_run["planned"] / MIB,
                 "MiB")
    yield Figure(f"{kv}_used_mib", f"{name}: used by {long - 1} tokens", "", long_run["used"] / MIB, "MiB")
    yield Figure(f"{kv}_grown_planned_mib", f"{name}: {SHORT} to {long} tokens, by the plan", "", planned / MIB, "MiB")
    yield Figure(f"{kv}_grown_rss_mib", f"{name}: {SHORT} to {long} tokens, RSS", "two processes, contexts full", grown["rss"] / MIB, "MiB")
    yield Figure(f"{kv}_off_mb", f"{name}: RSS less the plan", "of that growth", (grown["rss"] - planned) / 1e6, "MB")
    yield Figure(f"{kv}_off", f"{name}: RSS over the plan", "of that growth", grown["rss"] / planned, "×")
    yield Figure(f"{kv}_within_mib", f"{name}: {SHORT - 1} to {long - 1} tokens in one context", f"RSS, one process, context of {long}",
                 (long_run["rss"] - long_run["rss_short"]) / MIB, "MiB")


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--kv", nargs="+", default=["16bit", "8bit", "4bit", "2bit"])
    parser.add_argument("--ctx", type=int, default=LONG)
    parser.add_argument("--one", nargs=2, metavar=("KV", "CTX"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kv, ctx = options.one
        print(json.dumps(counted(kv, int(ctx), options.threads)))
        return
    results = [figure for kv in options.kv for figure in figures(kv, options.ctx, options.threads)]
    publish("kv-memory", "Memory of the KV cache", INTRO.format(short=SHORT, long=options.ctx), results, keep=not options.no_results)


if __name__ == "__main__":
    main()
