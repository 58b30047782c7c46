"""SpQR (arXiv 2306.03078): the few most damaging weights are stored as outliers beside a low-bit base, which then fits the rest better.

A weight's cost is how much its group's rounding errors, each times its input's power, shrink without it: mostly those of its neighbours,
whose scale it stretches. The base is made by GPTQ where a Hessian is known, else by `rtn`; an outlier is its base value plus a bfloat16
correction. The number of outliers is exact per tensor, and ranking them needs all of it: `rows` must be the whole tensor.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..codes import Codes, Sparse, bf16, dequantize
from ..spec import QuantSpec
from ..stats import Stats
from . import checked, gptq, rtn

NEEDS = frozenset({"hessian"})
OUTLIERS = 0.005  # the share where nobody says one
PRODUCTS = gptq.PRODUCTS
PEELED = 3  # weights of a group that are taken away one after the other to see what each cost
CHUNK_NBYTES = 16 << 20  # float32 rows that go through the search at once


def check(spec: QuantSpec) -> None:
    """Every spec is served; one without outliers as by its base."""


def quantize(rows: np.ndarray, spec: QuantSpec, stats: Stats | None = None, pool: object = None) -> Codes:
    """float32 [N, K], a whole tensor -> Codes with round(N * K * spec.outliers) corrections. Without a Hessian the base is `rtn`'s."""
    rows = checked(rows)
    base = replace(spec, outliers=0.0)
    calibrated = stats is not None and stats.hessian is not None
    if not spec.outliers:
        return gptq.quantize(rows, base, stats, pool) if calibrated else rtn.quantize(rows, base, None, pool)
    kept = most_costly(rows, base, stats, round(rows.size * spec.outliers), pool)
    start = rtn.quantize(np.where(kept, np.float32(0), rows), base, None, pool)
    step = max(1, CHUNK_NBYTES // 4 // rows.shape[1])
    parts = [slice(begin, begin + step) for begin in range(0, len(rows), step)]
    if calibrated:
        return joined([gptq.searched(rows[part], base, rows_of(start, part), stats, kept[part]) for part in parts])
    return joined([corrected(rows[part], base, rows_of(start, part), kept[part]) for part in parts])


def most_costly(rows: np.ndarray, base: QuantSpec, stats: Stats | None, count: int, pool: object = None) -> np.ndarray:
    """bool [N, K], true for the `count` most costly weights."""
    power = np.ones(rows.shape[1], np.float32)
    if stats is not None and stats.hessian is not None:
        power = stats.hessian.diagonal()
    kept = np.zeros(rows.size, bool)
    if count:
        cost = costs(rows, base, power, pool).reshape(-1)
        kept[np.argpartition(cost, cost.size - count)[cost.size - count :]] = True
    return kept.reshape(rows.shape)


def costs(rows: np.ndarray, base: QuantSpec, power: np.ndarray, pool: object = None) -> np.ndarray:
    """What each weight costs, float32 [N, K]. The farthest of each group are peeled off one by one; the rest cost their own error."""
    n, depth = rows.shape
    groups = -(-depth // base.group)
    left, gone = rows.copy(), np.zeros(rows.shape, bool)
    saved, places = [np.zeros((n, groups), np.float32)], []
    own = errors_of(left, gone, base, power, pool)
    before = grouped(own, base.group).sum(-1)
    line, start = np.arange(n)[:, None], np.arange(groups) * base.group
    for _ in range(min(PEELED, base.group)):
        centre = grouped(left, base.group).mean(-1, keepdims=True) if base.scheme == "affine" else np.float32(0)
        far = np.abs(grouped(left, base.group) - centre)
        place = np.minimum(start + np.where(grouped(gone, base.group), -1, far).argmax(-1), depth - 1)
        places.append(place)
        left[line, place], gone[line, place] = centre[..., 0] if base.scheme == "affine" else 0, True
        saved.append(before - grouped(errors_of(left, gone, base, power, pool), base.group).sum(-1))
    for step, place in enumerate(places):  # the slopes of the concave line over `saved`: a pair may cost more than either of its weights
        slopes = [np.max([(saved[j] - saved[i]) / (j - i) for j in range(step + 1, len(saved))], axis=0) for i in range(step + 1)]
        own[line, place] = np.maximum(own[line, place], np.min(slopes, axis=0))
    return own


def errors_of(left: np.ndarray, gone: np.ndarray, base: QuantSpec, power: np.ndarray, pool: object) -> np.ndarray:
    """Squared rounding errors times power, float32 [N, K], of what is not gone."""
    return np.where(gone, 0, np.square(left - dequantize(rtn.quantize(left, base, None, pool), base)) * power)


def grouped(values: np.ndarray, group: int) -> np.ndarray:
    """[N, K] -> [N, G, group], zeros after the end."""
    n, depth = values.shape
    return np.pad(values, ((0, 0), (0, -depth % group))).reshape(n, -1, group)


def corrected(rows: np.ndarray, base: QuantSpec, start: Codes, kept: np.ndarray) -> Codes:
    """`start` and what it leaves of the kept weights."""
    row, col = np.nonzero(kept)
    rest = (rows - dequantize(start, base))[row, col]
    return replace(start, sparse=Sparse(row.astype(np.uint32), col.astype(np.uint32), bf16(rest)))


def rows_of(codes: Codes, part: slice) -> Codes:
    """Some rows of a weight without corrections."""
    return replace(codes, codes=codes.codes[part], scales=codes.scales[part], rows=codes.rows[part],
                   zeros=None if codes.zeros is None else codes.zeros[part])


def joined(parts: list[Codes]) -> Codes:
    """Rows put together again, with their corrections."""
    def all_of(name: str) -> np.ndarray | None:
        return None if getattr(parts[0], name) is None else np.concatenate([getattr(part, name) for part in parts])

    starts = np.cumsum([0, *(len(part.codes) for part in parts)])
    sparse = Sparse(np.concatenate([part.sparse.row + np.uint32(start) for part, start in zip(parts, starts)]),
                    *(np.concatenate([getattr(part.sparse, name) for part in parts]) for name in ("col", "value")))
    return replace(parts[0], **{name: all_of(name) for name in ("codes", "scales", "zeros", "rows")}, sparse=sparse)
