"""Expert pagers over small files: operations on them, and the invariants to hold afterwards."""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from effllm.offload import async_reader
from effllm.offload.checkpoint import TensorStore
from effllm.offload.expert_cache import policy
from effllm.offload.expert_pager import ExpertPager, VisitSlots
from effllm.offload.streaming_pager import Part, Range

PREADV = os.preadv
LAYERS, EXPERTS, TOP = 3, 6, 2
MIN_SLOTS = 2 * TOP * LAYERS


def write(folder: Path) -> TensorStore:
    """Three matrices an expert, of sizes that no block of a file divides."""
    rng = np.random.default_rng(1)
    save_file({f"{key}.{matrix}": rng.integers(0, 256, 3000 + 700 * (key % 3) + 100 * matrix, dtype=np.uint8)
               for key in range(LAYERS * EXPERTS) for matrix in range(3)}, folder / "model.safetensors")
    return TensorStore.open(folder)


def parts_of(store: TensorStore) -> list[Part]:
    return [Part(tuple(Range(info.file, info.offset, info.nbytes) for info in (store.tensors[f"{key}.{i}"] for i in range(3))))
            for key in range(LAYERS * EXPERTS)]


def opened(store: TensorStore, slots: int = MIN_SLOTS, name: str = "lru", **more: object) -> ExpertPager:
    pager = ExpertPager(store, {}, parts_of(store), EXPERTS, TOP, slots, policy(name, slots, LAYERS, EXPERTS), **more)
    list(pager.load())
    return pager


def bytes_of(store: TensorStore, key: int) -> list[bytes]:
    return [store.read(store.tensors[f"{key}.{i}"]).tobytes() for i in range(3)]


def check(pager: ExpertPager, key: int, slot: int) -> None:
    """Asserts that a slot holds the expert."""
    assert [view.tobytes() for view in pager.views(key, slot)] == bytes_of(pager._store, key), key


def use(pager: ExpertPager, layer: int, needed: Sequence[int], counts: np.ndarray | None = None) -> VisitSlots:
    """Visit experts as the ops do: first those in memory, then the others one by one."""
    visit = pager.visit(layer, needed, counts)
    assert sorted([*visit.ready, *visit.coming]) == sorted(needed) and set(visit.slots) == set(needed)
    for expert in visit.ready:
        check(pager, layer * EXPERTS + expert, visit.slots[expert])
    for expert in visit.coming:
        pager.wait(expert)
        check(pager, layer * EXPERTS + expert, visit.slots[expert])
    if counts is None:
        for expert in needed:
            check(pager, layer * EXPERTS + expert, visit.slots[expert])
        assert len(set(visit.slots.values())) == len(needed)
    return visit


def assert_slots_consistent(pager: ExpertPager) -> None:
    """Asserts that every slot is accounted for exactly once."""
    resident = list(pager.pool._slots.values())
    all_slots = [*resident, *pager.pool.free, *pager._transient_slots, *(slot for slot, _ in pager._cancelled_reads)]
    assert len(set(all_slots)) == len(all_slots) == pager.slots and max(all_slots) < pager.memory.nbytes // pager.slot_nbytes
    assert pager._resident_counts == [sum(key // EXPERTS == layer for key in pager.pool._slots) for layer in range(LAYERS)]
    assert pager._prefetched <= set(pager.pool._slots)


def disable_async_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a system without an asynchronous read queue."""

    def without_queue(*more: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(async_reader, "AioQueue", without_queue)


class Gate:
    """Thread reads that are released one by one, and the order in which they were requested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offsets: list[int] = []
        self.free = threading.Semaphore(0)
        self.shut = False
        disable_async_reads(monkeypatch)
        monkeypatch.setattr(os, "preadv", self.read)

    def read(self, fd: int, buffers: list, offset: int) -> int:
        if self.shut:
            self.offsets.append(offset)
            self.free.acquire()
        return PREADV(fd, buffers, offset)
