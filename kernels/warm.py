"""Every compiled function of the program, and the cold start that compiles them in a child process.

The child keeps the compiler's memory out of the run that follows, and a lock on the cache folder makes two cold starts share one
compilation: the second waits and finds the work done. Run as `python -m effllm.kernels.warm`; prints `done total name` lines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .compile import COMPLETE, Jit, Kernel, cache_folder


def compiled_functions() -> list[Kernel | Jit]:
    """All kernels and compiled helpers, in the order a first run needs them."""
    from . import threads
    from .cpu import attention, linear, roof, sampling

    modules = (threads, linear, attention, sampling, roof)
    return [value for module in modules for value in vars(module).values() if isinstance(value, Kernel | Jit)]


def is_cold() -> bool:
    """Would a run have to compile, with a cache folder to compile into?"""
    folder = cache_folder()
    return folder is not None and not (folder / COMPLETE).exists()


def load_all() -> None:
    """Take every function from the cache (or compile it): after this the memory of the process holds all machine code it will ever have."""
    for function in compiled_functions():
        function.load()


def warm() -> Iterator[tuple[int, int]]:
    """Compile everything in a child; yields (functions done, functions in total). A child that fails costs time, nothing else: what it
    did not compile is compiled when it is first called."""
    command = [sys.executable, "-P", "-m", f"{__package__}.warm"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_environment()) as child:
        for line in child.stdout:
            done, total, _ = line.split(" ", 2)
            yield int(done), int(total)


def _environment() -> dict[str, str]:
    """The child finds the package where this process did, installed or not."""
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}


def _locked(folder: Path):
    """An exclusive lock on the cache folder for as long as the returned file is open (POSIX; elsewhere writes are atomic anyway)."""
    handle = open(folder / "lock", "w")
    if os.name == "posix":
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def main() -> None:
    folder = cache_folder()
    if folder is None:
        return
    with _locked(folder):
        functions = compiled_functions()
        for done, function in enumerate(functions, 1):
            function.load()
            sys.stdout.write(f"{done} {len(functions)} {function.name}\n")
            sys.stdout.flush()
        (folder / COMPLETE).touch()


if __name__ == "__main__":
    main()
