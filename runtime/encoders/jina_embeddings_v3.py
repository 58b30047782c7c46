"""Jina Embeddings v3 in its transformers port: RoBERTa with rotary embeddings (Sturua et al. 2024). Its task adapters are not read here.
Configs with learned positions are read too, for `xlm_roberta_flash.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MOST, EncoderConfig, act_of, default_theta, plain_head, refuse, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("roberta.",)
SIZES = {"vocab_size": 250_002, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    found = sizes(keys, **SIZES)
    refuse(keys, head_dim=found["hidden_size"] // found["num_attention_heads"])
    return EncoderConfig(
        keys.text("model_type"), **found, context_length=keys.integer("max_position_embeddings", 8194, high=MOST["positions"]),
        norm_eps=keys.number("layer_norm_eps", 1e-5), hidden_act=act_of(keys, "hidden_act"),
        type_rows=keys.integer("type_vocab_size", 1, low=0, high=64),
        thetas=(default_theta(keys, 20_000.0),) * found["num_hidden_layers"])


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def layer(number: int) -> Layer:
        at = f"encoder.layers.{number}."
        return Layer(tensors.linear(f"{at}mixer.Wqkv", 3 * width, width), tensors.linear(f"{at}mixer.out_proj", width, width),
                     tensors.linear(f"{at}mlp.fc1", inner, width), tensors.linear(f"{at}mlp.fc2", width, inner),
                     (tensors.norm(f"{at}norm1", width, eps), tensors.norm(f"{at}norm2", width, eps)),
                     theta=config.thetas[number] if config.thetas else None)

    rows = config.position_rows
    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width),
                 tensors.table("embeddings.position_embeddings.weight", rows, width) if rows else None,
                 tensors.table("embeddings.token_type_embeddings.weight", config.type_rows, width) if config.type_rows else None,
                 tensors.norm("emb_ln", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, position_offset=config.position_offset, pad_id=config.pad_id)


load_head = plain_head("classifier.dense", "tanh", "classifier.out_proj")
