"""effllm's KV codec on paper: every stage can be switched, values go in and the values that attention would see come out.

Arrays are torch float32 `[window, KV head, token, head_dim]`; the number of tokens is a multiple of a page. Every rounding of the
record is done (logarithmic scales, integer zeros, 8-bit means); only the packing of bits is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

PAGE = 128
HEADER_BITS = 512  # 64 bytes a record
LONG_GROUP = 32  # tokens of one K scale
WIDE_GROUP = 16  # channels of one V scale
K_OCTAVE = 8  # steps of K's scale in a factor of two: 8 bits span 2^32
CLIP_K = {8: (1.0,), 6: (1.0, 0.97), 5: (1.0, 0.96, 0.92), 4: (1.0, 0.95, 0.9, 0.85, 0.8), 3: (1.0, 0.93, 0.86, 0.79, 0.72, 0.65),
          2: (1.0, 0.9, 0.82, 0.74, 0.66, 0.58, 0.5)}
CLIP_V_STEPS = {8: 1, 6: 2, 5: 2, 4: 3, 3: 5, 2: 7}
WAKE = 8.0  # a pair of this many times the mean power: a page that is not rotated


@dataclass(frozen=True)
class Stages:
    """Which steps are taken. `mean_k`: none, static (before RoPE, from other text) or page (of the page's first RoPE position, before
    RoPE); `balance`: none, scale (powers of two from weight norms, K and V) or matrix (V by the whole matrix, K as scale)."""

    bits_k: int
    bits_v: int
    balance: str = "matrix"
    mean_k: str = "static"
    mean_v: bool = True
    rotate_k: str = "auto"  # never, always, auto: not where one RoPE pair outshines the others
    rotate_v: bool = True
    search: bool = True
    refit: bool = True
    long_group: int = LONG_GROUP
    wide_group: int = WIDE_GROUP
    v_octave: int = 4

    def packed_bits(self, head_dim: int = 64) -> float:
        """Bits per value of a sealed record, header and padding to 64 bytes included."""
        values = PAGE * head_dim
        k = values * self.bits_k + 16 * values // self.long_group
        v = values * self.bits_v + 5 * values // self.wide_group + (8 * head_dim if self.mean_v else 0)
        return -(-(HEADER_BITS + k + v) // 512) * 512 / (2 * values)


@cache
def hadamard(size: int) -> Tensor:
    """Orthonormal and symmetric where `size` is a power of two; else one such block after another, of the largest power that divides it."""
    block = size & -size
    h = torch.ones(1, 1)
    while len(h) < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return torch.block_diag(*[h / block**0.5] * (size // block))


def _log_round(scale: Tensor, octave: int) -> Tensor:
    return torch.exp2(torch.round(torch.log2(scale.clamp_min(1e-30)) * octave) / octave)


def affine(x: Tensor, bits: int, search: bool, refit: bool) -> Tensor:
    """Groups along the last axis, one 8-bit logarithmic scale and one 8-bit zero each. The zero counts in 1/64 of the grid's width, so it
    reaches two widths to either side at every number of bits."""
    levels = (1 << bits) - 1
    half = levels / 2

    def grid(scale: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
        scale = _log_round(scale, K_OCTAVE)
        unit = scale * ((levels + 1) / 64)
        return scale, torch.round(middle / unit).clamp_(-128, 127) * unit

    def code(scale: Tensor, zero: Tensor) -> Tensor:
        return torch.round((x - zero) / scale + half).clamp_(0, levels) - half

    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    width, middle = (high - low).clamp_min(1e-20) / levels, (high + low) / 2
    best = worst = None
    for factor in CLIP_K[bits] if search else (1.0,):
        scale, zero = grid(width * factor, middle)
        there = scale * code(scale, zero) + zero
        best, worst = _better(x, best, worst, there)
        if refit:
            for _ in range(2 if bits < 5 else 1):
                codes = code(scale, zero)
                mean = codes.mean(-1, keepdim=True)
                spread = (codes - mean).square().mean(-1, keepdim=True).clamp_min(1e-9)
                slope = ((codes - mean) * x).mean(-1, keepdim=True) / spread
                scale, zero = grid(slope.clamp_min(1e-20), x.mean(-1, keepdim=True) - slope * mean)
                best, worst = _better(x, best, worst, scale * code(scale, zero) + zero)
    return best


def _better(x: Tensor, best: Tensor | None, error: Tensor | None, there: Tensor) -> tuple[Tensor, Tensor]:
    mine = (there - x).square_().sum(-1, keepdim=True)
    if best is None:
        return there, mine
    return torch.where(mine < error, there, best), torch.minimum(mine, error)


def symmetric(x: Tensor, bits: int, steps: int, octave: int) -> Tensor:
    """x `[window, head, page, token, group, channel]`: levels ±1/2, ±3/2 … of a scale that is 5 bits below the page's largest, in steps
    of 1/octave of a factor of two. `steps` smaller scales are tried, and one larger."""
    levels = (1 << bits) - 1
    half = levels / 2
    need = torch.log2(x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / half) * octave
    top = torch.ceil(need.amax((3, 4), keepdim=True))
    first = (top - torch.ceil(need)).clamp(0, 31)
    best = error = None
    for step in range(steps + 1):
        scale = torch.exp2((top - (first + step).clamp(max=31)) / octave)
        there = scale * ((torch.floor(x / scale) + 0.5).clamp(-half, half))
        best, error = _better(x, best, error, there)
    return best


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
        if stages.balance != "none":
            x = x / self.k_scale[layer][None, :, None, :]
        flat = x.unflatten(2, (-1, stages.long_group)).transpose(-1, -2)
        if stages.rotate_k == "never":
            out = affine(flat, stages.bits_k, stages.search, stages.refit).transpose(-1, -2).flatten(2, 3)
        else:
            h = hadamard(x.shape[-1])
            out = affine((x @ h).unflatten(2, (-1, stages.long_group)).transpose(-1, -2), stages.bits_k, stages.search, stages.refit)
            out = out.transpose(-1, -2).flatten(2, 3) @ h
            if stages.rotate_k == "auto" and bool((alone := self._outshone(x)).any()):
                plain = affine(flat, stages.bits_k, stages.search, stages.refit).transpose(-1, -2).flatten(2, 3)
                out = torch.where(alone, plain, out)
        if stages.balance != "none":
            out = out * self.k_scale[layer][None, :, None, :]
        return out + turn(mean.expand_as(before))

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
        steps = CLIP_V_STEPS[stages.bits_v] if stages.search else 0
        x = symmetric(x, stages.bits_v, steps, stages.v_octave).flatten(-2) + mean
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


def gaussian_db(stages: Stages, values: int = 1 << 19) -> tuple[float, float]:
    """Noise of K and V codes on Gaussian values, dB above σ²·2^(−2R) with R all packed bits."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 1, values // 64, 64)).astype(np.float32))
    k = affine(x.unflatten(2, (-1, 32)).transpose(-1, -2), stages.bits_k, True, True).transpose(-1, -2).flatten(2, 3)
    v = symmetric(x.unflatten(2, (-1, PAGE)).unflatten(-1, (-1, 16)), stages.bits_v, CLIP_V_STEPS[stages.bits_v],
                  stages.v_octave).flatten(-2).flatten(2, 3)
    bound = -20 * np.log10(2.0) * stages.packed_bits()
    return tuple(float(10 * torch.log10((y - x).square().mean()) - bound) for y in (k, v))
