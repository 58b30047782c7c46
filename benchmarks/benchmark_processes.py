"""Child processes for speed comparisons: effllm and llama.cpp on the same random weights, each in its own process, and the files they read.

A side answers one request at a time and blocks in a read in between, so the sides' threads, caches and libraries do not interfere. Both are
driven token by token from Python through their libraries. Quantizing is measured from outside: wall time of the process, and its memory as
counted by the kernel.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from effllm.offload import hardware
from effllm.quant.weight import from_f32
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.measuring.synthetic import SHAPES, SyntheticStore

CTX = 1024
SHAPE = "tinyllama-1.1b"  # of random weights, where none is asked for
SPREAD = 0.02
CHUNK_ROWS = 4096  # of a matrix made at once
# The type of token embedding and output beside a body of each kind: one on both sides.
PEER_HEAD = {"Q8_0": "Q8_0"}
POLL_S = 0.01
FFN_TOKENS = 512


# -- files -------------------------------------------------------------------------------------------------------------------------------


def random_folder(shape: str, work: Path, layers: int | None = None) -> Path:
    """A Hugging Face folder of seeded random bf16 weights, created once: matrices normal × SPREAD, vectors one. No tokenizer.

    layers: number of layers, None for those of the shape.
    """
    raw = SHAPES[shape] if layers is None else {**SHAPES[shape], "num_hidden_layers": layers}
    folder = work / (f"random-{shape}" if layers is None else f"random-{shape}-{layers}-layers")
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tensors = SyntheticStore(parse_config(raw)).tensors
    header = {name: {"dtype": "BF16", "shape": list(info.shape), "data_offsets": [info.offset, info.offset + info.nbytes]}
              for name, info in tensors.items()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    with open(folder / "model.safetensors", "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for number, info in enumerate(tensors.values()):
            rng = np.random.default_rng(number)
            rows, width = info.shape[0], prod(info.shape[1:])
            for start in range(0, rows, CHUNK_ROWS):
                count = (min(CHUNK_ROWS, rows - start), width)
                values = rng.standard_normal(count, np.float32) * SPREAD if len(info.shape) > 1 else np.ones(count, np.float32)
                out.write(from_f32(values, "bf16").tobytes())
    (folder / "config.json").write_text(json.dumps(raw, indent=2))  # last: with it the folder is whole
    return folder


def result_name(name: str, shape: str) -> str:
    """A result's name: shapes other than the default are part of it, so that their figures replace no others."""
    return name if shape == SHAPE else f"{name}-{shape}"


def peer_source(folder: Path) -> Path:
    """The folder's weights as GGUF, made once: in bf16, of a mixture in F16 as `effllm export` writes it, without a vocabulary."""
    config = read_config(folder)
    path = folder / ("source-bf16.gguf" if config.moe is None else "source-f16.gguf")
    if path.exists():
        return path
    if config.moe is None:
        from llamacpp_files import write_gguf

        write_gguf(folder, path.with_suffix(".unfinished"), "bf16")
        path.with_suffix(".unfinished").rename(path)
        return path
    for _ in export_gguf(folder, path, "F16", folder.name, tokenizer={"tokenizer.ggml.model": "no_vocab"}):
        continue
    return path


def peer_file(folder: Path, ftype: str, threads: int) -> Path:
    """The folder quantized by llama.cpp, created once."""
    path = folder / f"{ftype}.gguf"
    if not path.exists():
        quantize_peer(folder, path, ftype, threads)
    return path


# -- quantizing --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Of one process: wall time in seconds, and peak bytes, resident (including mapped files) and anonymous."""

    seconds: float
    peak_nbytes: int
    anonymous_nbytes: int


def watch(command: Sequence[str]) -> Cost:
    """Run a command to its end. Raises RuntimeError with its last output if it fails."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        peak = anonymous = 0
        while process.poll() is None:
            memory = _memory(process.pid)
            peak, anonymous = max(peak, memory.get("VmHWM", 0)), max(anonymous, memory.get("RssAnon", 0))
            time.sleep(POLL_S)
        seconds = time.perf_counter() - started
        error_output = process.stderr.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} …: {error_output[-2000:]}")
    return Cost(seconds, peak, anonymous)


def _memory(pid: int) -> dict[str, int]:
    """The Vm and Rss lines of a process, in bytes; empty once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if name[:2] in ("Vm", "Rs")}


def quantize_peer(folder: Path, target: Path, ftype: str, threads: int) -> Cost:
    """llama-quantize from bf16, in a process of its own."""
    code = ("import sys; from pathlib import Path; import llamacpp_files as f, llamacpp_run as r; r.quiet(); "
            "f.quantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), head=sys.argv[5])")
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {code}"
    source = peer_source(folder)
    return watch([sys.executable, "-c", script, str(source), str(target), ftype, str(threads), PEER_HEAD.get(ftype, "Q6_K")])


def quantize_effllm(folder: Path, target: Path, bits: str, extra: Sequence[str] = ()) -> Cost:
    """`effllm quantize` from bf16, in a process of its own. `bits` as --bits takes it; `extra` are further arguments.
    Without the profile for packed caches, which no peer makes."""
    command = Path(sys.executable).with_name("effllm")
    return watch([str(command), "quantize", str(folder), "-o", str(target), "--bits", bits, "--no-kv-profile", *extra])


def quantized_folder(folder: Path, bits: str, threads: int, extra: Sequence[str] = ()) -> Path:
    """The random weights quantized to `bits` by `effllm quantize`, data-free; created once."""
    target = folder / f"own-{bits}bit"
    if not (target / "effllm.json").exists():
        quantize_effllm(folder, target, bits, ("--method", "rtn", "--threads", str(threads), *extra))
    return target


# -- sides -------------------------------------------------------------------------------------------------------------------------------


class PeerSide:
    """llama.cpp on a GGUF file. `cache`: "flash,keys,values" as for `llamacpp_run.Peer`."""

    def __init__(self, path: str, threads: int, ctx: int = CTX, cache: str = "auto,f16,f16") -> None:
        from llamacpp_run import Peer

        flash, keys, values = cache.split(",")
        self.peer = Peer(Path(path), ctx, threads, flash=flash, keys=keys, values=values)
        self.ids = np.random.default_rng(0).integers(0, self.peer.vocab_size, ctx).tolist()
        self.clear = self.peer.clear

    def forward(self, count: int, logits: str = "all") -> None:
        self.peer.forward(self.ids[self.peer.held : self.peer.held + count], logits)

    def prefill(self, count: int) -> float:
        self.clear()
        started = time.perf_counter()
        self.forward(count, "last")
        return time.perf_counter() - started

    def facts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.peer.close()


class EffllmSide:
    """effllm on a model folder, or on random weights in memory only (`synthetic:SHAPE:BITS`). `cache`: as for --kv."""

    def __init__(self, folder: str, threads: int, ctx: int = CTX, cache: str = "16bit") -> None:
        from effllm.runtime.engine import open_engine, open_prepared
        from effllm.runtime.measuring.bench import prepare_synthetic
        from effllm.runtime.planning.needed_kernels import Needs, kernel_kinds
        from effllm.runtime.prepare import EngineOptions

        options = EngineOptions(device="cpu", ctx=ctx, threads=threads, kv=cache, force=True)
        if folder.startswith("synthetic:"):
            _, shape, bits = folder.split(":", 2)
            *_, self.engine = open_prepared(lambda: prepare_synthetic(shape, options, f"{bits}bit"), kernel_kinds(Needs(True), options))
        else:
            *_, self.engine = open_engine(Path(folder), options)
        self.ids = np.random.default_rng(0).integers(0, self.engine.config.vocab_size, ctx).tolist()
        self.clear = self.engine.reset

    def forward(self, count: int) -> None:
        num_tokens = len(self.engine.tokens)
        self.engine.forward_logits(self.ids[num_tokens : num_tokens + count])

    def prefill(self, count: int) -> float:
        self.clear()
        started = time.perf_counter()
        for _ in self.engine.prefill(self.ids[:count]):
            continue
        return time.perf_counter() - started

    def ffn(self) -> float:
        """Seconds of a layer's three FFN products for FFN_TOKENS tokens, including everything around them in the op."""
        engine, config = self.engine, self.engine.config
        ops = engine.backends["cpu"]
        x = np.random.default_rng(0).standard_normal((FFN_TOKENS, config.hidden_size), np.float32)
        with engine.model.pager.lease(0) as raw:
            w = engine.model._lease(0, raw)
            started = time.perf_counter()
            ops.gated_mlp(x, w.post_norm, w.gate, w.up, w.down, config.hidden_act)
            ops.flush()
            return time.perf_counter() - started

    def facts(self) -> dict[str, float]:
        """Bytes: read per pass, the plan's total and its parts; operations in a token's matrix products, for a dense model."""
        model, placement, config = self.engine.model, self.engine.placement, self.engine.config
        facts = {"bytes_per_pass": model.bytes_per_pass, "nbytes": model.nbytes, "planned": placement.total_bytes,
                 "baseline": placement.baseline_bytes}
        if config.moe is not None:
            return facts
        heads = config.num_attention_heads + config.num_key_value_heads
        attention, ffn = 2 * config.hidden_size * heads * config.head_dim, 3 * config.hidden_size * config.intermediate_size
        return {**facts, "operations": 2 * config.num_hidden_layers * (attention + ffn), "ffn_operations": 2 * FFN_TOKENS * ffn}

    def close(self) -> None:
        self.engine.close()


SIDES: dict[str, Callable[..., PeerSide | EffllmSide]] = {"peer": PeerSide, "own": EffllmSide}


def serve(connection: Connection, kind: str, path: str, threads: int, ctx: int, *cache: str) -> None:
    """The child's loop: a request is (name, argument...), the answer a number or a dict; an exception is sent as text."""
    try:
        side = SIDES[kind](path, threads, ctx, *cache)
        connection.send("ready")
        while (message := connection.recv())[0] != "close":
            connection.send(_answer(side, *message))
        side.close()
        connection.send("closed")
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except Exception as error:  # told to the parent, which raises it
        connection.send(error)


def _answer(side: PeerSide | EffllmSide, name: str, *arguments: int) -> object:
    match name:
        case "clear":
            return side.clear()
        case "forward":  # times, tokens each
            times, count, *rest_arguments = arguments
            started = time.perf_counter()
            for _ in range(times):
                side.forward(count, *rest_arguments)
            return time.perf_counter() - started
        case "peak":
            return hardware.peak_rss()
        case _:
            return getattr(side, name)(*arguments)


class Child:
    """A side in its own process. Raises RuntimeError if it fails."""

    def __init__(self, name: str, kind: str, path: Path | str, threads: int, ctx: int = CTX, *cache: str) -> None:
        self.name, self.kind = name, kind
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(target=serve, args=(child_connection, kind, str(path), threads, ctx, *cache), daemon=True)
        self._process.start()
        child_connection.close()
        self._receive()

    def request(self, *message: object) -> object:
        self._connection.send(message)
        return self._receive()

    def _receive(self) -> object:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: the process ended (code {self._process.exitcode})") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self.name}: {answer}") from answer
        return answer

    def close(self) -> None:
        self.request("close")
        self._process.join()


def file_nbytes(path: Path) -> int:
    """Bytes of a file, or of the safetensors in a folder."""
    return sum(os.stat(file).st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
