"""EmbeddingGemma 2, text: Gemma 4's block with bidirectional attention.

Per-layer inputs are projected from the token's embedding, without a table of their own, and normed. There is no head: a matrix projects the
pooled output of the last norm. A window counts the tokens on either side.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL, RopeConfig, ropes_by_layer_type
from . import TensorRule, gemma2, gemma4_text, llama, with_multimodal_names
from .gemma2 import ACT, embedding_multiplier
from .gemma4_text import MAX_PER_LAYER_INPUT_DIM, PATTERN, kv_heads_by_layer_type
from .qwen2 import layer_windows

LIKE = gemma4_text
KEYS_HARMLESS = frozenset({"hidden_act"})
SIZES = {"vocab_size": 262_144, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 4}
ROPES = {GLOBAL: {"rope_theta": 1_000_000.0}, LOCAL: {"rope_theta": 10_000.0}}
MAX_EMBEDDING_DIM = 2**16


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=262_144, num_key_value_heads=2, head_dim=256, bos=2, eos=(1,), tied=True, act=ACT, sizes=SIZES)
    layers, hidden = base.size(keys, "num_hidden_layers"), base.size(keys, "hidden_size")
    every = keys.integer("sliding_window_pattern", PATTERN, high=2**16)
    kinds = list(keys.strings("layer_types", layers) or [LOCAL if (layer + 1) % every else GLOBAL for layer in range(layers)])
    kinds[-1] = GLOBAL  # whatever the config lists
    windows = layer_windows(keys.with_values(layer_types=kinds), keys.integer("sliding_window", 512) + 1, kinds)
    wide = keys.integer("num_global_key_value_heads", 1, high=4096), keys.integer("global_head_dim", 512, high=1024)
    usual = keys.integer("num_key_value_heads", base.num_key_value_heads, high=4096), keys.integer("head_dim", base.head_dim, high=1024)
    heads = kv_heads_by_layer_type(keys, kinds, usual, wide, SIZES["num_attention_heads"])
    bias = keys.flag("attention_bias", False)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        return ropes_by_layer_type(keys, kinds, ROPES, head_dim, positions)

    return decoder_config(
        keys, base, ropes, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True, attn_scale=1.0, v_norm=True,
        embedding_multiplier=embedding_multiplier(keys, hidden), layer_kv_heads=heads if {*heads} != {usual} else (),
        per_layer_input_dim=keys.integer("hidden_size_per_layer_input", 512, high=MAX_PER_LAYER_INPUT_DIM), layer_scalars=True,
        bidirectional=True,
        pooled_dim=keys.integer("embedding_dim", 768, high=MAX_EMBEDDING_DIM))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    prefix = f"model.layers.{layer}."
    more = {"layer_scale": ("layer_scalar", 1),
            **{role: (f"ple_block.{name}", *shape) for role, (name, *shape) in gemma4_text.per_layer_input_tensors(config).items()}}
    return with_multimodal_names(gemma2.layer_tensors(config, layer) |
                                 {role: TensorRule(prefix + name, tuple(shape)) for role, (name, *shape) in more.items()})


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    given = gemma4_text.per_layer_input_outer_tensors(config)
    rules = {role: replace(given[role], name=given[role].name.replace("model.", "model.ple.", 1)) for role in ("layer_proj", "layer_norm")}
    rules["vector"] = TensorRule("model.embedding_projection.weight", (config.pooled_dim, config.hidden_size), plain=True)
    return with_multimodal_names(llama.outer_tensors(config) | rules)
