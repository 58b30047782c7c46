"""Doge (20M to 320M): Llama with dynamic mask attention (every key adds a number computed from its value to its scores), QK norms, and a
learned per-channel scale of the residual stream before each branch.

In attention and in the cache heads have an additional first channel: that of a key holds the bias, that of a query the constant that adds
it to scores. Beyond `keep_window_size` tokens only those with the largest biases would be seen, which is not implemented.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..layer import Layer, last_of, narrowing
from . import TensorRule, llama

MOE_KEYS = ("num_experts", "num_experts_per_tok")  # dense configs have them too
# Of MoE models, which are refused: routing would depend on the other tokens of a prompt.
KEYS_HARMLESS = frozenset({"norm_topk_prob"})
REFUSED_UNLESS = {"is_moe": False, "layer_types": None, "sliding_window": None}
SIZES = {"vocab_size": 32_768, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 8}
HEAD_ALIGNMENT = 16  # the head dimension in attention is a multiple of this


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError."""
    bias = keys.flag("attention_bias", False)
    for name in MOE_KEYS:
        keys.integer(name, None)
    config = decoder_config(keys, Defaults(max_position_embeddings=2048, sizes=SIZES), qkv_bias=bias, o_bias=bias, qk_norm=True,
                            mlp_bias=keys.flag("mlp_bias", False), dynamic_mask=True,
                            max_supported_tokens=keys.integer("keep_window_size", 2048, high=2**27))
    wide = -(-(config.head_dim + 1) // HEAD_ALIGNMENT) * HEAD_ALIGNMENT
    return replace(config, attn_scale=config.head_dim**-0.5, v_head_dim=config.head_dim, head_dim=wide)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    rules, prefix = llama.layer_tensors(replace(config, head_dim=config.projected_head_dim), layer), f"model.layers.{layer}."
    attention, heads, hidden = f"{prefix}self_attn.", config.num_key_value_heads, config.hidden_size
    rules |= {"dynamic_mask": TensorRule(f"{attention}dt_proj.weight", (heads, heads * config.projected_head_dim), plain=True),
              "dynamic_mask_rate": TensorRule(f"{attention}A", (heads,)),
              "attn_scale": TensorRule(f"{prefix}input_residual", (hidden,)),
              "mlp_scale": TensorRule(f"{prefix}post_attention_residual", (hidden,))}
    return rules | ({"dynamic_mask_bias": TensorRule(f"{attention}dt_proj.bias", (heads,))} if config.qkv_bias else {})


@narrowing
def block(x: object, at: Layer) -> object:
    """As `llama.block`."""
    ops, w, positions, rope, config = at.ops, at.w, at.positions, at.rope, at.config
    at.tap("block_in", x)
    heads, kv_heads, narrow, wide = config.num_attention_heads, config.num_key_value_heads, config.projected_head_dim, config.head_dim
    q, k, v = ops.norm_linear(x, w.input_norm, [w.q, w.k, w.v])
    q = ops.pad_heads(ops.rope_heads(q, heads, narrow, positions, rope, w.q_norm), heads, wide, w.alibi_channels[0], 0)
    k = ops.pad_heads(ops.rope_heads(k, kv_heads, narrow, positions, rope, w.k_norm), kv_heads, wide, None, 1)
    (bias,) = ops.norm_linear(v, None, [w.dynamic_mask[0]])  # [T, KVH]
    k = ops.dynamic_mask_heads(k, bias, kv_heads, wide, w.dynamic_mask[1])
    v = ops.pad_heads(v, kv_heads, wide, None, 2)
    at.tap_heads(q, k, v)
    attended = ops.unpad_heads(at.kv.attend(q, k, v), heads, narrow)
    x = last_of(x, len(attended))
    at.tap("attn_out", attended)
    (branch,) = ops.norm_linear(attended, None, [w.o])
    x = ops.scaled_residual(x, branch, w.residual_scales[0])
    at.tap("mlp_in", x)
    branch = ops.shared_block_mlp(x, w.post_norm, w.gate, w.up, w.down, config.hidden_act, (), at.observer("mlp_hidden"))
    x = ops.scaled_residual(x, branch, w.residual_scales[1])
    at.tap("block_out", x)
    return x
