#!/usr/bin/env python3
"""A model larger than its memory budget against what the disk allows: decode speed as a share of B / (W - M).

W is the bytes of weights a token reads, M what the budget leaves for weights (the budget minus the program, the cache and all buffers, not
what happened to be pinned), B the disk's rate for a token's actual reads, with nothing computed meanwhile, in the same process, before,
between and after the runs. The file is evicted from the page cache first. With --peer llama.cpp runs the same weights from a memory-mapped
file, and both run in a memory cgroup of the budget created for them; that needs root and cgroups version 1. --accelerate adds transformers
with accelerate's disk offload on the same folder and in the same cgroup, with as many bytes of weights in memory as ours. --prompts adds
prompts of 128 and 512 tokens, compared with one pass over the disk and with the same prompts with all weights in memory.

    python benchmarks/offload.py --make tinyllama-1.1b /data/tinyllama              # random weights of a shape, bf16; --bits 4 for low-bit
    python benchmarks/offload.py /data/tinyllama --ram 1.2G --tokens 6
    python benchmarks/offload.py /data/tinyllama --ram 1.2G --peer /data/tinyllama.gguf --accelerate
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from effllm.offload.direct_io import BLOCK, READ_NBYTES, THREADS, Read, Reader
from effllm.offload.hardware import peak_rss
from effllm.offload.memory import anonymous
from effllm.offload.size import format_size, parse_size
from effllm.offload.streaming_pager import FETCH_NBYTES
from effllm.quant.spec import QuantSpec
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.measuring.synthetic import SHAPES, SyntheticStore, synthetic_config
from effllm.runtime.prepare import EngineOptions
from offload_prompts import CTX, by_turns
from report import Figure, publish
from synthetic_folder import of_store, write_folder, write_marker

PROBE_S = 1.5
CGROUP = Path("/sys/fs/cgroup/memory/effllm-benchmark")
INTRO = "Weights are random, which changes no speed; reads are direct, in order of use, and run beside the computation."


def make(shape: str, folder: Path, bits: int | None) -> None:
    """A folder of random weights: bf16, or in the layout of `quantize --bits`."""
    store = SyntheticStore(synthetic_config(shape), None if bits is None else QuantSpec.parse(f"{bits}bit"))
    write_folder(folder, SHAPES[shape], [[tensor] for tensor in of_store(store)], lambda name: store.read(store.tensors[name]))
    write_marker(folder, store)


def evict(paths: list[Path]) -> None:
    """Evict files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def probe(engine: Engine) -> float:
    """Bytes per second of direct reads of what a token streams, in order, with the concurrency of a run and nothing computed meanwhile. As
    many reads again are queued, as in a run: a thread that has finished one finds the next."""
    streams, store = engine.prepared.streaming, engine.model.store
    extents = [(byte_range.file, at) for part in streams.residency.streamed for byte_range in streams.parts.parts[part].ranges
               for at in range(byte_range.offset // BLOCK * BLOCK, byte_range.offset + byte_range.nbytes - READ_NBYTES + 1, READ_NBYTES)]
    first = random.randrange(len(extents))
    slots = 2 * THREADS
    reader, memory = Reader({file: store.descriptor(file) for file in store.files}), memoryview(anonymous(slots * READ_NBYTES))
    waiting, started, done = [], time.perf_counter(), 0
    for number, (path, at) in enumerate(extents[first:] + extents[:first]):
        if len(waiting) == slots:
            reader.wait(waiting.pop(0))
        if time.perf_counter() - started > PROBE_S:
            break
        slot = number % slots * READ_NBYTES
        waiting.append(reader.submit([Read(path, at, memory[slot : slot + READ_NBYTES], READ_NBYTES)]))
        done += READ_NBYTES
    for ticket in waiting:
        reader.wait(ticket)
    rate = done / (time.perf_counter() - started)
    reader.close()
    return rate


def measure(folder: Path, ram: str, tokens: int, rounds: int, threads: int | None) -> dict[str, float]:
    """Decode in one process, rounds of `tokens` between disk probes."""
    paths = sorted(folder.glob("*.safetensors"))
    evict(paths)
    engine = None
    for item in open_engine(folder, EngineOptions(device="cpu", ram=ram, ctx=CTX, threads=threads)):
        if isinstance(item, Notice):
            print(item.text, file=sys.stderr, flush=True)
        engine = item
    assert isinstance(engine, Engine)
    ids = list(range(100, 132))
    started = time.perf_counter()
    for _ in engine.prefill(ids):
        continue
    prefill_s, placement, rates, seconds, waits = time.perf_counter() - started, engine.placement, [probe(engine)], [], []
    read = engine.model.pager.disk_nbytes
    for _ in range(rounds):
        for token in range(tokens):
            before, started = engine.model.pager.wait_s, time.perf_counter()
            engine.forward_logits([200 + token])
            seconds.append(time.perf_counter() - started)
            waits.append(engine.model.pager.wait_s - before)
        rates.append(probe(engine))
    read = (engine.model.pager.disk_nbytes - read) / len(seconds)
    needed, ring = engine.model.bytes_per_pass, placement.residency.ring_nbytes
    room = placement.budget.ram - placement.baseline_bytes - placement.kv_bytes - placement.workspace_bytes - ring - FETCH_NBYTES
    # The first token after a probe finds the ring full; a token in a row pays for all that it streams.
    steady = [second for index, second in enumerate(seconds) if index % tokens]
    result = {"disk_gbps": median(rates) / 1e9, "needed_gb": needed / 1e9, "memory_gb": room / 1e9,
              "read_per_token_gb": read / 1e9,
              "seconds_per_token": median(steady), "waited_s": median(waits), "tokens_per_s": 1 / median(steady), "prefill32_s": prefill_s,
              "roof_tokens_per_s": median(rates) / (needed - room), "peak_gb": peak_rss() / 1e9, "budget_gb": placement.budget.ram / 1e9}
    result["share"] = result["tokens_per_s"] / result["roof_tokens_per_s"]
    engine.close()
    return result


def peer(path: Path, tokens: int) -> dict[str, float]:
    """llama.cpp token by token over a memory-mapped file; the caller has limited this process's memory."""
    from llamacpp_run import Peer

    evict([path])
    llama = Peer(path, 512, len(os.sched_getaffinity(0)))
    llama.forward([1], "last")
    started = time.perf_counter()
    for token in range(tokens):
        llama.forward([200 + token], "last")
    return {"tokens_per_s": tokens / (time.perf_counter() - started)}


def alone(options: argparse.Namespace) -> dict[str, float]:
    """One side, in this process."""
    if options.alone == "peer":
        return peer(options.folder, options.tokens)
    if options.alone == "accelerate":
        from offload_accelerate import accelerate

        evict(sorted(options.folder.glob("*.safetensors")))  # what another process has read is in nobody's budget
        return accelerate(options.folder, options.room, options.tokens)
    return measure(options.folder, options.ram, options.tokens, options.rounds, options.threads)


@contextmanager
def short_of_memory(nbytes: int | None) -> Iterator[Callable[[], None] | None]:
    """The preexec function of a child in a memory cgroup of this many bytes."""
    if nbytes is None:
        yield None
        return
    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "memory.limit_in_bytes").write_text(str(nbytes))
    try:
        yield lambda: (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        CGROUP.rmdir()


def child(arguments: list[str], limit: int | None = None, script: str = __file__) -> dict[str, float]:
    """The last output of a child process."""
    with short_of_memory(limit) as enter:
        ran = subprocess.run([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, check=True, preexec_fn=enter)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", metavar="SHAPE", help="write random weights of a shape into the folder, and stop")
    parser.add_argument("--bits", type=int, help="of what --make writes (default: bf16)")
    parser.add_argument("--ram", default="1.2G")
    parser.add_argument("--tokens", type=int, default=6, help="in a row")
    parser.add_argument("--rounds", type=int, default=3, help="of so many tokens")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--peer", type=Path, metavar="GGUF", help="the same weights for llama.cpp; written in bf16 where absent")
    parser.add_argument("--accelerate", action="store_true", help="transformers with accelerate's disk offload, on the same folder")
    parser.add_argument("--prompts", action="store_true", help="measure prompts as well")
    parser.add_argument("--room", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--publish", metavar="NAME", help="keep the result under this name")
    parser.add_argument("--alone", choices=("own", "peer", "accelerate"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make, options.folder, options.bits)
        return 0
    if options.alone:
        print(json.dumps(alone(options)))
        return 0
    limit = parse_size(options.ram) if options.peer or options.accelerate else None
    more = ["--threads", str(options.threads)] if options.threads else []
    ours = child([str(options.folder), "--alone", "own", "--ram", options.ram, "--tokens", str(options.tokens), "--rounds",
                  str(options.rounds),
                  *more], limit)
    under = f"{options.folder.name} in {options.ram}"
    figures = [Figure("tokens_per_s", "decode", under, ours["tokens_per_s"], "tokens/s"),
               Figure("roof_tokens_per_s", "B / (W - M)", f"W {ours['needed_gb']:.2f} GB, M {ours['memory_gb']:.2f} GB",
                      ours["roof_tokens_per_s"], "tokens/s"),
               Figure("share", "decode over B / (W - M)", under, ours["share"], ""),
               Figure("disk_gbps", "B", f"direct reads of what a token streams, {format_size(READ_NBYTES)}, {THREADS} at once",
                      ours["disk_gbps"], "GB/s"),
               Figure("read_per_token_gb", "read per token", under, ours["read_per_token_gb"], "GB"),
               Figure("waited", "waiting for the disk", "share of a token", ours["waited_s"] / ours["seconds_per_token"], ""),
               Figure("prefill32_s", "prompt of 32 tokens", under, ours["prefill32_s"], "s"),
               Figure("peak_gb", "most memory held", f"budget {ours['budget_gb']:.2f} GB", ours["peak_gb"], "GB")]
    if options.prompts:
        with short_of_memory(limit) as enter:
            prompts = by_turns(options.folder, options.ram, options.threads, enter)
        for tokens, prompt in prompts.items():
            figures += [Figure(f"prompt{tokens}_s", f"prompt of {tokens} tokens", under, prompt.streamed_s, "s"),
                        Figure(f"prompt{tokens}_share", "over the longer of a pass over the disk and the same in memory, by turns",
                               f"{prompt.pass_s:.2f} s and {prompt.resident_s:.2f} s", prompt.share, "x")]
    if options.peer:
        if not options.peer.exists():
            from llamacpp_files import write_gguf

            write_gguf(options.folder, options.peer, "bf16")
        theirs = child([str(options.peer), "--alone", "peer", "--tokens", str(min(options.tokens, 3))], limit)
        figures.append(Figure("peer_tokens_per_s", "llama.cpp, mapped file", f"{options.peer.name}, memory cgroup of {options.ram}",
                              theirs["tokens_per_s"], "tokens/s"))
        figures.append(Figure("against_peer", "decode over llama.cpp", under, ours["tokens_per_s"] / theirs["tokens_per_s"], "x"))
    if options.accelerate:
        theirs = child([str(options.folder), "--alone", "accelerate", "--tokens", str(min(options.tokens, 3)), "--room",
                        str(round(ours["memory_gb"] * 1e9))], limit)
        figures += [Figure("accelerate_tokens_per_s", "transformers with accelerate's disk offload",
                           f"{theirs['disk_gb']:.2f} GB of weights on the disk, cgroup of {options.ram}", theirs["tokens_per_s"],
                           "tokens/s"),
                    Figure("accelerate_gbps", "its reads", "weights on the disk over the time of a token", theirs["read_gbps"], "GB/s"),
                    Figure("against_accelerate", "decode over transformers and accelerate", under,
                           ours["tokens_per_s"] / theirs["tokens_per_s"], "x")]
    publish(f"offload-{options.publish}" if options.publish else "offload", "Weights from the disk", INTRO, figures,
            keep=bool(options.publish))
    return 0


if __name__ == "__main__":
    sys.exit(main())
