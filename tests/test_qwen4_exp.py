"""Qwen 4 Exp in the whole program: block selection against transformers, n-gram embeddings of preceding tokens independent of chunking;
runs, plans, sessions, drafts, batches and converted folders of such a model."""

import json
from dataclasses import replace
from pathlib import Path
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
from conversions import options
from family_models import Case, assert_close, oracle, written
from hybrid_models import CTX, IDS, one_by_one, opened, opened_as, read, read_afresh
from indexer_models import MAX_SCORE_GAP, recorded_selections
from more_family_cases import QWEN_4
from quantization_checks import assert_answers_stay_near, assert_calibration_is_a_pass, converted
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs_of

from effllm import UsageError
from effllm.kernels.indexer_shape import IndexShape
from effllm.offload.checkpoint import CheckpointError
from effllm.quant.weight import Weight
from effllm.runtime.config import parse_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.conversion import bit_search
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.engine import Engine
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.source import open_store
from effllm.runtime.stores.container import read_container
from effllm.runtime.weights.weight_tiers import weight_tiers

__all__ = ["engine", "folder"]  # fixtures

RATE = 4
WIDE = {**QWEN_4, "hidden_size": 128, "ple_embed_dim": 96, "initializer_range": 0.08, "max_position_embeddings": CTX, "indexer_budget": 80}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen4") / "model"
    return folder, written(Case("qwen4_exp_text", WIDE), folder)


def guided(model: PreTrainedModel, ids: list[int], chosen: dict[int, np.ndarray]) -> tuple[np.ndarray, int]:
    """The oracle's logits where its indexer chooses blocks as ours did, and how many choices that were. Asserts that those are among the
    best, and that the tokens behind the last whole block are seen too."""
    held, place = 0, iter(range(RATE - 1, len(ids)))  # tokens before them have no block to choose

    def choose(scores: torch.Tensor, count: int, dim: int) -> object:
        nonlocal held
        found, position = usual(scores, count, dim=dim), next(place)
        if position not in chosen:
            return found
        (units,) = chosen[position]
        assert units[-1] == (position + 1) // RATE and len(set(units[:-1])) == count == len(units) - 1
        indices = torch.from_numpy(units[:-1].astype(np.int64))
        assert (found.values.min() - scores[indices].min()) <= MAX_SCORE_GAP * scores.std()
        held += 1
        return type(found)((scores[indices], indices))

    def forward(self: torch.nn.Module, *args: object, **more: object) -> torch.Tensor:
        with patch.object(torch.Tensor, "topk", choose):
            return real(self, *args, **more)

    usual, real = torch.Tensor.topk, theirs_of.Qwen4ExpTextQSAIndexer.forward
    with patch.object(theirs_of.Qwen4ExpTextQSAIndexer, "forward", forward):
        logits = oracle(model, ids)
    assert next(place, None) is None
    return logits, held


def test_what_is_chosen_of_many_blocks_is_as_good_as_the_oracles(model: tuple[Path, PreTrainedModel]) -> None:
    """Of a prompt and of single tokens behind it; without the choice, or without any part of what is the family's, logits are others."""
    folder, theirs = model
    engine, tokens, steps = opened(folder, kv="32bit"), 330, 20
    whole, config = engine.config.indexer.shape.dense_tokens, engine.config
    assert whole == 83 and len(engine.cache.token_selections) == 1
    with recorded_selections(engine) as (chosen,):
        read_afresh(engine, IDS[:tokens])
        rows = one_by_one(engine, IDS[tokens : tokens + steps])
        expected, held = guided(theirs, IDS[: tokens + steps], chosen)
        assert held == tokens + steps - whole
    assert_close(rows, expected[tokens:], lambda: oracle(theirs, IDS[: tokens + steps])[tokens:])
    engine.close()
    own = config.ngrams
    for taken in ({"indexer": replace(config.indexer, shape=replace(config.indexer.shape, top_k=CTX))},
                  {"ngrams": replace(own, eos_token_id=8)}):
        other = opened_as(folder, replace(config, **taken))
        read_afresh(other, IDS[:tokens])
        found = one_by_one(other, IDS[tokens : tokens + steps])
        other.close()
        assert np.abs(found - rows).max() > 1e-3 * np.abs(rows).max(), taken


def test_threads_and_chunks_change_no_bit(folder: Path) -> None:
    assert_threads_and_chunks_change_nothing(folder, 445, FEWER_SETTINGS)


@pytest.mark.parametrize("held", [200, pytest.param(70, marks=pytest.mark.slow)])
def test_tokens_at_once_are_tokens_one_by_one(engine: Engine, held: int) -> None:
    """Where some of them see all tokens before them too, and passes come again."""
    assert_chunks_equal_single_tokens(engine, held)


@pytest.mark.parametrize("right", [0.6, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0))])
def test_drafts_change_no_answer(engine: Engine, right: float) -> None:
    assert_drafts_change_nothing(engine, 190, right)


def test_another_question_behind_a_prompt_reads_that_alone(engine: Engine) -> None:
    """A state is kept a little before the end of a prompt, with the words before it."""
    assert_prefix_is_reused(engine)


def test_answers_at_once_are_what_each_is_alone(folder: Path) -> None:
    assert_batching_changes_nothing(folder, (IDS[:300], IDS[100:160]))


def test_a_session_continues_with_the_same_bits(engine: Engine, tmp_path: Path) -> None:
    assert_session_continues(engine, tmp_path / "sessions")


def test_the_plan_counts_what_is_allocated_and_no_table(folder: Path) -> None:
    engine = opened(folder)
    try:
        cache, own = engine.cache, engine.config.ngrams
        held = sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes + cache.states.nbytes
        held += sum(len(each.memory) + each.rows.nbytes for each in cache.indexes)
        assert held - 128 * 4 * sum(cache.index_sizes) <= engine.placement.kv_bytes <= held + 128 * sum(cache.index_sizes)
        assert cache.states.nbytes == 3 * engine.config.recurrent.nbytes + own.shape.nbytes
        table = own.num_rows(1) * own.width * 4
        assert engine.model.nbytes - table == engine.placement.weights_bytes and weight_tiers(engine.prepared).disk == table
        assert any("table of n-grams" in said and "6 rows" in said for said in engine.prepared.notices)
        read(engine, IDS[:500])
        engine.forward_logits([1])
        assert cache.allocated_nbytes <= engine.placement.kv_bytes + 128 * 4 * sum(cache.index_sizes)
        assert all(len(buffer) == engine.backends["cpu"].workspace.floats[name]
                   for name, buffer in engine.backends["cpu"].workspace._buffers.items())
    finally:
        engine.close()


def test_a_table_is_quantized_and_its_rows_are_read_where_they_lie(folder: Path, tmp_path: Path) -> None:
    """In the format of an embedding; what decides what is seen, and who is routed where, stays as it is."""
    kept = converted(folder, tmp_path / "4bit", "4bit")
    made, plan = read_container(tmp_path / "4bit"), plan_conversion(folder, options("4bit").recipe)
    plan.store.close()
    assert kept == {"router", "index_q", "index_k", "attn_mix.mix_in", "mlp_mix.mix_in", "shared.scale", "state_beta", "state_rate"}
    table = next(job for job in plan.jobs if job.role == "layers.1.ngrams")
    assert str(made.tensors[table.name].spec) == str(made.tensors["model.embed_tokens.weight"].spec) == "symmetric6:32"
    assert_answers_stay_near(folder, tmp_path / "4bit", 0.5)
    engine = opened(tmp_path / "4bit")
    numbers = np.random.default_rng(4).integers(0, table.shape[0], (90, 6))
    with engine.model.outer() as outer:
        own, ops = outer.ngrams[1], engine.backends["cpu"]
        found = ops.ngram_rows(numbers, own, 0).copy()
    with open_store(tmp_path / "4bit") as store:
        blob = store.read(store.tensors[table.name])
    whole = Weight.low_bit(made.tensors[table.name].spec, table.shape, blob).to_f32()
    assert np.allclose(found, whole[numbers].reshape(90, -1), rtol=1e-6)
    engine.close()


@pytest.mark.slow
def test_calibration_is_a_pass_of_the_model(folder: Path) -> None:
    """Layer by layer and window by window: what leaves the streams at the end is what a forward pass gives."""
    stats = assert_calibration_is_a_pass(folder)
    assert {"ngram_key", "ngram_value", "state_in", "state_out", "shared.down", "experts.3.down"} <= set(stats[1].roles)
    assert {"q", "k", "o", "experts.3.up"} <= set(stats[3].roles)


@pytest.mark.parametrize(("asked", "flag"), [({"kv": "4bit"}, "--kv 4bit"), ({"kv_ram": "1M"}, "--kv-ram"), ({"device": "cuda"},
                                             "--device cuda"), ({"gpu_layers": 2}, "-ngl 2")])
def test_what_chosen_blocks_cannot_have_is_refused(folder: Path, asked: dict[str, object], flag: str) -> None:
    with pytest.raises(UsageError, match="beyond 83 tokens this model uses sparse attention") as caught:
        prepare(folder, EngineOptions(ctx=CTX, **{"device": "cpu", **asked}))
    shorter = "; or -c 83, where attention is full"
    assert caught.value.message.startswith(flag) and caught.value.hint == f"leave {flag} out{shorter}"
    placed = prepare(folder, EngineOptions(ctx=CTX, **{"device": "cpu", **asked}, from_settings=frozenset(asked)))
    assert any(flag in said and "ignored" in said for said in placed.notices)
    assert prepare(folder, EngineOptions(ctx=CTX, kv="auto", device="cpu")).options.kv == "16bit"


def test_where_all_tokens_are_seen_there_is_no_indexer(folder: Path, engine: Engine) -> None:
    short = opened(folder, ctx=83)
    assert short.config.indexer is None and not short.cache.token_selections
    assert np.array_equal(read_afresh(short, IDS[:80]), read_afresh(engine, IDS[:80]))
    short.close()
    with pytest.raises(UsageError, match="this model uses sparse attention") as caught:
        prepare(folder, EngineOptions(ctx=84, device="cuda"))
    assert caught.value.hint == "leave --device cuda out; or -c 83, where attention is full"


def test_numbers_of_another_config_are_refused(folder: Path, tmp_path: Path) -> None:
    """Of which a checkpoint keeps what words are multiplied by."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"seed": 5}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    engine = opened(tmp_path)
    with pytest.raises(CheckpointError, match="layer_multipliers.* does not match its config.json"):
        read(engine, IDS[:10])
    engine.close()


PUBLISHED = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen4_exp",
    "tie_word_embeddings": False, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "vision_config": {"model_type": "qwen4_exp"},
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4,
        "hc_count": 4, "hc_lowrank": 320, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2560, "indexer_budget": 2048,
        "indexer_compress_ratio": 4, "indexer_head_dim": 128, "indexer_kv_heads": 1, "indexer_n_heads": 8, "initializer_range": 0.02,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "model_type": "qwen4_exp_text", "moe_intermediate_size": 640, "mtp_num_hidden_layers": 1,
        "ngram_size": 3, "ngram_vocab_size_base": 20000000, "norm_topk_prob": True, "num_attention_heads": 24, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_gate_type": "sigmoid", "ple_layer_ids": [2],
        "rms_norm_eps": 1e-06, "shared_expert_intermediate_size": 640, "split_ngram_parts": 512, "use_cache": True, "vocab_size": 248320,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"}}}


def test_a_config_is_read_as_transformers_does() -> None:
    """A whole one, and one that leaves out what can be left out; a table as large as published ones have costs no time."""
    inside = PUBLISHED["text_config"]
    made, theirs = parse_config(PUBLISHED), Qwen4ExpTextConfig(**inside)
    assert len(made.warnings) == 1 and made.warnings[0].startswith("'qwen4_exp' takes images too")
    assert parse_config({**inside, "architectures": ["Qwen4ExpForCausalLM"]}, strict=True) == replace(made, warnings=())
    assert [layer in made.recurrent_layers for layer in range(48)] == [kind == "linear_attention" for kind in theirs.layer_types]
    assert made.indexer.shape == IndexShape(8, 128, 64, 512, tokens_per_key=4, pooled=True) and made.indexer.shape.dense_tokens == 2051
    assert (made.residual_streams, made.residual_gate_rank, made.final_norm_kind, made.mtp_layers) == (4, 320, "none", 0)
    own = made.ngrams
    assert (own.layers, own.tables, own.width, own.eos_token_id) == ((1,), 16, 160,
                                                                     248044) and own.num_rows(1) * own.width == 51_200_245_760
    assert own.shape.slot_floats * 4 == 9 * 10_240 * 4 + 64 and made.recurrent.sigmoid_gate
    least = {"model_type": "qwen4_exp_text", **{key: value for key, value in inside.items() if key.startswith("indexer_")},
             "indexer_head_dim": 256}
    made, theirs = parse_config(least, strict=True), Qwen4ExpTextConfig(**least)
    assert [layer in made.recurrent_layers for layer in range(40)] == [kind == "linear_attention" for kind in theirs.layer_types]
    assert made.ngrams is None and not made.recurrent.sigmoid_gate and made.moe.num_experts == theirs.num_experts
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"):
        assert getattr(made, name) == getattr(theirs, name)
    assert made.rope.partial_rotary_factor == 1.0 and made.rope.theta == 10_000.0


@pytest.mark.parametrize(("key", "value", "named"), [
    ("indexer_n_heads", None, "indexer_n_heads is missing"), ("indexer_kv_heads", 2, "indexer_kv_heads 2"),
    ("indexer_budget", 2050, "indexer_budget 2050"), ("indexer_compress_ratio", 1, "indexer_compress_ratio 1"),
    ("indexer_head_dim", 32, "indexer_head_dim 32"), ("hc_count", 1, "hc_count"), ("output_gate_type", "gelu", "output_gate_type"),
    ("hidden_act", "gelu", "hidden_act"), ("ple_layer_ids", [4], "holds 4, a layer of another kind"),
    ("ple_layer_ids", [0], "ple_layer_ids"), ("ple_layer_ids", "2", "ple_layer_ids"),
    ("ple_embed_dim", 2561, "ple_embed_dim 2561"), ("eos_token_id", None, "eos_token_id None"),
    ("layer_types", ["sliding_attention"] * 48, "sliding_attention"), ("layer_types", ["linear_attention"] * 48, "only linear attention"),
    ("ngram_vocab_size_base", 2**40, "ngram_vocab_size_base"), ("mlp_only_layers", [1], "mlp_only_layers"),
    ("attn_output_gate", False, "attn_output_gate"), ("split_ngram_parts", 0, "split_ngram_parts")])
def test_what_is_not_read_is_named(key: str, value: object, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**PUBLISHED, "text_config": {**PUBLISHED["text_config"], key: value}})
    assert named in caught.value.message, caught.value.message


def test_tensors_that_make_no_table_are_named(folder: Path, tmp_path: Path) -> None:
    """One that is missing, and one that is too short."""
    config = (folder / "config.json").read_bytes()
    tensors = load_file(folder / "model.safetensors")
    shard = next(name for name in tensors if "shard_1" in name)
    for place, (kept, what) in enumerate(((None, "ngram_embedding.weight is missing"), (tensors[shard][:-1], "expected a part of"))):
        other = tmp_path / str(place)
        other.mkdir()
        (other / "config.json").write_bytes(config)
        left = {name: value for name, value in tensors.items() if name != shard} | ({} if kept is None else {shard: kept.contiguous()})
        save_file(left, other / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=what):
            prepare(other, EngineOptions(device="cpu", ctx=CTX))


@pytest.mark.slow
def test_bits_are_searched_for_all_but_the_table(folder: Path) -> None:
    """Which is not in memory to be swapped; it has the format of an embedding."""
    engine, plan = opened(folder, kv="32bit"), plan_conversion(folder, options("4bit").recipe)
    try:
        *_, found = bit_search.search(plan, engine, IDS[:60], 6.5, options("4bit").recipe)
    finally:
        plan.store.close()
        engine.close()
    assert found.bits_per_weight <= 6.5 and "model.layers.1.ple.key_proj.weight" in found.recipe.names
    assert not any("ngram_embedding" in name for name in found.recipe.names)
