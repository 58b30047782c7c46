"""Jina Embeddings v3 in its transformers port: RoBERTa with rotary embeddings (Sturua et al. 2024), without its task adapters.

Learned positions are supported too, for `xlm_roberta_flash.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MAX_SIZES, EncoderConfig, default_theta, read_activation, read_sizes, require_values, two_layer_head

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("roberta.",)
SIZE_DEFAULTS = {"vocab_size": 250_002, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    sizes = read_sizes(keys, **SIZE_DEFAULTS)
    require_values(keys, head_dim=sizes["hidden_size"] // sizes["num_attention_heads"])
    return EncoderConfig(
        keys.text("model_type"), **sizes, context_length=keys.integer("max_position_embeddings", 8194, high=MAX_SIZES["positions"]),
        norm_eps=keys.number("layer_norm_eps", 1e-5), hidden_act=read_activation(keys, "hidden_act"),
        type_vocab_size=keys.integer("type_vocab_size", 1, low=0, high=64),
        rope_thetas=(default_theta(keys, 20_000.0),) * sizes["num_hidden_layers"])


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, ffn_width, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def layer(number: int) -> Layer:
        prefix = f"encoder.layers.{number}."
        return Layer(tensors.linear(f"{prefix}mixer.Wqkv", 3 * width, width), tensors.linear(f"{prefix}mixer.out_proj", width, width),
                     tensors.linear(f"{prefix}mlp.fc1", ffn_width, width), tensors.linear(f"{prefix}mlp.fc2", width, ffn_width),
                     (tensors.norm(f"{prefix}norm1", width, eps), tensors.norm(f"{prefix}norm2", width, eps)),
                     theta=config.rope_thetas[number] if config.rope_thetas else None)

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width),
                 tensors.optional_table("embeddings.position_embeddings.weight", config.position_rows, width),
                 tensors.optional_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, width),
                 tensors.norm("emb_ln", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, position_offset=config.position_offset, pad_id=config.pad_id)


load_head = two_layer_head("classifier.dense", "tanh", "classifier.out_proj")
