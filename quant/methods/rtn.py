"""Round to nearest, without data: per group the scale of least squared error, per row the least-squares scale of what was chosen.

The search is compiled (`kernels/cpu/quantize_search.py`). A row's result depends on nothing but the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ... import EffllmError, UsageError
from ...kernels.cpu import quantize_search
from ...kernels.cpu.quantize_search_loops import FINE, LANES, MAX_LEVELS, TABLE_NBYTES
from ...kernels.workspace import address
from .. import codebooks
from ..codes import Codes
from ..spec import QuantSpec
from ..stats import Stats

if TYPE_CHECKING:
    from ...kernels.threads import ThreadPool

NEEDS: frozenset[str] = frozenset()
# Scales that are tried, in thousandths of the one that just holds a group: the fewer levels, the more it pays to cut off the largest.
BOOK_WINDOW = {4: (750, 1350), 3: (750, 1200), 2: (500, 1200)}
GRID_WINDOW = {8: (950, 1100), 6: (880, 1100), 5: (820, 1100), 4: (700, 1100), 3: (550, 1100), 2: (400, 1000)}
LINE = 64


def check(spec: QuantSpec) -> None:
    """Raises UsageError for a spec with outliers."""
    if spec.outliers:
        raise UsageError(f"rtn cannot make {spec}: it stores no outliers", "--method spqr")


def quantize(rows: np.ndarray, spec: QuantSpec, stats: Stats | None = None, pool: ThreadPool | None = None) -> Codes:
    """Rows float32 [n, K] -> Codes. Raises EffllmError where a weight is NaN or infinite, UsageError for a spec with outliers."""
    check(spec)
    rows = np.ascontiguousarray(rows, np.float32)
    n, depth = rows.shape
    groups = -(-depth // spec.group)
    codes, scales = np.empty((n, depth), np.uint8), np.empty((n, groups), np.uint8)
    zeros = np.empty((n, groups), np.uint8) if spec.scheme == "affine" else None
    row_scales = np.empty(n, np.float32)
    book = spec.scheme == "codebook"
    table, steps = (codebooks.levels(spec.bits), codebooks.steps()) if book else (None, None)
    low, high, bias = (int(table[0]), int(table[-1]), 0) if book else _grid(spec)
    tables, multipliers = (_tables(table), steps.astype(np.float32)) if book else (None, None)
    workers = 1 if pool is None else pool.workers
    scratch = _on_a_line(workers * quantize_search.SCRATCH_NBYTES)
    count, least = (len(table), np.abs(table.astype(np.int64)).min()) if book else (0, 0)
    narrowest, widest = (BOOK_WINDOW if book else GRID_WINDOW)[spec.bits]
    args = np.array([address(rows), n, depth, spec.group, address(codes), address(scales), address(zeros), address(row_scales), count,
                     address(tables), address(multipliers), least, low, high, bias, narrowest, widest, address(scratch),
                     quantize_search.SCRATCH_NBYTES], np.int64)
    if pool is None:
        quantize_search.run_alone(args)
    else:
        pool.run(quantize_search.search_rows, address(args))
    if not np.isfinite(row_scales).all():
        raise EffllmError("NaN or infinity among the weights", "the checkpoint is damaged: download it again")
    return Codes(codes, scales, zeros, row_scales, table, steps)


def _grid(spec: QuantSpec) -> tuple[int, int, int]:
    """Lowest and highest whole number of a grid, and what is added to it for its code."""
    if spec.scheme == "ternary":
        return -1, 1, 1
    half = 1 << (spec.bits - 1)
    return -half, half - 1, half


def _tables(table: np.ndarray) -> np.ndarray:
    """int8 levels [count] -> what `book_error` reads: borders and levels in fine units, each repeated for every lane."""
    fine = FINE * table.astype(np.int16)
    out = _on_a_line(TABLE_NBYTES).view(np.int16).reshape(-1, LANES)
    out[:] = 0
    out[: len(table) - 1] = ((fine[1:] + fine[:-1]) // 2)[:, None]
    # the lowest level, then the one above each border
    out[MAX_LEVELS - 1 : MAX_LEVELS - 1 + len(table)] = fine[:, None]
    return out


def _on_a_line(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] that begin on a cache line."""
    room = np.empty(nbytes + LINE, np.uint8)
    start = -address(room) % LINE
    return room[start : start + nbytes]
