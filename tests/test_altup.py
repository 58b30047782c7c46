"""Gemma 3n's AltUp streams, the low-rank branch and clipped gates, on every backend against their definition, with any number of threads
and tokens."""

from __future__ import annotations

import numpy as np
import pytest

from effllm.kernels import reference
from effllm.kernels import reference_streams as meaning
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import FEW_TOKENS, CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.weight import AltUp, Linear, LowRank, Norm, PerLayerInput, Weight

D, S, F, P, R = 96, 3, 137, 24, 20
DIMS = Dims(D, 4, 2, 24, F, 301, chunk=192, ctx=256, logit_rows=8, residual_streams=S, low_rank_dim=R)
TOKENS = (1, 2, FEW_TOKENS, FEW_TOKENS + 1, 130)
CUT = 0.4


class Model:
    """Weights of a layer, and what a token begins with."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.x, self.own, self.given = (rng.standard_normal((130, n), np.float32) for n in (S * D, D, P))
        vector = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
        matrix = lambda *shape: Linear(Weight.raw("f32", shape, vector(*shape) / 8))  # noqa: E731
        self.norms = [Norm("rms", vector(D), eps=1e-6) for _ in range(5)]
        self.streams = AltUp(S, self.norms[0], vector(S, D), vector(S * S, S), vector(S, S), vector(D))
        self.inputs = PerLayerInput(matrix(P, D), matrix(D, P), self.norms[1])
        self.low = LowRank(matrix(R, D), matrix(D, R), self.norms[2])
        self.gate, self.up, self.down = matrix(F, D), matrix(F, D), matrix(D, F)
        self.enter, self.leave = ([matrix(D, D) for _ in range(S - 1)] for _ in range(2))

    def on(self, put: object) -> Model:
        """The same on another backend."""
        made = Model()
        norm = lambda each: Norm(each.kind, put(each.weight), None, each.eps)  # noqa: E731
        linear = lambda each: Linear(Weight(each.weight.spec, each.weight.shape, {"data": put(each.weight.parts["data"])}))  # noqa: E731
        made.norms = [norm(each) for each in made.norms]
        own = made.streams
        made.streams = AltUp(S, made.norms[0], *map(put, (own.router, own.prediction_coefs, own.correction_coefs, own.output_scale)))
        made.inputs = PerLayerInput(linear(made.inputs.gate), linear(made.inputs.projection), made.norms[1])
        made.low = LowRank(linear(made.low.down), linear(made.low.up), made.norms[2])
        made.gate, made.up, made.down = map(linear, (made.gate, made.up, made.down))
        return made


def stages(ops: object, of: Model, tokens: int, host: bool = True) -> list[np.ndarray]:
    """Every stage once, as copies."""
    take = (lambda array: array[:tokens].copy()) if host else (lambda array: ops.on.to_device(array[:tokens]))
    copy = (lambda array: array.copy()) if host else (lambda array: ops.on.to_host(array).copy())
    x, own, outs, seen = take(of.x), take(of.own), [], []
    outs.append(copy(ops.altup_predict(x, of.streams)))
    outs.append(copy(x))
    outs.append(copy(ops.altup_correct(x, own, of.streams)))
    outs.append(copy(x))
    ops.altup_add_input(x, own, of.inputs, take(of.given), "gelu_tanh", lambda value: seen.append(copy(value)))
    outs.append(copy(x))
    n = ops.low_rank_branch(take(of.own), of.norms[3], of.low, lambda value: seen.append(copy(value)))
    outs.append(copy(n))
    outs.append(copy(ops.add_scaled(take(of.own), n, 0.3)))
    mlp = of.norms[3], of.gate, of.up, of.down, "gelu_tanh", CUT
    outs.append(copy(ops.cutoff_mlp(take(of.own), *mlp, lambda value: seen.append(copy(value)), of.norms[4])))
    return outs + seen


def around(ops: CpuOps, of: Model, tokens: int) -> list[np.ndarray]:
    """The entry and the exit."""
    outs = [ops.enter_streams(of.own[:tokens].copy(), of.enter, 1 + len(of.enter)).copy()]
    return [*outs, ops.leave_streams(of.x[:tokens].copy(), of.leave, 1 + len(of.leave)).copy()]


def by_hand(of: Model, tokens: int) -> list[np.ndarray]:
    """The same in float64."""
    normed = lambda x, norm: reference.normalise(x.astype(np.float64), norm.kind, norm.weight, None, norm.eps)  # noqa: E731
    times = lambda x, each: x.astype(np.float64) @ each.weight.to_f32().T.astype(np.float64)  # noqa: E731
    said = lambda x: np.tanh(normed(x, of.norms[0]) @ of.streams.router.T / D)  # noqa: E731
    gated = lambda gate, up: reference.activate(gate, "gelu_tanh") * up  # noqa: E731
    streams, own, given = of.x[:tokens].reshape(-1, S, D).astype(np.float64), of.own[:tokens], of.given[:tokens]
    shares = np.stack([(of.streams.prediction_coefs @ each).reshape(S, S) for each in said(streams[:, 0])])
    predicted = np.stack([each + share @ each for each, share in zip(streams, shares, strict=True)])
    shares = 1 + said(own) @ of.streams.correction_coefs.T
    corrected = predicted + np.stack([np.outer(share, a - p[0]) for share, a, p in zip(shares, own, predicted, strict=True)])
    first = corrected[:, 0] * of.streams.output_scale
    hidden = gated(times(first, of.inputs.gate), given)
    spread = corrected.copy()
    for stream in range(1, S):
        spread[:, stream] += normed(times(hidden, of.inputs.projection), of.norms[1])
    n = normed(own, of.norms[3])
    low = times(n, of.low.down)
    beside = n + normed(times(low, of.low.up), of.norms[2])
    gate = times(n, of.gate)
    gate = np.maximum(gate - np.array([[row.mean() + CUT * row.std()] for row in gate]), 0)
    inside = gated(gate, times(n, of.up))
    mlp = own + normed(times(inside, of.down), of.norms[4])
    flat = lambda array: array.reshape(tokens, -1)  # noqa: E731
    return [predicted[:, 0], flat(predicted), first, flat(corrected), flat(spread), beside, own + 0.3 * beside, mlp, hidden, low, inside]


def around_by_hand(of: Model, tokens: int) -> list[np.ndarray]:
    def matched(branch: np.ndarray, like: np.ndarray) -> np.ndarray:
        return branch * np.linalg.norm(like, axis=1, keepdims=True) / np.linalg.norm(branch, axis=1, keepdims=True)

    own, streams = of.own[:tokens].astype(np.float64), of.x[:tokens].reshape(-1, S, D).astype(np.float64)
    entered = [own, *(matched(own @ each.weight.to_f32().T, own) for each in of.enter)]
    left = [streams[:, 0], *(matched(streams[:, i + 1] @ each.weight.to_f32().T, streams[:, 0]) for i, each in enumerate(of.leave))]
    return [np.concatenate(entered, 1), sum(left) / S]


def assert_near(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("registry", [None, "reference"])
def test_the_cpu_computes_what_is_meant(tokens: int, registry: str | None, pool: ThreadPool) -> None:
    ops, of = CpuOps(pool, DIMS, registry and default_registry(registry)), Model()
    assert_near(stages(ops, of, tokens), by_hand(of, tokens))
    assert_near(around(ops, of, tokens), around_by_hand(of, tokens))


@pytest.mark.parametrize("tokens", TOKENS)
def test_torch_computes_what_is_meant(tokens: int) -> None:
    ops = TorchOps("cpu")
    assert_near(stages(ops, Model().on(ops.on.to_device), tokens, host=False), by_hand(Model(), tokens))


def test_neither_threads_nor_other_tokens_change_a_bit() -> None:
    of, found = Model(), []
    for workers in (1, 2, 4):
        pool = ThreadPool(workers)
        ops = CpuOps(pool, DIMS)
        found.append({tokens: [*stages(ops, of, tokens), *around(ops, of, tokens)] for tokens in TOKENS})
        pool.close()
    for other in found[1:]:
        assert all(np.array_equal(a, b) for tokens in TOKENS for a, b in zip(found[0][tokens], other[tokens], strict=True))
    for few, whole in ((1, FEW_TOKENS), (FEW_TOKENS + 1, 130)):
        assert all(np.array_equal(a, b[:few]) for a, b in zip(found[0][few], found[0][whole], strict=True))


@pytest.mark.parametrize("registry", [None, "reference"])
def test_what_is_not_finite_stays_so(registry: str | None, pool: ThreadPool) -> None:
    """A run says so: gates that are cut to zero would hide it."""
    ops, of = CpuOps(pool, DIMS, registry and default_registry(registry)), Model()
    of.own[1, 5] = np.nan
    mlp = ops.cutoff_mlp(of.own[:3].copy(), of.norms[3], of.gate, of.up, of.down, "gelu_tanh", CUT)
    assert np.isnan(mlp[1]).all() and np.isfinite(mlp[[0, 2]]).all()
    entered = ops.enter_streams(of.own[:3].copy(), of.enter, 1 + len(of.enter))
    assert np.isnan(entered[1]).any() and np.isfinite(entered[[0, 2]]).all()


def test_a_stream_of_zeros_stays_one() -> None:
    """Where the magnitude of a branch is taken to be at least something, as where it is asked for."""
    zeros, branch = np.zeros((2, D), np.float32), np.full((1, 2, D), 1e-4, np.float32)
    assert not meaning.enter_streams(zeros, branch).any()
    assert np.allclose(meaning.leave_streams(np.ones((2, D)), branch), (1 + 1e-4 / np.sqrt(1e-5)) / 2)
