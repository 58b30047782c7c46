"""Measured speed limits (roofline) of this machine: stored in the cache folder with their date, used by `plan`, `pull` and `run`.

    <cache>/roofs.json    {"machines": {processor, threads and kernels: figures}, "disks": {device and file system: figures}}

Nothing is measured here unless `missing` names something and the caller runs `probe`: commands that must be quick only look figures up.
Another number of threads, another processor or other kernels count as another machine; figures age, so their date is shown. A figure taken
while other programs used the cores is stored with their share, and counts as missing once the machine is quiet: otherwise a first plan
during a build would make every later prediction too low.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from ... import EffllmError
from ...kernels.compile import cache_key, cache_root
from ...offload import disk_probe, hardware
from ...offload.disk_probe import Disk, DiskRead
from ...offload.predict import KindRate, Rates
from ..events import Notice, Progress

FORMAT, VERSION = "effllm-roofs", 3  # version 2 counted prompt products of layers that a prompt skips
FILE = "roofs.json"
DISTURBED = 0.1  # CPU share of other programs beyond which it is stored with a figure
LOOK_S = 0.1  # ten clock ticks
BASE = ("memory", "overhead")  # figures that do not depend on the weights
NOTHING: Mapping[str, object] = {"machines": {}, "disks": {}}


@dataclass(frozen=True)
class MachineRoofs:
    """`memory`: bytes per second of the best and of the usual pass, and of a single thread; the rest as in `offload.predict.Rates`. `date`:
    of the last figure."""

    cpu: str
    threads: int
    date: str
    memory: float
    memory_usual: float
    token_s: float
    layer_s: float
    kinds: Mapping[str, KindRate]
    attention: Mapping[str, KindRate]
    choice_s: float | None = None  # absent from older files: `missing` then requests the machine's figures
    memory_alone: float | None = None
    disturbed: Mapping[str, float] = field(default_factory=dict)  # CPU share of other programs, by `figure_name`

    @property
    def memory_variation(self) -> float:
        return max(0.0, 1 - self.memory_usual / self.memory)

    def disturbed_of(self, wanted: RoofsWanted) -> dict[str, float]:
        """The entries of `disturbed` that a prediction of `wanted` uses."""
        names = {*BASE, *(figure_name("kind", kind) for kind in wanted.kinds), *(figure_name("attention", kv) for kv in wanted.kv)}
        return {name: share for name, share in self.disturbed.items() if name in names}


@dataclass(frozen=True)
class DiskRoofs:
    """A disk, the date of its probe, and the size of the file it was probed on."""

    disk: Disk
    date: str
    file_bytes: int


@dataclass(frozen=True)
class Roofs:
    """What is known for a run here; None for what was never measured."""

    machine: MachineRoofs | None
    disk: DiskRoofs | None

    @property
    def rates(self) -> Rates | None:
        """The figures as the planner takes them."""
        here = self.machine
        if here is None:
            return None
        return Rates(here.memory, here.token_s, here.layer_s, here.kinds, here.attention,
                     self.disk.disk.stream_rate if self.disk else None, round(here.memory_variation, 2),
                     self.disk.disk.rate_of if self.disk else None, self.disk.disk.single_rate if self.disk else None,
                     self.disk.disk.rate_again if self.disk else None, here.choice_s or 0.0)


@dataclass(frozen=True)
class RoofsWanted:
    """What a prediction needs: kinds of weights, cache precisions, and a file on the disk that they come from (None: no disk). `base`:
    re-measure the machine's own figures too."""

    threads: int
    kinds: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    file: Path | None = None
    base: bool = False


def roofs_file() -> Path:
    return cache_root() / FILE


def known(wanted: RoofsWanted) -> Roofs:
    """Earlier measurements, from the file alone."""
    content = _content()
    found = content["disks"].get(_disk_key(wanted.file)) if wanted.file else None
    return Roofs(_machine(content["machines"].get(_machine_key(wanted.threads))), _disk(found))


def missing(wanted: RoofsWanted, roofs: Roofs) -> RoofsWanted | None:
    """What is not known, or only from a disturbed measurement while the machine is quiet now; None if nothing is missing. Sampling the
    cores takes LOOK_S, and only happens if needed."""
    here = roofs.machine
    again = {} if here is None else here.disturbed_of(wanted)
    if again and not is_quiet():
        again = {}
    lacking = replace(
        wanted, kinds=tuple(kind for kind in wanted.kinds if here is None or kind not in here.kinds or figure_name("kind", kind) in again),
        kv=tuple(kv for kv in wanted.kv if here is None or kv not in here.attention or figure_name("attention", kv) in again),
        file=None if roofs.disk else wanted.file, base=any(name in again for name in BASE))
    return lacking if lacking.base or _lacks_base(here) or lacking.kinds or lacking.kv or lacking.file else None


def everything(wanted: RoofsWanted, roofs: Roofs) -> RoofsWanted:
    """What is wanted and all else that is known of this machine, to be measured again."""
    here = roofs.machine
    return wanted if here is None else replace(wanted, kinds=tuple(dict.fromkeys((*wanted.kinds, *here.kinds))),
                                               kv=tuple(dict.fromkeys((*wanted.kv, *here.attention))), base=True)


def is_quiet() -> bool:
    """Whether other programs and the hypervisor leave us the cores right now."""
    before = hardware.cpu_time()
    time.sleep(LOOK_S)
    return hardware.cpu_time().since(before).others_share <= DISTURBED


def figure_name(figure: str, of: str = "") -> str:
    """A figure's key in `MachineRoofs.disturbed`."""
    return f"{figure} {of}".strip()


def _lacks_base(here: MachineRoofs | None) -> bool:
    """Whether a figure is missing that does not depend on the weights."""
    return here is None or here.choice_s is None


def probe(lacking: RoofsWanted, roofs: Roofs) -> Iterator[Progress | Notice | Roofs]:
    """Measure what is lacking, merge it into `roofs` and store it. Yields progress, then the result. What cannot be measured stays unknown,
    with a notice."""
    from ...kernels import warm
    from . import machine_probe as child

    if is_cold(lacking):
        for done, count in warm.warm(_kernels(lacking)):
            yield Progress("compiling kernels (once, then cached)", done, count, "kernels")
    base = lacking.base or _lacks_base(roofs.machine)
    total = child.count(lacking.kinds, lacking.kv, base) + (lacking.file is not None)
    phase, figures, done = "measuring this machine", [], 0
    yield Progress(phase, 0, total, "figures")
    if base or lacking.kinds or lacking.kv:
        for figure in child.measure(lacking.threads, lacking.kinds, lacking.kv, base):
            if figure["figure"] == "failed":
                yield Notice(f"not measured, and so not predicted: {figure['what']} ({figure['why']})")
            else:
                figures.append(figure)
            done = min(total, done + 1)
            yield Progress(phase, done, total, "figures")
        roofs = replace(roofs, machine=_keep_machine(lacking.threads, figures))
    if lacking.file is not None:
        try:
            kept = {**asdict(disk_probe.probe(lacking.file)), "date": _now(), "file_bytes": lacking.file.stat().st_size}
        except OSError:
            kept = {}
        if kept:
            _write("disks", _disk_key(lacking.file), kept)
            roofs = replace(roofs, disk=_disk(kept))
        yield Progress(phase, total, total, "figures")
    yield roofs


def is_cold(lacking: RoofsWanted) -> bool:
    """Whether measuring starts with compiling kernels."""
    from ...kernels import warm

    return warm.is_cold(_kernels(lacking))


def _kernels(lacking: RoofsWanted) -> list[str]:
    """The kinds of kernels that measuring needs."""
    from ..prepare import EngineOptions
    from .needed_kernels import Needs, format_needs, kernel_kinds

    needs, exact = Needs(), any(kind.endswith(" exact") for kind in lacking.kinds)
    for kind in lacking.kinds:
        with suppress(EffllmError):  # an unknown format is not measured
            needs |= format_needs(kind.partition(" ")[0])
    return list(dict.fromkeys(kind for kv in lacking.kv or ("16bit",) for kind in kernel_kinds(needs, EngineOptions(kv=kv, exact=exact))))


def largest_file(files: Sequence[Path]) -> Path | None:
    """The best file to probe a disk with."""
    present = [file for file in files if file.is_file()]
    return max(present, key=lambda file: file.stat().st_size, default=None)


def _keep_machine(threads: int, figures: Sequence[Mapping[str, object]]) -> MachineRoofs | None:
    key = _machine_key(threads)
    before = _content()["machines"].get(key)
    kept = {"kinds": {}, "attention": {}} if _machine(before) is None else dict(before)
    disturbed = dict(kept.get("disturbed", {}))
    for figure in figures:
        rest = {name: value for name, value in figure.items() if name not in ("figure", "kind", "kv", "others")}
        name = figure_name(figure["figure"], figure.get("kind") or figure.get("kv") or "")
        disturbed.pop(name, None)
        if figure.get("others", 0.0) > DISTURBED:
            disturbed[name] = figure["others"]
        if figure["figure"] == "memory":
            kept |= {"memory": rest["best"], "memory_usual": rest["median"], "memory_alone": rest["alone"]}
        elif figure["figure"] == "overhead":
            kept |= rest
        else:
            group, name = ("kinds", "kind") if figure["figure"] == "kind" else ("attention", "kv")
            kept[group] = {**kept[group], figure[name]: rest}
    kept |= {"cpu": hardware.cpu_name(), "threads": threads, "date": _now(), "disturbed": disturbed}
    if figures:
        _write("machines", key, kept)
    return _machine(kept)


def _content() -> dict[str, dict[str, object]]:
    """The file's contents, or empty if it is missing, damaged or of another version."""
    try:
        content = json.loads(roofs_file().read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            return {name: dict(value) for name, value in NOTHING.items()}
        return {name: dict(content[name]) for name in NOTHING}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {name: dict(value) for name, value in NOTHING.items()}


def _write(section: str, key: str, value: Mapping[str, object]) -> None:
    """Update the file atomically. Does nothing if it cannot be written."""
    content, file = _content(), roofs_file()
    content[section][key] = dict(value)
    unfinished = file.with_name(f"{FILE}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({"format": FORMAT, "version": VERSION, **content}, indent=1), encoding="utf-8")
        unfinished.replace(file)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _machine(found: object) -> MachineRoofs | None:
    """One entry of the file; None if it is incomplete."""
    try:
        made = MachineRoofs(**{**found, "kinds": _rates(found["kinds"]), "attention": _rates(found["attention"]),
                               "disturbed": {str(name): float(share) for name, share in found.get("disturbed", {}).items()}})
        return made if min(made.memory, made.memory_usual) > 0 and min(made.token_s, made.layer_s, made.choice_s or 0.0) >= 0 else None
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def _rates(found: Mapping[str, Mapping[str, float]]) -> dict[str, KindRate]:
    made = {name: KindRate(**value) for name, value in found.items()}
    return {name: rate for name, rate in made.items() if min(rate.decode, rate.prefill) > 0}


def _disk(found: object) -> DiskRoofs | None:
    try:
        values = dict(found)
        date, file_bytes = values.pop("date"), values.pop("file_bytes")
        made = Disk(**{**values, "reads": tuple(DiskRead(**read) for read in values["reads"])})
        probed = {(read.nbytes, read.depth) for read in made.reads}
        whole = len(probed) == len({size for size, _ in probed}) * len({depth for _, depth in probed})
        return DiskRoofs(made, date, file_bytes) if whole and made.stream_rate > 0 else None
    except (TypeError, KeyError, ValueError):
        return None


def _machine_key(threads: int) -> str:
    return sha256(f"{hardware.cpu_name()} {cache_key()}".encode()).hexdigest()[:16] + f"-{threads}t"


def _disk_key(file: Path) -> str:
    try:
        return " ".join(disk_probe.mounted(file))
    except OSError:
        return "none"


def _now() -> str:
    return datetime.now().isoformat(" ", "minutes")
