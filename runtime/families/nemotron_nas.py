"""Llama Nemotron (Super 49B, Ultra 253B): Llama 3 after a neural architecture search that removed attention or the MLP from some layers and
narrowed others.

The config describes every block. Models that replace attention or an MLP by a single matrix (the 51B) are refused.
"""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..layer import Layer, narrowing
from . import TensorRule, llama
from .deepseek_v3 import check_auto_map
from .llama import feed_forward

ATTENTION, FFN = "attention", "ffn"
# By half of a block: keys of its size, as a ratio or a number; keys that must be unset; and keys that must have one of Llama's values.
SIZE_KEYS = {ATTENTION: ("n_heads_in_group", "num_key_value_heads"), FFN: ("ffn_mult", "intermediate_size")}
UNSUPPORTED = {ATTENTION: ("llama4", "mamba", "num_sink_tokens", "replace_with_linear", "sparsify", "unshifted_sink",
                           "use_prefill_window_in_sink_attention", "window_length"), FFN: ("moe", "replace_with_linear", "sparsify")}
LLAMA_VALUES = {ATTENTION: {}, FFN: {"hidden_act": (None, "silu")}}
FFN_MULTIPLE = 256  # intermediate sizes are rounded up to this
CODE = r"(configuration|modeling)_decilm\.DeciLM\w+"  # auto_map of published checkpoints; their code is not run


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    layers, heads, hidden = (keys.integer(name, None, high=high) for name, high in (
        ("num_hidden_layers", MAX_LAYERS), ("num_attention_heads", 4096), ("hidden_size", 2**20)))
    blocks = keys.raw["block_configs"] if keys.has("block_configs") else None
    if None in (layers, heads, hidden) or not isinstance(blocks, list) or len(blocks) != layers:
        raise ConfigError("config.json: block_configs does not describe each of num_hidden_layers",
                          "download config.json again from the model's publisher")
    kv_heads, widths = ([_size(block, number, half, heads, hidden) for number, block in enumerate(blocks)] for half in (ATTENTION, FFN))
    if not any(kv_heads) or not any(widths):
        raise ConfigError("config.json: block_configs leaves no layer with attention, or none with an MLP", "published models have both")
    resolved = keys.with_values(num_key_value_heads=max(kv_heads), intermediate_size=max(widths))
    bias = keys.flag("attention_bias", False)
    layer_sizes = tuple(width or max(widths) for width in widths) if len({*widths} - {0}) > 1 else ()
    layer_kv_heads: tuple[tuple[int, int], ...] = ()
    if len({*kv_heads} - {0}) > 1:
        head_dim = keys.integer("head_dim", None) or hidden // heads
        layer_kv_heads = tuple((count or max(kv_heads), head_dim) for count in kv_heads)
    return decoder_config(resolved, Defaults(max_position_embeddings=2048, bos=1, eos=(2,)), qkv_bias=bias, o_bias=bias,
                          mlp_bias=keys.flag("mlp_bias", False),
                          layers_without_attention=tuple(layer for layer, count in enumerate(kv_heads) if not count),
                          layers_without_mlp=tuple(layer for layer, width in enumerate(widths) if not width),
                          layer_intermediate_sizes=layer_sizes, layer_kv_heads=layer_kv_heads)


def _size(block: object, number: int, half: str, heads: int, hidden: int) -> int:
    """KV heads of a block's attention, or the intermediate size of its MLP; 0 if the block lacks that half. Raises ConfigError."""
    stated = block.get(half) if isinstance(block, dict) else None
    if not isinstance(stated, dict) or not isinstance(stated.get("no_op", False), bool):
        raise ConfigError(f"config.json: block_configs[{number}].{half} is {show(stated)}, which is not a description")
    where = f"config.json: block_configs[{number}].{half}"
    for name, value in stated.items():
        known = ("no_op", *SIZE_KEYS[half], *UNSUPPORTED[half], *LLAMA_VALUES[half])
        if name not in known or name in UNSUPPORTED[half] and value or value not in LLAMA_VALUES[half].get(name, (value,)):
            raise ConfigError(f"{where}.{name} = {show(value)} is not supported", "supported are blocks with Llama's attention and MLP, "
                              "or with neither: Nemotron Super 49B and Ultra 253B")
    if stated.get("no_op", False):
        return 0
    ratio, size = (stated.get(name) for name in SIZE_KEYS[half])
    if type(size) is int and 0 < size <= 2**22 and (half == FFN or heads % size == 0):
        return size
    if half == ATTENTION and type(ratio) is int and 0 < ratio <= heads and heads % ratio == 0:
        return heads // ratio
    if half == FFN and type(ratio) in (int, float) and 0 < ratio < 1024:
        return -(-int(2 * ratio * hidden / 3) // FFN_MULTIPLE) * FFN_MULTIPLE
    raise ConfigError(f"{where} is {show(stated)}, which states no size",
                      f"it states {' or '.join(SIZE_KEYS[half])}, KV heads in a number that divides the query heads")


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, removed = llama.layer_tensors(config, layer), ()
    if layer in config.layers_without_attention:
        removed = ("input_norm", "q", "k", "v", "o")
    if layer in config.layers_without_mlp:
        removed = (*removed, "post_norm", "gate", "up", "down")
    return {role: rule for role, rule in rules.items() if role.removesuffix("_bias") not in removed}


@narrowing
def block(x: object, at: Layer) -> object:
    """`llama.block`, without the half that a layer lacks."""
    w = at.w
    if w.o is not None:
        x = llama.attention(x, at)
    if w.up is not None:
        return feed_forward(x, at)
    at.tap("block_out", x)
    return x
