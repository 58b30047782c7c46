"""The torch backend against the float64 reference, on CPU tensors everywhere and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effllm.kernels import reference
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda import attention, torch_ops
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.layout import F16, F32, PAGE, PageLayout, capped_silu
from effllm.kernels.threads import ThreadPool
from effllm.quant.kv import RawCodec
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, Norm, Weight, from_f32
from effllm.runtime.engine import Engine
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.rope import RopeTable
from effllm.runtime.workspace_dims import dims

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"))
STORED = ["f32", "f16", "bf16"]


@pytest.fixture(params=["cpu", GPU])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return TorchOps(request.param)


@dataclass(frozen=True)
class Parameter:
    """A linear on the device and the float64 values it stands for."""

    linear: Linear
    values: np.ndarray
    bias: np.ndarray | None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return reference.linear(x, self.values, self.bias)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def parameter(ops: TorchOps, seed: int, rows: int, columns: int, stored: str = "f32", bias: bool = False) -> Parameter:
    data = from_f32(normal(seed, rows, columns) / np.float32(columns) ** 0.5, stored)
    b = normal(seed + 1, rows) if bias else None
    weight = Weight(QuantSpec.raw(stored), (rows, columns), {"data": ops.put(data, stored)})
    return Parameter(Linear(weight, None if b is None else ops.put(b, "f32")), reference.widen(data, stored), b)


def norm_pair(ops: TorchOps, kind: str, width: int, bias: bool = False) -> tuple[Norm, tuple]:
    """The norm on the device, and the arguments of the reference."""
    w = None if kind == "none" else normal(31, width) * 0.2 + (0 if kind == "rms+1" else 1)
    b = normal(32, width) if bias else None
    on_device = [None if each is None else ops.put(each.astype(np.float32), "f32") for each in (w, b)]
    return Norm(kind, *on_device, 1e-5), (kind, w, b, 1e-5)


def close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 2e-6) -> None:
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(theirs).max())))


def test_parameters_keep_their_stored_type_and_values(ops: TorchOps) -> None:
    for stored in STORED:
        data = from_f32(normal(1, 5, 7), stored)
        held = ops.put(data, stored)
        assert held.dtype == torch_ops.NATIVE[stored] and held.device.type == ops.device.type
        np.testing.assert_array_equal(held.double().cpu().numpy(), reference.widen(data, stored))
        data[:] = 0
        assert held.abs().sum() > 0  # a copy: the host's buffer may be read into again


def test_activations_cross_the_border_unchanged_and_as_copies(ops: TorchOps) -> None:
    x = normal(2, 3, 8)
    there = ops.from_host(x)
    np.testing.assert_array_equal(ops.to_host(there), x)
    there += 1
    np.testing.assert_array_equal(x, normal(2, 3, 8))
    x += 1
    here = ops.to_host(there)
    there += 1
    np.testing.assert_array_equal(here, x, "neither side sees what the other does with its copy")


@pytest.mark.parametrize("stored", STORED)
def test_embed(ops: TorchOps, stored: str) -> None:
    table, ids = parameter(ops, 3, 50, 12, stored), np.array([4, 49, 0, 4])
    x = ops.embed(ids, table.linear.weight, 2.5)
    close(ops.to_host(x), table.values[ids] * 2.5)
    x += 1  # the stream is changed in place, the table is not
    close(ops.to_host(ops.embed(ids, table.linear.weight)), table.values[ids])


@pytest.mark.parametrize("kind, bias", [("rms", False), ("rms+1", False), ("layer", False), ("layer", True), ("none", False)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_norm_linear(ops: TorchOps, kind: str, bias: bool, tokens: int) -> None:
    x, (norm, meaning) = normal(4, tokens, 48), norm_pair(ops, kind, 48, bias)
    several = [parameter(ops, 10, 33, 48, "f32", True), parameter(ops, 12, 16, 48, "bf16"), parameter(ops, 14, 1, 48, "f16", True)]
    n = reference.normalise(x, *meaning)
    for out, each in zip(ops.norm_linear(ops.from_host(x), norm, [each.linear for each in several]), several, strict=True):
        close(ops.to_host(out), each(n))


def test_products_by_tiles_equal_the_whole(ops: TorchOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not divide into tiles, and a tile smaller than one row."""
    x, weight = normal(5, 3, 40), parameter(ops, 16, 29, 40, "bf16", True)
    for tile in (40 * 8, 40 * 29, 1):
        monkeypatch.setattr(torch_ops, "MAX_WIDENED", tile)
        close(ops.to_host(ops.norm_linear(ops.from_host(x), Norm("none"), [weight.linear])[0]), weight(x))


@pytest.mark.parametrize("stored", STORED)
def test_linear_add_is_in_place(ops: TorchOps, stored: str) -> None:
    x, residual, weight = normal(6, 4, 24), normal(7, 4, 16), parameter(ops, 18, 16, 24, stored, True)
    stream = ops.from_host(residual)
    result = ops.linear_add(ops.from_host(x), weight.linear, stream)
    assert result is stream
    close(ops.to_host(result), residual + weight(x))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swish", capped_silu(0.4)])
@pytest.mark.parametrize("stored", STORED)
def test_gated_mlp(ops: TorchOps, act: str, stored: str) -> None:
    x, (norm, meaning) = normal(8, 3, 32), norm_pair(ops, "rms", 32)
    gate, up, down = (parameter(ops, 20 + i, n, k, stored) for i, (n, k) in enumerate([(80, 32), (80, 32), (32, 80)]))
    n = reference.normalise(x, *meaning)
    expected = x + down(reference.gated(gate(n), up(n), act))
    stream = ops.from_host(x)
    result = ops.gated_mlp(stream, norm, gate.linear, up.linear, down.linear, act)
    assert result is stream
    close(ops.to_host(result), expected)


@pytest.mark.parametrize("kind", [None, "rms+1", "layer"])
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_a_branch_with_its_own_norm_and_multiplier(ops: TorchOps, kind: str | None, factor: float) -> None:
    x, (norm, meaning) = normal(8, 3, 32), norm_pair(ops, "layer", 32, bias=True)
    up, down = parameter(ops, 20, 80, 32, "bf16", True), parameter(ops, 22, 32, 80, "bf16", True)
    after, after_meaning = (None, None) if kind is None else norm_pair(ops, kind, 32)
    hidden = reference.activate(up(reference.normalise(x, *meaning)), "relu")
    stream, seen = ops.from_host(x), []
    assert ops.mlp(stream, norm, up.linear, down.linear, "relu", lambda h: seen.append(ops.to_host(h).copy()), after, factor) is stream
    close(seen[0], hidden)
    close(ops.to_host(stream), reference.add_branch(x, down(hidden), after_meaning, factor), 4e-6)


def test_embed_with_learned_positions(ops: TorchOps) -> None:
    table, learned = parameter(ops, 3, 50, 12, "bf16"), parameter(ops, 4, 20, 12, "f16")
    ids, places = np.array([4, 49, 0]), np.array([2, 3, 19])
    x = ops.embed(ids, table.linear.weight, 0.5, places, learned.linear.weight)
    close(ops.to_host(x), table.values[ids] * 0.5 + learned.values[places])


def test_an_unknown_activation_is_refused(ops: TorchOps) -> None:
    square = parameter(ops, 1, 4, 4).linear
    with pytest.raises(ValueError, match="swish"):
        ops.gated_mlp(ops.from_host(normal(1, 1, 4)), Norm("none"), square, square, square, "swish")


@pytest.mark.parametrize("softcap, scale", [(None, 1.0), (1.5, 1.0), (1.5, 0.125)])
def test_logits(ops: TorchOps, softcap: float | None, scale: float) -> None:
    x, (norm, meaning), head = normal(9, 2, 32), norm_pair(ops, "rms", 32), parameter(ops, 25, 101, 32, "bf16")
    scores = head(reference.normalise(x, *meaning)) * scale
    expected = softcap * np.tanh(scores / softcap) if softcap else scores
    close(ops.to_host(ops.logits(ops.from_host(x), norm, head.linear, softcap, scale)), expected)


@pytest.mark.parametrize("rotary", [None, 8, 16])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_heads(ops: TorchOps, rotary: int | None, with_norm: bool, interleaved: bool) -> None:
    """Whole and partial rotation, attention scaling, per-head norm; two tables in turn must not be confused."""
    heads, width, positions = 3, 16, np.array([0, 5, 6, 1000], np.int64)
    norm, meaning = norm_pair(ops, "rms", width)
    for scaling in (1.0, 1.25):
        y = normal(11, len(positions), heads * width)
        frequencies = (10_000.0 ** (-np.arange(0, rotary or 0, 2) / (rotary or 1))).astype(np.float32)
        table = None if rotary is None else RopeTable(frequencies, scaling, rotary, interleaved=interleaved)
        split = y.reshape(len(positions), heads, width)
        expected = reference.normalise(split, *meaning) if with_norm else split.astype(np.float64)
        if table is not None:
            angles = (positions.astype(np.float32)[:, None] * table.inv_freq).astype(np.float64)
            expected = reference.rotate_heads(expected, np.cos(angles) * scaling, np.sin(angles) * scaling, interleaved)
        held = ops.from_host(y)
        result = ops.rope_heads(held, heads, width, positions, table, norm if with_norm else None)
        assert result is held
        close(ops.to_host(result), expected.reshape(y.shape))


def test_a_norm_of_all_heads_together_and_two_tables_in_turn(ops: TorchOps) -> None:
    heads, width, positions = 3, 16, np.array([0, 5, 6, 1000], np.int64)
    norm, meaning = norm_pair(ops, "rms", heads * width)
    tables = [RopeTable((theta ** (-np.arange(0, width, 2) / width)).astype(np.float32), 1.0, width) for theta in (1e4, 1e6)]
    y = normal(11, len(positions), heads * width)
    for table in (*tables, *tables):
        angles = (positions.astype(np.float32)[:, None] * table.inv_freq).astype(np.float64)
        normed = reference.normalise(y, *meaning).reshape(len(positions), heads, width)
        result = ops.rope_heads(ops.from_host(y), heads, width, positions, table, norm)
        close(ops.to_host(result), reference.rotate_heads(normed, np.cos(angles), np.sin(angles)).reshape(y.shape))


# -- attention -----------------------------------------------------------------------------------------------------------------


def paged(side: np.ndarray, starts: list[int], counts: list[int], filler: float) -> np.ndarray:
    """[n, KVH, D] -> [P, KVH, 128, D], rows beyond a page's count filled with junk."""
    pages = np.full((len(starts), side.shape[1], PAGE, side.shape[2]), filler, np.float32)
    for page, (start, count) in enumerate(zip(starts, counts)):
        pages[page, :, :count] = side[start : start + count].transpose(1, 0, 2)
    return pages


@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 40), st.sampled_from([(4, 4), (4, 2), (6, 1)]),
       st.sampled_from([16, 64, 128]), st.sampled_from([None, 1, 20, 130]), st.sampled_from([None, 5.0]),
       st.sampled_from([1, 200, 1 << 25]), st.sampled_from([None, 0.0, 3.0, 200.0]))
def test_attend_blocks_is_softmax_attention(seed: int, total: int, tokens: int, heads: tuple[int, int], sinks: int, window: int | None,
                                            softcap: float | None, scores: int, sink: float | None) -> None:
    """Any cut into pages, any group size, junk (NaN too) where nothing was written: the answer of plain attention over the visible keys."""
    tokens, (query_heads, kv_heads), depth = min(tokens, total), heads, 8
    q = normal(seed, tokens, query_heads, depth) * 2
    k, v = normal(seed + 1, total, kv_heads, depth), normal(seed + 2, total, kv_heads, depth)
    starts = [0, *range(sinks, total, PAGE)] if total > sinks else [0]
    counts = [min(total, end) - start for start, end in zip(starts, [*starts[1:], total])]
    logits = None if sink is None else normal(seed + 3, query_heads) + np.float32(sink)
    held, attention.MAX_SCORES = attention.MAX_SCORES, scores
    try:
        ours = attention.attend_blocks(
            *(torch.from_numpy(each) for each in (q, paged(k, starts, counts, np.nan), paged(v, starts, counts, np.nan))),
            torch.tensor(starts), torch.tensor(counts), torch.arange(total - tokens, total), depth**-0.5, window, softcap,
            None if logits is None else torch.from_numpy(logits))
    finally:
        attention.MAX_SCORES = held
    theirs = reference.attend(q, k, v, total - tokens, np.arange(total), depth**-0.5, window, softcap, logits)
    close(ours.numpy(), theirs.reshape(tokens, -1), 5e-6)


def test_large_scores_do_not_overflow(ops: TorchOps) -> None:
    q, k, v = normal(1, 2, 2, 16) * 200, normal(2, 300, 2, 16) * 200, normal(3, 300, 2, 16)
    starts, counts = [0, 64, 192], [64, 128, 108]
    tensors = [ops.from_host(each) for each in (q, paged(k, starts, counts, 0), paged(v, starts, counts, 0))]
    where = [ops.upload(np.array(each)) for each in (starts, counts, [298, 299])]
    ours = attention.attend_blocks(*tensors, *where, 1.0, None, None)
    theirs = reference.attend(q, k, v, 298, np.arange(300), 1.0, None, None).reshape(2, -1)
    close(ops.to_host(ours), theirs, 1e-4)


def test_nan_in_a_visible_key_stays_visible(ops: TorchOps) -> None:
    k, v = normal(2, 10, 1, 8), normal(3, 10, 1, 8)
    k[4] = np.nan
    pages = (ops.from_host(normal(1, 2, 1, 8)), ops.from_host(paged(k, [0], [10], 0)), ops.from_host(paged(v, [0], [10], 0)))
    ours = ops.to_host(attention.attend_blocks(*pages, *(ops.upload(np.array(each)) for each in ([0], [10], [3, 9])), 1.0, None, None))
    assert np.isfinite(ours[0]).all() and np.isnan(ours[1]).all()


# -- KV pages ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [F32, F16])
@pytest.mark.parametrize("window", [None, 100])
def test_pages_written_sealed_and_attended(ops: TorchOps, stored: int, window: int | None) -> None:
    """Three blocks: exact sinks, a sealed page, an open page; slots and pages out of order."""
    kv_heads, heads, depth, sinks, total = 2, 6, 16, 32, 200
    layout = PageLayout(kv_heads, depth, stored)
    size = layout.layer_page_nbytes
    layer = ops.kv_layer(layout, np.zeros(4 * size, np.uint8), np.zeros(2 * size, np.uint8), depth**-0.5, window, None)
    k, v = normal(1, total, kv_heads * depth), normal(2, total, kv_heads * depth)
    at = np.arange(total)
    slots, rows = np.select([at < sinks, at < sinks + PAGE], [2, 0], 3), np.where(at < sinks, at, (at - sinks) % PAGE)
    for piece in (slice(0, 150), slice(150, 199), slice(199, 200)):
        layer.write(ops.from_host(k[piece]), ops.from_host(v[piece]), slots[piece].copy(), rows[piece].copy())
    layer.seal(0, 1, 5, sinks, RawCodec(stored))
    layer.exact[:size] = 255  # the slot is free again: NaN in either type
    blocks = np.array([[0, 2, 0, sinks], [1, 1, sinks, PAGE], [0, 3, sinks + PAGE, total - sinks - PAGE]])
    q = normal(3, 5, heads * depth)
    ours = ops.to_host(layer.attend(ops.from_host(q), total - 5, blocks))
    exact_type = np.float32 if stored == F32 else np.float16
    held = [side.astype(exact_type).astype(np.float32).reshape(total, kv_heads, depth) for side in (k, v)]
    theirs = reference.attend(q.reshape(5, heads, depth), *held, total - 5, at, depth**-0.5, window, None)
    close(ours, theirs.reshape(5, -1), 5e-6)
    # The sealed record has the bytes of the CPU's: header, then K channel by channel in the stored type.
    record = layer.sealed[size : size + layout.record_nbytes].cpu().numpy()
    assert record[:4].tobytes() == b"EFKV"
    first_head = k.reshape(total, kv_heads, depth)[sinks : sinks + PAGE, 0].astype(exact_type)
    np.testing.assert_array_equal(record[64 : 64 + layout.side_nbytes].view(exact_type).reshape(depth, PAGE), first_head.T)


def test_half_precision_saturates(ops: TorchOps) -> None:
    layout = PageLayout(1, 8, F16)
    memory, one = np.zeros(layout.layer_page_nbytes, np.uint8), np.ones((1, 8), np.float32)
    layer = ops.kv_layer(layout, memory, memory, 1.0, None, None)
    layer.write(ops.from_host(one * 1e6), ops.from_host(one * -1e6), np.array([0]), np.array([0]))
    out = ops.to_host(layer.attend(ops.from_host(np.zeros((1, 8), np.float32)), 0, np.array([[0, 0, 0, 1]])))
    np.testing.assert_array_equal(out, np.full((1, 8), -65504, np.float32))
    layer.write(ops.from_host(one * -np.inf), ops.from_host(one * np.nan), np.array([0]), np.array([0]))
    keys, values = (side[0, 0, 0].tolist() for side in layer._exact_sides)
    assert keys == [-np.inf] * 8 and np.isnan(values).all()


def test_uploads_of_old_steps_are_forgotten(ops: TorchOps) -> None:
    arrays = [np.arange(i + 1) for i in range(50)]
    for array in arrays:
        assert ops.upload(array) is ops.upload(array) and ops.upload(array).tolist() == array.tolist()
    assert len(ops._uploads) <= torch_ops.UPLOADS
    ops.close()
    assert not ops._uploads


def test_an_array_that_was_changed_in_place_is_brought_again(ops: TorchOps) -> None:
    """The cache hands over a step's arrays again, changed, when the next one lies in the same page."""
    rows = np.array([5, 6])
    before = ops.upload(rows)
    rows[:] = 7, 8
    assert ops.upload(rows).tolist() == [7, 8] and before.tolist() == [5, 6], "the device shares no memory with the host"


def test_the_registry_names_what_runs(ops: TorchOps) -> None:
    weights = [parameter(ops, 1, 8, 8, stored).linear for stored in STORED]
    ops.norm_linear(ops.from_host(normal(1, 1, 8)), Norm("none"), weights)
    assert {call.stored: choice.candidate.name for call, choice in ops.registry.choices.items()} == {
        "f32": "torch", "f16": "widened to float32", "bf16": "widened to float32"}
    assert ops.registry.announcements() == []


# -- whole models --------------------------------------------------------------------------------------------------------------


def decoded(layers_on_torch: set[int], ops: TorchOps, kv: str) -> np.ndarray:
    """fable's logits for 10 tokens after a prompt that fills and seals pages."""
    prepared = prepare(Path(str(files("effllm") / "models" / "fable")), EngineOptions(device="cpu", kv=kv, ctx=512, exact=True))
    devices = tuple("cuda" if layer in layers_on_torch else "cpu" for layer in range(prepared.config.num_hidden_layers))
    host = CpuOps(ThreadPool(1), dims(prepared.config, prepared.placement.ctx, prepared.shape.chunk, LOGIT_ROWS),
                  default_registry(exact=True))
    engine = Engine(replace(prepared, placement=replace(prepared.placement, devices=devices)), {"cpu": host, "cuda": ops})
    ids = [int(token) for token in np.random.default_rng(0).integers(10, prepared.config.vocab_size, 420)]
    try:
        assert list(engine.model.load())[-1] == (engine.model.nbytes, engine.model.nbytes)
        list(engine.prefill(ids[:410]))
        assert engine.cache.sealed > 0
        return np.array([engine.forward_logits([token])[0] for token in ids[410:]])
    finally:
        engine.close()


@pytest.mark.parametrize("kv, tolerance", [("32bit", 1e-4), ("16bit", 1e-3)])
def test_a_block_may_live_on_either_backend(ops: TorchOps, kv: str, tolerance: float) -> None:
    """All blocks on the CPU backend, every other one on torch, all on torch: the same logits."""
    on_cpu = decoded(set(), TorchOps("cpu"), kv)
    for layers in (set(range(1, 100, 2)), set(range(100))):
        there = decoded(layers, TorchOps(str(ops.device)), kv)
        np.testing.assert_allclose(there, on_cpu, rtol=0, atol=tolerance * np.abs(on_cpu).max())
        np.testing.assert_array_equal(there.argmax(-1), on_cpu.argmax(-1))
