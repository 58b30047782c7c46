"""Jina Embeddings v2: BERT without positions, whose scores lean to near tokens (ALiBi, to both sides), and with a gated FFN (Günther et
al. 2023). The model for code has norms of queries and keys over all heads and a second norm behind attention, and its gate lies behind what
it gates.

Published configs call the type `bert`. Rankers made of it are not read: some of theirs slope otherwise, which no file of theirs says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MOST, EncoderConfig, refuse, sizes

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
    refuse(keys, is_decoder=False, add_cross_attention=False, emb_pooler="mean")
    keys.has("hidden_act")  # of FFNs without a gate
    return EncoderConfig(
        "jina_bert", **sizes(keys, vocab_size=30522), context_length=keys.integer("max_position_embeddings", 512, high=MOST["positions"]),
        norm_eps=keys.number("layer_norm_eps", 1e-12), hidden_act=keys.choice("feed_forward_type", GATES, "original"),
        type_rows=keys.integer("type_vocab_size", 2, high=64))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def up_and_gate(at: str, of_code: bool) -> tuple[Float32Matrix, Float32Matrix]:
        if tensors.has(f"{at}mlp.gated_layers_w.weight"):  # as GGUF files had them for a time
            gate, up = (tensors.linear(f"{at}mlp.gated_layers_{part}", inner, width, False) for part in "wv")
        elif of_code:
            up, gate = tensors.halves(f"{at}mlp.up_gated_layer", inner, width)
        else:
            gate, up = tensors.halves(f"{at}mlp.gated_layers", inner, width)
        return up, gate

    def layer(number: int) -> Layer:
        at = f"encoder.layer.{number}."
        of_code = tensors.has(f"{at}layer_norm_1.weight")
        own, down, last = f"{at}attention.self.", *(("mlp.down_layer", "layer_norm_2") if of_code else ("mlp.wo", "mlp.layernorm"))
        up, gate = up_and_gate(at, of_code)
        of_heads = [f"{own}layer_norm_{part}" for part in "qk"]
        return Layer(tensors.side_by_side([f"{own}{part}" for part in ("query", "key", "value")], width, width),
                     tensors.linear(f"{at}attention.output.dense", width, width), up, tensors.linear(f"{at}{down}", width, inner),
                     (tensors.norm(f"{at}attention.output.LayerNorm", width, eps), tensors.norm(f"{at}{last}", width, eps)), gate,
                     qk_norms=tuple(tensors.norm(name, width, eps) for name in of_heads) if tensors.has(f"{of_heads[0]}.weight") else None,
                     again=tensors.norm(f"{at}layer_norm_1", width, eps) if of_code else None)

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width), None,
                 tensors.table("embeddings.token_type_embeddings.weight", config.type_rows, width) if config.type_rows else None,
                 tensors.norm("embeddings.LayerNorm", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, slopes=slopes_of(config.num_attention_heads))


def slopes_of(heads: int) -> np.ndarray:
    """What a head's scores lose for each token between, float32 [heads]: for a power of two from 1 down to 2^-8 in even steps, for more
    every other one of twice as many (Press et al. 2022)."""
    import numpy as np

    even = 1 << heads.bit_length() - 1
    steps = [(each + 1) / even for each in range(even)] + [(2 * each + 1) / (2 * even) for each in range(heads - even)]
    return (2.0 ** (-8 * np.array(steps))).astype(np.float32)
