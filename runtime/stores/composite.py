"""Config of the text model inside a composite (multimodal) checkpoint, as if it were published alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .. import families
from ..config_reader import ConfigError, Keys, show

# Keys of the outer object that apply to the text part, and keys that do not concern it.
OUTER_SHARED = frozenset({"auto_map", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization", "quantization_config",
                          "tie_word_embeddings",
                          "torch_dtype"})
OUTER_HARMLESS = frozenset({
    "_pad_token_id", "adapter_layer_norm_eps", "alignment_intermediate_size", "architectures", "assistant_token_id", "audio_config",
    "audio_soft_tokens_per_image", "audio_token_id", "audio_token_index", "boa_token_id", "boa_token_index", "boi_token_id",
    "boi_token_index", "code2wav_config", "compression_ratio",
    "deepstack_layer_map", "projector_dropout", "qformer_config", "spatial_target_layers", "spatial_vision_layer",
    "density_router_hidden_size", "density_router_loss_weight", "density_router_threshold",
    "do_image_splitting", "downsample_factor", "downsample_mode",
    "downsample_rate", "downsample_ratio", "drop_vision_last_layer", "enable_audio_output", "enable_talker", "encoder_config",
    "encoder_patch_size", "eoa_token_id", "eoa_token_index", "eoi_token_id", "eoi_token_index", "has_lora_adapter", "ignore_index",
    "candidate_resolutions", "global_view_pos", "ignored_index", "im_end_id", "im_end_token_id", "im_newline_id", "im_start_id",
    "im_start_token_id", "image_end_id", "image_end_token_id", "image_grid_pinpoints", "image_newline_token_id", "language_config",
    "tile_tag",
    "image_seq_length", "image_size", "image_start_id", "image_start_token_id", "image_token_id", "image_token_index",
    "img_token_compression_config", "initializer_range", "insert_layer_id", "language_model_only", "max_image_tokens", "max_num_patches",
    "max_pixels_tolerance", "max_sequence_length", "max_tiles", "media_placeholder_token_id", "merge_kernel_size", "merged_hidden_size",
    "merger_times", "min_image_tokens", "min_tiles", "mm_tokens_per_image", "model_type", "multimodal_projector_bias", "newline_id",
    "out_hidden_size", "patch_size", "projection_hidden_size", "projection_layer_norm_eps", "projector_bias", "projector_config",
    "projector_hidden_act", "projector_hidden_size", "projector_use_layernorm", "rope_is_neox_style", "scale_factor", "slice_end_id",
    "slice_start_id", "spatial_merge_size", "support_languages", "system_token_id", "talker_config", "text_config", "thinker_config",
    "tile_size", "timestamp_token_id", "token2wav_config", "token_classification_bias", "tts_bos_token_id", "tts_eos_token_id",
    "tts_pad_token_id", "use_3d_rope", "use_flash_attention", "use_image_newline_parameter", "use_image_special_tokens",
    "use_reentrant_checkpointing", "use_thumbnail", "use_unified_vision_chunk", "user_token_id", "video_end_token_id", "video_placeholder",
    "video_start_token_id", "video_token_id", "video_token_index", "vision_aspect_ratio", "vision_config", "vision_end_token_id",
    "vision_feature_layer", "vision_feature_select_strategy", "vision_soft_tokens_per_image", "vision_start_token_id", "vision_token_id",
    "weight_share_add_bias", "window_size"})
# Composite models whose head is not tied by default; that of all others is.
UNTIED = ("apertus1p5", "deepseek_ocr", "deepseek_ocr2", "glm5_next", "hy_v4_vl", "idefics2", "mistral_large4", "molmo2", "qianfan_ocr",
          "qwen2_5_omni", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen4_exp", "unlimited_ocr")
# Untied by default too, and tied if either the outer object or text_config says so; a head that is stored nevertheless is used.
TIED_AS_TEXT = ("audioflamingo3", "exaone4_5", "fast_vlm", "granite4_vision", "internvl_chat",
             "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "idefics3", "kimi_k25", "kimi_vl", "llama4", "llava",
             "llava_next", "llava_onevision", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "muse_glimmer", "perception_lm", "qwen2_5_vl",
             "qwen2_audio", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7", "voxtral", *families.HYPERCLOVAX_VISION,
             *families.NEMOTRON_VISION)
# Models whose checkpoints bring code of their own, though transformers has it by now.
BUILTIN_CODE = ("deepseek_ocr", "deepseek_ocr2", "ernie4_5_moe_vl", "internvl_chat", "llava_qwen2", "molmo2", "paddleocr_vl",
              "unlimited_ocr", *families.HYPERCLOVAX_VISION, *families.NEMOTRON_VISION)
# Further keys of the outer objects of some models that do not concern the text part.
OUTER_KEYS: Mapping[str, frozenset[str]] = {
    "apertus1p5": frozenset({"audio_token_offset", "image_token_offset"}),
    "internvl_chat": frozenset({
        "dynamic_image_size", "force_image_size", "hidden_size", "llm_config", "max_dynamic_patch", "min_dynamic_patch",
        "output_attentions", "pad2square", "ps_version", "select_layer", "system_message", "template", "use_backbone_lora",
        "use_llm_lora", "use_thumbnail"}),
    **dict.fromkeys(families.NEMOTRON_VISION, frozenset({
        "force_image_size", "image_tag_type", "img_context_token", "img_context_token_id", "img_end_token", "img_start_token", "llm_config",
        "max_num_tiles", "norm_mean", "norm_std", "ps_version", "sound_config", "sound_context_token", "sound_context_token_id", "template",
        "video_context_token", "video_context_token_id", "video_pruning_rate", "video_temporal_patch_size", "vision_hidden_size",
        "vit_hidden_size"})),
    "ernie4_5_moe_vl": frozenset({  # most of it of training
        "add_tail_layers", "disable_ffn_model_parallel", "freq_allocation", "fuse_attn_ffn", "fuse_gate_detach_matmul", "fuse_ln",
        "fuse_rms_norm", "fuse_rope", "fuse_softmax_mask", "fuse_swiglu", "hidden_dropout_prob", "im_patch_id", "max_text_id",
        "mm_vocab_size", "modality_detach", "moe_all_to_all_dropout", "moe_aux_loss_lambda", "moe_dense_experts_token_type_id",
        "moe_dropout_prob", "moe_fuse_experts", "moe_group", "moe_group_experts", "moe_group_orthogonal_loss",
        "moe_layer_feed_fake_token", "moe_multimodal_dispatch_use_allgather", "moe_num_attn_experts", "moe_orthogonal_loss_lambda",
        "moe_reverse_token_drop", "moe_use_hard_gate", "moe_use_size_all2all", "moe_use_token_type_bias", "moe_z_loss_lambda",
        "multi_token_pred_lambda", "num_acc_steps", "pixel_hidden_size", "pp_seg_method", "resampler_fuse_rms_norm", "rope_3d",
        "sinkhorn_2gate", "sinkhorn_temp", "spatial_conv_size", "temporal_conv_size", "tensor_parallel_degree", "token_balance_loss",
        "token_balance_seqlen", "use_bias_correction", "use_cache", "use_fused_head_and_loss_fn", "use_mem_eff_attn", "use_recompute_moe",
        "use_recompute_resampler", "use_rmsnorm", "use_sparse_flash_attn", "use_sparse_head_and_loss_fn", "use_temporal_conv",
        "use_var_len_flash_attn", "using_precision_check"}),
    "llava_qwen2": frozenset({
        "freeze_mm_mlp_adapter", "image_aspect_ratio", "mm_hidden_size", "mm_patch_merge_type", "mm_projector_lr", "mm_projector_type",
        "mm_use_im_patch_token", "mm_use_im_start_end", "mm_vision_select_feature", "mm_vision_select_layer", "mm_vision_tower",
        "tokenizer_model_max_length", "tokenizer_padding_side", "tune_mm_mlp_adapter", "unfreeze_mm_vision_tower", "use_mm_proj"}),
    "blip-2": frozenset({"image_text_hidden_size", "initializer_factor", "num_query_tokens", "use_decoder_only_language_model"}),
    "idefics2": frozenset({"perceiver_config", "use_cache"}),
    **dict.fromkeys(families.NEMOTRON_OMNI, frozenset({
        "force_image_size", "img_context_token", "img_context_token_id", "img_end_token", "img_start_token", "llm_config", "norm_mean",
        "norm_std", "projector_hidden_size", "ps_version", "sound_config", "sound_context_token", "sound_context_token_id", "template",
        "use_thumbnail", "video_context_token_id", "video_pruning_rate", "video_temporal_patch_size", "vision_hidden_size",
        "vit_hidden_size"})),
    "janus": frozenset({"vq_config"}),
    "molmo2": frozenset({
        "adapter_config", "frame_end_token_id", "frame_start_token_id", "image_col_id", "image_low_res_id", "image_patch_id",
        "low_res_image_start_token_id", "use_frame_special_tokens", "vit_config"}),
    "ovis2": frozenset({"hidden_size", "visual_indicator_token_ids", "vocab_size"}),
    "perception_lm": frozenset({"projector_pooling_ratio", "vision_use_cls_token"}),
    "paligemma": frozenset({"_vocab_size", "hidden_size", "projection_dim", "vocab_size"})}
# Keys of the outer object that a text family needs: tokens around images, which are routed to experts of their own.
KEYS_FOR_TEXT = dict.fromkeys(("ernie4_5_moe_vl", "ernie4_5_vl_moe"),
                     ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"))
BIAS_KEYS = {"paddleocr_vl": "use_bias"}  # key of a text part for whether all its matrices have a bias
THINKER_KEY = "thinker_config"  # in models with speech output, the object that describes everything but speech
# Former key of text_config.
TEXT_CONFIG_KEYS = {**dict.fromkeys(("deepseek_ocr", "deepseek_ocr2", "unlimited_ocr"), "language_config"),
         **dict.fromkeys(("internvl_chat", *families.NEMOTRON_VISION), "llm_config")}
# A model_type used by several publishers -> the class of the supported one.
REQUIRED_CLASS = {"vlm": "HCXVisionV2"}
# Outer classes whose names do not state a task.
OUTER_CLASSES = {"internvl_chat": ("InternVLChatModel",), **dict.fromkeys(families.NEMOTRON_VISION, ("Reasoning_V3", "VL_V2")),
                 "vlm": (f"{REQUIRED_CLASS['vlm']}ForCausalLM",), "whisper": ("WhisperForConditionalGeneration",)}
# Models that may have the keys of the text part in the outer object.
FLAT_CONFIGS = ("ernie4_5_moe_vl", "glm5_next", "hunyuan_vl", "llava_qwen2", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
# Keys about images in text parts of some models.
IMAGE_KEYS = frozenset({"_flash_attn_2_enabled", "is_composition", "is_llama_config", "num_image_tokens",
                       "perceiver_config", "pixel_shuffle_factor",
                       "qk_layer_norms", "transformers.js_config", "use_resampler", "vision_config"})
# Default sizes of text families, in the order of SIZE_KEYS: transformers leaves out values that a class has by default, so LLaVA 1.5's
# config has none of them.
SIZE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_EXAONE, _LARGE = (102_400, 4096, 16_384, 32, 32, 32), (152_064, 8192, 29_568, 80, 64, 8)
DEFAULT_SIZES: Mapping[str, tuple[int, ...]] = {
    "exaone4": _EXAONE, "exaone4_5_text": _EXAONE, "glm4v_text": (151_552, 4096, 13_696, 40, 32, 2),
    "glm_ocr_text": (59_392, 1024, 4096, 16, 16, 8), "granite_docling_text": (133_800, 1024, 2048, 28, 16, 4),
    "hunyuan_vl_text": (290_943, 4096, 11_008, 32, 32, 32),
    "llama": (32_000, 4096, 11_008, 32, 32),
    "ministral3": (131_072, 4096, 14_336, 34, 32, 8), "paddleocr_vl_text": (103_424, 1024, 3072, 18, 16, 2),
    "mistral": (32_000, 4096, 14_336, 32, 32, 8), "qwen2": (151_936, 4096, 22_016, 32, 32, 32), "qwen2_5_vl_text": _LARGE,
    "qwen2_vl_text": _LARGE, "qwen3": (151_936, 4096, 22_016, 32, 32, 32), "qwen3_vl_text": (151_936, 4096, 22_016, 32, 32, 32),
    "qwen3_vl_moe_text": (151_936, 2048, 5632, 24, 16, 16)}
# Defaults of text parts that differ from those of their family.
TEXT_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "glmasr": {"vocab_size": 59_264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
               "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "eos_token_id": [59_246, 59_253, 59_255]},
    "voxtral": {"vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30, "num_key_value_heads": 8,
                "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e8}}
# rope_type with several positions per token, which are equal for text -> the rope_type that it is equivalent to for text.
MULTIMODAL_ROPE = {"ernie_3d": "default", "mrope": "default", "xdrope": "dynamic"}


def text_model_config(raw: Mapping[str, object]) -> dict[str, object]:
    """The config.json of the text model if it were published alone; `raw` of a text-only checkpoint is resolved as it is."""
    model_type = str(raw.get("model_type"))
    text_families = families.COMPOSITE.get(model_type)
    if text_families is None:
        return families.resolve_model_type(raw)
    if model_type in REQUIRED_CLASS and REQUIRED_CLASS[model_type] not in f"{raw.get('architectures')} {raw.get('auto_map')}":
        raise ConfigError(f"config.json: model_type {show(model_type)} is used by several publishers, and architectures is "
                          f"{show(raw.get('architectures'))}",
                          f"of those, {REQUIRED_CLASS[model_type]}ForCausalLM (HyperCLOVA X SEED) is supported")
    text_config = _text_section(raw)
    family = text_config.get("model_type", text_families[0])
    if family not in text_families:
        raise ConfigError(f"config.json: text_config is of model type {show(family)}, expected {' or '.join(text_families)}")
    if "classify_num" in (Keys(raw).section(THINKER_KEY) or {}):  # its head has classes instead of a vocabulary
        raise ConfigError("config.json describes a model that labels the tokens of a text (a forced aligner) and does not generate text",
                          "use the generating model of the same family")
    outer = {key: value for key, value in raw.items() if key in (*OUTER_SHARED, *KEYS_FOR_TEXT.get(model_type, ())) and value is not None}
    if model_type in BUILTIN_CODE:
        outer, text_config = ({key: value for key, value in each.items() if key != "auto_map"} for each in (outer, text_config))
    outer.setdefault("tie_word_embeddings", model_type not in (*UNTIED, *TIED_AS_TEXT))
    if model_type in TIED_AS_TEXT and text_config.get("tie_word_embeddings") is True:
        outer["tie_word_embeddings"] = True
    defaults = dict(zip(SIZE_KEYS, DEFAULT_SIZES.get(str(family), ()), strict=False)) if text_config else {}
    defaults |= TEXT_DEFAULTS.get(model_type, {})
    return families.resolve_model_type({**defaults, **text_config, **outer, "model_type": family, "architectures": None})


def unknown_outer_keys(raw: Mapping[str, object], harmless: Collection[str]) -> list[str]:
    """Unlisted top-level keys of a composite config, except those its text config repeats with the same value."""
    text_config, is_flat = _text_section(raw), raw["model_type"] in FLAT_CONFIGS
    text_keys = {key for key, value in text_config.items() if is_flat or raw.get(key) == value} | {BIAS_KEYS.get(str(raw["model_type"]))}
    return sorted(raw.keys() - OUTER_SHARED - OUTER_HARMLESS - OUTER_KEYS.get(str(raw["model_type"]), frozenset()) - harmless - text_keys)


def _text_section(raw: Mapping[str, object]) -> dict[str, object]:
    """What is said of the text part, its rotary positions as those of text."""
    kind = raw["model_type"]
    inner = Keys(Keys(raw).section(THINKER_KEY) or raw).section("text_config")
    if inner is None and kind in TEXT_CONFIG_KEYS and (older := Keys(raw).section(TEXT_CONFIG_KEYS[kind])) is not None:
        inner = dict(older)
        if TEXT_CONFIG_KEYS[kind] != "llm_config":  # whose window the outer object says, and whose own type is another model's
            inner = {"sliding_window": raw.get("sliding_window"), **inner, "model_type": families.COMPOSITE[kind][0]}
    if inner is None and kind in FLAT_CONFIGS:
        inner = {key: value for key, value in raw.items() if key not in OUTER_HARMLESS | OUTER_KEYS.get(str(kind), frozenset())}
    inner = {key: value for key, value in (inner or {}).items() if key not in IMAGE_KEYS or kind not in families.PREFIX_STRIPPED}
    if kind in families.PREFIX_LM:  # that of prompts with pictures
        inner.pop("use_bidirectional_attention", None)
    if kind in BIAS_KEYS and (biased := inner.pop(BIAS_KEYS[kind], None)) is not None:
        inner |= {"attention_bias": biased, "mlp_bias": biased}
    for name in ("rope_scaling", "rope_parameters"):
        section = inner.get(name)
        if isinstance(section, dict) and "mrope_section" in section:  # how those of places in a picture take turns, told twice
            section = inner[name] = {key: value for key, value in section.items() if key != "interleaved"}
        said = (section.get("rope_type"), section.get("type")) if isinstance(section, dict) else ()
        for placed, meant in MULTIMODAL_ROPE.items():
            if placed in said:
                inner[name] = {**{key: value for key, value in section.items() if key != "type"}, "rope_type": meant}
    return inner
