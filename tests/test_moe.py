"""Mixture of experts on the CPU: the compiled op against its definition and against the other ops' products; which bytes are read."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from low_bit_samples import low_bit, random_codes

from effllm.kernels import reference, reference_moe
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import FEW_TOKENS, CpuOps
from effllm.kernels.cpu.packed import MAX_COLUMNS
from effllm.kernels.layout import capped_silu
from effllm.kernels.reference_moe import Routed, Routing, route, visits
from effllm.kernels.registry import Call
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.methods import rtn
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Expert, Linear, Norm, Weight, from_f32

DEPTH, WIDTH, EXPERTS, TOP = 96, 137, 9, 3
CHUNK = 256
TOKENS = (1, 2, FEW_TOKENS, FEW_TOKENS + 1, MAX_COLUMNS, MAX_COLUMNS + 1, 70, CHUNK)
LOW_BITS = ("codebook4:16", "affine3:64", "symmetric8:32", "codebook2:16", "ternary:128", "float8:64")


@pytest.fixture(scope="module", params=(1, 2, 3), ids=lambda workers: f"{workers} threads")
def pool(request):
    pool = ThreadPool(request.param)
    yield pool
    pool.close()


def dims(depth: int = DEPTH, width: int = WIDTH, experts: int = EXPERTS, top_k: int = TOP, chunk: int = CHUNK) -> Dims:
    return Dims(depth, 1, 1, 32, max(width, 64), 11, chunk, 512, 1, experts, top_k, width)


def linear(rng: np.random.Generator, rows: int, depth: int, stored: str, bias: bool = False) -> Linear:
    """Weights of a stored type or of a low-bit format."""
    values = rng.standard_normal((rows, depth), np.float32) / np.float32(depth**0.5)
    b = rng.standard_normal(rows, np.float32) if bias else None
    if stored in ("f32", "f16", "bf16"):
        return Linear(Weight.raw(stored, (rows, depth), from_f32(values, stored)), b)
    spec = QuantSpec.parse(stored)
    if spec.scheme == "float":  # nothing is quantized to it
        return Linear(low_bit(replace(random_codes(rng, spec, (rows, depth)), rows=np.full(rows, 1e-3, np.float32)), spec), b)
    return Linear(low_bit(rtn.quantize(values, spec, None, None), spec), b)


class Layer:
    """A router, experts whose stored types follow one another, and a norm."""

    def __init__(self, stored: tuple[str, ...] = ("f32",), depth: int = DEPTH, width: int = WIDTH, experts: int = EXPERTS,
                 bias: bool = False, seed: int = 1, router: str = "f32") -> None:
        rng = np.random.default_rng(seed)
        kinds = [stored[e % len(stored)] for e in range(experts)]
        self.experts = tuple(Expert(linear(rng, width, depth, kind, bias), linear(rng, width, depth, kind, bias),
                                    linear(rng, depth, width, kind, bias)) for kind in kinds)
        self.router = linear(rng, experts, depth, router, bias)
        self.norm = Norm("rms", rng.standard_normal(depth, np.float32))

    def run(self, ops: CpuOps, x: np.ndarray, top_k: int = TOP, renormalise: bool = True, act: str = "silu", see=None) -> np.ndarray:
        stream = ops.from_host(x)
        with ops.collecting():
            ops.moe(stream, self.norm, self.router, self.experts, Routing(top_k, renormalise), act, see)
        return stream.copy()

    def expected(self, x: np.ndarray, top_k: int = TOP, renormalise: bool = True, act: str = "silu") -> tuple[np.ndarray, Routed]:
        return reference_moe.moe(x, self.norm, self.router, self.experts, Routing(top_k, renormalise), act)


def inputs(tokens: int, depth: int = DEPTH, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, depth), np.float32)


def close(ours: np.ndarray, expected: np.ndarray, x: np.ndarray, tolerance: float = 3e-6) -> None:
    """By the size of what the experts add."""
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= tolerance * np.abs(expected - x).max() + 1e-6 * np.abs(x).max()


# ---- the definition


def test_routing_by_hand() -> None:
    logits = np.log(np.array([[1.0, 4.0, 2.0, 1.0], [2.0, 2.0, 2.0, 2.0]]))
    chosen, shares = route(logits, Routing(2, True))
    assert chosen.tolist() == [[1, 2], [0, 1]]  # of equal ones the lower
    assert np.allclose(shares, [[4 / 6, 2 / 6], [0.5, 0.5]])
    assert np.allclose(route(logits, Routing(2, False))[1], [[4 / 8, 2 / 8], [0.25, 0.25]])
    roots = np.sqrt(np.log1p(np.exp(logits)))
    rows = np.where([[True, False, False, True], [False, True, True, False]], 0.0, -np.inf)  # each token's own corrections
    chosen, shares = route(logits, Routing(2, True, routed_scale=1.5, sqrt_softplus=True), rows)
    assert chosen.tolist() == [[0, 3], [1, 2]] and np.allclose(shares, 0.75)
    assert np.allclose(route(logits, Routing(2, False, sqrt_softplus=True))[1][0], roots[0, [1, 2]])
    offsets, tokens, places = visits(np.array([[1, 2], [0, 1], [1, 3]]), 5)
    assert offsets.tolist() == [0, 1, 4, 5, 6, 6] and tokens.tolist() == [1, 0, 1, 2, 0, 2] and places.tolist() == [[1, 4], [0, 2], [3, 5]]


def test_a_mixture_of_equal_experts_is_one_mlp() -> None:
    layer, x = Layer(), inputs(5)
    layer.experts = layer.experts[:1] * EXPERTS
    one = layer.experts[0]
    n = reference.normalise(x, "rms", layer.norm.weight, None, layer.norm.eps)
    apply = lambda values, each: reference.linear(values, each.weight.to_f32(), None)  # noqa: E731
    expected = x + apply(reference.activate(apply(n, one.gate), "gelu") * apply(n, one.up), one.down)
    assert np.allclose(layer.expected(x, act="gelu")[0], expected, rtol=1e-12)


# ---- the compiled op


@pytest.mark.parametrize("stored", [("f32",), ("f16",), ("bf16",), ("bf16", "f32")], ids="+".join)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "clamped_swish", capped_silu(0.3)])
def test_raw_weights_match_the_definition(pool, stored, act) -> None:
    layer, ops = Layer(stored, bias=True, router=stored[0]), CpuOps(pool, dims(), default_registry(exact=True))
    for tokens in TOKENS:
        x, renormalise = inputs(tokens), tokens % 2 == 0
        expected, routed = layer.expected(x, 1 + tokens % TOP, renormalise, act)
        seen: list[Routed] = []
        ours = layer.run(ops, x, 1 + tokens % TOP, renormalise, act, seen.append)
        close(ours, expected, x)
        assert np.array_equal(seen[0].offsets, routed.offsets) and np.array_equal(seen[0].tokens, routed.tokens)
        assert np.abs(seen[0].hidden - routed.hidden).max() <= 1e-5 * np.abs(routed.hidden).max()


def by_other_ops(ops: CpuOps, layer: Layer, x: np.ndarray) -> np.ndarray:
    """The mixture from `gated_mlp` on each expert's rows, for the numerics of as many columns as there are tokens."""
    routed: list[Routed] = []
    layer.run(ops, x, see=routed.append)
    offsets, tokens = routed[0].offsets.copy(), routed[0].tokens.copy()
    places = np.argsort(np.argsort(tokens, kind="stable"))  # visits by token, each token's experts in rising order
    shares = ops.workspace.take("shares", len(x), TOP).reshape(-1)[places].copy()
    out, results = x.copy(), np.zeros((len(tokens), DEPTH), np.float32)
    for expert, begin, end in zip(layer.experts, offsets[:-1], offsets[1:]):
        rows, hidden = np.ascontiguousarray(x[tokens[begin:end]]), np.zeros((end - begin, WIDTH), np.float32)
        if begin < end:
            ops._run_stage(rows, layer.norm, [expert.gate, expert.up], [hidden], 2, "silu", len(x))
            ops._run_stage(hidden, None, [expert.down], [results[begin:end]], 0, "none", len(x))
    for visit in np.argsort(places):
        out[tokens[visit]] = np.float64(shares[visit]) * results[visit] + out[tokens[visit]]  # as a fused multiplication and addition
    return out


@pytest.mark.parametrize("stored", [(text,) for text in LOW_BITS] + [("bf16",), ("codebook4:16", "symmetric8:32", "bf16")], ids="+".join)
def test_products_are_those_of_the_other_ops(pool, stored) -> None:
    layer, ops = Layer(stored), CpuOps(pool, dims())
    for tokens in TOKENS:
        x = inputs(tokens)
        ours, expected = layer.run(ops, x), by_other_ops(ops, layer, x)
        assert np.abs(ours - expected).max() <= 1e-6 * np.abs(expected).max(), tokens


@pytest.mark.parametrize("stored", LOW_BITS)
def test_low_bit_weights_are_near_the_definition(pool, stored) -> None:
    """As near as activations of eight bits allow."""
    layer, ops = Layer((stored,)), CpuOps(pool, dims())
    for tokens in (1, MAX_COLUMNS, 70):
        x = inputs(tokens)
        expected = layer.expected(x)[0]
        added, error = expected - x, layer.run(ops, x) - expected
        assert np.square(error).sum() < 1e-3 * np.square(added).sum()
    exact = CpuOps(pool, dims(), default_registry(exact=True))
    for tokens in (1, 40):
        x = inputs(tokens)
        close(layer.run(exact, x), layer.expected(x)[0], x, 1e-5)


def test_a_gate_of_another_type_than_its_up(pool) -> None:
    """Such experts are no single job."""
    rng = np.random.default_rng(3)
    for kinds in (("f32", "bf16", "f32"), ("codebook4:16", "symmetric8:32", "f16"), ("f16", "symmetric8:32", "codebook4:16")):
        layer, ops = Layer(), CpuOps(pool, dims())
        shapes = ((WIDTH, DEPTH), (WIDTH, DEPTH), (DEPTH, WIDTH))
        layer.experts = tuple(Expert(*(linear(rng, *shape, kind) for shape, kind in zip(shapes, kinds))) for _ in range(EXPERTS))
        for tokens in (1, 5, 30):
            x = inputs(tokens)
            expected = layer.expected(x)[0]
            assert np.square(layer.run(ops, x) - expected).sum() < 1e-3 * np.square(expected - x).sum()


@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 40), st.integers(1, 12), st.integers(1, 40), st.data())
def test_odd_shapes(tokens, depth, width, experts, seed, data) -> None:
    top_k = data.draw(st.integers(1, experts))
    stored = data.draw(st.sampled_from(["f32", "bf16"]))
    layer, pool = Layer((stored,), depth, width, experts, seed=seed), ThreadPool(2)
    x = inputs(tokens, depth, seed)
    try:
        ops = CpuOps(pool, dims(depth, width, experts, top_k, 128), default_registry(exact=True))
        close(layer.run(ops, x, top_k), layer.expected(x, top_k)[0], x, 1e-5)
    finally:
        pool.close()


@pytest.mark.parametrize("stored", [("bf16",), ("codebook4:16",), ("symmetric8:32",)], ids="+".join)
def test_a_result_depends_on_neither_threads_nor_neighbours(stored) -> None:
    layer, x = Layer(stored), inputs(CHUNK)
    few = FEW_TOKENS if stored == ("bf16",) else MAX_COLUMNS
    results = []
    for workers in (1, 2, 4):
        pool = ThreadPool(workers)
        ops = CpuOps(pool, dims())
        results.append([layer.run(ops, x[begin:end]) for begin, end in ((0, 1), (0, few), (few - 1, few), (0, few + 1), (0, CHUNK))])
        pool.close()
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))
    one, several, last, more, many = results[0]
    assert np.array_equal(one, several[:1]) and np.array_equal(last, several[-1:])
    assert np.array_equal(more, many[: few + 1])


def test_the_next_token_sees_nothing_of_the_last(pool) -> None:
    """A stage that is prepared once runs for other values, other layers and other numbers of tokens in turn."""
    layers, ops = [Layer(("bf16",), seed=1), Layer(("codebook4:16",), seed=2)], CpuOps(pool, dims())
    for turn in range(6):
        for layer in layers:
            x = inputs(1 + turn % 3, seed=turn)
            first = layer.run(ops, x)
            assert np.array_equal(first, layer.run(CpuOps(pool, dims()), x))


# ---- what is read


@pytest.mark.parametrize("stored", ["f32", "bf16", "symmetric8:32", "codebook4:16"])
def test_experts_that_nobody_visits_are_not_read(pool, stored) -> None:
    """Their memory holds NaN (in low-bit weights: a NaN as every row's scale), and the results are finite and the same."""
    layer, ops = Layer((stored,)), CpuOps(pool, dims())
    for tokens in (1, 3, 20):
        x = inputs(tokens, seed=tokens)
        x[:] = x[:1]  # all tokens choose alike, so some experts stay alone
        routed: list[Routed] = []
        before = layer.run(ops, x, see=routed.append)
        alone = np.flatnonzero(np.diff(routed[0].offsets) == 0)
        assert len(alone) == EXPERTS - TOP
        kept = []
        for e in alone:
            for each in (layer.experts[e].gate, layer.experts[e].up, layer.experts[e].down):
                data = each.weight.parts["data"].reshape(-1).view(np.uint8)
                kept.append((data, data.copy()))
                data[:] = 0xFF
        assert np.isfinite(before).all() and np.array_equal(layer.run(ops, x), before)
        for data, old in kept:
            data[:] = old


PROTECTED = """
import ctypes, mmap, sys
import numpy as np
from test_moe import DEPTH, TOP, Layer, dims, inputs
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.threads import ThreadPool
from effllm.quant.weight import Expert, Linear, Weight

layer, libc, pages, addresses = Layer((sys.argv[1],)), ctypes.CDLL(None), [], []


def moved(each):
    data = each.weight.parts["data"]
    room = np.frombuffer(mmap.mmap(-1, data.nbytes), np.uint8)
    room[:] = data.reshape(-1).view(np.uint8)
    addresses[-1].append((room.ctypes.data, data.nbytes))
    pages.append(room)
    return Linear(Weight(each.weight.spec, each.weight.shape, {"data": room.view(data.dtype).reshape(data.shape)}))


def one(expert):
    addresses.append([])
    return Expert(moved(expert.gate), moved(expert.up), moved(expert.down))


layer.experts = tuple(one(expert) for expert in layer.experts)
ops, x, seen = CpuOps(ThreadPool(2), dims()), inputs(1), []
before = layer.run(ops, x, see=seen.append)
visited = set(np.flatnonzero(np.diff(seen[0].offsets)).tolist())
assert len(visited) == TOP
for e, places in enumerate(addresses):
    if e not in visited or sys.argv[2] == "all":
        for at, nbytes in places:
            assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), 0) == 0
print("protected", flush=True)
assert np.array_equal(layer.run(ops, x), before)
print("same", flush=True)
"""


@pytest.mark.parametrize("stored", [pytest.param("bf16", marks=pytest.mark.slow), "codebook4:16"])
def test_memory_of_other_experts_may_be_out_of_reach(stored) -> None:
    """A process that may not touch their pages computes the same; one that may touch none of them ends."""
    def run(which: str) -> subprocess.CompletedProcess:
        path = os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run([sys.executable, "-P", "-c", PROTECTED, stored, which], capture_output=True, text=True, check=False,
                              env={**os.environ, "PYTHONPATH": path})

    spared = run("others")
    assert spared.stdout.split() == ["protected", "same"], spared.stderr
    assert run("all").stdout.split() == ["protected"]


# ---- edges


def test_equal_logits_go_to_the_lower_expert(pool) -> None:
    layer = Layer()
    layer.router = Linear(Weight.raw("f32", (EXPERTS, DEPTH), np.zeros((EXPERTS, DEPTH), np.float32)))
    for tokens in (1, 20):
        seen: list[Routed] = []
        layer.run(CpuOps(pool, dims()), inputs(tokens), see=seen.append)
        assert np.diff(seen[0].offsets).tolist() == [tokens] * TOP + [0] * (EXPERTS - TOP)


def test_nan_stays_with_its_token(pool) -> None:
    """And never becomes the number of an expert."""
    layer = Layer(("codebook4:16",))
    for tokens in (2, 20):
        x = inputs(tokens)
        x[1] = np.nan
        out = layer.run(CpuOps(pool, dims()), x)
        assert np.isnan(out[1]).all() and np.isfinite(np.delete(out, 1, 0)).all()


def test_the_reference_is_a_choice_like_any_other(pool) -> None:
    layer, x = Layer(("bf16",)), inputs(5)
    slow = CpuOps(pool, dims(), default_registry("reference"))
    assert np.allclose(layer.run(slow, x), layer.expected(x)[0], rtol=1e-6, atol=1e-6)
    assert slow.registry.select(Call("moe", act="silu")).candidate.name == "NumPy reference"
    assert CpuOps(pool, dims()).registry.select(Call("moe", act="silu")).candidate.name == "compiled"
