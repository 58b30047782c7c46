"""MiMo V2 Flash (309B-A15B): values narrower than keys, RoPE on a third of each head; windowed layers have RoPE parameters of their own,
twice as many KV heads, and attention sinks. DeepSeek V3's MoE without a shared expert, after the first layer.

Values are padded to the width of keys in the cache, which costs half of their size again.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import GLOBAL, LOCAL, RopeConfig, rope_from_section
from . import TensorRule
from .deepseek_v3 import check_auto_map, with_expert_groups
from .glm4_moe_lite import DENSE, SPARSE, sparse_layers
from .mixtral import expert_tensors, moe_config
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

# Runtime settings and MTP layers, which are not loaded. attention_chunk_size repeats the sliding window.
KEYS_HARMLESS = frozenset({"attention_chunk_size", "num_nextn_predict_layers", "rope_scaling", "original_max_position_embeddings"})
REFUSED_UNLESS = {
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "mlp_bias": False, "n_shared_experts": None,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
SIZES = {"vocab_size": 152_576, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 48, "num_attention_heads": 64}
CODE = r"(configuration|modeling)_mimo_v2_flash\.MiMoV2Flash\w+"  # auto_map of the published checkpoint; part of transformers now
ROTATED_SHARE, THETAS, FULL_ATTENTION_INTERVAL = 0.334, {GLOBAL: 5e6, LOCAL: 10_000.0}, 6
# A size of layers with a window -> that of the other layers, and how many times that it must be.
SWA_RATIOS = {"swa_num_attention_heads": ("num_attention_heads", 1), "swa_num_key_value_heads": ("num_key_value_heads", 2),
              "swa_head_dim": ("head_dim", 1), "swa_v_head_dim": ("v_head_dim", 1)}
DEFAULT_SIZES = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128}
EPS, VALUE_SCALE, WINDOW = 1e-5, 0.707, 129


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=4, head_dim=192, bos=1, norm_eps=EPS, sizes=SIZES)
    for name, (full_key, ratio) in SWA_RATIOS.items():
        full_size = keys.integer(full_key, DEFAULT_SIZES[full_key])
        if (stated := keys.integer(name, None)) not in (None, ratio * full_size):
            raise ConfigError(f"config.json: {name} {stated} is not supported with {full_key} {full_size}",
                              f"published models of this family have {ratio} times as many in layers with a window")
    layers, kv_heads = base.size(keys, "num_hidden_layers"), keys.integer("num_key_value_heads", 4, high=2048)
    window_without_self = keys.integer("sliding_window_size", None)  # does not count the query's own token
    window = keys.integer("sliding_window", WINDOW) if window_without_self is None else window_without_self + 1
    keys.integer("sliding_window", None)
    default_kinds = [GLOBAL if layer == 0 or (layer + 1) % FULL_ATTENTION_INTERVAL == 0 else LOCAL for layer in range(layers)]
    windowed, sparse = keys.flags("hybrid_layer_pattern", layers), keys.flags("moe_layer_freq", layers)
    if keys.strings("layer_types", layers) is None and windowed is not None:
        default_kinds = [LOCAL if each else GLOBAL for each in windowed]
    windows = layer_windows(keys, window, default_kinds)
    kinds = tuple(GLOBAL if layer_window is None else LOCAL for layer_window in windows)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        by_kind = {kind: rope_from_section(Keys(section, f"config.json: rotary positions of {kind}"), head_dim, positions, THETAS[kind],
                                           partial=True)
                   for kind, section in _rope_sections(keys).items()}
        return tuple(by_kind[kind] for kind in kinds)

    moe_keys = keys if sparse is None or keys.has("mlp_layer_types") else keys.with_values(
        mlp_layer_types=[SPARSE if each else DENSE for each in sparse])
    moe = moe_config(keys, 256, 8, keys.integer("moe_intermediate_size", 2048, high=2**22), keys.flag("norm_topk_prob", True),
                     sparse_layers(moe_keys, layers), "n_routed_experts", sigmoid=True, correction_bias=True,
                     routed_scale=keys.number("routed_scaling_factor", 1.0))
    resolved = keys.with_values(rms_norm_eps=keys.number("rms_norm_eps", keys.number("layernorm_epsilon", EPS)))
    config = decoder_config(resolved, base, ropes, windows=windows, qkv_bias=keys.flag("attention_bias", False),
                            moe=with_expert_groups(keys, moe, 1, 1))
    v_head_dim, value_scale = keys.integer("v_head_dim", 128, high=1024), keys.number("attention_value_scale", VALUE_SCALE)
    if v_head_dim > config.head_dim or v_head_dim % 2:
        raise ConfigError(f"config.json: v_head_dim {show(v_head_dim)} is not supported with a head_dim of {config.head_dim}",
                          "values of this family are no wider than keys")
    layer_kv_heads = tuple((2 * kv_heads if kind == LOCAL else kv_heads, config.head_dim) for kind in kinds)
    return replace(config, v_head_dim=v_head_dim, multipliers=(("v", value_scale),) if value_scale != 1.0 else (),
                   layer_kv_heads=layer_kv_heads)


def _rope_sections(keys: Keys) -> dict[str, dict[str, object]]:
    """The rope_parameters of each layer type. The published config has a theta for each type and one partial_rotary_factor."""
    rotated_share = keys.number("partial_rotary_factor", ROTATED_SHARE)
    thetas = {GLOBAL: keys.number("rope_theta", THETAS[GLOBAL], above=1.0),
              LOCAL: keys.number("swa_rope_theta", THETAS[LOCAL], above=1.0)}
    stated = keys.section("rope_parameters") or {}
    if unknown := sorted(stated.keys() - {GLOBAL, LOCAL}):
        raise ConfigError(f"config.json: rope_parameters holds {show(unknown[0])}, which is not supported",
                          "this family has one section for each layer type")
    defaults = {kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotated_share}
                for kind, theta in thetas.items()}
    sections = Keys(stated, "config.json: rope_parameters")
    return {kind: {"partial_rotary_factor": ROTATED_SHARE, **(sections.section(kind) or default)} for kind, default in defaults.items()}


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    prefix, (kv_heads, _), v_head_dim = f"model.layers.{layer}.self_attn.", config.kv_heads_of(layer), config.v_head_dim
    rules = expert_tensors(config, layer, "mlp", NAMES)
    rules["v"] = replace(rules["v"], shape=(kv_heads * v_head_dim, config.hidden_size))
    rules["o"] = replace(rules["o"], shape=(config.hidden_size, config.num_attention_heads * v_head_dim))
    if "v_bias" in rules:
        rules["v_bias"] = replace(rules["v_bias"], shape=(kv_heads * v_head_dim,))
    if config.windows[layer] is not None:
        rules["sinks"] = TensorRule(f"{prefix}attention_sink_bias", (config.num_attention_heads,), also=(f"{prefix}sinks",))
    return rules
