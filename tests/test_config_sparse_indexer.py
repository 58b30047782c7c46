"""config.json of families with sparse attention: the indexer, its layers, and what is refused by name."""

import json

import pytest
from config_samples import LLAMA, refused
from test_config_llama4_and_others import PUBLISHED
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from effllm.kernels.indexer_shape import IndexShape
from effllm.kernels.layout import PAGE
from effllm.runtime.config import parse_config
from effllm.runtime.indexer_config import without_index


def test_how_tokens_choose_what_they_see() -> None:
    base = {**LLAMA, "model_type": "deepseek_v32", **PUBLISHED["deepseek_v32"], "max_position_embeddings": 163840, "index_topk": 2048,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}}
    config = parse_config(base, strict=True)
    assert (config.context_length, config.max_supported_tokens, config.warnings) == (163840, None, ()) and config.moe.layers == {3}
    own = config.indexer
    assert own.shape == IndexShape(64, 128, 64, 2048) and own.source_layers == (0, 1, 2, 3) and not own.interleaved_rope
    kinds = ["dense", "sparse", "dense", "sparse"]
    assert parse_config({**base, "mlp_layer_types": kinds}).moe.layers == {1, 3}
    without = {key: value for key, value in base.items() if key != "index_topk"}
    assert parse_config(without).indexer.shape.top_k == 2048
    small = {"index_topk": 7, "index_n_heads": 3, "index_head_dim": 80}
    assert parse_config({**base, **small}).indexer.shape == IndexShape(3, 80, 64, 7)
    short = without_index(config)
    assert (short.indexer, short.max_supported_tokens, short.context_length) == (None, 2048, 2048)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "glm5_next_text", "hy_v4", "qwen4_exp_text"])
def test_kinds_of_layers_by_their_earlier_names(family: str) -> None:
    """As folders have them that were published before transformers called all that choose by one name."""
    raw = json.loads(CONFIG_MAPPING[family]().to_json_string())
    if family == "qwen4_exp_text":  # of which all has to be said
        raw |= {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048, "indexer_compress_ratio": 16}
    raw["layer_types"] = raw.get("layer_types") or ["indexed_attention"] * raw["num_hidden_layers"]
    for name in ("deepseek_sparse_attention", "qwen_sparse_attention", "sparse_attention"):
        earlier = [name if kind == "indexed_attention" else kind for kind in raw["layer_types"]]
        assert earlier != raw["layer_types"] and parse_config({**raw, "layer_types": earlier}) == parse_config(raw)
        refused({**raw, "layer_types": [*earlier[:-1], "mamba2"]}, "layer_types holds 'mamba2'")


@pytest.mark.parametrize(("changes", "sources"), [
    ({}, (0, 1, 2, 3)), ({"indexer_types": ["full", "shared", "full", "shared"]}, (0, 0, 2, 2)),
    ({"index_topk_pattern": "FSSF"}, (0, 0, 0, 3)), ({"index_topk_pattern": ["full", "shared", "shared", "full"]}, (0, 0, 0, 3)),
    ({"index_topk_freq": 2}, (0, 1, 1, 3)), ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 0, 2, 2)),
    ({"index_topk_freq": 2, "indexer_types": ["full"] * 4}, (0, 1, 2, 3))])
def test_layers_that_share_a_choice(changes: dict[str, object], sources: tuple[int, ...]) -> None:
    """As transformers reads them."""
    base = {**LLAMA, "model_type": "glm_moe_dsa", **PUBLISHED["glm_moe_dsa"], **changes}
    own = parse_config(base, strict=True).indexer
    theirs = CONFIG_MAPPING["glm_moe_dsa"](**{key: value for key, value in base.items() if key not in ("model_type", "architectures")})
    kinds = ["full" if source == layer else "shared" for layer, source in enumerate(own.source_layers)]
    assert own.source_layers == sources and kinds == theirs.indexer_types and own.interleaved_rope
    assert own.shape == IndexShape(32, 128, 64, 2048)


# As it is published, shortened by most of its layers.
MINIMAX_3 = {
    "attention_output_gate": False, "bos_token_id": 200019, "dense_intermediate_size": 12288, "eos_token_id": 200020, "head_dim": 128,
    "hidden_act": "swigluoai", "hidden_size": 6144, "intermediate_size": 3072, "max_position_embeddings": 1048576, "model_type":
    "minimax_m3_vl_text", "moe_layer_freq": [0, 0, 1, 1, 1], "n_shared_experts": 1, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 5, "num_key_value_heads": 4, "num_local_experts": 128, "num_mtp_modules": 7, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "qk_norm_type": "per_head", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
    "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "shared_intermediate_size": 3072, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    "sparse_attention_config": {
        "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16, "sparse_block_size":
        128, "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1, "sparse_disable_index_value": [0, 0, 1, 1, 1],
        "sparse_attention_freq": [0, 0, 1, 1, 1]}}


@pytest.mark.parametrize("whole", [False, True])
def test_minimax_3_as_it_is_published(whole: bool) -> None:
    """Alone and inside what takes images."""
    raw = {"model_type": "minimax_m3_vl", "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "text_config": MINIMAX_3,
           "vision_config": {}, "img_token_compression_config": {}, "image_token_index": 200025, "projector_hidden_size": 6144}
    config = parse_config(raw if whole else MINIMAX_3, strict=True)
    own, mixture = config.indexer, config.moe
    assert own.shape == IndexShape(4, 128, 64, 16, PAGE, True, 1) and own.shape.dense_tokens == 2048 and own.shape.groups == 4
    assert own.source_layers == (None, None, 2, 3, 4) and mixture.layers == {2, 3, 4} and own.norm == ("rms+1", 1e-6)
    assert (config.intermediate_size, mixture.expert_dim, mixture.shared_expert_dim, config.hidden_act) == (
        12288, 3072, 3072, "clamped_swish")
    assert config.ropes[0].partial_rotary_factor == 0.5 and config.norm_kind == "rms+1" and not config.tie_word_embeddings
    theirs = CONFIG_MAPPING["minimax_m3_vl_text"](**{key: value for key, value in MINIMAX_3.items() if key != "model_type"})
    assert [kind == "minimax_m3_sparse" for kind in theirs.layer_types] == [source is not None for source in own.source_layers]
    assert (theirs.index_topk_blocks, theirs.index_block_size, theirs.index_local_blocks) == (
        16, own.shape.block_size, own.shape.local_blocks)
    plain = {key: value for key, value in MINIMAX_3.items() if key != "sparse_attention_config"}
    assert parse_config(plain).indexer is None
    listed = {**plain, "layer_types": ["full_attention", "minimax_m3_sparse"] + ["full_attention"] * 3, "index_topk_blocks": 3,
              "index_block_size": 32, "index_n_heads": 4, "index_head_dim": 64, "index_local_blocks": 0}
    assert parse_config(listed).indexer.shape == IndexShape(4, 64, 64, 3, 32, True, 0)


@pytest.mark.parametrize(("key", "value"), [
    ("hidden_act", "gelu"), ("rotary_dim", 32), ("swiglu_limit", 6.0), ("attention_output_gate", True), ("use_gemma_norm", False),
    ("layer_types", ["sliding_attention"] * 5), ("mlp_layer_types", ["dense", "moe"] + ["sparse"] * 3), ("moe_layer_freq", [1, 0, 2, 0, 1]),
    ("sparse_index_dim", 32), ("sparse_num_index_heads", 2), ("sparse_block_size", 96), ("sparse_topk_blocks", 0), ("sparse_init_block", 1),
    ("sparse_score_type", "mean"), ("sparse_local_block", 17), ("sparse_disable_index_value", [1, 1, 1, 0, 1])])
def test_what_minimax_3_cannot_be_is_named(key: str, value: object) -> None:
    inside = key.startswith("sparse_")
    section = {**MINIMAX_3["sparse_attention_config"], **({key: value} if inside else {})}
    named = {"sparse_index_dim": "index_head_dim", "sparse_num_index_heads": "index_n_heads", "sparse_block_size": "index_block_size",
             "sparse_topk_blocks": "index_topk_blocks", "sparse_local_block": "index_local_blocks"}
    refused({**MINIMAX_3, **({} if inside else {key: value}), "sparse_attention_config": section}, named.get(key, key))


@pytest.mark.parametrize(("family", "key", "value"), [
    ("deepseek_v32", "index_head_dim", 32), ("deepseek_v32", "q_lora_rank", None), ("deepseek_v32", "indexer_rope_interleave", True),
    ("deepseek_v32", "index_n_heads", 0), ("glm_moe_dsa", "indexer_rope_interleave", False),
    ("glm_moe_dsa", "indexer_types", ["full", "half", "full", "full"]), ("glm_moe_dsa", "index_topk_freq", -1),
    ("glm_moe_dsa", "indexer_types", ["shared", "full", "full", "full"]), ("glm_moe_dsa", "index_topk_pattern", "FSS")])
def test_what_cannot_choose_is_named(family: str, key: str, value: object) -> None:
    refused({**LLAMA, "model_type": family, **PUBLISHED[family], key: value}, key)
