"""How kernels are compiled, and where the machine code is kept.

A kernel is a native function `void(args, worker, counter)` of three int64: the address of a block of int64 arguments, the index of
the worker, and the address of a shared counter from which workers draw block numbers. Passing addresses instead of arrays keeps a
call free of Python objects, so that a worker that waits inside compiled code can run it without the interpreter lock.

Compiled code lives in a folder of its own, named by a hash of every file in `kernels/`, the Numba version and the CPU's features:
Numba's own stamp covers only the file that defines a function, and a kernel here calls into several.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numba
from numba import types
from numba.core.registry import cpu_target

# No reordering is allowed across NaN checks: a NaN must stay visible. Sums may be reassociated, which is what vectorises them.
REASSOCIATE = {"reassoc", "contract", "nsz"}
KERNEL_SIGNATURE = types.void(types.int64, types.int64, types.int64)


@cache
def cpu_features() -> frozenset[str]:
    """The features Numba compiles for (not what the CPU claims): an intrinsic that the target lacks ends the process."""
    _, cpu, flags = cpu_target.target_context.codegen().magic_tuple()
    return frozenset([cpu, *(flag[1:] for flag in flags.split(",") if flag.startswith("+"))])


@cache
def cache_key() -> str:
    """Name of the cache folder for these sources, this Numba and this CPU."""
    root = Path(__file__).resolve().parent
    # Numba files what it compiled under the path of the source, so another copy of the same sources has to compile its own.
    digest = hashlib.sha256(str(root).encode())
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    digest.update(f"{numba.__version__} {sys.version_info[:2]} {sorted(cpu_features())}".encode())
    return digest.hexdigest()[:16]


def cache_root() -> Path:
    """The user's cache folder for this program (`XDG_CACHE_HOME` moves it on Linux)."""
    from platformdirs import user_cache_path

    return user_cache_path("effllm")


@cache
def cache_folder() -> Path | None:
    """The folder for compiled kernels, created; None when no such folder can be written (kernels are then compiled every time)."""
    folder = cache_root() / "kernels" / cache_key()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK) and not any(folder.glob(complete(folder).name)):
        return None
    numba.config.CACHE_DIR = str(folder)
    return folder


def complete(folder: Path, kind: str = "*") -> Path:
    """The file that says that a cache folder holds all functions of a kind (`warm.KINDS`)."""
    return folder / f"complete-{kind}"


def cached(build: Callable[[bool], object]) -> object:
    """`build(True)` with the cache folder, or `build(False)` where there is none, it is full, or a file in it is damaged."""
    folder = cache_folder()
    if folder is None:
        return build(False)
    try:
        return build(True)
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):
        for stamp in folder.glob(complete(folder).name):
            stamp.unlink(missing_ok=True)
        for damaged in (path for path in folder.rglob("*.nb[ci]") if path.stat().st_size == 0):
            damaged.unlink(missing_ok=True)
        return build(False)


class Kernel:
    """A kernel body and, once asked for, its machine code. `address` compiles or loads it on first use."""

    def __init__(self, body: Callable[[int, int, int], None], fastmath: set[str] | bool) -> None:
        self.body, self.fastmath, self.name = body, fastmath, f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        self._code, self._address = None, 0

    def load(self) -> None:
        """Compile, or take from the cache, unless that is done."""
        if self._code is None:
            self._code = cached(lambda cache: numba.cfunc(KERNEL_SIGNATURE, cache=cache, error_model="numpy",
                                                          fastmath=self.fastmath)(self.body))
            self._address = self._code.address

    @property
    def address(self) -> int:
        if not self._address:
            self.load()
        return self._address

    def assembly(self) -> str:
        """The machine code as text, for reading once what the inner loop became (compiles afresh: a cached object has no text)."""
        return "\n".join(numba.njit(KERNEL_SIGNATURE, error_model="numpy", fastmath=self.fastmath)(self.body).inspect_asm().values())


def kernel(fastmath: set[str] | bool = False) -> Callable[[Callable[[int, int, int], None]], Kernel]:
    """Decorator: `@kernel()` over `def body(args, worker, counter)`."""
    return lambda body: Kernel(body, fastmath)


class Jit:
    """A compiled function with one explicit signature, called from Python; compiled or loaded on first call."""

    def __init__(self, body: Callable, signature: object, fastmath: set[str] | bool) -> None:
        self.body, self.signature, self.fastmath = body, signature, fastmath
        self.name = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        self._code = None

    def load(self) -> None:
        """Compile, or take from the cache, unless that is done."""
        if self._code is None:
            self._code = cached(lambda cache: numba.njit(self.signature, cache=cache, nogil=True, error_model="numpy",
                                                         fastmath=self.fastmath)(self.body))

    @property
    def compiled(self) -> Callable:
        """The compiled function itself: calling it spares half a microsecond."""
        self.load()
        return self._code

    def __call__(self, *args: object) -> object:
        return self.compiled(*args)


def jit(signature: object, fastmath: set[str] | bool = False) -> Callable[[Callable], Jit]:
    """Decorator: `@jit("int64(float32[::1], int64)")`; releases the interpreter lock while it runs."""
    return lambda body: Jit(body, signature, fastmath)


def inlined(fastmath: set[str] | bool = False) -> Callable[[Callable], Callable]:
    """Decorator for a function that only kernels call."""
    return numba.njit(error_model="numpy", fastmath=fastmath)
