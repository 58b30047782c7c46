"""GLM 5.3 Flash in the whole program: selection among pooled keys against transformers, pooled keys against their definition; runs, plans,
sessions, drafts, batches and converted folders of such a model."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

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
)
from config_samples import refused
from family_models import Case, assert_close, oracle, written
from hybrid_models import CTX, IDS, one_by_one, opened, opened_as, read, read_afresh
from indexer_models import MAX_SCORE_GAP, recorded_selections
from quantization_checks import assert_answers_stay_near, assert_calibration_is_a_pass, converted
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.glm5_next import modeling_glm5_next as theirs_of
from unusual_family_cases import GLM_5_NEXT

from effllm import UsageError
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.indexer_shape import IndexShape
from effllm.kernels.kda_shape import KdaShape
from effllm.kernels.latent_shape import LatentShape
from effllm.kernels.layout import F16, F32
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.weight import Norm
from effllm.runtime.config import parse_config
from effllm.runtime.engine import Engine
from effllm.runtime.prepare import EngineOptions, prepare

__all__ = ["engine", "folder"]  # fixtures

RATE = 8
WIDE = {**GLM_5_NEXT, "hidden_size": 128, "initializer_range": 0.08, "max_position_embeddings": CTX, "index_kpool": RATE, "index_topk": 80}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("glm") / "model"
    return folder, written(Case("glm5_next_text", WIDE, inside="glm5_next"), folder)


@pytest.mark.parametrize("stored", [F32, F16])
def test_keys_of_pools_match_the_reference_wherever_a_text_is_cut(stored: int) -> None:
    """And are the same bits however the tokens came."""
    rng, pool, width, rate, tokens = np.random.default_rng(1), ThreadPool(2), 24, 5, 203
    shape = IndexShape(2, width, 0, 4, tokens_per_key=rate, pooled=True, weighted_pooling=True)
    sizes = Dims(64, 4, 1, 16, 64, 300, chunk=256, ctx=256, logit_rows=8, indexer=shape)
    given = rng.standard_normal((tokens, 2 * width), np.float32) * np.where(np.arange(2 * width) < width, 1, 6).astype(np.float32)
    norm = Norm("layer", *rng.standard_normal((2, width), np.float32), 1e-6)
    closing = norm, rng.standard_normal(rate * width, np.float32)
    found = []
    for kind, cuts in (("compiled", (203,)), ("compiled", (1, 3, 4, 120, 74, 1)), ("reference", (99, 104))):
        ops = CpuOps(pool, sizes, default_registry("reference") if kind == "reference" else None)
        index = ops.index_layer(shape, np.zeros(shape.nbytes(256, stored), np.uint8), stored)
        at = 0
        for count in cuts:
            index.note(np.ascontiguousarray(given[at : at + count]), at, closing)
            ops.flush()
            at += count
        assert at == tokens
        found.append(index.keys(tokens // rate).astype(np.float64))
    pool.close()
    assert np.array_equal(found[0], found[1]) and np.allclose(found[0], found[2], atol=1e-5 if stored == F32 else 1e-2)
    plain = given[:, :width] - given[:, :width].mean(1, keepdims=True)
    plain = plain / np.sqrt((plain**2).mean(1, keepdims=True) + 1e-6) * norm.weight + norm.bias
    says = (given[:, width:] + np.tile(closing[1].reshape(rate, width), (-(-tokens // rate), 1))[:tokens])
    whole = tokens // rate * rate
    weights = torch.from_numpy(says[:whole].reshape(-1, rate, width)).softmax(1).numpy()
    assert np.allclose(found[0], (weights * plain[:whole].reshape(-1, rate, width)).sum(1), atol=1e-5 if stored == F32 else 2e-2)


def guided(model: PreTrainedModel, ids: list[int], chosen: dict[int, np.ndarray]) -> tuple[np.ndarray, int]:
    """The oracle's logits where its indexer chooses pools as ours did, and how many choices that were. Asserts that those are among the
    best, and that the tokens behind the last whole pool are seen too."""
    held = 0

    def choose(scores: torch.Tensor, count: int, dim: int) -> object:
        nonlocal held
        found = usual(scores, count, dim=dim)
        indices = found.indices.clone()
        for position, (units,) in chosen.items():
            assert units[-1] == (position + 1) // RATE and len(set(units[:-1])) == count == len(units) - 1
            given = torch.from_numpy(units[:-1].astype(np.int64))
            own = scores[0, position, : (position + 1) // RATE]
            assert found.values[0, position].min() - own[given].min() <= MAX_SCORE_GAP * own.std()
            indices[0, position] = given
            held += 1
        return SimpleNamespace(indices=indices)

    def forward(self: torch.nn.Module, *args: object, **more: object) -> torch.Tensor:
        with patch.object(torch.Tensor, "topk", choose):
            return real(self, *args, **more)

    usual, real = torch.Tensor.topk, theirs_of.Glm5NextTextIndexer.forward
    with patch.object(theirs_of.Glm5NextTextIndexer, "forward", forward):
        return oracle(model, ids), held


def test_what_is_chosen_of_many_pools_is_as_good_as_the_oracles(model: tuple[Path, PreTrainedModel]) -> None:
    """Of a prompt and of single tokens behind it; without the choice logits are others."""
    folder, theirs = model
    engine, tokens, steps = opened(folder, kv="32bit"), 330, 20
    whole, config = engine.config.indexer.shape.dense_tokens, engine.config
    assert whole == 87 and len(engine.cache.token_selections) == 1
    with recorded_selections(engine) as (chosen,):
        read_afresh(engine, IDS[:tokens])
        rows = one_by_one(engine, IDS[tokens : tokens + steps])
        expected, held = guided(theirs, IDS[: tokens + steps], chosen)
        assert held == tokens + steps - whole
    assert_close(rows, expected[tokens:], lambda: oracle(theirs, IDS[: tokens + steps])[tokens:])
    engine.close()
    other = opened_as(folder, replace(config, indexer=replace(config.indexer, shape=replace(config.indexer.shape, top_k=CTX))))
    read_afresh(other, IDS[:tokens])
    found = one_by_one(other, IDS[tokens : tokens + steps])
    other.close()
    assert np.abs(found - rows).max() > 1e-3 * np.abs(rows).max()


def test_threads_and_chunks_change_no_bit(folder: Path) -> None:
    assert_threads_and_chunks_change_nothing(folder, 445, FEWER_SETTINGS)


@pytest.mark.parametrize("held", [200, pytest.param(70, marks=pytest.mark.slow)])
def test_tokens_at_once_are_tokens_one_by_one(engine: Engine, held: int) -> None:
    """Where some of them see all tokens before them too, and passes come again."""
    assert_chunks_equal_single_tokens(engine, held)


@pytest.mark.slow
@pytest.mark.parametrize("right", [0.6, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0))])
def test_drafts_change_no_answer(engine: Engine, right: float) -> None:
    assert_drafts_change_nothing(engine, 190, right)


@pytest.mark.slow
def test_another_question_behind_a_prompt_reads_that_alone(engine: Engine) -> None:
    assert_prefix_is_reused(engine)


def test_answers_at_once_are_what_each_is_alone(folder: Path) -> None:
    """Each has pools of its own."""
    assert_batching_changes_nothing(folder, (IDS[:300], IDS[100:160]))


def test_a_session_continues_with_the_same_bits(engine: Engine, tmp_path: Path) -> None:
    """With what tokens said of a pool that was not whole."""
    assert_session_continues(engine, tmp_path / "sessions")


@pytest.mark.slow
def test_the_plan_counts_what_is_allocated(folder: Path) -> None:
    engine = opened(folder)
    try:
        cache = engine.cache
        held = sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes + cache.states.nbytes
        held += sum(len(each.memory) + each.rows.nbytes for each in cache.indexes)
        assert held - 128 * RATE * sum(cache.index_sizes) <= engine.placement.kv_bytes <= held + 128 * sum(cache.index_sizes)
        read(engine, IDS[:500])
        engine.forward_logits([1])
        assert cache.allocated_nbytes <= engine.placement.kv_bytes + 128 * RATE * sum(cache.index_sizes)
        assert all(len(buffer) == engine.backends["cpu"].workspace.floats[name]
                   for name, buffer in engine.backends["cpu"].workspace._buffers.items())
    finally:
        engine.close()


@pytest.mark.slow
def test_a_converted_folder_keeps_what_decides(folder: Path, tmp_path: Path) -> None:
    assert converted(folder, tmp_path / "8bit", "8bit") == {
        "router", "index_q", "index_k", "index_weights", "index_pool_ape", "kv_b", "attn_mix", "mlp_mix", "state_beta", "state_gate_wide",
        "state_rate", "state_rate_wide"}
    assert_answers_stay_near(folder, tmp_path / "8bit", 0.1)


@pytest.mark.slow
def test_calibration_is_a_pass_of_the_model(folder: Path) -> None:
    """Layer by layer and window by window: what leaves the streams at the end is what a forward pass gives."""
    stats = assert_calibration_is_a_pass(folder, 80)
    assert {"state_in", "state_out", "gate", "down"} <= set(stats[0].roles) and {"q_a", "kv_a", "o", "experts.3.up"} <= set(stats[3].roles)


def test_where_all_tokens_are_seen_there_is_no_indexer(folder: Path, engine: Engine) -> None:
    short = opened(folder, ctx=87)
    assert short.config.indexer is None and not short.cache.token_selections
    assert np.array_equal(read_afresh(short, IDS[:80]), read_afresh(engine, IDS[:80]))
    short.close()
    with pytest.raises(UsageError, match="this model uses sparse attention") as caught:
        prepare(folder, EngineOptions(ctx=88, device="cuda"))
    assert caught.value.hint == "leave --device cuda out; or -c 87, where attention is full"


def test_what_a_config_says_by_saying_nothing() -> None:
    """As transformers' own class has it, also where all of the text model is said outside."""
    inside = {"model_type": "glm5_next_text"}
    raw = {"model_type": "glm5_next", "architectures": ["Glm5NextForConditionalGeneration"], "text_config": inside, "vision_config": {}}
    config, theirs = parse_config(raw, strict=True), CONFIG_MAPPING["glm5_next_text"]()
    assert config.mla == LatentShape(512, 256, 0, 256, 1536) and config.recurrent == KdaShape.of(64, 128, 4, decay_bound=-5.0)
    assert config.recurrent_layers == tuple(i for i, kind in enumerate(theirs.layer_types) if kind == "linear_attention")
    assert config.indexer.shape == IndexShape(32, 128, 0, 128, tokens_per_key=16, pooled=True,
                                              weighted_pooling=True) and config.indexer.shape.dense_tokens == 2063
    assert config.moe.layers == {i for i, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"}
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.routed_scale, config.residual_streams) == (288, 8, 2.5, 4)
    assert config.sinkhorn == (20, 1e-6) and config.mla_norm_eps == config.norm_eps == 1e-5 and not config.tie_word_embeddings
    assert len(config.warnings) == 1 and config.warnings[0].startswith("'glm5_next' takes images too")
    flat = parse_config({"model_type": "glm5_next", "architectures": ["Glm5NextForConditionalGeneration"], "num_hidden_layers": 45}, True)
    assert replace(flat, warnings=()) == replace(config, warnings=())


SIZES = {"model_type": "glm5_next_text", "vocab_size": 300, "hidden_size": 96, "intermediate_size": 88, "num_hidden_layers": 4,
         "num_attention_heads": 6, "num_key_value_heads": 6}


@pytest.mark.parametrize(("key", "value"), [
    ("qk_rope_head_dim", 64), ("q_lora_rank", None), ("hidden_act", "gelu"), ("swiglu_limit", 7.0), ("index_kpool", 1), ("index_topk", 100),
    ("index_kpool_always_select_tail", False), ("layer_types", ["linear_attention"] * 4), ("layer_types", ["sliding_attention"] * 4),
    ("indexer_types", ["full", "full", "full", "shared"]), ("linear_lower_bound", 5.0), ("linear_attn_config", {"full_rank": True}),
    ("mlp_layer_types", ["dense", "moe", "sparse", "sparse"]), ("hc_mult", 1)])
def test_what_it_cannot_be_is_named(key: str, value: object) -> None:
    refused({**SIZES, key: value}, key)
