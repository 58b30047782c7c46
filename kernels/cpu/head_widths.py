"""Padding of attention heads: values narrower than keys, and ALiBi, implemented by two extra channels of queries and keys.

Extra channels go in front of a head, where a table of positions can be applied to them as RoPE is to a head's first channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..compile import kernel
from ..registry import Call
from ..workspace import Dims, address
from .arithmetic import exp, softplus
from .intrinsics import f32_at, fetch_add, i64_at
from .row_ops import MIN_PARALLEL_SIZE

if TYPE_CHECKING:
    from ...quant.weight import Norm
    from .ops import CpuOps

# Slots of `mark_heads`: the first channel of every head of Y [M_TOKENS, M_HEADS * M_WIDE] = exp(RATES * softplus(MARK_WEIGHTS));
# MARK_WEIGHTS [M_TOKENS, M_HEADS].
M_Y, MARK_WEIGHTS, M_TOKENS, M_HEADS, M_WIDE, RATES = range(6)
# Slots: Y [TOKENS, HEADS * DEPTH] to OUT [TOKENS, HEADS * WIDE]. Heads get wider by FRONT [HEADS, WIDE - DEPTH] (0: zeros) before their
# channels, or narrower by dropping their first channels.
Y, OUT, TOKENS, HEADS, DEPTH, WIDE, FRONT = range(7)


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the buffers, none for a model without padded heads."""
    if not dims.v_head_dim:
        return {}
    queries, keys = chunk * dims.num_attention_heads * dims.head_dim, chunk * dims.num_key_value_heads * dims.head_dim
    halves = dict.fromkeys(("stream", "side stream"), queries // 2) if dims.differential_attention else {}
    return {"padded0": queries, "padded1": keys, "padded2": keys, "unpadded": chunk * dims.num_attention_heads * dims.v_head_dim, **halves}


@kernel()
def resize_heads(args, worker, counter):
    """Copy every head with or without its front padding. Blocks are tokens."""
    a = i64_at(args)
    heads, depth, wide = a[HEADS], a[DEPTH], a[WIDE]
    more, less = max(wide - depth, 0), max(depth - wide, 0)
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        for head in range(heads):
            y, out = f32_at(a[Y] + 4 * ((t * heads + head) * depth + less)), f32_at(a[OUT] + 4 * (t * heads + head) * wide)
            if a[FRONT] != 0:
                front = f32_at(a[FRONT] + 4 * head * more)
                for i in range(more):
                    out[i] = front[i]
            else:
                for i in range(more):
                    out[i] = 0.0
            for i in range(wide - more):
                out[more + i] = y[i]


@kernel()
def pair_head_rows(args, worker, counter):
    """Values of two heads side by side, for each of two half heads. Blocks are tokens."""
    a = i64_at(args)
    heads, depth, half = a[HEADS], a[DEPTH], a[HEADS] // 2
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        for head in range(heads):
            for side in range(2):
                y = f32_at(a[Y] + 4 * (t * heads + side * half + head % half) * depth)
                out = f32_at(a[OUT] + 4 * ((t * heads + head) * 2 + side) * depth)
                for i in range(depth):
                    out[i] = y[i]


@kernel()
def mark_heads(args, worker, counter):
    """The ALiBi channels of keys. Blocks are tokens."""
    a = i64_at(args)
    heads, rates = a[M_HEADS], f32_at(a[RATES])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[M_TOKENS]:
            return
        weights = f32_at(a[MARK_WEIGHTS] + 4 * t * heads)
        for head in range(heads):
            f32_at(a[M_Y] + 4 * (t * heads + head) * a[M_WIDE])[0] = exp(rates[head] * softplus(weights[head]))


def dynamic_mask_heads(ops: CpuOps, y: np.ndarray, logits: np.ndarray, heads: int, head_dim: int, rates: np.ndarray) -> np.ndarray:
    """See `BlockOps`."""
    ops.registry.select(Call("mark heads")).candidate.run(ops, y, logits, heads, head_dim, rates)
    return y


def mark(ops: CpuOps, y: np.ndarray, logits: np.ndarray, heads: int, head_dim: int, rates: np.ndarray) -> None:
    ops.args[: RATES + 1] = ops.address_of(y), ops.address_of(logits), len(y), heads, head_dim, address(rates)
    ops.run(mark_heads, ops.args_address, y.size >= MIN_PARALLEL_SIZE, ops.args)


def mark_reference(ops: CpuOps, y: np.ndarray, logits: np.ndarray, heads: int, head_dim: int, rates: np.ndarray) -> None:
    ops.flush()
    y.reshape(len(y), heads, head_dim)[..., 0] = np.exp(rates * np.logaddexp(0, logits.astype(np.float64)))


def pair_heads(ops: CpuOps, y: np.ndarray, heads: int, depth: int) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("padded2", len(y), 2 * heads * depth)
    ops.registry.select(Call("pair heads")).candidate.run(ops, y, out, heads, depth)
    return out


def pair(ops: CpuOps, y: np.ndarray, out: np.ndarray, heads: int, depth: int) -> None:
    ops.args[: DEPTH + 1] = ops.address_of(y), ops.address_of(out), len(y), heads, depth
    ops.run(pair_head_rows, ops.args_address, out.size >= MIN_PARALLEL_SIZE, ops.args)


def pair_reference(ops: CpuOps, y: np.ndarray, out: np.ndarray, heads: int, depth: int) -> None:
    ops.flush()
    sides = y.reshape(len(y), 2, heads // 2, depth)
    out[:] = np.tile(sides.swapaxes(1, 2), (1, 2, 1, 1)).reshape(out.shape)


def pad_heads(ops: CpuOps, y: np.ndarray, heads: int, padded_dim: int, prefix: np.ndarray | None, operand: int) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take(f"padded{operand}", len(y), heads * padded_dim)
    ops.registry.select(Call("resize heads")).candidate.run(ops, y, out, heads, prefix)
    return out


def unpad_heads(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("unpadded", len(y), heads * head_dim)
    ops.registry.select(Call("resize heads")).candidate.run(ops, y, out, heads, None)
    return out


def resize(ops: CpuOps, y: np.ndarray, out: np.ndarray, heads: int, prefix: np.ndarray | None) -> None:
    ops.args[: FRONT
             + 1] = ops.address_of(y), ops.address_of(out), len(y), heads, y.shape[1] // heads, out.shape[1] // heads, address(prefix)
    ops.run(resize_heads, ops.args_address, out.size >= MIN_PARALLEL_SIZE, ops.args)


def resize_reference(ops: CpuOps, y: np.ndarray, out: np.ndarray, heads: int, prefix: np.ndarray | None) -> None:
    ops.flush()
    old, new = y.reshape(len(y), heads, -1), out.reshape(len(out), heads, -1)
    more, less = max(new.shape[2] - old.shape[2], 0), max(old.shape[2] - new.shape[2], 0)
    new[..., :more] = 0.0 if prefix is None else prefix
    new[..., more:] = old[..., less:]


def norm_stream(ops: CpuOps, x: np.ndarray, norm: Norm) -> np.ndarray:
    """See `BlockOps`."""
    before, scale = ops.workspace.take("y0", *x.shape), ops.registry.select(Call("scale")).candidate.run
    scale(ops, x, before, 1.0)
    scale(ops, x, x, 0.0)
    ops._add_with(ops, before, norm, x, 1.0)
    return x
