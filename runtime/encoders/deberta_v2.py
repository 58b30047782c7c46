"""DeBERTa v2 and v3: BERT's layers without position embeddings, with disentangled attention (He et al. 2021).

Attention scores add content-to-position and position-to-content terms. A layer's query and key matrices project the relative position
embeddings; the result is the same for every text, so it is computed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import ConfigError, Keys, show
from .encoder_config import MAX_SIZES, EncoderConfig, read_activation, read_sizes, require_values

if TYPE_CHECKING:
    import numpy as np

    from .layers import Stack
    from .ranking_head import RankingHead
    from .weights import Tensors

PREFIXES = ("deberta.",)
SIZE_DEFAULTS = {"vocab_size": 128_100, "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 6144}
NORM_CHOICES = {"layer_norm": "layer_norm", "none": "none"}  # norm_rel_ebd


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    model_type = keys.text("model_type")
    sizes = read_sizes(keys, **SIZE_DEFAULTS)
    width = sizes["hidden_size"]
    if not keys.flag("relative_attention", False) or keys.flag("position_biased_input", True):
        raise ConfigError(f"config.json: {model_type} models with a table of positions are not supported",
                          "they run only with relative_attention = True and position_biased_input = False")
    require_values(keys, conv_kernel_size=0, embedding_size=width, attention_head_size=width // sizes["num_attention_heads"],
                   pooler_hidden_size=width)
    if not keys.flag("share_att_key", False):
        raise ConfigError("config.json: share_att_key is False, which is not supported", "they run only with share_att_key = True")
    stated = keys.raw.get("pos_att_type") if keys.has("pos_att_type") else None
    terms = stated.split("|") if isinstance(stated, str) else stated
    if not isinstance(terms, list) or sorted(map(str, terms)) != ["c2p", "p2c"]:
        raise ConfigError(f"config.json: pos_att_type {show(stated)} is not supported", "they run only with c2p and p2c")
    keys.choice("norm_rel_ebd", NORM_CHOICES, "none")
    read_activation(keys, "pooler_hidden_act")
    context = keys.integer("max_position_embeddings", 512, high=MAX_SIZES["positions"])
    max_distance, buckets = (keys.integer(name, -1, low=-1, high=MAX_SIZES["positions"]) for name in ("max_relative_positions",
                                                                                                      "position_buckets"))
    max_distance = max_distance if max_distance > 0 else context
    if buckets > 0 and not (buckets >= 4 and max_distance > buckets // 2 + 1):
        raise ConfigError(f"config.json: position_buckets {buckets} does not fit distances up to {max_distance}",
                          "half of the buckets are of one distance each, and distances go beyond")
    return EncoderConfig(
        model_type, **sizes, context_length=context, norm_eps=keys.number("layer_norm_eps", 1e-7),
        hidden_act=read_activation(keys, "hidden_act"),
        type_vocab_size=keys.integer("type_vocab_size", 0, low=0, high=64),
        disentangled_span=(buckets, max_distance) if buckets > 0 else (max_distance, 0))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    import numpy as np

    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, ffn_width, eps, heads = config.hidden_size, config.intermediate_size, config.norm_eps, config.num_attention_heads
    position_embeddings = tensors.numbers("encoder.rel_embeddings.weight", 2 * config.disentangled_span[0], width)
    if config.raw.get("norm_rel_ebd") == "layer_norm":
        position_embeddings = tensors.norm("encoder.LayerNorm", width, eps)(position_embeddings)

    def layer(number: int) -> Layer:
        prefix = f"encoder.layer.{number}."
        qkv = tensors.fused_linear([f"{prefix}attention.self.{part}_proj" for part in ("query", "key", "value")], width, width)

        def projected_positions(part_index: int) -> np.ndarray:
            projected = qkv.columns(slice(part_index * width, (part_index + 1) * width))(position_embeddings)
            return np.ascontiguousarray(projected.reshape(len(projected), heads, -1).swapaxes(0, 1))

        return Layer(qkv, tensors.linear(f"{prefix}attention.output.dense", width, width),
                     tensors.linear(f"{prefix}intermediate.dense", ffn_width, width),
                     tensors.linear(f"{prefix}output.dense", width, ffn_width),
                     (tensors.norm(f"{prefix}attention.output.LayerNorm", width, eps),
                      tensors.norm(f"{prefix}output.LayerNorm", width, eps)),
                     relative_positions=(projected_positions(1), projected_positions(0)))

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width), None,
                 tensors.optional_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, width),
                 tensors.norm("embeddings.LayerNorm", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], heads, disentangled_span=config.disentangled_span)


def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .ranking_head import RankingHead

    width = config.hidden_size
    return RankingHead(tensors.linear("pooler.dense", width, width), ACTIVATIONS[config.raw.get("pooler_hidden_act") or "gelu"],
                       tensors.linear("classifier", 1, width))
