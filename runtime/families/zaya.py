"""ZAYA1 (8B-A0.8B): attention whose queries and keys are convolved over a few tokens, half of the values being the previous token's
(`kernels/cca_shape.py`), and a MoE with at most one of sixteen experts per token, picked by a small router network that builds on the
previous layer's router. The residual stream and the branches have learned per-channel scales and offsets.

The previous router's state travels in a second residual stream (`ModelConfig.residual_streams`), so code that slices or copies streams
needs no case for it.
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.cca_shape import CcaShape
from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..config_rope import RopeConfig, ropes_by_layer_type
from ..layer import Layer, last_of, narrowing
from . import TensorRule, llama
from .mixtral import moe_config, moe_tensors
from .qwen3_moe import NAMES

KEYS_HARMLESS = frozenset({"intermediate_size"})  # no layer has a dense MLP
REFUSED_UNLESS = {"attention_bias": False, "mlp_bias": False}
SIZES = {"vocab_size": 262_272, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 8, "moe_intermediate_size": 2048}
FULL, LOCAL = "hybrid", "hybrid_sliding"
ROPES = {FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
         LOCAL: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}  # if the config has no sections
STREAMS = 2  # the residual stream, and the routers' state
IN_PROJ_PARTS = ("q_proj", "k_proj", "v_proj_delayed", "v_proj_current")  # in the order of the fused matrix


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError."""
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=2, head_dim=128, norm_eps=1e-5, tied=True, bos=2, eos=(106,),
                    sizes=SIZES, ffn_key="moe_intermediate_size")
    layers, window = base.size(keys, "num_hidden_layers"), keys.integer("sliding_window", None)
    kinds = keys.layer_types("layer_types", layers, (FULL, LOCAL)) or (FULL,) * layers
    if LOCAL in kinds and window is None:
        raise ConfigError(f"config.json: layer_types holds {LOCAL} without a sliding_window")

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        return ropes_by_layer_type(keys, kinds, ROPES, head_dim, positions, partial=True)

    moe = replace(moe_config(keys, 16, 1, base.size(keys, "moe_intermediate_size"), False, range(layers), correction_bias=True,
                             parallel_to_mlp=True),
                  zero_experts=1, zero_experts_drop=True)
    config = decoder_config(_without_rope_type(keys), base, ropes, windows=tuple(window if kind == LOCAL else None for kind in kinds),
                            moe=moe, residual_streams=STREAMS, router_mlp_dim=keys.integer("router_hidden_size", 256, high=2**16),
                            head_bias=keys.flag("lm_head_bias", False), parallel_hybrid=True, recurrent_layers=tuple(range(layers)))
    shape = CcaShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim,
                     *(keys.integer(name, 2, high=16) for name in ("cca_time0", "cca_time1")))
    if moe.experts_per_token != 1 or config.router_mlp_dim > config.hidden_size or shape.taps < 2 or config.hidden_act != "silu":
        raise ConfigError(f"config.json: num_experts_per_tok {moe.experts_per_token}, router_hidden_size {config.router_mlp_dim}, "
                          f"cca_time0 {shape.first}, cca_time1 {shape.second} and hidden_act {config.hidden_act} are not supported "
                          "together",
                          "one expert a token, a router no wider than hidden_size, two tokens or more, silu")
    return replace(config, recurrent=shape)


def _without_rope_type(keys: Keys) -> Keys:
    """The keys without rope_type beside the sections of rope_parameters, which a published config has and transformers removes."""
    sections = keys.section("rope_parameters")
    if sections is None or "rope_type" not in sections:
        return keys
    return keys.with_values(rope_parameters={name: value for name, value in sections.items() if name != "rope_type"})


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    shape, hidden, rank, prefix = config.recurrent, config.hidden_size, config.router_mlp_dim, f"model.layers.{layer}."
    attention, router = f"{prefix}self_attn.", f"{prefix}mlp.gate."
    num_candidates = config.moe.num_experts + config.moe.zero_experts
    rules = {"input_norm": TensorRule(f"{prefix}input_layernorm.weight", (hidden,)),
             "post_norm": TensorRule(f"{prefix}post_attention_layernorm.weight", (hidden,)),
             "o": TensorRule(f"{attention}o_proj.weight", (hidden, shape.values)),
             "state_in": TensorRule(f"{attention}qkv_proj.{FUSED_IN_PROJ}", (shape.projection_widths[0], hidden)),
             "state_conv": TensorRule(f"{attention}qkv_proj.conv_qk_depthwise.weight", (shape.qk_channels, 1, shape.first)),
             "state_conv_bias": TensorRule(f"{attention}qkv_proj.conv_qk_depthwise.bias", (shape.qk_channels,)),
             "state_heads": TensorRule(f"{attention}qkv_proj.conv_qk_grouped.weight", (shape.qk_channels, shape.depth, shape.second)),
             "state_heads_bias": TensorRule(f"{attention}qkv_proj.conv_qk_grouped.bias", (shape.qk_channels,)),
             "state_temps": TensorRule(f"{attention}qk_norm.temp", (shape.kv_heads,)),
             **moe_tensors(config, f"{prefix}mlp.", NAMES),
             "correction": TensorRule(f"{router}balancing_biases", (num_candidates,)),
             "router_in": TensorRule(f"{router}down_proj.weight", (rank, hidden), plain=True),
             "router_in_bias": TensorRule(f"{router}down_proj.bias", (rank,)),
             "router_norm": TensorRule(f"{router}router_mlp.norm.weight", (rank,)),
             "router": TensorRule(f"{router}router_mlp.out_proj.weight", (num_candidates, rank))}
    for role, name in (("router_first", "fc1"), ("router_second", "fc2")):
        rules[role] = TensorRule(f"{router}router_mlp.{name}.weight", (rank, rank), plain=True)
        rules[f"{role}_bias"] = TensorRule(f"{router}router_mlp.{name}.bias", (rank,))
    for role, place in (("attn", "post_attention_residual_scale"), ("mlp", "post_mlp_residual_scale")):
        for part, name in (("scale", "residual_scale"), ("offset", "residual_bias"), ("branch_scale", "hidden_states_scale"),
                           ("branch_offset", "hidden_states_bias")):
            rules[f"{role}_{part}"] = TensorRule(f"{prefix}{place}.{name}", (hidden,))
    if layer:
        return rules | {"router_share": TensorRule(f"{router}router_states_scale", (rank,))}
    return rules | {"entry_scale": TensorRule("model.input_hidden_states_scale", (hidden,)),
                    "entry_offset": TensorRule("model.input_hidden_states_bias", (hidden,))}


FUSED_IN_PROJ = "in_proj.weight"


def joined_rows(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """A layer's fused input projection -> the tensors that store it, with their rows."""
    shape, prefix = config.recurrent, f"model.layers.{layer}.self_attn.qkv_proj."
    part_rows = shape.values, shape.qk_channels - shape.values, shape.half_value_channels, shape.half_value_channels
    stored = tuple((f"{prefix}{part}.weight", rows) for part, rows in zip(IN_PROJ_PARTS, part_rows, strict=True))
    return {f"{prefix}{FUSED_IN_PROJ}": stored}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = llama.outer_tensors(config)
    return rules | {"head_bias": TensorRule("lm_head.bias", (config.vocab_size,))} if config.head_bias else rules


@narrowing
def block(x: object, at: Layer) -> object:
    """Streams x[T, 2 * D] -> x[T, 2 * D], with the taps of `llama.block` over the first stream."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    hidden = ops.first_stream(x, STREAMS)
    if w.input_scale is not None:
        hidden = ops.scaled_residual(hidden, None, w.input_scale)
    at.tap("block_in", hidden)
    (product,) = ops.norm_linear(hidden, w.input_norm, w.recurrent.projections)
    q, k, v = kv.convolved(product, w.recurrent.params)
    q = ops.rope_heads(q, config.num_attention_heads, config.head_dim, positions, rope, None)
    k = ops.rope_heads(k, config.num_key_value_heads, config.head_dim, positions, rope, None)
    at.tap_heads(q, k, v)
    attended = kv.attend(q, k, v)
    x, hidden = last_of(x, len(attended)), last_of(hidden, len(attended))
    at.tap("attn_out", attended)
    (branch,) = ops.norm_linear(attended, None, [w.o])
    hidden = ops.scaled_residual(hidden, branch, w.residual_scales[0])
    at.tap("mlp_in", hidden)
    router_input = ops.router_mlp(hidden, w.post_norm, w.router_mlp, x)
    branch = ops.expert_branch(hidden, w.post_norm, w.router, w.experts, w.parallel_experts, config.moe.routing, config.hidden_act,
                               at.observer("visits"), w.correction_bias, None, router_input)
    hidden = ops.scaled_residual(hidden, branch, w.residual_scales[1])
    x = ops.put_stream(x, hidden, 0)
    at.tap("block_out", x)
    return x
