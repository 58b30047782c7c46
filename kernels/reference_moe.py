"""Reference for a mixture of experts, in NumPy and float64.

T tokens, E experts, k of them per token, F the expert FFN width. A (token, expert) pair is a visit. Visits are numbered expert by expert
and, within an expert, token by token, so that an expert's tokens are contiguous. A shared expert does not count among these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import reference

if TYPE_CHECKING:
    from ..quant.weight import Expert, Linear, Norm, ParallelExperts, SharedExpert

MIN_SUM = 1e-20  # lower bound of a divisor: all sigmoid scores may be almost zero


@dataclass(frozen=True)
class Routed:
    """Routing result. Expert e has visits offsets[e]:offsets[e + 1] of `offsets` int64 [E + 1]; `tokens` int64 [T k] is each visit's token,
    `hidden` float32 [T k, F] the input of its expert's `down`, `shared` [T, S] that of the shared expert. After the last offset come visits
    of experts without matrices, for which `hidden` holds nothing."""

    offsets: np.ndarray
    tokens: np.ndarray
    hidden: object
    shared: object | None = None


@dataclass(frozen=True)
class Routing:
    """How a token's experts are selected and weighted: by largest score, where scores are the softmax of the router's logits, or one of the
    functions below. An expert's weight is its score. A correction, if the layer has one, is added to the scores for selection only.

    Experts are in consecutive groups. If fewer than all are kept, a token's experts come from the best groups: by the sum of the top two
    scores if selection uses corrected scores, else by the top score.
    """

    experts_per_token: int
    renormalise: bool  # weights are divided by their sum over the selected experts
    sigmoid: bool = False  # scores are sigmoids of the logits
    routed_scale: float = 1.0  # multiplies the weights
    num_groups: int = 1
    top_groups: int = 1  # groups that are kept
    weights_scale_inputs: bool = False  # weights multiply the experts' inputs, not their outputs
    # A weight is the expert's share of the exponentials of only those logits that are no larger than its own and close to it: below it by
    # at most this fraction of their magnitude, or of its own if that is larger (SparseMixer). None: all logits.
    sparsemixer_margin: float | None = None
    correction_on_logits: bool = False  # the correction is added to the logits
    sqrt_softplus: bool = False  # scores are square roots of softplus of the logits
    zero_experts: int = 0  # so many last candidates have no matrices: they return their input, norm(x)


def scores(logits: np.ndarray, routing: Routing) -> np.ndarray:
    """Score of every expert, [..., E]."""
    if routing.sigmoid:
        return np.exp(-np.logaddexp(0, -logits))
    if routing.sqrt_softplus:
        return np.sqrt(np.logaddexp(0, logits))
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def ranks(logits: np.ndarray, routing: Routing, correction: np.ndarray | None) -> np.ndarray:
    """What experts are selected by, [..., E]: without a correction the logits, which differ where scores have saturated; -inf for experts
    in groups that are not kept."""
    criterion = logits if correction is None else (logits if routing.correction_on_logits else scores(logits, routing)) + correction
    if routing.top_groups == routing.num_groups:
        return criterion
    grouped = criterion.reshape(*criterion.shape[:-1], routing.num_groups, -1)
    group_score = np.sort(grouped, -1)[..., -1 if correction is None else -2 :].sum(-1)
    left_out = np.argsort(-group_score, -1, kind="stable")[..., routing.top_groups :]
    is_kept = np.ones(group_score.shape, bool)
    np.put_along_axis(is_kept, left_out, False, -1)
    return np.where(is_kept[..., None], grouped, -np.inf).reshape(criterion.shape)


def route(logits: np.ndarray, routing: Routing, correction: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """logits [T, E] -> experts int64 [T, k], ascending, and their weights [T, k]. Ties go to the lower expert.

    `correction` [E], or [T, E] if per token, is added to scores (or logits) for selection only, not for the weights (auxiliary-loss-free
    load balancing: L. Wang et al. 2024, arXiv:2408.15664).
    """
    criterion = ranks(logits, routing, correction)
    chosen = np.sort(np.argsort(-criterion, axis=1, kind="stable")[:, : routing.experts_per_token], axis=1)
    if routing.sparsemixer_margin is not None:
        return chosen, routing.routed_scale * sparsemixer_weights(logits, chosen, routing.sparsemixer_margin)
    shares = np.take_along_axis(scores(logits, routing), chosen, 1)
    return chosen, routing.routed_scale * (shares / np.maximum(shares.sum(1, keepdims=True), MIN_SUM) if routing.renormalise else shares)


def sparsemixer_weights(logits: np.ndarray, chosen: np.ndarray, margin: float) -> np.ndarray:
    """Weights [T, k] under `Routing.sparsemixer_margin`; among equal logits the lower expert counts as the larger."""
    chosen_logits = np.take_along_axis(logits, chosen, 1)[..., None]  # [T, k, 1]
    all_logits, numbers = logits[:, None], np.arange(logits.shape[1])
    lower = (all_logits < chosen_logits) | (all_logits == chosen_logits) & (numbers >= chosen[..., None])
    counted = lower & (chosen_logits - all_logits <= margin * np.maximum(np.abs(all_logits), chosen_logits))
    return 1 / (np.exp(np.where(counted, all_logits - chosen_logits, -np.inf))).sum(-1)


def visits(chosen: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets, tokens, places): places int64 [T, k] is the visit of each selection; the others are as in `Routed`."""
    order = np.argsort(chosen.reshape(-1), kind="stable")
    visit_of = np.empty(order.size, np.int64)
    visit_of[order] = np.arange(order.size)
    offsets = np.searchsorted(chosen.reshape(-1)[order], np.arange(experts + 1))
    return offsets.astype(np.int64), order // chosen.shape[1], visit_of.reshape(chosen.shape)


def moe(x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], routing: Routing, act: str,
        correction: np.ndarray | None = None, shared: SharedExpert | None = None,
        parallel: ParallelExperts | None = None, router_input: np.ndarray | None = None) -> tuple[np.ndarray, Routed]:
    """x + sum over a token's experts of weight * down(act(gate(n)) * up(n)), n = norm(x): float64 [T, D], and the visits; `act` as in
    `reference.gated`. Without gates it is weight * down(act(up(n))). The `shared` expert is added with weight 1, or sigmoid(scale(n)).

    Experts without tokens are not evaluated. `parallel`: return the sum alone, without x, for experts whose norm differs from the router's,
    each times its scale; `router_input`: the router's input where that is not norm(x). If weights apply to inputs, an expert gives
    down(act(gate(weight * n)) * up(weight * n)).
    """
    n = reference.normalise(x, *_norm(norm))
    apply = lambda values, linear: reference.linear(values, linear.weight.to_f32(), linear.bias)  # noqa: E731

    def inside(values: np.ndarray, expert: Expert, act: str = act) -> np.ndarray:
        up = apply(values, expert.up)
        return reference.activate(up, act) if expert.gate is None else reference.gated(apply(values, expert.gate), up, act)

    reads = router_input if router_input is not None else n if parallel is None else reference.normalise(x, *_norm(parallel.router_norm))
    chosen, shares = route(apply(reads, router), routing, correction)
    if parallel is not None:
        shares = shares * parallel.expert_scales[chosen]
    offsets, tokens, visit_of = visits(chosen, len(experts) + routing.zero_experts)
    visit_weight = np.empty(tokens.size)
    visit_weight[visit_of] = shares
    out, hidden = x.astype(np.float64) * (parallel is None), []
    for expert, begin, end in zip(experts, offsets[:-1], offsets[1:]):
        if begin == end:
            continue
        rows, weights = tokens[begin:end], visit_weight[begin:end, None]
        hidden.append(inside(n[rows] * weights if routing.weights_scale_inputs else n[rows], expert))
        out[rows] += (1.0 if routing.weights_scale_inputs else weights) * apply(hidden[-1], expert.down)
    begin, offsets = offsets[len(experts)], offsets[: len(experts) + 1]
    np.add.at(out, tokens[begin:], visit_weight[begin:, None] * n[tokens[begin:]])  # experts without matrices
    shared_input = None
    if shared is not None:
        shared_input = inside(n, shared, shared.act or act)
        if shared.shared_gate is not None:
            shared_input = shared_input / (1 + np.exp(-apply(n, shared.shared_gate)))
        out += shared.multiplier * apply(shared_input, shared.down)
        shared_input = shared_input.astype(np.float32)
    inner = np.concatenate(hidden) if hidden else np.zeros((0, experts[0].up.weight.shape[0]))
    return out, Routed(offsets, tokens, inner.astype(np.float32), shared_input)


def _norm(norm: Norm) -> tuple[str, np.ndarray | None, np.ndarray | None, float]:
    return norm.kind, norm.weight, norm.bias, norm.eps
