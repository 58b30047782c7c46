"""DiffLlama (0.3B): Llama with differential attention (arXiv:2410.05258). Heads come in pairs, one from either half: the second's attention
output, times a learned number per layer, is subtracted from the first's, and the difference is normed.

Both heads of a pair attend to the concatenated values of two KV heads, so values are twice as wide as keys. The cache holds heads of one
width: queries and keys are padded with zeros (`pad_heads`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..layer import Layer, last_of, narrowing
from . import TensorRule, llama
from .llama import feed_forward

KEYS_HARMLESS = frozenset({"lambda_std_dev"})  # training only
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
MAX_HEAD_DIM = 512  # the cache holds twice as much


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError."""
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=2048, norm_eps=1e-5, bos=1, eos=(2,), sizes=SIZES)
    config = decoder_config(keys, base, qkv_bias=bias, o_bias=bias, differential_attention=True)
    if config.num_key_value_heads % 2 or config.head_dim > MAX_HEAD_DIM:
        raise ConfigError(f"config.json: num_key_value_heads {config.num_key_value_heads} with head_dim {config.head_dim} is not supported "
                          "for diffllama models", f"heads come in pairs, at most {MAX_HEAD_DIM} wide")
    return replace(config, attn_scale=config.head_dim**-0.5, v_head_dim=config.head_dim, head_dim=2 * config.head_dim)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    rules = llama.layer_tensors(replace(config, head_dim=config.projected_head_dim), layer)
    roles = (f"lambda_{name}" for name in ("q1", "k1", "q2", "k2"))
    return rules | {role: TensorRule(f"model.layers.{layer}.self_attn.{role}", (config.projected_head_dim,)) for role in roles}


def share_of(layer: int) -> float:
    """The initial value of lambda in a layer, the share of the second head that is subtracted."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


@narrowing
def block(x: object, at: Layer) -> object:
    """As `llama.block`."""
    ops, w, positions, rope, config = at.ops, at.w, at.positions, at.rope, at.config
    at.tap("block_in", x)
    heads, kv_heads, narrow, wide = config.num_attention_heads, config.num_key_value_heads, config.projected_head_dim, config.head_dim
    q, k, v = ops.norm_linear(x, w.input_norm, [w.q, w.k, w.v])  # [T, H * narrow], [T, KVH * narrow] twice
    q = ops.pad_heads(ops.rope_heads(q, heads, narrow, positions, rope, None), heads, wide, None, 0)
    k = ops.pad_heads(ops.rope_heads(k, kv_heads, narrow, positions, rope, None), kv_heads, wide, None, 1)
    v = ops.pair_heads(v, kv_heads, narrow)
    at.tap_heads(q, k, v)
    attended = at.kv.attend(q, k, v)  # [T, H * wide]
    difference = ops.add_scaled(ops.first_stream(attended, 2), ops.second_stream(attended, 2), -w.differential_lambda)
    difference = ops.rope_heads(difference, heads // 2, wide, last_of(positions, len(difference)), None, w.attn_sub_norm)
    at.tap("attn_out", difference)
    return feed_forward(ops.linear_add(difference, w.o, last_of(x, len(difference))), at)
