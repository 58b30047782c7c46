"""The cost of noise in keys and values, the bases derived from it, and bit allocation: on synthetic attention of known structure."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.kernels.layout import PAGE
from effllm.quant.kv_basis import KVBasis
from effllm.quant.kv_bits import ENOUGH, NOISE, SIDES, share, side_cost, with_doubt
from effllm.quant.kv_codec import decode, encode
from effllm.quant.kv_noise_cost import AttentionParams, Moments, trial_costs

SIZE, TOKENS = 64, 832
ROWS = np.arange(320, TOKENS, 4)


def layer(heads: int = 4, kv_heads: int = 2, seed: int = 0, sharp: float = 1.0) -> tuple[np.ndarray, ...]:
    """q [heads, rows, D], k and v [H, T, D], W_o [heads, D, width]."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((heads, len(ROWS), SIZE)).astype(np.float32) * np.float32(sharp)
    k, v = rng.standard_normal((2, kv_heads, TOKENS, SIZE)).astype(np.float32) * np.geomspace(3, 0.3, SIZE).astype(np.float32)
    return q, k, v, rng.standard_normal((heads, SIZE, 96)) / 30


def output(q: np.ndarray, k: np.ndarray, v: np.ndarray, wo: np.ndarray, reading: AttentionParams, k_packed: np.ndarray,
           v_packed: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Attention's output [heads, rows, width] where packed keys and values differ, straight from its definition."""
    out = np.empty((len(q), q.shape[1], wo.shape[2]))
    for head in range(len(q)):
        at = head * len(k) // len(q)
        for row, position in enumerate(ROWS):
            first = max(0, position - reading.window + 1) if reading.window else 0
            sealed = max(reading.sinks, reading.sinks + (position - reading.sinks - reading.exact) // PAGE * PAGE)
            keys, values = k[at].astype(np.float64), v[at].astype(np.float64)
            keys[reading.sinks : sealed], values[reading.sinks : sealed] = (x[at][reading.sinks : sealed] for x in (k_packed, v_packed))
            scores = keys[first : position + 1] @ q[head, row] * reading.scale
            if reading.softcap:
                scores = reading.softcap * np.tanh(scores / reading.softcap)
            p = np.exp(scores)
            total = p.sum() + (0 if sinks is None else np.exp(sinks[head]))
            out[head, row] = p @ values[first : position + 1] / total @ wo[head]
    return out


@pytest.mark.parametrize(("reading", "sinks"), [
    (AttentionParams(0.125), None), (AttentionParams(0.125, window=300), None), (AttentionParams(0.125, softcap=2.0), None),
    (AttentionParams(0.125), np.array([-9, 4, 6, 8], np.float32)),
])
def test_the_price_of_noise_is_what_noise_does_to_the_output(reading: AttentionParams, sinks: np.ndarray | None) -> None:
    """Little noise of known moments, added and measured, against the prices."""
    q, k, v, wo = layer()
    moments = Moments(2, SIZE)
    moments.add(q, k, v, wo @ wo.swapaxes(1, 2), ROWS, reading, sinks)
    _, price_k, _, price_v, _ = moments.means
    exact, rng, eps = output(q, k, v, wo, reading, k, v, sinks), np.random.default_rng(1), 1e-4
    for side, price in ((0, price_k), (1, price_v)):
        found = []
        for _ in range(6):
            noise = rng.standard_normal(k.shape) * eps
            there = output(q, k, v, wo, reading, *((k + noise, v) if side == 0 else (k, v + noise)), sinks)
            found.append(np.square(there - exact).sum(2).mean(1).sum())
        assert np.mean(found) == pytest.approx(eps**2 * np.trace(price, axis1=1, axis2=2).sum(), rel=0.1)


def test_a_basis_keeps_the_unit_of_prices() -> None:
    """Strengths say what a record's noise will cost, at any number of bits, wherever noise is small."""
    q, k, v, wo = layer()
    gram = wo @ wo.swapaxes(1, 2)
    moments = Moments(2, SIZE)
    moments.add(q, k, v, gram, ROWS, AttentionParams(0.125))
    basis = KVBasis.from_moments(*moments.means)
    pages = [x[:, 64 : 64 + PAGE] for x in (k, v)]
    back = decode(encode(*pages, 4, 4, basis), SIZE, basis)
    for there, page, price, strength in zip(back, pages, moments.means[1:4:2], (basis.strength_k, basis.strength_v), strict=True):
        away = there - page
        cost = np.einsum("htd,hde,hte->h", away, price, away) / PAGE
        rule = [side_cost(row, 4) for row in strength]
        assert cost == pytest.approx(rule, rel=0.4)


def test_a_basis_does_not_ask_in_which_units_a_channel_came() -> None:
    """A RoPE pair times 64 and its queries divided by it: the same records, bit for bit."""
    q, k, v, wo = layer()
    factor = np.ones(SIZE, np.float32)
    factor[[5, 5 + SIZE // 2]] = 64
    made = []
    for f in (np.ones(SIZE, np.float32), factor):
        moments = Moments(2, SIZE)
        moments.add(q / f, k * f, v, wo @ wo.swapaxes(1, 2), ROWS, AttentionParams(0.125))
        made.append(encode((k * f)[:, :PAGE], v[:, :PAGE], 4, 4, KVBasis.from_moments(*moments.means)))
    assert (made[0] == made[1]).mean() > 0.999  # sums of float32 in another order
    assert (made[0][:, 64:] == made[1][:, 64:]).all()


def test_full_sides_share_noise_over_the_whole_head() -> None:
    q, k, v, wo = layer()
    moments = Moments(2, SIZE)
    moments.add(q, k, v, wo @ wo.swapaxes(1, 2), ROWS, AttentionParams(0.125))
    basis = KVBasis.from_moments(*moments.means)
    costs = []
    for one in (basis, basis.spread([10, 10], [10, 10])):
        away = decode(encode(k[:, :PAGE], v[:, :PAGE], 10, 10, one), SIZE, one)[0] - k[:, :PAGE]
        costs.append(np.einsum("htd,hde,hte->", away, moments.means[1], away))
    assert costs[1] < 0.8 * costs[0]
    assert (basis.spread([4, 4], [4, 4]).k_matrix == basis.k_matrix).all()


def test_with_bits_enough_keys_that_said_nothing_are_not_left_behind() -> None:
    """One K carries nearly all the damage, the other sides none to speak of: at 8 bits on average K is spared before V, at 4 none is."""
    loud = np.array([NOISE[bits] for bits in SIDES])
    keys, values = np.stack([loud, *[1e-9 * loud] * 4]), np.stack([1e-3 * loud, *[1e-8 * loud] * 4])
    for mean, least in ((8, 8), (4, 3)):
        shared = np.reshape(share(with_doubt(keys, values, mean).reshape(-1, len(SIDES)).tolist(), mean), (-1, 2))
        assert shared.mean() <= mean and shared[0, 0] > mean and shared[1:, 0].min() == least, shared
        plain = np.reshape(share(np.stack([keys, values], 1).reshape(-1, len(SIDES)).tolist(), mean), (-1, 2))
        assert (plain == shared).all() == (mean < ENOUGH)
    assert (with_doubt(keys, values, 6) == np.stack([keys, values], 1)).all()


def test_trials_follow_the_rule_where_noise_is_small_and_leave_it_where_scores_break() -> None:
    for sharp, broken in ((1.0, False), (12.0, True)):
        q, k, v, wo = layer(sharp=sharp)
        gram, reading = wo @ wo.swapaxes(1, 2), AttentionParams(0.125)
        moments = Moments(2, SIZE)
        moments.add(q, k, v, gram, ROWS, reading)
        basis = KVBasis.from_moments(*moments.means)
        cost_k, cost_v = trial_costs(q, k, v, gram, ROWS, reading, basis)
        rule = [[side_cost(row, bits) for bits in SIDES] for row in basis.strength_k]
        ratio = cost_k / rule
        assert (np.diff(cost_k) < 0).all()
        assert (np.diff(cost_v) < 0).all()
        if broken:
            assert (ratio[:, 0] < 0.5 * ratio[:, 3]).all() or (ratio[:, 0] > 2 * ratio[:, 3]).all()
        else:
            assert ((0.5 < ratio) & (ratio < 2)).all()


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1.5, 6)), min_size=1, max_size=40), st.sampled_from((1, 2, 3, 4, 4.5, 5, 6, 8)))
def test_shared_bits_meet_the_mean_and_go_where_they_pay(sides: list[tuple[float, float]], mean: float) -> None:
    costs = [[level * base**-bits for bits in SIDES] for level, base in sides]
    given_bits = share(costs, mean)
    assert set(given_bits) <= set(SIDES)
    assert sum(given_bits) <= mean * len(costs) + 1e-6
    assert sum(given_bits) > mean * len(costs) - 2 or all(bits == 8 for bits in given_bits)
    even = [cost[SIDES.index(int(mean))] for cost in costs]
    spent = [cost[SIDES.index(bits)] for cost, bits in zip(costs, given_bits, strict=True)]
    assert sum(spent) <= sum(even) * 1.0001


def test_a_step_that_pays_only_at_its_end_is_taken_whole() -> None:
    """One bit more does nothing for the first side, two bits nearly all."""
    assert share([[1, 1, 0.99, 0, 0, 0, 0], [0.4, 0.39, 0.38, 0.37, 0.36, 0.35, 0.34]], 2.5)[0] == 4
