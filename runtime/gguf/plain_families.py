"""Defaults that GGUF files leave implicit, for families without a module of their own: windows, names, and biases, which their tensors
tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...offload.safetensors_header import damaged
from ..config_rope import LOCAL, QUERY_SCALING_BETA
from . import gpt_oss, transformer_names
from .family_context import (
    DEFAULT_ROPE_THETA,
    DEFAULT_WINDOW,
    EXAONE4_WINDOW_PERIOD,
    EXAONE4_WINDOWED_LAYERS,
    OLMO3_WINDOW_PERIOD,
    FamilyContext,
)

Raw = dict[str, object]  # the config.json being assembled


def _llama(context: FamilyContext, raw: Raw) -> None:
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    if "num_local_experts" in raw:
        raw |= {"model_type": "mixtral", "sliding_window": context.window}
    elif context.window:
        raw |= {"model_type": "mistral", "sliding_window": context.window}
    else:
        raw |= {"attention_bias": context.has("attn_q.bias"), "mlp_bias": context.has("ffn_gate.bias")}


def _looped(context: FamilyContext, raw: Raw) -> None:
    raw |= {"attention_bias": context.has("attn_q.bias"), "sliding_window": context.window}
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw.setdefault("num_loops" if raw["model_type"] == "nanbeige" else "total_ut_steps", 1)


def _exaone(context: FamilyContext, raw: Raw) -> None:
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw.setdefault("rope_theta", DEFAULT_ROPE_THETA)


def _ministral3(context: FamilyContext, raw: Raw) -> None:
    if not raw.get(QUERY_SCALING_BETA):  # Mistral Small has none
        raw |= {"model_type": "mistral"}
        raw.pop(QUERY_SCALING_BETA, None)
    raw["sliding_window"] = context.window


def _seed_oss(context: FamilyContext, raw: Raw) -> None:
    raw |= {"attention_bias": context.has("attn_q.bias"), "sliding_window": context.window,
            "attention_out_bias": context.has("attn_output.bias")}


def _ernie(context: FamilyContext, raw: Raw) -> None:
    _add_head_dim(context, raw, "use_bias")
    raw.setdefault("rope_theta", DEFAULT_ROPE_THETA)


def _glm(context: FamilyContext, raw: Raw) -> None:
    _add_head_dim(context, raw, "attention_bias")
    raw.setdefault("partial_rotary_factor", 1.0)


def _add_head_dim(context: FamilyContext, raw: Raw, bias: str) -> None:
    """Complete families whose head_dim may differ from hidden size / heads; `bias` is the config key of the attention biases."""
    raw |= {"sliding_window": context.window, bias: context.has("attn_q.bias", "attn_qkv.bias")}
    if isinstance(heads := raw["num_attention_heads"], int) and heads > 0:
        raw.setdefault("head_dim", raw["hidden_size"] // heads)


def _nemotron(context: FamilyContext, raw: Raw) -> None:
    raw |= {"sliding_window": context.window, "attention_bias": context.has("attn_output.bias"), "mlp_bias": context.has("ffn_up.bias"),
            "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}


def _stablelm(context: FamilyContext, raw: Raw) -> None:
    raw |= {"sliding_window": context.window, "use_qkv_bias": context.has("attn_q.bias"), "qk_layernorm": context.has("attn_q_norm.weight"),
            "use_parallel_residual": not context.has("ffn_norm.weight"), "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])


def _falcon(context: FamilyContext, raw: Raw) -> None:
    """llama.cpp supports only models with parallel attention and MLP."""
    raw |= {"sliding_window": context.window, "bias": context.has("attn_qkv.bias"), "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 2 if context.has("attn_norm_2.weight") else 1}
    raw.setdefault("num_kv_heads", raw["num_attention_heads"])
    raw.pop("head_dim", None)


def _gpt_neox(context: FamilyContext, raw: Raw) -> None:
    raw |= {"sliding_window": context.window, "attention_bias": context.has("attn_qkv.bias", "attn_q.bias"),
            "rotary_pct": raw.pop("partial_rotary_factor", 1.0)}


def _internlm2(context: FamilyContext, raw: Raw) -> None:
    raw |= {"sliding_window": context.window, "bias": context.has("attn_q.bias")}
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])


def _olmo(context: FamilyContext, raw: Raw) -> None:
    raw |= {"sliding_window": context.window, "clip_qkv": raw.get("clip_qkv") or None,  # 0 for none
            "attention_bias": context.has("attn_q.bias")}
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])


def _phi(context: FamilyContext, raw: Raw) -> None:
    raw |= {"sliding_window": context.window, "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])


def _starcoder2(context: FamilyContext, raw: Raw) -> None:
    window = DEFAULT_WINDOW if context.stated_window is None else context.window  # llama.cpp ignores it and converters do not write it
    raw |= {"use_bias": context.has("attn_output.bias"), "sliding_window": window}


def _exaone4(context: FamilyContext, raw: Raw) -> None:
    window = DEFAULT_WINDOW if context.stated_window is None and raw["num_hidden_layers"] == EXAONE4_WINDOWED_LAYERS else context.window
    raw |= {"sliding_window": window, "layer_types": context.layer_types(raw, EXAONE4_WINDOW_PERIOD if window else 1)}


def _olmo2(context: FamilyContext, raw: Raw) -> None:
    local = raw.pop("rope_local_base_freq", raw.get("rope_theta", DEFAULT_ROPE_THETA))
    if context.window:
        raw |= {"model_type": "olmo3", "sliding_window": context.window, "rope_parameters": {LOCAL: {"rope_theta": local}},
                "layer_types": context.layer_types(raw, OLMO3_WINDOW_PERIOD)}
        raw.setdefault("rope_theta", DEFAULT_ROPE_THETA)


def _granite(context: FamilyContext, raw: Raw) -> None:
    if context.window:
        raw["sliding_window"] = context.window
        return
    if raw.get("shared_intermediate_size") == 0:
        del raw["shared_intermediate_size"]
    if "shared_intermediate_size" in raw:
        raw["model_type"] = "granitemoeshared"
    raw |= {"attention_bias": context.has("attn_q.bias"), "mlp_bias": context.has("ffn_gate.bias")}
    if "attention_multiplier" not in raw:
        damaged(context.header.path, f"lacks key {raw['model_type']}.attention.scale")


def _jais2(context: FamilyContext, raw: Raw) -> None:
    raw |= {"sliding_window": context.window, "attention_bias": context.has("attn_q.bias"), "mlp_bias": context.has("ffn_up.bias")}
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])


def add_window(context: FamilyContext, raw: Raw) -> None:
    """The sliding window, for families that have one."""
    if context.window and raw["model_type"].startswith("qwen"):
        raw |= {"sliding_window": context.window, "use_sliding_window": True, "max_window_layers": 0}
    elif context.window or raw["model_type"] in ("gemma2", "gemma3_text", "phi3"):
        raw["sliding_window"] = context.window


COMPLETE_PLAIN: Mapping[str, Callable[[FamilyContext, Raw], None]] = {
    "ernie4_5": _ernie, "exaone": _exaone, "exaone4": _exaone4, "falcon": _falcon, "glm": _glm, "glm4": _glm, "gpt_neox": _gpt_neox,
    gpt_oss.FAMILY: gpt_oss.complete_config, "jais2": _jais2, "granite": _granite, "granitemoe": _granite, "internlm2": _internlm2,
    "llama": _llama, **dict.fromkeys(("nanbeige", "ouro"), _looped),
    "ministral3": _ministral3, "nemotron": _nemotron, "olmo": _olmo, "olmo2": _olmo2,
    "phi": _phi, "seed_oss": _seed_oss, "stablelm": _stablelm, "starcoder2": _starcoder2,
    **transformer_names.COMPLETE_CONFIG,
}
