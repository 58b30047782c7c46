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
from .row_ops import MIN_PARALLEL_SIZE
from .stages import FEW_TOKENS

if TYPE_CHECKING:
    from ...quant.weight import Norm, Weight
    from .ops import CpuOps


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of latent attention's buffers, none without it; buffers shared with layers with a state have the larger of the two sizes."""
    shape, others = dims.mla, states.plan_workspace(dims, chunk)
    if shape is None:
        return {}
    planned = {"y1": chunk * max(shape.key, shape.query_rank or 0), "latents": chunk * shape.key,
               "queries": chunk * dims.num_attention_heads * shape.key,
               "values": chunk * dims.num_attention_heads * shape.value, "y4": chunk * dims.mla_gate_width,
               "y2": chunk * max(dims.num_attention_heads * dims.output_gate, dims.mla_gate_width)}
    if dims.gated_norms:  # norm outputs, the latent of queries with and without its norm, and gates
        planned |= {"normed": chunk * dims.hidden_size, "norm and input": 2 * chunk * shape.query_rank,
                    "y1": max(planned["y1"], chunk * dims.num_attention_heads * shape.value), "y2": 0}
    return {name: max(floats, others.get(name, 0)) for name, floats in planned.items() if floats}


def latent_keys(ops: CpuOps, y: np.ndarray, shape: LatentShape, norm: Norm) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("latents", len(y), shape.key)
    ops.registry.select(Call("latent keys")).candidate.run(ops, y, shape, norm, out)
    return out


def latent_queries(ops: CpuOps, y: np.ndarray, heads: int, shape: LatentShape, kv_b: Weight) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("queries", len(y), heads * shape.key)
    ops.registry.select(Call("latent queries", kv_b.spec.scheme)).candidate.run(ops, y, heads, shape, kv_b, out)
    return out


def latent_values(ops: CpuOps, x: np.ndarray, heads: int, shape: LatentShape, kv_b: Weight) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("values", len(x), heads * shape.value)
    ops.registry.select(Call("latent values", kv_b.spec.scheme)).candidate.run(ops, x, heads, shape, kv_b, out)
    return out


def keys(ops: CpuOps, y: np.ndarray, shape: LatentShape, norm: Norm, out: np.ndarray) -> None:
    args = ops.args
    args[: loops.K_EPS] = ops.address_of(y), ops.address_of(out), len(y), shape.rank, shape.rope, NORMS[norm.kind], address(norm.weight)
    ops.reals[loops.K_EPS] = norm.eps
    ops.run(loops.latent_keys, ops.args_address, y.size >= MIN_PARALLEL_SIZE, args)


def keys_reference(ops: CpuOps, y: np.ndarray, shape: LatentShape, norm: Norm, out: np.ndarray) -> None:
    ops.flush()
    out[:] = reference.keys(y, shape, (norm.kind, norm.weight, norm.bias, norm.eps))


def queries(ops: CpuOps, y: np.ndarray, heads: int, shape: LatentShape, kv_b: Weight, out: np.ndarray) -> None:
    _fill(ops, y, heads, shape, kv_b, out)
    ops.run(loops.latent_queries_one if len(y) == 1 and loops.FUSED else loops.latent_queries, ops.args_address, True, ops.args)


def queries_reference(ops: CpuOps, y: np.ndarray, heads: int, shape: LatentShape, kv_b: Weight, out: np.ndarray) -> None:
    ops.flush()
    out[:] = reference.queries(y, heads, shape, kv_b.to_f32())


def values(ops: CpuOps, x: np.ndarray, heads: int, shape: LatentShape, kv_b: Weight, out: np.ndarray) -> None:
    _fill(ops, x, heads, shape, kv_b, out)
    ops.run(loops.latent_values_few if len(x) <= FEW_TOKENS else loops.latent_values_many, ops.args_address, True, ops.args)


def values_reference(ops: CpuOps, x: np.ndarray, heads: int, shape: LatentShape, kv_b: Weight, out: np.ndarray) -> None:
    ops.flush()
    out[:] = reference.values(x, heads, shape, kv_b.to_f32())


def _fill(ops: CpuOps, x: np.ndarray, heads: int, shape: LatentShape, kv_b: Weight, out: np.ndarray) -> None:
    """Write the argument block of the products."""
    ops.args[: loops.SLOTS] = (ops.address_of(x), ops.address_of(out), len(x), heads, shape.nope, shape.rope, shape.value, shape.rank,
                               kv_b.address,
                               STORED_TYPES[kv_b.spec.scheme], ops.scratch, ops.scratch_stride)
