"""Speculative reads of experts: after the required ones, few at a time, and cancelled when no longer useful."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from expert_samples import EXPERTS, LAYERS, TOP, Gate, assert_slots_consistent, check, opened, use, write

from effllm.offload import direct_io, expert_pager
from effllm.offload.checkpoint import TensorStore
from effllm.offload.direct_io import BLOCK
from effllm.offload.expert_pager import ExpertPager
from effllm.offload.expert_prediction import ExpertPredictor


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    with write(tmp_path) as opened:
        yield opened


def foreseeing(store: TensorStore) -> ExpertPager:
    """A pager that trusts six guesses a layer, with a slot for all experts but one."""
    pager = opened(store, LAYERS * EXPERTS - 1, farthest=2)
    pager.predictor = ExpertPredictor(EXPERTS, 2)
    use(pager, 0, (0, 1))
    return pager


def guess_all(gate: Gate, pager: ExpertPager, layer: int, distance: int) -> None:
    """Guess all experts of a layer; the disk begins with as many reads as there are threads, and stands still."""
    gate.shut = True
    pager.look_ahead(layer, distance, range(EXPERTS))
    while len(gate.offsets) < direct_io.THREADS:
        threading.Event().wait(0.001)


def test_what_is_waited_for_comes_before_what_is_guessed(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, pager = Gate(monkeypatch), foreseeing(store)
    guess_all(gate, pager, 2, 2)
    brought = pager.visit(1, (0, 1))
    gate.free.release(2)
    while len(gate.offsets) < direct_io.THREADS + 2:
        threading.Event().wait(0.001)
    asked = {store.tensors[f"{EXPERTS + expert}.0"].offset // BLOCK * BLOCK for expert in (0, 1)}
    assert set(gate.offsets[-2:]) == asked, "two guesses are queued longer"
    gate.shut = False
    gate.free.release(100)
    for expert in brought.coming:
        pager.wait(expert)
        check(pager, EXPERTS + expert, brought.slots[expert])
    use(pager, 2, (4, 5))
    assert pager.stats.prefetched == EXPERTS and pager.stats.prefetch_hits == 2
    assert_slots_consistent(pager)
    pager.close()


def test_few_guesses_are_on_their_way_at_a_time(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_pager, "MAX_PREFETCHES", 4)
    gate, pager = Gate(monkeypatch), foreseeing(store)
    guess_all(gate, pager, 2, 2)
    pager.look_ahead(1, 1, [4, 5])
    assert pager.stats.prefetched == 4
    gate.shut = False
    gate.free.release(100)
    for ticket in list(pager._tickets.values()):
        pager._reader.wait(ticket)
    pager.look_ahead(1, 1, [4, 5])
    assert pager.stats.prefetched == 6
    pager.close()


def test_guesses_that_have_come_cost_nothing_more(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are that nobody has asked for: a visit looks at those on their way alone."""
    pager, dropped = opened(store, LAYERS * EXPERTS), []
    drop = pager._reader.drop
    monkeypatch.setattr(pager._reader, "drop", lambda ticket: dropped.append(ticket) or drop(ticket))
    for likely in ((0, 1), (2, 3), (4, 5)):
        pager.look_ahead(1, 1, likely)
        for ticket in list(pager._tickets.values()):
            pager._reader.wait(ticket)
        use(pager, 0, (0, 1))
        assert not pager._tickets and not pager._prefetches and not dropped
    assert len(pager._prefetched) == 6
    brought = use(pager, 1, (2, 5))
    assert sorted(brought.ready) == [2, 5] and pager.stats.prefetch_hits == 2
    assert_slots_consistent(pager)
    pager.close()


@pytest.mark.parametrize(("next_visit", "needed", "left"), ((2, (0, 1), 4), (0, (2, 3), 4), (1, (0, 1), 6)),
                         ids=("their layer", "a new pass", "a layer before theirs"))
def test_guesses_that_have_not_begun_give_way(store: TensorStore, monkeypatch: pytest.MonkeyPatch, next_visit: int, needed: tuple[int, int],
                                              left: int) -> None:
    """Once their layer has come, or the pass they were for is over."""
    gate, pager = Gate(monkeypatch), foreseeing(store)
    guess_all(gate, pager, 2, 2)
    pager.visit(next_visit, needed)
    assert pager.stats.prefetched == left and len(pager._prefetched) == left - (2 if next_visit == 2 else 0)
    gate.shut = False
    gate.free.release(100)
    use(pager, next_visit, needed)
    assert_slots_consistent(pager)
    pager.close()


def test_guesses_are_counted_and_judged(store: TensorStore) -> None:
    pager = opened(store)
    pager.look_ahead(1, 1, [0, 1])
    for key in list(pager._tickets):
        pager._reader.wait(pager._tickets[key])
    brought = use(pager, 1, (0, 2))
    assert 0 in brought.ready and pager.stats.prefetch_hits == 1 and pager.stats.hits == 0, "a guess is no hit"
    assert pager.stats.ready == 1, "but it was there in time; what was missing was not"
    for layer in (2, 0, 1):  # everything else goes through, until the other guess is driven out
        for pair in ((2, 3), (4, 5), (0, 2), (3, 4)):
            use(pager, layer, pair)
    assert pager.stats.prefetch_misses == 1 and pager.stats.to_json()["guesses_wasted"] == 1
    pager.close()


def test_nothing_is_asked_of_later_layers_where_it_would_not_be_used(store: TensorStore) -> None:
    """Past the last layer, as far as guesses were wrong, and with everything in memory."""
    pager = opened(store, farthest=2)
    assert [pager.prefetch_distance(layer) for layer in range(LAYERS)] == [2, 1, 0]
    for _ in range(20):
        pager.predictor.guess(2, 2, [0])
        pager.predictor.judge(2, [5])
    assert [pager.prefetch_distance(layer) for layer in range(LAYERS)] == [1, 1, 0]
    pager.predictor = ExpertPredictor(TOP, 2)
    for _ in range(20):
        pager.predictor.guess(2, 1, [0])
        pager.predictor.judge(2, [5])
    assert [pager.prefetch_distance(layer) for layer in range(LAYERS)] == [2, 0, 0], "the farther one may still be worth it"
    everything = opened(store, LAYERS * EXPERTS)
    for layer in range(LAYERS):
        use(everything, layer, range(EXPERTS), np.ones(EXPERTS, int))
    for layer in range(LAYERS):
        for pair in ((0, 1), (2, 3), (4, 5)):
            use(everything, layer, pair)
    assert everything.prefetch_distance(0) == 0, "nothing is left to be read"
    pager.close()
    everything.close()
