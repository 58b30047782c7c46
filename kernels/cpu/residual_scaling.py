"""Residuals with per-channel scale and shift on both sides of a sum, and routers with a small network that passes its input on to the next
layer's router (ZAYA1); gated norms, and rows concatenated to a norm's output (A.X K2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..compile import kernel
from ..registry import Call
from ..workspace import address
from .intrinsics import f32_at, fetch_add, i64_at
from .row_ops import MIN_PARALLEL_SIZE, norm_rows

if TYPE_CHECKING:
    from ...quant.weight import LowRank, Norm, ResidualScale, RouterMlp
    from .ops import CpuOps

# Slots of `rescale_rows`: X = SCALES * X + BRANCH_SCALES * BRANCH + OFFSETS, all [TOKENS, WIDTH] or [WIDTH]; BRANCH 0: none.
X, BRANCH, TOKENS, WIDTH, SCALES, BRANCH_SCALES, OFFSETS = range(7)
# Slots of `carry_rows`: Y [C_TOKENS, C_WIDTH] += SHARES * CARRIED (SHARES 0: nothing is added), then CARRIED = Y; rows of CARRIED are
# C_STRIDE bytes apart.
Y, CARRIED, C_TOKENS, C_WIDTH, C_STRIDE, SHARES = range(6)


@kernel({"contract"})
def rescale_rows(args, worker, counter):
    """Blocks are tokens."""
    a = i64_at(args)
    width, scales, offsets = a[WIDTH], f32_at(a[SCALES]), f32_at(a[OFFSETS])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        x = f32_at(a[X] + 4 * t * width)
        if a[BRANCH] == 0:
            for i in range(width):
                x[i] = scales[i] * x[i] + offsets[i]
        else:
            y, factors = f32_at(a[BRANCH] + 4 * t * width), f32_at(a[BRANCH_SCALES])
            for i in range(width):
                x[i] = scales[i] * x[i] + (factors[i] * y[i] + offsets[i])


@kernel({"contract"})
def carry_rows(args, worker, counter):
    """Blocks are tokens."""
    a = i64_at(args)
    width = a[C_WIDTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[C_TOKENS]:
            return
        y, carried = f32_at(a[Y] + 4 * t * width), f32_at(a[CARRIED] + t * a[C_STRIDE])
        if a[SHARES] != 0:
            shares = f32_at(a[SHARES])
            for i in range(width):
                y[i] += shares[i] * carried[i]
        for i in range(width):
            carried[i] = y[i]


def scaled_residual(ops: CpuOps, x: np.ndarray, branch: np.ndarray | None, scale: ResidualScale) -> np.ndarray:
    """See `BlockOps`."""
    ops.registry.select(Call("rescale")).candidate.run(ops, x, branch, scale)
    return x


def router_mlp(ops: CpuOps, x: np.ndarray, norm: Norm, path: RouterMlp, streams: np.ndarray) -> np.ndarray:
    """See `BlockOps`."""
    (y,) = ops.norm_linear(x, norm, [path.down])
    ops.registry.select(Call("carry")).candidate.run(ops, y, streams, x.shape[1], path.previous_scale)
    inner = ops.gated_hidden(y, path.norm, None, path.fc1, "gelu")
    (logits,) = ops.norm_linear(inner, None, [path.fc2])
    ops.gate(logits, None, "gelu")
    return logits


def gate_rows(ops: CpuOps, y: np.ndarray, gates: LowRank) -> np.ndarray:
    """See `BlockOps`."""
    (opened,) = ops.norm_linear(ops.gated_hidden(y, None, None, gates.down, "silu"), None, [gates.up])
    return ops.gate_heads(y, opened, 1, y.shape[1])


def norm_and_concat(ops: CpuOps, y: np.ndarray, norm: Norm) -> np.ndarray:
    """See `BlockOps`."""
    width = y.shape[1]
    out, put = ops.workspace.take("norm and input", len(y), 2 * width), ops.registry.select(Call("carry")).candidate.run
    put(ops, y, out, width, None)
    put(ops, norm_rows(ops, y, norm), out, 0, None)
    return out


def rescale(ops: CpuOps, x: np.ndarray, branch: np.ndarray | None, scale: ResidualScale) -> None:
    ops.args[: OFFSETS + 1] = (ops.address_of(x), 0 if branch is None else ops.address_of(branch), *x.shape, address(scale.scales),
                               address(scale.branch_scales), address(scale.offsets))
    ops.run(rescale_rows, ops.args_address, x.size >= MIN_PARALLEL_SIZE, ops.args)


def rescale_reference(ops: CpuOps, x: np.ndarray, branch: np.ndarray | None, scale: ResidualScale) -> None:
    ops.flush()
    x[:] = scale.scales * x.astype(np.float64) + scale.offsets + (0 if branch is None else scale.branch_scales * branch.astype(np.float64))


def carry(ops: CpuOps, y: np.ndarray, streams: np.ndarray, first: int, shares: np.ndarray | None) -> None:
    ops.args[: SHARES + 1] = ops.address_of(y), ops.address_of(streams) + 4 * first, *y.shape, 4 * streams.shape[1], address(shares)
    ops.run(carry_rows, ops.args_address, y.size >= MIN_PARALLEL_SIZE, ops.args)


def carry_reference(ops: CpuOps, y: np.ndarray, streams: np.ndarray, first: int, shares: np.ndarray | None) -> None:
    ops.flush()
    carried = streams[:, first : first + y.shape[1]]
    if shares is not None:
        y += shares * carried
    carried[:] = y
