"""Llama 4 (Scout, Maverick), text: layers with RoPE and weightless QK norms, beside layers without positions (NoPE); one routed expert per
token, whose input is scaled by its router weight, and a shared one. MobileLLM R1 is the same without experts.

Layers with RoPE attend within the token's chunk only (chunked attention); NoPE layers scale queries by position beyond a length. Neither is
implemented: the context is limited to the length up to which both make no difference.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from . import TensorRule, hunyuan_v1_dense, llama
from .mixtral import moe_config, moe_tensors
from .qwen3_moe import NAMES
from .smollm3 import rotated_layers

LIKE = hunyuan_v1_dense
# attn_scale is the query scaling beyond the supported length; the rest are training and runtime settings, and keys of other families that
# transformers ignores.
KEYS_HARMLESS = frozenset({"attn_scale", "cache_implementation", "for_llm_compressor", "hidden_activation", "rope_local_base_freq",
                           "router_jitter_noise", "sliding_window"})
REFUSED_UNLESS = {"mlp_bias": False, "query_pre_attn_scalar": 256}  # transformers does not read the latter
SIZES = {"vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 40}
LAYER_TYPES = ("chunked_attention", "full_attention")
CHUNK_SIZE = 8192  # default chunk, and default length beyond which queries are scaled


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, head_dim=128, bos=1, eos=(2,), norm_eps=1e-5, theta=5e5,
                    rope={"interleaved": True}, sizes=SIZES)
    layers, width, bias = base.size(keys, "num_hidden_layers"), base.size(keys, "intermediate_size"), keys.flag("attention_bias", False)
    listed = keys.raw.get("no_rope_layers")
    if isinstance(listed, list):  # the published ones without experts list more layers than they have
        listed = listed[:layers] or None
    rotated, sparse = rotated_layers(keys.with_values(num_hidden_layers=layers, no_rope_layers=listed)), _sparse_layers(keys, layers)
    keys.mark_known("num_experts_per_tok", "num_local_experts")
    moe = None
    if sparse:
        moe = moe_config(keys, 16, 1, width, False, sparse, "num_local_experts", sigmoid=True, weights_scale_inputs=True,
                         shared_expert_dim=width)
    dense = keys.integer("intermediate_size_mlp", 16_384, high=2**22)
    keys.layer_types("layer_types", layers, LAYER_TYPES)

    max_tokens, limiting_key = _max_supported_tokens(keys)
    sizes = () if len(sparse) == layers else tuple(width if layer in sparse else dense for layer in range(layers))
    config = decoder_config(keys, base, rotary_layers=rotated, qkv_bias=bias, o_bias=bias, moe=moe, max_supported_tokens=max_tokens,
                            qk_norm_unweighted=keys.flag("use_qk_norm", True), layer_intermediate_sizes=sizes)
    if max_tokens is None or max_tokens >= config.max_position_embeddings:
        return config
    warning = (f"config.json: beyond {max_tokens} tokens this model changes its attention ({limiting_key}), which is not supported: the "
               f"context is limited to {max_tokens}")
    return replace(config, warnings=(*config.warnings, warning))


def _sparse_layers(keys: Keys, layers: int) -> frozenset[int]:
    """The layers with experts; none where the config states a step of 0, or no experts."""
    step = keys.integer("interleave_moe_layer_step", 1, low=0, high=MAX_LAYERS)
    listed = keys.layers("moe_layers", layers) if keys.has("moe_layers") and keys.raw["moe_layers"] is not None else None
    if keys.raw.get("num_local_experts") == 0 and listed:
        raise ConfigError(f"config.json: num_local_experts is 0, and moe_layers lists {len(listed)} layers with experts")
    if listed is None:
        return frozenset(range(step - 1, layers, step)) if step and keys.raw.get("num_local_experts") != 0 else frozenset()
    return listed


def _max_supported_tokens(keys: Keys) -> tuple[int | None, str]:
    """The length up to which attention is neither chunked nor scaled, and the key that sets it; (None, "") if there is no limit."""
    chunk = keys.integer("attention_chunk_size", None if keys.has("attention_chunk_size") else CHUNK_SIZE, high=2**27)
    scaled_from = keys.integer("floor_scale", CHUNK_SIZE, high=2**27) - 1  # in a text of floor_scale tokens the last query is scaled
    is_unscaled = keys.has("attn_temperature_tuning") and not keys.raw["attn_temperature_tuning"]  # a flag; a number in early configs
    limits = [(limit, key) for limit, key in ((chunk, "attention_chunk_size"), (None if is_unscaled else scaled_from, "floor_scale"))
              if limit is not None]
    return min(limits, default=(None, ""))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    prefix = f"model.layers.{layer}."
    rules = {role: TensorRule(rule.name.replace(".mlp.", ".feed_forward."), rule.shape)
             for role, rule in llama.layer_tensors(config, layer).items()}
    if config.moe is None or layer not in config.moe.layers:
        return rules
    experts = moe_tensors(config, f"{prefix}feed_forward.", NAMES, "shared_expert")
    experts["router"] = TensorRule(f"{prefix}feed_forward.router.weight", experts["router"].shape)
    return {role: rule for role, rule in rules.items() if role not in NAMES} | experts
