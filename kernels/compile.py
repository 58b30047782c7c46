"""Kernel compilation and the on-disk cache of machine code.

A kernel is a native function `void(args, worker, counter)` of three int64: the address of an argument block of int64, the worker's index,
and the address of a shared counter from which workers draw block numbers. Because it takes addresses and no Python objects, a worker
waiting inside compiled code can run it without the GIL.

The cache folder holds one object file per function. Its name is a hash of every file in `kernels/`, the compiler versions and the CPU
features. Cached objects are loaded without importing the compiler (`machine_code.py`).
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import llvmlite

from .machine_code import assembly, compile_object, load_object, parse_signature
from .target import cpu_features

# Sums may be reassociated, which allows vectorizing them. "nnan" is left out: a NaN must stay visible.
REASSOCIATE = {"reassoc", "contract", "nsz"}
KERNEL_SIGNATURE = "void(int64, int64, int64)"
C_TYPES = {"int64": ctypes.c_int64, "float64": ctypes.c_double, "float32": ctypes.c_float, "void": None}
MIN_FREE_NBYTES = 8 << 20  # disk space required for a cache folder, several times its usual size
_UNIQUE = itertools.count()
_LOAD_LOCK = threading.RLock()  # neither the compiler nor the linker is thread-safe


@cache
def cache_key() -> str:
    """Name of the cache folder: a hash of the sources, compiler and CPU features. Copies of the same sources share it."""
    root = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    digest.update(_numba_version())
    digest.update(f"{llvmlite.__version__} {sys.version_info[:2]} {sorted(cpu_features())}".encode())
    return digest.hexdigest()[:16]


def _numba_version() -> bytes:
    """Numba's version without importing it: the contents of its version file, or its package metadata."""
    package = Path(find_spec("numba").origin).parent
    try:
        return (package / "_version.py").read_bytes()
    except OSError:
        from importlib.metadata import version

        return version("numba").encode()


def cache_root() -> Path:
    """The user's cache folder for this program (`XDG_CACHE_HOME` moves it on Linux)."""
    from platformdirs import user_cache_path

    return user_cache_path("effllm")


@cache
def cache_folder() -> Path | None:
    """The folder for compiled kernels, created; None when no such folder can be written, or its disk is full (kernels are then compiled
    every time)."""
    folder = cache_root() / "kernels" / cache_key()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        takes_files = os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= MIN_FREE_NBYTES
    except OSError:
        return None
    return folder if takes_files or any(folder.glob(completion_marker(folder).name)) else None


def completion_marker(folder: Path, kind: str = "*") -> Path:
    """The marker file showing that a cache folder holds all functions of a kind (`warm.KINDS`)."""
    return folder / f"complete-{kind}"


def _load_or_compile(body: Callable, signature: str, fastmath: set[str] | bool, name: str) -> int:
    """Address of the machine code of `body`, from the cache folder or compiled now. A missing or damaged file costs one compilation."""
    folder = cache_folder() if body.__module__.startswith(f"{__package__}.") else None
    if folder is None:  # the hash in the folder's name covers the sources of this package only
        unique_name = f"{name}.{next(_UNIQUE)}"
        return load_object(compile_object(body, signature, fastmath, unique_name), unique_name)
    path = folder / f"{name}.o"
    try:
        return load_object(path.read_bytes(), name)
    except (OSError, ValueError):
        machine_code = compile_object(body, signature, fastmath, name)
        _write_object(machine_code, path)
        return load_object(machine_code, name)


def _write_object(machine_code: bytes, path: Path) -> None:
    """Write an object file atomically. If the folder is not writable, the function is compiled again next time."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(machine_code)
        partial.replace(path)
    except OSError:
        with suppress(OSError):  # a read-only file system may refuse to remove even a missing file
            partial.unlink(missing_ok=True)


class Kernel:
    """A kernel body and, once requested, its machine code. `address` compiles or loads it on first use."""

    def __init__(self, body: Callable[[int, int, int], None], fastmath: set[str] | bool) -> None:
        self.body, self.fastmath, self.name = body, fastmath, f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        self._address = 0

    def load(self) -> None:
        """Compile, or load from the cache, unless already done."""
        with _LOAD_LOCK:
            if not self._address:
                self._address = _load_or_compile(self.body, KERNEL_SIGNATURE, self.fastmath, self.name)

    @property
    def address(self) -> int:
        if not self._address:
            self.load()
        return self._address

    def assembly(self) -> str:
        """The machine code as assembly text, to inspect the inner loop (compiles again: cached objects carry no text)."""
        return assembly(self.body, KERNEL_SIGNATURE, self.fastmath)


def kernel(fastmath: set[str] | bool = False) -> Callable[[Callable[[int, int, int], None]], Kernel]:
    """Decorator: `@kernel()` over `def body(args, worker, counter)`."""
    return lambda body: Kernel(body, fastmath)


class Jit:
    """A compiled function of numbers and addresses, called from Python, or from kernels by its address. It is compiled or loaded on first
    use."""

    def __init__(self, body: Callable, signature: str, fastmath: set[str] | bool) -> None:
        self.body, self.signature, self.fastmath = body, signature, fastmath
        self.name = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        self._function, self._address = None, 0
        self._converters = [int if type_name == "int64" else float for type_name in parse_signature(signature)[1]]

    def load(self) -> None:
        """Compile, or load from the cache, unless already done."""
        with _LOAD_LOCK:
            if self._function is None:
                result, arguments = parse_signature(self.signature)
                function = ctypes.CFUNCTYPE(C_TYPES[result], *(C_TYPES[type_name] for type_name in arguments))
                self._address = _load_or_compile(self.body, self.signature, self.fastmath, self.name)
                self._function = function(self._address)

    @property
    def address(self) -> int:
        if self._function is None:
            self.load()
        return self._address

    @property
    def compiled(self) -> Callable:
        """The raw compiled function, for plain Python numbers only; calling it directly saves a microsecond."""
        if self._function is None:
            self.load()
        return self._function

    def __call__(self, *args: float) -> float | None:
        return self.compiled(*[convert(value) for convert, value in zip(self._converters, args, strict=True)])


def jit(signature: str, fastmath: set[str] | bool = False) -> Callable[[Callable], Jit]:
    """Decorator: `@jit("int64(int64, float32)")`; the function releases the GIL while it runs."""
    return lambda body: Jit(body, signature, fastmath)
