"""MPNet: BERT's layers with a relative position bias shared by all layers (Song et al. 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MAX_SIZES, EncoderConfig, read_activation, read_sizes, two_layer_head

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("mpnet.",)
OFFSET = 2  # row of the first text token's position, whatever pad_token_id is


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    rows = keys.integer("max_position_embeddings", 512, low=OFFSET + 1, high=MAX_SIZES["positions"])
    return EncoderConfig(
        keys.text("model_type"), **read_sizes(keys, vocab_size=30527), context_length=rows - OFFSET,
        norm_eps=keys.number("layer_norm_eps", 1e-12), hidden_act=read_activation(keys, "hidden_act"), position_rows=rows,
        position_offset=OFFSET, pad_id=OFFSET - 1, relative_buckets=keys.integer("relative_attention_num_buckets", 32, low=4, high=1024))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    import numpy as np

    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, ffn_width, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def layer(number: int) -> Layer:
        prefix = f"encoder.layer.{number}."
        return Layer(tensors.fused_linear([f"{prefix}attention.attn.{part}" for part in "qkv"], width, width),
                     tensors.linear(f"{prefix}attention.attn.o", width, width), tensors.linear(f"{prefix}intermediate.dense", ffn_width,
                                                                                               width),
                     tensors.linear(f"{prefix}output.dense", width, ffn_width),
                     (tensors.norm(f"{prefix}attention.LayerNorm", width, eps), tensors.norm(f"{prefix}output.LayerNorm", width, eps)))

    relative_bias = tensors.numbers("encoder.relative_attention_bias.weight", config.relative_buckets, config.num_attention_heads)
    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width),
                 tensors.table("embeddings.position_embeddings.weight", config.position_rows, width), None,
                 tensors.norm("embeddings.LayerNorm", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, position_offset=OFFSET, pad_id=config.pad_id,
                 relative_bias=np.ascontiguousarray(relative_bias.T))


load_head = two_layer_head("classifier.dense", "tanh", "classifier.out_proj")
