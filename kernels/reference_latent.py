"""Reference for latent attention's absorbed projections, in NumPy and float64."""

from __future__ import annotations

import numpy as np

from . import reference
from .latent_shape import LatentShape


def keys(y: np.ndarray, shape: LatentShape, norm: tuple[str, np.ndarray, np.ndarray | None, float]) -> np.ndarray:
    """y [T, rank + rope] -> [T, rope + rank] with the latent normed; `norm`: kind, weight, bias and epsilon."""
    return np.concatenate([y[:, shape.rank :], reference.normalise(y[:, : shape.rank], *norm)], axis=1)


def queries(y: np.ndarray, heads: int, shape: LatentShape, kv_b: np.ndarray) -> np.ndarray:
    """y [T, heads * (nope + rope)] -> [T, heads * (rope + rank)]: queries whose scores with latents equal those of y with the keys that
    `kv_b` [heads * (nope + value), rank] would make of the latents."""
    split, per_head = y.reshape(len(y), heads, shape.query).astype(np.float64), kv_b.reshape(heads, shape.kv_b_rows, shape.rank)
    absorbed = np.einsum("thn,hnr->thr", split[..., : shape.nope], per_head[:, : shape.nope])
    return np.concatenate([split[..., shape.nope :], absorbed], axis=2).reshape(len(y), -1)


def values(x: np.ndarray, heads: int, shape: LatentShape, kv_b: np.ndarray) -> np.ndarray:
    """x [T, heads * (rope + rank)], sums of cached keys -> [T, heads * value]: the same sums over the values that `kv_b` would make of
    them."""
    split, per_head = x.reshape(len(x), heads, shape.key).astype(np.float64), kv_b.reshape(heads, shape.kv_b_rows, shape.rank)
    return np.einsum("thr,hvr->thv", split[..., shape.rope :], per_head[:, shape.nope :]).reshape(len(x), -1)
