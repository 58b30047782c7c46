"""In which directions K and V are quantized, and with how many bits each: what a model, or a recorded profile of it, gives the KV codec.

Noise in K costs what queries make of it, noise in V what W_o makes of it. With A the second moment of K (of V) and B that of what it is
multiplied with, the matrix T for which T A Tᵀ = T⁻ᵀ B T⁻¹ is diagonal makes noise cost the same in every direction, and what it
leaves on the diagonal says how many bits a direction is worth (reverse water-filling, in groups of 16 channels).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from ..kernels.kv_layout import CHANNELS, WIDTHS

RIDGE = 1e-3  # of the mean power: a moment from few tokens must not promise silent directions


@cache
def hadamard(size: int, block: int | None = None) -> np.ndarray:
    """Orthonormal and symmetric, float32 [size, size], read-only: blocks of `block`, or of the largest power of two in `size`."""
    block = block or size & -size
    signs = np.ones((1, 1), np.float32)
    while len(signs) < block:
        signs = np.block([[signs, signs], [signs, -signs]])
    matrix = np.kron(np.eye(size // block, dtype=np.float32), signs / np.sqrt(np.float32(block)))
    matrix.setflags(write=False)
    return matrix


@dataclass(frozen=True)
class KVBasis:
    """One layer of H KV heads. `k_matrix` and `v_matrix` [H, D, D] turn K (after RoPE) and V into what is quantized; a query is turned by
    the inverse transpose of K's, an output by the inverse of V's. `k_scale` [H, D], powers of two equal within a RoPE pair, divides the K
    of pages that K's matrix must not touch. `k_mean` [H, D]: K's mean before RoPE, or none. `strength_k`, `strength_v` [H, D / 16]: how
    much noise costs in a group of channels, or none where all groups get the same bits. `profile` names all this in every header."""

    k_scale: np.ndarray
    k_matrix: np.ndarray
    v_matrix: np.ndarray
    k_mean: np.ndarray | None = None
    strength_k: np.ndarray | None = None
    strength_v: np.ndarray | None = None
    profile: int = 0

    @classmethod
    def plain(cls, kv_heads: int, head_dim: int) -> KVBasis:
        """For a model of which nothing is known: a rotation."""
        rotation = np.broadcast_to(hadamard(head_dim), (kv_heads, head_dim, head_dim))
        return cls(np.ones((kv_heads, head_dim), np.float32), rotation, rotation)

    @classmethod
    def from_weights(cls, wq: np.ndarray, wk: np.ndarray, wv: np.ndarray, wo: np.ndarray, kv_heads: int,
                     k_mean: np.ndarray | None = None) -> KVBasis:
        """From projections as a checkpoint holds them, the norm's gain multiplied into their columns: wq [heads · D, width], wk and wv
        [H · D, width], wo [width, heads · D]. Moments are those of inputs of unit variance. K: scales and a rotation, because only
        what treats both channels of a RoPE pair alike can be known before a position; V: its whole matrix, all groups the same bits."""
        size = len(wk) // kv_heads
        q, k, v = (w.astype(np.float64).reshape(kv_heads, -1, size, w.shape[1]) for w in (wq, wk, wv))
        o = wo.T.astype(np.float64).reshape(kv_heads, -1, size, len(wo))
        ratio = _pairs(np.square(k).sum((1, 3))) / np.maximum(_pairs(np.square(q).sum((1, 3))), 1e-30)
        k_scale = np.exp2(np.rint(np.log2(np.maximum(ratio, 1e-30)) / 4)).astype(np.float32)
        v_matrix, _ = noise_basis(_moment(v), _moment(o))
        rotation = hadamard(size)
        return cls(k_scale, rotation / k_scale[:, None], (rotation @ v_matrix).astype(np.float32), k_mean)

    @classmethod
    def from_moments(cls, k: np.ndarray, q: np.ndarray, v: np.ndarray, o: np.ndarray, k_mean: np.ndarray | None = None,
                     profile: int = 0) -> KVBasis:
        """From second moments [H, D, D] of recorded K after RoPE (around the mean of 32 tokens: a zero removes the rest), of the queries
        that read it, of V, and of W_o's columns. Groups are rotated within themselves alone, so that each keeps its own strength."""
        size = k.shape[-1]
        k_scale = (_pairs(np.diagonal(k, axis1=1, axis2=2)) / np.maximum(_pairs(np.diagonal(q, axis1=1, axis2=2)), 1e-30)) ** 0.25
        rotation = hadamard(size, CHANNELS)
        (k_matrix, k_left), (v_matrix, v_left) = noise_basis(_ridged(k), _ridged(q)), noise_basis(_ridged(v), _ridged(o))
        strengths = (left.reshape(len(left), -1, CHANNELS).sum(-1) for left in (k_left, v_left))
        return cls(np.exp2(np.rint(np.log2(np.maximum(k_scale, 1e-8)))).astype(np.float32), (rotation @ k_matrix).astype(np.float32),
                   (rotation @ v_matrix).astype(np.float32), k_mean, *strengths, profile)

    @cached_property
    def k_inverse(self) -> np.ndarray:
        return np.linalg.inv(self.k_matrix.astype(np.float64)).astype(np.float32)

    @cached_property
    def v_inverse(self) -> np.ndarray:
        return np.linalg.inv(self.v_matrix.astype(np.float64)).astype(np.float32)

    def widths(self, bits_k: int, bits_v: int) -> tuple[np.ndarray, np.ndarray]:
        """Bits of each group, int [H, D / 16], of K and of V."""
        heads, size = self.k_scale.shape
        sides = []
        for strength, bits in ((self.strength_k, bits_k), (self.strength_v, bits_v)):
            even = np.full((heads, size // CHANNELS), bits)
            sides.append(even if strength is None else np.array([allocate(row, bits) for row in strength]))
        return sides[0], sides[1]

    def head(self, index: int) -> KVBasis:
        """The basis of one head: heads of a layer may have different bits."""
        one = slice(index, index + 1)
        sides = {name: None if (side := getattr(self, name)) is None else side[one] for name in
                 ("k_scale", "k_matrix", "v_matrix", "k_mean", "strength_k", "strength_v")}
        return replace(self, **sides)


def allocate(strength: np.ndarray, bits: int) -> list[int]:
    """Bits of groups [n], `bits` on average and one of `WIDTHS` each: given one after another where they remove the most noise. It comes
    out even: only 6 → 8 takes two bits, and a single bit cannot be left over when all groups have 6 or 8."""
    given, left = [1] * len(strength), (bits - 1) * len(strength)
    while left:
        best, gain, step = 0, -1.0, 0
        for group, now in enumerate(given):
            more = next((width - now for width in WIDTHS if width > now), left + 1)
            removed = float(strength[group]) ** 2 * (4.0**-now - 4.0 ** -(now + more)) / more
            if more <= left and removed > gain:
                best, gain, step = group, removed, more
        given[best] += step
        left -= step
    return given


def noise_basis(signal: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moments A, B [H, D, D] -> (T [H, D, D] as in the module's text, its diagonal [H, D], descending)."""
    root = np.linalg.cholesky(signal)
    u, squares, _ = np.linalg.svd(root.swapaxes(1, 2) @ weight @ root)
    return squares[..., None] ** 0.25 * u.swapaxes(1, 2) @ np.linalg.inv(root), np.sqrt(squares)


def _pairs(power: np.ndarray) -> np.ndarray:
    """Power [H, D] summed over RoPE pairs (c, c + D / 2), given to both."""
    first, second = np.split(power, 2, -1)
    return np.tile(first + second, 2)


def _moment(rows: np.ndarray) -> np.ndarray:
    """[H, group, D, width] -> [H, D, D]; a ridge of 1e-9 lets a dead channel be inverted."""
    return _ridged(np.einsum("hgdw,hgew->hde", rows, rows), 1e-9)


def _ridged(moment: np.ndarray, ridge: float = RIDGE) -> np.ndarray:
    power = np.trace(moment, axis1=1, axis2=2) / moment.shape[-1]
    return moment + (ridge * power + 1e-30)[:, None, None] * np.eye(moment.shape[-1])
