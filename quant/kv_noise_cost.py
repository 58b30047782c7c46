"""Cost of quantization noise in keys and values, from one run of a text through a layer: moments for `KVBasis.from_moments`.

A query with probabilities p reads o = Σ p_t v_t and adds W_o o to the residual stream x. Noise e in key t moves the score by q · e, o by
p_t (q · e) (v_t - o); noise in value t moves o by p_t e. So the cost of noise in K is its moment against the sum of p_t² |W_o (v_t -
o)|² q qᵀ, that in V its moment against Σ p_t² W_oᵀ W_o, both over |x|²: errors of different layers and heads are then in one unit, and
on the reference model within a factor of two of what backpropagation says. Only keys that would be packed for the query count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..kernels.kv_layout import GROUP_CHANNELS, GROUP_K
from ..kernels.layout import PAGE
from .kv_basis import KVBasis
from .kv_bits import SIDES, side_cost

MOST_TRIED = 4  # bits of a side: noise of more is small, and falls by its rule
NARROWED = {1: 0.42, 2: 0.78, 3: 0.92, 4: 0.96}  # a group's range, where few codes serve the middle better


@dataclass(frozen=True)
class AttentionParams:
    """How a layer's queries read its cache. `window`: a query at p sees keys later than p - window."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: int = 64
    exact: int = 128  # newest tokens

    def first_packed_query(self) -> int:
        """The first position whose query sees a packed page."""
        return self.sinks + PAGE + self.exact


class Moments:
    """Sums over windows of text for one layer of H KV heads: second moments [H, D, D] of K (around the mean of 32 tokens: a zero removes
    the rest) and of V, what noise in either costs, and the power [H, D] of K's channels around their mean over a page."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self.k, self.v, self.price_k, self.price_v = np.zeros((4, kv_heads, head_dim, head_dim))
        self.k_page = np.zeros((kv_heads, head_dim))
        self.windows = 0

    def add(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, gram: np.ndarray, rows: np.ndarray, reading: AttentionParams,
            sinks: np.ndarray | None = None) -> None:
        """One window: q float32 [heads, rows, D] at positions `rows`, k (both after RoPE) and v [H, T, D], `gram` [heads, D, D] = W_oᵀ W_o
        of each query head over the mean of |x|², `sinks` [heads] learned logits of nothing."""
        group = len(q) // len(k)
        whole = k.shape[1] // GROUP_K * GROUP_K
        near = k[:, :whole].reshape(len(k), -1, GROUP_K, k.shape[-1])
        self.k += _moment((near - near.mean(2, keepdims=True)).reshape(len(k), whole, -1))
        pages = k[:, : k.shape[1] // PAGE * PAGE].reshape(len(k), -1, PAGE, k.shape[-1])
        self.k_page += pages.var(2).mean(1)
        self.v += _moment(v)
        seen, packed = visible(rows, k.shape[1], reading)
        for head in range(len(q)):
            at = head // group
            price_k, price_v = _prices(q[head], k[at], v[at], gram[head].astype(np.float32), seen, packed, reading, sink_of(sinks, head))
            self.price_k[at] += price_k
            self.price_v[at] += price_v * gram[head]
        self.windows += 1

    @property
    def are_finite(self) -> bool:
        return all(np.isfinite(total).all() for total in (self.k, self.price_k, self.v, self.price_v, self.k_page))

    @property
    def means(self) -> tuple[np.ndarray, ...]:
        """K, the price of its noise, V, the price of its noise, K's power within pages: what `KVBasis.from_moments` takes."""
        return tuple(total / max(1, self.windows) for total in (self.k, self.price_k, self.v, self.price_v, self.k_page))


def _prices(q: np.ndarray, k: np.ndarray, v: np.ndarray, gram: np.ndarray, seen: np.ndarray, packed: np.ndarray,
            reading: AttentionParams, sink: float) -> tuple[np.ndarray, float]:
    """A query head's price of noise in K [D, D], and its Σ p² of packed keys, both the mean over its queries."""
    scores, slope = scores_of(q, k, seen, reading)
    p = softmax(scores, sink)
    o, turned = p @ v, v @ gram
    away = (turned * v).sum(1) - 2 * (o @ turned.T) + ((o @ gram) * o).sum(1)[:, None]
    p *= packed
    p *= p
    weight = (p * np.maximum(away, 0) * slope * slope).sum(1, dtype=np.float64) * reading.scale**2
    weighted = q * np.sqrt(weight)[:, None]
    return weighted.T @ weighted / len(q), float(p.sum(dtype=np.float64)) / len(q)


def scores_of(q: np.ndarray, k: np.ndarray, seen: np.ndarray, reading: AttentionParams) -> tuple[np.ndarray, np.ndarray | np.float32]:
    """Scores [rows, T], and by how much they follow q · k (a soft cap bends them)."""
    scores, slope = (q @ k.T) * np.float32(reading.scale), np.float32(1)
    if reading.softcap:
        bent = np.tanh(scores / np.float32(reading.softcap))
        scores, slope = bent * np.float32(reading.softcap), 1 - bent * bent
    scores[~seen] = -np.inf
    return scores, slope


def softmax(scores: np.ndarray, sink: float) -> np.ndarray:
    top = np.maximum(scores.max(1, keepdims=True), np.float32(sink))
    p = np.exp(scores - top)
    p /= p.sum(1, keepdims=True) + np.exp(np.float32(sink) - top)
    return p


def sink_of(sinks: np.ndarray | None, head: int) -> float:
    return -np.inf if sinks is None else float(sinks[head])


def visible(rows: np.ndarray, tokens: int, reading: AttentionParams) -> tuple[np.ndarray, np.ndarray]:
    """bool [rows, tokens]: keys that queries at `rows` see, and those of them that would be packed."""
    at, keys = rows[:, None], np.arange(tokens)[None]
    seen = keys <= at
    if reading.window:
        seen &= keys > at - reading.window
    sealed = reading.sinks + (at - reading.sinks - reading.exact) // PAGE * PAGE
    return seen, seen & (keys >= reading.sinks) & (keys < sealed)


def _moment(x: np.ndarray) -> np.ndarray:
    """[H, T, D] -> float64 [H, D, D]."""
    return (x.swapaxes(1, 2) @ x).astype(np.float64) / x.shape[1]


def trial_costs(q: np.ndarray, k: np.ndarray, v: np.ndarray, gram: np.ndarray, rows: np.ndarray, reading: AttentionParams,
           basis: KVBasis, sinks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What a layer's K and V cost at each of `kv_bits.SIDES`, float64 [H, sides] each: the error of attention's output in the unit of the
    prices, measured with rounded packed keys and values where it is not small, else by the rule that noise falls by. Arguments as of
    `Moments.add`, and the basis that the layer will have."""
    group, measured = len(q) // len(k), [bits for bits in SIDES if bits <= MOST_TRIED]
    seen, packed = visible(rows, k.shape[1], reading)
    whole = slice(reading.sinks, reading.sinks + (k.shape[1] - reading.sinks) // PAGE * PAGE)
    cost_k, cost_v = np.zeros((2, len(k), len(measured)))
    for at in range(len(k)):
        one = basis.head(at)
        heads = range(at * group, (at + 1) * group)
        exact = [scores_of(q[head], k[at], seen, reading)[0] for head in heads]
        probabilities = [softmax(scores, sink_of(sinks, head)) for head, scores in zip(heads, exact, strict=True)]
        o = [p @ v[at] for p in probabilities]
        for place, bits in enumerate(measured):
            widths_k, widths_v = one.widths(bits, bits)
            k_there, v_there = k[at].copy(), np.zeros_like(v[at])
            k_there[whole] = rounded(k[at][whole] @ one.k_matrix[0].T, widths_k[0], GROUP_K) @ one.k_inverse[0].T
            v_there[whole] = rounded(v[at][whole] @ one.v_matrix[0].T, widths_v[0], 1) @ one.v_inverse[0].T - v[at][whole]
            for head, scores, p, there in zip(heads, exact, probabilities, o, strict=True):
                moved = np.where(packed, scores_of(q[head], k_there, seen, reading)[0], scores)
                cost_k[at, place] += power_of(softmax(moved, sink_of(sinks, head)) @ v[at] - there, gram[head])
                cost_v[at, place] += power_of((p * packed) @ v_there, gram[head])
    return extrapolated_costs(cost_k, basis.strength_k), extrapolated_costs(cost_v, basis.strength_v)


def extrapolated_costs(measured: np.ndarray, strength: np.ndarray) -> np.ndarray:
    """Costs of sides [H, bits], measured at the first of `kv_bits.SIDES`, extended to all of them by the rule of how noise falls with
    bits."""
    count = measured.shape[1]
    laws = np.array([[side_cost(row, bits) for bits in SIDES[count - 1 :]] for row in strength])
    return np.concatenate([measured, measured[:, -1:] * laws[:, 1:] / laws[:, :1]], 1)


def power_of(error: np.ndarray, gram: np.ndarray) -> float:
    return float(((error @ gram.astype(np.float32)) * error).sum(dtype=np.float64)) / len(error)


def rounded(x: np.ndarray, widths: np.ndarray, tokens: int) -> np.ndarray:
    """x [T, D] as a record would hold it, nearly: ends of a group of `tokens` × 1 channel (one token: of 16 channels) a little narrowed,
    scale and zero not rounded, none tried."""
    out = np.empty_like(x)
    for group, bits in enumerate(widths.tolist()):
        where = slice(GROUP_CHANNELS * group, GROUP_CHANNELS * (group + 1))
        part = x[:, where].reshape(-1, tokens, GROUP_CHANNELS)
        axis = 1 if tokens > 1 else 2
        low, high = part.min(axis, keepdims=True), part.max(axis, keepdims=True)
        top = np.float32((1 << bits) - 1)
        scale = np.maximum((high - low) * np.float32(NARROWED.get(bits, 1.0)) / top, np.float32(1e-20))
        least = (high + low) / 2 - scale * top / 2
        out[:, where] = (np.rint(np.clip((part - least) / scale, 0, top)) * scale + least).reshape(-1, GROUP_CHANNELS)
    return out
