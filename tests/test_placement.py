"""What stays in memory and what is streamed: exact bytes, spread evenly, a ring buffer within its bound."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm import DoesNotFit
from effllm.offload.placement import RING_NBYTES, Units, choose_pinned, slots_for, split_evenly

MB = 1 << 20
SIZES = st.lists(st.integers(0, 32 * MB), min_size=1, max_size=80)


def test_what_fits_is_pinned_to_the_last_byte() -> None:
    placed = choose_pinned([MB] * 8, 8 * MB)
    assert placed.pinned == tuple(range(8)) and not placed.streamed and placed.ring_nbytes == 0
    assert choose_pinned([MB] * 8, 8 * MB - 1).streamed


def test_streamed_blocks_lie_evenly_between_pinned_ones() -> None:
    placed = choose_pinned([10 * MB] * 32, 20 * MB + 240 * MB)
    assert (placed.pinned_nbytes, placed.streamed_nbytes, placed.ring_nbytes) == (240 * MB, 80 * MB, 20 * MB)
    assert [after - before for before, after in pairwise(placed.streamed)] == [4] * 7


def test_most_streamed_leaves_pinned_blocks_apart() -> None:
    placed = choose_pinned([10 * MB] * 32, 30 * MB + 80 * MB)
    assert len(placed.pinned) == 8 and {b - a for a, b in pairwise(placed.pinned)} <= {3, 4}


def test_nothing_but_the_ring() -> None:
    placed = choose_pinned([10 * MB] * 32, 20 * MB)
    assert not placed.pinned and placed.ring_nbytes == 20 * MB and placed.streamed_nbytes == 320 * MB


def test_the_ring_grows_with_what_streams() -> None:
    """A model that misses by a megabyte pays for the least ring, one that misses by gigabytes has the largest."""
    near, far = choose_pinned([MB] * 100, 99 * MB), choose_pinned([MB] * 4096, 1024 * MB)
    assert (near.ring_nbytes, near.streamed_nbytes) == (16 * MB, 17 * MB)
    assert (far.ring_nbytes, far.streamed_nbytes) == (RING_NBYTES, 4096 * MB - 1024 * MB + RING_NBYTES)


def test_no_room_for_a_ring_names_what_is_missing() -> None:
    with pytest.raises(DoesNotFit) as caught:
        choose_pinned([10 * MB] * 4, 19 * MB)
    assert "two blocks of 10.00 MiB" in caught.value.message and caught.value.hint == "--ram with 1Mi more"


def test_a_block_too_large_for_the_ring_is_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="cut it"):
        choose_pinned([40 * MB] * 4, 100 * MB)


@given(SIZES, st.integers(64 * MB, 4096 * MB))
def test_every_block_once_within_the_budget(blocks: list[int], budget: int) -> None:
    placed = choose_pinned(blocks, budget)
    assert sorted((*placed.pinned, *placed.streamed)) == list(range(len(blocks)))
    assert placed.pinned_nbytes == sum(blocks[i] for i in placed.pinned)
    assert placed.streamed_nbytes == sum(blocks[i] for i in placed.streamed)
    assert placed.nbytes <= budget and placed.ring_nbytes <= RING_NBYTES
    if placed.streamed:
        assert placed.ring_nbytes >= 2 * max(blocks)
        # Nothing that would still fit beside a full ring is left out.
        assert placed.pinned_nbytes + min(blocks[i] for i in placed.streamed if blocks[i]) > budget - RING_NBYTES


@given(SIZES, st.integers(64 * MB, 2048 * MB), st.integers(0, 512 * MB))
def test_more_memory_never_streams_much_more(blocks: list[int], budget: int, more: int) -> None:
    """Blocks of unequal size are packed by a rule, not by trying all sets: a gain in budget may cost at most one block."""
    assert choose_pinned(blocks, budget + more).streamed_nbytes <= choose_pinned(blocks, budget).streamed_nbytes + max(blocks)


@given(st.integers(0, 10**9), st.integers(4096, 10**8), st.sampled_from([1, 512, 4096]))
def test_pieces_add_up(nbytes: int, most: int, multiple: int) -> None:
    cut = split_evenly(nbytes, most, multiple)
    assert sum(cut) == nbytes and all(0 < piece <= most for piece in cut)
    assert not any(piece % multiple for piece in cut[:-1])
    assert len(cut) == -(-nbytes // (most // multiple * multiple))


CURVES = (((0.0625, 0.2), (0.25, 0.1), (0.5, 0.05)), ((0.0625, 0.001), (0.25, 0.0005), (0.5, 0.0)))


def test_slots_are_the_same_share_of_all_layers_where_nothing_was_measured() -> None:
    layers = (Units(1000, 4096), Units(1000, 4096))
    assert slots_for(layers, 1000 * 4096) == (500, 500)
    assert slots_for(layers, 0) == (63, 63)
    assert slots_for(layers, 10**9) == (1000, 1000)
    assert slots_for((), 100) == ()


@given(st.integers(0, 3000))
def test_slots_go_where_they_save_most_reads(share: int) -> None:
    layers = tuple(Units(1000, 4096, curve) for curve in CURVES)
    slots = slots_for(layers, share * 4096)
    assert sum(slots) <= max(share, 126) and all(63 <= own <= 1000 for own in slots)
    assert slots[0] >= slots[1] or slots[0] == 1000
    assert share < 2000 or slots == (1000, 1000)
