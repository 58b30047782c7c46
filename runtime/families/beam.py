"""Beam (Reflection, 501B-A23B): a MoE with pre- and post-norms, gated attention, RoPE only in sliding-window layers, and corrected sigmoid
routing by groups of experts, without a shared one.

Layers with full attention, every sixth and the last, have no rotary positions: they scale queries by position. Branch number n of the
model, counted from 2, meets the residual stream x as sqrt((n - 1) / n) x + branch / sqrt(n), which is a plain sum over sqrt(n): the stream
is kept as that sum, and norms that read it have n times the epsilon.
"""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL, RopeConfig, ropes_by_layer_type
from . import EXPERT_ROLES, TensorRule, gemma2
from .deepseek_v3 import with_expert_groups
from .glm4_moe_lite import sparse_layers_after
from .mixtral import moe_config, moe_tensors
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

REFUSED_UNLESS = {"mlp_bias": False}
SIZES = {"vocab_size": 151_936, "hidden_size": 5120, "intermediate_size": 20_480, "num_hidden_layers": 52, "num_attention_heads": 48}
WINDOW, FULL_ATTENTION_INTERVAL, DENSE_LAYERS = 512, 6, 3
QUERY_SCALING = 0.1, 2048
LOGIT_CAP = 30.0


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=8192, num_key_value_heads=8, head_dim=128, sizes=SIZES)
    layers, bias = base.size(keys, "num_hidden_layers"), keys.flag("attention_bias", False)
    usual = [LOCAL if (layer + 1) % FULL_ATTENTION_INTERVAL and layer + 1 < layers else GLOBAL for layer in range(layers)]
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else WINDOW)
    windows = layer_windows(keys, window, usual)
    kinds = tuple(GLOBAL if each is None else LOCAL for each in windows)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig | None, ...]:
        sections = keys.section("rope_parameters") or {}
        nope_type = "" if isinstance(sections.get(GLOBAL), dict) else GLOBAL
        return ropes_by_layer_type(keys, kinds, {LOCAL: {"rope_type": "default"}}, head_dim, positions, nope_type=nope_type)

    moe = moe_config(keys, 256, 8, keys.integer("moe_intermediate_size", 2560, high=2**22), keys.flag("norm_topk_prob", True),
                     sparse_layers_after(keys, layers, DENSE_LAYERS), sigmoid=True, correction_bias=True, parallel_to_mlp=True,
                     routed_scale=keys.number("routed_scaling_factor", 2.5))
    return decoder_config(keys, base, ropes, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True, output_gate=True,
                          moe=with_expert_groups(keys, moe, 8, 4), nope_query_scaling=QUERY_SCALING, depth_scaled_residual=True,
                          final_logit_softcapping=gemma2.softcap(keys, "final_logit_softcapping", LOGIT_CAP))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: Gemma 2's, attention gates with one bias for each head, and experts in place of the MLP."""
    rules, prefix, heads = gemma2.layer_tensors(config, layer), f"model.layers.{layer}.", config.num_attention_heads
    rules |= {"attn_gate": TensorRule(f"{prefix}self_attn.gate_proj.weight", (heads * config.head_dim, config.hidden_size)),
              "attn_gate_bias": TensorRule(f"{prefix}self_attn.gate_bias", (heads,))}
    if layer not in config.moe.layers:
        return rules
    rules = {role: rule for role, rule in rules.items() if role not in EXPERT_ROLES}
    return rules | moe_tensors(config, f"{prefix}mlp.", NAMES)
