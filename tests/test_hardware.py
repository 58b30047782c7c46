"""Cores and memory as the kernel publishes them: this machine's own files, and trees as in containers and on other machines."""

import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from effllm.offload import hardware
from effllm.offload.gpu import Gpu, parse

GIB = 1 << 30
UNLIMITED_V1 = str(2**63 - 4096)
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:{n} {root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(cpus: int = 8, smt: int = 2, total: int = 64 * GIB, available: int = 48 * GIB) -> dict[str, str]:
    """/proc and /sys of a machine with `cpus` logical CPUs; siblings are numbered as x86 does, half the range apart."""
    files = {"proc/meminfo": f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0\n"}
    cores = cpus // smt
    for cpu in range(cpus):
        siblings = ",".join(str(cpu % cores + cores * i) for i in range(smt))
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings + "\n"
    return files


def v2(path: str, levels: dict[str, dict[str, str]], root: str = "/") -> dict[str, str]:
    files = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2_MOUNT.format(root=root)}
    return files | {f"sys/fs/cgroup/{level}/{name}": text + "\n" for level, names in levels.items() for name, text in names.items()}


def v1(paths: dict[str, str], levels: dict[str, dict[str, str]]) -> dict[str, str]:
    files = {
        "proc/self/cgroup": "".join(f"{n}:{name}:{path}\n" for n, (name, path) in enumerate(paths.items(), 2)),
        "proc/self/mountinfo": "".join(V1_MOUNT.format(n=n, root="/", name=name) for n, name in enumerate(paths, 40)),
    }
    return files | {f"sys/fs/cgroup/{level}/{name}": text + "\n" for level, names in levels.items() for name, text in names.items()}


ALL = frozenset(range(8))

# -- cores -----------------------------------------------------------------------------------------------------------------------


def test_one_thread_per_physical_core(tmp_path: Path) -> None:
    root = tree(tmp_path, machine(cpus=8, smt=2))
    assert hardware.cpu_threads(root, ALL) == 4
    assert hardware.cpu_threads(root, frozenset({0, 4})) == 1, "two siblings of one core"
    assert hardware.cpu_threads(root, frozenset({0, 1, 2})) == 3
    assert hardware.describe(root).cores == 4


def test_unknown_topology_counts_cpus(tmp_path: Path) -> None:
    assert hardware.cpu_threads(tmp_path, frozenset({3, 5, 7})) == 3


@pytest.mark.parametrize(
    ("cpu_max", "quota", "threads"),
    [("max 100000", None, 4), ("200000 100000", 2.0, 2), ("350000 100000", 3.5, 3), ("50000 100000", 0.5, 1), ("900000 100000", 9.0, 4),
     ("100000", 1.0, 1), ("garbage", None, 4)],
)  # fmt: skip
def test_quota_v2(tmp_path: Path, cpu_max: str, quota: float | None, threads: int) -> None:
    root = tree(tmp_path, machine() | v2("/job", {"job": {"cpu.max": cpu_max}}))
    assert hardware.cpu_quota(root) == quota
    assert hardware.cpu_threads(root, ALL) == threads


@pytest.mark.parametrize(("quota", "expected"), [("-1", None), ("300000", 3.0)])
def test_quota_v1(tmp_path: Path, quota: str, expected: float | None) -> None:
    levels = {"cpu,cpuacct/job": {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000"}}
    root = tree(tmp_path, machine() | v1({"cpu,cpuacct": "/job", "memory": "/"}, levels))
    assert hardware.cpu_quota(root) == expected


def test_a_quota_on_an_ancestor_binds(tmp_path: Path) -> None:
    levels = {"slice": {"cpu.max": "100000 100000"}, "slice/user": {}, "slice/user/job": {"cpu.max": "400000 100000"}}
    root = tree(tmp_path, machine() | v2("/slice/user/job", levels))
    assert hardware.cpu_threads(root, ALL) == 1


# -- memory ----------------------------------------------------------------------------------------------------------------------


def test_memory_without_cgroups(tmp_path: Path) -> None:
    root = tree(tmp_path, machine())
    assert (hardware.memory_total(root), hardware.memory_available(root)) == (64 * GIB, 48 * GIB)
    assert hardware.describe(root).memory_limit is None


def test_memory_v2(tmp_path: Path) -> None:
    """File cache inside the group is given up under pressure, so it counts as free; shared memory is not."""
    stat = f"anon {2 * GIB}\nfile {3 * GIB}\nshmem {GIB}\ninactive_anon 5\nactive_file {GIB // 2}\ninactive_file {3 * GIB // 2}"
    levels = {"job": {"memory.max": str(8 * GIB), "memory.high": "max", "memory.current": str(5 * GIB), "memory.stat": stat}}
    root = tree(tmp_path, machine() | v2("/job", levels))
    assert hardware.memory_total(root) == 8 * GIB
    assert hardware.memory_available(root) == 8 * GIB - (5 * GIB - 2 * GIB)
    assert hardware.describe(root).memory_limit == 8 * GIB


def test_memory_v1(tmp_path: Path) -> None:
    stat = f"active_file 1\ninactive_file 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}"
    levels = {
        "memory/job": {"memory.limit_in_bytes": str(6 * GIB), "memory.usage_in_bytes": str(4 * GIB), "memory.stat": stat},
        "memory": {"memory.limit_in_bytes": UNLIMITED_V1, "memory.usage_in_bytes": str(40 * GIB)},
    }
    root = tree(tmp_path, machine() | v1({"cpu": "/", "memory": "/job"}, levels))
    assert (hardware.memory_total(root), hardware.memory_available(root)) == (6 * GIB, 4 * GIB)


def test_the_largest_number_means_unlimited(tmp_path: Path) -> None:
    levels = {"memory/job": {"memory.limit_in_bytes": UNLIMITED_V1, "memory.usage_in_bytes": str(GIB)}}
    root = tree(tmp_path, machine() | v1({"memory": "/job"}, levels))
    assert hardware.describe(root).memory_limit is None


def test_the_tightest_of_all_levels_and_the_machine(tmp_path: Path) -> None:
    used = {"memory.current": str(GIB)}
    levels = {
        "a": {"memory.max": str(3 * GIB), **used},
        "a/b": {"memory.max": str(100 * GIB), **used},
        "a/b/c": {"memory.max": "max", **used},
    }
    root = tree(tmp_path, machine() | v2("/a/b/c", levels))
    assert (hardware.memory_total(root), hardware.memory_available(root)) == (3 * GIB, 2 * GIB)
    tree(tmp_path, machine(total=2 * GIB, available=GIB))
    assert (hardware.memory_total(root), hardware.memory_available(root)) == (2 * GIB, GIB)


def test_memory_high_is_a_limit(tmp_path: Path) -> None:
    levels = {"job": {"memory.max": str(8 * GIB), "memory.high": str(4 * GIB), "memory.current": "0"}}
    assert hardware.memory_total(tree(tmp_path, machine() | v2("/job", levels))) == 4 * GIB


def test_over_the_limit_is_zero(tmp_path: Path) -> None:
    levels = {"job": {"memory.max": str(GIB), "memory.current": str(2 * GIB)}}
    assert hardware.memory_available(tree(tmp_path, machine() | v2("/job", levels))) == 0


@pytest.mark.parametrize(
    ("path", "mount_root", "level"),
    [
        ("/", "/", "."),
        ("/docker/abc", "/docker/abc", "."),
        ("/docker/abc/inner", "/docker/abc", "inner"),
        ("/host/side/path", "/", "."),
        ("/../../other", "/", "."),
        ("/docker/abcdef", "/docker/abc", "."),
        ("/with space", "/", "with space"),
    ],
)
def test_where_a_container_finds_its_group(tmp_path: Path, path: str, mount_root: str, level: str) -> None:
    """Namespaced, bind-mounted and hidden groups: what the mount does not show falls back to the mount itself."""
    root = tree(tmp_path, machine() | v2(path, {level: {"memory.max": str(5 * GIB), "memory.current": "0"}}, mount_root))
    tree(tmp_path, {"sys/other/memory.max": str(GIB), "sys/other/memory.current": "0"})
    assert hardware.memory_total(root) == 5 * GIB


def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    files = machine() | {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/").replace("/sys/fs/cgroup", "/mnt/c\\040g"),
        "mnt/c g/memory.max": str(7 * GIB),
        "mnt/c g/memory.current": "0",
    }
    assert hardware.memory_total(tree(tmp_path, files)) == 7 * GIB


def test_both_versions_at_once(tmp_path: Path) -> None:
    """A hybrid machine: version 2 is mounted without controllers, version 1 holds the limits."""
    files = v1({"memory": "/job"}, {"memory/job": {"memory.limit_in_bytes": str(2 * GIB), "memory.usage_in_bytes": "0"}})
    files["proc/self/cgroup"] += "0::/\n"
    files["proc/self/mountinfo"] += V2_MOUNT.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    assert hardware.memory_total(tree(tmp_path, machine() | files)) == 2 * GIB


# -- names -----------------------------------------------------------------------------------------------------------------------


def test_names(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: fpu sse4_2 avx2 fma avx512f avx512_vnni\n\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 1\n",
            "proc/driver/nvidia/gpus/0000:02:00.0/information": "IRQ: 2\n",
        },
    )
    found = hardware.describe(root)
    assert found.cpu == "Some CPU @ 3 GHz"
    assert found.simd == ("sse4_2", "fma", "avx2", "avx512f", "avx512_vnni")
    assert found.huge_pages == "madvise"
    assert found.gpus == (Gpu("NVIDIA H200"), Gpu("NVIDIA GPU")), "no tool is asked about the files of another machine"


def test_arm_features(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd asimddp i8mm\nCPU implementer : 0x41\n"})
    assert hardware.simd_features(root) == ("asimd", "asimddp", "i8mm")
    assert hardware.cpu_name(root)


def test_a_system_without_proc_asks_psutil(tmp_path: Path) -> None:
    assert hardware.memory_total(tmp_path) == psutil.virtual_memory().total
    assert 0 < hardware.memory_available(tmp_path) <= hardware.memory_total(tmp_path)
    assert hardware.rss_files(tmp_path) == 0
    assert abs(hardware.rss(tmp_path) - psutil.Process().memory_info().rss) < 64 << 20
    found = hardware.describe(tmp_path)
    assert (found.simd, found.huge_pages, found.gpus, found.cpu_quota) == ((), "absent", (), None)


# -- this machine ----------------------------------------------------------------------------------------------------------------

on_linux = pytest.mark.skipif(platform.system() != "Linux", reason="reads Linux's /proc")


@on_linux
def test_this_machine() -> None:
    found = hardware.describe()
    assert 1 <= found.threads <= len(os.sched_getaffinity(0)) <= psutil.cpu_count()
    assert 1 <= found.cores <= psutil.cpu_count()
    assert 0 < found.memory_available <= found.memory_total <= psutil.virtual_memory().total
    assert found.cpu and found.system.startswith("Linux ")


@on_linux
def test_affinity_of_one_cpu_is_one_thread() -> None:
    code = (
        "import os; from effllm.offload import hardware\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(hardware.cpu_threads())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout == "1\n"


@on_linux
def test_resident_memory_follows_what_is_touched() -> None:
    """In a child: the peak stays after memory is given back, and does not start from the parent's."""
    code = (
        "import mmap; from effllm.offload import hardware as h; size = 64 << 20; before = h.rss()\n"
        "m = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "for i in range(0, size, 4096): m[i] = 1\n"
        "held = h.rss(); m.close(); print(before, held - before, h.rss(), h.peak_rss())"
    )
    ballast = bytearray(b"\1") * (200 << 20)
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    before, grown, after, peak = map(int, child.stdout.split())
    assert abs(grown - (64 << 20)) < 4 << 20
    assert after < before + (8 << 20)
    assert before + (60 << 20) <= peak < len(ballast)


def test_memory_of_cards_as_the_tool_tells_it() -> None:
    told = "NVIDIA H200, 143771, 143161\nNVIDIA GB10, [N/A], [N/A]\nTesla, Special, 16384, 9\n"
    assert parse(told) == (Gpu("NVIDIA H200", 143771 << 20, 143161 << 20), Gpu("NVIDIA GB10"),
                           Gpu("Tesla, Special", 16384 << 20, 9 << 20))
    assert parse("") == () and parse("No devices were found\n") == (Gpu("No devices were found"),)

# -- time ------------------------------------------------------------------------------------------------------------------------


def test_a_process_is_as_old_as_it_is() -> None:
    """Not up to a second older, as the whole second in which the machine started would have it."""
    code = "import time; from effllm.offload.hardware import process_age; print(time.monotonic() - process_age(), time.monotonic())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    began, asked = map(float, done.stdout.split())
    assert before - 0.1 <= began < asked <= time.monotonic()  # clock ticks, and a machine that is busy between two clocks


def test_who_had_the_cores(tmp_path: Path) -> None:
    """Of the CPUs that this process may use, in ticks of 10 ms."""
    rows = ("cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 50 20 400 30 1 2 7 60 5\ncpu1 10 0 5 80 0 0 0 3 0 0\n"
            "cpu10 9000 0 0 0 0 0 0 0 0 0\nintr 8 8\n")  # fmt: skip
    root = tree(tmp_path, {"proc/stat": rows})
    one, two = (hardware.cpu_time(root, frozenset(allowed)) for allowed in ({0}, {0, 1}))
    assert (one.all, one.idle, one.stolen) == pytest.approx((6.1, 4.3, 0.07))
    assert (two.all, two.idle, two.stolen) == pytest.approx((7.08, 5.1, 0.1))
    later = replace(two, all=two.all + 4, idle=two.idle + 1, own=two.own + 1.5, stolen=two.stolen + 0.5).since(two)
    assert later.others == pytest.approx(1.0)
    assert replace(later, own=9.0).others == 0, "ticks are counted late"


@pytest.mark.parametrize("known", (True, False))
def test_what_this_process_computes_is_its_own(known: bool, tmp_path: Path) -> None:
    root = hardware.ROOT if known else tmp_path
    before, until = hardware.cpu_time(root), time.process_time() + 0.1
    while time.process_time() < until:
        sum(range(1000))
    found = hardware.cpu_time(root).since(before)
    assert found.own >= 0.1 and found.all - found.idle >= 0.05 and found.all > 0


def test_the_name_of_a_program_may_look_like_a_field(tmp_path: Path) -> None:
    began = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 5) * os.sysconf("SC_CLK_TCK"))
    root = tree(tmp_path, {"proc/self/stat": f"7 (a) (b 9) S {' '.join(['1'] * 18)} {began} 0 0\n"})
    assert hardware.process_age(root) == pytest.approx(5, abs=0.1)
