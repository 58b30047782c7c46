"""Weights in memory: the right bytes, alignment, the planned cost, whatever happens to the files meanwhile."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from effllm.offload.checkpoint import READ_NBYTES, CheckpointError, TensorInfo, TensorStore
from effllm.offload.memory import HUGE_PAGE, anonymous
from effllm.offload.resident_pager import ALIGNMENT, ResidentPager

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"


def by_layer(store: TensorStore) -> dict[int | str, list[TensorInfo]]:
    groups: dict[int | str, list[TensorInfo]] = {}
    for info in store.tensors.values():
        parts = info.name.split(".")
        groups.setdefault(int(parts[2]) if parts[1] == "layers" else "outer", []).append(info)
    return groups


@pytest.fixture(params=[False, True], ids=["ram", "mmap"])
def mmap(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_every_byte_arrives(mmap: bool) -> None:
    with TensorStore.open(FABLE) as store:
        groups = by_layer(store)
        pager = ResidentPager(store, groups, mmap=mmap)
        progress = list(pager.load())
        assert progress[0] == (0, store.nbytes)
        assert progress[-1] == (store.nbytes, store.nbytes)
        assert [done for done, _ in progress] == sorted({done for done, _ in progress})
        seen = 0
        for key, infos in groups.items():
            with pager.lease(key) as tensors:
                assert set(tensors) == {info.name for info in infos}
                for info in infos:
                    view = tensors[info.name]
                    assert (view.dtype, view.ndim) == (np.uint8, 1)
                    assert view.tobytes() == store.read(info).tobytes()
                    seen += view.nbytes
        assert seen == store.nbytes


def test_leases_survive_the_store(mmap: bool) -> None:
    with TensorStore.open(FABLE) as store:
        pager = ResidentPager(store, by_layer(store), mmap=mmap)
        list(pager.load())
        info = store.tensors["model.norm.weight"]
        expected = store.read(info).tobytes()
    with pager.lease("outer") as tensors:
        view = tensors[info.name]
    pager.close()
    assert view.tobytes() == expected
    with pytest.raises(RuntimeError, match="before load"), pager.lease("outer"):
        pytest.fail("a closed pager gave a lease")


def test_no_lease_before_everything_is_there(mmap: bool) -> None:
    with TensorStore.open(FABLE) as store:
        pager = ResidentPager(store, by_layer(store), mmap=mmap)
        loading = pager.load()
        next(loading)
        with pytest.raises(RuntimeError, match="before load"):
            pager.lease("outer")
        loading.close()


def test_borders_and_chunks(tmp_path: Path) -> None:
    """Tensors around the size of a read, odd sizes and an empty one: each on a 64-byte border, neighbours untouched."""
    rng = np.random.default_rng(0)
    sizes = [1, 63, 64, 65, 0, READ_NBYTES - 1, READ_NBYTES, READ_NBYTES + 1]
    arrays = {f"t{i}": rng.integers(0, 256, size, dtype=np.uint8) for i, size in enumerate(sizes)}
    save_file(arrays, tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as store:
        pager = ResidentPager(store, {"all": [store.tensors[name] for name in arrays]})
        list(pager.load())
        with pager.lease("all") as tensors:
            for name, array in arrays.items():
                assert tensors[name].tobytes() == array.tobytes()
                assert tensors[name].ctypes.data % ALIGNMENT == 0 or not array.size
        total = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        assert total <= pager.nbytes < total + os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 3 * HUGE_PAGE + 12345])
def test_anonymous_memory(nbytes: int) -> None:
    array = anonymous(nbytes)
    assert array.nbytes == nbytes
    assert not array.any()
    array[:] = 255
    assert array.all()
    if nbytes:
        assert array.ctypes.data % (HUGE_PAGE if nbytes >= HUGE_PAGE else 4096) == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not describe its mappings")
def test_large_memory_is_private_and_advised_huge() -> None:
    """Shared memory never becomes huge pages by this advice, and the kernel says which a mapping is."""
    array = anonymous(3 * HUGE_PAGE + 5000)
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())

    def mapping(address: int) -> str:
        bounds = ((entry, *(int(bound, 16) for bound in entry.split(" ", 1)[0].split("-"))) for entry in entries if entry)
        return next(entry for entry, begin, end in bounds if begin <= address < end)

    body, tail = mapping(array.ctypes.data), mapping(array.ctypes.data + array.nbytes - 1)
    assert body.split()[1] == tail.split()[1] == "rw-p"
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert " hg" in body.split("VmFlags:")[1]
        assert " nh" in tail.split("VmFlags:")[1], "the last part must not round up to a huge page"


def unaligned(folder: Path) -> np.ndarray:
    """A file whose header has odd length: legal, though no writer is known to make it."""
    values = np.arange(6, dtype=np.float32)
    header = json.dumps({"w": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}).encode()
    header += b" " * (1 - len(header) % 2)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    return values


def test_views_can_be_read_as_their_type(tmp_path: Path, mmap: bool) -> None:
    values = unaligned(tmp_path)
    with TensorStore.open(tmp_path) as store:
        assert store.tensors["w"].offset % 2
        pager = ResidentPager(store, {0: list(store.tensors.values())}, mmap=mmap)
        list(pager.load())
        with pager.lease(0) as tensors:
            typed = tensors["w"].view(np.float32)
            assert typed.flags.aligned
            assert typed.tolist() == values.tolist()


def test_a_mapped_file_cannot_be_changed(tmp_path: Path) -> None:
    """Arrays of a mapping count as ordinary ones for compiled kernels; a stray write must stay in this process."""
    path = tmp_path / "model.safetensors"
    save_file({"w": np.ones(1000, np.float32)}, path)
    before = path.read_bytes()
    with TensorStore.open(tmp_path) as store:
        pager = ResidentPager(store, {0: list(store.tensors.values())}, mmap=True)
        list(pager.load())
        with pager.lease(0) as tensors:
            assert tensors["w"].flags.writeable
            tensors["w"][:] = 0
        assert path.read_bytes() == before


def test_file_cut_before_loading(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(100_000, np.float32), "b": np.ones(100_000, np.float32)}, path)
    with TensorStore.open(tmp_path) as store:
        os.truncate(path, 500_000)
        with pytest.raises(CheckpointError) as caught:
            list(ResidentPager(store, {0: list(store.tensors.values())}, mmap=mmap).load())
        assert str(path) in caught.value.message
        assert len(caught.value.message.splitlines()) == 1


def test_file_rewritten_while_loading(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": np.ones(100_000, np.float32)}, path)
    with TensorStore.open(tmp_path) as store:
        pager = ResidentPager(store, {0: list(store.tensors.values())}, mmap=mmap)
        loading = pager.load()
        next(loading)
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"!!!!")
        os.utime(path, ns=(0, 0))
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            list(loading)
        with pytest.raises(RuntimeError):
            pager.lease(0)


def test_walking_away_stops_the_readers(tmp_path: Path) -> None:
    save_file({f"t{i}": np.zeros(READ_NBYTES, np.uint8) for i in range(12)}, tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as store:
        loading = ResidentPager(store, {0: list(store.tensors.values())}).load()
        next(loading)
        next(loading)
        assert any(thread.name.startswith("effllm-read") for thread in threading.enumerate())
        loading.close()
        assert not any(thread.name.startswith("effllm-read") for thread in threading.enumerate())


COST = """
import gc, sys
from pathlib import Path
from effllm.offload import hardware
from effllm.offload.checkpoint import TensorStore
from effllm.offload.resident_pager import ResidentPager
with TensorStore.open(Path(sys.argv[1])) as store:
    groups = {i: [info] for i, info in enumerate(store.tensors.values())}
    list(ResidentPager(store, {0: groups[0][:0]}).load())
    pager = ResidentPager(store, groups)
    before = hardware.rss()
    list(pager.load())
    loaded = hardware.rss()
    pager.release(0)
    gc.collect()
    print(pager.nbytes, loaded - before, loaded - hardware.rss())
"""


def test_memory_costs_what_was_planned(tmp_path: Path) -> None:
    """Resident bytes after loading, and after releasing a group, in a process of their own."""
    sizes = [9 * HUGE_PAGE + 5000, HUGE_PAGE - 1, 3 * HUGE_PAGE, 2 * HUGE_PAGE - 10]
    save_file({f"t{i}": np.ones(size, np.uint8) for i, size in enumerate(sizes)}, tmp_path / "model.safetensors")
    child = subprocess.run([sys.executable, "-c", COST, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60)
    planned, cost, released = map(int, child.stdout.split())
    slack = 1 << 20
    assert sum(sizes) <= planned <= sum(sizes) + 4 * 4096
    assert planned - slack <= cost <= planned + slack
    assert released >= sizes[0] - slack


def test_release_keeps_other_groups(mmap: bool) -> None:
    with TensorStore.open(FABLE) as store:
        pager = ResidentPager(store, by_layer(store), mmap=mmap)
        list(pager.load())
        pager.release(0)
        gc.collect()
        with pytest.raises(KeyError):
            pager.lease(0)
        with pager.lease(1) as tensors:
            for name, view in tensors.items():
                assert view.tobytes() == store.read(store.tensors[name]).tobytes()
