"""Multi-head latent attention on the CPU: computes cached keys, absorbed queries and values with the kernels in `latent_loops.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import reference_latent as reference
from ..latent_shape import LatentShape
from ..layout import NORMS, STORED_TYPES
from ..registry import Call
from ..workspace import Dims, address
from . import latent_loops as loops
from . import states
from .row_ops import SHARE_FROM
from .stages import FEW

if TYPE_CHECKING:
    from ...quant.weight import Norm, Weight
    from .ops import CpuOps


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of latent attention's buffers, none without it; buffers shared with layers with a state have the larger of the two sizes."""
    own, beside = dims.latent, states.plan_workspace(dims, chunk)
    if own is None:
        return {}
    planned = {"y1": chunk * max(own.key, own.query_rank or 0), "latents": chunk * own.key, "queries": chunk * dims.heads * own.key,
               "values": chunk * dims.heads * own.value, "y4": chunk * dims.gate_width,
               "y2": chunk * max(dims.heads * dims.separate_gates, dims.gate_width)}
    if dims.gated_norms:  # what norms give, both forms of the latent of queries, and gates where that was
        planned |= {"normed": chunk * dims.hidden, "doubled": 2 * chunk * own.query_rank,
                    "y1": max(planned["y1"], chunk * dims.heads * own.value), "y2": 0}
    return {name: max(floats, beside.get(name, 0)) for name, floats in planned.items() if floats}


def latent_keys(ops: CpuOps, y: np.ndarray, shape: LatentShape, norm: Norm) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("latents", len(y), shape.key)
    ops.registry.select(Call("latent keys")).candidate.run(ops, y, shape, norm, out)
    return out


def latent_queries(ops: CpuOps, y: np.ndarray, heads: int, shape: LatentShape, expand: Weight) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("queries", len(y), heads * shape.key)
    ops.registry.select(Call("latent queries", expand.spec.scheme)).candidate.run(ops, y, heads, shape, expand, out)
    return out


def latent_values(ops: CpuOps, x: np.ndarray, heads: int, shape: LatentShape, expand: Weight) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("values", len(x), heads * shape.value)
    ops.registry.select(Call("latent values", expand.spec.scheme)).candidate.run(ops, x, heads, shape, expand, out)
    return out


def keys(ops: CpuOps, y: np.ndarray, shape: LatentShape, norm: Norm, out: np.ndarray) -> None:
    args = ops.args
    args[: loops.K_EPS] = ops.at(y), ops.at(out), len(y), shape.rank, shape.rope, NORMS[norm.kind], address(norm.weight)
    ops.reals[loops.K_EPS] = norm.eps
    ops.run(loops.latent_keys, ops.where, y.size >= SHARE_FROM, args)


def keys_reference(ops: CpuOps, y: np.ndarray, shape: LatentShape, norm: Norm, out: np.ndarray) -> None:
    ops.flush()
    out[:] = reference.keys(y, shape, (norm.kind, norm.weight, norm.bias, norm.eps))


def queries(ops: CpuOps, y: np.ndarray, heads: int, shape: LatentShape, expand: Weight, out: np.ndarray) -> None:
    _fill(ops, y, heads, shape, expand, out)
    ops.run(loops.latent_queries_one if len(y) == 1 and loops.FUSED else loops.latent_queries, ops.where, True, ops.args)


def queries_reference(ops: CpuOps, y: np.ndarray, heads: int, shape: LatentShape, expand: Weight, out: np.ndarray) -> None:
    ops.flush()
    out[:] = reference.queries(y, heads, shape, expand.to_f32())


def values(ops: CpuOps, x: np.ndarray, heads: int, shape: LatentShape, expand: Weight, out: np.ndarray) -> None:
    _fill(ops, x, heads, shape, expand, out)
    ops.run(loops.latent_values_few if len(x) <= FEW else loops.latent_values_many, ops.where, True, ops.args)


def values_reference(ops: CpuOps, x: np.ndarray, heads: int, shape: LatentShape, expand: Weight, out: np.ndarray) -> None:
    ops.flush()
    out[:] = reference.values(x, heads, shape, expand.to_f32())


def _fill(ops: CpuOps, x: np.ndarray, heads: int, shape: LatentShape, expand: Weight, out: np.ndarray) -> None:
    """Write the argument block of the products."""
    ops.args[: loops.SLOTS] = (ops.at(x), ops.at(out), len(x), heads, shape.nope, shape.rope, shape.value, shape.rank, expand.address,
                               STORED_TYPES[expand.spec.scheme], ops.scratch, ops.scratch_stride)
