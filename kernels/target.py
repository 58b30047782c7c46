"""The target processor of compiled kernels: this machine's, or the one given by NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

import llvmlite.binding as llvm

# Features of 64-bit ARM processors that LLVM may not detect, as bits of the auxiliary vector's AT_HWCAP on Linux.
AT_HWCAP, ARM_HWCAP_BITS = 16, {"neon": 1, "dotprod": 20}
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # system call number on x86-64 and its arguments


@cache
def target() -> tuple[str, str]:
    """LLVM's name of the processor and its features in LLVM notation, `+avx2,-avx512f`. The environment variables have the meaning they
    have in Numba."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        generic = name is not None and name.lower() == "generic"
        features = "" if generic else add_arm_features(llvm.get_host_cpu_features().flatten(sort=True), arm_features())
    if "+amx-tile" in features and not request_amx_tiles():
        features = ",".join(flag for flag in features.split(",") if not flag.startswith("+amx-"))
    return name or llvm.get_host_cpu_name(), features


def add_arm_features(features: str, detected: frozenset[str]) -> str:
    """Features in LLVM notation, with all those in `detected` enabled."""
    flags = [flag for flag in features.split(",") if flag and flag[1:] not in detected]
    return ",".join(sorted([*flags, *(f"+{name}" for name in detected)], key=lambda flag: flag[1:])) if detected else features


def arm_features() -> frozenset[str]:
    """The ARM_HWCAP_BITS features this processor has; none on other architectures."""
    if sys.platform == "win32" or os.uname().machine not in ("aarch64", "arm64"):
        return frozenset()
    if sys.platform == "darwin":  # all Apple silicon has both
        return frozenset(ARM_HWCAP_BITS)
    getauxval = getattr(ctypes.CDLL(None), "getauxval", None)  # glibc and musl have it
    if getauxval is None:
        return frozenset()
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return frozenset(name for name, bit in ARM_HWCAP_BITS.items() if getauxval(AT_HWCAP) >> bit & 1)


@cache
def request_amx_tiles() -> bool:
    """Request the tile registers of AMX from Linux, for all threads of this process, which would be killed if it used them without. Returns
    False if they are not granted: before Linux 5.16, or if a thread's signal stack is too small."""
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0


@cache
def cpu_features() -> frozenset[str]:
    """The features that are compiled for and the target's name. These may be fewer than the CPU has; an intrinsic that the target lacks
    kills the process."""
    name, features = target()
    return frozenset([name, *(flag[1:] for flag in features.split(",") if flag.startswith("+"))])
