"""DistilBERT: BERT's layers under other names, without token types (Sanh et al. 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MAX_SIZES, EncoderConfig, read_activation, read_sizes, two_layer_head

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("distilbert.",)
EPS = 1e-12


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    sizes = read_sizes(keys, "dim", "hidden_dim", "n_layers", "n_heads", num_hidden_layers=6)
    rows = keys.integer("max_position_embeddings", 512, high=MAX_SIZES["positions"])
    return EncoderConfig(keys.text("model_type"), **sizes, context_length=rows, norm_eps=EPS,
                         hidden_act=read_activation(keys, "activation"), position_rows=rows)


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, ffn_width = config.hidden_size, config.intermediate_size

    def layer(number: int) -> Layer:
        prefix = f"transformer.layer.{number}."
        return Layer(tensors.fused_linear([f"{prefix}attention.{part}_lin" for part in "qkv"], width, width),
                     tensors.linear(f"{prefix}attention.out_lin", width, width), tensors.linear(f"{prefix}ffn.lin1", ffn_width, width),
                     tensors.linear(f"{prefix}ffn.lin2", width, ffn_width),
                     (tensors.norm(f"{prefix}sa_layer_norm", width, EPS), tensors.norm(f"{prefix}output_layer_norm", width, EPS)))

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width),
                 tensors.table("embeddings.position_embeddings.weight", config.position_rows, width), None,
                 tensors.norm("embeddings.LayerNorm", width, EPS), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads)


load_head = two_layer_head("pre_classifier", "relu", "classifier")
