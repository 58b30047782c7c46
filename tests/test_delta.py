"""Linear attention by a gated delta rule: the reference against transformers, the kernels and torch against the reference.

Inputs are those of real layers in kind: decays from hardly any to all, keys that come again, states carried from pass to pass.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as oracle

from effllm.kernels import reference_delta as reference
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.delta_shape import DeltaShape
from effllm.kernels.layout import REPEATED
from effllm.kernels.state_shape import AFTER, FROM, KEPT, NO_SLOT, TO
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.runtime.states import SLOTS, controls

SHAPES = {"usual": DeltaShape(2, 4, 128, 128, 4), "odd": DeltaShape(3, 3, 24, 40, 2), "one head, narrow": DeltaShape(1, 2, 7, 5, 3),
          "one tap": DeltaShape(1, 1, 16, 33, 1), "tiled": DeltaShape(2, 6, 24, 20, 4, tiled=True)}
EPS = 1e-6


def weights(shape: DeltaShape) -> SimpleNamespace:
    draw = np.random.default_rng(shape.channels)
    normal = lambda *size: draw.standard_normal(size).astype(np.float32)  # noqa: E731
    return SimpleNamespace(conv=normal(shape.taps, shape.channels), decay=np.exp(normal(shape.value_heads)), dt=normal(shape.value_heads),
                           norm=SimpleNamespace(weight=normal(shape.value_dim), eps=EPS))


def inputs(shape: DeltaShape, tokens: int) -> tuple[np.ndarray, ...]:
    """qkv, z, b and a of a text; a token in three has the keys of an earlier one."""
    draw = np.random.default_rng(7)
    qkv, z, b, a = (draw.standard_normal((tokens, width)).astype(np.float32)
                    for width in (shape.channels, shape.values, shape.value_heads, shape.value_heads))
    qkv[2::3, : 2 * shape.keys] = qkv[: len(qkv[2::3]), : 2 * shape.keys]
    a *= 3
    a[::5] = -100  # nothing decays
    a[::17] = 100  # all of it
    return qkv, z, b, a


def expected(shape: DeltaShape, given: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(outputs, the last state) of a text from its beginning."""
    w, (qkv, z, b, a) = weights(shape), given
    mixed = reference.convolve(qkv, np.zeros((shape.taps - 1, shape.channels)), w.conv)
    q, k, v = np.split(mixed, (shape.keys, 2 * shape.keys), axis=1)
    heads = lambda x, count: x.reshape(len(x), count, -1)  # noqa: E731
    decay, beta = reference.gates(a, b, w.decay, w.dt)
    out, state = reference.recur(heads(q, shape.key_heads), heads(k, shape.key_heads), heads(v, shape.value_heads), decay, beta,
                                 np.zeros((shape.value_heads, shape.value_dim, shape.key_dim)), shape.tiled)
    return reference.gated_norm(out, heads(z, shape.value_heads), w.norm.weight, EPS).reshape(len(qkv), -1), state


class Layer:
    """A layer on a backend, run pass by pass from its beginning."""

    def __init__(self, ops: object, shape: DeltaShape) -> None:
        self.ops, self.shape, self.told = ops, shape, controls()
        self.states = ops.state_layer(shape, SLOTS, np.zeros(shape.nbytes(SLOTS), np.uint8), self.told)
        w = weights(shape)
        put = lambda x: ops.put(x, "f32")  # noqa: E731
        norm = SimpleNamespace(weight=put(w.norm.weight), eps=EPS)
        self.w = SimpleNamespace(conv=put(w.conv), decay=put(w.decay), dt=put(w.dt), norm=norm)
        self.slot = NO_SLOT

    def run(self, given: tuple[np.ndarray, ...], after: int = 0, hold: bool = True) -> np.ndarray:
        target = 1 if self.slot == 0 else 0
        self.told[FROM], self.told[TO], self.told[AFTER], self.told[KEPT] = self.slot, target, after, 3
        there = [x.copy() if self.ops.name == "cpu" else torch.from_numpy(x) for x in given]
        out = np.array(self.ops.to_host(self.states.mix(there, self.w)))
        self.slot = target if hold else self.slot
        return out

    def text(self, given: tuple[np.ndarray, ...], cuts: list[int]) -> np.ndarray:
        self.slot = NO_SLOT
        ends = np.cumsum(cuts)
        assert ends[-1] == len(given[0])
        return np.concatenate([self.run(tuple(x[end - cut : end] for x in given)) for end, cut in zip(ends, cuts, strict=True)])


def cpu(shape: DeltaShape, threads: int = 2, only: str | None = None) -> CpuOps:
    dims = Dims(64, 2, 1, 16, 64, 64, 128, 128, 4, state=shape)
    return CpuOps(ThreadPool(threads), dims, default_registry(only))


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> DeltaShape:
    return SHAPES[request.param]


@pytest.fixture
def layer(shape: DeltaShape) -> Iterator[Layer]:
    ops = cpu(shape)
    yield Layer(ops, shape)
    ops.close()


def assert_close(ours: np.ndarray, theirs: np.ndarray, within: float) -> None:
    assert np.abs(ours - theirs).max() <= within * np.abs(theirs).max()


def test_the_reference_is_what_transformers_computes(shape: DeltaShape) -> None:
    w, (qkv, z, b, a) = weights(shape), inputs(shape, 40)
    t = lambda x: torch.from_numpy(np.ascontiguousarray(x)).double()  # noqa: E731
    mixed = oracle.causal_conv1d_fn(t(qkv.T)[None], t(w.conv.T), activation="silu")[0].T
    np.testing.assert_allclose(reference.convolve(qkv, np.zeros((shape.taps - 1, shape.channels)), w.conv), mixed, atol=1e-12)
    q, k, v = (side.unflatten(1, (heads, -1))[None] for side, heads in zip(mixed.split((shape.keys, shape.keys, shape.values), 1),
                                                                          (shape.key_heads, shape.key_heads, shape.value_heads)))
    if shape.tiled:  # there heads of values that read one of keys lie side by side
        q, k = (side.repeat(1, 1, shape.value_heads // shape.key_heads, 1) for side in (q, k))
    g = -t(w.decay) * torch.nn.functional.softplus(t(a) + t(w.dt))
    out, last = oracle.torch_recurrent_gated_delta_rule(q, k, v, g[None], t(b).sigmoid()[None], output_final_state=True,
                                                        use_qk_l2norm_in_kernel=True)
    norm = oracle.Qwen3_5RMSNormGated(shape.value_dim, EPS)
    norm.weight.data = t(w.norm.weight)
    found, state = expected(shape, (qkv, z, b, a))
    assert_close(found, norm(out[0].flatten(0, 1), t(z).reshape(-1, shape.value_dim)).detach().numpy().reshape(len(z), -1), 1e-5)
    assert_close(state, last[0].transpose(1, 2).numpy(), 1e-5)  # which goes through float32


def test_kernels_compute_the_reference(layer: Layer) -> None:
    given = inputs(layer.shape, 90)
    out, state = expected(layer.shape, given)
    assert_close(layer.text(given, [90]), out, 2e-5)
    assert_close(layer.states.state_of(layer.slot), state, 2e-5)


def test_neither_cuts_nor_threads_change_a_bit(layer: Layer) -> None:
    given = inputs(layer.shape, 90)
    whole = layer.text(given, [90])
    last = layer.states.read_slot(layer.slot)
    for cuts in ([1] * 90, [8, 9, 1, 2, 70], [64, 26]):
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
        each.run(few, hold=False)
        each.states.again(each.slot, 2, 3)
    assert_close(slow.states.state_of(2), layer.states.state_of(2), 2e-5)
    ops.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("tokens, after", [(40, 1), (40, 23), (40, 39), (100, 64)])
def test_a_state_is_kept_on_the_way(shape: DeltaShape, backend: str, tokens: int, after: int) -> None:
    ops = cpu(shape) if backend == "cpu" else TorchOps("cpu")
    layer, given = Layer(ops, shape), inputs(shape, tokens + 20)
    head, rest = tuple(x[:20] for x in given), tuple(x[20:] for x in given)
    layer.text(head, [20])
    layer.run(rest, after)
    kept = layer.states.read_slot(3).view(np.float32)
    layer.text(tuple(x[: 20 + after] for x in given), [20, after])
    assert_close(kept, layer.states.read_slot(layer.slot).view(np.float32), 0 if backend == "cpu" else 1e-4)
    ops.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_draft_is_gone_back_in(shape: DeltaShape, backend: str) -> None:
    """The state behind any token of a pass of few, as if the others had never come."""
    ops, within = (cpu(shape), 0) if backend == "cpu" else (TorchOps("cpu"), 1e-5)
    layer, given = Layer(ops, shape), inputs(shape, 20 + REPEATED)
    layer.text(tuple(x[:20] for x in given), [20])
    begun, draft = layer.slot, tuple(x[20:] for x in given)
    for tokens in range(1, REPEATED):
        layer.run(draft, hold=False)
        told = layer.told.copy()
        layer.states.again(begun, 2, tokens)
        assert np.array_equal(layer.told, told) and layer.slot == begun
        layer.run(tuple(x[:tokens] for x in draft), hold=False)
        assert_close(*(layer.states.read_slot(slot).view(np.float32) for slot in (2, 1 - begun)), within)
    fresh = Layer(ops, shape)
    fresh.run(draft, hold=False)
    fresh.states.again(NO_SLOT, 2, 3)
    fresh.text(tuple(x[:3] for x in draft), [3])
    assert_close(*(fresh.states.read_slot(slot).view(np.float32) for slot in (2, fresh.slot)), within)
    ops.close()


def test_torch_computes_the_reference(shape: DeltaShape) -> None:
    given = inputs(shape, 150)
    out, state = expected(shape, given)
    for cuts in ([150], [70, 1, 8, 71]):
        layer = Layer(TorchOps("cpu"), shape)
        assert_close(layer.text(given, cuts), out, 2e-4)
        assert_close(layer.states.read_slot(layer.slot).view(np.float32)[shape.state_offset :][: shape.state_floats].reshape(state.shape),
                     state, 2e-4)


def test_a_state_goes_from_one_backend_to_another(layer: Layer) -> None:
    given = inputs(layer.shape, 40)
    head, rest = tuple(x[:30] for x in given), tuple(x[30:] for x in given)
    layer.text(head, [30])
    other = Layer(TorchOps("cpu"), layer.shape)
    other.states.write_slot(2, layer.states.read_slot(layer.slot))
    other.slot = 2
    assert np.array_equal(other.states.read_slot(2), layer.states.read_slot(layer.slot))
    assert_close(other.run(rest), layer.run(rest), 2e-4)


def test_what_is_no_number_stays_so(layer: Layer) -> None:
    for place in range(4):
        given = inputs(layer.shape, 12)
        given[place][5] = np.nan
        out = layer.text(given, [12])
        assert np.isfinite(out[:5]).all() and np.isnan(out[5]).any()
