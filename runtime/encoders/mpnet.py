"""MPNet: BERT's layers with a relative position bias shared by all layers (Song et al. 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MOST, EncoderConfig, act_of, plain_head, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("mpnet.",)
OFFSET = 2  # whatever the config says of the token that pads


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    rows = keys.integer("max_position_embeddings", 512, low=OFFSET + 1, high=MOST["positions"])
    return EncoderConfig(
        keys.text("model_type"), **sizes(keys, vocab_size=30527), context_length=rows - OFFSET,
        norm_eps=keys.number("layer_norm_eps", 1e-12), hidden_act=act_of(keys, "hidden_act"), position_rows=rows, position_offset=OFFSET,
        pad_id=OFFSET - 1, relative=keys.integer("relative_attention_num_buckets", 32, low=4, high=1024))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    import numpy as np

    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def layer(number: int) -> Layer:
        at = f"encoder.layer.{number}."
        return Layer(tensors.side_by_side([f"{at}attention.attn.{part}" for part in "qkv"], width, width),
                     tensors.linear(f"{at}attention.attn.o", width, width), tensors.linear(f"{at}intermediate.dense", inner, width),
                     tensors.linear(f"{at}output.dense", width, inner),
                     (tensors.norm(f"{at}attention.LayerNorm", width, eps), tensors.norm(f"{at}output.LayerNorm", width, eps)))

    distances = tensors.numbers("encoder.relative_attention_bias.weight", config.relative, config.num_attention_heads)
    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width),
                 tensors.table("embeddings.position_embeddings.weight", config.position_rows, width), None,
                 tensors.norm("embeddings.LayerNorm", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, position_offset=OFFSET, pad_id=config.pad_id,
                 distances=np.ascontiguousarray(distances.T))


load_head = plain_head("classifier.dense", "tanh", "classifier.out_proj")
