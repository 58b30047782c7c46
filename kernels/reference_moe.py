"""The meaning of a mixture of experts, in NumPy and float64; what `reference.py` is to the other ops.

T tokens, E experts, k of them per token, F the width inside an expert. A (token, expert) pair is one visit; visits are numbered expert by
expert and, within an expert, token by token, so that an expert's tokens lie together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import reference

if TYPE_CHECKING:
    from ..quant.weight import Expert, Linear, Norm


@dataclass(frozen=True)
class Routed:
    """Who went where. Expert e made visits offsets[e]:offsets[e + 1] of `offsets` int64 [E + 1]; `tokens` int64 [T k] is each visit's
    token, `hidden` float32 [T k, F] what went into its expert's `down`."""

    offsets: np.ndarray
    tokens: np.ndarray
    hidden: object


def route(logits: np.ndarray, top_k: int, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """logits [T, E] -> experts int64 [T, k] in rising order and their shares [T, k]: the softmax over all experts at the k largest.

    Ties go to the lower expert. `renormalise`: shares of a token add up to 1 (the softmax over the chosen alone).
    """
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    chosen = np.sort(order, axis=1)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    shares = np.take_along_axis(powers, chosen, 1)
    return chosen, shares / (shares if renormalise else powers).sum(1, keepdims=True)


def visits(chosen: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets, tokens, places): places int64 [T, k] is the visit of each choice; the others are as in `Routed`."""
    order = np.argsort(chosen.reshape(-1), kind="stable")
    places = np.empty(order.size, np.int64)
    places[order] = np.arange(order.size)
    offsets = np.searchsorted(chosen.reshape(-1)[order], np.arange(experts + 1))
    return offsets.astype(np.int64), order // chosen.shape[1], places.reshape(chosen.shape)


def moe(x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], top_k: int, renormalise: bool,
        act: str) -> tuple[np.ndarray, Routed]:
    """x + sum over a token's experts of share * down(act(gate(n)) * up(n)), n = norm(x): float64 [T, D], and the visits; `act` as in
    `reference.gated`.

    An expert to which no token goes is not looked at.
    """
    n = reference.normalise(x, norm.kind, norm.weight, norm.bias, norm.eps)
    apply = lambda values, each: reference.linear(values, each.weight.to_f32(), each.bias)  # noqa: E731
    chosen, shares = route(apply(n, router), top_k, renormalise)
    offsets, tokens, places = visits(chosen, len(experts))
    of_visit = np.empty(tokens.size)
    of_visit[places] = shares
    out, hidden = x.astype(np.float64), []
    for expert, begin, end in zip(experts, offsets[:-1], offsets[1:]):
        if begin == end:
            continue
        rows = tokens[begin:end]
        hidden.append(reference.gated(apply(n[rows], expert.gate), apply(n[rows], expert.up), act))
        out[rows] += of_visit[begin:end, None] * apply(hidden[-1], expert.down)
    return out, Routed(offsets, tokens, np.concatenate(hidden).astype(np.float32))
