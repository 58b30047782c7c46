"""What the recurrences of layers with a state share: blocks of work of some rows each, and their way from slot to slot.

A row of a state meets no other, so rows are shared among threads, as many at a time as stay in the first-level cache from token to token.
Argument blocks begin as `conv_loops.py` says; `state_shape.py` says what CONTROL holds.
"""

from __future__ import annotations

from numpy import int64

from ..lazy_numba import inlined
from ..state_shape import AFTER, FROM, KEPT, TO
from .conv_loops import CONTROL, MEMORY, SLOT, STATE, copy
from .intrinsics import fetch_add, i64_at


@inlined()
def next_rows(counter, heads, width, most):
    """A head, the first of its `width` rows that are to be gone through and how many, at most `most`; head -1 when there are none left."""
    block, cuts = fetch_add(counter, 1), (width + most - 1) // most
    if block >= heads * cuts:
        return int64(-1), int64(0), int64(0)
    first = block % cuts * most
    return block // cuts, first, min(most, width - first)


@inlined()
def begin_rows(a, row, rows, depth):
    """The address of `rows` rows of `depth` float32 in the slot where the pass leaves them, from row `row` of the whole state on. They are
    there as the pass begins: zeros before a text."""
    control, place = i64_at(a[CONTROL]), a[STATE] + 4 * row * depth
    source, state = control[FROM], a[MEMORY] + control[TO] * a[SLOT] + place
    copy(0 if source < 0 else a[MEMORY] + source * a[SLOT] + place, state, rows * depth)
    return state


@inlined()
def keep_rows(a, t, state, row, rows, depth):
    """Behind token t, a copy of them where one is asked for."""
    control = i64_at(a[CONTROL])
    if t + 1 == control[AFTER]:
        copy(state, a[MEMORY] + control[KEPT] * a[SLOT] + a[STATE] + 4 * row * depth, rows * depth)
