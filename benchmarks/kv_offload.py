#!/usr/bin/env python3
"""A KV cache twice as large as its memory: tokens per second with all pages read from disk, and with a selection, against everything in
memory.

Random 4-bit weights and 4-bit pages of the shape of Llama 3.2 1B, 32,768 tokens deep. Pages are copies of one that a prompt produced, which
does not affect speed if every page is read; with selection, page summaries are computed from randomly perturbed keys, so that random tokens
select random pages, as many as allowed. Real text selects the same pages again: of the quarter of its pages that a token of fable's
held-out text wants, 0.62 are in memory from earlier tokens (--quality --picked 2). So turns in which a token often repeats the previous one
are measured as well, which leads to half of them. Sides alternate in turns of a few tokens in one process; the disk's rate B is that of a
token's actual reads with nothing computed meanwhile, before and after every turn. --quality measures on fable the cost of selection next to
that of the 4-bit pages, token by token, with all sealed pages on disk.

    python benchmarks/kv_offload.py [--ctx 32768] [--rounds 3] [--spill-dir DIR] [--publish]
    python benchmarks/kv_offload.py --quality --text heldout.txt [--windows 8] [--publish]
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

import effllm
from effllm.kernels.layout import PAGE
from effllm.offload.predict import Prediction
from effllm.offload.size import format_size
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine, open_prepared
from effllm.runtime.events import Notice
from effllm.runtime.kv import kv_spill
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.measuring.evaluate import log_softmax, windows
from effllm.runtime.planning.needed_kernels import folder_kinds
from effllm.runtime.prepare import EngineOptions, Prepared, prepare
from effllm.runtime.tokenizer import Tokenizer
from predicted_speed import promise
from report import Figure, publish

SHAPE, TURN = "llama3.2-1b", 6
STAYS, ALIKE = 0.6, 12  # how often a token is the one before, in turns of so many
ROWS = 1000  # of the embedding that tokens are drawn from
PROBED = 256 << 20  # bytes of a file that the disk is probed on
TOKENS = np.random.default_rng(2)
FABLE = Path(effllm.__path__[0]) / "models" / "fable"
SPEED = ("Random weights of 4 bits, 4-bit pages; half of the cache in memory, half in a file that is read past the page cache. Sides take "
         "turns in one process.")
QUALITY = "KL divergence from the same weights with an exact cache, token by token; all sealed pages on the disk. Means over windows."


def opened(items: object) -> Engine:
    """The engine at the end of a loading generator."""
    for item in items:
        if isinstance(item, Notice):
            print(item.text, file=sys.stderr, flush=True)
    return item


def synthetic(ctx: int, **more: object) -> Engine:
    def prepare() -> Prepared:
        return prepare_synthetic(SHAPE, EngineOptions(device="cpu", ctx=ctx, kv="4bit", kernel="dot", **more), "4bit")

    return opened(open_prepared(prepare, ("raw", "low-bit", "kv", "sparse")))


def deepen(engine: Engine) -> None:
    """Fill the context with copies of a page from a prompt, except for a few tokens."""
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, 640).tolist()
    for _ in engine.prefill(ids):
        continue
    repeat_page(engine)


def repeat_page(engine: Engine) -> None:
    """Fill what is left of the context with copies of its first page, all but a few tokens."""
    cache = engine.cache
    pages, last = [cache.pool.page(layer, 0).copy() for layer in range(len(cache.codecs))], cache.sealed
    shift = (engine.n_ctx - cache.n) // PAGE - 1
    picks, rng = cache.pool.picks, np.random.default_rng(1)
    sides = [cache.layer(layer).pages.sides(1, 0) for layer in range(len(pages))] if picks else []
    for index in range(last, last + shift):
        for layer, page in enumerate(pages):
            cache.pool.place(layer, index)[:] = page
            if picks and index >= cache.pool.first:
                k, v = sides[layer]
                cache.layer(layer).pages.selective.note(index, k + k.std() * rng.standard_normal((1, *k.shape[1:])), v)
        cache.pool.keep(index)
    cache.slots.of = {page + shift if page >= 0 else page: slot for page, slot in cache.slots.of.items()}
    cache.sealed, cache.n, cache._changed = last + shift, cache.n + shift * PAGE, True
    cache._kinds = [1] * cache.sealed
    engine.tokens = (engine.tokens * (engine.n_ctx // len(engine.tokens) + 1))[: cache.n]


def turn(engine: Engine, ids: Sequence[int]) -> tuple[list[float], float, float]:
    """Seconds of every token, bytes read per token, and the share of selected pages already in memory; the cache is restored afterwards."""
    stream, position, seconds = engine.cache.pool.stream, engine.cache.n, []
    slots, nbytes = stream.slots if stream else [], engine.cache.pool.traffic.nbytes
    num_asked, num_found = sum(slot_counts.num_requested for slot_counts in slots), sum(slot_counts.num_hits for slot_counts in slots)
    for token in ids:
        started = time.perf_counter()
        engine.forward_logits([token])
        seconds.append(time.perf_counter() - started)
    engine.cache.truncate(position)
    del engine.tokens[position:]
    num_asked = sum(slot_counts.num_requested for slot_counts in slots) - num_asked
    num_found = sum(slot_counts.num_hits for slot_counts in slots) - num_found
    return seconds, (engine.cache.pool.traffic.nbytes - nbytes) / len(ids), num_found / max(1, num_asked)


def alike() -> list[int]:
    """Tokens that often repeat the previous one."""
    ids = TOKENS.integers(0, ROWS, ALIKE)
    stays = TOKENS.random(ALIKE) < STAYS
    for index in range(1, ALIKE):
        ids[index] = ids[index - 1] if stays[index] else ids[index]
    return ids.tolist()


def disk_rate(engine: Engine) -> float:
    """Bytes per second of a token's reads, in order, with nothing computed."""
    stream = engine.cache.pool.stream
    engine.cache.begin(2 if engine.cache.pool.picks else 1)  # two tokens read all pages
    runs = [run for layer in range(len(stream.page_nbytes)) for run in stream.runs(layer)]
    for number in range(2):
        if number:
            before, started = stream.traffic.nbytes, time.perf_counter()
        for run in runs:
            with stream.lease(run):
                continue
    return (stream.traffic.nbytes - before) / (time.perf_counter() - started)


def promised(engine: Engine, folder: str | None) -> Prediction:
    """The prediction of `plan` for a full context, which is what is run; the disk is probed on a file next to the cache's."""
    with tempfile.NamedTemporaryFile(dir=folder or kv_spill.spill_folder(engine.prepared.options)) as file:
        for _ in range(PROBED // len(noise := np.random.default_rng(4).bytes(1 << 20))):
            file.write(noise)
        os.fsync(file.fileno())
        return promise(engine.prepared, Path(file.name)).full


def speed(ctx: int, rounds: int, folder: str | None, keep: bool) -> None:
    memory = synthetic(ctx)
    total = memory.placement.kv_bytes
    half = {"kv_ram": str(total // 2), "spill_dir": folder}
    sides = {"memory": memory, "exact": synthetic(ctx, **half), "sparse": synthetic(ctx, kv_read="sparse", **half)}
    for engine in sides.values():
        deepen(engine)
    expected = promised(sides["exact"], folder)
    cache = sides["exact"].cache
    page, on_disk = sum(cache.pool.page_nbytes), cache.sealed - cache.pool.first
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    shares, of_disk, ratios, rates, read, same = [], [], [], [], [], []
    for number in range(rounds + 1):
        rate = disk_rate(sides["exact"])
        ids = TOKENS.integers(0, ROWS, TURN).tolist()
        results = {name: turn(engine, ids) for name, engine in sides.items()}
        rate = (rate + disk_rate(sides["exact"])) / 2
        ids = alike()
        in_memory, sparse_run = (turn(sides[name], ids) for name in ("memory", "sparse"))
        if not number:  # wakes the threads, fills slots
            continue
        same.append((sum(in_memory[0]) / sum(sparse_run[0]), sparse_run[1] / (cache.sealed * page), sparse_run[2]))
        for name, (values, *_) in results.items():
            seconds[name].append(median(values))
        rates.append(rate)
        last = {name: values[-1] for name, values in seconds.items()}
        of_disk.append(on_disk * page / rate / last["exact"])
        shares.append(max(on_disk * page / rate, last["memory"]) / last["exact"])
        ratios.append(last["memory"] / last["sparse"])
        read.append(results["sparse"][1] / (cache.sealed * page))
    under = f"{format_size(total)} of cache, {format_size(total // 2)} of memory for it, {cache.n} tokens"
    sparse_run = sides["sparse"].placement
    same_kept, same_read, same_found = (median(column) for column in zip(*same, strict=True))
    figures = [Figure("exact_share", "all pages read: of what the slower of disk and processor allows", under, median(shares), ""),
               Figure("exact_of_disk", "all pages read: of the disk's rate", under, median(of_disk), ""),
               Figure("exact_tps", "all pages read", f"{format_size(on_disk * page)} from the disk a token", 1 / median(seconds["exact"]),
                      "tokens/s"),
               Figure("predicted_tps", "all pages read, predicted before the run", under, expected.tokens_per_s, "tokens/s"),
               Figure("predicted_disk_ms", "of that, the disk", "a token", 1e3 * expected.disk_s, "ms"),
               Figure("predicted_processor_ms", "of that, the processor", "a token, beside the disk", 1e3 * expected.processor_s, "ms"),
               Figure("memory_tps", "all in memory", f"{cache.n} tokens", 1 / median(seconds["memory"]), "tokens/s"),
               Figure("sparse_kept", "few picked: of the rate in memory", under, median(ratios), ""),
               Figure("sparse_tps", "few picked",
                      f"at most {kv_spill.max_selected_pages(sides['sparse'].prepared.shape.pages)} pages a layer, "
                      f"{sparse_run.kv_pages} in memory", 1 / median(seconds["sparse"]), "tokens/s"),
               Figure("sparse_read", "few picked: read from the disk", "share of the cache's bytes a token", median(read), ""),
               Figure("alike_kept", "few picked, tokens alike: of the rate in memory", f"{100 * same_found:.0f}% of the pages were there",
                      same_kept, ""),
               Figure("alike_read", "few picked, tokens alike: read from the disk", "share of the cache's bytes a token", same_read, ""),
               Figure("disk_gbps", "B", "the reads of a token, nothing computed", median(rates) / 1e9, "GB/s")]
    for engine in sides.values():
        engine.close()
    publish("kv-tiers", "A cache larger than its memory", SPEED, figures, keep=keep)


def single_tokens(engine: Engine, window: Sequence[int], first: int) -> np.ndarray:
    """Log-probabilities of a window, float64 [tokens, V], each token from `first` on by itself, as an answer is written."""
    engine.reset()
    rows = [log_softmax(engine.forward_logits([token]).copy()) for token in window[:first]]
    return np.concatenate([*rows, *(log_softmax(engine.forward_logits([token]).copy()) for token in window[first:])])


def on_disk(prepared: Prepared, options: EngineOptions) -> Prepared:
    """The plan with all sealed pages on disk: fable's cache is smaller than the read buffers, so no budget leads to that."""
    return replace(prepared, placement=replace(prepared.placement, kv_pages=0), options=options)


def quality(text: Path, count: int, keep: bool) -> None:
    plan = EngineOptions(device="cpu", ctx=2048, exact=True)
    base = {**vars(plan), "kv": "4bit"}
    sides = {"exact": EngineOptions(**{**vars(plan), "kv": "32bit"}), "codec": EngineOptions(**base)}
    engines = {name: opened(open_engine(FABLE, options)) for name, options in sides.items()}
    sparse = EngineOptions(**{**base, "kv_read": "sparse", "from_settings": frozenset({"kv_read"})})
    engines["sparse"] = opened(open_prepared(lambda: on_disk(prepare(FABLE, sparse), sparse), folder_kinds(FABLE, sparse)))
    tokenizer = Tokenizer.load(FABLE, read_config(FABLE))
    cut = [window for window in windows(tokenizer, text.read_text(encoding="utf-8"), 2048) if len(window) == 2048][:count]
    cost: dict[str, list[float]] = {"codec": [], "sparse": []}
    cache = engines["sparse"].cache
    first = cache.shape.sinks + cache.shape.window + PAGE * (cache.pool.first + 1)
    for window in cut:
        scored = {name: single_tokens(engine, window, 1) for name, engine in engines.items()}
        expected = scored["exact"][first:]
        for name in cost:
            cost[name].append(float((np.exp(expected) * (expected - scored[name][first:])).sum(-1).mean()))
        print(cost["codec"][-1], cost["sparse"][-1], file=sys.stderr, flush=True)
    slots = cache.pool.stream.slots
    share = sum(counts.num_requested for counts in slots) / max(1, sum(counts.num_candidates for counts in slots))
    codec, sparse = (sum(cost[name]) / len(cut) for name in ("codec", "sparse"))
    under = f"fable, {len(cut)} windows of 2048 tokens"
    figures = [Figure("codec_kld", "4-bit pages, all read", under, codec, "nats"),
               Figure("sparse_kld", "4-bit pages, few picked", under, sparse, "nats"),
               Figure("added", "what picking adds", "share of what the codec costs", sparse / codec - 1, ""),
               Figure("pages", "pages picked", "share of those on the disk", share, ""),
               Figure("found", "pages that were there", "share of those picked",
                      sum(counts.num_hits for counts in slots) / max(1, sum(counts.num_requested for counts in slots)), "")]
    for engine in engines.values():
        engine.close()
    publish("kv-tiers-quality", "What picking pages costs", QUALITY, figures, keep=keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctx", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spill-dir")
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--picked", type=int, default=kv_spill.MIN_SELECTED, help="most pages of a layer for a token, with --quality")
    parser.add_argument("--publish", action="store_true", help="keep the result")
    options = parser.parse_args()
    if options.quality:
        kv_spill.MIN_SELECTED = options.picked
        quality(options.text, options.windows, options.publish)
    else:
        speed(options.ctx, options.rounds, options.spill_dir, options.publish)


if __name__ == "__main__":
    main()
