"""A.X K2 (SK Telecom, Light and larger): DeepSeek V3.2's sparse attention, with gated norms.

A norm's output is multiplied, channel by channel, by a low-rank sigmoid gate of itself: before attention in every layer, and before the
experts. Queries and output gates are projected from the query latent concatenated with its norm. Checkpoints fuse both projections head by
head (`tensor_views.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..config import Defaults, ModelConfig
from ..config_reader import ConfigError, Keys, show
from ..layer import Layer, last_of, narrowing
from ..weights.index_weights import choose
from . import TensorRule, deepseek_v32
from .deepseek_v32 import sparse_mla_config
from .glm4_moe import deepseek_moe_config
from .llama import feed_forward

LIKE = deepseek_v32
SIZES = {"vocab_size": 163_840, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 32}
MLA_DIMS = {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
QUERY_RANK = 384


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, sizes=SIZES, bos=163_691, eos=(163_691,))
    groups, top_groups = keys.raw.get("n_group"), keys.raw.get("topk_group")
    if (groups is None) != (top_groups is None):
        raise ConfigError(f"config.json: n_group is {show(groups)} and topk_group {show(top_groups)}", "models state both, or neither")
    moe = deepseek_moe_config(keys, base.size(keys, "num_hidden_layers"), 128, 8, 1, True, 2.5, 512)
    config = sparse_mla_config(keys, base, MLA_DIMS, QUERY_RANK, (1, 1), 16, False, moe=replace(moe, parallel_to_mlp=True))
    if config.o_bias:
        raise ConfigError("config.json: attention_bias = true is not supported for axk2 models",
                          "this family runs only with attention_bias = false")
    rank = keys.integer("gated_norm_rank", 16, high=config.hidden_size)
    return replace(config, output_gate=True, gated_norm_rank=rank)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, prefix, mla = deepseek_v32.layer_tensors(config, layer), f"model.layers.{layer}.", config.mla
    twice = 2 * mla.query_rank
    for role, name, each in (("q_b", "q_proj", mla.query), ("attn_gate", "g_proj", mla.value)):
        rules[role] = TensorRule(f"{prefix}self_attn.{name}.weight", (config.num_attention_heads * each, twice))
    for role, name in {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}.items():
        if role == "post_norm" and layer not in config.moe.layers:
            continue
        rules[role] = TensorRule(f"{prefix}{name}.norm.weight", (config.hidden_size,))
        narrow, wide = (config.gated_norm_rank, config.hidden_size), (config.hidden_size, config.gated_norm_rank)
        for end, published, called, shape in (("in", "W_down", "mlp.fc1", narrow), ("out", "W_up", "mlp.fc2", wide)):
            also = (f"{prefix}{name}.{called}.weight",)
            rules[f"{role}_{end}"] = TensorRule(f"{prefix}{name}.{published}.weight", shape, also, plain=True)
    return rules


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """Name of q_proj and g_proj -> (fused matrix, rows): every head has its query rows, then its gate rows."""
    mla, prefix = config.mla, f"model.layers.{layer}.self_attn."
    rows = np.arange(config.num_attention_heads * (mla.query + mla.value)).reshape(config.num_attention_heads, -1)
    return {f"{prefix}q_proj.weight": (f"{prefix}q_b_proj.weight", rows[:, : mla.query].reshape(-1)),
            f"{prefix}g_proj.weight": (f"{prefix}q_b_proj.weight", rows[:, mla.query :].reshape(-1))}


@narrowing
def block(x: object, at: Layer) -> object:
    """As `deepseek_v3.block`. Taps get block_in and the experts' mlp_in after norm and gate, and doubled_in, the input of the query and
    gate projections, instead of q_in."""
    ops, w, config = at.ops, at.w, at.config
    input_gate, post_gate = w.norm_gates
    y = ops.gate_rows(ops.norm(x, w.input_norm), input_gate)
    attended = attention_output(y, at)
    x = ops.linear_add(attended, w.o, last_of(x, len(attended)))
    if not w.experts:
        return feed_forward(x, at)
    y = ops.gate_rows(ops.norm(x, w.post_norm), post_gate)
    at.tap("mlp_in", y)
    branch = ops.expert_branch(y, w.parallel_experts.pre_norm, w.router, w.experts, w.parallel_experts, config.moe.routing,
                               config.hidden_act, at.observer("visits"), w.correction_bias, w.shared_expert)
    x = ops.add_scaled(x, branch, 1.0)
    at.tap("block_out", x)
    return x


def attention_output(y: object, at: Layer) -> object:
    """The attention output before `o`, [T, H * value]."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    at.tap("block_in", y)
    mla, shape, heads = w.mla, config.mla, config.num_attention_heads
    extra = () if w.indexer is None else (w.indexer.k, w.indexer.weights)  # further matrices that read the layer's input
    latent, q_latent, *index_outputs = ops.norm_linear(y, None, [mla.kv_a, mla.q_a, *extra])
    k = ops.rope_heads(ops.latent_keys(latent, shape, mla.kv_a_norm), 1, shape.key, positions, rope, None)
    doubled = ops.norm_and_concat(q_latent, mla.q_a_norm)  # [T, 2 * rank]; q_latent is replaced by its norm
    at.tap("doubled_in", doubled)
    if w.indexer is not None:  # before the product below overwrites index_q
        (index_q,) = ops.norm_linear(q_latent, None, [w.indexer.q])
        choose(ops, w.indexer, index_q, *index_outputs, kv, positions, rope, config.indexer.shape)
    q, gates = ops.norm_linear(doubled, None, [mla.q_b, w.attn_gate])
    q = ops.rope_heads(ops.latent_queries(q, heads, shape, mla.kv_b), heads, shape.key, positions, rope, None)
    at.tap_heads(q, k, k)
    attended = ops.latent_values(kv.attend(q, k, k), heads, shape, mla.kv_b)
    attended = ops.gate_heads(attended, last_of(gates, len(attended)), heads, shape.value)
    at.tap("attn_out", attended)
    return attended
