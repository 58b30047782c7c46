"""The target processor of compiled kernels: this machine's, or the one given by NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

import llvmlite.binding as llvm

# Features of a 64-bit ARM processor that LLVM may not tell, and their bits in what Linux says of the processor.
HWCAP, ARM_BITS = 16, {"neon": 1, "dotprod": 20}
ARCH_PRCTL, ASK_FOR_STATE, TILE_DATA = 158, 0x1023, 18  # a system call of x86-64, what it is asked for (ARCH_REQ_XCOMP_PERM), and of what


@cache
def target() -> tuple[str, str]:
    """LLVM's name of the processor and its features in LLVM notation, `+avx2,-avx512f`; the variables mean what they mean to Numba."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        generic = name is not None and name.lower() == "generic"
        features = "" if generic else with_arm(llvm.get_host_cpu_features().flatten(sort=True), arm_features())
    if "+amx-tile" in features and not may_use_tiles():
        features = ",".join(each for each in features.split(",") if not each.startswith("+amx-"))
    return name or llvm.get_host_cpu_name(), features


def with_arm(features: str, found: frozenset[str]) -> str:
    """Features in LLVM notation, plus those of `found` that it does not mention."""
    named = [flag for flag in features.split(",") if flag and flag[1:] not in found]
    return ",".join(sorted([*named, *(f"+{name}" for name in found)], key=lambda flag: flag[1:])) if found else features


def arm_features() -> frozenset[str]:
    """The ARM_BITS features this processor has; none on other architectures."""
    if sys.platform == "win32" or os.uname().machine not in ("aarch64", "arm64"):
        return frozenset()
    if sys.platform == "darwin":  # all processors that Apple sold with it have both
        return frozenset(ARM_BITS)
    ask = getattr(ctypes.CDLL(None), "getauxval", None)  # glibc and musl have it
    if ask is None:
        return frozenset()
    ask.restype, ask.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return frozenset(name for name, bit in ARM_BITS.items() if ask(HWCAP) >> bit & 1)


@cache
def may_use_tiles() -> bool:
    """Ask Linux for the tile registers of AMX, for all threads of this process: one that has not asked ends when it touches them. False on
    a system that gives none: one before Linux 5.16, or one in which a thread has too small a stack for signals."""
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, ASK_FOR_STATE, TILE_DATA) == 0


@cache
def cpu_features() -> frozenset[str]:
    """The features that are compiled for (not what the CPU claims), and its name: an intrinsic that the target lacks ends the process."""
    name, features = target()
    return frozenset([name, *(flag[1:] for flag in features.split(",") if flag.startswith("+"))])
