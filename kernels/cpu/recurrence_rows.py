"""Shared by the kernels of recurrent layers: distributing state rows over threads, and moving them from slot to slot.

State rows are independent, so they are distributed over threads, as many at a time as stay in the L1 cache from token to token. Argument
blocks begin as `conv_loops.py` says; `state_shape.py` describes CONTROL.
"""

from __future__ import annotations

from numpy import int64

from ..lazy_numba import inlined
from ..state_shape import AFTER, FROM, KEPT, TO
from .conv_loops import CONTROL, MEMORY, SLOT, STATE, copy
from .intrinsics import fetch_add, i64_at


@inlined()
def next_rows(counter, heads, width, max_rows):
    """The next rows to process: a head, the first of its `width` rows and their number, at most `max_rows`; head -1 if none are left."""
    block, cuts = fetch_add(counter, 1), (width + max_rows - 1) // max_rows
    if block >= heads * cuts:
        return int64(-1), int64(0), int64(0)
    first = block % cuts * max_rows
    return block // cuts, first, min(max_rows, width - first)


@inlined()
def begin_rows(a, row, rows, depth):
    """Address of `rows` rows of `depth` float32 in the slot where the pass leaves them, from row `row` of the whole state on, initialized
    to the pass's initial state: zeros before a text."""
    control, state_row = i64_at(a[CONTROL]), a[STATE] + 4 * row * depth
    source, state = control[FROM], a[MEMORY] + control[TO] * a[SLOT] + state_row
    copy(0 if source < 0 else a[MEMORY] + source * a[SLOT] + state_row, state, rows * depth)
    return state


@inlined()
def keep_rows(a, t, state, row, rows, depth):
    """After token t, a copy of the rows if one is requested."""
    control = i64_at(a[CONTROL])
    if t + 1 == control[AFTER]:
        copy(state, a[MEMORY] + control[KEPT] * a[SLOT] + a[STATE] + 4 * row * depth, rows * depth)
