"""Splits a packed cache's budget of exact tokens between attention sinks (the first tokens) and the recent window.

All of `SINK_SPLITS` keep the same number of tokens in 16 bits, so they cost the same memory. The best has the least error of attention's
output, in the unit of `kv_noise_cost`, with keys and values rounded to the bits of their heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..kernels.kv_layout import GROUP_K
from .kv_basis import KVBasis
from .kv_noise_cost import AttentionParams, power_of, rounded, scores_of, sink_of, softmax, visible

# Sinks, window. Sinks are whole groups of K, so that every pair rounds the same groups and differs in nothing but which are exact.
SINK_SPLITS = ((64, 128), (0, 192), (32, 160), (128, 64))
SURE = 2.0  # standard errors by which another pair must be better than the first
GAIN = 0.1  # of the error that it must save: less is worth 0.08 bits
LEAST_WINDOWS = 3


def sink_split_costs(q: np.ndarray, k: np.ndarray, v: np.ndarray, gram: np.ndarray, rows: np.ndarray, reading: AttentionParams,
                     basis: KVBasis,
              bits: Sequence[tuple[int, int]], sinks: np.ndarray | None = None) -> np.ndarray:
    """The error of one layer's output for each of ENDS, float64 [ENDS]. Arguments as of `kv_noise_cost.trials`, and the bits of every
    head."""
    group, whole = len(q) // len(k), slice(0, k.shape[1] // GROUP_K * GROUP_K)
    views = [visible(rows, k.shape[1], replace(reading, sinks=first, exact=newest)) for first, newest in SINK_SPLITS]
    cost = np.zeros(len(SINK_SPLITS))
    for at, (bits_k, bits_v) in enumerate(bits):
        one = basis.head(at)
        widths_k, widths_v = one.widths(bits_k, bits_v)
        k_there, off_v = k[at].copy(), np.zeros_like(v[at])
        k_there[whole] = rounded(k[at][whole] @ one.k_matrix[0].T, widths_k[0], GROUP_K) @ one.k_inverse[0].T
        off_v[whole] = rounded(v[at][whole] @ one.v_matrix[0].T, widths_v[0], 1) @ one.v_inverse[0].T - v[at][whole]
        for head in range(at * group, (at + 1) * group):
            own = sink_of(sinks, head)
            exact, moved = (scores_of(q[head], keys, views[0][0], reading)[0] for keys in (k[at], k_there))
            o = softmax(exact, own) @ v[at]
            for place, (_, packed) in enumerate(views):
                p = softmax(np.where(packed, moved, exact), own)
                cost[place] += power_of(p @ v[at] + (p * packed) @ off_v - o, gram[head])
    return cost


def choose_sink_split(costs: np.ndarray) -> int:
    """The split to use, given `costs` [windows, SINK_SPLITS]: the cheapest where it is significantly and clearly better than the first,
    else the first."""
    if len(costs) < LEAST_WINDOWS:
        return 0
    ratios = np.log(np.maximum(costs, 1e-300)) - np.log(np.maximum(costs[:, :1], 1e-300))
    mean, error = ratios.mean(0), ratios.std(0, ddof=1) / len(ratios) ** 0.5
    best = int(mean.argmin())
    return best if mean[best] < min(np.log(1 - GAIN), -SURE * error[best]) else 0
