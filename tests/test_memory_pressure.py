"""A process whose memory the system really reclaims: what it releases, reports and answers."""

import json
import re
from pathlib import Path

import pytest
from streamed_models import long_context, long_context_mixture
from test_streamed_runs import finish, start

# Before some of its passes the process reads pages of a mapped file that the system was just told to drop: each is a fault that waits for
# the disk, which is what a process sees whose memory was taken away. It ends with 77 where this file system drops nothing.
FAULTS = """
import mmap, resource
from effllm.runtime.planning import memory_pressure
memory_pressure.CHECK_INTERVAL_S = 0.0
SIZE = 4 << 20
path = Path({file!r})
path.write_bytes(os.urandom(SIZE))
def fault():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, SIZE, os.POSIX_FADV_DONTNEED)
        mapped = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        sum(mapped[at] for at in range(0, SIZE, mmap.PAGESIZE))
        mapped.close()
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
if fault() < 500:
    print("no faults here", file=sys.stderr)
    os._exit(77)
memory_pressure.CHECK_INTERVAL_S = 0.0
real, times = memory_pressure.MemoryMonitor.look, []
def look(self, cache):
    if cache.sealed > 4 and len(times) < 3:
        times.append(fault())
    return real(self, cache)
memory_pressure.MemoryMonitor.look = look
"""

# While the cache holds between 5 and 7 pages, or three times where it holds none yet, next to nothing is free.
SHORT = """
from effllm.offload import hardware
from effllm.runtime.planning import memory_pressure
memory_pressure.CHECK_INTERVAL_S = 0.0
real, available, times = memory_pressure.MemoryMonitor.look, hardware.memory_available, []
def look(self, cache):
    times.append(cache.sealed)
    hardware.memory_available = (lambda root: 9 << 20) if {when} else available
    try:
        return real(self, cache)
    finally:
        hardware.memory_available = available
memory_pressure.MemoryMonitor.look = look
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="faults are read from /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_context(tmp_path_factory.mktemp("models") / "long")


def answer(model: Path, *more: object) -> tuple[object, ...]:
    return ("run", model, "--raw", "word " * 1000, "-n", 40, "--temp", 0, "--ignore-eos", "-c", 2048, "--device", "cpu", "--json",
            "--kv-ram", "14M", "--spec", "off", *more)  # drafts save passes by what those took, and with them reads


def faulting(model: Path, tmp_path: Path, *more: object) -> tuple[str, str]:
    child = start(*answer(model, *more), before=FAULTS.format(file=str(tmp_path / "dropped")))
    out, err = child.communicate(timeout=300)
    if child.returncode == 77:
        pytest.skip("this file system drops no pages of a file")
    assert child.returncode == 0, err
    return out, err


def test_a_run_that_loses_memory_gives_the_cache_to_the_disk_and_answers_the_same(model: Path, tmp_path: Path) -> None:
    calm, quiet = finish(start(*answer(model, "--spill-dir", tmp_path / "a")))
    pressed, said = faulting(model, tmp_path, "--spill-dir", tmp_path / "b")
    assert "memory is short" not in quiet
    assert "memory is short: the system is reading this process from disk again" in said
    assert "of the KV cache were moved to disk" in said
    assert json.loads(pressed)["token_ids"] == json.loads(calm)["token_ids"]
    assert json.loads(pressed)["io"]["disk_bytes_read"] > json.loads(calm)["io"]["disk_bytes_read"], "what was given away is read"


def test_a_run_that_has_nothing_to_give_says_so_once(model: Path, tmp_path: Path) -> None:
    _, said = faulting(model, tmp_path, "--kv-ram", "1G")
    assert said.count("memory is short") == 1 and "(--ram SIZE plans with less)" in said


@pytest.mark.slow
def test_a_run_whose_memory_is_nearly_gone_gives_the_cache_to_the_disk_and_answers_the_same(model: Path, tmp_path: Path) -> None:
    calm, quiet = finish(start(*answer(model, "--spill-dir", tmp_path / "a")))
    short, said = finish(start(*answer(model, "--spill-dir", tmp_path / "b"), before=SHORT.format(when="5 <= cache.sealed <= 7")))
    assert "memory is short" not in quiet
    assert "memory is short: 9.00 MiB are free; " in said and "of the KV cache were moved to disk" in said
    assert json.loads(short)["token_ids"] == json.loads(calm)["token_ids"]


@pytest.mark.slow
def test_a_mixture_gives_up_experts_and_answers_the_same(tmp_path: Path) -> None:
    mixture = long_context_mixture(tmp_path / "mixture")
    command = ("run", mixture, "--raw", "word " * 20, "-n", 30, "--temp", 0, "--ignore-eos", "-c", 256, "--device", "cpu", "--json")
    refused = finish(start(*command, "--ram", "64M"), 4)[1]
    ram = ("--ram", f"{int(re.search(r'it takes --ram ([0-9]+)Mi', refused)[1]) + 24}Mi")
    calm, short = finish(start(*command, *ram)), finish(start(*command, *ram, before=SHORT.format(when="len(times) in (8, 9)")))
    calm, said, short = json.loads(calm[0]), short[1], json.loads(short[0])
    assert calm["placement"]["experts"]["slots"] >= 2 * short["placement"]["experts"]["slots"] > 0 and "of experts were released" in said
    assert short["token_ids"] == calm["token_ids"] and short["io"]["disk_bytes_read"] > calm["io"]["disk_bytes_read"]


@pytest.mark.slow
def test_a_budget_beyond_the_machine_is_refused_and_not_left_to_the_system(model: Path) -> None:
    has = ("from effllm.offload import hardware\n"
           "hardware.memory_available = lambda *_: {} << 20\nhardware.memory_total = lambda *_: {} << 20\n")
    out, err = finish(start(*answer(model, "--ram", "900M"), before=has.format(40, 60)), 4)
    assert json.loads(out)["code"] == 4
    assert re.search(r"MiB of memory are planned, this process can have 60\.00 MiB\nhint: leave --ram out", err)
    out, err = finish(start(*answer(model, "--ram", "900M"), before=has.format(40, 8000)))
    assert json.loads(out)["token_ids"] and err.count("are available now: the system may kill this process") == 1
    _, err = finish(start("plan", model, "-c", 2048, "--ram", "900M", "--no-probe", before=has.format(40, 60)))
    assert "are available now" in err, "a plan may be for another machine"
    assert "are available now" not in finish(start("plan", model, "-c", 2048, "--no-probe"))[1]
