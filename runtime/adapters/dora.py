"""DoRA adapters, which rescale the rows of a weight, applied at run time.

    W' = c (W + B A), row by row, c = m / |W + B A|        so y + t (y' - y) = (1 + t (c - 1)) W x + t (c B) A x        t: a text's share

c depends on the stored weight, so it is computed once at start-up: B is multiplied by it, and c - 1 is kept beside it for the matrix's
own product. Scaling such an adapter by half applies half of its change. Where a checkpoint stores a matrix in parts, each with its own
adapter, a row has the B, A and c of its part alone.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.threads import ThreadPool
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.safetensors_header import shown
from ...quant.lora_layout import LoraMatrix
from ...quant.weight import Weight
from ..events import Progress
from ..prepare import worker_count
from ..tensors import ModelTensor, check_tensors, typed

if TYPE_CHECKING:
    from ..prepare import Prepared

# Multiply-adds of a row's input that opening and squaring it takes as long as, and those of a thread in a second (a Zen 4, any format).
OPENING, RATE = 8, 20e9
MEASURING = "computing row norms for DoRA"


def resolve_lengths_s(prepared: Prepared) -> float:
    """Estimated seconds of `resolve_lengths` with the weights in memory."""
    adapted = prepared.adapters
    products = sum(own.out.shape[0] * own.into.shape[1] * (OPENING + own.into.shape[0])
                   for key, lengths in adapted.lengths.items() for own in adapted.weights[key] if own.adapter in lengths)
    return products / (RATE * worker_count(prepared.options))


def resolve_lengths(prepared: Prepared) -> Generator[Progress, None, Prepared]:
    """A plan whose adapters hold what follows from the lengths that some of them state and from the weights, which are read for it. Raises
    CheckpointError for a row that has no direction."""
    adapted, store = prepared.adapters, prepared.store
    if not adapted.lengths:
        return prepared
    from ...kernels.cpu.row_norms import squared_row_norms  # which most runs need nothing of

    tensors = check_tensors(prepared.config, store, prepared.container)
    weights, gains, done = dict(adapted.weights), {}, 0
    total = sum(prod(tensors[layer][role].shape) for layer, role in adapted.lengths)
    with closing(ThreadPool(worker_count(prepared.options))) as pool:
        for (layer, role), lengths in adapted.lengths.items():
            tensor = tensors[layer][role]
            yield Progress(MEASURING, done, total, "weights", tensor.name)
            own = {each.adapter: each for each in adapted.weights[layer, role]}
            pairs = {number: (own[number].into.to_f32(), own[number].out.to_f32()) for number in lengths}
            found = squared_row_norms(pool, _weight(tensor, store), pairs)
            gains[layer, role] = np.zeros((len(adapted.names), tensor.shape[0]), np.float32)
            for number, wanted in lengths.items():
                stated = ~np.isnan(wanted)
                if not found[number][stated].all():
                    raise CheckpointError(f"{adapted.names[number]} rescales a row of zeros in {shown(tensor.name)}",
                                          "is this its base model?")
                factors = np.ones(len(wanted), np.float32)
                factors[stated] = wanted[stated] / np.sqrt(found[number][stated])
                own[number] = replace(own[number], out=LoraMatrix.out(factors[:, None] * pairs[number][1], ()))
                gains[layer, role][number] = factors - 1
            done += prod(tensor.shape)
            weights[layer, role] = tuple(own.values())
    yield Progress(MEASURING, done, total, "weights")
    return replace(prepared, adapters=replace(adapted, weights=weights, gains=gains))


def _weight(tensor: ModelTensor, store: TensorStore) -> Weight:
    """As it is stored, read for a moment."""
    raw = store.read(tensor.info)
    return (Weight.raw(tensor.spec.scheme, tensor.shape, typed(raw, tensor.spec)) if tensor.spec.is_raw
            else Weight.low_bit(tensor.spec, tensor.shape, raw))
