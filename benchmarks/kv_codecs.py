"""effllm's KV codec on paper: every stage can be switched, values go in and the values that attention would see come out.

Arrays are torch float32 `[window, KV head, token, head_dim]`; the number of tokens is a multiple of a page. Every rounding of the
record is done (logarithmic scales, integer zeros, 8-bit means); only the packing of bits is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from effllm.quant.kv_grid import ABOVE, MOST_STEPS, OCTAVE_K, OCTAVE_V, OCTAVES, UNITS_K, UNITS_V, ZEROS

PAGE = 128
HEADER_BITS = 512  # 64 bytes a record
LONG_GROUP = 32  # tokens of one K scale
WIDE_GROUP = 16  # channels of one V scale
WAKE = 8.0  # a pair of this many times the mean power: a page that is not rotated


@dataclass(frozen=True)
class Stages:
    """Which steps are taken. `mean_k`: none, static (before RoPE, from other text) or page (of the page's first RoPE position, before
    RoPE); `balance`: none, scale (powers of two from weight norms, K and V) matrix (V by the whole matrix, K as scale)
    or profile (both by matrices from recorded q, k, v, strongest channels first, rotated in groups of 16 alone)."""

    bits_k: int
    bits_v: int
    balance: str = "profile"
    allocate: bool = True  # bits by groups of 16 channels, their mean bits_k and bits_v
    mean_k: str = "static"
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
    """Steps of a scale in a factor of two, units of a zero in the grid's width, and the ends of both (`steps`: below the page's top)."""

    octave: int
    units: int
    zero: int
    steps: int | None = None


GRID_K, GRID_V = Grid(OCTAVE_K, UNITS_K, 128), Grid(OCTAVE_V, UNITS_V, 8, MOST_STEPS)


def page_top(x: Tensor, bits: int) -> Tensor:
    """The largest scale that a page of V `[window, head, page, token, group, channel]` needs, in its steps."""
    need = torch.log2(((x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / ((1 << bits) - 1)).clamp_min(2.0**-24))
    return torch.ceil(need * GRID_V.octave).amax((-3, -2, -1), keepdim=True) + ABOVE[bits]


def affine(x: Tensor, bits: int, grid: Grid, search: bool = True, zeros: bool = True, top: Tensor | None = None) -> Tensor:
    """Groups on the last axis; of V `[window, head, page, token, group, channel]`, `top` where other groups have a part in it. What comes
    back is what `quant.kv_grid` stores."""
    half, unit = ((1 << bits) - 1) / 2, (1 << bits) / grid.units
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    first = torch.ceil(torch.log2(((high - low) / (2 * half)).clamp_min(2.0**-24)) * grid.octave)
    middle = (high + low) / 2
    if grid.steps is None:
        least, most = torch.tensor(-128.0), torch.tensor(127.0)
    else:
        most = page_top(x, bits) if top is None else top
        least = most - grid.steps
    best = error = None
    for below in range(-ABOVE[bits], int(OCTAVES[bits] * grid.octave) + 2) if search else (0,):
        scale = torch.exp2(torch.minimum(torch.maximum(first - below, least), most) / grid.octave)
        centre = torch.round(middle / (scale * unit))
        for aside in range(-ZEROS[bits], ZEROS[bits] + 1) if zeros else (0,):
            shift = (centre + aside).clamp(-grid.zero, grid.zero - 1) * unit - half
            there = (x / scale - shift).round_().clamp_(0, 2 * half).add_(shift).mul_(scale)
            mine = (there - x).square_().sum(-1, keepdim=True)
            if best is None:
                best, error = there, mine
            else:
                best, error = torch.where(mine < error, there, best), torch.minimum(mine, error)
    return best


def allocation(strength: Tensor, bits: int) -> list[int]:
    """Bits of each group of 16 channels, `bits` on average: one after another to where the noise is largest, in steps that a record has."""
    widths = (8, 6, 5, 4, 3, 2, 1)
    power = strength.unflatten(0, (-1, WIDE_GROUP)).sum(1).double() ** 2
    given = [1] * len(power)
    left = (bits - 1) * len(power)
    while left:
        gain = []
        for group, now in enumerate(given):
            step = min((w - now for w in widths if w > now), default=left + 1)
            gain.append(float(power[group]) * (4.0**-now - 4.0 ** -(now + step)) / step if step <= left else -1.0)
        best = max(range(len(gain)), key=gain.__getitem__)
        if gain[best] < 0:
            break
        step = min(w - given[best] for w in widths if w > given[best])
        given[best] += step
        left -= step
    return given


@dataclass
class Codec:
    """One model's codec: `k_scale` and `v_matrix` are what the weights say (`kv_model.balance`), `static` the mean of K before RoPE
    `[layer, KV head, head_dim]`, from other text."""

    stages: Stages
    k_scale: list[Tensor] = field(default_factory=list)  # per layer [KV head, head_dim]
    v_scale: list[Tensor] = field(default_factory=list)
    v_matrix: list[Tensor] = field(default_factory=list)  # per layer [KV head, head_dim, head_dim]
    static: Tensor | None = None
    profile_k: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # matrix and what it leaves of every channel, [KV head, head_dim]
    profile_v: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def packed_bits(self) -> float:
        return self.stages.packed_bits()

    def with_stages(self, **changes: object) -> Codec:
        return replace(self, stages=replace(self.stages, **changes))

    def keys(self, layer: int, before: Tensor, turn: Callable) -> Tensor:
        """`before` RoPE; `turn(x, sign)` applies RoPE at the tokens' positions. The K that attention sees."""
        stages = self.stages
        if stages.mean_k == "static":
            mean = self.static[layer][None, :, None, :]
        elif stages.mean_k == "page":
            pages = before.unflatten(2, (-1, PAGE))
            mean = pages.mean(3, keepdim=True).expand_as(pages).flatten(2, 3)
        else:
            mean = torch.zeros(1, 1, 1, before.shape[-1])
        x = turn(before - mean)
        if stages.balance == "profile":
            out = self._by_groups(x, *self.profile_k[layer], stages.bits_k, GRID_K)
            scaled = x / self.k_scale[layer][None, :, None, :]
            if bool((alone := self._outshone(scaled)).any()):
                plain = affine(scaled.unflatten(2, (-1, stages.long_group)).transpose(-1, -2), stages.bits_k, GRID_K)
                out = torch.where(alone, plain.transpose(-1, -2).flatten(2, 3) * self.k_scale[layer][None, :, None, :], out)
            return out + turn(mean.expand_as(before))
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
            if stages.rotate_k == "auto" and bool((alone := self._outshone(x)).any()):
                plain = affine(flat, stages.bits_k, GRID_K, stages.search, stages.zeros).transpose(-1, -2).flatten(2, 3)
                out = torch.where(alone, plain, out)
        if stages.balance != "none":
            out = out * self.k_scale[layer][None, :, None, :]
        return out + turn(mean.expand_as(before))

    def _by_groups(self, x: Tensor, matrix: Tensor, strength: Tensor, bits: int, grid: Grid) -> Tensor:
        h = torch.block_diag(*[hadamard(WIDE_GROUP)] * (x.shape[-1] // WIDE_GROUP))
        x = x @ (h @ matrix).transpose(-1, -2)[None]
        out = torch.empty_like(x)
        taken = (self.stages.search, self.stages.zeros)
        for head in range(x.shape[1]):
            widths = allocation(strength[head], bits) if self.stages.allocate else [bits] * (x.shape[-1] // WIDE_GROUP)
            parts = x[:, head : head + 1].split(WIDE_GROUP, -1)
            if grid is GRID_K:
                parts = [part.unflatten(2, (-1, self.stages.long_group)).transpose(-1, -2) for part in parts]
                parts = [affine(part, width, grid, *taken).transpose(-1, -2) for part, width in zip(parts, widths, strict=True)]
            else:
                parts = [part.unflatten(2, (-1, PAGE)).unflatten(-1, (1, -1)) for part in parts]
                top = torch.stack([page_top(part, width) for part, width in zip(parts, widths, strict=True)]).amax(0)
                parts = [affine(part, width, grid, *taken, top=top).flatten(-2) for part, width in zip(parts, widths, strict=True)]
            out[:, head : head + 1] = torch.cat([part.flatten(2, 3) for part in parts], -1)
        return out @ torch.linalg.inv((h @ matrix).double()).float().transpose(-1, -2)[None]

    @staticmethod
    def _outshone(x: Tensor) -> Tensor:
        """Which pages `[window, head, token, 1]` have a RoPE pair far above the others."""
        power = x.unflatten(2, (-1, PAGE)).var(3, correction=0)
        pair = power[..., : power.shape[-1] // 2] + power[..., power.shape[-1] // 2 :]
        alone = pair.amax(-1) > WAKE * pair.mean(-1)
        return alone.repeat_interleave(PAGE, 2)[..., None]

    def values(self, layer: int, v: Tensor) -> Tensor:
        stages = self.stages
        x = v
        if stages.balance == "profile":
            return self._by_groups(x, *self.profile_v[layer], stages.bits_v, GRID_V)
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
