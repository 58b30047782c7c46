"""OLMo Hybrid (7B): three of four layers are gated delta-rule linear attention (with beta up to 2) with pre-norms; the others are OLMo 3's
attention, without positions in the published models.

Checkpoints store q, k and v of linear attention, and their convolutions, separately; the store concatenates them (`tensor_views.py`).
"""

from __future__ import annotations

from ...kernels.delta_shape import DeltaShape
from ..config import Defaults, ModelConfig, decoder_config, demand_silu
from ..config_reader import ConfigError, Keys, show
from ..config_rope import RopeConfig, rope_config
from . import TensorRule, llama, olmo2
from .qwen3_5_text import FULL, LINEAR

# Weight initialization.
KEYS_HARMLESS = frozenset({"linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"})
REFUSED_UNLESS = {"mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 30}
FULL_ATTENTION_INTERVAL = 4  # the last layer of every 4 has attention, without layer_types
STATE_EPS = 1e-5  # of the output norm of linear attention, independent of the config
QKV = ("q", "k", "v")
# transformers' names of norms -> those of published checkpoints, in both kinds of layers.
PUBLISHED_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=65_536, eos=(100_257,), sizes=SIZES)
    layers, hidden, heads = (base.size(keys, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kinds, bias = _layer_types(keys, layers), keys.flag("attention_bias", False)
    key_heads = keys.integer("linear_num_key_heads", heads, high=4096)
    key_dim = keys.integer("linear_key_head_dim", None, high=1024) or max(1, int(0.75 * hidden / key_heads))
    shape = DeltaShape(key_heads, keys.integer("linear_num_value_heads", heads, high=4096), key_dim,
                       keys.integer("linear_value_head_dim", 2 * key_dim, high=2048), keys.integer("linear_conv_kernel_dim", 4, high=64),
                       beta_scale=2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0)
    if shape.value_heads % shape.key_heads:
        raise ConfigError(f"config.json: linear_num_value_heads {shape.value_heads} is not a multiple of linear_num_key_heads "
                          f"{shape.key_heads}")

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig | None, ...]:
        stated = [keys.raw, keys.section("rope_parameters") or {}, keys.section("rope_scaling") or {}]
        has_rope = any(section.get("rope_theta") is not None for section in stated)
        rope = rope_config(keys, head_dim, positions)
        return tuple(rope if has_rope and kind == FULL else None for kind in kinds)

    config = decoder_config(keys, base, ropes, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_full_width=True, recurrent=shape,
                            recurrent_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
                            recurrent_norm_eps=STATE_EPS)
    demand_silu(keys, config.hidden_act, "its linear attention uses it too")
    return config


def _layer_types(keys: Keys, layers: int) -> tuple[str, ...]:
    """LINEAR or FULL by layer. Raises ConfigError for other kinds, and unless there are both."""
    default_kinds = [FULL if layer % FULL_ATTENTION_INTERVAL == FULL_ATTENTION_INTERVAL - 1 else LINEAR for layer in range(layers)]
    if FULL not in default_kinds:
        default_kinds[-1] = FULL
    return demand_both_kinds(keys.strings("layer_types", layers) or tuple(default_kinds))


def demand_both_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """`kinds`. Raises ConfigError for kinds of layers other than LINEAR and FULL, and unless there are both."""
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise ConfigError(f"config.json: layer_types holds {show(kind)}, which is not supported", f"known: {LINEAR}, {FULL}")
    if len(set(kinds)) < 2:
        raise ConfigError(f"config.json: layer_types holds only {kinds[0]}, which is not supported", "it has layers of both kinds")
    return kinds


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: post-norms, but pre-norms in layers of linear attention."""
    shape, hidden, prefix = config.recurrent, config.hidden_size, f"model.layers.{layer}."
    if layer in config.recurrent_layers:
        rules = {role: rule for role, rule in llama.layer_tensors(config, layer).items() if ".self_attn." not in rule.name}
    else:
        rules = olmo2.layer_tensors(config, layer)
    for role, rule in rules.items():
        name = rule.name.removeprefix(prefix).removesuffix(".weight")
        if name in PUBLISHED_NORMS:
            rules[role] = TensorRule(rule.name, rule.shape, also=(f"{prefix}{PUBLISHED_NORMS[name]}.weight",))
    if layer not in config.recurrent_layers:
        return rules
    for role, (name, *dims) in {
            "state_in": ("qkv_proj.weight", shape.channels, hidden), "state_gate": ("g_proj.weight", shape.values, hidden),
            "state_beta": ("b_proj.weight", shape.value_heads, hidden), "state_rate": ("a_proj.weight", shape.value_heads, hidden),
            "state_conv": ("conv1d.weight", shape.channels, 1, shape.taps), "state_decay": ("A_log", shape.value_heads),
            "state_dt": ("dt_bias", shape.value_heads), "state_norm": ("o_norm.weight", shape.value_dim),
            "state_out": ("o_proj.weight", hidden, shape.values)}.items():
        rules[role] = TensorRule(f"{prefix}linear_attn.{name}", tuple(dims))
    return rules


def joined_rows(config: ModelConfig, layer: int, place: str = "linear_attn") -> dict[str, tuple[tuple[str, int], ...]]:
    """Names of a layer's concatenated tensors -> the stored parts, with their rows. `place`: the name of the linear-attention module."""
    shape, prefix = config.recurrent, f"model.layers.{layer}.{place}."
    part_rows = shape.keys, shape.keys, shape.values
    return {f"{prefix}{fused}.weight": tuple((f"{prefix}{part}_{name}.weight", rows) for part, rows in zip(QKV, part_rows, strict=True))
            for fused, name in (("qkv_proj", "proj"), ("conv1d", "conv1d"))} if layer in config.recurrent_layers else {}
