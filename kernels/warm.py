"""The compiled functions a run needs, by kind, and cold starts: compiling them in a child process.

The child keeps the compiler's memory out of the run that follows. A lock on the cache folder lets two cold starts share one compilation:
the second waits and finds the work done. The child forks helpers, one per core, that take functions from a pipe. Functions needed only for
quantizing are compiled when that begins. Run as `python -m effllm.kernels.warm`; prints `name total` lines.
"""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from .compile import Jit, Kernel, cache_folder, completion_marker
from .tiles import FORMATS

MAX_PROCESSES = 4  # each takes about 200 MB while it compiles
TICK_S = 0.25  # interval of progress reports
INDEX_NBYTES = 2  # of a function's index in the pipe
BACKGROUND_FLAG = "--background"  # in the child's command line
NICENESS = 10  # of a background compilation: below other programs
LOCK_PAUSE_S = 0.01  # for which a background compilation releases the lock, so that a waiting process gets it
GC_THRESHOLD = 20_000  # new objects between garbage collections: with the default of 700 they took a tenth of the compile time

KINDS = ("raw", "low-bit", "exact", "lookup", "kv", "bundled", "sparse", "foreign", "mixers", "experts", "floats", "adapters", "rounding")
RAW, LOW_BIT, EXACT, LOOKUP, KV, BUNDLED, SPARSE, FOREIGN, MIXERS, EXPERTS, FLOATS, ADAPTERS, ROUNDING = KINDS
ALL = (*KINDS, *FORMATS)
# The modules in `cpu/` that each kind needs, longest compilations first.
MODULES = {
    KV: "kv.prefill kv.decode kv.seal kv.merge",  # attention over packed pages, and packing them
    LOW_BIT: "packed gemm packed_embedding",  # low-bit weights of any format
    EXACT: "gemm",  # low-bit products in float32
    LOOKUP: "lut lut_layout",  # table lookup, where it is chosen
    BUNDLED: "bundles",  # the MLP over neuron bundles
    SPARSE: "kv.page_estimates kv.page_selection",  # selective attention over packed pages
    FOREIGN: "repack_words repack_gguf fp8_to_half repack_gguf_codebooks",  # repacking weights of other tools' formats
    FLOATS: "fp8_loops gemm",  # products with fp8 weights
    ADAPTERS: "lora_loops row_norms",  # LoRA
    ROUNDING: "quantize_search",  # quantization of weights on load
    EXPERTS: "moe_loops",  # mixtures of experts
    RAW: "sampling attention attention_decode linear row_ops .threads memory_bandwidth",  # every run
    # Recurrent layers and other token mixers, sparse and latent attention, residual streams.
    MIXERS: "delta_loops kda_loops short_conv_loops mamba1_loops mamba2_loops lightning_loops rwkv7_loops latent_loops stream_loops "
            "head_widths indexer_loops indexer_pooling sparse_attention_loops compressed_loops compressed_attention "
            "hyper_connection_loops gated_residual_loops ngram_loops cca_loops residual_scaling"}


def compiled_functions(kinds: Sequence[str] = ALL) -> list[Kernel | Jit]:
    """The kernels and compiled helpers of these kinds; a kind from `tiles.FORMATS` stands for the loops over weights of that format."""
    from .cpu import gemm, packed_formats
    from .cpu.amx import AMX
    from .cpu.bf16_pairs import HAS_PAIRS
    from .cpu.linear_amx import AMX_FLOATS

    names = {kind: modules.split() for kind, modules in MODULES.items() if kind in kinds}
    if AMX and LOW_BIT in names:
        names[LOW_BIT] = ["gemm_amx" if name == "gemm" else name for name in names[LOW_BIT]]
    if AMX_FLOATS and RAW in names:
        names[RAW].append("linear_amx")
    if HAS_PAIRS and RAW in names:
        names[RAW].append("linear_bf16")
    if HAS_PAIRS and FLOATS in names:
        names[FLOATS].append("linear_fp8")
    modules = [(kind, import_module(f".{name}", f"{__package__}.cpu")) for kind, module_names in names.items() for name in module_names]
    exact = {EXACT, FLOATS}  # kinds that need only the float32 product of `gemm`
    functions = [value for kind, module in modules for value in vars(module).values()
             if isinstance(value, Kernel | Jit) and (module is not gemm or (value is gemm.multiply_exact) == (kind in exact))]
    functions += [function for kind in kinds if kind in FORMATS for function in packed_formats.functions_of(kind)]
    return list(dict.fromkeys(functions))


def is_cold(kinds: Sequence[str] = ALL) -> bool:
    """Whether a run that needs these kinds has to compile and there is a cache folder to compile into."""
    folder = cache_folder()
    return folder is not None and any(not completion_marker(folder, kind).exists() for kind in kinds)


def load_all(kinds: Sequence[str] = ALL) -> None:
    """Load every function from the cache, or compile it. Afterwards the process needs no more machine code."""
    for _ in load_each(kinds):
        continue


def load_each(kinds: Sequence[str] = ALL) -> Iterator[tuple[int, int]]:
    """`load_all` as an iterator of (functions done, functions in total): progress where there is no cache folder."""
    functions = compiled_functions(kinds)
    for done, function in enumerate(functions, 1):
        function.load()
        yield done, len(functions)


def warm(kinds: Sequence[str] = ALL) -> Iterator[tuple[int, int]]:
    """Compile these kinds in a child process; yields (functions done, functions in total).

    Yields every TICK_S even without progress, since the first function may take many seconds. If the child fails, the remaining functions
    are compiled when they are first called."""
    command = _command(*kinds)
    done, total = 0, len(compiled_functions(kinds))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, env=_environment()) as child:
        while True:
            if select.select([child.stdout], [], [], TICK_S)[0]:
                if not (lines := child.stdout.read(1 << 16)):
                    return
                done += lines.count(b"\n")
            yield done, total


@contextmanager
def warm_in_background(kinds: Sequence[str]) -> Iterator[None]:
    """Context in which a child process compiles these kinds at low priority, for example during a download.

    Functions are stored one by one; those not done at the end are left to the first run, as are all if no process can be started."""
    child = None
    if is_cold(kinds):
        with suppress(OSError):
            child = subprocess.Popen(_command(BACKGROUND_FLAG, *kinds), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL, env=_environment())
    try:
        yield
    finally:
        if child is not None:
            child.kill()
            child.wait()


def _command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"{__package__}.warm", *words]


def _environment() -> dict[str, str]:
    """The child's environment: it finds the package where this process did, installed or not."""
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}


def _locked(folder: Path):
    """An exclusive lock on the cache folder while the returned file is open (POSIX; writes are atomic elsewhere anyway)."""
    handle = open(folder / "lock", "w")
    if os.name == "posix":
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def main() -> None:
    folder = cache_folder()
    if folder is None:
        return
    in_background = BACKGROUND_FLAG in sys.argv
    kinds = [word for word in sys.argv[1:] if word != BACKGROUND_FLAG] or ALL
    functions = compiled_functions(kinds)
    if in_background:
        _compile_in_background(functions, folder)
    with _locked(folder):
        for partial in folder.glob("*.o.[0-9]*"):  # of a process killed while writing
            partial.unlink(missing_ok=True)
        if not in_background:
            _compile(functions, min(MAX_PROCESSES, os.cpu_count() or 1))  # only loads them if another process has compiled them meanwhile
        for kind in kinds:
            completion_marker(folder, kind).touch()


def _compile_in_background(functions: list[Kernel | Jit], folder: Path) -> None:
    """Compile one function after the other at low priority. A run that needs kernels meanwhile waits for one function, not for all."""
    parent = os.getppid()
    if os.name == "posix":
        os.nice(NICENESS)
    for function in reversed(functions):  # short compilations first: an interrupted one is lost
        if os.getppid() != parent:  # killed, before it could kill this process
            sys.exit(1)
        with _locked(folder):
            function.load()
        time.sleep(LOCK_PAUSE_S)


def _compile(functions: list[Kernel | Jit], processes: int) -> None:
    """Compile everything in this process and forked copies of it. Raises RuntimeError if a copy fails."""
    gc.set_threshold(GC_THRESHOLD)
    reader, writer = os.pipe()
    os.write(writer, b"".join(index.to_bytes(INDEX_NBYTES, "little") for index in range(len(functions))))
    os.close(writer)
    sys.stdout.flush()
    children = []
    for _ in range(processes - 1):
        child = os.fork()
        if child == 0:
            _compile_from_pipe(functions, reader)
            os._exit(0)
        children.append(child)
    _compile_from_pipe(functions, reader)
    os.close(reader)
    if any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children):
        raise RuntimeError("a compiler process failed")


def _compile_from_pipe(functions: list[Kernel | Jit], reader: int) -> None:
    while record := os.read(reader, INDEX_NBYTES):
        function = functions[int.from_bytes(record, "little")]
        function.load()
        os.write(1, f"{function.name} {len(functions)}\n".encode())  # one write: lines of two processes never mix


if __name__ == "__main__":
    main()
