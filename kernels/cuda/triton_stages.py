"""Triton kernels for a layer's work between products: norms, gates, rotary embedding, writing to pages.

With torch ops a layer is some eighty kernels, and for one token each takes longer to launch than to run. Numbers are float32, and results
match `stages.py` and `pages.py` up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .. import layout as bytes_of
from ..layout import F32, PageLayout

if TYPE_CHECKING:
    from ...quant.weight import Norm

VALUES = 512  # of a gate, per program
WARPS = 4

_RMS_PLUS_ONE, _LAYER = tl.constexpr(bytes_of.NORM_RMS_PLUS_ONE), tl.constexpr(bytes_of.NORM_LAYER)
_SILU, _GELU, _GELU_TANH = tl.constexpr(bytes_of.SILU), tl.constexpr(bytes_of.GELU), tl.constexpr(bytes_of.GELU_TANH)
_RELU, _RELU2, _CLAMPED = tl.constexpr(bytes_of.RELU), tl.constexpr(bytes_of.RELU2), tl.constexpr(bytes_of.CLAMPED_SWISH)
_LIMIT, _SLOPE, _HALF_MAX = tl.constexpr(bytes_of.SWISH_LIMIT), tl.constexpr(bytes_of.SWISH_SLOPE), tl.constexpr(65504.0)
_VARYING = ("tokens", "count", "heads", "kv_heads")


@triton.jit
def _normalise(x, weight, bias, out, columns, eps, N: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr):
    """A row of x [rows, columns]; `weight` and `bias` [columns]."""
    row, at = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, N)
    mask = at < columns
    v = tl.load(x + row + at, mask=mask, other=0.0)
    if KIND == _LAYER:
        v = tl.where(mask, v - tl.sum(v, 0) / columns, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / columns + eps)
    scale = tl.load(weight + at, mask=mask, other=0.0)
    v *= scale + 1.0 if KIND == _RMS_PLUS_ONE else scale
    if BIAS:
        v += tl.load(bias + at, mask=mask, other=0.0)
    tl.store(out + row + at, v, mask=mask)


@triton.jit
def _activated(x, ACT: tl.constexpr):
    if ACT == _SILU:
        x = x / (1.0 + tl.exp(-x))
    elif ACT == _GELU:
        x = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == _GELU_TANH:  # its tanh is twice a logistic function minus one
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACT == _RELU:
        x = tl.where(x > 0.0, x, x * 0.0)
    elif ACT == _RELU2:
        x = tl.where(x > 0.0, x * x, x * 0.0)
    elif ACT == _CLAMPED:
        x = tl.where(x > _LIMIT, _LIMIT, x)
        x = x / (1.0 + tl.exp(x * -_SLOPE))
    return x


@triton.jit(do_not_specialize=_VARYING)
def _gate(gate, up, count, N: tl.constexpr, ACT: tl.constexpr):
    """act(gate) * up, in place of the gate, [count]."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    mask = at < count
    g, u = tl.load(gate + at, mask=mask, other=0.0), tl.load(up + at, mask=mask, other=0.0)
    if ACT == _CLAMPED:
        u = tl.where(u > _LIMIT, _LIMIT, tl.where(u < -_LIMIT, -_LIMIT, u)) + 1.0
    tl.store(gate + at, _activated(g, ACT) * u, mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def _rotate(y, cos, sin, heads, depth, half, N: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Rotate a head of a token of y [T, heads * depth] in place by angles [T, half]. With NEIGHBOURS the output is in half-split order."""
    token, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, N)
    mask, to = at < half, y + (token * heads + head) * depth + at
    c, s = tl.load(cos + token * half + at, mask=mask, other=0.0), tl.load(sin + token * half + at, mask=mask, other=0.0)
    if NEIGHBOURS:
        low, high = tl.load(to + at, mask=mask, other=0.0), tl.load(to + at + 1, mask=mask, other=0.0)
        tl.debug_barrier()  # a thread writes where another reads
    else:
        low, high = tl.load(to, mask=mask, other=0.0), tl.load(to + half, mask=mask, other=0.0)
    tl.store(to, low * c - high * s, mask=mask)
    tl.store(to + half, high * c + low * s, mask=mask)


@triton.jit
def _stored(x, to, mask, HALVES: tl.constexpr):
    if HALVES:  # finite values are clamped, infinity is kept
        finite = tl.abs(x) != float("inf")
        x = tl.where(finite & (x > _HALF_MAX), _HALF_MAX, tl.where(finite & (x < -_HALF_MAX), -_HALF_MAX, x))
        tl.store(to.to(tl.pointer_type(tl.float16)), x.to(tl.float16), mask=mask)
    else:
        tl.store(to.to(tl.pointer_type(tl.float32)), x, mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def _write(k, v, slots, rows_of, exact, kv_heads, depth, PARTS: tl.constexpr, ROWS: tl.constexpr, part_nbytes, record_nbytes, header, side,
           N: tl.constexpr, HALVES: tl.constexpr):
    """K and V of a token and head into its row of an exact slot."""
    token, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, N)
    item = 2 if HALVES else 4
    slot, row, mask = tl.load(slots + token).to(tl.int64), tl.load(rows_of + token).to(tl.int64), at < depth
    record = exact + (slot * PARTS + row // ROWS) * part_nbytes + head * record_nbytes + header
    row, there = row % ROWS, (token * kv_heads + head) * depth + at
    _stored(tl.load(k + there, mask=mask, other=0.0), record + (at * ROWS + row) * item, mask, HALVES)
    _stored(tl.load(v + there, mask=mask, other=0.0), record + side + (row * depth + at) * item, mask, HALVES)


def normalise(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """`torch_ops.normalise` of contiguous rows [..., N], for a norm with a weight and N at most `stages.MOST_ROW`."""
    out, columns = torch.empty_like(x), x.shape[-1]
    _normalise[x.numel() // columns,](x, norm.weight, x if norm.bias is None else norm.bias, out, columns, norm.eps,
                                      N=triton.next_power_of_2(columns), KIND=bytes_of.NORMS[norm.kind], BIAS=norm.bias is not None,
                                      num_warps=WARPS)
    return out


def gated(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """`torch_ops.gated` of two contiguous tensors of one shape, in place of `gate`."""
    _gate[triton.cdiv(gate.numel(), VALUES),](gate, up, gate.numel(), N=VALUES, ACT=bytes_of.ACTIVATIONS[act], num_warps=WARPS)
    return gate


def rotate(y: torch.Tensor, heads: int, depth: int, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Contiguous y [T, heads * depth] rotated by angles [T, 1, R/2], in place."""
    half = cos.shape[-1]
    _rotate[len(y), heads](y, cos, sin, heads, depth, half, N=triton.next_power_of_2(half), NEIGHBOURS=interleaved, num_warps=1)
    return y


def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, exact: torch.Tensor,
          layout: PageLayout) -> torch.Tensor:
    """`pages.TorchLayerPages.write`: k and v [T, KVH * D] into the uint8 memory of exact slots, which is returned."""
    _write[len(k), layout.kv_heads](k.contiguous(), v.contiguous(), slots, rows, exact, layout.kv_heads, layout.head_dim, layout.parts,
                                    layout.rows, layout.part_nbytes, layout.record_nbytes, bytes_of.HEADER_NBYTES, layout.side_nbytes,
                                    N=triton.next_power_of_2(layout.head_dim), HALVES=layout.stored != F32, num_warps=1)
    return exact
