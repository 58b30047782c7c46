"""DeepSeek V4 in the whole program: selection among compressed keys against transformers; runs, plans, sessions, drafts and converted
folders of such a model. Kernels are in `test_compressed_keys.py`."""

import json
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
    save,
)
from family_models import Case, assert_close, oracle, written
from hybrid_models import CTX, IDS, one_by_one, opened, opened_as, read, read_afresh
from indexer_models import oracle_with_selections, recorded_selections
from more_family_cases import CHOOSES, DEEPSEEK_4, HEAVY, WINDOWED
from quantization_checks import assert_answers_stay_near, assert_calibration_is_a_pass, converted
from safetensors.torch import load_file, save_file
from streamed_models import streaming
from transformers import DeepseekV4Config, PreTrainedModel

from effllm import EffllmError, UsageError
from effllm.kernels.indexer_shape import IndexShape
from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.engine import Engine
from effllm.runtime.planning import forecast
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sessions.saved_cache import restore_cache
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.weights import stream_layout

__all__ = ["engine", "folder"]  # fixtures

WIDE = {**DEEPSEEK_4, "hidden_size": 128, "q_lora_rank": 64, "initializer_range": 0.08, "max_position_embeddings": CTX, "index_topk": 20,
        "moe_intermediate_size": 64, "o_lora_rank": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("v4") / "model"
    return folder, written(Case("deepseek_v4", WIDE), folder)


def test_what_is_chosen_of_many_keys_is_as_good_as_the_oracles(model: tuple[Path, PreTrainedModel]) -> None:
    """Of a prompt and of single tokens behind it; without the choice, or without any part of what is the family's, logits are others."""
    folder, theirs = model
    engine, tokens, steps = opened(folder, kv="32bit"), 330, 20
    whole, config = engine.config.indexer.shape.dense_tokens, engine.config
    assert whole == 83 and sum(each.index is not None for each in engine.cache.token_selections.values()) == 2
    with recorded_selections(engine) as chosen:
        read_afresh(engine, IDS[:tokens])
        rows = one_by_one(engine, IDS[tokens : tokens + steps])
        expected, held = oracle_with_selections(theirs, IDS[: tokens + steps], chosen)
        assert held == 2 * (tokens + steps - whole)
    assert_close(rows, expected[tokens:], lambda: oracle(theirs, IDS[: tokens + steps])[tokens:])
    engine.close()
    own = config.compressed_attention
    shorter = tuple(shape and replace(shape, window=39) for shape in own.shapes)
    for taken in ({"indexer": replace(config.indexer, shape=replace(config.indexer.shape, top_k=CTX))},
                  {"compressed_attention": replace(own, sinkhorn_iterations=1)}, {"compressed_attention": replace(own, sinkhorn_eps=1e-2)},
                  {"windows": (39,) * 4},
                  {"compressed_attention": replace(own, shapes=shorter), "windows": (39,) * 4}):
        other = opened_as(folder, replace(config, **taken))
        read_afresh(other, IDS[:tokens])
        found = one_by_one(other, IDS[tokens : tokens + steps])
        other.close()
        assert np.abs(found - rows).max() > 1e-3 * np.abs(rows).max(), taken


def test_threads_and_chunks_change_no_bit(folder: Path) -> None:
    assert_threads_and_chunks_change_nothing(folder, 445, FEWER_SETTINGS)


@pytest.mark.parametrize("held", [200, 70])
def test_tokens_at_once_are_tokens_one_by_one(engine: Engine, held: int) -> None:
    """Where some of them see all keys before them too, and passes come again."""
    assert_chunks_equal_single_tokens(engine, held)


@pytest.mark.parametrize("right", [0.6, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0))])
def test_drafts_change_no_answer(engine: Engine, right: float) -> None:
    assert_drafts_change_nothing(engine, 190, right)


def test_another_question_behind_a_prompt_reads_that_alone(engine: Engine) -> None:
    """A state is saved a little before the end of a prompt."""
    assert_prefix_is_reused(engine)


def test_answers_at_once_are_what_each_is_alone(folder: Path) -> None:
    assert_batching_changes_nothing(folder, (IDS[:300], IDS[100:160]))


def test_a_session_continues_with_the_same_bits(engine: Engine, tmp_path: Path) -> None:
    assert_session_continues(engine, tmp_path / "sessions")


def test_keys_of_a_session_that_are_damaged_are_found(engine: Engine, tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "sessions")
    read_afresh(engine, IDS[:300])
    keys = next(each.keys for each in engine.cache.token_selections.values())
    keys.write(284, np.full(4 * keys.token_nbytes, 255, np.uint8))  # no numbers
    save(engine, store)
    session = store.read("tale")
    with store.reading(), pytest.raises(EffllmError, match="damaged: the file of .* exact tokens is not what it says: NaN or infinity"):
        list(restore_cache(engine, store, session))
    assert not engine.tokens


def test_the_plan_counts_what_is_allocated(folder: Path) -> None:
    engine = opened(folder)
    try:
        cache, workspace = engine.cache, engine.backends["cpu"].workspace
        held = sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes + sum(len(each.memory) for each in cache.indexes)
        held += cache.states.nbytes
        assert len(cache.indexes) == 5 and held <= engine.placement.kv_bytes <= held + 128 * sum(cache.index_sizes)
        read(engine, IDS[:500])
        engine.forward_logits([1])
        assert cache.allocated_nbytes <= engine.placement.kv_bytes and cache.seen_nbytes < cache.read_nbytes / 2
        wanted = forecast.work(engine.prepared, engine.model.tensors)
        token, own = cache.sealed_nbytes // 128, engine.config.compressed_attention.shapes
        keys, index = [shape.token_nbytes(1) for shape in own if shape is not None], 8
        assert wanted.kv_at(500) == token * 40 + (keys[0] + keys[2]) * 83 + keys[1] * 500 + 2 * 500 * index
        assert all(len(buffer) == workspace.floats[name] for name, buffer in workspace._buffers.items())
    finally:
        engine.close()


def test_weights_from_the_disk_give_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 4096)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 1024)
    engines = opened(folder), streaming(folder, keep=3, ctx=CTX, chunk=128)
    found = [logits_after(each, 300, 310) for each in engines]
    names = engines[1].model.streamed.parts.slices
    assert any("wq_b" in name for name in names) and not any("indexer" in name or "compressor" in name for name in names)
    for each in engines:
        each.close()
    assert np.array_equal(*found)


def test_what_decides_what_is_seen_stays_as_it_is_in_a_converted_folder(folder: Path, tmp_path: Path) -> None:
    kept = {role.rpartition(".")[2] if role.startswith("groups") else role for role in converted(folder, tmp_path / "4bit", "4bit")
            if not role.startswith("picks")}
    assert kept == {"router", "index_q", "index_weights", "index_rows", "index_row_weights", "index_bias", "key_rows", "key_weights",
                    "key_bias", "attn_mix", "mlp_mix", "leave_mix"}
    assert_answers_stay_near(folder, tmp_path / "4bit", 0.5)


@pytest.mark.slow
def test_calibration_is_a_pass_of_the_model(folder: Path) -> None:
    """Layer by layer and window by window: what leaves the streams at the end is what a forward pass gives."""
    stats = assert_calibration_is_a_pass(folder)
    assert all({"q_a", "k", "q_b", "o", "shared.down", "experts.3.down"} <= set(found.roles) for found in stats[:-1])


@pytest.mark.parametrize(("asked", "flag"), [({"kv": "4bit"}, "--kv 4bit"), ({"kv_ram": "1M"}, "--kv-ram"), ({"kv_read": "sparse"},
                                             "--kv-read sparse")])
def test_what_such_keys_cannot_have_is_refused(folder: Path, asked: dict[str, object], flag: str) -> None:
    with pytest.raises(UsageError, match="this model attends to compressed keys") as caught:
        prepare(folder, EngineOptions(ctx=CTX, **{"device": "cpu", **asked}))
    assert caught.value.message.startswith(flag) and caught.value.hint == f"leave {flag} out"
    placed = prepare(folder, EngineOptions(ctx=CTX, **{"device": "cpu", **asked}, from_settings=frozenset(asked)))
    assert any(flag in said and "ignored" in said for said in placed.notices)
    assert prepare(folder, EngineOptions(ctx=CTX, kv="auto", device="cpu")).options.kv == "16bit"


@pytest.mark.parametrize(("picked", "what"), [(12, "beyond the 12 there are"), (-1, "beyond the 12"), (None, "an expert twice")])
def test_tables_that_pick_no_experts_are_named(folder: Path, tmp_path: Path, picked: int | None, what: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "generation_config.json"):
        (other / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.layers.0.ffn.gate.tid2eid"]
    table[7, 1] = table[7, 0] if picked is None else picked
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    engine = opened(other)
    with pytest.raises(CheckpointError, match=what):
        read(engine, IDS[:10])
    engine.close()


PUBLISHED = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1,
    "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512, "hidden_act": "silu", "hidden_size": 4096,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "initializer_range": 0.02, "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4", "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_hash_layers": 3, "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128, "swiglu_limit": 10.0,
    "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 129280,
    "compress_rope_theta": 160000, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}


def test_a_config_is_read_as_transformers_does() -> None:
    """With what it says of itself, and with what it leaves out."""
    config, own = parse_config(PUBLISHED, strict=True), DeepseekV4Config(**{**PUBLISHED, "rope_parameters": PUBLISHED["rope_scaling"]})
    kinds = {WINDOWED: None, CHOOSES: 4, HEAVY: 128}
    for raw, theirs in ((PUBLISHED, own), ({"model_type": "deepseek_v4"}, DeepseekV4Config())):
        made = parse_config(raw, strict=True)
        assert [shape and shape.tokens_per_key for shape in made.compressed_attention.shapes] == [
            kinds[kind] for kind in theirs.layer_types]
        assert made.moe.hash_routed_layers == {i for i, kind in enumerate(theirs.mlp_layer_types) if kind == "hash_moe"} == {0, 1, 2}
        assert made.indexer.shape == IndexShape(64, 128, 64, 512, tokens_per_key=4) and made.residual_streams == 4 and made.head_dim == 512
        assert (made.moe.num_experts, made.moe.experts_per_token, made.moe.routed_scale, made.moe.sqrt_softplus) == (256, 6, 1.5, True)
        for layer, kind in enumerate(theirs.layer_types):
            section = theirs.rope_parameters["main" if kind == WINDOWED else "compress"]
            assert (made.ropes[layer].kind, made.ropes[layer].theta) == (section["rope_type"], section["rope_theta"])
    far = config.ropes[2]
    assert far.kind == "yarn" and far.params["attention_factor"] == 1.0 and far.partial_rotary_factor == 0.125
    assert config.compressed_attention.shapes[2].token_nbytes(1) == 256 and config.compressed_attention.shapes[3].token_nbytes(1) == 8
    assert config.recurrent.state_size == 3840 and config.context_length == 1048576


@pytest.mark.parametrize(("key", "value"), [
    ("expert_dtype", "nvfp4"), ("scoring_func", "sigmoid"), ("swiglu_limit", 7.0), ("norm_topk_prob", False), ("attention_bias", True),
    ("layer_types", ["full_attention"] * 43), ("layer_types", [WINDOWED] * 43), ("compress_ratios", [3] * 43), ("compress_ratios", [0]),
    ("mlp_layer_types", ["dense"] * 43), ("num_key_value_heads", 2), ("hidden_act", "gelu"), ("o_groups", 5), ("index_head_dim", 32),
    ("compress_rates", {CHOOSES: 3}), ("compress_rate_hca", 1), ("hc_mult", 1), ("qk_rope_head_dim", 63)])
def test_what_is_not_read_is_named(key: str, value: object) -> None:
    raw = {**{name: kept for name, kept in PUBLISHED.items() if name != "compress_ratios" or key != "layer_types"}, key: value}
    with pytest.raises(ConfigError) as caught:
        parse_config(json.loads(json.dumps(raw)))
    named = {"layer_types": "layer_types|window", "compress_rates": "keys of 3", "compress_rate_hca": "and 1 tokens",
             "qk_rope_head_dim": "cannot be rotated"}.get(key, key)
    assert any(each in caught.value.message for each in named.split("|")), caught.value.message


def test_the_published_names_of_a_folder_are_read(folder: Path, engine: Engine, tmp_path: Path) -> None:
    """Those of whole files, without `model.`, and of what stands outside the layers."""
    outside = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight"}
    outside |= {f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}
    tensors = load_file(folder / "model.safetensors")
    renamed = {outside.get(name, name.removeprefix("model.")): value for name, value in tensors.items()}
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    other = opened(tmp_path, strict=True, kv="16bit")
    assert np.array_equal(read_afresh(other, IDS[:120]), read_afresh(engine, IDS[:120])) and read_config(tmp_path) == read_config(folder)
    other.close()


def test_weights_in_fp8_are_read_by_the_published_names(folder: Path, tmp_path: Path) -> None:
    """Blocks of 128 x 128 with powers of two beside them, which are called scales alone."""
    exact, low = tmp_path / "exact", tmp_path / "low"
    coded, plain = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        plain[name] = coded[name] = value
        if name.endswith(("wq_b.weight", "wo_a.weight", "wo_b.weight", "w1.weight", "w2.weight")) and "indexer" not in name:
            coded[name] = (value * 256).to(torch.float8_e4m3fn)
            plain[name] = coded[name].float() / 256
            blocks = [-(-size // 128) for size in value.shape]
            coded[name.removesuffix("weight") + "scale"] = torch.full(blocks, 2.0**-8).to(torch.float8_e8m0fnu)
    config = json.loads((folder / "config.json").read_text())
    stated = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    for made, tensors, more in ((exact, plain, {}), (low, coded, {"quantization_config": stated})):
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
    engines = [opened(each, kv="16bit", exact=True) for each in (exact, low)]
    rows = [read_afresh(each, IDS[:150]) for each in engines]
    for each in engines:
        each.close()
    assert np.abs(rows[0] - rows[1]).max() < 1e-4 * np.abs(rows[0]).max()
