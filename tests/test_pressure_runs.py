"""A process that the system really takes memory from, as it counts faults itself: what it gives back, what it says, what it answers."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from streamed_models import long_context
from test_streamed_runs import finish, start

# Before some of its passes the process reads pages of a mapped file that the system was just told to drop: each is a fault that waits for
# the disk, which is what a process sees whose memory was taken away. It ends with 77 where this file system drops nothing.
FAULTS = """
import mmap, resource
from effllm.runtime import pressure
pressure.EVERY_S = 0.0
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
pressure.EVERY_S = 0.0
real, times = pressure.Watch.look, []
def look(self, cache):
    if cache.sealed > 4 and len(times) < 3:
        times.append(fault())
    return real(self, cache)
pressure.Watch.look = look
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="faults are read from /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_context(tmp_path_factory.mktemp("models") / "long")


def answer(model: Path, *more: object) -> tuple[object, ...]:
    return ("run", model, "--raw", "word " * 1000, "-n", 40, "--temp", 0, "--ignore-eos", "-c", 2048, "--device", "cpu", "--json",
            "--kv-ram", "14M", *more)


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
    assert "memory is short: the system reads this process from the disk again" in said
    assert "of the KV cache went to the disk instead" in said
    assert json.loads(pressed)["token_ids"] == json.loads(calm)["token_ids"]
    assert json.loads(pressed)["io"]["disk_bytes_read"] > json.loads(calm)["io"]["disk_bytes_read"], "what was given away is read"


def test_a_run_that_has_nothing_to_give_says_so_once(model: Path, tmp_path: Path) -> None:
    _, said = faulting(model, tmp_path, "--kv-ram", "1G")
    assert said.count("memory is short") == 1 and "(--ram SIZE plans with less)" in said
