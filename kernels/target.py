"""The processor that kernels are compiled for: this one, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say."""

from __future__ import annotations

import os
from functools import cache

import llvmlite.binding as llvm


@cache
def target() -> tuple[str, str]:
    """LLVM's name of the processor and its features as LLVM writes them, `+avx2,-avx512f`; the variables mean what they mean to Numba."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name is not None and name.lower() == "generic" else llvm.get_host_cpu_features().flatten(sort=True)
    return name or llvm.get_host_cpu_name(), features


@cache
def cpu_features() -> frozenset[str]:
    """The features that are compiled for (not what the CPU claims), and its name: an intrinsic that the target lacks ends the process."""
    name, features = target()
    return frozenset([name, *(flag[1:] for flag in features.split(",") if flag.startswith("+"))])
