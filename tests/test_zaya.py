"""ZAYA1 in the whole program: its kernels against their definition; runs, plans, sessions, drafts, batches, streamed experts and converted
folders of such a model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bit_exactness import (
    FEWER_SETTINGS,
    assert_batching_changes_nothing,
    assert_chunks_equal_single_tokens,
    assert_drafts_change_nothing,
    assert_prefix_is_reused,
    assert_session_continues,
    assert_threads_and_chunks_change_nothing,
    engine,
    folder,
    logits_after,
)
from config_samples import refused
from family_models import Case, assert_close, oracle, written
from hybrid_models import CTX, IDS, one_by_one, opened, read, read_afresh
from quantization_checks import assert_answers_stay_near, assert_calibration_is_a_pass, converted
from streamed_models import paging, streaming
from transformers import CONFIG_MAPPING, PreTrainedModel
from unusual_family_cases import ZAYA

from effllm.kernels.cca_shape import CcaShape
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.registry import Call
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.recurrent_weights import Cca
from effllm.quant.weight import ResidualScale
from effllm.runtime.config import parse_config
from effllm.runtime.engine import Engine
from effllm.runtime.kv.states import controls
from effllm.runtime.weights import stream_layout

__all__ = ["engine", "folder"]  # fixtures

WIDE = {**ZAYA, "hidden_size": 128, "head_dim": 64, "num_experts": 4, "initializer_range": 0.08, "max_position_embeddings": CTX,
        "moe_intermediate_size": 64, "sliding_window": 100, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("zaya") / "model"
    return folder, written(Case("zaya", WIDE), folder)


@pytest.mark.parametrize("shape", [CcaShape(6, 2, 24, 2, 2), CcaShape(4, 1, 16, 3, 4), CcaShape(2, 2, 16, 1, 2)])
def test_queries_keys_and_values_match_the_reference_wherever_a_text_is_cut(shape: CcaShape) -> None:
    """And are the same bits however the tokens came."""
    rng, pool, tokens, wide = np.random.default_rng(2), ThreadPool(2), 60, shape.projection_widths[0]
    sizes = Dims(64, shape.heads, shape.kv_heads, shape.depth, 64, 300, chunk=64, ctx=128, logit_rows=8, recurrent=shape,
                 parallel_hybrid=True)
    x, count = rng.standard_normal((tokens, wide), np.float32), shape.qk_channels
    w = Cca(*(rng.standard_normal(size, np.float32) for size in ((shape.first, count), count, count * shape.second * shape.depth, count,
                                                                 shape.kv_heads)))
    found = []
    for kind, cuts in (("compiled", (60,)), ("compiled", (1, 1, 2, 9, 47)), ("reference", (31, 1, 28))):
        ops = CpuOps(pool, sizes, default_registry("reference") if kind == "reference" else None)
        told = controls()
        states, at, rows = ops.state_layer(shape, np.zeros(shape.nbytes, np.uint8), told), 0, []
        for step, many in enumerate(cuts):
            told[:2] = (-1 if step == 0 else (step + 1) % 2), step % 2
            outs = states.convolved(np.ascontiguousarray(x[at : at + many]), w)
            ops.flush()
            rows.append(np.concatenate([each.copy() for each in outs], 1))
            at += many
        found.append(np.concatenate(rows))
    pool.close()
    assert np.array_equal(found[0], found[1]) and np.allclose(found[0], found[2], atol=2e-5)
    values, half = found[0][:, shape.values + 2 * shape.half_value_channels :], shape.half_value_channels
    assert np.array_equal(values[:, :half], x[:, -half:]) and not values[0, half:].any()
    assert np.array_equal(values[1:, half:], x[:-1, shape.qk_channels : shape.channels])
    lengths = np.linalg.norm(found[0][:, : shape.values].reshape(tokens, -1, shape.depth), axis=2)
    assert np.allclose(lengths, shape.depth**0.5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 50])
def test_streams_that_are_multiplied_and_moved_match_the_reference(tokens: int) -> None:
    rng, pool, width = np.random.default_rng(4), ThreadPool(2), 96
    sizes = Dims(width, 4, 2, 24, 64, 300, chunk=64, ctx=128, logit_rows=8)
    x, branch, own = *rng.standard_normal((2, tokens, width), np.float32), ResidualScale(*rng.standard_normal((3, width), np.float32))
    fast, exact = CpuOps(pool, sizes), CpuOps(pool, sizes, default_registry("reference"))
    for each in (branch, None):
        made, wanted = (ops.scaled_residual(x.copy(), each, own) for ops in (fast, exact))
        fast.flush()
        assert np.allclose(made, wanted, atol=1e-5)
        assert np.allclose(wanted, own.scales * x + own.offsets + (0 if each is None else own.branch_scales * each), atol=1e-5)
    streams, shares, y = rng.standard_normal((tokens, 2 * width), np.float32), rng.standard_normal(24, np.float32), x[:, :24].copy()
    for share in (None, shares):
        outs = []
        for ops in (fast, exact):
            held, row = streams.copy(), y.copy()
            ops.registry.select(Call("carry")).candidate.run(ops, row, held, width, share)
            ops.flush()
            assert np.array_equal(held[:, width : width + 24], row)
            held[:, width : width + 24] = streams[:, width : width + 24]
            assert np.array_equal(held, streams)
            outs.append(row)
        assert np.allclose(*outs, atol=1e-6)
        assert np.allclose(outs[0], y if share is None else y + shares * streams[:, width : width + 24], atol=1e-6)
    pool.close()


def test_tokens_without_an_expert_are_among_those_that_agree(model: tuple[Path, PreTrainedModel]) -> None:
    """Whose share of what is chosen last is nothing; each layer's choice is transformers'."""
    folder, theirs = model
    chosen: list[np.ndarray] = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda module, given, out: chosen.append(out[1].numpy().copy()))
             for layer in theirs.model.layers]
    ids = IDS[:200]
    with torch.no_grad():
        theirs(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    idle = sum(int((shares == 0).sum()) for shares in chosen)
    assert 0 < idle < sum(shares.size for shares in chosen)
    engine = opened(folder, kv="32bit")
    visited: list[int] = []
    engine.model.forward(np.array(ids[:120], np.int64), engine.cache, prompt=True,
                         tap=lambda name, layer, value: visited.append(int(value.offsets[-1])) if name == "visits" else None)
    assert visited == [int((shares.reshape(-1)[:120] != 0).sum()) for shares in chosen]
    engine.close()


@pytest.mark.slow
def test_prompts_and_single_tokens_agree_with_transformers(model: tuple[Path, PreTrainedModel]) -> None:
    folder, theirs = model
    engine = opened(folder, kv="32bit")
    read_afresh(engine, IDS[:230])
    rows = one_by_one(engine, IDS[230:250])
    engine.close()
    assert_close(rows, oracle(theirs, IDS[:250])[230:], lambda: oracle(theirs, IDS[:250])[230:])


def test_threads_and_chunks_change_no_bit(folder: Path) -> None:
    assert_threads_and_chunks_change_nothing(folder, 445, FEWER_SETTINGS)


@pytest.mark.parametrize("held", [200, pytest.param(70, marks=pytest.mark.slow)])
def test_tokens_at_once_are_tokens_one_by_one(engine: Engine, held: int) -> None:
    assert_chunks_equal_single_tokens(engine, held)


@pytest.mark.slow
@pytest.mark.parametrize("right", [0.6, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0))])
def test_drafts_change_no_answer(engine: Engine, right: float) -> None:
    assert_drafts_change_nothing(engine, 190, right)


@pytest.mark.slow
def test_another_question_behind_a_prompt_reads_that_alone(engine: Engine) -> None:
    assert_prefix_is_reused(engine)


def test_answers_at_once_are_what_each_is_alone(folder: Path) -> None:
    """Each goes on from its own last tokens."""
    assert_batching_changes_nothing(folder, (IDS[:300], IDS[100:160]))


def test_a_session_continues_with_the_same_bits(engine: Engine, tmp_path: Path) -> None:
    assert_session_continues(engine, tmp_path / "sessions")


def test_weights_and_experts_from_the_disk_give_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody guesses whom the next layer visits: its router goes on from this one's."""
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 1024)
    engines = opened(folder), streaming(folder, keep=3, ctx=CTX, chunk=128), paging(folder, 3, ctx=CTX, chunk=128)
    found = [logits_after(each, 300, 320) for each in engines]
    assert engines[2].model.pager.stats.hits > 0
    for each in engines:
        each.close()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_the_plan_counts_what_is_allocated(folder: Path) -> None:
    engine = opened(folder)
    try:
        cache = engine.cache
        held = sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes + cache.states.nbytes
        assert held == engine.placement.kv_bytes and cache.states.nbytes == 3 * engine.config.recurrent.nbytes
        read(engine, IDS[:500])
        engine.forward_logits([1])
        workspace = engine.backends["cpu"].workspace
        assert all(len(buffer) == workspace.floats[name] for name, buffer in workspace._buffers.items())
    finally:
        engine.close()


@pytest.mark.slow
def test_a_packed_cache_answers_nearly_as_an_exact_one(folder: Path) -> None:
    rows = []
    for kv in ("32bit", "4bit"):
        engine = opened(folder, kv=kv, kv_window=64)
        rows.append(read_afresh(engine, IDS[:500]).copy())
        engine.close()
    assert 0 < np.abs(rows[0] - rows[1]).max() < 0.2 * np.abs(rows[0]).max()


@pytest.mark.slow
def test_a_converted_folder_keeps_what_decides(folder: Path, tmp_path: Path) -> None:
    assert converted(folder, tmp_path / "8bit", "8bit") == {"router", "router_in", "router_first", "router_second"}
    assert_answers_stay_near(folder, tmp_path / "8bit", 0.1)


@pytest.mark.slow
def test_calibration_is_a_pass_of_the_model(folder: Path) -> None:
    stats = assert_calibration_is_a_pass(folder)
    assert {"state_in", "o"} <= set(stats[0].roles) and any(role.startswith("experts.") for role in stats[1].roles)


# As its class writes it, with a kind of rotary positions beside their sections, which transformers takes out of a published one.
PUBLISHED = {
    "architectures": ["ZayaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "cca_time0": 2,
    "cca_time1": 2, "dtype": "bfloat16", "eos_token_id": 106, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "layer_types": ["hybrid"] * 40, "lm_head_bias": False, "max_position_embeddings": 131072,
    "model_type": "zaya",
    "moe_intermediate_size": 2048, "num_attention_heads": 8, "num_experts": 16, "num_experts_per_tok": 1, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "output_router_logits": False, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_parameters": {
        "hybrid": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}, "rope_type": "default",
        "hybrid_sliding": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "router_hidden_size": 256, "sliding_window": None, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 262272}


def test_a_config_is_known_to_the_last_key_and_what_it_leaves_out_is_what_its_class_has() -> None:
    config, theirs = parse_config(PUBLISHED, strict=True), CONFIG_MAPPING["zaya"]()
    assert config.recurrent == CcaShape(8, 2, 128, 2, 2) and config.moe.num_experts == theirs.num_experts and config.moe.zero_experts == 1
    assert config.warnings == () and config.tie_word_embeddings and config.router_mlp_dim == theirs.router_hidden_size == 256
    assert {rope.theta for rope in config.ropes} == {5e6} and config.rope.partial_rotary_factor == 0.5
    silent = parse_config({"model_type": "zaya", "architectures": ["ZayaForCausalLM"]}, strict=True)
    assert replace(silent, dtype=config.dtype) == config


@pytest.mark.parametrize(("key", "value"), [
    ("attention_bias", True), ("num_experts_per_tok", 2), ("router_hidden_size", 4096), ("cca_time0", 0), ("hidden_act", "gelu"),
    ("layer_types", ["full_attention"] * 40), ("layer_types", ["hybrid_sliding"] * 40), ("rope_parameters", {"rope_theta": 1e4})])
def test_what_it_cannot_be_is_named(key: str, value: object) -> None:
    refused({**PUBLISHED, key: value}, key)
