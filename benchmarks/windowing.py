#!/usr/bin/env python3
"""Sparse activation: neurons read when they are active, against the same weights streamed whole with the same memory: bytes, seconds, and
bit equality of the logits.

The model is as wide as OPT-6.7B's layers (4096 channels, 16,384 neurons, 32 heads; bf16, with a gate, so that a neuron's row of up and
column of down are 16 KiB) and has the activations of fable-relu on the same text (`widened_model.py`). Memory holds everything but `up` and
`down`, and the requested share of those: a quarter, so that half of the MLP's bytes are on disk. The same tokens run through three
processes: windowed, streamed whole within the same budget, and, if memory allows, all resident; token by token, each on its own.

    python benchmarks/windowing.py /data/wide --make models/fable-relu     # /data/wide/plain and /data/wide/bundled, 3.2 GB each
    python benchmarks/windowing.py /data/wide
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from effllm.offload.hardware import peak_rss
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.conversion.bundle_ffn import bundle
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sparse import sparsity, sparsity_file
from effllm.runtime.tensors import check_tensors
from effllm.runtime.tokenizer import Tokenizer
from offload import evict
from predicted_speed import promise
from report import Figure, publish
from widened_model import Widened

SHAPE = {"hidden": 4096, "ffn": 16_384, "heads": 32}
CTX, PROMPT = 512, 32
INTRO = ("Layers of OPT-6.7B's width with a ReLU gate, six of them, driven by fable-relu: each of its neurons stands for 21 of 16,384, far "
         "apart. Reads are direct; the same tokens, one at a time, in a process of their own per row.")


def make(small: Path, folder: Path) -> None:
    """The wide model, plain and bundled, with the statistics of fable-relu's trace."""
    Widened(small, **SHAPE).write(small, folder / "plain")
    for event in bundle(folder / "plain", folder / "bundled"):
        print(event, file=sys.stderr, flush=True)
    *_, engine = open_engine(small, EngineOptions(device="cpu", kv="32bit"))
    ids = Tokenizer.load(small, engine.config).encode(built_in_text())[: sparsity.TOKENS]
    *_, trace = sparsity.record(engine, ids)
    engine.close()
    trace.save(folder / "trace.npz")
    sparsity_file.save(sparsity.summarize(trace), folder / "bundled")


def budget(folder: Path, share: float) -> int:
    """Bytes of memory with which slots hold `share` of up and down."""
    options = EngineOptions(device="cpu", ctx=CTX, ram="100G")
    prepared = prepare(folder, options)
    tensors = check_tensors(prepared.config, prepared.store, prepared.container)
    neurons = sum(tensor.nbytes for roles in tensors.values() for role, tensor in roles.items() if role == "bundles")
    prepared.store.close()
    limit = prepared.placement.total_bytes - neurons
    tried = prepare(folder, replace(options, ram=str(limit)))
    tried.store.close()
    return limit + round(share * neurons) - tried.placement.window_bytes


def measure(folder: Path, ram: int | None, tokens: int) -> dict[str, object]:
    """Tokens of the built-in text after a short prompt, one at a time."""
    evict(sorted(folder.glob("*.safetensors")))
    options = EngineOptions(device="cpu", ctx=CTX, ram=None if ram is None else str(ram))
    *_, engine = open_engine(folder, options)
    assert isinstance(engine, Engine)
    ids = Tokenizer.load(folder, engine.config).encode(built_in_text())[: PROMPT + tokens]
    started = time.perf_counter()
    for _ in engine.prefill(ids[:PROMPT]):
        continue
    prefill_s, pager, seconds, read, sums = time.perf_counter() - started, engine.model.pager, [], [], []
    for token in ids[PROMPT:]:
        before, started = pager.disk_nbytes, time.perf_counter()
        logits = engine.forward_logits([token])
        seconds.append(time.perf_counter() - started)
        read.append(pager.disk_nbytes - before)
        sums.append(hashlib.sha256(np.ascontiguousarray(logits)).hexdigest())
    settled = slice(len(seconds) // 2, None)
    prepared, placement = engine.prepared, engine.placement
    results = {"seconds": median(seconds[settled]), "read": sum(read[settled]) / len(read[settled]), "first_s": seconds[0],
               "prefill_s": prefill_s, "logits": sums, "peak": peak_rss()}
    if placement.slots:
        used = pager.stats
        results |= {"used": used.used, "missed": used.missed, "neurons": sum(part.nbytes for part in prepared.streaming.windows.places)}
    engine.close()
    return results


def predicted(folder: Path, ram: int) -> float:
    """Tokens per second predicted by `plan`, from rates measured now."""
    prepared = prepare(folder, EngineOptions(device="cpu", ctx=CTX, ram=str(ram)))
    promised = promise(prepared)
    prepared.store.close()
    return promised.start.tokens_per_s


def child(folder: Path, ram: int | None, tokens: int) -> dict[str, object]:
    command = [sys.executable, __file__, str(folder), "--alone", "--tokens", str(tokens), *([] if ram is None else ["--ram", str(ram)])]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", type=Path, metavar="SMALL", help="write the models into the folder from this sparse one, and stop")
    parser.add_argument("--share", type=float, default=0.25, help="of up and down that memory holds")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dense-tokens", type=int, default=10, help="of the run that streams everything")
    parser.add_argument("--resident", action="store_true", help="hold the logits against a run with everything in memory, too")
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ram", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make, options.folder)
        return 0
    if options.alone:
        print(json.dumps(measure(options.folder, options.ram, options.tokens)))
        return 0
    ram = budget(options.folder / "bundled", options.share)
    promised = predicted(options.folder / "bundled", ram)
    windowed = child(options.folder / "bundled", ram, options.tokens)
    dense = child(options.folder / "plain", ram, options.dense_tokens)
    same = [windowed["logits"][: options.dense_tokens] == dense["logits"]]
    if options.resident:
        same.append(child(options.folder / "plain", None, options.tokens)["logits"] == windowed["logits"])
    under = f"{options.share:.0%} of up and down in memory"
    figures = [
        Figure("windowed_tokens_per_s", "windowed", under, 1 / windowed["seconds"], "tokens/s"),
        Figure("dense_tokens_per_s", "streamed whole", f"the same budget, {ram / 1e9:.2f} GB", 1 / dense["seconds"], "tokens/s"),
        Figure("speedup", "windowed over streamed", under, dense["seconds"] / windowed["seconds"], "x"),
        Figure("read_share", "up and down read per token", under, 100 * windowed["read"] / windowed["neurons"], "%"),
        Figure("read_mb", "read per token, windowed", under, windowed["read"] / 1e6, "MB"),
        Figure("dense_read_mb", "read per token, streamed", "the same budget", dense["read"] / 1e6, "MB"),
        Figure("hits", "active neurons found in memory", under, 100 * (1 - windowed["missed"] / max(1, windowed["used"])), "%"),
        Figure("first_s", "first token after a prompt", "an empty window", windowed["first_s"], "s"),
        Figure("prefill_s", f"prompt of {PROMPT} tokens", "everything read once", windowed["prefill_s"], "s"),
        Figure("identical", "logits bit-identical", f"runs, of {len(same)}: streamed, in memory"[: None if options.resident else -11],
               sum(same), ""),
        Figure("predicted_tokens_per_s", "predicted before the run", under, promised, "tokens/s"),
        Figure("peak_gb", "most memory held, windowed", f"budget {ram / 1e9:.3f} GB", windowed["peak"] / 1e9, "GB"),
    ]
    publish("windowing", "Neurons read when they are active", INTRO, figures, keep=options.publish)
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
