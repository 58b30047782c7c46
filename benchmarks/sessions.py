#!/usr/bin/env python3
"""Restoring a saved session against prefilling its tokens again: time to identical logits, bit equality of the logits, bytes on disk.

    python benchmarks/sessions.py [--shape tinyllama-1.1b] [--tokens 2000] [--kv 4bit] [--rounds 3] [--no-results]

Random 4-bit weights (created once, as for compare_llamacpp.py). One engine reads the tokens and saves, another restores the session; both
then run one more token. Files are read from the page cache and, in a second figure, after being evicted from it.
"""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from platformdirs import user_cache_path

from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sessions.saved_cache import identity, refuse_other, restore_cache, save_cache
from effllm.runtime.sessions.session_format import SavedSession
from effllm.runtime.sessions.session_store import SessionStore
from report import Figure, parser_of, publish

INTRO = ("Random weights at the shape of {shape} in 4 bits (codebook4:16), {tokens} tokens, --kv {kv}, {threads} threads. Restoring counts "
         "all from the session's file to the engine that holds it: reading, checksums, the model's identity. Sizes count every file.")


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--kv", default="4bit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "benchmarks")
    options = parser.parse_args()
    from benchmark_processes import quantized_folder, random_folder, result_name

    folder = random_folder(options.shape, options.work)
    model_folder = quantized_folder(folder, "4", options.threads)
    ctx = options.tokens + 16
    engine_options = EngineOptions(device="cpu", kv=options.kv, ctx=ctx, threads=options.threads)
    first, second = (list(open_engine(model_folder, engine_options))[-1] for _ in range(2))
    ids = np.random.default_rng(0).integers(0, first.config.vocab_size, options.tokens + 1).tolist()
    started = time.perf_counter()
    prefill(first, ids[:-1])
    read_s = time.perf_counter() - started
    with tempfile.TemporaryDirectory(dir=options.work) as work_folder:
        store = SessionStore(Path(work_folder) / "sessions")
        started = time.perf_counter()
        save(first, store)
        save_s = time.perf_counter() - started
        nbytes = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
        warm = [restored(second, store, drop=False) for _ in range(options.rounds + 1)][1:]  # the first one wakes the threads
        cold = [restored(second, store, drop=True) for _ in range(options.rounds)]
    logits = [engine.forward_logits(ids[-1:]).copy() for engine in (first, second)]
    same = float(np.array_equal(*logits))
    exact = 2 * 2 * options.tokens * first.config.num_hidden_layers * first.config.num_key_value_heads * first.config.head_dim
    conditions = f"{options.tokens} tokens, --kv {options.kv}"
    figures = [
        Figure("prefill_s", "reading the tokens", conditions, read_s, "s"),
        Figure("restore_s", "restoring the session", f"{conditions}, median of {options.rounds}", median(warm), "s"),
        Figure("restore_cold_s", "restoring it, files dropped from the page cache", conditions, median(cold), "s"),
        Figure("faster", "restoring against reading", conditions, read_s / median(warm), "x"),
        Figure("faster_cold", "the same, files dropped", conditions, read_s / median(cold), "x"),
        Figure("identical", "logits of the next token have the same bits", "1 is yes", same, ""),
        Figure("size", "files against the cache in 16 bits", conditions, nbytes / exact, "x"),
        Figure("mib", "files", conditions, nbytes / 2**20, "MiB"),
        Figure("save_s", "saving all of it", "synced to the disk", save_s, "s"),
    ]
    intro = INTRO.format(shape=options.shape, tokens=options.tokens, kv=options.kv, threads=options.threads)
    publish(result_name("sessions", options.shape), "Saved sessions", intro, figures, keep=not options.no_results)
    for engine in (first, second):
        engine.close()


def prefill(engine: Engine, ids: list[int]) -> None:
    for _ in engine.prefill(ids):
        continue


def save(engine: Engine, store: SessionStore) -> None:
    with store.writing("benchmark"):
        *_, cache = save_cache(engine, store, identity(engine), None)
        store.write(SavedSession("benchmark", "random", time.time(), {}, cache))


def restored(engine: Engine, store: SessionStore, drop: bool) -> float:
    """Seconds from the session's file to an engine that holds it."""
    engine.reset()
    for path in store.folder.rglob("*") if drop else ():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    session = store.read("benchmark")
    refuse_other(session, identity(engine))
    for _ in restore_cache(engine, store, session):
        continue
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
