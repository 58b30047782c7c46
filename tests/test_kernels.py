"""CPU kernels against the float64 reference: stored types, odd shapes, any number of tokens and threads, with and without F16C."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from effllm.kernels import reference
from effllm.kernels.cpu.arithmetic import exp, narrow_half, softplus, widen_half
from effllm.kernels.cpu.bf16_pairs import HAS_PAIRS
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.linear_amx import AMX_FLOATS
from effllm.kernels.cpu.ops import FEW_TOKENS, CpuOps
from effllm.kernels.layout import capped_silu
from effllm.kernels.registry import Call
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims, Workspace
from effllm.quant.weight import Linear, Norm, Weight, from_f32, to_f32
from effllm.runtime.rope import RopeTable

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 96, 6, 2, 24, 137, 301
DIMS = Dims(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, chunk=256, ctx=512, logit_rows=64)
AFTER = Norm("rms+1", np.linspace(-0.5, 0.5, HIDDEN, dtype=np.float32), eps=1e-6)
TOKENS = (1, 2, FEW_TOKENS, FEW_TOKENS + 1, 33, 130)


@pytest.fixture(scope="module", params=(1, 2, 3), ids=lambda workers: f"{workers} threads")
def pool(request):
    pool = ThreadPool(request.param)
    yield pool
    pool.close()


def weight(rng: np.random.Generator, rows: int, depth: int, stored: str) -> Weight:
    return Weight.raw(stored, (rows, depth), from_f32(rng.standard_normal((rows, depth), np.float32) / 10, stored))


def linears(rng: np.random.Generator, stored: str) -> dict[str, Linear]:
    bias = lambda n: rng.standard_normal(n, np.float32)  # noqa: E731
    return {"q": Linear(weight(rng, HEADS * HEAD_DIM, HIDDEN, stored), bias(HEADS * HEAD_DIM)),
            "k": Linear(weight(rng, KV_HEADS * HEAD_DIM, HIDDEN, stored)), "gate": Linear(weight(rng, FFN, HIDDEN, stored), bias(FFN)),
            "up": Linear(weight(rng, FFN, HIDDEN, stored), bias(FFN)), "down": Linear(weight(rng, HIDDEN, FFN, stored), bias(HIDDEN)),
            "head": Linear(weight(rng, VOCAB, HIDDEN, stored))}


def run_all(ops: CpuOps, parts: dict[str, Linear], norm: Norm, x: np.ndarray, act: str) -> list[np.ndarray]:
    """Every matrix op once, as copies."""
    outs = [y.copy() for y in ops.norm_linear(x, norm, [parts["q"], parts["k"]])]
    outs.append(ops.gated_mlp(x.copy(), norm, parts["gate"], parts["up"], parts["down"], act).copy())
    outs.append(ops.linear_add(np.ascontiguousarray(x), parts["k"], np.ones((len(x), KV_HEADS * HEAD_DIM), np.float32)).copy())
    outs.append(ops.gated_mlp(x.copy(), norm, parts["gate"], parts["up"], parts["down"], act, None, AFTER, 0.3).copy())
    outs.append(ops.mlp(x.copy(), norm, parts["up"], parts["down"], act).copy())
    outs.append(ops.mlp(x.copy(), norm, parts["up"], parts["down"], act, None, None, 0.3).copy())
    outs.append(ops.logits(x[-1:], norm, parts["head"], 3.0, 0.5).copy())
    return outs


@pytest.mark.parametrize("stored", ("f32", "f16", "bf16"))
@pytest.mark.parametrize("act", ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swish", "clamped_silu", capped_silu(0.4)))
def test_matrix_ops_match_the_reference(pool, stored, act):
    rng = np.random.default_rng(1)
    parts = linears(rng, stored)
    vector = lambda: rng.standard_normal(HIDDEN, np.float32)  # noqa: E731
    ops, exact = CpuOps(pool, DIMS, default_registry(exact=True)), CpuOps(pool, DIMS, default_registry("reference"))
    norms = (Norm("rms", vector()), Norm("rms+1", vector(), eps=1e-3), Norm("layer", vector(), vector()), Norm("none"))
    for tokens, norm in zip(TOKENS, norms + norms[:2], strict=True):
        x = rng.standard_normal((tokens, HIDDEN), np.float32)
        for fast, slow in zip(run_all(ops, parts, norm, x, act), run_all(exact, parts, norm, x, act), strict=True):
            assert np.abs(fast - slow).max() <= 3e-6 * np.abs(slow).max()


def test_the_clamped_swish_by_hand(pool):
    """min(g, 7) * sigmoid(1.702 min(g, 7)) * (up within 7 + 1), wherever the two lie; NaN of either stays."""
    gate, up = (each.reshape(1, -1).astype(np.float32) for each in np.meshgrid(np.linspace(-90, 20, 56), np.linspace(-20, 20, 41)))
    g, u = np.minimum(gate, 7).astype(np.float64), np.clip(up, -7, 7).astype(np.float64)
    by_hand = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    assert np.abs(reference.gated(gate.astype(np.float64), up, "clamped_swish") - by_hand).max() < 1e-12
    dims = Dims(gate.size, 1, 1, 2, gate.size, 8, chunk=128, ctx=128, logit_rows=1)
    for registry in (None, default_registry("reference")):
        out = gate.copy()
        CpuOps(pool, dims, registry).gate(out, up, "clamped_swish")
        assert np.abs(out - by_hand).max() < 3e-6 * np.abs(by_hand).max()
        odd = np.array([[np.nan, 1.0, 1.0]], np.float32)
        CpuOps(pool, dims, registry).gate(odd, np.array([[1.0, np.nan, 1.0]], np.float32), "clamped_swish")
        assert np.isnan(odd).tolist() == [[True, True, False]]


@pytest.mark.parametrize("bound", (0.3, 7.0, 16.0))
def test_a_silu_with_a_bound_by_hand(pool, bound):
    """min(silu(g), bound) * up within the bound, wherever the two lie; NaN of either stays. The bound goes through its name whole."""
    gate, up = (each.reshape(1, -1).astype(np.float32) for each in np.meshgrid(np.linspace(-90, 20, 56), np.linspace(-20, 20, 41)))
    g, act = gate.astype(np.float64), capped_silu(np.float32(bound))
    by_hand = np.minimum(g / (1 + np.exp(-g)), np.float32(bound)) * np.clip(up, -np.float32(bound), np.float32(bound))
    assert np.abs(reference.gated(g, up, act) - by_hand).max() < 1e-12
    dims = Dims(gate.size, 1, 1, 2, gate.size, 8, chunk=128, ctx=128, logit_rows=1)
    for registry in (None, default_registry("reference")):
        out = gate.copy()
        CpuOps(pool, dims, registry).gate(out, up, act)
        assert np.abs(out - by_hand).max() < 3e-6 * np.abs(by_hand).max()
        odd = np.array([[np.nan, 1.0, 1.0]], np.float32)
        CpuOps(pool, dims, registry).gate(odd, np.array([[1.0, np.nan, 1.0]], np.float32), act)
        assert np.isnan(odd).tolist() == [[True, True, False]]


def test_the_clamped_silu_by_hand(pool):
    """min(g, 10) * sigmoid(min(g, 10)) * (up within 10), wherever the two lie."""
    gate, up = (each.reshape(1, -1).astype(np.float32) for each in np.meshgrid(np.linspace(-60, 30, 46), np.linspace(-25, 25, 41)))
    g, u = np.minimum(gate, 10).astype(np.float64), np.clip(up, -10, 10).astype(np.float64)
    by_hand = g / (1 + np.exp(-g)) * u
    dims = Dims(gate.size, 1, 1, 2, gate.size, 8, chunk=128, ctx=128, logit_rows=1)
    for registry in (None, default_registry("reference")):
        out = gate.copy()
        CpuOps(pool, dims, registry).gate(out, up, "clamped_silu")
        assert np.abs(out - by_hand).max() < 3e-6 * np.abs(by_hand).max()


@pytest.mark.parametrize("tokens", (1, 5, 130))
def test_clipping_matches_the_reference(pool, tokens):
    y = 2 * np.random.default_rng(5).standard_normal((tokens, HEADS * HEAD_DIM), np.float32)
    y[0, :3] = np.nan, np.inf, -np.inf
    for registry in (None, default_registry("reference")):
        out = y.copy()
        ops = CpuOps(pool, DIMS, registry)
        ops.clip(out, 0.7)
        ops.flush()
        assert np.array_equal(out, np.clip(y, np.float32(-0.7), np.float32(0.7)), equal_nan=True)
        assert np.isnan(out[0, 0]) and (np.abs(out[0, 1:]) <= np.float32(0.7)).all()


@pytest.mark.parametrize("stored", ("f32", "f16", "bf16"))
def test_results_do_not_depend_on_threads_or_on_few_columns(stored):
    rng = np.random.default_rng(2)
    parts, norm = linears(rng, stored), Norm("rms", rng.standard_normal(HIDDEN, np.float32))
    x = rng.standard_normal((130, HIDDEN), np.float32)
    results = []
    for workers in (1, 2, 4):
        pool = ThreadPool(workers)
        results.append({tokens: run_all(CpuOps(pool, DIMS), parts, norm, x[:tokens], "silu") for tokens in TOKENS})
        pool.close()
    for other in results[1:]:
        for tokens in TOKENS:
            assert all(np.array_equal(a, b) for a, b in zip(results[0][tokens], other[tokens], strict=True))
    # a token's row has the same bits whatever came with it: among few tokens, and among many
    for few, whole in ((1, FEW_TOKENS), (FEW_TOKENS + 1, 130)):
        for a, b in zip(results[0][few][:7], results[0][whole][:7], strict=True):
            assert np.array_equal(a, b[:few])


def test_tiles_longer_than_a_depth_block():
    rng = np.random.default_rng(3)
    depth, rows = 1100, 97
    dims = Dims(depth, 1, 1, 64, rows, 11, chunk=128, ctx=128, logit_rows=1)
    pool = ThreadPool(2)
    each = Linear(weight(rng, rows, depth, "bf16"))
    x = rng.standard_normal((40, depth), np.float32)
    got = CpuOps(pool, dims, default_registry(exact=True)).linear_add(x, each, np.zeros((40, rows), np.float32))
    pool.close()
    want = reference.linear(x, reference.widen(each.weight.parts["data"], "bf16"), None)
    assert np.abs(got - want).max() <= 3e-6 * np.abs(want).max()


@pytest.mark.parametrize("norm", (None, Norm("rms", np.linspace(0.5, 2, HEAD_DIM, dtype=np.float32), eps=1e-6),
                                  Norm("rms", np.linspace(0.5, 2, HEADS * HEAD_DIM, dtype=np.float32), eps=1e-6)),
                         ids=("plain", "each head", "all heads"))
@pytest.mark.parametrize("rotary", (HEAD_DIM, HEAD_DIM - 8))
@pytest.mark.parametrize("interleaved", (False, True))
def test_rope_heads_match_the_reference(pool, norm, rotary, interleaved):
    rng = np.random.default_rng(4)
    table = RopeTable((1 / 10_000 ** (np.arange(0, rotary, 2) / rotary)).astype(np.float32), 1.25, rotary, interleaved=interleaved)
    y = rng.standard_normal((40, HEADS * HEAD_DIM), np.float32)
    positions = np.arange(7, 47)
    fast = CpuOps(pool, DIMS).rope_heads(y.copy(), HEADS, HEAD_DIM, positions, table, norm)
    slow = CpuOps(pool, DIMS, default_registry("reference")).rope_heads(y.copy(), HEADS, HEAD_DIM, positions, table, norm)
    assert np.abs(fast - slow).max() < 5e-6
    assert not np.array_equal(fast, y)
    if norm is not None:  # the reference's own meaning, once by hand
        row = y[3].reshape(-1, len(norm.weight)).astype(np.float64)
        normed = (row / np.sqrt((row * row).mean(1, keepdims=True) + norm.eps) * norm.weight).reshape(HEADS, HEAD_DIM)
        assert np.abs(normed[:, rotary:] - slow[3].reshape(HEADS, HEAD_DIM)[:, rotary:]).max(initial=0) < 5e-6


@pytest.mark.parametrize("rotary", (HEAD_DIM, HEAD_DIM - 8))
def test_neighbours_are_turned_into_the_order_of_halves(pool, rotary):
    """Exactly as if they had lain there before, whoever of the workers has them; where nothing turns, no channel is lost either."""
    half, place = rotary // 2, np.arange(HEAD_DIM)
    place[:rotary] = np.concatenate([np.arange(0, rotary, 2), np.arange(1, rotary, 2)])
    table = RopeTable((1 / 10_000 ** (np.arange(half) / half)).astype(np.float32), 1.0, rotary)
    y, positions = np.random.default_rng(4).standard_normal((600, HEADS * HEAD_DIM), np.float32), np.arange(600)
    before = np.ascontiguousarray(y.reshape(600, HEADS, HEAD_DIM)[..., place]).reshape(y.shape)
    for registry in (None, default_registry("reference")):
        ops = CpuOps(pool, DIMS, registry)
        found = ops.rope_heads(y.copy(), HEADS, HEAD_DIM, positions, replace(table, interleaved=True), None)
        assert np.array_equal(found, ops.rope_heads(before.copy(), HEADS, HEAD_DIM, positions, table, None))
        assert np.array_equal(found[0], before[0])


def test_two_rotary_tables_in_one_pass(pool):
    """Jobs are collected and run later: each must find the angles of its own table."""
    rng, positions = np.random.default_rng(4), np.arange(7, 47)
    tables = [RopeTable((1 / theta ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32), 1.0, HEAD_DIM) for theta in (1e4, 1e6)]
    y = rng.standard_normal((40, HEADS * HEAD_DIM), np.float32)
    ops, alone = CpuOps(pool, DIMS), CpuOps(pool, DIMS)
    several = [y.copy() for _ in range(6)]
    with ops.collecting():
        for i, each in enumerate(several):
            ops.rope_heads(each, HEADS, HEAD_DIM, positions, tables[i % 2], None)
    for i, each in enumerate(several):
        assert np.array_equal(each, alone.rope_heads(y.copy(), HEADS, HEAD_DIM, positions, tables[i % 2], None))
    assert not np.array_equal(several[0], several[1])


@pytest.mark.parametrize("stored", ("f32", "f16", "bf16"))
def test_embed_reads_rows_in_their_stored_type(pool, stored):
    table = weight(np.random.default_rng(5), VOCAB, HIDDEN, stored)
    ids = np.array([0, 7, VOCAB - 1, 7])
    got = CpuOps(pool, DIMS).embed(ids, table, 2.0)
    assert np.array_equal(got, to_f32(table.parts["data"], stored)[ids] * 2)
    learned = weight(np.random.default_rng(6), 20, HIDDEN, stored)
    places = np.array([2, 3, 19, 0])
    got = CpuOps(pool, DIMS).embed(ids, table, 2.0, places, learned)
    assert np.array_equal(got, to_f32(table.parts["data"], stored)[ids] * 2 + to_f32(learned.parts["data"], stored)[places])


def test_softplus_is_accurate_at_either_end() -> None:
    x = np.concatenate([np.linspace(-87, 90, 20_001), [-1e-6, 0.0, 1e-6, 1e30]]).astype(np.float32)
    got = np.array([softplus(v) for v in x], np.float64)
    assert np.abs(got / np.logaddexp(0, x.astype(np.float64)) - 1).max() < 3e-7
    assert softplus(np.float32(-200)) == 0 and np.isnan(softplus(np.float32(np.nan))) and softplus(np.float32(np.inf)) == np.inf


def test_exp_is_accurate_and_exact_zero_below():
    x = np.linspace(-87, 88, 20_001, dtype=np.float32)
    got = np.array([exp(v) for v in x], np.float64)
    assert np.abs(got / np.exp(x.astype(np.float64)) - 1).max() < 2e-7
    assert exp(np.float32(-np.inf)) == 0 and exp(np.float32(-200)) == 0 and np.isnan(exp(np.float32(np.nan)))


def check_half() -> None:
    """Every half bit pattern widens as NumPy does, and every float32 near a half narrows to the nearest even."""
    bits = np.arange(65536, dtype=np.uint16)
    wide = np.array([widen_half(b) for b in bits], np.float32)
    assert np.array_equal(wide.view(np.uint32)[~np.isnan(wide)], bits.view(np.float16).astype(np.float32).view(np.uint32)[~np.isnan(wide)])
    assert np.array_equal(np.isnan(wide), np.isnan(bits.view(np.float16)))
    finite = np.sort(bits[: 0x7C00].view(np.float16).astype(np.float32))
    middle = (finite[:-1].astype(np.float64) + finite[1:]) / 2
    values = np.concatenate([finite, middle, np.nextafter(middle.astype(np.float32), np.float32(0)), middle * 1.0000001]).astype(np.float32)
    values = np.concatenate([values, -values])
    got = np.array([narrow_half(v) for v in values], np.uint16)
    assert np.array_equal(got, np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16))
    assert narrow_half(np.float32(1e9)) == 0x7BFF and narrow_half(np.finfo(np.float32).min) == 0xFBFF
    assert narrow_half(np.float32(np.inf)) == 0x7C00 and narrow_half(np.float32(-np.inf)) == 0xFC00  # a page of it is refused
    assert np.isnan(np.uint16(narrow_half(np.float32(np.nan))).view(np.float16))


def test_half_conversion():
    check_half()


@pytest.mark.slow
def test_without_half_conversion_in_the_cpu(tmp_path):
    """The portable path: features forced off in a child. Same conversions, and the fallback is announced once."""
    features = "+sse,+sse2,+64bit,+cx8,+fxsr,+mmx" if os.uname().machine == "x86_64" else None
    if features is None:
        pytest.skip("the other architectures always convert half precision")
    code = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
import numpy as np, test_kernels as t
from effllm.kernels.cpu import fp8_to_half, inner_loops, intrinsics
assert not intrinsics.HAS_HALF and inner_loops.VECTOR == 4
t.check_half()
assert [fp8_to_half.to_half(np.float32(x)) for x in (65519, 1e9, np.inf, -np.inf)] == [0x7BFF, 0x7C00, 0x7C00, 0xFC00]
pool = t.ThreadPool(2); ops = t.CpuOps(pool, t.DIMS); exact = t.CpuOps(pool, t.DIMS, t.default_registry("reference"))
for stored in ("f16", "bf16"):
    rng = np.random.default_rng(1); parts = t.linears(rng, stored); norm = t.Norm("rms", np.ones(t.HIDDEN, np.float32))
    for tokens in (1, 33):
        x = rng.standard_normal((tokens, t.HIDDEN), np.float32)
        for a, b in zip(t.run_all(ops, parts, norm, x, "silu"), t.run_all(exact, parts, norm, x, "silu")):
            assert np.abs(a - b).max() <= 3e-6 * np.abs(b).max()
said = ops.registry.announcements()
assert len(said) == 2 and "half by shifts" in said[0] and not ops.registry.announcements(), said
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_choice_says_why():
    registry = default_registry()
    choice = registry.select(Call("matrix", "f32", FEW_TOKENS + 1))
    assert choice.candidate.name == "register tiles" and choice.declined == (("few columns", f"more than {FEW_TOKENS} columns"),) + (
        (("float tiles, amx", "not bf16 weights"),) if AMX_FLOATS else (("bf16 pairs, avx512", "not bf16 weights"),) if HAS_PAIRS else ())
    odd = registry.select(Call("matrix", "int3", 1))
    assert odd.candidate.name == "NumPy reference" and "no kernel for int3" in str(odd)
    assert len(registry.announcements()) == 1 and registry.announcements() == []
    with pytest.raises(LookupError, match="no kernel"):
        registry.select(Call("convolution"))


def test_the_workspace_never_grows():
    workspace = Workspace({"x": 100})
    assert workspace.take("x", 10, 10).shape == (10, 10) and workspace.take("x", 3, 4).ctypes.data % 64 == 0
    with pytest.raises(RuntimeError, match="101 floats requested, 100 planned"):
        workspace.take("x", 101)
