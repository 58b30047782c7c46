"""What this installation found: the machine, the kernel that each op would run and why, and whether its machine code is at hand.

`effllm doctor` prints it. Nothing is run here: a kernel is chosen from a description of the call, so a choice can be shown for every
stored type and width without weights.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from .. import __version__
from ..kernels import compile, warm
from ..kernels.cpu.ops import default_registry
from ..kernels.layout import STORED_TYPES
from ..kernels.registry import Call
from ..offload.hardware import Machine, describe
from .events import Progress

# (op, columns) that tell the candidates apart: one token, and a chunk of a prompt.
CALLS = {"matrix": (1, 512), "rotate": (1,), "attend": (1,)}
STORED = {"matrix": tuple(STORED_TYPES), "rotate": ("f32",), "attend": ("f32", "f16")}


@dataclass(frozen=True)
class KernelChoice:
    """`declined` holds (name, reason) of the candidates before the chosen one."""

    op: str
    stored: str
    columns: int
    chosen: str
    fallback: bool
    declined: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Diagnosis:
    """`cache_folder` is None where no folder for compiled kernels can be written; `cold`: the next run compiles first."""

    version: str
    python: str
    libraries: dict[str, str]
    machine: Machine
    compiled_for: tuple[str, ...]
    cache_folder: Path | None
    cold: bool
    kernels: tuple[KernelChoice, ...]
    torch: bool

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "cache_folder": str(self.cache_folder) if self.cache_folder else None}


def diagnose() -> Diagnosis:
    return Diagnosis(
        version=__version__, python=platform.python_version(), libraries={name: version(name) for name in ("numpy", "numba", "tokenizers")},
        machine=describe(), compiled_for=tuple(sorted(compile.cpu_features())), cache_folder=compile.cache_folder(), cold=warm.is_cold(),
        kernels=kernel_choices(), torch=find_spec("torch") is not None)


def kernel_choices() -> tuple[KernelChoice, ...]:
    registry = default_registry()
    found = []
    for call in (Call(op, stored, columns) for op in CALLS for columns in CALLS[op] for stored in STORED[op]):
        choice = registry.select(call)
        found.append(KernelChoice(call.op, call.stored, call.columns, choice.candidate.name, choice.candidate.fallback, choice.declined))
    return tuple(found)


def warm_up() -> Iterator[Progress]:
    """Compile every kernel that is not compiled yet."""
    if warm.is_cold():
        for done, total in warm.warm():
            yield Progress("compiling kernels", done, total, "kernels")
