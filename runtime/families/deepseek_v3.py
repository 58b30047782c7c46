"""DeepSeek V3 and its relatives (R1, Moonlight, Kimi K2, Sarvam 105B): multi-head latent attention (MLA), and a MoE with group-limited
routing.

The cache holds a latent vector and one rotated key per token for all heads (`kernels/latent_shape.py`). Queries are projected into the
latent space, and attention outputs back from it, by the matrix that would expand keys and values (weight absorption). RoPE is interleaved
and rotates a part of each head; YaRN scales scores too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from ...kernels.latent_shape import LatentShape
from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import RopeConfig, rope_config
from ..layer import Layer, last_of
from ..moe_config import MoEConfig
from ..weights.index_weights import choose
from . import TensorRule
from .glm4_moe import deepseek_moe_config
from .llama import decoder_block
from .mixtral import expert_tensors
from .qwen3_moe import NAMES

# Used in training and distributed serving only; qk_head_dim (Sarvam: q_head_dim) is the sum of two keys that are read.
KEYS_HARMLESS = frozenset({"aux_loss_alpha", "q_head_dim", "qk_head_dim", "seq_aux"})
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "moe_layer_freq": 1, "scoring_func": "sigmoid", "sliding_window": None,
                  "topk_method": "noaux_tc"}
SIZES = {"vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 128}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
QUERY_RANK = 1536
MAX_LATENT_DIM = 1024
NO_ROPE = None  # as `interleaved` of `mla_config`: attention without positions
# Classes of published checkpoints' own code that transformers has adopted.
CODE = r"(configuration|modeling)_(deepseek(_v3)?\.DeepseekV3|kimi_(k25|vl)\.Kimi(K25|VL)|sarvam_(moe|mla)\.SarvamMLA)\w+"
ROPE_ALIASES = {"deepseek_yarn": "yarn"}  # Sarvam's name


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=4096, sizes=SIZES, bos=0, eos=(1,))
    layers = base.size(keys, "num_hidden_layers")
    moe = with_expert_groups(keys, deepseek_moe_config(keys, layers, 256, 8, 3, True, 2.5, 2048), 8, 4)
    config = mla_config(keys, base, MLA_DIMS, QUERY_RANK, keys.flag("rope_interleave", True), moe=moe)
    return replace(config, mtp_layers=mtp_layers(keys))


def mtp_layers(keys: Keys) -> int:
    """The number of multi-token prediction layers, from either of its keys."""
    return keys.integer("num_nextn_predict_layers", keys.integer("num_mtp_layers", 1, low=0, high=MAX_LAYERS), low=0, high=MAX_LAYERS)


def with_expert_groups(keys: Keys, moe: MoEConfig, groups: int, top_groups: int) -> MoEConfig:
    """`moe` with group-limited routing; `groups` and `top_groups` are the defaults of n_group and topk_group. Raises ConfigError."""
    groups, top_groups = keys.integer("n_group", groups, high=moe.num_experts), keys.integer("topk_group", top_groups, high=moe.num_experts)
    if moe.num_experts % groups or top_groups > groups:
        raise ConfigError(f"config.json: n_group {groups} and topk_group {top_groups} do not fit {moe.num_experts} experts",
                          "n_group must divide the number of experts, and topk_group must not exceed it")
    if top_groups * (moe.num_experts // groups) < moe.experts_per_token:
        raise ConfigError(f"config.json: num_experts_per_tok {moe.experts_per_token} is more than topk_group {top_groups} of {groups} "
                          "groups hold")
    if top_groups < groups and moe.correction_bias and moe.num_experts == groups:
        raise ConfigError(f"config.json: n_group {groups} leaves one expert in a group, whose score is the sum of two")
    return replace(moe, num_groups=groups, top_groups=top_groups)


def mla_config(keys: Keys, base: Defaults, dims: Mapping[str, int], query_rank: int | None, interleaved: bool | None,
               **features: object) -> ModelConfig:
    """The config of a model with latent attention. Raises ConfigError.

    base, dims, query_rank: defaults; `dims` by key as MLA_DIMS, `query_rank` None if queries are projected at once.
    interleaved: whether RoPE is interleaved; NO_ROPE: there are no positions.
    features: further fields of the ModelConfig.
    """
    rank, nope, rope, value = (keys.integer(name, default, min(default, 1), MAX_LATENT_DIM) for name, default in dims.items())
    q_rank = keys.integer("q_lora_rank", query_rank if "q_lora_rank" not in keys.raw else None, high=2**16)
    layers, heads = base.size(keys, "num_hidden_layers"), base.size(keys, "num_attention_heads")
    shape = LatentShape(rank, nope, rope, value, q_rank)
    if (kv_heads := keys.integer("num_key_value_heads", heads, high=4096)) != heads:
        raise ConfigError(f"config.json: num_key_value_heads {kv_heads} is not num_attention_heads {heads}",
                          "every head has its own keys and values")
    if rope % 2 or shape.key > MAX_LATENT_DIM:
        raise ConfigError(f"config.json: kv_lora_rank {rank} with qk_rope_head_dim {rope} is not supported",
                          f"the latter must be even, and both together at most {MAX_LATENT_DIM}")
    bias = keys.flag("attention_bias", False)
    cache_keys = keys.with_values(num_key_value_heads=1, head_dim=shape.key)  # what the cache holds: one latent head

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig | None, ...]:
        if interleaved is NO_ROPE:
            return (None,) * layers
        return (rope_config(keys, rope, positions, base.theta, aliases=ROPE_ALIASES, interleaved=interleaved),) * layers

    config = decoder_config(cache_keys, base, ropes, qkv_bias=bias, o_bias=bias, mla=shape, **features)
    return replace(config, attn_scale=shape.query**-0.5 * yarn_score_scale(config.rope))


def yarn_score_scale(rope: RopeConfig | None) -> float:
    """YaRN's factor of attention scores, besides its scale of cos and sin."""
    if rope is None:
        return 1.0
    all_dim, factor = rope.params.get("mscale_all_dim"), rope.params.get("factor", 1.0)
    return (0.1 * all_dim * math.log(factor) + 1.0) ** 2 if all_dim and factor > 1 else 1.0


def check_auto_map(keys: Keys, code: str) -> None:
    """Raises ConfigError unless the classes in auto_map match `code`, the original of what transformers has adopted, or are tokenizers."""
    for task, name in (keys.section("auto_map") or {}).items():
        if task != "AutoTokenizer" and not re.fullmatch(code, str(name)):
            raise ConfigError(f"config.json: auto_map names {show(name)}, which is not known for {keys.text('model_type')} models",
                              "the checkpoint brings its own code, which is never run")


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return mla_tensors(config, layer, expert_tensors(config, layer, "mlp", NAMES))


def mla_tensors(config: ModelConfig, layer: int, rules: dict[str, TensorRule]) -> dict[str, TensorRule]:
    """`rules` of one layer with latent attention in place of its attention."""
    mla, heads, hidden, prefix = config.mla_of(layer), config.num_attention_heads, config.hidden_size, f"model.layers.{layer}.self_attn."
    rules = {role: rule for role, rule in rules.items() if ".self_attn." not in rule.name}
    attention = {"kv_a": ("kv_a_proj_with_mqa", mla.key, hidden), "kv_a_norm": ("kv_a_layernorm", mla.rank),
             "kv_b": ("kv_b_proj", heads * mla.kv_b_rows, mla.rank), "o": ("o_proj", hidden, heads * mla.value)}
    if mla.query_rank is None:
        attention["q"] = "q_proj", heads * mla.query, hidden
    else:
        attention |= {"q_a": ("q_a_proj", mla.query_rank, hidden), "q_a_norm": ("q_a_layernorm", mla.query_rank),
                  "q_b": ("q_b_proj", heads * mla.query, mla.query_rank)}
    for role, (name, *shape) in attention.items():
        rules[role] = TensorRule(f"{prefix}{name}.weight", tuple(shape), plain=role == "kv_b")
        if config.o_bias and role in ("q_a", "kv_a", "o"):
            rules[f"{role}_bias"] = TensorRule(f"{prefix}{name}.bias", (shape[0],))
    return rules


def attention(x: object, at: Layer) -> object:
    """The first half of a block. Taps get q and k in latent space (k is v too), and q_in, the input of the norm between q_a and q_b."""
    attended = attention_output(x, at)
    return at.ops.linear_add(attended, at.w.o, last_of(x, len(attended)), None, at.config.residual_multiplier)


def attention_output(x: object, at: Layer) -> object:
    """The attention output before `o`, [T, H * value], from the layer's input."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    at.tap("block_in", x)
    mla, shape, heads = w.mla, config.mla, config.num_attention_heads
    extra = () if w.indexer is None else (w.indexer.k, w.indexer.weights)  # further matrices that read the layer's input
    if w.attn_gate is not None:
        extra += (w.attn_gate,)  # [T, H] or [T, H * value]
    if mla.q_a is None:
        q, latent, *extra_outputs = ops.norm_linear(x, w.input_norm,
                                                    [mla.q_b, mla.kv_a, *extra])  # [T, H * (nope + rope)], [T, rank + rope]
    else:
        latent, q, *extra_outputs = ops.norm_linear(x, w.input_norm, [mla.kv_a, mla.q_a, *extra])
    k = ops.rope_heads(ops.latent_keys(latent, shape, mla.kv_a_norm), 1, shape.key, positions, rope, None)
    if mla.q_a is not None:
        at.tap("q_in", q)
        if w.indexer is not None:  # before the product below overwrites index_q
            (index_q,) = ops.norm_linear(q, mla.q_a_norm, [w.indexer.q])
            choose(ops, w.indexer, index_q, *extra_outputs[:2], kv, positions, rope, config.indexer.shape)
        (q,) = ops.norm_linear(q, mla.q_a_norm, [mla.q_b])
    q = ops.rope_heads(ops.latent_queries(q, heads, shape, mla.kv_b), heads, shape.key, positions, rope, None)
    if rope is not None and rope.queries is not None:
        q = ops.rope_heads(q, heads, shape.key, positions, rope.queries, None)
    at.tap_heads(q, k, k)
    attended = ops.latent_values(kv.attend(q, k, k, w.sinks), heads, shape, mla.kv_b)  # [T, H * value]
    if w.attn_gate is not None:
        attended = ops.gate_heads(attended, last_of(extra_outputs[-1], len(attended)), heads, shape.value)
    at.tap("attn_out", attended)
    return attended


block = decoder_block(attention)
