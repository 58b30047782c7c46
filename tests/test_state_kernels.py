"""Recurrent layers of every kind: kernels and torch against the reference, independent of chunking.

That references compute what transformers does is in the tests of their kinds.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from state_kinds import SHAPES, Layer, assert_close, cpu, expected, inputs

from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.layout import MAX_DECODE_TOKENS
from effllm.kernels.state_shape import NO_SLOT, StateShape


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> StateShape:
    return SHAPES[request.param]


@pytest.fixture
def layer(shape: StateShape) -> Iterator[Layer]:
    ops = cpu(shape)
    yield Layer(ops, shape)
    ops.close()


def test_kernels_compute_the_reference(layer: Layer) -> None:
    given = inputs(layer.shape, 90)
    out, state = expected(layer.shape, given)
    assert_close(layer.text(given, [90]), out, 2e-5)
    assert_close(layer.state(), state, 2e-5)


def test_neither_cuts_nor_threads_change_a_bit(layer: Layer) -> None:
    given = inputs(layer.shape, 90)
    whole = layer.text(given, [90])
    last = layer.states.read_slot(layer.slot)
    for cuts in ([64, 26], [1] * 90, [8, 9, 1, 2, 70]):
        if min(cuts) <= MAX_DECODE_TOKENS and layer.shape.inner_projection_widths:
            # products of few and of many tokens are summed in different orders
            assert_close(layer.text(given, cuts), whole, 2e-5)
            continue
        assert np.array_equal(layer.text(given, cuts), whole)
        assert np.array_equal(layer.states.read_slot(layer.slot), last)
    alone = cpu(layer.shape, 1)
    assert np.array_equal(Layer(alone, layer.shape).text(given, [90]), whole)
    alone.close()


def test_the_last_candidate_computes_the_same(layer: Layer) -> None:
    given, ops = inputs(layer.shape, 40), cpu(layer.shape, 1, "reference")
    slow = Layer(ops, layer.shape)
    assert_close(slow.text(given, [30, 6, 4]), layer.text(given, [30, 6, 4]), 2e-5)
    few = tuple(x[:5] for x in given)
    for each in (slow, layer):
        each.run(few, keeps_state=False)
        each.states.rebuild_slot(each.slot, 2, 3)
    assert_close(slow.slot_values(2), layer.slot_values(2), 2e-5)
    ops.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("tokens, after", [(40, 1), (40, 23), (40, 39), (100, 64)])
def test_a_state_is_kept_on_the_way(shape: StateShape, backend: str, tokens: int, after: int) -> None:
    ops = cpu(shape) if backend == "cpu" else TorchOps("cpu")
    layer, given = Layer(ops, shape), inputs(shape, tokens + 20)
    head, rest = tuple(x[:20] for x in given), tuple(x[20:] for x in given)
    layer.text(head, [20])
    layer.run(rest, after)
    kept = layer.slot_values(3)
    layer.text(tuple(x[: 20 + after] for x in given), [20, after])
    exact = backend == "cpu" and not (shape.inner_projection_widths and after <= MAX_DECODE_TOKENS)
    assert_close(kept, layer.slot_values(layer.slot), 0 if exact else 1e-4)
    ops.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_draft_is_gone_back_in(shape: StateShape, backend: str) -> None:
    """The state behind any token of a pass of few, as if the others had never come."""
    ops, within = (cpu(shape), 0) if backend == "cpu" else (TorchOps("cpu"), 1e-5)
    layer, given = Layer(ops, shape), inputs(shape, 20 + MAX_DECODE_TOKENS)
    layer.text(tuple(x[:20] for x in given), [20])
    begun, draft = layer.slot, tuple(x[20:] for x in given)
    for tokens in range(1, MAX_DECODE_TOKENS):
        layer.run(draft, keeps_state=False)
        told = layer.pass_slots.copy()
        layer.states.rebuild_slot(begun, 2, tokens)
        assert np.array_equal(layer.pass_slots, told) and layer.slot == begun
        layer.run(tuple(x[:tokens] for x in draft), keeps_state=False)
        assert_close(*(layer.slot_values(slot) for slot in (2, 1 - begun)), within)
    fresh = Layer(ops, shape)
    fresh.run(draft, keeps_state=False)
    fresh.states.rebuild_slot(NO_SLOT, 2, 3)
    fresh.text(tuple(x[:3] for x in draft), [3])
    assert_close(*(fresh.slot_values(slot) for slot in (2, fresh.slot)), within)
    ops.close()


def test_torch_computes_the_reference(shape: StateShape) -> None:
    given = inputs(shape, 150)
    out, state = expected(shape, given)
    for cuts in ([150], [70, 1, 8, 71]):
        layer = Layer(TorchOps("cpu"), shape)
        assert_close(layer.text(given, cuts), out, 2e-4)
        assert_close(layer.state(), state, 2e-4)


def test_a_state_goes_from_one_backend_to_another(layer: Layer) -> None:
    given = inputs(layer.shape, 40)
    head, rest = tuple(x[:30] for x in given), tuple(x[30:] for x in given)
    layer.text(head, [30])
    other = Layer(TorchOps("cpu"), layer.shape)
    other.states.write_slot(2, layer.states.read_slot(layer.slot))
    other.slot = 2
    assert np.array_equal(other.states.read_slot(2), layer.states.read_slot(layer.slot))
    assert_close(other.run(rest), layer.run(rest), 2e-4)


def test_what_is_not_finite_stays_so(layer: Layer) -> None:
    for place in range(len(layer.shape.projection_widths)):
        given = inputs(layer.shape, 12)
        given[place][5] = np.nan
        out = layer.text(given, [12])
        assert np.isfinite(out[:5]).all() and np.isnan(out[5]).any()
