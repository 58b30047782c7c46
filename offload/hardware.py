"""What this process may use of the machine: cores, memory, GPUs.

A container sees the whole host in /proc/cpuinfo and /proc/meminfo; its true limits are the affinity mask and the cgroups, of which v1 and
v2 can be mounted at once. A limit on any ancestor binds as well, so both are read at every level from the process's own group up to the
mount. Files are read below `root`, so that a tree copied from another machine can be examined; figures that a system does not publish in
/proc come from psutil (host-wide: such systems have no cgroups).
"""

import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .gpu import Gpu, gpus

ROOT = Path("/")
# Features that kernels may require, in the order in which a reader looks for them.
_SIMD = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8",
         "asimd", "asimddp", "i8mm", "sve")  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A snapshot of the machine, for `doctor` and to store with a measurement."""

    system: str
    cpu: str
    simd: tuple[str, ...]
    cores: int
    threads: int
    cpu_quota: float | None
    memory_total: int
    memory_available: int
    memory_limit: int | None
    huge_pages: str
    gpus: tuple[Gpu, ...]


def describe(root: Path = ROOT) -> Machine:
    """The whole snapshot. `cores` counts the machine's, `threads` those that we use; `memory_limit` is the cgroup's, None without one."""
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        cpu=cpu_name(root),
        simd=simd_features(root),
        cores=_physical_cores(_online(root), root),
        threads=cpu_threads(root),
        cpu_quota=cpu_quota(root),
        memory_total=memory_total(root),
        memory_available=memory_available(root),
        memory_limit=_memory_limit(root),
        huge_pages=_huge_pages(root),
        gpus=gpus(root),
    )


def cpu_threads(root: Path = ROOT, allowed: frozenset[int] | None = None) -> int:
    """The useful number of threads: one per physical core among the `allowed` CPUs (default: our affinity), at most the cgroup's quota."""
    cores = _physical_cores(_affinity() if allowed is None else allowed, root)
    quota = cpu_quota(root)
    # Rounded down: with more workers than quota the cgroup is throttled for part of each period, and all wait for the throttled one.
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """The cgroup CPU quota in CPUs; None if unlimited."""
    quotas = []
    for version, folder in _cgroup_levels("cpu", root):
        if version == 2:
            words = (_text(folder / "cpu.max") or "max").split()
            quota, period = _number(words[0]), _number(words[1]) if len(words) > 1 else 100_000
        else:
            quota, period = _number(_text(folder / "cpu.cfs_quota_us")), _number(_text(folder / "cpu.cfs_period_us"))
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def process_age(root: Path = ROOT) -> float:
    """Seconds since this process started, to a clock tick (10 ms)."""
    stat = _text(root / "proc/self/stat")
    if stat is None:
        import psutil

        return time.time() - psutil.Process().create_time()
    # psutil adds the ticks to the second in which the machine started, which /proc/stat gives without its fraction: up to a second too old.
    ticks = int(stat.rpartition(")")[2].split()[19])  # a program's name may hold spaces and brackets
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds of the CPUs that this process may use, since boot or between two samples: `all`, of which `idle` were unused, `own` this
    process's, and `stolen` by the hypervisor. The rest went to other programs."""

    all: float
    idle: float
    own: float
    stolen: float = 0.0

    def since(self, before: "CpuTime") -> "CpuTime":
        return CpuTime(self.all - before.all, self.idle - before.idle, self.own - before.own, self.stolen - before.stolen)

    @property
    def others(self) -> float:
        """CPU seconds of other programs."""
        return max(0.0, self.all - self.idle - self.own - self.stolen)

    @property
    def others_share(self) -> float:
        """The share of time used by other programs and the hypervisor; 0 for an empty interval."""
        return (self.others + self.stolen) / self.all if self.all > 0 else 0.0


def cpu_time(root: Path = ROOT, allowed: frozenset[int] | None = None) -> CpuTime:
    """A sample of the `allowed` CPUs (default: our affinity), to a clock tick (10 ms) each."""
    own, stat = time.process_time(), _text(root / "proc/stat")
    if stat is None:
        import psutil

        found = psutil.cpu_times()
        return CpuTime(found.user + found.system + found.idle, found.idle, own)
    rows = {int(cpu): [int(each) for each in row.split()] for cpu, row in re.findall(r"^cpu(\d+) (.+)$", stat, re.MULTILINE)}
    columns = [sum(column) / os.sysconf("SC_CLK_TCK") for column in
               zip(*(rows[cpu] for cpu in (_affinity() if allowed is None else allowed) if cpu in rows))]
    # user, nice, system, idle, waiting for disks, two kinds of interrupts, stolen; what follows is counted in the first two already.
    return CpuTime(sum(columns[:8]), sum(columns[3:5]), own, sum(columns[7:8]))


def cpu_name(root: Path = ROOT) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def simd_features(root: Path = ROOT) -> tuple[str, ...]:
    """Instruction sets that both the processor and the system offer, by their /proc/cpuinfo names."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    return tuple(name for name in _SIMD if name in flags)


def memory_total(root: Path = ROOT) -> int:
    """The most memory this process could ever have: the machine's, or the tightest cgroup limit."""
    total = _table(root / "proc/meminfo").get("MemTotal") or _psutil_memory()[0]
    limit = _memory_limit(root)
    return total if limit is None else min(total, limit)


def memory_available(root: Path = ROOT) -> int:
    """Bytes that can be allocated now without swapping or being killed; page cache counts as free."""
    available = _table(root / "proc/meminfo").get("MemAvailable") or _psutil_memory()[1]
    for limit, used in _memory_levels(root):
        available = min(available, max(0, limit - used))
    return available


def rss(root: Path = ROOT) -> int:
    """Resident set size of this process in bytes."""
    return _table(root / "proc/self/status").get("VmRSS") or _psutil_rss()


def rss_files(root: Path = ROOT) -> int:
    """File-backed part of the RSS, the program's own files included: the system can drop it and counts it as free."""
    return _table(root / "proc/self/status").get("RssFile", 0)


def peak_rss(root: Path = ROOT) -> int:
    """Peak RSS. Not getrusage's figure, which starts from the parent's peak if the parent forked."""
    return _table(root / "proc/self/status").get("VmHWM") or rss(root)


def memory_lost(root: Path = ROOT) -> tuple[int, int]:
    """(bytes of this process in swap, major page faults so far); zeros where the system does not say."""
    words = (_text(root / "proc/self/stat") or "").rpartition(")")[2].split()
    return _table(root / "proc/self/status").get("VmSwap", 0), int(words[9]) if len(words) > 9 else 0


def _memory_limit(root: Path) -> int | None:
    return min((limit for limit, _ in _memory_levels(root)), default=None)


def _memory_levels(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, unreclaimable bytes used) of every cgroup level that has a limit."""
    for version, folder in _cgroup_levels("memory", root):
        if version == 2:
            # memory.high throttles rather than kills, but a model running throttled is as good as dead.
            limits = [_number(_text(folder / name)) for name in ("memory.max", "memory.high")]
            used, prefix = _number(_text(folder / "memory.current")), ""
        else:
            limits = [_number(_text(folder / "memory.limit_in_bytes"))]
            used, prefix = _number(_text(folder / "memory.usage_in_bytes")), "total_"
        # Version 1 writes "unlimited" as a number near 2^63.
        limits = [limit for limit in limits if limit is not None and limit < 1 << 60]
        if limits:
            cached = _table(folder / "memory.stat")
            files = sum(cached.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield min(limits), max(0, (used or 0) - files)


def _cgroup_levels(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each cgroup that contains this process under `controller`, from its own up to the mount's root."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        for mount_root, mount_point in _cgroup_mounts(version, controller, root):
            top = root / mount_point.lstrip("/")
            # In a container the path may name host cgroups that its own mount does not show: they read as unlimited.
            folder = top / _below(path, mount_root)
            while True:
                yield version, folder
                if folder == top:
                    break
                folder = folder.parent


def _cgroup_mounts(version: int, controller: str, root: Path) -> Iterator[tuple[str, str]]:
    """(mounted path, mount point) of the first mount of the hierarchy, from /proc/self/mountinfo."""
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(), after.split()
        if version == 2 and kind == "cgroup2" or version == 1 and kind == "cgroup" and controller in rest[-1].split(","):
            yield _unescape(fields[3]), _unescape(fields[4])
            return


def _unescape(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), path)


def _below(path: str, mount_root: str) -> str:
    """`path` relative to the mounted root; the mount itself where it lies outside (a container's view of its host)."""
    wanted, base = PurePosixPath(path), PurePosixPath(mount_root)
    if ".." in wanted.parts or not wanted.is_relative_to(base):
        return "."
    return str(wanted.relative_to(base))


def _affinity() -> frozenset[int]:
    if platform.system() == "Linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _online(root: Path) -> frozenset[int]:
    folders = (root / "sys/devices/system/cpu").glob("cpu[0-9]*")
    return frozenset(int(folder.name[3:]) for folder in folders if folder.name[3:].isdigit()) or _affinity()


def _physical_cores(cpus: frozenset[int], root: Path) -> int:
    """Distinct cores behind the logical `cpus`; each counts as one where the system does not list siblings."""
    siblings = (_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus)
    return max(1, len({text.strip() for text in siblings}))


def _huge_pages(root: Path) -> str:
    """The mode of transparent huge pages: "always", "madvise", "never", or "absent"."""
    found = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return found.group(1) if found else "absent"


def _table(path: Path) -> dict[str, int]:
    """The numeric lines of a `name value [kB]` file, in bytes."""
    found = re.findall(r"^(\w+):?\s+(\d+)( kB)?$", _text(path) or "", re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in found}


def _number(text: str | None) -> int | None:
    """A non-negative integer, None for anything else ("max", "-1", an absent file)."""
    text = (text or "").strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Absent on this kernel, or hidden from this user: either way nothing is known.
        return None


def _psutil_memory() -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _psutil_rss() -> int:
    import psutil

    return psutil.Process().memory_info().rss
