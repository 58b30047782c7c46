"""Per-layer inputs (as in Gemma 3n): computed once per pass from a table's rows and the token embeddings, and added by each layer.

All are in one buffer, layer by layer, where jobs of a recorded pass find those of the next pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..workspace import Dims
from . import linear

if TYPE_CHECKING:
    from ...quant.weight import Linear, Norm, PerLayerInput, Weight
    from .ops import CpuOps


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the buffers, none for a model without per-layer inputs."""
    return dict.fromkeys(("layer inputs", "layer input rows"), chunk * dims.per_layer_input_width) if dims.per_layer_input_width else {}


def layer_inputs(ops: CpuOps, ids: np.ndarray, x: np.ndarray, table: Weight | None, projection: Linear, norm: Norm,
                 scale: float) -> np.ndarray:
    """(norm(projection(x) / sqrt(D)) + row * scale) / sqrt(2), float32 [L, T, P], of tokens `ids` with embeddings x [T, D]: rows are those
    of `table` [V, L * P], normed P numbers at a time. Without a table only the norm remains."""
    width = len(norm.weight)
    rows = ops.workspace.take("layer input rows", len(ids), projection.weight.shape[0])
    ops._run_stage(x, None, [projection], [rows], linear.PLAIN, "none")
    ops.flush()
    layers = rows.reshape(len(ids), -1, width).swapaxes(0, 1)
    out = ops.workspace.take("layer inputs", *layers.shape)
    np.multiply(layers, np.float32(x.shape[1] ** -0.5), out=out)
    power = np.einsum("ltp,ltp->lt", out, out)[..., None] / np.float32(width)
    out /= np.sqrt(power + np.float32(norm.eps))
    out *= norm.weight
    if table is None:
        return out
    if table.fetch_rows is None:
        _rows(ops, ids, table, scale, rows)
    else:
        for begin, part_ids, fetched in table.fetch_rows(ids):  # the next rows reuse this memory
            _rows(ops, part_ids, fetched, scale, rows[begin : begin + len(part_ids)])
    out += layers
    out *= np.float32(0.5**0.5)
    return out


def _rows(ops: CpuOps, ids: np.ndarray, table: Weight, scale: float, out: np.ndarray) -> None:
    ops._embed(ids, table, scale, out)
    ops.flush()


def add_per_layer_input(ops: CpuOps, x: np.ndarray, inputs: PerLayerInput, layer_input: np.ndarray, act: str,
                        observer: Callable[[np.ndarray], None] | None = None) -> np.ndarray:
    """See `BlockOps`."""
    if (outs := ops._run_cached(x, None, (inputs.gate,), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take("gate", len(x), inputs.gate.weight.shape[0])]
        ops._run_stage(x, None, [inputs.gate], outs, linear.PLAIN, "none")
    ops.gate(outs[0], layer_input, act)
    if observer is not None:
        observer(outs[0])
    return ops.linear_add(outs[0], inputs.projection, x, inputs.post_norm)
