"""The expert pager: the right bytes in every slot whatever the order of arrival, required reads before speculative ones, faults."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from expert_samples import (
    EXPERTS,
    LAYERS,
    MIN_SLOTS,
    PREADV,
    TOP,
    Gate,
    assert_slots_consistent,
    check,
    disable_async_reads,
    opened,
    parts_of,
    use,
    write,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effllm.offload import expert_pager
from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.offload.direct_io import Interrupted
from effllm.offload.expert_cache import POLICIES
from effllm.offload.expert_pager import TRACE_TOKENS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    with write(tmp_path) as opened:
        yield opened


STEPS = st.lists(st.tuples(
    st.integers(0, LAYERS - 1), st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS), st.booleans(), st.booleans(),
    st.sampled_from((False, False, False, True))),
    min_size=1, max_size=30)


@pytest.mark.parametrize("queued", (True, False), ids=("queue", "threads"))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, slots=st.integers(2 * TOP, LAYERS * EXPERTS), name=st.sampled_from(POLICIES))
def test_whatever_is_needed_in_whatever_order(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, queued: bool,
                                              steps, slots: int, name: str) -> None:
    """Tokens and chunks in turn, guesses that come true and that do not, visits broken off, memory that grows short; down to fewer slots
    than a plan allows."""
    if not queued:
        disable_async_reads(monkeypatch)
    with write(tmp_path_factory.mktemp("any")) as store:
        pager = opened(store, slots, name, farthest=2)
        for layer, experts, one, broken, short in steps:
            if short:
                pager.shed()
                assert_slots_consistent(pager)
            needed = sorted(experts)[:TOP] if one else sorted(experts)
            counts = None if one else np.array([1 + (expert * 7 + layer) % 5 for expert in range(EXPERTS)])
            if broken:
                pager.visit(layer, needed, counts)
            else:
                use(pager, layer, needed, counts)
                assert_slots_consistent(pager)
                for distance in range(1, pager.prefetch_distance(layer) + 1):
                    pager.look_ahead(layer + distance, distance, sorted(experts)[:TOP])
            assert_slots_consistent(pager)
        pager.close()


@pytest.mark.parametrize("name", POLICIES)
def test_half_of_the_slots_are_given_back_and_never_the_last_ones(store: TensorStore, name: str) -> None:
    every = LAYERS * EXPERTS
    pager = opened(store, every, name)
    pager._min_slots = 2 * TOP  # of fewer layers, so that there is something to halve
    for layer in range(LAYERS):
        for first in range(0, EXPERTS, TOP):
            use(pager, layer, range(first, first + TOP))
    assert pager.slots == len(pager.pool) == every
    freed, slots = [], [every]
    while not freed or freed[-1]:
        freed.append(pager.shed())
        slots.append(pager.slots)
        assert_slots_consistent(pager)
        given = (pager.memory.reshape(every, -1) == 0).all(axis=1).sum()
        assert given >= every - pager.slots, "what is given back is no longer there"
        use(pager, 1, range(TOP))
        use(pager, 2, range(EXPERTS), np.ones(EXPERTS, np.int64))
    assert slots == [18, 9, 4, 4] and freed == [9 * pager.slot_nbytes, 5 * pager.slot_nbytes, 0]
    pager.close()


def test_a_chunk_reads_each_expert_at_most_once_and_keeps_what_it_visits_most(store: TensorStore) -> None:
    pager = opened(store)
    for layer in range(LAYERS):
        counts = np.array([5, 1, 9, 2, 8, 3])
        use(pager, layer, range(EXPERTS), counts)
    assert pager.stats.chunk_reads == LAYERS * EXPERTS
    kept = [sorted(key % EXPERTS for key in pager.pool._slots if key // EXPERTS == layer) for layer in range(LAYERS)]
    assert kept == [[2, 4]] * LAYERS, "those to which most tokens go, as many of each layer as its share is"
    before = pager.stats.chunk_reads
    use(pager, 0, range(EXPERTS), np.ones(EXPERTS, int))
    assert pager.stats.chunk_reads - before == EXPERTS - len(kept[0])
    pager.close()


def test_a_prompt_does_not_drive_out_what_decoding_gathered(store: TensorStore) -> None:
    pager = opened(store, LAYERS * EXPERTS - 2)
    for layer in range(LAYERS):
        for pair in ((0, 1), (2, 3), (4, 5)):
            use(pager, layer, pair)
    held = set(pager.pool._slots)
    for layer in range(LAYERS):
        use(pager, layer, range(EXPERTS), np.ones(EXPERTS, int))
    assert len(held - set(pager.pool._slots)) <= 2 * TOP, "the slots of the passage alone"
    pager.close()


def test_one_read_brings_an_expert_that_lies_together(store: TensorStore) -> None:
    pager = opened(store)
    use(pager, 0, (1, 4))
    assert pager.traffic.reads == 2
    pager.close()


def test_a_large_expert_is_read_by_several_at_once(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_pager, "ONE_READ_NBYTES", 4096)
    monkeypatch.setattr(expert_pager, "READ_NBYTES", 8192)
    pager = opened(store)
    use(pager, 0, (1, 4))
    assert pager.traffic.reads > 2
    pager.close()


def test_the_trace_holds_the_newest_tokens(store: TensorStore) -> None:
    pager = opened(store)
    for token in range(TRACE_TOKENS + 5):
        for layer in range(LAYERS):
            pager.visit(layer, sorted(((token + layer) % EXPERTS, (token + layer + 1) % EXPERTS)))
    trace = pager.trace()
    assert trace.shape == (TRACE_TOKENS, LAYERS, TOP)
    assert trace[-1, 1].tolist() == sorted(((TRACE_TOKENS + 5) % EXPERTS, (TRACE_TOKENS + 6) % EXPERTS))
    assert trace[0, 0].tolist() == sorted((5 % EXPERTS, 6 % EXPERTS))
    pager.close()


@pytest.mark.parametrize("counts", (None, np.ones(EXPERTS, int)), ids=("token", "chunk"))
def test_a_read_that_fails_is_one_error_and_can_be_tried_again(store: TensorStore, monkeypatch: pytest.MonkeyPatch, counts) -> None:
    disable_async_reads(monkeypatch)
    pager = opened(store)
    needed = (1, 3) if counts is None else tuple(range(EXPERTS))

    def fails(fd: int, buffers: list, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(CheckpointError, match="cannot be read"):
        use(pager, 0, needed, counts)
    monkeypatch.setattr(os, "preadv", PREADV)
    for _ in range(3):
        try:
            use(pager, 0, needed, counts)
            break
        except CheckpointError:  # others of the same visit had failed before
            continue
    use(pager, 0, needed, counts)
    assert_slots_consistent(pager)
    pager.close()


def test_a_file_that_becomes_shorter(store: TensorStore) -> None:
    pager = opened(store)
    (file,) = store.files
    os.truncate(file, store.tensors["4.0"].offset + 10)
    with pytest.raises(CheckpointError, match="became shorter"):
        use(pager, 0, (4, 5))
    pager.close()


def test_a_file_system_that_refuses_direct_reads_half_way(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    disable_async_reads(monkeypatch)
    pager = opened(store)
    use(pager, 0, (0, 1))
    refused = []

    def read(fd: int, buffers: list, offset: int) -> int:
        if fd == next(iter(pager._reader._sources.values())).opened:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return PREADV(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    for pair in ((2, 3), (4, 5)):
        use(pager, 0, pair)
    assert 1 <= len(refused) <= 4 and len(pager.announcements()) == 1
    pager.close()


@pytest.mark.parametrize("counts", (None, np.ones(EXPERTS, int)), ids=("token", "chunk"))
def test_a_wait_ends_when_it_is_told_to(store: TensorStore, monkeypatch: pytest.MonkeyPatch, counts) -> None:
    """And the next visit finds everything in order, though reads go on into slots that nobody may use."""
    ended = threading.Event()
    gate, pager = Gate(monkeypatch), opened(store, cancelled=ended.is_set)
    needed = (1, 3) if counts is None else tuple(range(EXPERTS))
    gate.shut = True
    brought = pager.visit(0, needed, counts)
    ended.set()
    with pytest.raises(Interrupted):
        pager.wait(brought.coming[0])
    gate.shut = False
    ended.clear()
    other = pager.visit(1, (0, 1))
    gate.free.release(100)
    for expert in other.coming:
        pager.wait(expert)
        check(pager, EXPERTS + expert, other.slots[expert])
    for layer in (0, 1, 2, 0):
        use(pager, layer, needed, counts)
    assert_slots_consistent(pager)
    pager.close()


def test_memory_is_what_was_planned(store: TensorStore) -> None:
    pager = opened(store)
    assert pager.memory.nbytes == MIN_SLOTS * max(part.nbytes for part in parts_of(store)) and pager.stays and not pager.resident
    assert pager.nbytes >= pager.memory.nbytes
    pager.close()
