"""GTE's long-context encoders: BERT's layers with rotary embeddings and a gated FFN (Zhang et al. 2024).

The model_type is `new` in published models, `gte` in converted ones. Some use NTK scaling: theta is multiplied by a factor, and all angles
divided by a root of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MAX_SIZES, EncoderConfig, read_activation, read_sizes, require_values, two_layer_head

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("new.", "gte.")
# By model_type: defaults of transformers (gte), and of the published code (new).
THETA_DEFAULTS = {"gte": 160_000.0, "new": 10_000.0}
POSITION_DEFAULTS = {"gte": 8192, "new": 2048}
SIZE_DEFAULTS = {"gte": {"vocab_size": 250_048}, "new": {"vocab_size": 30_528}}


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    model_type = keys.text("model_type")
    require_values(keys, position_embedding_type="rope", layer_norm_type="layer_norm", pack_qkv=True, logn_attention_scale=False)
    theta, ntk_factor = keys.number("rope_theta", THETA_DEFAULTS[model_type]), 1.0
    if (scaling := keys.section("rope_scaling")) is not None:
        rope_keys = Keys(scaling, "config.json: rope_scaling")
        require_values(rope_keys, type="ntk", mixed_b=None)
        ntk_factor = rope_keys.number("factor", above=1.0)
    if (rope := keys.section("rope_parameters")) is not None:
        rope_keys = Keys(rope, "config.json: rope_parameters")
        require_values(rope_keys, rope_type="default", partial_rotary_factor=1.0)
        theta = rope_keys.number("rope_theta", theta)
    sizes = read_sizes(keys, **SIZE_DEFAULTS[model_type])
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    return EncoderConfig(
        model_type, **sizes, context_length=keys.integer("max_position_embeddings", POSITION_DEFAULTS[model_type],
                                                         high=MAX_SIZES["positions"]),
        norm_eps=keys.number("layer_norm_eps", 1e-12), hidden_act=read_activation(keys, "hidden_act"),
        type_vocab_size=keys.integer("type_vocab_size", 1, low=0, high=64), rope_thetas=(theta * ntk_factor,) * sizes["num_hidden_layers"],
        rope_divisor=ntk_factor ** (2 / head_dim))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, ffn_width, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def layer(number: int) -> Layer:
        prefix = f"encoder.layer.{number}."
        up, gate = tensors.split_linear(f"{prefix}mlp.up_gate_proj", ffn_width, width)
        return Layer(tensors.linear(f"{prefix}attention.qkv_proj", 3 * width, width),
                     tensors.linear(f"{prefix}attention.o_proj", width, width),
                     up, tensors.linear(f"{prefix}mlp.down_proj", width, ffn_width),
                     (tensors.norm(f"{prefix}attn_ln", width, eps), tensors.norm(f"{prefix}mlp_ln", width, eps)), gate,
                     config.rope_thetas[number])

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width), None,
                 tensors.optional_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, width),
                 tensors.norm("embeddings.LayerNorm", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, rope_divisor=config.rope_divisor)


load_head = two_layer_head("pooler.dense", "tanh", "classifier")
