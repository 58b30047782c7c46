"""Checks that this processor can run what kernels are compiled for.

Normally it can, since kernels are compiled for the machine they run on. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES force another target, for
tests and measurements; executing a missing instruction then kills the process without a message. So that this does not happen to the user's
process, a few kernels are tried in a child process, once per target.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from .autotune import KernelBenchmark
from .compile import cache_folder
from .cpu.memory_bandwidth import read_bandwidth
from .threads import ThreadPool
from .warm import LOW_BIT, RAW

TARGET_VARIABLES = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
STAMP = "tried"


def forced_target(env: Mapping[str, str] = os.environ) -> str:
    """The environment variables that force a target other than this processor, as text; empty if none does."""
    return " ".join(f"{name}={env[name]}" for name in TARGET_VARIABLES if env.get(name))


def target_runs(kinds: Sequence[str]) -> bool:
    """Whether kernels of these kinds (`warm.KINDS`) run on this processor. A positive result is cached."""
    folder = cache_folder()
    stamp = None if folder is None else folder / f"{STAMP}-{LOW_BIT if LOW_BIT in kinds else RAW}"
    if stamp is not None and stamp.exists():
        return True
    child = subprocess.run([sys.executable, "-P", "-m", f"{__package__}.target_check", *kinds], stdin=subprocess.DEVNULL,
                           capture_output=True, check=False)
    if child.returncode == 0 and stamp is not None:
        stamp.touch()
    return child.returncode >= 0  # negative: killed by a signal. Any other failure is not about the processor and will show in the run.


def main(kinds: Sequence[str]) -> None:
    pool = ThreadPool(1)
    read_bandwidth(pool, np.zeros(1 << 20, np.uint8), passes=1)
    if LOW_BIT in kinds:
        KernelBenchmark(pool, 4, 64, 32, 128, 1, kernels=("dot",)).rates(("dot",), rounds=1)
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
