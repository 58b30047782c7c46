"""config.json of DeepSeek-OCR, DBRX, MiniMax, Phi 4 Multimodal, North Micro and others: what is read, and what is refused."""

from dataclasses import replace

import pytest
from config_samples import LLAMA, refused

from effllm.kernels.lightning_shape import LightningShape
from effllm.runtime.config import parse_config
from effllm.runtime.families import dbrx, minimax

RAMP = [1.0 + 0.1 * i for i in range(48)]
# As it is published, but for what its parts that see and hear say.
PHI_4 = {
    "architectures": ["Phi4MMForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "audio_processor": {"name": "cascades"},
    "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig", "AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM",
                 "AutoTokenizer": "Xenova/gpt-4o"},
    "bos_token_id": 199_999, "embd_layer": {"embedding_cls": "image_audio"}, "embd_pdrop": 0.0, "eos_token_id": 199_999, "full_attn_mod": 1,
    "hidden_act": "silu", "hidden_size": 3072, "img_processor": None, "initializer_range": 0.02, "intermediate_size": 8192,
    "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131_072, "mlp_bias": False, "model_type": "phi4mm",
    "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
    "pad_token_id": 199_999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": {
        "long_factor": RAMP, "short_factor": RAMP, "type": "longrope"}, "rope_theta": 10_000.0, "sliding_window": 262_144,
    "speech_lora": {"r": 320}, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vision_lora": {"r": 256},
    "vocab_size": 200_064}
WINDOW, ALL = "sliding_attention", "full_attention"
COMPASS = {
    "model_type": "cohere_compass_text", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "sliding_window": 4096, "layer_types": [WINDOW, WINDOW, WINDOW, ALL], "rope_parameters": {
        WINDOW: {"rope_type": "default", "rope_theta": 50_000, "mrope_section": [12, 10, 10], "mrope_interleaved": True}, ALL: None}}

# As it is published.
MINIMAX = {
    "architectures": ["MiniMaxText01ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [*[0] * 7, 1] * 10, "auto_map": {
        "AutoConfig": "configuration_minimax_text_01.MiniMaxText01Config",
        "AutoModelForCausalLM": "modeling_minimax_text_01.MiniMaxText01ForCausalLM"}, "bos_token_id": None, "eos_token_id": None,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 9216,
    "layernorm_full_attention_alpha": 3.5565588200778455, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 10_240_000, "model_type":
    "minimax_text_01", "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "postnorm": True, "rms_norm_eps": 1e-5, "rope_theta": 10_000_000, "rotary_dim":
    64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
    "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 200_064}

# As it is published.
DBRX = {
    "architectures": ["DbrxForCausalLM"], "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500_000},
    "auto_map": {"AutoConfig": "configuration_dbrx.DbrxConfig", "AutoModelForCausalLM": "modeling_dbrx.DbrxForCausalLM"}, "d_model": 6144,
    "emb_pdrop": 0.0, "ffn_config": {"ffn_hidden_size": 10_752, "model_type": "", "moe_jitter_eps": 0, "moe_loss_weight": 0.05,
                                     "moe_num_experts": 16, "moe_top_k": 4}, "initializer_range": 0.02, "max_seq_len": 32_768,
    "model_type": "dbrx", "n_heads": 48, "n_layers": 40, "output_router_logits": False, "resid_pdrop": 0.0, "router_aux_loss_coef": 0.05,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100_352}


# As transformers writes it, but for what sees.
OCR = {
    "architectures": ["DeepseekOcr2ForConditionalGeneration"], "image_token_id": 128_815, "model_type": "deepseek_ocr2",
    "tie_word_embeddings": False, "vision_config": {"model_type": "deepseek_ocr2_vision"}, "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1280, "initializer_range": 0.02, "intermediate_size": 6848, "max_position_embeddings": 8192, "mlp_bias": False,
        "mlp_layer_types": ["dense", *["sparse"] * 11], "model_type": "deepseek_ocr2_text", "moe_intermediate_size": 896, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 10, "num_experts_per_tok": 6, "num_hidden_layers": 12,
        "num_key_value_heads": 10, "output_router_logits": False, "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "greedy", "use_cache": True, "vocab_size": 129_280}}


def test_deepseek_ocr_2() -> None:
    made = parse_config(OCR, strict=True)
    own = made.moe
    assert made.family == "deepseek_ocr2_text" and (made.head_dim, made.num_key_value_heads, made.mla) == (128, 10, None)
    assert (own.num_experts, own.experts_per_token, own.expert_dim, own.shared_expert_dim, own.layers) == (
        64, 6, 896, 1792, frozenset(range(1, 12)))
    assert not (own.renormalise or own.sigmoid or own.correction_bias or made.tie_word_embeddings) and made.eos_token_ids == (1,)


def test_the_first_layer_has_no_experts_where_deepseek_ocr_2_lists_none() -> None:
    text = {key: value for key, value in OCR["text_config"].items() if key != "mlp_layer_types"}
    assert parse_config({**OCR, "text_config": text}, strict=True) == parse_config(OCR, strict=True)


# As the first config of Unlimited OCR is laid out: with the text model under another name, its window beside it, and code of its own.
UNLIMITED = {
    "architectures": ["UnlimitedOCRForCausalLM"], "auto_map": {"AutoModel": "modeling_unlimitedocr.UnlimitedOCRForCausalLM"},
    "candidate_resolutions": [[1024, 1024]], "global_view_pos": "head", "model_type": "unlimited_ocr", "projector_config": {},
    "sliding_window": 128, "tile_tag": "2D", "torch_dtype": "bfloat16", "vision_config": {"model_type": "vision"},
    "bos_token_id": 0, "eos_token_id": 1, "language_config": {
        "architectures": ["DeepseekV2ForCausalLM"], "auto_map": {"AutoModel": "modeling_deepseekv2.DeepseekV2Model"}, "bos_token_id": 0,
        "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_size": 1280, "intermediate_size": 6848, "kv_lora_rank": None,
        "lm_head": True, "max_position_embeddings": 32_768, "moe_intermediate_size": 896, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_attention_heads": 10, "num_experts_per_tok": 6, "num_hidden_layers": 12, "num_key_value_heads": 10,
        "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "rm_head": False, "topk_group": 1, "topk_method": "greedy",
        "torch_dtype": "bfloat16", "use_mla": False, "v_head_dim": 0, "vocab_size": 129_280}}


def test_unlimited_ocr() -> None:
    older = parse_config(UNLIMITED, strict=True)
    newer = parse_config({"model_type": "unlimited_ocr", "text_config": {"model_type": "unlimited_ocr_text", "dtype": "bfloat16"}},
                         strict=True)
    assert older == newer and older.answer_window == 128 and older.windows == (None,) * 12 and not older.tie_word_embeddings
    assert older.moe == parse_config(OCR, strict=True).moe and older.max_position_embeddings == 32_768
    wide = {**UNLIMITED, "sliding_window": 64}
    assert parse_config(wide, strict=True).answer_window == 64


# DeepSeek-OCR and its successor state a type that DeepSeek-VL2 has too, and say twice what their text model is.
FIRST = {**{key: value for key, value in UNLIMITED.items() if key not in ("model_type", "sliding_window")},
         **{key: value for key, value in UNLIMITED["language_config"].items() if key not in ("architectures", "auto_map")},
         "model_type": "deepseek_vl_v2", "max_position_embeddings": 8192,
         "language_config": {**UNLIMITED["language_config"], "max_position_embeddings": 8192}}


@pytest.mark.parametrize(("kind", "name"), [("deepseek_ocr", "DeepseekOCRForCausalLM"), ("deepseek_ocr2", "DeepseekOCR2ForCausalLM")])
def test_deepseek_ocr_as_it_was_published(kind: str, name: str) -> None:
    made = parse_config({**FIRST, "architectures": [name]}, strict=True)
    assert made == replace(parse_config(OCR, strict=True), dtype="bfloat16", warnings=made.warnings) and kind in made.warnings[0]


@pytest.mark.parametrize("names", [["DeepseekVLV2ForCausalLM"], [["DeepseekOCRForCausalLM"]], None, "DeepseekOCRForCausalLM"])
def test_other_models_of_the_type_are_named(names: object) -> None:
    refused({**FIRST, "architectures": names}, "deepseek_vl_v2" if names in (None, ["DeepseekVLV2ForCausalLM"]) else "architectures")


@pytest.mark.parametrize(("key", "value"), [
    ("layer_types", ["reference_sliding_attention", "full_attention"] * 6), ("layer_types", ["sliding_attention"] * 12),
    ("sliding_window", 0), ("use_mla", True), ("mlp_bias", True)])
def test_what_unlimited_ocr_may_not_have_is_named(key: str, value: object) -> None:
    refused({"model_type": "unlimited_ocr", "text_config": {"model_type": "unlimited_ocr_text", key: value}}, key)


def inside(key: str, value: object) -> dict[str, object]:
    return {**OCR, "text_config": {**OCR["text_config"], key: value}}


@pytest.mark.parametrize(("key", "value"), [
    ("use_mla", True), ("scoring_func", "sigmoid"), ("norm_topk_prob", True), ("mlp_bias", True), ("topk_method", "noaux_tc"),
    ("mlp_layer_types", ["dense", *["moe"] * 11]), ("sliding_window", 128), ("num_experts_per_tok", 65)])
def test_what_deepseek_ocr_2_may_not_have_is_named(key: str, value: object) -> None:
    refused(inside(key, value), key)


def test_dbrx() -> None:
    made, own = parse_config(DBRX, strict=True), parse_config(DBRX, strict=True).moe
    assert (made.hidden_size, made.num_hidden_layers, made.num_key_value_heads, made.head_dim) == (6144, 40, 8, 128)
    assert (own.num_experts, own.experts_per_token, own.expert_dim, own.renormalise) == (16, 4, 10_752, True)
    assert made.clip_qkv == 8 and made.rope.theta == 500_000 and made.max_position_embeddings == 32_768
    rules = dbrx.layer_tensors(made, 3)
    joint = "transformer.blocks.3.norm_attn_norm.attn.Wqkv.weight"
    assert [rules[role].part_of for role in "qkv"] == [(joint, 0, 8192), (joint, 6144, 8192), (joint, 7168, 8192)]


def test_minimax_text_01() -> None:
    made = parse_config(MINIMAX, strict=True)
    assert made.family == "minimax" and made.attention_layers == tuple(range(7, 80, 8))
    assert made.recurrent == LightningShape(64, 128) and made.recurrent.nbytes > 4 * 4 * 64 * 128 * 128
    assert made.ropes[7].partial_rotary_factor == 0.5 and made.ropes[0] is None
    assert made.multiplier("kept.mlp") == 3.5565588200778455 and made.multiplier("o") == made.moe.routed_scale == 1 / 3.5565588200778455
    rules = minimax.layer_tensors(made, 0)
    assert rules["state_in"].shape == (3 * 8192, 6144) and "q" not in rules and rules["router"].shape == (32, 6144)


def test_minimax_is_what_transformers_takes_where_a_config_is_silent() -> None:
    silent = parse_config({"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]}, strict=True)
    assert silent.attention_layers == tuple(range(0, 32, 2)) and silent.moe.routed_scale == 1.0 and silent.multiplier("kept.full") == 1.0
    assert silent.rope.theta == 1e6 and silent.rope.partial_rotary_factor == 1.0


def test_phi_4_multimodal() -> None:
    made = parse_config(PHI_4, strict=True)
    assert made.family == "phi4_multimodal" and made.head_dim == 128 and made.windows == (262_144,) * 32 and made.tie_word_embeddings
    assert made.rope.kind == "longrope" and made.rope.partial_rotary_factor == 0.75
    assert made.rope.params["original_max_position_embeddings"] == 4096


def test_north_micro() -> None:
    made = parse_config(COMPASS, strict=True)
    assert made.windows == (4096, 4096, 4096, None) and [rope is None for rope in made.ropes] == [False] * 3 + [True]
    assert made.rope.theta == 50_000 and not made.rope.interleaved and made.logits_scaling == 1.0
    inside = {"model_type": "cohere_compass", "text_config": COMPASS, "vision_config": {}, "image_token_id": 7}
    assert replace(parse_config(inside, strict=True), warnings=()) == made


def test_all_see_everything_where_north_micro_lists_no_kinds_of_layers() -> None:
    raw = {key: value for key, value in COMPASS.items() if key != "layer_types"} | {"rope_parameters": {ALL: {"rope_theta": 1e6}}}
    made = parse_config(raw, strict=True)
    assert made.windows == (None,) * 4 and {rope.theta for rope in made.ropes} == {1e6}


@pytest.mark.parametrize(("raw", "key", "value"), [
    (DBRX, "ffn_config", {"ffn_act_fn": {"name": "gelu"}}), (DBRX, "ffn_config", {"moe_normalize_expert_weights": 2.0}),
    (DBRX, "tie_word_embeddings", True), (DBRX, "auto_map", {"AutoModel": "modeling_other.Other"}), (DBRX, "ffn_config",
    {"moe_num_experts": 2, "moe_top_k": 3}), (MINIMAX, "postnorm", False), (MINIMAX, "shared_intermediate_size", 64), (
    MINIMAX, "hidden_act", "gelu"),
    (MINIMAX, "attn_type_list", [0] * 80), (MINIMAX, "layer_types", ["full_attention"] + ["linear_attention"] * 79), (MINIMAX,
    "mlp_alpha_factor", 2.0), (MINIMAX, "rotary_dim", 256), (MINIMAX, "auto_map", {"AutoModel": "modeling_other.Other"}),
    (PHI_4, "auto_map", {"AutoModel": "modeling_other.Other"}), (PHI_4, "mlp_bias", True), (PHI_4, "full_attn_mod", 2),
    (COMPASS, "rope_parameters", {WINDOW: {}}), (COMPASS, "rope_parameters", {WINDOW: {}, ALL: 3}), (COMPASS, "use_qk_norm", True),
    (COMPASS, "layer_types", ["chunked_attention"] * 4), (COMPASS, "head_dim", 32)])
def test_what_they_may_not_have_is_named(raw: dict[str, object], key: str, value: object) -> None:
    known = {"attn_type_list": "layer_types", "ffn_config": "num_experts_per_tok" if "moe_top_k" in str(value) else key}.get(key, key)
    refused({**raw, key: value}, known if value != {WINDOW: {}, ALL: 3} else "rotary positions of full_attention")


@pytest.mark.parametrize("ahead", [{}, {"num_nextn_predict_layers": 1}], ids=["not said", "said"])
def test_a_layer_of_exaone_4_5_that_guesses_ahead_is_listed_and_left_out(ahead: dict[str, int]) -> None:
    """Published configs list one type of a layer more than there are layers."""
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    text = {**LLAMA, "model_type": "exaone4_5_text", "num_hidden_layers": 4, "sliding_window": 40, "sliding_window_pattern": "LLLG"}
    whole, longer = ({"model_type": "exaone4_5", "vision_config": {}, "text_config": {**text, **more}} for more in (
        {"layer_types": kinds}, {"layer_types": [*kinds, "full_attention"], **ahead}))
    assert replace(parse_config(longer, strict=True), mtp_layers=0) == parse_config(whole, strict=True)
    refused({**longer, "text_config": {**text, "layer_types": [*kinds, *kinds]}}, "layer_types")


def test_a_type_that_several_makers_have_is_known_by_its_class() -> None:
    raw = {"model_type": "vlm", "vision_config": {}, "text_config": {**LLAMA, "model_type": "hyperclovax"}}
    assert parse_config({**raw, "architectures": ["HCXVisionV2ForCausalLM"]}).family == "hyperclovax"
    for other in ({}, {"architectures": ["VlmForConditionalGeneration"]}, {"auto_map": {"AutoConfig": "configuration_vlm.VLMConfig"}}):
        refused({**raw, **other}, "'vlm' is used by several publishers")
