"""Completes the config of a family from what its GGUF files leave implicit, or express only through their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...offload.gguf_header import GgufHeader, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import MAX_LAYERS
from ..families.hunyuan_v1_dense import STRETCH
from . import (
    apertus,
    bitnet,
    cohere2_moe,
    deci,
    deepseek4,
    falcon_h1,
    gemma3n,
    glm5_next,
    granite_swash,
    hy_v4,
    jamba,
    kimi_delta_attention,
    kolibri1,
    laguna,
    latent_attention,
    linear_attention,
    llama4,
    mamba,
    mamba2,
    mellum,
    mimo2,
    minicpm3,
    minimax3,
    mllama,
    muse_glimmer,
    nemotron_h,
    qwen4,
    rwkv7,
    short_conv,
    state_spaces,
    step35,
)
from .architecture import SHARED_EXPERT_WIDTH
from .family_context import (
    AFMOE_WINDOW_PERIOD,
    COHERE2_WINDOW_PERIOD,
    DEFAULT_ROPE_THETA,
    EXAONE4_WINDOW_PERIOD,
    K_EXAONE_WINDOW,
    FamilyContext,
    drop_mtp_layers,
    family_context,
)
from .plain_families import COMPLETE_PLAIN, add_window

SOFTMAX = 1  # a value of expert_gating_func
DAMAGED_HINT = "the file is damaged or was converted wrongly: download it again, or use another one"
QUERY_SCALE_BY_WIDTH_LAYERS = {"gemma2": 46, "gemma3": 62,
                               "gemma-embedding": 0}  # layers of the size that scales queries by width / heads
Raw = dict[str, object]  # the config.json being assembled


def add_family(header: GgufHeader, raw: Raw) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states. Raises CheckpointError."""
    context = family_context(header, raw)
    if raw.get("num_local_experts") == 0:  # llama files state it for dense models too
        del raw["num_local_experts"]
        raw.pop("num_experts_per_tok", None)
    family = raw["model_type"]
    complete = COMPLETE_BY_FAMILY.get(family) or next((add for key, add in COMPLETE_BY_KEY.items() if key in raw), None)
    if complete is not None:
        complete(context, raw)
    COMPLETE_PLAIN.get(raw["model_type"], add_window)(context, raw)
    if (layers := QUERY_SCALE_BY_WIDTH_LAYERS.get(context.name)) is not None and isinstance(raw["num_attention_heads"], int):
        is_scaled_by_width = raw["num_hidden_layers"] == layers and raw["num_attention_heads"] > 0
        raw["query_pre_attn_scalar"] = raw["hidden_size"] / raw["num_attention_heads"] if is_scaled_by_width else raw.get("head_dim", 256)


def _ernie_moe(context: FamilyContext, raw: Raw) -> None:
    raw |= {"moe_num_shared_experts": raw.get("moe_num_shared_experts", 0), "rope_theta": raw.get("rope_theta", DEFAULT_ROPE_THETA)}
    raw["moe_use_aux_free"] = any(name.endswith(".exp_probs_b.bias") for name in context.header.tensors)
    _check_shared_experts(context.header, raw, "moe_num_shared_experts")


def _minimax(context: FamilyContext, raw: Raw) -> None:
    context.require_sigmoid_scores(raw)
    raw |= {"sliding_window": context.window, "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}


def _afmoe(context: FamilyContext, raw: Raw) -> None:
    context.require_sigmoid_scores(raw)
    raw |= {"attention_bias": context.has("attn_q.bias"), "sliding_window": context.window,
            "layer_types": context.layer_types(raw, AFMOE_WINDOW_PERIOD if context.window else 1)}
    for key, default in (("route_norm", False), ("num_dense_layers", 0)):  # llama.cpp's default
        raw.setdefault(key, default)


def _bailing(context: FamilyContext, raw: Raw) -> None:
    context.require_sigmoid_scores(raw)
    raw["sliding_window"] = context.window
    for key, default in (("routed_scaling_factor", 1.0), ("norm_topk_prob", False), ("partial_rotary_factor", 1.0)):
        raw.setdefault(key, default)  # llama.cpp's default
    raw["moe_router_enable_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in context.header.tensors)
    drop_mtp_layers(raw)


def _cohere(context: FamilyContext, raw: Raw) -> None:
    raw |= {"attention_bias": context.has("attn_q.bias"), "sliding_window": context.window,
            "use_qk_norm": context.has("attn_q_norm.weight")}


def _cohere2(context: FamilyContext, raw: Raw) -> None:
    raw |= {"attention_bias": context.has("attn_q.bias"), "sliding_window": context.window,
            "layer_types": context.layer_types(raw, COHERE2_WINDOW_PERIOD)}


def _hunyuan(context: FamilyContext, raw: Raw) -> None:
    raw |= {"attention_bias": context.has("attn_q.bias"), "sliding_window": context.window}
    alpha, heads = raw.pop(STRETCH, None), raw["num_attention_heads"]
    if alpha is None:
        return
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 1e-6 < alpha < 1e9:
        damaged(context.header.path, f"states {context.name}.rope.scaling.alpha {shown_value(alpha)}, expected a number above 0")
    width = raw.get("head_dim") or (raw["hidden_size"] // heads if type(heads) is int and heads > 0 else 0)
    if isinstance(width, int) and width > 2:  # else the config reader refuses it
        raw["rope_theta"] = raw.get("rope_theta", DEFAULT_ROPE_THETA) * alpha ** (width / (width - 2))


def _hunyuan_moe(context: FamilyContext, raw: Raw) -> None:
    _check_shared_experts(context.header, raw, "num_shared_expert")
    _hunyuan(context, raw)


def _qwen2_moe(context: FamilyContext, raw: Raw) -> None:
    raw["qkv_bias"] = context.has("attn_q.bias")


def _exaone_moe(context: FamilyContext, raw: Raw) -> None:
    context.require_sigmoid_scores(raw)
    _check_shared_experts(context.header, raw, "num_shared_experts")
    raw.setdefault("norm_topk_prob", False)
    raw.setdefault("first_k_dense_replace", 0)
    raw.setdefault("routed_scaling_factor", 1.0)  # in a config.json an absent one is 2.5
    drop_mtp_layers(raw)
    window = K_EXAONE_WINDOW if context.stated_window is None else context.window
    raw |= {"sliding_window": window, "layer_types": context.layer_types(raw, EXAONE4_WINDOW_PERIOD if window else 1)}


def _minicpm(context: FamilyContext, raw: Raw) -> None:
    """Files state the effective multipliers, a checkpoint depth and width bases; early files omit them: their values are known."""
    raw["sliding_window"] = context.window
    raw["attention_bias"] = context.has("attn_q.bias")
    if not {"scale_emb", "scale_depth", "dim_model_base"} & raw.keys():
        raw |= {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
        return
    residual_scale, logit_scale = raw.get("scale_depth", 1.0), raw.get("dim_model_base", 1.0)
    layers, hidden = raw.get("num_hidden_layers"), raw.get("hidden_size")
    for key, value in (("residual_scale", residual_scale), ("logit_scale", logit_scale)):
        if not isinstance(value, float | int) or not 1e-9 < value < 1e9:
            damaged(context.header.path, f"states minicpm.{key} {shown_value(value)}, expected a number above 0")
    if type(layers) is int and type(hidden) is int and layers > 0:  # else the config reader refuses it
        raw |= {"scale_depth": residual_scale * layers**0.5, "dim_model_base": max(1, round(hidden / logit_scale))}


def _deepseek_ocr(context: FamilyContext, raw: Raw) -> None:
    """DeepSeek-OCR, or with a sliding window Unlimited OCR."""
    if raw.pop("scoring_func", SOFTMAX) not in (0, SOFTMAX):
        raise CheckpointError(f"{context.header.path}: {context.name}.expert_gating_func is not {SOFTMAX}, which is not supported for this "
                              "architecture", "give the folder of the original checkpoint, if its family is supported")
    raw.setdefault("first_k_dense_replace", 0)
    if context.window:
        raw["model_type"] = "unlimited_ocr_text"


def _hy3(context: FamilyContext, raw: Raw) -> None:
    """Which layers have experts follows from their routers, the number of shared experts from their width."""
    context.require_sigmoid_scores(raw)
    width, expert_width = raw.get(SHARED_EXPERT_WIDTH), raw.get("moe_intermediate_size")
    if "num_shared_experts" not in raw and type(width) is type(expert_width) is int and expert_width > 0:
        raw["num_shared_experts"] = width // expert_width
    _check_shared_experts(context.header, raw, "num_shared_experts")
    for key, default in (("router_scaling_factor", 1.0), ("route_norm", False), ("num_nextn_predict_layers", 0)):
        raw.setdefault(key, default)  # llama.cpp's default
    drop_mtp_layers(raw)
    raw.pop("first_k_dense_replace", None)
    raw["attention_bias"] = context.has("attn_q.bias")
    layers, tensors = raw["num_hidden_layers"], context.header.tensors
    if type(layers) is int and 0 < layers <= MAX_LAYERS:  # else the config reader refuses it
        raw["mlp_layer_types"] = ["sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense" for layer in range(layers)]


def _glm(context: FamilyContext, raw: Raw) -> None:
    """GLM 4.5 and dots.llm1: sigmoid scores with a correction bias."""
    context.require_sigmoid_scores(raw)
    raw["attention_bias"] = context.has("attn_q.bias")
    raw.setdefault("norm_topk_prob", False)  # llama.cpp's default, as of rotary positions
    if raw["model_type"] == "glm4_moe":
        raw.setdefault("partial_rotary_factor", 1.0)
        raw["use_qk_norm"] = context.has("attn_q_norm.weight")
        drop_mtp_layers(raw)


def _check_shared_experts(header: GgufHeader, raw: Raw, key: str) -> None:
    """Raises CheckpointError if the total width of the shared experts is not their number, `raw[key]`, times the expert width."""
    width, count, expert_width = raw.pop(SHARED_EXPERT_WIDTH, None), raw.get(key), raw.get("moe_intermediate_size")
    if width is not None and type(count) is type(expert_width) is int and width != count * expert_width:
        raise CheckpointError(f"{header.path} states a width of {shown_value(width)} for {shown_value(count)} shared experts of "
                              f"{shown_value(expert_width)}, which is not supported", DAMAGED_HINT)


COMPLETE_BY_FAMILY: Mapping[str, Callable[[FamilyContext, Raw], None]] = {
    "afmoe": _afmoe, apertus.FAMILY: apertus.complete_config, "bailing_moe_v2": _bailing, bitnet.FAMILY: bitnet.complete_config,
    "cohere": _cohere, "cohere2": _cohere2, cohere2_moe.FAMILY: cohere2_moe.complete_config, deci.FAMILY: deci.complete_config,
    deepseek4.FAMILY: deepseek4.complete_config, "deepseek_ocr2_text": _deepseek_ocr, "dots1": _glm,
    "ernie4_5_moe": _ernie_moe, "exaone4": lambda gguf, raw: drop_mtp_layers(raw), "exaone_moe": _exaone_moe,
    falcon_h1.FAMILY: falcon_h1.complete_config, gemma3n.FAMILY: gemma3n.complete_config, "glm4": lambda gguf, raw: drop_mtp_layers(raw),
    "glm4_moe": _glm, glm5_next.FAMILY: glm5_next.complete_config, "granitemoehybrid": state_spaces.complete_config,
    nemotron_h.FAMILY: nemotron_h.complete_config,
    "hunyuan_v1_dense": _hunyuan, "hunyuan_v1_moe": _hunyuan_moe, "hy_v3": _hy3, hy_v4.FAMILY: hy_v4.complete_config,
    jamba.FAMILY: jamba.complete_config,
    kolibri1.FAMILY: kolibri1.complete_config, laguna.FAMILY: laguna.complete_config, llama4.FAMILY: llama4.complete_config,
    mamba.NAME: mamba.complete_config, mamba2.NAME: mamba2.complete_config,
    mellum.FAMILY: mellum.complete_config, mimo2.FAMILY: mimo2.complete_config, minimax3.FAMILY: minimax3.complete_config,
    "minicpm": _minicpm, minicpm3.FAMILY: minicpm3.complete_config, "minimax_m2": _minimax, mllama.FAMILY: mllama.complete_config,
    muse_glimmer.FAMILY: muse_glimmer.complete_config, "qwen2_moe": _qwen2_moe, qwen4.FAMILY: qwen4.complete_config,
    rwkv7.FAMILY: rwkv7.complete_config, step35.FAMILY: step35.complete_config, granite_swash.DENSE: granite_swash.complete_config,
}
# For parts that several families share: key that only that part has -> function; the first match applies (Kimi Linear has two).
COMPLETE_BY_KEY: Mapping[str, Callable[[FamilyContext, Raw], None]] = {
    "linear_head_dim": kimi_delta_attention.complete_config, "kv_lora_rank": latent_attention.complete_config,
    "conv_L_cache": short_conv.complete_config, "linear_num_key_heads": linear_attention.complete_config,
}
