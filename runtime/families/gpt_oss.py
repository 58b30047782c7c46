"""gpt-oss (20b, 120b): the Llama block with biases everywhere, attention sinks, a sliding window in every other layer, and a MoE.

An expert's gate and up are clamped (`kernels/reference.gated`). Checkpoints hold the experts of a layer together, gate and up row by row in
turn, in MXFP4 or 16 bits; `runtime/stores/gpt_oss_experts.py` takes them apart. A converted folder holds every expert by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...kernels.layout import SWISH_LIMIT, SWISH_SLOPE
from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import MAX_POSITIONS, RopeConfig, rope_from_section
from . import TensorRule, expert_role
from .mixtral import expert_tensors, moe_config
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

# The first two repeat what num_experts_per_tok and the rotary section say.
KEYS_HARMLESS = frozenset({"experts_per_token", "initial_context_length"})
REFUSED_UNLESS = {"mlp_bias": False, "swiglu_alpha": SWISH_SLOPE, "swiglu_limit": SWISH_LIMIT}
WINDOW, THETA = 128, 150_000.0
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # where a config says nothing of it


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else WINDOW)
    bias, width = keys.flag("attention_bias", True), keys.integer("intermediate_size", high=2**22)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        older, newer = keys.section("rope_scaling"), keys.section("rope_parameters")
        original = keys.integer("original_max_position_embeddings", None, high=MAX_POSITIONS)
        section = Keys(older or newer or YARN, "config.json: rotary positions")
        return (rope_from_section(section, head_dim, positions, keys.number("rope_theta", THETA, above=1.0), original),) * layers

    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, head_dim=64, norm_eps=1e-5)
    config = decoder_config(keys, base, ropes, qkv_bias=bias, o_bias=bias, moe=moe_config(keys, 128, 4, width, True, range(layers)),
                            windows=layer_windows(keys, window, ["full_attention" if layer % 2 else "sliding_attention"
                                                                 for layer in range(layers)]))
    if config.hidden_act != "silu":
        raise keys.fail("hidden_act", "silu, which means the clamped SwiGLU of this family")
    return replace(config, hidden_act="clamped_swish", expert_format=stored(keys.section("quantization_config")))


def stored(section: Mapping[str, object] | None) -> str | None:
    """The format of a checkpoint's experts, None for 16 bits. Raises ConfigError for any but MXFP4."""
    if section is None:
        return None
    if section.get("quant_method") != "mxfp4":
        raise ConfigError(f"config.json: quantization_config with quant_method {show(section.get('quant_method'))} is not supported for "
                          "gpt_oss models", "known: mxfp4; or use the original checkpoint")
    return "mxfp4:32"


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, moe, prefix = expert_tensors(config, layer, "mlp", NAMES), config.moe, f"model.layers.{layer}."
    rules["sinks"] = TensorRule(f"{prefix}self_attn.sinks", (config.num_attention_heads,))
    rules["router"] = TensorRule(f"{prefix}mlp.router.weight", (moe.num_experts, config.hidden_size))
    rules["router_bias"] = TensorRule(f"{prefix}mlp.router.bias", (moe.num_experts,))
    for expert in range(moe.num_experts):
        for role, name in NAMES.items():
            rows = config.hidden_size if role == "down" else moe.expert_dim
            rules[expert_role(expert, f"{role}_bias")] = TensorRule(f"{prefix}mlp.experts.{expert}.{name}.bias", (rows,))
    return rules
