"""The basis in which K and V are quantized, and the bits per channel group, from the model's weights or a recorded profile.

Noise in K does damage through the queries, noise in V through W_o. Let A be the second moment of K (or V), and B that of what it is
multiplied with. The matrix T for which T A Tᵀ = T⁻ᵀ B T⁻¹ is diagonal makes noise equally costly in every direction. The values on that
diagonal say how many bits a direction deserves (reverse water-filling, in groups of 16 channels).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from ..kernels.blas import one_thread
from ..kernels.kv_layout import GROUP_CHANNELS
from .kv_bits import WIDTHS, allocate

MOST = max(WIDTHS)
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
        """Basis for a model of which nothing is known: a Hadamard rotation."""
        rotation = np.broadcast_to(hadamard(head_dim), (kv_heads, head_dim, head_dim))
        return cls(np.ones((kv_heads, head_dim), np.float32), rotation, rotation)

    @classmethod
    def from_moments(cls, k: np.ndarray, price_k: np.ndarray, v: np.ndarray, price_v: np.ndarray, k_page: np.ndarray | None = None,
                     k_mean: np.ndarray | None = None, profile: int = 0) -> KVBasis:
        """From second moments [H, D, D] of recorded K after RoPE (around the mean of 32 tokens: a zero removes the rest) and of V, and
        from what noise in them costs (`kv_noise_cost.Moments`). Strengths keep the unit of the prices, so layers can be compared. `k_page`
        [H, D]: the usual power of K's channels in a page, against which a page shows a pair that is far above it."""
        pairs = _pairs(np.diagonal(k, axis1=1, axis2=2) if k_page is None else k_page) / 2
        (k_matrix, strength_k), (v_matrix, strength_v) = _by_groups(k, price_k), _by_groups(v, price_v)
        return cls(_power_of_two(np.sqrt(pairs)), k_matrix, v_matrix, k_mean, strength_k, strength_v, profile)

    @cached_property
    def k_inverse(self) -> np.ndarray:
        return _inverse(self.k_matrix)

    @cached_property
    def v_inverse(self) -> np.ndarray:
        return _inverse(self.v_matrix)

    def widths(self, bits_k: int | Sequence[int], bits_v: int | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Bits of each group, int [H, D / 16], of K and of V, where sides have these bits on average: one number, or one a head."""
        heads, size = self.k_scale.shape
        sides = []
        for strength, bits in ((self.strength_k, bits_k), (self.strength_v, bits_v)):
            each = np.broadcast_to(bits, heads)
            even = np.repeat(each[:, None], size // GROUP_CHANNELS, 1)
            sides.append(even if strength is None else np.array([allocate(*row) for row in zip(strength, each.tolist(), strict=True)]))
        return sides[0], sides[1]

    def spread(self, bits_k: Sequence[int], bits_v: Sequence[int]) -> KVBasis:
        """The basis for sides of these bits, one number a head. Where all groups have the most bits that there are, none can be given
        more, and noise is least if strong and weak directions share it: a rotation over the whole head."""
        k_matrix, v_matrix = (matrix if strength is None else _mixed(matrix, strength, np.array(bits) == MOST) for matrix, strength, bits in
                              ((self.k_matrix, self.strength_k, bits_k), (self.v_matrix, self.strength_v, bits_v)))
        return replace(self, k_matrix=k_matrix, v_matrix=v_matrix)

    def head(self, index: int) -> KVBasis:
        """The basis of one head: heads of a layer may have different bits. Inverses that are known come with it: who opens page after
        page would make them for each."""
        one = slice(index, index + 1)
        sides = {name: None if (side := getattr(self, name)) is None else side[one] for name in
                 ("k_scale", "k_matrix", "v_matrix", "k_mean", "strength_k", "strength_v")}
        basis = replace(self, **sides)
        vars(basis).update({name: vars(self)[name][one] for name in ("k_inverse", "v_inverse") if name in vars(self)})
        return basis


def _inverse(matrices: np.ndarray) -> np.ndarray:
    """Of each float [H, D, D], float32. On one thread: beside a busy process two took a hundred times as long for a head of 128."""
    with one_thread():
        return np.linalg.inv(matrices.astype(np.float64)).astype(np.float32)


def noise_basis(signal: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moments A, B [H, D, D] -> (T [H, D, D] as in the module's text, its diagonal [H, D], descending)."""
    root = np.linalg.cholesky(signal)
    u, squares, _ = np.linalg.svd(root.swapaxes(1, 2) @ weight @ root)
    return squares[..., None] ** 0.25 * u.swapaxes(1, 2) @ np.linalg.inv(root), np.sqrt(squares)


def _by_groups(signal: np.ndarray, price: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moments [H, D, D] -> (matrix float32 [H, D, D], strongest directions first; strengths of its groups of 16 [H, D / 16]).

    Groups are rotated within themselves alone, so that each keeps its own strength, and scaled so that the noise of bits given by
    strength is equally large in all: V's groups share one largest scale. The strongest group has a power of 1. The ridge is added where
    channels have been balanced by powers of two: it does not ask in which units they came."""
    heads, size, _ = signal.shape
    power, cost = (np.maximum(np.diagonal(moment, axis1=1, axis2=2), 1e-30) for moment in (signal, price))
    scale = _power_of_two((power / cost) ** 0.25)
    across = scale[:, :, None] * scale[:, None]
    turn, left = noise_basis(_ridged(signal / across), _ridged(price * across))
    strength = left.reshape(heads, -1, GROUP_CHANNELS).sum(-1).astype(np.float32)
    return (hadamard(size, GROUP_CHANNELS) @ (_gain(strength) * turn / scale[:, None])).astype(np.float32), strength


def _gain(strength: np.ndarray) -> np.ndarray:
    """By how much the rows of groups of these strengths [H, D / 16] are scaled, [H, D, 1]."""
    return np.repeat(np.sqrt(GROUP_CHANNELS * strength) / strength[:, :1], GROUP_CHANNELS, 1)[..., None]


def _mixed(matrix: np.ndarray, strength: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Matrices [H, D, D] with the groups' scales undone and a rotation across groups, in the heads `which`."""
    whole = hadamard(matrix.shape[-1]) @ (matrix / _gain(strength))
    return np.where(which[:, None, None], whole / np.sqrt(strength[:, :1, None] / GROUP_CHANNELS), matrix).astype(np.float32)


def _power_of_two(x: np.ndarray) -> np.ndarray:
    """The nearest, float32."""
    return np.exp2(np.rint(np.log2(np.clip(x, 2.0**-60, 2.0**60)))).astype(np.float32)


def _pairs(power: np.ndarray) -> np.ndarray:
    """Power [H, D] summed over RoPE pairs (c, c + D / 2), given to both."""
    first, second = np.split(power, 2, -1)
    return np.tile(first + second, 2)


def _ridged(moment: np.ndarray) -> np.ndarray:
    power = np.trace(moment, axis1=1, axis2=2) / moment.shape[-1]
    return moment + (RIDGE * power + 1e-30)[:, None, None] * np.eye(moment.shape[-1])
