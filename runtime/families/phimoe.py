"""Phi 3.5 MoE, Phi mini and tiny MoE: Mixtral's block with layer norms and biases, also on the head, and a router whose softmax covers
only experts with nearby scores (SparseMixer v2: L. Liu et al. 2024, arXiv:2409.12136)."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import RopeConfig, rope_config
from . import TensorRule, mixtral, stablelm
from .deepseek_v3 import check_auto_map
from .mixtral import moe_config

LIKE = mixtral
KEYS_HARMLESS = frozenset({"input_jitter_noise"})  # training only
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False}
SIZES = {"vocab_size": 32_064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32, "num_attention_heads": 32}
THETA, JITTER = 1e6, 0.01
CODE = r"(configuration|modeling)_(phi|slim)moe\.PhiMoE\w+"  # auto_map of published checkpoints; part of transformers now
MSCALES = ("short_mscale", "long_mscale")  # of longrope


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, bos=1, eos=(2,), norm_eps=1e-5, sizes=SIZES)
    layers, width = keys.integer("num_hidden_layers", SIZES["num_hidden_layers"], high=MAX_LAYERS), base.size(keys, "intermediate_size")
    moe = moe_config(keys, 16, 2, width, False, range(layers), sparsemixer_margin=2 * keys.number("router_jitter_noise", JITTER))
    if moe.experts_per_token != 2:
        raise ConfigError(f"config.json: num_experts_per_tok = {moe.experts_per_token} is not supported for phimoe models",
                          "this family routes each token to two experts")

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        return (_rope(keys, head_dim, positions),) * layers

    bias = keys.flag("attention_bias", False)
    return decoder_config(keys, base, ropes, windows=(keys.integer("sliding_window", None),) * layers, qkv_bias=bias, o_bias=bias,
                          norm_kind="layer", moe=moe, head_bias=keys.flag("lm_head_bias", False))


def _rope(keys: Keys, head_dim: int, positions: int) -> RopeConfig:
    """The layers' RoPE. longrope's section states the attention factor twice, for short and long texts; both must be equal. Raises
    ConfigError."""
    rope = rope_config(keys, head_dim, positions, THETA)
    section = keys.section("rope_scaling") or keys.section("rope_parameters") or {}
    short, long = (section.get(name) for name in MSCALES)
    if rope.kind == "default" or short is None and long is None:
        return rope
    if short != long:
        raise ConfigError(f"config.json: short_mscale {show(short)} and long_mscale {show(long)} differ, which is not supported",
                          "the published models have one number for both")
    scale = Keys(section, "config.json: rotary positions").number(MSCALES[0])
    return replace(rope, params={**rope.params, "attention_factor": scale, **dict.fromkeys(MSCALES, scale)})


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return stablelm.with_norm_biases(mixtral.layer_tensors(config, layer))


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = stablelm.outer_tensors(config)
    return rules | {"head_bias": TensorRule("lm_head.bias", (config.vocab_size,))} if config.head_bias else rules
