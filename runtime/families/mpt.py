"""MPT (7B, 30B): bias-free layer norms, an ungated MLP, fused QKV, and ALiBi in place of positions: scores grow linearly with the key's
position, with a slope per head (arXiv 2108.12409).

ALiBi takes two more channels of each head in attention and in the cache, which encode a key's position (`rope.ALIBI`), and zeros up to a
multiple of 16, the width that kernels are fast with. Low-bit codes cannot hold positions, so the KV cache is not quantized.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..config import MAX_LAYERS, MAX_SIZES, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import MAX_POSITIONS
from . import TensorRule, opt
from .deepseek_v3 import check_auto_map

LIKE = opt
# Training and runtime settings, and keys of other families that transformers ignores in this one.
KEYS_HARMLESS = frozenset({
    "emb_pdrop", "embedding_fraction", "head_dim", "init_config", "init_device", "learned_pos_emb", "num_key_value_heads",
    "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tokenizer_name", "verbose"})
REFUSED_UNLESS = {"expansion_ratio": 4, "layer_types": None, "logit_scale": None, "no_bias": True, "norm_type": "low_precision_layernorm",
                  "sliding_window": None}
CODE = r"(configuration|modeling)_mpt\.MPT\w+"  # auto_map of published checkpoints; part of transformers now
# The one supported value of each key of attn_config.
ATTENTION_VALUES = {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "attn_uses_sequence_id": False,
                    "prefix_lm": False, "qk_ln": False}
HEAD_DIM_MULTIPLE = 16  # attention is fast with multiples of this
MAX_ALIBI_BIAS = 8  # the smallest slope is 2 ** -8
NAMES = {"o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"}


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    size_keys = {"hidden_size": ("d_model", 2048, MAX_SIZES["hidden_size"]), "num_hidden_layers": ("n_layers", 24, MAX_LAYERS),
                 "num_attention_heads": ("n_heads", 16, 4096), "max_position_embeddings": ("max_seq_len", 2048, MAX_POSITIONS)}
    sizes = {name: keys.integer(mpt_key, keys.integer(name, default, high=high), high=high)
             for name, (mpt_key, default, high) in size_keys.items()}
    keys.integer("intermediate_size", None)  # ignored: it is four times hidden_size
    section = Keys(keys.section("attn_config") or {}, "config.json: attn_config")
    for name, supported in ATTENTION_VALUES.items():
        if (stated := section.raw.get(name, supported)) != supported:
            raise ConfigError(f"config.json: attn_config.{name} = {show(stated)} is not supported for mpt models",
                              f"this family runs only with {name} = {show(supported)}")
    base = Defaults(max_position_embeddings=2048, tied=True, act=("hidden_act", "gelu"), rotary=False, grouped=False,
                    eps_key="layer_norm_epsilon", norm_eps=1e-5, sizes={"vocab_size": 50_368})
    resolved = keys.with_values(**sizes, intermediate_size=4 * sizes["hidden_size"], hidden_act="gelu")
    config = decoder_config(resolved, base, norm_kind="layer", clip_qkv=section.number("clip_qkv", None))
    return with_alibi(config, alibi_slopes(config.num_attention_heads), section.number("softmax_scale", None))


def with_alibi(config: ModelConfig, slopes_by_head: tuple[float, ...], scale: float | None = None) -> ModelConfig:
    """`config` with ALiBi: slopes, and heads padded for attention. `scale`: of scores, None for the default of the stored head size."""
    padded = -(-(config.head_dim + 2) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
    return replace(config, alibi_slopes=slopes_by_head, attn_scale=config.head_dim**-0.5 if scale is None else scale, head_dim=padded,
                   v_head_dim=config.head_dim)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slopes by head. If the number of heads is not a power of two, they are every second slope of the next power, then the rest."""
    power = 2 ** math.ceil(math.log2(heads))
    of_power = 0.5 ** (np.arange(1, power + 1) * (MAX_ALIBI_BIAS / power))
    return tuple(of_power.tolist() if power == heads else [*of_power[1::2], *of_power[::2]][:heads])


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"transformer.blocks.{layer}."
    shapes = {"o": (hidden, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    rules = {"input_norm": TensorRule(f"{prefix}norm_1.weight", (hidden,)), "post_norm": TensorRule(f"{prefix}norm_2.weight", (hidden,))}
    for i, role in enumerate("qkv"):
        rules[role] = TensorRule(f"{prefix}attn.{role}_proj.weight", (hidden, hidden),
                                 part_of=(f"{prefix}attn.Wqkv.weight", i * hidden, 3 * hidden))
    return rules | {role: TensorRule(f"{prefix}{name}.weight", shapes[role]) for role, name in NAMES.items()}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table = (config.vocab_size, config.hidden_size)
    rules = {"embed": TensorRule("transformer.wte.weight", table), "norm": TensorRule("transformer.norm_f.weight", table[1:])}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}
