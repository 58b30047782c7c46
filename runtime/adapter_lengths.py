"""Adapters that give rows of a weight lengths of their own (DoRA), beside a model as it runs.

    W' = c (W + B A), row by row, c = m / |W + B A|        so y + t (y' - y) = (1 + t (c - 1)) W x + t (c B) A x        t: a text's share

So c, which depends on what the weight is stored as, is computed once, before a run, from the weight as it lies: B is multiplied by it, and
c - 1 is kept beside it for the matrix's own product. Half of such an adapter is half of what it changes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ..offload.checkpoint import CheckpointError, TensorStore
from ..offload.header import shown
from ..quant.weight import Weight, can_be_parted, some_rows
from .adapted import kept
from .events import Progress
from .tensors import ModelTensor, check_tensors, typed

if TYPE_CHECKING:
    from .prepare import Prepared

ROWS_AT_ONCE = 512


def measured(prepared: Prepared) -> Generator[Progress, None, Prepared]:
    """A plan whose adapters hold what follows from the lengths that some of them state and from the weights, which are read for it. Raises
    CheckpointError for a row that has no direction."""
    adapted, store = prepared.adapted, prepared.store
    if not adapted.lengths:
        return prepared
    tensors = check_tensors(prepared.config, store, prepared.container)
    weights, gains, done = dict(adapted.weights), {}, 0
    total = sum(prod(tensors[layer][role].shape) for layer, role in adapted.lengths)
    for (layer, role), lengths in adapted.lengths.items():
        tensor, (a, b) = tensors[layer][role], (each.to_f32() for each in adapted.weights[layer, role])
        ends = [0, *accumulate(adapted.ranks[layer, role])]
        gains[layer, role] = np.zeros((len(adapted.names), len(b)), np.float32)
        for begin, rows in _rows(tensor, store):
            end = begin + len(rows)
            for number, wanted in lengths.items():
                own = slice(ends[number], ends[number + 1])
                sizes = np.linalg.norm(rows + b[begin:end, own] @ a[own], axis=1)
                if not sizes.all():
                    raise CheckpointError(f"{adapted.names[number]} gives a length to a row of zeros in {shown(tensor.name)}",
                                          "is it the model that it was made for?")
                factors = wanted[begin:end] / sizes
                b[begin:end, own] *= factors[:, None]
                gains[layer, role][number, begin:end] = factors - 1
            done += rows.size
            yield Progress("measuring rows for DoRA", done, total, "weights", tensor.name)
        weights[layer, role] = kept(a), kept(b, ())
    return replace(prepared, adapted=replace(adapted, weights=weights, gains=gains))


def _rows(tensor: ModelTensor, store: TensorStore) -> Iterator[tuple[int, np.ndarray]]:
    """What a weight means, some rows [n, K] at a time, with the first one's place."""
    raw = store.read(tensor.info)
    weight = (Weight.raw(tensor.spec.scheme, tensor.shape, typed(raw, tensor.spec)) if tensor.spec.is_raw
              else Weight.low_bit(tensor.spec, tensor.shape, raw))
    height = tensor.shape[0]
    step = ROWS_AT_ONCE if can_be_parted(weight) else height
    for begin in range(0, height, step):
        end = min(height, begin + step)
        yield begin, weight.to_f32() if step == height else some_rows(weight, begin, end).to_f32()
