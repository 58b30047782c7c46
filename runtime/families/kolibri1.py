"""Kolibri 1 (Aleph Alpha, 78B-A3.5B): pre- and post-norms, RoPE only in sliding-window layers (every fifth layer has full attention and no
positions), and in every layer a MoE with routing by corrected logits and a shared expert.

The shared expert is run as the layer's MLP, because one post-norm follows the sum of both (as in AFMoE).
"""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL
from . import TensorRule, llama
from .mixtral import moe_config, moe_tensors
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

KEYS_HARMLESS = frozenset({"head_dtype"})  # a runtime setting
REFUSED_UNLESS = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": True}
SIZES = {"vocab_size": 128_000, "hidden_size": 2560, "num_hidden_layers": 50, "num_attention_heads": 48}
FULL_ATTENTION_INTERVAL = 5  # the last layer of every 5 has full attention, without layer_types


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=262_144, num_key_value_heads=4, head_dim=128, sizes=SIZES)
    layers = keys.integer("num_hidden_layers", SIZES["num_hidden_layers"], high=MAX_LAYERS)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 513)
    windows = layer_windows(keys, window, [LOCAL if (layer + 1) % FULL_ATTENTION_INTERVAL else GLOBAL for layer in range(layers)])

    moe = moe_config(keys, 384, 6, keys.integer("moe_intermediate_size", 512, high=2**22), keys.flag("norm_topk_prob", False),
                     range(layers), sigmoid=True, correction_bias=True, correction_on_logits=True, parallel_to_mlp=True)
    resolved = keys.with_values(intermediate_size=keys.integer("shared_expert_intermediate_size", 512, high=2**22))
    rotated = [window is None or layer_window is not None for layer_window in windows]
    return decoder_config(resolved, base, windows=windows, rotary_layers=rotated, qk_norm=True, moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role. The published checkpoint has other names for the post-norms and for the correction bias."""
    rules, prefix, norm_shape = llama.layer_tensors(config, layer), f"model.layers.{layer}.", (config.hidden_size,)
    post_norms = {"o_norm": ("post_self_attn_layernorm", "post_attn_norm"), "down_norm": ("post_mlp_layernorm", "post_ffn_norm")}
    rules |= {role: TensorRule(f"{prefix}{name}.weight", norm_shape, also=(f"{prefix}{published}.weight",))
              for role, (name, published) in post_norms.items()}
    rules |= moe_tensors(config, f"{prefix}mlp.", NAMES)
    if "correction" in rules:
        rules["correction"] = TensorRule(rules["correction"].name, rules["correction"].shape, also=(f"{prefix}moe.router.expert_bias",))
    return rules | {role: TensorRule(f"{prefix}mlp.shared_experts.{name}.weight", rules[role].shape) for role, name in NAMES.items()}
