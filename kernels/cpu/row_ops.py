"""Row-wise ops on activations between the matrices: rotary embedding, MLP activations, adding a branch to the residual stream.

Each kernel iterates over tokens; each has its definition in `reference.py`, which is also the last candidate. A branch with its own norm,
or a multiplier, is added here; otherwise the product that computes it adds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy import float32

from .. import reference
from ..compile import kernel
from ..layout import NORMS, activation_number
from ..registry import Call
from ..workspace import address
from .arithmetic import ONE, ZERO, activate, exp, gate_values, normalise_here, softplus
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .rotary_angles import Angles, cached_angles

if TYPE_CHECKING:
    from ...quant.weight import Norm, XieluParams
    from ...runtime.rope import RopeTable
    from .ops import CpuOps

MIN_PARALLEL_SIZE = 16_384  # number of values for which it is worth waking the other threads
CURVE_LOW, CURVE_HALF, CURVE_NEAR = float32(reference.CURVE_EDGE), float32(reference.CURVE_SLOPE), float32(-0.35)
THIRDS = tuple(float32(1 / each) for each in (2, 6, 24, 120, 720))  # Taylor coefficients of exp(x) - 1 - x near zero

# Slots of `rope_heads`: Y [T, heads * head_dim], in place; cos and sin [T, rotary / 2]. With NORM, a norm of every WIDTH values first, with
# EACH bytes between the weights of two heads (0: the same weights) and a BIAS or 0. SCRATCH, STRIDE bytes per worker: a head, if adjacent
# pairs are reordered to half-split order; otherwise 0.
R_Y, R_TOKENS, R_HEADS, R_DIM, R_ROTARY, R_COS, R_SIN, R_NORM, R_WEIGHT, R_BIAS, R_WIDTH, R_SCRATCH, R_STRIDE, R_EACH, R_EPS = range(15)
# Slots of `activate_rows`: GATE = act(GATE) * UP, or act(GATE) if UP is 0; both [TOKENS, WIDTH].
G_GATE, G_UP, G_TOKENS, G_WIDTH, G_ACT = range(5)
# Slots of `part_rows`: the first half of each head of Y [TOKENS, 2 * heads * DEPTH] is copied to OUT [TOKENS, heads * DEPTH]. Slots of
# `gate_heads`: OUT times the sigmoid (with SOFT the softplus) of gates in Y. STEP: width of a head of Y in units of DEPTH: 2 for the second
# halves, 1 for all channels, 0 for one gate per head.
P_Y, P_OUT, P_TOKENS, P_HEADS, P_DEPTH, P_STEP, P_SOFT = range(7)
# Slots of `grow_rows`: every head of Y [TOKENS, HEADS * DEPTH], in place, times its value in SCALES times the token's in LOGS, plus its
# value in OFFSETS.
W_Y, W_TOKENS, W_HEADS, W_DEPTH, W_LOGS, W_SCALES, W_OFFSETS = range(7)
# Slots of `scale_rows`: OUT = FACTOR * Y, both [TOKENS, WIDTH]; they may be the same.
S_Y, S_OUT, S_TOKENS, S_WIDTH, S_FACTOR = range(5)
# Slots of `clip_rows`: Y [TOKENS, WIDTH], in place, clamped to -LIMIT and LIMIT (float64).
L_Y, L_TOKENS, L_WIDTH, L_LIMIT = range(4)
# Slots of `curve_rows`: Y [TOKENS, WIDTH], in place; ABOVE and BELOW are float64.
C_Y, C_TOKENS, C_WIDTH, C_ABOVE, C_BELOW = range(5)
# Slots of `add_rows`: STREAM += FACTOR * norm(BRANCH), both [TOKENS, WIDTH]; the branch is normed in place.
A_BRANCH, A_STREAM, A_TOKENS, A_WIDTH, A_NORM, A_WEIGHT, A_BIAS, A_EPS, A_FACTOR = range(9)


@kernel({"contract"})
def rope_heads(args, worker, counter):
    """Norms, then rotate-half on the first ROTARY channels of every head, once they are in that order. Blocks are tokens."""
    a = i64_at(args)
    heads, depth, half, width = a[R_HEADS], a[R_DIM], a[R_ROTARY] // 2, a[R_WIDTH]
    pairs = f32_at(a[R_SCRATCH] + worker * a[R_STRIDE])
    eps = float32(f64_at(args)[R_EPS])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[R_TOKENS]:
            return
        row = a[R_Y] + 4 * t * heads * depth
        if a[R_NORM] != 0:
            for at in range(0, heads * depth, width):
                normalise_here(row + 4 * at, width, a[R_NORM], a[R_WEIGHT] + at // width * a[R_EACH], a[R_BIAS], eps)
        cos, sin = f32_at(a[R_COS] + 4 * t * half), f32_at(a[R_SIN] + 4 * t * half)
        for head in range(heads):
            y, z = f32_at(row + 4 * head * depth), f32_at(row + 4 * (head * depth + half))
            if a[R_SCRATCH] != 0:
                for i in range(2 * half):
                    pairs[i] = y[i]
                for i in range(half):
                    y[i], z[i] = pairs[2 * i], pairs[2 * i + 1]
            for i in range(half):
                low, high = y[i], z[i]
                y[i] = low * cos[i] - high * sin[i]
                z[i] = high * cos[i] + low * sin[i]


@kernel()
def activate_rows(args, worker, counter):
    """GATE = act(GATE) * UP. Blocks are tokens."""
    a = i64_at(args)
    width, act = a[G_WIDTH], a[G_ACT]
    while True:
        row = fetch_add(counter, 1)
        if row >= a[G_TOKENS]:
            return
        start = 4 * row * width
        if a[G_UP] == 0:
            gate = f32_at(a[G_GATE] + start)
            for i in range(width):
                gate[i] = activate(gate[i], act)
        else:
            gate_values(a[G_GATE] + start, a[G_UP] + start, width, act)


@kernel()
def curve_rows(args, worker, counter):
    """Y = xIELU of Y, see `reference.curved`. Blocks are tokens."""
    a = i64_at(args)
    width, above, below = a[C_WIDTH], float32(f64_at(args)[C_ABOVE]), float32(f64_at(args)[C_BELOW])
    while True:
        row = fetch_add(counter, 1)
        if row >= a[C_TOKENS]:
            return
        y = f32_at(a[C_Y] + 4 * row * width)
        for i in range(width):
            x = y[i]
            low = min(x, CURVE_LOW)
            near = low * low * (THIRDS[0] + low * (THIRDS[1] + low * (THIRDS[2] + low * (THIRDS[3] + low * THIRDS[4]))))
            far = exp(low) - ONE - low  # for small values the difference would cancel
            bent = (near if low > CURVE_NEAR else far) + (low - x)
            y[i] = CURVE_HALF * x + (above * x * x if x > ZERO else below * bent)


@kernel({"contract"})
def add_rows(args, worker, counter):
    """STREAM += FACTOR * norm(BRANCH). Blocks are tokens."""
    a = i64_at(args)
    width, eps, factor = a[A_WIDTH], float32(f64_at(args)[A_EPS]), float32(f64_at(args)[A_FACTOR])
    while True:
        row = fetch_add(counter, 1)
        if row >= a[A_TOKENS]:
            return
        branch = a[A_BRANCH] + 4 * row * width
        if a[A_NORM] != 0:
            normalise_here(branch, width, a[A_NORM], a[A_WEIGHT], a[A_BIAS], eps)
        y, x = f32_at(branch), f32_at(a[A_STREAM] + 4 * row * width)
        for i in range(width):
            x[i] += factor * y[i]


@kernel()
def scale_rows(args, worker, counter):
    """OUT = FACTOR * Y. Blocks are tokens."""
    a = i64_at(args)
    width, factor = a[S_WIDTH], float32(f64_at(args)[S_FACTOR])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[S_TOKENS]:
            return
        y, out = f32_at(a[S_Y] + 4 * t * width), f32_at(a[S_OUT] + 4 * t * width)
        for i in range(width):
            out[i] = factor * y[i]


@kernel()
def clip_rows(args, worker, counter):
    """Y clamped to -LIMIT and LIMIT; NaN stays. Blocks are tokens."""
    a = i64_at(args)
    width, limit = a[L_WIDTH], float32(f64_at(args)[L_LIMIT])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[L_TOKENS]:
            return
        y = f32_at(a[L_Y] + 4 * t * width)
        for i in range(width):
            x = y[i]
            y[i] = limit if x > limit else -limit if x < -limit else x


@kernel()
def part_rows(args, worker, counter):
    """Extract the queries of heads that are each followed by a gate. Blocks are tokens."""
    a = i64_at(args)
    depth = a[P_DEPTH]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[P_TOKENS]:
            return
        for head in range(t * a[P_HEADS], (t + 1) * a[P_HEADS]):
            y, out = f32_at(a[P_Y] + 8 * head * depth), f32_at(a[P_OUT] + 4 * head * depth)
            for i in range(depth):
                out[i] = y[i]


@kernel()
def gate_head_rows(args, worker, counter):
    """OUT *= sigmoid(gate), or softplus(gate). Blocks are tokens."""
    a = i64_at(args)
    depth, step, soft = a[P_DEPTH], a[P_STEP], a[P_SOFT]
    while True:
        t = fetch_add(counter, 1)
        if t >= a[P_TOKENS]:
            return
        for head in range(t * a[P_HEADS], (t + 1) * a[P_HEADS]):
            out = f32_at(a[P_OUT] + 4 * head * depth)
            gate = f32_at(a[P_Y] + 4 * (head if step == 0 else (step * head + step - 1) * depth))
            if step == 0:
                of_all = softplus(gate[0]) if soft else ONE / (ONE + exp(-gate[0]))
                for i in range(depth):
                    out[i] = out[i] * of_all
            elif soft:
                for i in range(depth):
                    out[i] = out[i] * softplus(gate[i])
            else:
                for i in range(depth):
                    out[i] = out[i] / (ONE + exp(-gate[i]))


@kernel()
def grow_rows(args, worker, counter):
    """Scale heads of Y by factors that grow with a token's position. Blocks are tokens."""
    a = i64_at(args)
    heads, depth, logs, scales, offsets = a[W_HEADS], a[W_DEPTH], f32_at(a[W_LOGS]), f32_at(a[W_SCALES]), f32_at(a[W_OFFSETS])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[W_TOKENS]:
            return
        for head in range(heads):
            y, factor = f32_at(a[W_Y] + 4 * (t * heads + head) * depth), scales[head] * logs[t] + offsets[head]
            for i in range(depth):
                y[i] = factor * y[i]


def rotate(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int, angles: Angles, norm: Norm | None) -> None:
    """Norm (per head, or of the whole row, depending on its weight), then rotation; in place. A two-dimensional weight has one row per
    head."""
    args, width = ops.args, head_dim if norm is None else norm.weight.shape[-1]
    weight_stride = 0 if norm is None or norm.weight.ndim == 1 else 4 * width
    interleaved = angles.table is not None and angles.table.interleaved
    norm_fields = (0, 0, 0) if norm is None else (NORMS[norm.kind], address(norm.weight), address(norm.bias))
    ops.reals[R_EPS] = 0.0 if norm is None else norm.eps
    args[:R_EPS] = (ops.address_of(y), len(y), heads, head_dim, 2 * angles.cos.shape[1], *angles.at, *norm_fields, width,
                    ops.scratch if interleaved else 0, ops.scratch_stride, weight_stride)
    ops.run(rope_heads, ops.args_address, y.size >= MIN_PARALLEL_SIZE, args)


def norm_rows(ops: CpuOps, y: np.ndarray, norm: Norm) -> np.ndarray:
    """norm(y) of every row, in place."""
    none = np.zeros((len(y), 0), np.float32)
    ops._rotate_with(ops, y, 1, y.shape[1], Angles(none, None, none, none, (0, 0)), norm)
    return y


def rotate_reference(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int, angles: Angles, norm: Norm | None) -> None:
    ops.flush()
    if norm is not None:
        groups = y.reshape(len(y), -1, norm.weight.shape[-1])
        groups[:] = reference.normalise(groups, norm.kind, norm.weight, norm.bias, norm.eps)
    split = y.reshape(len(y), heads, head_dim)
    split[:] = reference.rotate_heads(split, angles.cos, angles.sin, angles.table is not None and angles.table.interleaved)


def gate(ops: CpuOps, gated: np.ndarray, up: np.ndarray | None, act: str) -> None:
    """gated = act(gated) * up, without `up` act(gated)."""
    ops.args[: G_ACT + 1] = (ops.address_of(gated), 0 if up is None else ops.address_of(up), *gated.shape, activation_number(act))
    ops.run(activate_rows, ops.args_address, gated.size >= MIN_PARALLEL_SIZE, ops.args)


def curve(ops: CpuOps, y: np.ndarray, xielu: XieluParams) -> None:
    """y = xIELU of y with a layer's own numbers."""
    ops.args[:C_ABOVE] = (ops.address_of(y), *y.shape)
    ops.reals[C_ABOVE], ops.reals[C_BELOW] = xielu.alpha_p, xielu.alpha_n
    ops.run(curve_rows, ops.args_address, y.size >= MIN_PARALLEL_SIZE, ops.args)


def curve_reference(ops: CpuOps, y: np.ndarray, xielu: XieluParams) -> None:
    ops.flush()
    y[:] = reference.curved(y, xielu.alpha_p, xielu.alpha_n)


def gate_reference(ops: CpuOps, gated: np.ndarray, up: np.ndarray | None, act: str) -> None:
    ops.flush()
    wide = gated.astype(np.float64)
    gated[:] = reference.activate(wide, act) if up is None else reference.gated(wide, up, act)


def add(ops: CpuOps, branch: np.ndarray, norm: Norm | None, stream: np.ndarray, factor: float) -> None:
    """stream += factor * norm(branch)."""
    ops.args[:A_EPS] = (ops.address_of(branch), ops.address_of(stream), *branch.shape, 0 if norm is None else NORMS[norm.kind],
                        0 if norm is None else address(norm.weight), 0 if norm is None else address(norm.bias))
    ops.reals[A_EPS], ops.reals[A_FACTOR] = 0.0 if norm is None else norm.eps, factor
    ops.run(add_rows, ops.args_address, branch.size >= MIN_PARALLEL_SIZE, ops.args)


def add_reference(ops: CpuOps, branch: np.ndarray, norm: Norm | None, stream: np.ndarray, factor: float) -> None:
    ops.flush()
    stream[:] = reference.add_branch(stream, branch, norm and (norm.kind, norm.weight, norm.bias, norm.eps), factor)


def copy(ops: CpuOps, y: np.ndarray) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("y2", *y.shape)
    ops.registry.select(Call("scale")).candidate.run(ops, y, out, 1.0)
    return out


def copy_input_state(ops: CpuOps, x: np.ndarray, place: int, places: int) -> None:
    """Copy x [T, D] to where it stays until the end of the pass, as number `place` of `places`: `between` [places, T, D]."""
    ops.registry.select(Call("scale")).candidate.run(ops, x, ops.workspace.take("between", places, *x.shape)[place], 1.0)


def scale_in_place(ops: CpuOps, x: np.ndarray, factor: float) -> np.ndarray:
    """See `BlockOps`."""
    ops.registry.select(Call("scale")).candidate.run(ops, x, x, factor)
    return x


def scale(ops: CpuOps, y: np.ndarray, out: np.ndarray, factor: float) -> None:
    """out = factor * y."""
    ops.args[:S_FACTOR] = ops.address_of(y), ops.address_of(out), *y.shape
    ops.reals[S_FACTOR] = factor
    ops.run(scale_rows, ops.args_address, y.size >= MIN_PARALLEL_SIZE, ops.args)


def scale_reference(ops: CpuOps, y: np.ndarray, out: np.ndarray, factor: float) -> None:
    ops.flush()
    np.multiply(y, np.float32(factor), out=out)


def norm(ops: CpuOps, x: np.ndarray, norm: Norm) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("normed", *x.shape)
    ops.registry.select(Call("scale")).candidate.run(ops, x, out, 1.0)
    return norm_rows(ops, out, norm)


def clip(ops: CpuOps, y: np.ndarray, limit: float) -> np.ndarray:
    """See `BlockOps`."""
    ops.registry.select(Call("clip")).candidate.run(ops, y, limit)
    return y


def clip_native(ops: CpuOps, y: np.ndarray, limit: float) -> None:
    ops.args[:L_LIMIT] = ops.address_of(y), *y.shape
    ops.reals[L_LIMIT] = limit
    ops.run(clip_rows, ops.args_address, y.size >= MIN_PARALLEL_SIZE, ops.args)


def clip_reference(ops: CpuOps, y: np.ndarray, limit: float) -> None:
    ops.flush()
    np.clip(y, np.float32(-limit), np.float32(limit), out=y)


def split_query_gates(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """See `BlockOps`."""
    out = ops.workspace.take("queries", len(y), heads * head_dim)
    ops.registry.select(Call("part")).candidate.run(ops, y, out, heads, head_dim)
    return out


def gate_heads(ops: CpuOps, x: np.ndarray, y: np.ndarray, heads: int, head_dim: int, use_softplus: bool = False) -> np.ndarray:
    """See `BlockOps`."""
    ops.registry.select(Call("gate heads")).candidate.run(ops, y, x, heads, head_dim, use_softplus)
    return x


def scale_queries(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int, positions: np.ndarray, log_positions: RopeTable,
                  slopes_and_offsets: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """See `BlockOps`."""
    ops.registry.select(Call("grow heads")).candidate.run(
        ops, y, heads, head_dim, cached_angles(ops, ops._angles, positions, log_positions), slopes_and_offsets)
    return y


def grow(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int, angles: Angles, slopes_and_offsets: tuple[np.ndarray, np.ndarray]) -> None:
    ops.args[: W_OFFSETS + 1] = ops.address_of(y), len(y), heads, head_dim, angles.at[0], *map(address, slopes_and_offsets)
    ops.run(grow_rows, ops.args_address, y.size >= MIN_PARALLEL_SIZE, ops.args)


def grow_reference(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int, angles: Angles,
                   slopes_and_offsets: tuple[np.ndarray, np.ndarray]) -> None:
    ops.flush()
    split = y.reshape(len(y), heads, head_dim)
    split[:] = reference.grown_heads(split, angles.cos[:, 0], *slopes_and_offsets)


def part(ops: CpuOps, y: np.ndarray, out: np.ndarray, heads: int, head_dim: int) -> None:
    ops.args[: P_DEPTH + 1] = ops.address_of(y), ops.address_of(out), len(y), heads, head_dim
    ops.run(part_rows, ops.args_address, out.size >= MIN_PARALLEL_SIZE, ops.args)


def part_reference(ops: CpuOps, y: np.ndarray, out: np.ndarray, heads: int, head_dim: int) -> None:
    ops.flush()
    out[:] = y.reshape(len(y), heads, 2, head_dim)[:, :, 0].reshape(out.shape)


def gate_attended(ops: CpuOps, y: np.ndarray, out: np.ndarray, heads: int, head_dim: int, use_softplus: bool) -> None:
    ops.args[: P_SOFT + 1] = ops.address_of(y), ops.address_of(out), len(y), heads, head_dim, y.shape[1] // out.shape[1], use_softplus
    ops.run(gate_head_rows, ops.args_address, out.size >= MIN_PARALLEL_SIZE, ops.args)


def gate_attended_reference(ops: CpuOps, y: np.ndarray, out: np.ndarray, heads: int, head_dim: int, use_softplus: bool) -> None:
    ops.flush()
    y = np.repeat(y, head_dim, 1) if y.shape[1] == heads else y
    gates = y.reshape(len(y), heads, -1, head_dim)[:, :, -1].reshape(out.shape).astype(np.float64)
    out[:] = out * np.logaddexp(0, gates) if use_softplus else out / (1 + np.exp(-gates))
