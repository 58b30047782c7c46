"""Reference for RWKV 7, in NumPy and float64 (arXiv 2503.14456).

T tokens, D channels in H heads of width N. The state is S [H, N, N], with a row per value channel. Per token: every column decays by its
own factor, the component along a removal key is taken out and partly put back per channel, the outer product of value and key is added, and
the receptance reads S.
"""

from __future__ import annotations

import numpy as np

from .reference import normalise

SLOWEST = 0.6065306597126334  # exp(-1/2): in one step no channel decays by more than exp(-SLOWEST)
EPS = 1e-12  # minimum length that a removal key is divided by


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * np.asarray(x, np.float64))


def shifted(rows: np.ndarray, before: np.ndarray, mix: np.ndarray) -> list[np.ndarray]:
    """rows [T, D], `before` [D] the row before the first, mix [C, D] -> each row interpolated towards the previous one (token shift), C
    times [T, D]."""
    x = rows.astype(np.float64)
    previous = np.concatenate([before[None], x[:-1]])
    return [x + (previous - x) * share for share in mix.astype(np.float64)]


def blended(values: np.ndarray, first: np.ndarray, share: np.ndarray) -> np.ndarray:
    """values [T, D] interpolated towards those of the first layer by sigmoid(share)."""
    wide = values.astype(np.float64)
    return wide + (first - wide) * sigmoid(share)


def gates(k: np.ndarray, w: np.ndarray, a: np.ndarray, direction: np.ndarray, rate: np.ndarray,
          heads: int) -> tuple[np.ndarray, ...]:
    """Raw keys, decays and rates [T, D], direction and rate [D] -> (keys, decays, removal keys, replacement keys), [T, D] each."""
    k, rate_in_context = k.astype(np.float64), sigmoid(a)
    removed = (k * direction).reshape(len(k), heads, -1)
    removed = (removed / np.maximum(np.linalg.norm(removed, axis=-1, keepdims=True), EPS)).reshape(k.shape)
    return k * (1 + (rate_in_context - 1) * rate), np.exp(-SLOWEST * sigmoid(w)), removed, removed * rate_in_context


def recur(r: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, removed: np.ndarray, put: np.ndarray,
          state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All [T, D], and S [H, N, N] -> (outputs [T, D], state after the last token)."""
    s, out = state.astype(np.float64), np.zeros(r.shape)
    parts = (part.astype(np.float64).reshape(len(r), len(s), -1) for part in (r, k, v, decay, removed, put))
    for t, (reads, key, value, left, out_of, replacement) in enumerate(zip(*parts)):
        removal = (s @ out_of[:, :, None])[:, :, 0]
        s = s * left[:, None] - removal[:, :, None] * replacement[:, None] + value[:, :, None] * key[:, None]
        out[t] = (s @ reads[:, :, None]).reshape(-1)
    return out, s


def finished(out: np.ndarray, r: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, bonus: np.ndarray, weight: np.ndarray,
             bias: np.ndarray | None, eps: float, heads: int) -> np.ndarray:
    """Outputs [T, D] normed per head, plus the token's own values weighted by a bonus term, times gates g."""
    split = [part.astype(np.float64).reshape(len(out), heads, -1) for part in (out, r, k, v)]
    read = normalise(split[0], "layer", np.ones(split[0].shape[-1]), None, eps).reshape(out.shape) * weight + (0 if bias is None else bias)
    bonus_term = (split[1] * split[2] * bonus.reshape(heads, -1)).sum(-1, keepdims=True) * split[3]
    return (read + bonus_term.reshape(out.shape)) * g
