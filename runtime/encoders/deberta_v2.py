"""DeBERTa v2 and v3: BERT's layers without position embeddings; attention scores add content-to-position and position-to-content terms (He
et al. 2021). Relative position embeddings are projected by a layer's query and key matrices; the result is the same for every text, so it
is computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import ConfigError, Keys, show
from .encoder_config import MOST, EncoderConfig, act_of, refuse, sizes

if TYPE_CHECKING:
    import numpy as np

    from .layers import Stack
    from .ranking_head import RankingHead
    from .weights import Tensors

PREFIXES = ("deberta.",)
SIZES = {"vocab_size": 128_100, "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 6144}
NORMED = {"layer_norm": "layer_norm", "none": "none"}  # norm_rel_ebd


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    kind = keys.text("model_type")
    found = sizes(keys, **SIZES)
    width = found["hidden_size"]
    if not keys.flag("relative_attention", False) or keys.flag("position_biased_input", True):
        raise ConfigError(f"config.json: {kind} models with a table of positions are not supported",
                          "they run only with relative_attention = True and position_biased_input = False")
    refuse(keys, conv_kernel_size=0, embedding_size=width, attention_head_size=width // found["num_attention_heads"],
           pooler_hidden_size=width)
    if not keys.flag("share_att_key", False):
        raise ConfigError("config.json: share_att_key is False, which is not supported", "they run only with share_att_key = True")
    stated = keys.raw.get("pos_att_type") if keys.has("pos_att_type") else None
    terms = stated.split("|") if isinstance(stated, str) else stated
    if not isinstance(terms, list) or sorted(map(str, terms)) != ["c2p", "p2c"]:
        raise ConfigError(f"config.json: pos_att_type {show(stated)} is not supported", "they run only with c2p and p2c")
    keys.choice("norm_rel_ebd", NORMED, "none")
    act_of(keys, "pooler_hidden_act")
    context = keys.integer("max_position_embeddings", 512, high=MOST["positions"])
    furthest, buckets = (keys.integer(name, -1, low=-1, high=MOST["positions"]) for name in ("max_relative_positions", "position_buckets"))
    furthest = furthest if furthest > 0 else context
    if buckets > 0 and not (buckets >= 4 and furthest > buckets // 2 + 1):
        raise ConfigError(f"config.json: position_buckets {buckets} does not fit distances up to {furthest}",
                          "half of the buckets are of one distance each, and distances go beyond")
    return EncoderConfig(
        kind, **found, context_length=context, norm_eps=keys.number("layer_norm_eps", 1e-7), hidden_act=act_of(keys, "hidden_act"),
        type_rows=keys.integer("type_vocab_size", 0, low=0, high=64), spans=(buckets, furthest) if buckets > 0 else (furthest, 0))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    import numpy as np

    from ..images.tower_ops import ACTIVATIONS
    from .layers import Layer, Stack

    width, inner, eps, heads = config.hidden_size, config.intermediate_size, config.norm_eps, config.num_attention_heads
    distances = tensors.numbers("encoder.rel_embeddings.weight", 2 * config.spans[0], width)
    if config.raw.get("norm_rel_ebd") == "layer_norm":
        distances = tensors.norm("encoder.LayerNorm", width, eps)(distances)

    def layer(number: int) -> Layer:
        at = f"encoder.layer.{number}."
        qkv = tensors.side_by_side([f"{at}attention.self.{part}_proj" for part in ("query", "key", "value")], width, width)

        def of_distances(which: int) -> np.ndarray:
            made = qkv.columns(slice(which * width, (which + 1) * width))(distances)
            return np.ascontiguousarray(made.reshape(len(made), heads, -1).swapaxes(0, 1))

        return Layer(qkv, tensors.linear(f"{at}attention.output.dense", width, width),
                     tensors.linear(f"{at}intermediate.dense", inner, width), tensors.linear(f"{at}output.dense", width, inner),
                     (tensors.norm(f"{at}attention.output.LayerNorm", width, eps), tensors.norm(f"{at}output.LayerNorm", width, eps)),
                     of_distances=(of_distances(1), of_distances(0)))

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width), None,
                 tensors.table("embeddings.token_type_embeddings.weight", config.type_rows, width) if config.type_rows else None,
                 tensors.norm("embeddings.LayerNorm", width, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], heads, spans=config.spans)


def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .ranking_head import RankingHead

    width = config.hidden_size
    return RankingHead(tensors.linear("pooler.dense", width, width), ACTIVATIONS[config.raw.get("pooler_hidden_act") or "gelu"],
                tensors.linear("classifier", 1, width))
