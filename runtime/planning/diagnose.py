"""Installation report: the machine, the kernel that each op would run and why, and whether it is compiled.

Printed by `effllm doctor`. Nothing is executed: kernels are chosen from a description of the call, so choices can be shown for every stored
type and width without weights.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from ... import __version__
from ...kernels import autotune, compile, warm
from ...kernels.cpu import lut_layout
from ...kernels.cpu.candidates import default_registry
from ...kernels.cpu.int8_ir import INSTRUCTION_SET
from ...kernels.cpu.kv.prefill import MULTIPLIES_PACKED
from ...kernels.cpu.stages import LOW_BIT
from ...kernels.layout import PAGE, STORED_TYPES
from ...kernels.registry import Call
from ...offload.hardware import Machine, describe
from ...quant.spec import DEFAULTS, QuantSpec
from ..events import Progress
from ..files.storage_locations import StorageLocation, list_locations
from ..library.listing import local_models
from . import roofs
from .chosen_kernels import EITHER
from .forecast import kind_of_weight

# Columns that distinguish an op's candidates (one token, a prompt chunk), and stored types; others: one token, float32.
WIDTHS = {"matrix": (1, 512), LOW_BIT: (1, 512)}
STORED = {"matrix": tuple(STORED_TYPES), LOW_BIT: (*DEFAULTS.values(), "affine3:64", "float8:128"), "attend": ("f32", "f16")}
MEASURED = "few tokens: whichever was measured to be faster for such weights, see below"
PAGES = "8 to 2 bits"
# Ops without candidates, where the format decides: (op, tokens, kernel, reason).
AS_CODES = f"integer products, {INSTRUCTION_SET}"
OF_A_PROMPT = ((AS_CODES, "many tokens: pages are multiplied as stored, one token after the other; as float32 where few heads share them")
               if MULTIPLIES_PACKED else
               ("opened pages, float32 tiles", "many tokens: a page is opened as floats once for a tile of them"))
BY_FORMAT = (("packed attention", 1, AS_CODES, "a page's codes are multiplied as integers, once for all heads that share them"),
             ("packed attention", 512, *OF_A_PROMPT),
             ("seal", PAGE, "compiled", "native code packs a page when the newest tokens leave it"))
LIBRARIES = ("numpy", "numba", "llvmlite", "tokenizers", "torch")


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that an op would run."""

    op: str
    stored: str  # stored type
    columns: int  # tokens
    chosen: str
    fallback: bool
    declined: tuple[tuple[str, str], ...]  # (name, reason) of the candidates before the chosen one
    because: str  # the reason for the choice


@dataclass(frozen=True)
class Measurement:
    """The choice of a kernel for one kind of low-bit weights."""

    case: autotune.Case
    timing: autotune.Timing  # weights per second by dot products and by lookup
    kernel: str
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """The contents of `effllm doctor`."""

    version: str
    python: str
    executable: str  # the running Python
    libraries: dict[str, str]  # name -> installed version
    machine: Machine
    compiled_for: tuple[str, ...]  # CPU features
    cache_folder: Path | None  # None if no folder for compiled kernels is writable
    cold: bool  # the next run compiles first
    kernels: tuple[KernelChoice, ...]
    measured: tuple[Measurement, ...]
    torch: bool
    roofs: roofs.Roofs
    places: tuple[StorageLocation, ...]

    def to_json(self) -> dict[str, object]:
        disk = self.roofs.disk
        roofs_json = asdict(self.roofs)
        if disk is not None:
            roofs_json["disk"] |= {"stream_bytes_per_s": disk.disk.stream_rate}
        return {**asdict(self), "cache_folder": str(self.cache_folder) if self.cache_folder else None, "roofs": roofs_json,
                "places": [place.to_json() for place in self.places]}


def diagnose(known: roofs.Roofs, env: Mapping[str, str]) -> Diagnosis:
    """`known`: measured speeds (`roofs_wanted`, `roofs.probe`); `env`: the environment, for the user's folders."""
    return Diagnosis(
        version=__version__, python=platform.python_version(), executable=sys.executable, libraries=installed(LIBRARIES),
        machine=describe(), compiled_for=tuple(sorted(compile.cpu_features())), cache_folder=compile.cache_folder(),
        cold=warm.is_cold((warm.RAW,)),
        kernels=kernel_choices(), measured=measurements(), torch=find_spec("torch") is not None,
        roofs=known, places=list_locations(env))


def installed(names: Sequence[str]) -> dict[str, str]:
    """Versions of installed libraries, from their metadata, without importing them."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def roofs_wanted(env: Mapping[str, str], threads: int) -> roofs.RoofsWanted:
    """The machine's speed with this many threads in every common format, and that of the disk with the largest local model."""
    kinds = ("bf16", *(kind_of_weight(QuantSpec.parse(f"{bits}bit")) for bits in (8, 6, 5, 4, 3, 2)))
    files = [file for model in local_models(env)
             for file in ((model.folder,) if model.folder.is_file() else model.folder.glob("*.safetensors"))]
    return roofs.RoofsWanted(threads, kinds, ("16bit", "8bit", "4bit"), roofs.largest_file(files))


def kernel_choices() -> tuple[KernelChoice, ...]:
    """The choices for every op."""
    registry = default_registry()
    choices = []
    for op in registry.ops:
        for columns, stored in product(WIDTHS.get(op, (1,)), STORED.get(op, ("f32",))):
            spec = QuantSpec.parse(stored) if op == LOW_BIT else None
            selected = registry.select(Call(op, stored, columns) if spec is None else Call(op, spec.scheme, columns, bits=spec.bits))
            candidate = selected.candidate
            name, because, declined = candidate.name, candidate.because, selected.declined
            if spec is not None and columns == 1 and not candidate.fallback and not lut_layout.declines(spec.scheme, spec.bits):
                name, because, declined = EITHER, MEASURED, ()  # without weights there is no call to decide it
            choices.append(KernelChoice(op, stored, columns, name, candidate.fallback, declined, because))
    return (*choices, *(KernelChoice(op, PAGES, columns, name, False, (), because) for op, columns, name, because in BY_FORMAT))


def measurements() -> tuple[Measurement, ...]:
    """Recorded timings of dot products against lookup, by bits, inputs and threads."""
    known = sorted(autotune.load_timings().items(), key=lambda item: (item[0].bits, item[0].depth, item[0].threads, item[0].group))
    return tuple(Measurement(case, timing, timing.kernel, timing.reason) for case, timing in known)


def warm_up(threads: int) -> Iterator[Progress]:
    """Compile every missing kernel, and time the kernel choices for common kinds of weights."""
    if warm.is_cold():
        for done, total in warm.warm():
            yield Progress("compiling kernels", done, total, "kernels")
    common, known = autotune.common_cases(threads), autotune.load_timings()
    unknown = [(case, rows) for case, rows in common if case not in known]
    if unknown and compile.cache_folder() is not None:
        for done, total in autotune.measure(unknown):
            yield Progress("measuring kernels", done, total, "kinds of weights")
