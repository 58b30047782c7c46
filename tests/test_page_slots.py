"""Slots for KV pages on disk: which is evicted while reads are under way."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from effllm.offload.direct_io import BLOCK, Read, Reader
from effllm.offload.page_slots import PageSlots

PREADV = os.preadv


def test_a_page_read_ahead_that_comes_while_another_is_waited_for_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pages are asked for as there are slots, while two that nobody wants are on their way: the second comes during the wait for
    the first, which is what a slow disk does."""
    path = tmp_path / "pages"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 12 * BLOCK, np.uint8).tobytes())
    waited: list[bool] = []
    begun: set[int] = set()

    def asked() -> bool:
        waited.append(True)
        return False

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        begun.add(offset // BLOCK)
        while offset == 11 * BLOCK and not waited:
            time.sleep(0.001)
        while offset == 10 * BLOCK and (not waited or slots._pages[11].ticket.left):
            time.sleep(0.001)
        return PREADV(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    with path.open("rb") as file:
        reader = Reader({path: file.fileno()}, 4)
        slots = PageSlots(BLOCK, 4, reader, lambda page, memory: [Read(path, page * BLOCK, memoryview(memory)[:BLOCK], BLOCK)],
                          lambda page: page * BLOCK, asked)
        slots.prefetch([10, 11], [])
        while begun != {10, 11}:
            time.sleep(0.001)
        come = [page for some in slots.fetch([0, 1, 2, 3]) for page, _ in some]
        reader.close()
    assert sorted(come) == [0, 1, 2, 3] and not slots._evicted_in_flight and not slots._free_slots
