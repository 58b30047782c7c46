"""BERT, and RoBERTa and XLM-RoBERTa, which count positions from behind the token that pads and have a head of another form (Devlin et al.
2018, Liu et al. 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .shape import MOST, EncoderConfig, act_of, refuse, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .ranking_head import Head
    from .weights import Tensors

PREFIXES = ("bert.", "roberta.")
OFFSET = ("roberta", "xlm-roberta", "camembert")
# What transformers takes for keys that a config leaves out.
UNSAID = {"bert": {"vocab_size": 30522}, "roberta": {"vocab_size": 50265}, "xlm-roberta": {"vocab_size": 30522},
          "camembert": {"vocab_size": 30522}}


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    kind = keys.text("model_type")
    refuse(keys, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    offset = keys.integer("pad_token_id", 1, low=0, high=MOST["vocab_size"]) + 1 if kind in OFFSET else 0
    rows = keys.integer("max_position_embeddings", 512, low=offset + 1, high=MOST["positions"])
    return EncoderConfig(
        kind, **sizes(keys, **UNSAID[kind]), context_length=rows - offset, norm_eps=keys.number("layer_norm_eps", 1e-12),
        hidden_act=act_of(keys, "hidden_act"), position_rows=rows, position_offset=offset, pad_id=offset - 1 if offset else None,
        type_rows=keys.integer("type_vocab_size", 2, high=64))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_parts import CURVES
    from .layers import Layer, Stack

    width, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def layer(number: int) -> Layer:
        at = f"encoder.layer.{number}."
        parts = [f"{at}attention.self.{part}" for part in ("query", "key", "value")]
        return Layer(tensors.side_by_side(parts, width, width), tensors.linear(f"{at}attention.output.dense", width, width),
                     tensors.linear(f"{at}intermediate.dense", inner, width), tensors.linear(f"{at}output.dense", width, inner),
                     (tensors.norm(f"{at}attention.output.LayerNorm", width, eps), tensors.norm(f"{at}output.LayerNorm", width, eps)))

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width),
                 tensors.table("embeddings.position_embeddings.weight", config.position_rows, width),
                 tensors.table("embeddings.token_type_embeddings.weight", config.type_rows, width) if config.type_rows else None,
                 tensors.norm("embeddings.LayerNorm", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 CURVES[config.hidden_act], config.num_attention_heads, position_offset=config.position_offset, pad_id=config.pad_id)


def load_head(config: EncoderConfig, tensors: Tensors) -> Head:
    """Raises CheckpointError."""
    import numpy as np

    from .ranking_head import Head

    dense, last = ("classifier.dense", "classifier.out_proj") if config.position_offset else ("pooler.dense", "classifier")
    width = config.hidden_size
    return Head(tensors.linear(dense, width, width), np.tanh, tensors.linear(last, 1, width))
