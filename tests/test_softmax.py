"""The softmax of a page's scores: exact where masked, NaN where a score is, accurate to the last bits elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.kernels.cpu.softmax import softmax_row
from effllm.kernels.layout import PAGE
from effllm.kernels.lazy_numba import compiler


@compiler().njit("UniTuple(float32, 2)(int64, int64, int64, float32)")
def _run(address, begin, end, scale):
    return softmax_row(address, begin, end, scale)


def softmax(scores: np.ndarray, begin: int, end: int, scale: float = 1.0) -> tuple[np.ndarray, float, float]:
    row = scores.astype(np.float32)
    m, l = _run(row.ctypes.data, begin, end, scale)
    return row, m, l


@given(st.data())
def test_weights_are_those_of_float64(data):
    begin = data.draw(st.integers(0, PAGE - 1))
    end = data.draw(st.integers(begin + 1, PAGE))
    spread = data.draw(st.sampled_from((0.0, 1e-3, 1.0, 30.0, 1e4)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    scores = (spread * rng.standard_normal(PAGE)).astype(np.float32)
    scores[:begin] = scores[end:] = np.nan  # what lies there has no say
    row, m, l = softmax(scores, begin, end)
    seen = scores[begin:end].astype(np.float64)
    expected = np.exp(seen - seen.max())
    assert m == seen.max() and not row[:begin].any() and not row[end:].any()
    assert np.abs(row[begin:end] - expected).max() <= 2e-6 and abs(l - expected.sum()) <= 2e-6 * expected.sum()
    assert (row[begin:end][seen - seen.max() < -88] == 0).all()


def test_scaled_on_the_way_is_scaled_beforehand():
    scores = np.random.default_rng(0).standard_normal(PAGE).astype(np.float32)
    scaled = softmax(scores * np.float32(0.3), 3, 60)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(softmax(scores, 3, 60, 0.3), scaled))


@pytest.mark.parametrize("value", (np.nan, np.inf))
@pytest.mark.parametrize("place", (0, 17, PAGE - 1))
def test_what_is_not_finite_shows_in_the_sum(value, place):
    scores = np.zeros(PAGE)
    scores[place] = value
    assert np.isnan(softmax(scores, 0, PAGE)[2])


def test_scores_that_weigh_nothing_are_zero():
    scores = np.zeros(PAGE)
    scores[1::2] = -np.inf
    row, m, l = softmax(scores, 0, PAGE)
    assert m == 0 and l == PAGE // 2 and (row[::2] == 1).all() and not row[1::2].any()
