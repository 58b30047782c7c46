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

MOST_HELPERS = 4  # each takes some 200 MB while it compiles
TICK_S = 0.25
INDEX_NBYTES = 2  # in the pipe, of a function
BESIDE = "--beside"  # of the child's command line
LOW = 10  # its priority: a download leaves the processor to it, another program does not
PAUSE_S = 0.01  # in which one who waits for the lock gets it
GARBAGE = 20_000  # new objects after which the compiler's garbage is looked for: a tenth of the time went into looking after every 700

KINDS = ("raw", "low-bit", "exact", "lookup", "kv", "bundled", "sparse", "foreign", "mixers", "experts", "floats", "adapters", "rounding")
RAW, LOW_BIT, EXACT, LOOKUP, KV, BUNDLED, SPARSE, FOREIGN, MIXERS, EXPERTS, FLOATS, ADAPTERS, ROUNDING = KINDS
ALL = (*KINDS, *FORMATS)
# The modules of a kind, as they are called from `cpu/`: first those of kinds that take longest to compile.
MODULES = {
    KV: "kv.prefill kv.decode kv.seal kv.merge",  # attention over packed pages, and packing them
    LOW_BIT: "packed gemm packed_embedding",  # what low-bit weights of any format need
    EXACT: "gemm",  # products with them in float32
    LOOKUP: "lut lut_layout",  # the table lookup, where it is chosen
    BUNDLED: "bundles",  # the MLP over neurons that lie one by one
    SPARSE: "kv.page_estimates kv.page_selection",  # estimates of pages that are not read
    FOREIGN: "repack_words repack_gguf fp8_to_half repack_gguf_codebooks",  # what puts codes of other tools in order, or widens them
    FLOATS: "fp8_loops gemm",  # products with fp8 weights
    ADAPTERS: "lora_loops row_norms",  # what they add
    ROUNDING: "quantize_search",  # what makes codes of weights as they are read
    EXPERTS: "moe_loops",  # who visits which
    RAW: "sampling attention attention_decode linear row_ops .threads memory_bandwidth",  # what every run needs
    # What layers have in the place of attention over keys and values.
    MIXERS: "delta_loops kda_loops short_conv_loops mamba1_loops mamba2_loops lightning_loops rwkv7_loops latent_loops stream_loops "
            "head_widths indexer_loops indexer_pooling sparse_attention_loops compressed_loops compressed_attention "
            "hyper_connection_loops gated_residual_loops ngram_loops cca_loops residual_scaling"}


def compiled_functions(kinds: Sequence[str] = ALL) -> list[Kernel | Jit]:
    """The kernels and compiled helpers of these kinds; a kind from `tiles.FORMATS` stands for the loops over weights of that format."""
    from .cpu import gemm, packed_formats
    from .cpu.amx import AMX
    from .cpu.linear_amx import AMX_FLOATS

    names = {kind: modules.split() for kind, modules in MODULES.items() if kind in kinds}
    if AMX and LOW_BIT in names:
        names[LOW_BIT] = ["gemm_amx" if name == "gemm" else name for name in names[LOW_BIT]]
    if AMX_FLOATS and RAW in names:
        names[RAW].append("linear_amx")
    modules = [(kind, import_module(f".{name}", f"{__package__}.cpu")) for kind, own in names.items() for name in own]
    exact = {EXACT, FLOATS}  # kinds that need of `gemm` what multiplies in float32, and that alone
    found = [value for kind, module in modules for value in vars(module).values()
             if isinstance(value, Kernel | Jit) and (module is not gemm or (value is gemm.multiply_exact) == (kind in exact))]
    found += [each for kind in kinds if kind in FORMATS for each in packed_formats.functions_of(kind)]
    return list(dict.fromkeys(found))


def is_cold(kinds: Sequence[str] = ALL) -> bool:
    """Would a run that needs these kinds have to compile, with a cache folder to compile into?"""
    folder = cache_folder()
    return folder is not None and any(not completion_marker(folder, kind).exists() for kind in kinds)


def load_all(kinds: Sequence[str] = ALL) -> None:
    """Load every function from the cache, or compile it. Afterwards the process holds all the machine code it will ever need."""
    for _ in load_each(kinds):
        continue


def load_each(kinds: Sequence[str] = ALL) -> Iterator[tuple[int, int]]:
    """`load_all` as an iterator of (functions done, functions in total); for progress where no folder can keep the result."""
    functions = compiled_functions(kinds)
    for done, function in enumerate(functions, 1):
        function.load()
        yield done, len(functions)


def warm(kinds: Sequence[str] = ALL) -> Iterator[tuple[int, int]]:
    """Compile these kinds in a child; yields (functions done, functions in total), every TICK_S also where no more are done: the first may
    take many seconds, in which a person is to see that something happens. A child that fails costs time, nothing else: what it did not
    compile is compiled when it is first called."""
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
    """Compile what is cold of these kinds at a low priority, beside something that waits for a network. Whatever is not done at the
    end of that is left to the first run: functions are kept one by one. Where no process can be started, all is."""
    child = None
    if is_cold(kinds):
        with suppress(OSError):
            child = subprocess.Popen(_command(BESIDE, *kinds), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
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
    beside = BESIDE in sys.argv
    kinds = [word for word in sys.argv[1:] if word != BESIDE] or ALL
    functions = compiled_functions(kinds)
    if beside:
        _compile_beside(functions, folder)
    with _locked(folder):
        for partial in folder.glob("*.o.[0-9]*"):  # of a process that was ended while it wrote
            partial.unlink(missing_ok=True)
        if not beside:
            _compile(functions, min(MOST_HELPERS, os.cpu_count() or 1))  # takes a moment where another has done it meanwhile
        for kind in kinds:
            completion_marker(folder, kind).touch()


def _compile_beside(functions: list[Kernel | Jit], folder: Path) -> None:
    """Compile one function after the other at low priority. A run that needs kernels now waits for one function at most, not for all."""
    parent = os.getppid()
    if os.name == "posix":
        os.nice(LOW)
    for function in reversed(functions):  # short ones first: one that is interrupted is lost
        if os.getppid() != parent:  # it was ended, by a signal that it could not answer
            sys.exit(1)
        with _locked(folder):
            function.load()
        time.sleep(PAUSE_S)


def _compile(functions: list[Kernel | Jit], processes: int) -> None:
    """Compile everything in this process and forked copies of it. Raises RuntimeError if a copy fails."""
    gc.set_threshold(GARBAGE)
    take, give = os.pipe()
    os.write(give, b"".join(index.to_bytes(INDEX_NBYTES, "little") for index in range(len(functions))))
    os.close(give)
    sys.stdout.flush()
    helpers = []
    for _ in range(processes - 1):
        helper = os.fork()
        if helper == 0:
            _take(functions, take)
            os._exit(0)
        helpers.append(helper)
    _take(functions, take)
    os.close(take)
    if any(os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]) for helper in helpers):
        raise RuntimeError("a compiler process failed")


def _take(functions: list[Kernel | Jit], take: int) -> None:
    while found := os.read(take, INDEX_NBYTES):
        function = functions[int.from_bytes(found, "little")]
        function.load()
        os.write(1, f"{function.name} {len(functions)}\n".encode())  # one write: lines of two processes never mix


if __name__ == "__main__":
    main()
