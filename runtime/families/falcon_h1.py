"""Falcon H1: in every layer attention and Mamba 2 run in parallel under one norm, and both are added to the residual stream.

Its configs have multipliers of nearly everything. Those of inputs and outputs of linear maps are merged where they cost nothing: into the
scale of scores, the factor of a branch, and the taps of the convolution. The gate's is merged into the norm before it; the MLP's other
matrix reads that norm too, so the factor of the branch divides by it. Gates and steps of state spaces are multiplied where they are used.
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.mamba2_shape import Mamba2Shape
from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config, demand_silu
from ..config_reader import MAX_NUMBER, ConfigError, Keys, show
from ..layer import Layer, last_of, narrowing
from . import TensorRule, llama
from .granitemoehybrid import check_steps, mamba_tensors

MULTIPLIERS = ("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier", "lm_head_multiplier",
               "ssm_in_multiplier", "ssm_out_multiplier")  # 1 by default
# Speed, initialization, and layer types, which are all alike.
KEYS_HARMLESS = frozenset({"layers_block_type", "mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep"})
REFUSED_UNLESS = {"attention_bias": False, "attn_layer_indices": None, "layer_types": None, "mamba_proj_bias": False, "mamba_use_mlp": True,
                  "mlp_bias": False, "projectors_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
DEFAULTS = Defaults(max_position_embeddings=8192, num_key_value_heads=8, bos=1, eos=(2,), norm_eps=1e-5, sizes=SIZES)


def config(keys: Keys) -> ModelConfig:
    layers = tuple(range(keys.integer("num_hidden_layers", 32, high=MAX_LAYERS)))
    multipliers = {name: multiplier(name, keys.number(name, 1.0)) for name in MULTIPLIERS}
    (gate, down), parts = (numbers(keys, name, count) for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)))
    z, values, b, c, steps = (multipliers["ssm_in_multiplier"] * each for each in parts)
    attention = multipliers["attention_in_multiplier"]
    factors = {"o": attention * multipliers["attention_out_multiplier"], "state_out": multipliers["ssm_out_multiplier"], "post_norm": gate,
               "down": down / gate, "state_gate": z, "state_in.values": values, "state_in.b": b, "state_in.c": c, "state_rate": steps}
    shape = state_shape(keys, keys.integer("hidden_size", 4096, high=2**20))
    config = decoder_config(keys, DEFAULTS, recurrent=shape, recurrent_layers=layers, parallel_hybrid=True,
                            embedding_multiplier=multipliers["embedding_multiplier"], logits_scaling=1 / multipliers["lm_head_multiplier"],
                            multipliers=tuple((role, factor) for role, factor in factors.items() if factor != 1.0))
    demand_silu(keys, config.hidden_act, "its state spaces use it too")
    scale = attention**2 * multipliers["key_multiplier"]
    return config if scale == 1.0 else replace(config, attn_scale=scale * config.head_dim**-0.5)


def multiplier(name: str, value: float) -> float:
    """The value of a multiplier. Raises ConfigError if it is not positive."""
    if not 0 < value < MAX_NUMBER:
        raise ConfigError(f"config.json: {name} holds {show(value)}, expected numbers above 0")
    return float(value)


def numbers(keys: Keys, name: str, count: int) -> list[float]:
    """A list of multipliers, all 1 by default. Raises ConfigError."""
    stated = keys.raw.get(name) if keys.has(name) else None
    if stated is None:
        return [1.0] * count
    if not isinstance(stated, list) or len(stated) != count or not all(type(each) in (int, float) for each in stated):
        raise ConfigError(f"config.json: {name} is {show(stated)}, expected a list of {count} numbers")
    return [multiplier(name, each) for each in stated]


def state_shape(keys: Keys, hidden: int) -> Mamba2Shape:
    """The state of every layer. Raises ConfigError."""
    heads, expand = keys.integer("mamba_n_heads", 128, high=4096), keys.integer("mamba_expand", 2, high=64)
    values = keys.integer("mamba_d_ssm", None if "mamba_d_ssm" in keys.raw else 1024, high=2**22) or expand * hidden
    keys.has("mamba_d_head")
    stated = None if keys.raw.get("mamba_d_head") in (None, "auto") else keys.integer("mamba_d_head", None, high=4096)
    shape = Mamba2Shape(heads, stated or values // heads, keys.integer("mamba_n_groups", 1, high=4096),
                        keys.integer("mamba_d_state", 256, high=4096), keys.integer("mamba_d_conv", 4, high=64),
                        keys.flag("mamba_conv_bias", True), keys.flag("mamba_rms_norm", False))
    if shape.values != values:
        raise ConfigError(f"config.json: mamba_n_heads {heads} times mamba_d_head {shape.head_dim} is not {values}, which is mamba_d_ssm, "
                          "or mamba_expand times hidden_size")
    if shape.heads % shape.groups:
        raise ConfigError(f"config.json: mamba_n_heads {shape.heads} is not a multiple of mamba_n_groups {shape.groups}")
    if keys.flag("mamba_norm_before_gate", True) and shape.normed:
        raise ConfigError("config.json: mamba_norm_before_gate = true is not supported for falcon_h1 models",
                          "published models apply the norm after the gate")
    check_steps(keys)
    return shape


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, prefix = llama.layer_tensors(config, layer), f"model.layers.{layer}."
    rules["post_norm"] = TensorRule(f"{prefix}pre_ff_layernorm.weight", rules["post_norm"].shape)
    rules |= {role: TensorRule(f"{prefix}feed_forward.{role}_proj.weight", rules[role].shape) for role in ("gate", "up", "down")}
    return rules | mamba_tensors(config, f"{prefix}mamba.")


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return llama.outer_tensors(config) | {"norm": TensorRule("model.final_layernorm.weight", (config.hidden_size,))}


@narrowing
def block(x: object, at: Layer) -> object:
    """x[T, D] -> x[T, D], with the taps of `llama.block` and of `llama.recurrent_mixer`."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    at.tap("block_in", x)
    q, k, v = ops.norm_linear(x, w.input_norm, [w.q, w.k, w.v])
    q = ops.rope_heads(q, config.num_attention_heads, config.head_dim, positions, rope, None)
    k = ops.rope_heads(k, config.num_key_value_heads, config.head_dim, positions, rope, None)
    at.tap_heads(q, k, v)
    attended = kv.attend(q, k, v, None)
    at.tap("attn_out", attended)
    mixed = kv.mix(ops.norm_linear(x, w.input_norm, w.recurrent.projections), w.recurrent.params)
    at.tap("state_out", mixed)
    x = ops.linear_add(mixed, w.recurrent.out_proj, last_of(x, len(mixed)), None, config.multiplier("state_out"))
    x = ops.linear_add(attended, w.o, x, None, config.multiplier("o"))
    at.tap("mlp_in", x)
    observer, factor = at.observer("mlp_hidden"), config.multiplier("down")
    x = ops.gated_mlp(x, w.post_norm, w.gate, w.up, w.down, config.hidden_act, observer, None, factor)
    at.tap("block_out", x)
    return x
