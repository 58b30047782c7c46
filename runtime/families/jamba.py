"""Jamba (Mini and Large 1.5 to 1.7, Reasoning 3B): Mamba 1 in most layers, attention without positions in the others; in some layers a MoE
in place of the MLP.

The inputs of dt, B and C have norms of their own. Checkpoints fuse the projections of x and of its gate in one matrix.
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.mamba1_shape import Mamba1Shape
from ..config import Defaults, ModelConfig, decoder_config, demand_silu
from ..config_reader import ConfigError, Keys
from . import TensorRule, expert_of, llama
from .mixtral import expert_tensors, moe_config
from .qwen3_moe import NAMES

# Training and runtime settings, keys that follow from others, and rotary positions, which no layer has.
KEYS_HARMLESS = frozenset({"layer_types", "layers_block_type", "layers_num_experts", "num_logits_to_keep",
                           "original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta", "use_associative_scan",
                           "use_mamba_kernels", "use_mambapy"})
REFUSED_UNLESS = {"attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 65_536, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
NORM_NAMES = {"input_norm": "input_layernorm", "post_norm": "pre_ff_layernorm"}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=262_144, num_key_value_heads=8, bos=1, eos=(2,), sizes=SIZES)
    layers, width = (base.size(keys, name) for name in ("num_hidden_layers", "intermediate_size"))
    attention_layers = _periodic_layers(keys, "attn_layer", 8, 4, layers)
    expert_layers = _periodic_layers(keys, "expert_layer", 2, 1, layers)
    if not attention_layers:
        raise ConfigError(f"config.json: attn_layer_offset leaves no attention layer among {layers}, which is not supported",
                          "at least one layer must have attention")
    # A single expert is an MLP; its number per token is checked all the same.
    single_expert = 1 in (keys.integer("num_experts", None), keys.integer("num_local_experts", None))
    moe = moe_config(keys.with_values(num_experts_per_tok=1) if single_expert else keys, 16, 2, width, False, expert_layers)
    if single_expert or not expert_layers:
        moe = None
    config = decoder_config(keys, base, lambda *_: (None,) * layers, moe=moe,
                            recurrent_layers=tuple(layer for layer in range(layers) if layer not in attention_layers))
    demand_silu(keys, config.hidden_act, "its state spaces use it too")
    shape = Mamba1Shape(keys.integer("mamba_expand", 2, high=64) * config.hidden_size, keys.integer("mamba_d_state", 16, high=4096),
                        time_step_rank(keys, "mamba_dt_rank", config.hidden_size), keys.integer("mamba_d_conv", 4, high=64),
                        keys.flag("mamba_conv_bias", True), normed=True)
    return replace(config, recurrent=shape if config.recurrent_layers else None)


def _periodic_layers(keys: Keys, name: str, period: int, offset: int, layers: int) -> tuple[int, ...]:
    """The layers `offset`, `offset + period`, and so on, by the keys `<name>_period` and `<name>_offset`. Raises ConfigError."""
    period, offset = keys.integer(f"{name}_period", period), keys.integer(f"{name}_offset", offset, low=0)
    if offset >= period:
        raise ConfigError(f"config.json: {name}_offset {offset} is not less than {name}_period {period}")
    return tuple(range(offset, layers, period))


def time_step_rank(keys: Keys, name: str, hidden: int) -> int:
    """The rank of dt's projection; "auto" is a sixteenth of the hidden size. Raises ConfigError."""
    keys.has(name)
    default = -(-hidden // 16)
    return default if keys.raw.get(name) == "auto" else keys.integer(name, default, high=2**16)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role; Mamba layers have those of a state space in place of attention's."""
    prefix = f"model.layers.{layer}."
    if config.moe is not None and layer in config.moe.layers:
        rules = expert_tensors(config, layer, "feed_forward", NAMES)
        rules["router"] = replace(rules["router"], name=f"{prefix}feed_forward.router.weight")
    else:
        rules = {role: replace(rule, name=rule.name.replace(".mlp.", ".feed_forward."))
                 for role, rule in llama.layer_tensors(config, layer).items()}
    for role, name in NORM_NAMES.items():
        rules[role] = replace(rules[role], name=f"{prefix}{name}.weight")
    if layer not in config.recurrent_layers:
        return rules
    return {role: rule for role, rule in rules.items() if expert_of(role) is not None or ".self_attn." not in rule.name} | mamba1_tensors(
        config, f"{prefix}mamba.")


def mamba1_tensors(config: ModelConfig, prefix: str, norm_weights: bool = True) -> dict[str, TensorRule]:
    """Tensors of a Mamba 1 state space by role; in_proj and x_proj are stored fused. `norm_weights`: the norms of dt, B and C, if the model
    has them, have weights."""
    shape, hidden = config.recurrent, config.hidden_size
    in_proj, x_proj = (f"{prefix}{name}.weight" for name in ("in_proj", "x_proj"))
    dt_rank, bc_rows = shape.rank, 2 * shape.depth
    rules = {"state_in": TensorRule(f"{prefix}in_x.weight", (shape.values, hidden), part_of=(in_proj, 0, 2 * shape.values)),
             "state_gate": TensorRule(f"{prefix}in_z.weight", (shape.values, hidden), part_of=(in_proj, shape.values, 2 * shape.values)),
             "state_rate": TensorRule(f"{prefix}x_dt.weight", (dt_rank, shape.values), part_of=(x_proj, 0, dt_rank + bc_rows)),
             "state_keys": TensorRule(f"{prefix}x_bc.weight", (bc_rows, shape.values), part_of=(x_proj, dt_rank, dt_rank + bc_rows)),
             "state_rate_wide": TensorRule(f"{prefix}dt_proj.weight", (shape.values, dt_rank)),
             "state_dt": TensorRule(f"{prefix}dt_proj.bias", (shape.values,)),
             "state_conv": TensorRule(f"{prefix}conv1d.weight", (shape.channels, 1, shape.taps)),
             "state_decay": TensorRule(f"{prefix}A_log", (shape.values, shape.depth)),
             "state_skip": TensorRule(f"{prefix}D", (shape.values,)),
             "state_out": TensorRule(f"{prefix}out_proj.weight", (hidden, shape.values))}
    if shape.normed and norm_weights:
        rules |= {"state_rate_norm": TensorRule(f"{prefix}dt_layernorm.weight", (dt_rank,)),
                  "state_b_norm": TensorRule(f"{prefix}b_layernorm.weight", (shape.depth,)),
                  "state_c_norm": TensorRule(f"{prefix}c_layernorm.weight", (shape.depth,))}
    return rules | ({"state_conv_bias": TensorRule(f"{prefix}conv1d.bias", (shape.channels,))} if shape.biased else {})


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = llama.outer_tensors(config)
    return rules | {"norm": replace(rules["norm"], name="model.final_layernorm.weight")}
