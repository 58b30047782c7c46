"""DistilBERT: BERT's layers under other names, without token types (Sanh et al. 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MOST, EncoderConfig, act_of, plain_head, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("distilbert.",)
EPS = 1e-12


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    found = sizes(keys, "dim", "hidden_dim", "n_layers", "n_heads", num_hidden_layers=6)
    rows = keys.integer("max_position_embeddings", 512, high=MOST["positions"])
    return EncoderConfig(keys.text("model_type"), **found, context_length=rows, norm_eps=EPS, hidden_act=act_of(keys, "activation"),
                         position_rows=rows)


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, inner = config.hidden_size, config.intermediate_size

    def layer(number: int) -> Layer:
        at = f"transformer.layer.{number}."
        return Layer(tensors.side_by_side([f"{at}attention.{part}_lin" for part in "qkv"], width, width),
                     tensors.linear(f"{at}attention.out_lin", width, width), tensors.linear(f"{at}ffn.lin1", inner, width),
                     tensors.linear(f"{at}ffn.lin2", width, inner),
                     (tensors.norm(f"{at}sa_layer_norm", width, EPS), tensors.norm(f"{at}output_layer_norm", width, EPS)))

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width),
                 tensors.table("embeddings.position_embeddings.weight", config.position_rows, width), None,
                 tensors.norm("embeddings.LayerNorm", width, EPS), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads)


load_head = plain_head("pre_classifier", "relu", "classifier")
