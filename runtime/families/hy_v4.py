"""Hy 4 (Hunyuan 4): sparse MLA with attention sinks and output gates, Hunyuan 3's MoE, and several residual streams that each token reads
and writes by weights of its own, without mixing them.

Layers share the choice of the last one that has an indexer. Gates of routed experts are bounded, those of the expert that all visit are
not. Of a head of an indexer the last channels turn, which are read as the first (`tensor_views.py`). Checkpoints call what is about streams
and gates by names of their own (`native_names.py`).

Neighbouring channels turn together, of heads and of indexers, as vLLM and llama.cpp run what its maker published; transformers turns halves
of the same weights, which a config means here that says so by `rope_interleave`, a key that transformers does not read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...kernels.layout import SILU_LIMIT
from ..config import Defaults, ModelConfig
from ..config_reader import ConfigError, Keys, show
from ..layer import Layer, narrowing
from . import TensorRule, deepseek_v32, llama
from .deepseek_v3 import attention_output
from .deepseek_v4 import hyper_connection_tensors, stream_mlp, write_branch
from .deepseek_v32 import sparse_mla_config
from .glm4_moe import deepseek_moe_config
from .glm_moe_dsa import indexer_layers

LIKE = deepseek_v32
KEYS_HARMLESS = deepseek_v32.KEYS_HARMLESS - {"indexer_types"} | {"learnable_sink_init", "enable_lm_head_fp32"}  # of training
REFUSED_UNLESS = {
    **{key: value for key, value in deepseek_v32.REFUSED_UNLESS.items() if "rope_interleave" not in key}, "hc_magnitude": 2.0,
    "enable_ihc": True, "gated_mla": True, "gating_type": "elementwise", "learnable_sink": True}
SIZES = {"vocab_size": 120_832, "hidden_size": 2816, "intermediate_size": 6912, "num_hidden_layers": 34, "num_attention_heads": 32}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
QUERY_RANK, EVERY = 1536, 4  # layers behind the first of which one chooses
BOUNDED = "clamped_silu"
# Of what makes index queries and keys, with channels in another order than they are stored in, and what that is.
CALLED = {"index_q": "turned_q.weight", "index_k": "turned_k.weight", "index_k_norm": "turned_k_norm.weight",
          "index_k_norm_bias": "turned_k_norm.bias"}
STORED = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError."""
    base = Defaults(max_position_embeddings=262_144, norm_eps=1e-5, sizes=SIZES, bos=120_000, eos=(120_025,))
    layers = base.size(keys, "num_hidden_layers")
    if (limit := keys.raw.get("swiglu_limit", SILU_LIMIT)) != SILU_LIMIT:
        raise ConfigError(f"config.json: swiglu_limit = {show(limit)} is not supported for hy_v4 models",
                          f"this family runs only with swiglu_limit = {SILU_LIMIT}")
    keys.mark_known("swiglu_limit")
    usual = [layer % EVERY == 1 or not layer for layer in range(layers)]
    chooses = indexer_layers(keys, layers) if keys.has("indexer_types") else usual
    moe, interleaved = deepseek_moe_config(keys, layers, 256, 8, 1, True, 2.827, 768), keys.flag("rope_interleave", True)
    config = sparse_mla_config(keys, base, MLA_DIMS, QUERY_RANK, (1, 1), 16, interleaved, chooses, replace(moe, parallel_to_mlp=True),
                               interleaved)
    if config.o_bias or config.hidden_act != "silu":
        raise ConfigError(f"config.json: attention_bias = {show(config.o_bias)} with hidden_act = {config.hidden_act} is not supported for "
                          "hy_v4 models", "no biases, and silu")
    return replace(config, output_gate=True, residual_streams=keys.integer("hc_mult", 4, low=2, high=16), unmixed_streams=True,
                   sinkhorn_eps=keys.number("hc_eps", 1e-6))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, prefix = deepseek_v32.layer_tensors(config, layer), f"model.layers.{layer}."
    heads, hidden = config.num_attention_heads, config.hidden_size
    rules |= {"attn_gate": TensorRule(f"{prefix}self_attn.gate_proj.weight", (heads * config.mla.value, hidden)),
              "sinks": TensorRule(f"{prefix}self_attn.sinks", (heads,))}
    for role, name in CALLED.items():
        if role in rules:
            rules[role] = replace(rules[role], name=f"{prefix}self_attn.indexer.{name}")
    for role, name in (("attn_mix", "attn_hc"), ("mlp_mix", "ffn_hc")):
        rules |= hyper_connection_tensors(config, role, [f"{prefix}{name}.{part}" for part in ("fn", "base", "scale")], 2, 2)
    return rules


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """What makes index queries and keys, with the channels that turn in front -> as in `tensor_views`."""
    if config.indexer is None or (own := config.indexer.shape_of(layer)) is None:
        return {}
    prefix, turned = f"model.layers.{layer}.self_attn.indexer.", np.roll(np.arange(own.width), own.rope)
    rows = {"index_q": (np.arange(own.heads)[:, None] * own.width + turned).reshape(-1)}
    return {prefix + name: (prefix + stored, rows.get(role, turned)) for (role, name), stored in zip(CALLED.items(), STORED, strict=True)}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    names = [f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")]
    return llama.outer_tensors(config) | hyper_connection_tensors(config, "leave_mix", names, 1, 1)


@narrowing
def block(x: object, at: Layer) -> object:
    """As `llama.block`, of streams x [T, S * D]. Taps see what a branch reads where they see x of other families, but for block_out."""
    ops, w = at.ops, at.w
    around_attention, around_mlp = w.gated_residuals
    own = ops.read_streams(x, around_attention)
    x = write_branch(ops, x, attention_output(own, at), w.o, around_attention)
    return stream_mlp(x, at, around_mlp, BOUNDED)
