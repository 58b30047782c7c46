"""effllm's KV codec simulated in torch: every stage can be switched off; values go in, and the values that attention would see come out.

Arrays are torch float32 `[window, KV head, token, head_dim]`; the number of tokens is a multiple of a page. Every rounding of the record is
done (logarithmic scales, integer zeros, 8-bit means); only bit packing is left out, and counted. `Packed` is the codec with the bases the
program computes, `Codec` ablates its data-free stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from effllm.quant.kv_basis import KVBasis
from effllm.quant.kv_codec import LONE_PAIR
from effllm.quant.kv_grid import ABOVE, MOST_STEPS, OCTAVE_K, OCTAVE_V, UNITS_K, UNITS_V, ZEROS, tried
from kv_search import search

PAGE = 128
HEADER_BITS = 512  # 64 bytes a record
LONG_GROUP = 32  # tokens of one K scale
WIDE_GROUP = 16  # channels of one V scale


@dataclass(frozen=True)
class Stages:
    """Which steps are taken. `mean_k`: none, static (before RoPE, from other text) or page (of the page's first RoPE position, before
    RoPE); `balance`: none, scale (powers of two from weight norms, K and V) or matrix (V by the whole matrix, K as scale)."""

    bits_k: int
    bits_v: int
    balance: str = "matrix"
    mean_k: str = "none"
    mean_v: bool = False
    rotate_k: str = "auto"  # never, always, auto: not where one RoPE pair outshines the others
    rotate_v: bool = True
    search: bool = True  # of scales below the one that holds the group
    zeros: bool = True  # of zeros beside the group's middle
    long_group: int = LONG_GROUP
    wide_group: int = WIDE_GROUP

    def packed_bits(self, head_dim: int = 64) -> float:
        """Bits per value of a sealed record, header and padding to 64 bytes included."""
        values = PAGE * head_dim
        k = values * self.bits_k + 16 * values // self.long_group
        v = values * self.bits_v + 8 * values // self.wide_group + (8 * head_dim if self.mean_v else 0)
        return -(-(HEADER_BITS + k + v) // 512) * 512 / (2 * values)


@cache
def hadamard(size: int) -> Tensor:
    """Orthonormal and symmetric where `size` is a power of two; else one such block after another, of the largest power that divides it."""
    block = size & -size
    h = torch.ones(1, 1)
    while len(h) < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return torch.block_diag(*[h / block**0.5] * (size // block))


@dataclass(frozen=True)
class Grid:
    """Steps of a scale per factor of two, units of a zero in grid widths, and the limits of both (`steps`: below the page's maximum)."""

    octave: int
    units: int
    zero: int
    steps: int | None = None


GRID_K, GRID_V = Grid(OCTAVE_K, UNITS_K, 128), Grid(OCTAVE_V, UNITS_V, 8, MOST_STEPS)


def page_top(x: Tensor, bits: int) -> Tensor:
    """The largest scale that a page of V `[window, head, page, token, group, channel]` needs, in its steps."""
    need = torch.log2(((x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / ((1 << bits) - 1)).clamp_min(2.0**-24))
    return torch.ceil(need * GRID_V.octave).amax((-3, -2, -1), keepdim=True) + ABOVE[bits]


def affine(x: Tensor, bits: int, grid: Grid, searched: bool = True, zeros: bool = True, top: Tensor | None = None) -> Tensor:
    """Groups on the last axis; of V `[window, head, page, token, group, channel]`, `top` where other groups have a part in it. What comes
    back is what `quant.kv_grid` stores."""
    if grid.steps is None:
        minimum, maximum = torch.tensor(-128.0), torch.tensor(127.0)
    else:
        maximum = page_top(x, bits) if top is None else top
        minimum = maximum - grid.steps
    shape = x.shape[:-1]
    ends = [np.ascontiguousarray(end.squeeze(-1).expand(shape).reshape(-1).numpy() if end.ndim else np.full(x.numel() // x.shape[-1], end),
                                 np.float32) for end in (minimum, maximum)]
    steps = tried(bits, grid.octave) if searched else range(1)
    rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]).numpy())
    out = np.empty_like(rows)
    f32 = np.float32
    search(rows, out, f32(((1 << bits) - 1) / 2), f32((1 << bits) / grid.units), f32(grid.octave), *ends, -steps.start, steps.stop - 1,
           f32(-grid.zero), f32(grid.zero - 1), ZEROS[bits] if zeros else 0)
    return torch.from_numpy(out).view(x.shape)


@dataclass(frozen=True)
class Packed:
    """The record as the program writes it: one basis per layer, and bits of K and V per head."""

    bases: list[KVBasis]
    bits: list[list[tuple[int, int]]]

    @property
    def packed_bits(self) -> float:
        """Bits per value of sealed records, headers and padding to 64 bytes included, the mean over layers and heads."""
        size = self.bases[0].k_scale.shape[1]
        bits_of_heads = [Stages(*pair).packed_bits(size) for layer in self.bits for pair in layer]
        return sum(bits_of_heads) / len(bits_of_heads)

    def keys(self, layer: int, before: Tensor, turn: Callable) -> Tensor:
        basis, x = self.bases[layer], turn(before)
        widths, _ = basis.widths(*zip(*self.bits[layer], strict=True))
        scale = torch.from_numpy(basis.k_scale)[None, :, None]
        out = _turned(self._groups(_turned(x, basis.k_matrix), widths), basis.k_inverse)
        alone = outshone(x / scale)
        for head in torch.nonzero(alone.any(2).any(0).flatten()).flatten().tolist():
            plain = _along_tokens(x[:, head] / scale[:, head], self.bits[layer][head][0]) * scale[:, head]
            out[:, head] = torch.where(alone[:, head], plain, out[:, head])
        return out

    @staticmethod
    def _groups(x: Tensor, widths: np.ndarray) -> Tensor:
        out = torch.empty_like(x)
        for head, row in enumerate(widths.tolist()):
            for group, bits in enumerate(row):
                where = slice(WIDE_GROUP * group, WIDE_GROUP * (group + 1))
                out[:, head, :, where] = _along_tokens(x[:, head, :, where], bits)
        return out

    def values(self, layer: int, v: Tensor) -> Tensor:
        basis = self.bases[layer]
        _, widths = basis.widths(*zip(*self.bits[layer], strict=True))
        x = _turned(v, basis.v_matrix)
        out = torch.empty_like(x)
        for head, row in enumerate(widths.tolist()):
            pages = x[:, head : head + 1].unflatten(2, (-1, PAGE)).unflatten(-1, (-1, WIDE_GROUP))
            parts = pages.split(1, -2)
            top = torch.stack([page_top(part, bits) for part, bits in zip(parts, row, strict=True)]).amax(0)
            there = [affine(part, bits, GRID_V, top=top) for part, bits in zip(parts, row, strict=True)]
            out[:, head : head + 1] = torch.cat(there, -2).flatten(-2).flatten(2, 3)
        return _turned(out, basis.v_inverse)


class Exact:
    """Nothing is packed: the cost of rounding alone."""

    def keys(self, layer: int, before: Tensor, turn: Callable) -> Tensor:
        return turn(before)

    def values(self, layer: int, v: Tensor) -> Tensor:
        return v


def _turned(x: Tensor, matrix: np.ndarray) -> Tensor:
    return x @ torch.from_numpy(np.ascontiguousarray(matrix.swapaxes(1, 2)))[None]


def _along_tokens(x: Tensor, bits: int) -> Tensor:
    """`[window, token, channel]`, groups of 32 tokens of a channel."""
    return affine(x.unflatten(1, (-1, LONG_GROUP)).transpose(-1, -2), bits, GRID_K).transpose(-1, -2).flatten(1, 2)


def outshone(x: Tensor) -> Tensor:
    """Which pages `[window, head, token, 1]` have a RoPE pair far above the others."""
    power = x.unflatten(2, (-1, PAGE)).var(3, correction=0)
    pair = power[..., : power.shape[-1] // 2] + power[..., power.shape[-1] // 2 :]
    alone = pair.amax(-1) > LONE_PAIR * pair.mean(-1)
    return alone.repeat_interleave(PAGE, 2)[..., None]


@dataclass
class Codec:
    """One model's codec: `k_scale` and `v_matrix` are what the weights say (`kv_model.balance`), `static` the mean of K before RoPE
    `[layer, KV head, head_dim]`, from other text."""

    stages: Stages
    k_scale: list[Tensor] = field(default_factory=list)  # per layer [KV head, head_dim]
    v_scale: list[Tensor] = field(default_factory=list)
    v_matrix: list[Tensor] = field(default_factory=list)  # per layer [KV head, head_dim, head_dim]
    static: Tensor | None = None

    @property
    def packed_bits(self) -> float:
        return self.stages.packed_bits()

    def with_stages(self, **changes: object) -> Codec:
        return replace(self, stages=replace(self.stages, **changes))

    def keys(self, layer: int, before: Tensor, turn: Callable) -> Tensor:
        """The K that attention sees. `before` RoPE; `turn(x, sign)` applies RoPE at the tokens' positions."""
        stages = self.stages
        if stages.mean_k == "static":
            mean = self.static[layer][None, :, None, :]
        elif stages.mean_k == "page":
            pages = before.unflatten(2, (-1, PAGE))
            mean = pages.mean(3, keepdim=True).expand_as(pages).flatten(2, 3)
        else:
            mean = torch.zeros(1, 1, 1, before.shape[-1])
        x = turn(before - mean)
        if stages.balance != "none":
            x = x / self.k_scale[layer][None, :, None, :]
        flat = x.unflatten(2, (-1, stages.long_group)).transpose(-1, -2)
        if stages.rotate_k == "never":
            out = affine(flat, stages.bits_k, GRID_K, stages.search, stages.zeros).transpose(-1, -2).flatten(2, 3)
        else:
            h = hadamard(x.shape[-1])
            turned = (x @ h).unflatten(2, (-1, stages.long_group)).transpose(-1, -2)
            out = affine(turned, stages.bits_k, GRID_K, stages.search, stages.zeros)
            out = out.transpose(-1, -2).flatten(2, 3) @ h
            if stages.rotate_k == "auto" and bool((alone := outshone(x)).any()):
                plain = affine(flat, stages.bits_k, GRID_K, stages.search, stages.zeros).transpose(-1, -2).flatten(2, 3)
                out = torch.where(alone, plain, out)
        if stages.balance != "none":
            out = out * self.k_scale[layer][None, :, None, :]
        return out + turn(mean.expand_as(before))

    def values(self, layer: int, v: Tensor) -> Tensor:
        stages = self.stages
        x = v
        if stages.balance == "matrix":
            x = x @ self.v_matrix[layer].transpose(-1, -2)[None]
        elif stages.balance == "scale":
            x = x / self.v_scale[layer][None, :, None, :]
        if stages.rotate_v:
            x = x @ hadamard(x.shape[-1])
        x = x.unflatten(2, (-1, PAGE))
        mean = torch.zeros(1)
        if stages.mean_v:
            mean = x.mean(3, keepdim=True)
            unit = _unit(mean)
            mean = torch.round(mean / unit) * unit
        x = (x - mean).unflatten(-1, (-1, stages.wide_group))
        x = affine(x, stages.bits_v, GRID_V, stages.search, stages.zeros).flatten(-2) + mean
        x = x.flatten(2, 3)
        if stages.rotate_v:
            x = x @ hadamard(x.shape[-1])
        if stages.balance == "matrix":
            x = x @ torch.linalg.inv(self.v_matrix[layer].double()).float().transpose(-1, -2)[None]
        elif stages.balance == "scale":
            x = x * self.v_scale[layer][None, :, None, :]
        return x


def _unit(mean: Tensor) -> Tensor:
    """The step of an 8-bit mean: a power of two for the whole page."""
    return torch.exp2(torch.ceil(torch.log2(mean.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127)))
