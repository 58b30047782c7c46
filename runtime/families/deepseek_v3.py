"""DeepSeek V3 and its relatives (R1, Moonlight, Kimi K2): multi-head latent attention (MLA), and a MoE with group-limited routing.

What a token leaves behind is a latent vector and one rotated key for all heads (`kernels/latent_shape.py`); queries are taken to the latent
and back by the matrices that would have made keys and values. Rotary positions turn neighbouring channels of a part of each head, and
stretching them sharpens scores too.
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

# Of training and of serving on several machines; qk_head_dim is the sum of two that are read.
KEYS_HARMLESS = frozenset({"aux_loss_alpha", "qk_head_dim", "seq_aux"})
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "moe_layer_freq": 1, "scoring_func": "sigmoid", "sliding_window": None,
                  "topk_method": "noaux_tc"}
SIZES = {"vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 128}
WIDTHS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
QUERY_RANK = 1536
MAX_LATENT_DIM = 1024
NO_ROPE = None  # in the place of how channels turn: attention knows no positions
# Of the published ones, which became part of transformers.
CODE = r"(configuration|modeling)_(deepseek(_v3)?\.DeepseekV3|kimi_(k25|vl)\.Kimi(K25|VL))\w+"


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=4096, sizes=SIZES, bos=0, eos=(1,))
    layers = base.size(keys, "num_hidden_layers")
    moe = with_expert_groups(keys, deepseek_moe_config(keys, layers, 256, 8, 3, True, 2.5, 2048), 8, 4)
    config = mla_config(keys, base, WIDTHS, QUERY_RANK, keys.flag("rope_interleave", True), moe=moe)
    return replace(config, mtp_layers=mtp_layers(keys))


def mtp_layers(keys: Keys) -> int:
    """Layers behind the last one, under either name of their number."""
    return keys.integer("num_nextn_predict_layers", keys.integer("num_mtp_layers", 1, low=0, high=MAX_LAYERS), low=0, high=MAX_LAYERS)


def with_expert_groups(keys: Keys, own: MoEConfig, groups: int, kept: int) -> MoEConfig:
    """The mixture with what a config says of groups of experts; `groups` and `kept` are the defaults."""
    groups, kept = keys.integer("n_group", groups, high=own.num_experts), keys.integer("topk_group", kept, high=own.num_experts)
    if own.num_experts % groups or kept > groups:
        raise ConfigError(f"config.json: n_group {groups} and topk_group {kept} do not fit {own.num_experts} experts",
                          "n_group must divide the number of experts, and topk_group must not exceed it")
    if kept * (own.num_experts // groups) < own.experts_per_token:
        raise ConfigError(f"config.json: num_experts_per_tok {own.experts_per_token} is more than topk_group {kept} of {groups} groups "
                          "hold")
    if kept < groups and own.correction_bias and own.num_experts == groups:
        raise ConfigError(f"config.json: n_group {groups} leaves one expert in a group, whose score is the sum of two")
    return replace(own, num_groups=groups, top_groups=kept)


def mla_config(keys: Keys, base: Defaults, widths: Mapping[str, int], query_rank: int | None, interleaved: bool | None,
               **features: object) -> ModelConfig:
    """What a config of latent attention says; `widths` and `query_rank` are defaults, `features` what the family decides besides.
    `interleaved`: which channels turn together, SILENT where none do."""
    rank, nope, rope, value = (keys.integer(name, default, min(default, 1), MAX_LATENT_DIM) for name, default in widths.items())
    from_rank = keys.integer("q_lora_rank", query_rank if "q_lora_rank" not in keys.raw else None, high=2**16)
    layers, heads = base.size(keys, "num_hidden_layers"), base.size(keys, "num_attention_heads")
    shape = LatentShape(rank, nope, rope, value, from_rank)
    if (stated := keys.integer("num_key_value_heads", heads, high=4096)) != heads:
        raise ConfigError(f"config.json: num_key_value_heads {stated} is not num_attention_heads {heads}",
                          "every head has its own keys and values")
    if rope % 2 or shape.key > MAX_LATENT_DIM:
        raise ConfigError(f"config.json: kv_lora_rank {rank} with qk_rope_head_dim {rope} is not supported",
                          f"the latter must be even, and both together at most {MAX_LATENT_DIM}")
    biased = keys.flag("attention_bias", False)
    cached = keys.saying(num_key_value_heads=1, head_dim=shape.key)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig | None, ...]:
        turned = None if interleaved is NO_ROPE else rope_config(keys, rope, positions, base.theta, interleaved=interleaved)
        return (turned,) * layers

    config = decoder_config(cached, base, ropes, qkv_bias=biased, o_bias=biased, mla=shape, **features)
    return replace(config, attn_scale=shape.query**-0.5 * yarn_score_scale(config.rope))


def yarn_score_scale(rope: RopeConfig | None) -> float:
    """What yarn multiplies scores by, beside what it does to cos and sin."""
    if rope is None:
        return 1.0
    all_dim, factor = rope.params.get("mscale_all_dim"), rope.params.get("factor", 1.0)
    return (0.1 * all_dim * math.log(factor) + 1.0) ** 2 if all_dim and factor > 1 else 1.0


def check_auto_map(keys: Keys, code: str) -> None:
    """Raises ConfigError unless the code that a checkpoint brings is what became part of transformers, as `code` matches, or cuts text."""
    for task, name in (keys.section("auto_map") or {}).items():
        if task != "AutoTokenizer" and not re.fullmatch(code, str(name)):
            raise ConfigError(f"config.json: auto_map names {show(name)}, which is not known for {keys.text('model_type')} models",
                              "the checkpoint brings its own code, which is never run")


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return mla_tensors(config, layer, expert_tensors(config, layer, "mlp", NAMES))


def mla_tensors(config: ModelConfig, layer: int, rules: dict[str, TensorRule]) -> dict[str, TensorRule]:
    """Tensors of one layer by role: those of latent attention in the place of attention's."""
    mla, heads, hidden, prefix = config.mla_of(layer), config.num_attention_heads, config.hidden_size, f"model.layers.{layer}.self_attn."
    rules = {role: rule for role, rule in rules.items() if ".self_attn." not in rule.name}
    found = {"kv_a": ("kv_a_proj_with_mqa", mla.key, hidden), "kv_a_norm": ("kv_a_layernorm", mla.rank),
             "kv_b": ("kv_b_proj", heads * mla.made, mla.rank), "o": ("o_proj", hidden, heads * mla.value)}
    if mla.query_rank is None:
        found["q"] = "q_proj", heads * mla.query, hidden
    else:
        found |= {"q_a": ("q_a_proj", mla.query_rank, hidden), "q_a_norm": ("q_a_layernorm", mla.query_rank),
                  "q_b": ("q_b_proj", heads * mla.query, mla.query_rank)}
    for role, (name, *shape) in found.items():
        rules[role] = TensorRule(f"{prefix}{name}.weight", tuple(shape), plain=role == "kv_b")
        if config.o_bias and role in ("q_a", "kv_a", "o"):
            rules[f"{role}_bias"] = TensorRule(f"{prefix}{name}.bias", (shape[0],))
    return rules


def attention(x: object, at: Layer) -> object:
    """The first half of a block. q and k are those of latents, which are v too; a tap sees q_in before the norm between q_a and q_b."""
    attended = attention_output(x, at)
    return at.ops.linear_add(attended, at.w.o, last_of(x, len(attended)), None, at.config.residual_multiplier)


def attention_output(x: object, at: Layer) -> object:
    """What o reads, [T, H * value], of what a layer reads."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    at.tap("block_in", x)
    mla, shape, heads = w.mla, config.mla, config.num_attention_heads
    beside = () if w.indexer is None else (w.indexer.k, w.indexer.weights)
    if w.attn_gate is not None:
        beside += (w.attn_gate,)  # [T, H] or [T, H * value], of what is attended to
    if mla.q_down is None:
        q, latent, *gated = ops.norm_linear(x, w.input_norm, [mla.q, mla.kv_down, *beside])  # [T, H * (nope + rope)], [T, rank + rope]
    else:
        latent, q, *gated = ops.norm_linear(x, w.input_norm, [mla.kv_down, mla.q_down, *beside])
    k = ops.rope_heads(ops.latent_keys(latent, shape, mla.kv_norm), 1, shape.key, positions, rope, None)
    if mla.q_down is not None:
        at.tap("q_in", q)
        if w.indexer is not None:  # before the queries take the place of its own
            (chosen_by,) = ops.norm_linear(q, mla.q_norm, [w.indexer.q])
            choose(ops, w.indexer, chosen_by, *gated[:2], kv, positions, rope, config.indexer.shape)
        (q,) = ops.norm_linear(q, mla.q_norm, [mla.q])
    q = ops.rope_heads(ops.latent_queries(q, heads, shape, mla.expand), heads, shape.key, positions, rope, None)
    if rope is not None and rope.queries is not None:
        q = ops.rope_heads(q, heads, shape.key, positions, rope.queries, None)
    at.tap_heads(q, k, k)
    attended = ops.latent_values(kv.attend(q, k, k, w.sinks), heads, shape, mla.expand)  # [T, H * value]
    if w.attn_gate is not None:
        attended = ops.gate_heads(attended, last_of(gated[-1], len(attended)), heads, shape.value)
    at.tap("attn_out", attended)
    return attended


block = decoder_block(attention)
