"""Jina Embeddings v2: BERT with bidirectional ALiBi in place of position embeddings, and a gated FFN (Günther et al. 2023).

The model for code has QK norms over all heads and a second norm after attention, and stores the gate after the up projection.

Published configs state the model_type `bert`. Rerankers derived from it are not supported: some have other slopes, which no file states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MAX_SIZES, EncoderConfig, read_sizes, require_values

if TYPE_CHECKING:
    import numpy as np

    from ..images.tower_ops import Float32Matrix
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("bert.",)
GATES = {"geglu": "gelu", "reglu": "relu"}  # feed_forward_type -> the gate's activation


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    keys.choice("position_embedding_type", {"alibi": "alibi"}, "absolute")
    require_values(keys, is_decoder=False, add_cross_attention=False, emb_pooler="mean")
    keys.has("hidden_act")  # unused: the activation of FFNs without a gate
    return EncoderConfig(
        "jina_bert", **read_sizes(keys, vocab_size=30522), context_length=keys.integer("max_position_embeddings", 512,
                                                                                       high=MAX_SIZES["positions"]),
        norm_eps=keys.number("layer_norm_eps", 1e-12), hidden_act=keys.choice("feed_forward_type", GATES, "original"),
        type_vocab_size=keys.integer("type_vocab_size", 2, high=64))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, ffn_width, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def up_and_gate(prefix: str, is_code_model: bool) -> tuple[Float32Matrix, Float32Matrix]:
        if tensors.has(f"{prefix}mlp.gated_layers_w.weight"):  # in older GGUF files
            gate, up = (tensors.linear(f"{prefix}mlp.gated_layers_{part}", ffn_width, width, False) for part in "wv")
        elif is_code_model:
            up, gate = tensors.split_linear(f"{prefix}mlp.up_gated_layer", ffn_width, width)
        else:
            gate, up = tensors.split_linear(f"{prefix}mlp.gated_layers", ffn_width, width)
        return up, gate

    def layer(number: int) -> Layer:
        prefix = f"encoder.layer.{number}."
        is_code_model = tensors.has(f"{prefix}layer_norm_1.weight")
        attention, down, output_norm = f"{prefix}attention.self.", *(("mlp.down_layer",
                                                                      "layer_norm_2") if is_code_model else ("mlp.wo", "mlp.layernorm"))
        up, gate = up_and_gate(prefix, is_code_model)
        qk_norms = [f"{attention}layer_norm_{part}" for part in "qk"]
        return Layer(tensors.fused_linear([f"{attention}{part}" for part in ("query", "key", "value")], width, width),
                     tensors.linear(f"{prefix}attention.output.dense", width, width), up,
                     tensors.linear(f"{prefix}{down}", width, ffn_width),
                     (tensors.norm(f"{prefix}attention.output.LayerNorm", width, eps), tensors.norm(f"{prefix}{output_norm}", width, eps)),
                     gate,
                     qk_norms=tuple(tensors.norm(name, width, eps) for name in qk_norms) if tensors.has(f"{qk_norms[0]}.weight") else None,
                     second_attention_norm=tensors.norm(f"{prefix}layer_norm_1", width, eps) if is_code_model else None)

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width), None,
                 tensors.optional_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, width),
                 tensors.norm("embeddings.LayerNorm", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, alibi_slopes=alibi_slopes(config.num_attention_heads))


def alibi_slopes(heads: int) -> np.ndarray:
    """ALiBi slopes, float32 [heads] (Press et al. 2022).

    For a power of two of heads, a geometric series down to 2^-8. Further heads have every other slope of the series for twice as many.
    """
    import numpy as np

    power_of_two = 1 << heads.bit_length() - 1
    steps = [(index + 1) / power_of_two for index in range(power_of_two)] + [(2 * index + 1) / (2 * power_of_two)
                                                                             for index in range(heads - power_of_two)]
    return (2.0 ** (-8 * np.array(steps))).astype(np.float32)
