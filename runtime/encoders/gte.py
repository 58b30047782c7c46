"""GTE's long-context encoders: BERT's layers with rotary embeddings and a gated FFN (Zhang et al. 2024). Published models call their type
`new`, converted ones `gte`. Some use NTK scaling: theta is multiplied by a factor, and all angles divided by a root of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MOST, EncoderConfig, act_of, plain_head, refuse, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("new.", "gte.")
# What is taken for keys that a config leaves out, by its type: as transformers does, and as the published code does.
THETA = {"gte": 160_000.0, "new": 10_000.0}
POSITIONS = {"gte": 8192, "new": 2048}
UNSAID = {"gte": {"vocab_size": 250_048}, "new": {"vocab_size": 30_528}}


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    kind = keys.text("model_type")
    refuse(keys, position_embedding_type="rope", layer_norm_type="layer_norm", pack_qkv=True, logn_attention_scale=False)
    theta, stretched = keys.number("rope_theta", THETA[kind]), 1.0
    if (scaling := keys.section("rope_scaling")) is not None:
        inner = Keys(scaling, "config.json: rope_scaling")
        refuse(inner, type="ntk", mixed_b=None)
        stretched = inner.number("factor", above=1.0)
    if (rope := keys.section("rope_parameters")) is not None:
        inner = Keys(rope, "config.json: rope_parameters")
        refuse(inner, rope_type="default", partial_rotary_factor=1.0)
        theta = inner.number("rope_theta", theta)
    found = sizes(keys, **UNSAID[kind])
    depth = found["hidden_size"] // found["num_attention_heads"]
    return EncoderConfig(
        kind, **found, context_length=keys.integer("max_position_embeddings", POSITIONS[kind], high=MOST["positions"]),
        norm_eps=keys.number("layer_norm_eps", 1e-12), hidden_act=act_of(keys, "hidden_act"),
        type_rows=keys.integer("type_vocab_size", 1, low=0, high=64), thetas=(theta * stretched,) * found["num_hidden_layers"],
        slower=stretched ** (2 / depth))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def layer(number: int) -> Layer:
        at = f"encoder.layer.{number}."
        up, gate = tensors.halves(f"{at}mlp.up_gate_proj", inner, width)
        return Layer(tensors.linear(f"{at}attention.qkv_proj", 3 * width, width), tensors.linear(f"{at}attention.o_proj", width, width),
                     up, tensors.linear(f"{at}mlp.down_proj", width, inner),
                     (tensors.norm(f"{at}attn_ln", width, eps), tensors.norm(f"{at}mlp_ln", width, eps)), gate, config.thetas[number])

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width), None,
                 tensors.table("embeddings.token_type_embeddings.weight", config.type_rows, width) if config.type_rows else None,
                 tensors.norm("embeddings.LayerNorm", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, slower=config.slower)


load_head = plain_head("pooler.dense", "tanh", "classifier")
