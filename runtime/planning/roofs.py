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

FORMAT, VERSION = "effllm-roofs", 4  # version 3 knew no products of bf16 pairs
FILE = "roofs.json"
MAX_OTHERS_SHARE = 0.1  # CPU share of other programs beyond which a figure counts as disturbed
QUIET_SAMPLE_S = 0.1  # ten clock ticks
BASE_FIGURES = ("memory", "overhead")  # figures that do not depend on the weights
EMPTY: Mapping[str, object] = {"machines": {}, "disks": {}}


@dataclass(frozen=True)
class MachineRoofs:
    """Measured rates of a processor with a number of threads, as stored in the file."""

    cpu: str
    threads: int
    date: str  # of the last figure
    memory: float  # bytes per second of the best pass,
    memory_usual: float  # and of the median pass
    token_s: float  # this and what follows: see `offload.predict.Rates`
    layer_s: float
    kinds: Mapping[str, KindRate]
    attention: Mapping[str, KindRate]
    choice_s: float | None = None  # absent from older files: `missing` then requests the machine's figures
    memory_alone: float | None = None  # bytes per second of a single thread
    disturbed: Mapping[str, float] = field(default_factory=dict)  # CPU share of other programs, by `figure_name`

    @property
    def memory_variation(self) -> float:
        return max(0.0, 1 - self.memory_usual / self.memory)

    def disturbed_of(self, wanted: RoofsWanted) -> dict[str, float]:
        """The entries of `disturbed` that a prediction of `wanted` uses."""
        names = {*BASE_FIGURES, *(figure_name("kind", kind) for kind in wanted.kinds), *(figure_name("attention", kv) for kv in wanted.kv)}
        return {name: share for name, share in self.disturbed.items() if name in names}


@dataclass(frozen=True)
class DiskRoofs:
    """Measured rates of a disk."""

    disk: Disk
    date: str  # of the probe
    file_bytes: int  # size of the file it was probed on


@dataclass(frozen=True)
class Roofs:
    """All measured rates for a run on this machine; None if never measured."""

    machine: MachineRoofs | None
    disk: DiskRoofs | None

    @property
    def rates(self) -> Rates | None:
        """The rates in the form of the performance model."""
        machine = self.machine
        if machine is None:
            return None
        return Rates(machine.memory, machine.token_s, machine.layer_s, machine.kinds, machine.attention,
                     self.disk.disk.stream_rate if self.disk else None, round(machine.memory_variation, 2),
                     self.disk.disk.rate_of if self.disk else None, self.disk.disk.single_rate if self.disk else None,
                     self.disk.disk.rate_again if self.disk else None, machine.choice_s or 0.0)


@dataclass(frozen=True)
class RoofsWanted:
    """The measurements that a prediction needs."""

    threads: int
    kinds: tuple[str, ...] = ()  # weight formats
    kv: tuple[str, ...] = ()  # cache precisions
    file: Path | None = None  # a file on the disk that weights come from, None for no disk
    base: bool = False  # re-measure the figures that do not depend on the weights, too


def roofs_file() -> Path:
    return cache_root() / FILE


def known(wanted: RoofsWanted) -> Roofs:
    """Earlier measurements, from the file alone."""
    content = _content()
    disk = content["disks"].get(_disk_key(wanted.file)) if wanted.file else None
    return Roofs(_machine(content["machines"].get(_machine_key(wanted.threads))), _disk(disk))


def missing(wanted: RoofsWanted, roofs: Roofs) -> RoofsWanted | None:
    """The measurements that are missing; None if there are none. Those made while other programs used the cores count as missing if the
    machine is quiet now: finding out takes QUIET_SAMPLE_S, and only happens if needed."""
    machine = roofs.machine
    outdated = {} if machine is None else machine.disturbed_of(wanted)
    if outdated and not is_quiet():
        outdated = {}
    lacking = replace(
        wanted,
        kinds=tuple(kind for kind in wanted.kinds if machine is None or kind not in machine.kinds or figure_name("kind", kind) in outdated),
        kv=tuple(kv for kv in wanted.kv if machine is None or kv not in machine.attention or figure_name("attention", kv) in outdated),
        file=None if roofs.disk else wanted.file, base=any(name in outdated for name in BASE_FIGURES))
    needs_any = lacking.base or _needs_base(machine) or lacking.kinds or lacking.kv or lacking.file
    return lacking if needs_any else None


def everything(wanted: RoofsWanted, roofs: Roofs) -> RoofsWanted:
    """A request to measure again what is wanted and everything else that is known of this machine."""
    machine = roofs.machine
    return wanted if machine is None else replace(wanted, kinds=tuple(dict.fromkeys((*wanted.kinds, *machine.kinds))),
                                               kv=tuple(dict.fromkeys((*wanted.kv, *machine.attention))), base=True)


def is_quiet() -> bool:
    """Whether other programs and the hypervisor leave us the cores right now."""
    before = hardware.cpu_time()
    time.sleep(QUIET_SAMPLE_S)
    return hardware.cpu_time().since(before).others_share <= MAX_OTHERS_SHARE


def figure_name(figure: str, of: str = "") -> str:
    """A figure's key in `MachineRoofs.disturbed`."""
    return f"{figure} {of}".strip()


def _needs_base(machine: MachineRoofs | None) -> bool:
    """Whether a figure is missing that does not depend on the weights."""
    return machine is None or machine.choice_s is None


def probe(lacking: RoofsWanted, roofs: Roofs) -> Iterator[Progress | Notice | Roofs]:
    """Measure what is lacking, merge it into `roofs` and store it. Yields progress, then the result. What cannot be measured stays unknown,
    with a notice."""
    from ...kernels import warm
    from . import machine_probe

    if is_cold(lacking):
        for done, count in warm.warm(_kernels(lacking)):
            yield Progress("compiling kernels (once, then cached)", done, count, "kernels")
    base = lacking.base or _needs_base(roofs.machine)
    total = machine_probe.count(lacking.kinds, lacking.kv, base) + (lacking.file is not None)
    phase, figures, done = "measuring this machine", [], 0
    yield Progress(phase, 0, total, "figures")
    if base or lacking.kinds or lacking.kv:
        for figure in machine_probe.measure(lacking.threads, lacking.kinds, lacking.kv, base):
            if figure["figure"] == "failed":
                yield Notice(f"not measured, and so not predicted: {figure['what']} ({figure['why']})")
            else:
                figures.append(figure)
            done = min(total, done + 1)
            yield Progress(phase, done, total, "figures")
        roofs = replace(roofs, machine=_store_machine(lacking.threads, figures))
    if lacking.file is not None:
        try:
            entry = {**asdict(disk_probe.probe(lacking.file)), "date": _now(), "file_bytes": lacking.file.stat().st_size}
        except OSError:
            entry = {}
        if entry:
            _write("disks", _disk_key(lacking.file), entry)
            roofs = replace(roofs, disk=_disk(entry))
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


def _store_machine(threads: int, figures: Sequence[Mapping[str, object]]) -> MachineRoofs | None:
    key = _machine_key(threads)
    stored = _content()["machines"].get(key)
    entry = {"kinds": {}, "attention": {}} if _machine(stored) is None else dict(stored)
    disturbed = dict(entry.get("disturbed", {}))
    for figure in figures:
        values = {name: value for name, value in figure.items() if name not in ("figure", "kind", "kv", "others")}
        name = figure_name(figure["figure"], figure.get("kind") or figure.get("kv") or "")
        disturbed.pop(name, None)
        if figure.get("others", 0.0) > MAX_OTHERS_SHARE:
            disturbed[name] = figure["others"]
        if figure["figure"] == "memory":
            entry |= {"memory": values["best"], "memory_usual": values["median"], "memory_alone": values["alone"]}
        elif figure["figure"] == "overhead":
            entry |= values
        else:
            group, name = ("kinds", "kind") if figure["figure"] == "kind" else ("attention", "kv")
            entry[group] = {**entry[group], figure[name]: values}
    entry |= {"cpu": hardware.cpu_name(), "threads": threads, "date": _now(), "disturbed": disturbed}
    if figures:
        _write("machines", key, entry)
    return _machine(entry)


def _content() -> dict[str, dict[str, object]]:
    """The file's contents, or empty if it is missing, damaged or of another version."""
    try:
        content = json.loads(roofs_file().read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            return {name: dict(value) for name, value in EMPTY.items()}
        return {name: dict(content[name]) for name in EMPTY}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {name: dict(value) for name, value in EMPTY.items()}


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


def _machine(entry: object) -> MachineRoofs | None:
    """One entry of the file; None if it is incomplete."""
    try:
        machine = MachineRoofs(**{**entry, "kinds": _rates(entry["kinds"]), "attention": _rates(entry["attention"]),
                                 "disturbed": {str(name): float(share) for name, share in entry.get("disturbed", {}).items()}})
        is_plausible = (min(machine.memory, machine.memory_usual) > 0
                        and min(machine.token_s, machine.layer_s, machine.choice_s or 0.0) >= 0)
        return machine if is_plausible else None
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def _rates(entries: Mapping[str, Mapping[str, float]]) -> dict[str, KindRate]:
    rates = {name: KindRate(**value) for name, value in entries.items()}
    return {name: rate for name, rate in rates.items() if min(rate.decode, rate.prefill) > 0}


def _disk(entry: object) -> DiskRoofs | None:
    try:
        values = dict(entry)
        date, file_bytes = values.pop("date"), values.pop("file_bytes")
        disk = Disk(**{**values, "reads": tuple(DiskRead(**read) for read in values["reads"])})
        probed = {(read.nbytes, read.depth) for read in disk.reads}
        is_complete = len(probed) == len({size for size, _ in probed}) * len({depth for _, depth in probed})
        return DiskRoofs(disk, date, file_bytes) if is_complete and disk.stream_rate > 0 else None
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
