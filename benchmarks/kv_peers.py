"""KV cache formats of other programs, reproduced from their own arithmetic: ggml's block types, KIVI, and the affine groups of mlx-lm.

ggml's types are computed by the shared library that comes with llama-cpp-python (`quantize_row_*_ref`: what a cache write runs on a CPU);
the rotation and least-squares scales around them are ours. Arrays as in `kv_codecs`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kv_codecs import hadamard

BLOCK = 32
BLOCKS = {"q8_0": (34, 1), "q5_0": (22, 1), "q5_1": (24, 2), "q4_0": (18, 1), "q4_1": (20, 2), "iq4_nl": (18, 1)}  # bytes, 16-bit numbers


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))


def ggml_blocks(x: np.ndarray, name: str) -> np.ndarray:
    """float32 [..., 32 n] as blocks uint8 [blocks, bytes], by ggml's own code."""
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty((x.size // BLOCK, BLOCKS[name][0]), np.uint8)
    function = getattr(_library(), f"quantize_row_{name}_ref")
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
    function(x.ctypes.data, out.ctypes.data, x.size)
    return out


def _refitted(x: np.ndarray, blocks: np.ndarray, name: str) -> np.ndarray:
    """The same codes with least-squares scale (and minimum), in float16 like the originals."""
    probe = blocks.copy()
    numbers = BLOCKS[name][1]
    probe[:, : 2 * numbers].view(np.float16)[:] = (1.0, 0.0)[:numbers]
    codes = dequantize(probe, GGMLQuantizationType[name.upper()]).reshape(-1, BLOCK)
    rows = x.reshape(-1, BLOCK)
    if numbers == 1:
        slope = (rows * codes).sum(1) / np.maximum((codes * codes).sum(1), 1e-9)
        return codes * slope.astype(np.float16).astype(np.float32)[:, None]
    centre = codes - codes.mean(1, keepdims=True)
    slope = (rows * centre).sum(1) / np.maximum((centre * centre).sum(1), 1e-9)
    least = rows.mean(1) - slope * codes.mean(1)
    return codes * slope.astype(np.float16).astype(np.float32)[:, None] + least.astype(np.float16).astype(np.float32)[:, None]


def ggml(x: Tensor, name: str, refit: bool) -> Tensor:
    """x after a round trip through the type `name`."""
    values = x.contiguous().numpy()
    blocks = ggml_blocks(values, name)
    there = _refitted(values, blocks, name) if refit else dequantize(blocks, GGMLQuantizationType[name.upper()])
    return torch.from_numpy(np.ascontiguousarray(there, np.float32)).view(x.shape)


def kivi(x: Tensor, bits: int) -> Tensor:
    """Groups of 32 on the last axis, asymmetric, float16 scale and minimum, as KIVI's quantization does."""
    x = x.unflatten(-1, (-1, 32))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / ((1 << bits) - 1)).half().float().clamp_min(1e-7)
    low = low.half().float()
    return (torch.round((x - low) / scale).clamp(0, (1 << bits) - 1) * scale + low).flatten(-2)


def mlx_affine(x: Tensor, bits: int, group: int = 64) -> Tensor:
    """mlx's affine groups: the end of larger magnitude is exactly on the grid. float16 scale and bias."""
    x = x.unflatten(-1, (-1, group))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    low_end = low.abs() > high.abs()
    scale = ((high - low) / ((1 << bits) - 1)).clamp_min(1e-7)
    scale = torch.where(low_end, scale, -scale)
    edge = torch.where(low_end, low, high)
    at = torch.round(edge / scale)
    scale = torch.where(at == 0, scale, edge / torch.where(at == 0, torch.ones_like(at), at))
    bias = torch.where(at == 0, torch.zeros_like(edge), edge)
    codes = torch.round((x - bias) / scale).clamp(0, (1 << bits) - 1)
    return (codes * scale.half().float() + bias.half().float()).flatten(-2)


@dataclass(frozen=True)
class Peer:
    """A format of another program; `per_channel` groups K along tokens instead of channels."""

    name: str
    packed_bits: float
    once: Callable[[Tensor], Tensor]
    rotated: bool = False
    per_channel: bool = False

    def keys(self, layer: int, before: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
        after = turn(before)
        return self.once(after.transpose(-1, -2)).transpose(-1, -2) if self.per_channel else self.values(layer, after)

    def values(self, layer: int, v: Tensor) -> Tensor:
        if not self.rotated:
            return self.once(v)
        h = hadamard(v.shape[-1])
        return self.once(v @ h) @ h


def block_peers(names: tuple[str, ...] = tuple(BLOCKS), rotated: tuple[bool, ...] = (False, True),
                refit: tuple[bool, ...] = (False, True)) -> list[Peer]:
    """ggml's types: as they are, and each with Hadamard rotation and least-squares scales."""
    return [Peer(name + " rotated" * turn + " refit" * fit, BLOCKS[name][0] * 8 / BLOCK, lambda x, n=name, f=fit: ggml(x, n, f), turn)
            for name in names for turn in rotated for fit in refit]


def group_peers(widths: tuple[int, ...] = (8, 6, 5, 4, 3, 2)) -> list[Peer]:
    """KIVI with groups of 32 and the affine groups of 64."""
    return [Peer(f"KIVI-{bits} g32", bits + 1.0, lambda x, b=bits: kivi(x, b), per_channel=True) for bits in widths] + [
        Peer(f"affine-{bits} g64", bits + 0.5, lambda x, b=bits: mlx_affine(x, b)) for bits in widths]
