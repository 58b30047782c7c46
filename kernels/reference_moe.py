"""The meaning of a mixture of experts, in NumPy and float64; what `reference.py` is to the other ops.

T tokens, E experts, k of them per token, F the width inside an expert. A (token, expert) pair is one visit; visits are numbered expert by
expert and, within an expert, token by token, so that an expert's tokens lie together. An expert that all tokens share counts in none of
these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import reference

if TYPE_CHECKING:
    from ..quant.weight import Apart, Expert, Linear, Norm, SharedExpert

SMALLEST_SUM = 1e-20  # that shares are divided by: scores of a sigmoid may all be next to nothing


@dataclass(frozen=True)
class Routed:
    """Who went where. Expert e made visits offsets[e]:offsets[e + 1] of `offsets` int64 [E + 1]; `tokens` int64 [T k] is each visit's
    token, `hidden` float32 [T k, F] what went into its expert's `down`, `shared` [T, S] what went into that of the shared expert. Behind
    the last offset are visits of experts without matrices, of which `hidden` says nothing."""

    offsets: np.ndarray
    tokens: np.ndarray
    hidden: object
    shared: object | None = None


@dataclass(frozen=True)
class Routing:
    """How a token's `per_token` experts are found and weighed: those of the largest scores, which are the softmax of the router's logits or
    with `sigmoid` the sigmoid of each, with `roots` the square root of its softplus. A share is its expert's score, with `renormalise` over
    the sum of those chosen, times `factor`. A correction is of scores, with `of_logits` of logits.

    With `inputs` shares multiply what goes into experts, not what they give. With `near` an expert's share is its part of the exponentials
    of those logits alone that are no larger and come near it: that lie by at most `near` of themselves, or of its own if that is larger,
    below it.

    Experts lie in `groups`, one behind the other; where fewer are kept, a token's experts are in the `kept_groups` of the largest: of a
    choice by corrected scores those with the largest sum of two, else those with the largest one.

    The last `handed` of those that are chosen among have no matrices: they hand on what they are given, norm(x)."""

    per_token: int
    renormalise: bool
    sigmoid: bool = False
    factor: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    inputs: bool = False
    near: float | None = None
    of_logits: bool = False
    roots: bool = False
    handed: int = 0


def scores(logits: np.ndarray, routing: Routing) -> np.ndarray:
    """Of every expert, [..., E]."""
    if routing.sigmoid:
        return np.exp(-np.logaddexp(0, -logits))
    if routing.roots:
        return np.sqrt(np.logaddexp(0, logits))
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def ranks(logits: np.ndarray, routing: Routing, correction: np.ndarray | None) -> np.ndarray:
    """What the choice goes by, [..., E]: without a correction logits, which tell apart what scores no longer do; -inf of experts in groups
    that are not kept."""
    by = logits if correction is None else (logits if routing.of_logits else scores(logits, routing)) + correction
    if routing.kept_groups == routing.groups:
        return by
    grouped = by.reshape(*by.shape[:-1], routing.groups, -1)
    of_group = np.sort(grouped, -1)[..., -1 if correction is None else -2 :].sum(-1)
    left_out = np.argsort(-of_group, -1, kind="stable")[..., routing.kept_groups :]
    kept = np.ones(of_group.shape, bool)
    np.put_along_axis(kept, left_out, False, -1)
    return np.where(kept[..., None], grouped, -np.inf).reshape(by.shape)


def route(logits: np.ndarray, routing: Routing, correction: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """logits [T, E] -> experts int64 [T, k] in rising order and their shares [T, k]. Ties go to the lower expert.

    `correction` [E], or [T, E] where every token has its own, is added to scores, or to logits, for the choice, not for the shares (load
    balance without a loss: L. Wang et al. 2024, arXiv:2408.15664).
    """
    by = ranks(logits, routing, correction)
    chosen = np.sort(np.argsort(-by, axis=1, kind="stable")[:, : routing.per_token], axis=1)
    if routing.near is not None:
        return chosen, routing.factor * near_shares(logits, chosen, routing.near)
    shares = np.take_along_axis(scores(logits, routing), chosen, 1)
    return chosen, routing.factor * (shares / np.maximum(shares.sum(1, keepdims=True), SMALLEST_SUM) if routing.renormalise else shares)


def near_shares(logits: np.ndarray, chosen: np.ndarray, near: float) -> np.ndarray:
    """Shares [T, k] as `Routing` says of `near`; among equal logits the lower expert counts as the larger."""
    own = np.take_along_axis(logits, chosen, 1)[..., None]  # [T, k, 1]
    every, numbers = logits[:, None], np.arange(logits.shape[1])
    lower = (every < own) | (every == own) & (numbers >= chosen[..., None])
    counted = lower & (own - every <= near * np.maximum(np.abs(every), own))
    return 1 / (np.exp(np.where(counted, every - own, -np.inf))).sum(-1)


def visits(chosen: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets, tokens, places): places int64 [T, k] is the visit of each choice; the others are as in `Routed`."""
    order = np.argsort(chosen.reshape(-1), kind="stable")
    places = np.empty(order.size, np.int64)
    places[order] = np.arange(order.size)
    offsets = np.searchsorted(chosen.reshape(-1)[order], np.arange(experts + 1))
    return offsets.astype(np.int64), order // chosen.shape[1], places.reshape(chosen.shape)


def moe(x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], routing: Routing, act: str,
        correction: np.ndarray | None = None, shared: SharedExpert | None = None,
        apart: Apart | None = None, said: np.ndarray | None = None) -> tuple[np.ndarray, Routed]:
    """x + sum over a token's experts of share * down(act(gate(n)) * up(n)), n = norm(x): float64 [T, D], and the visits; `act` as in
    `reference.gated`. Without gates it is share * down(act(up(n))). The `shared` expert is added with a share of 1, or of
    sigmoid(scale(n)).

    An expert to which no token goes is not looked at. `apart`: the sum alone, without x, of experts that another norm stands before than
    before the router, each times its scale; `said`: what the router reads where that is no norm of x. Where shares are of inputs an expert
    gives down(act(gate(share * n)) * up(share * n)).
    """
    n = reference.normalise(x, *_norm(norm))
    apply = lambda values, each: reference.linear(values, each.weight.to_f32(), each.bias)  # noqa: E731

    def inside(values: np.ndarray, expert: Expert, act: str = act) -> np.ndarray:
        up = apply(values, expert.up)
        return reference.activate(up, act) if expert.gate is None else reference.gated(apply(values, expert.gate), up, act)

    reads = said if said is not None else n if apart is None else reference.normalise(x, *_norm(apart.router_norm))
    chosen, shares = route(apply(reads, router), routing, correction)
    if apart is not None:
        shares = shares * apart.scales[chosen]
    offsets, tokens, places = visits(chosen, len(experts) + routing.handed)
    of_visit = np.empty(tokens.size)
    of_visit[places] = shares
    out, hidden = x.astype(np.float64) * (apart is None), []
    for expert, begin, end in zip(experts, offsets[:-1], offsets[1:]):
        if begin == end:
            continue
        rows, own = tokens[begin:end], of_visit[begin:end, None]
        hidden.append(inside(n[rows] * own if routing.inputs else n[rows], expert))
        out[rows] += (1.0 if routing.inputs else own) * apply(hidden[-1], expert.down)
    begin, offsets = offsets[len(experts)], offsets[: len(experts) + 1]
    np.add.at(out, tokens[begin:], of_visit[begin:, None] * n[tokens[begin:]])  # what is handed on
    of_all = None
    if shared is not None:
        of_all = inside(n, shared, shared.act or act)
        if shared.scale is not None:
            of_all = of_all / (1 + np.exp(-apply(n, shared.scale)))
        out += shared.factor * apply(of_all, shared.down)
        of_all = of_all.astype(np.float32)
    inner = np.concatenate(hidden) if hidden else np.zeros((0, experts[0].up.weight.shape[0]))
    return out, Routed(offsets, tokens, inner.astype(np.float32), of_all)


def _norm(norm: Norm) -> tuple[str, np.ndarray | None, np.ndarray | None, float]:
    return norm.kind, norm.weight, norm.bias, norm.eps
