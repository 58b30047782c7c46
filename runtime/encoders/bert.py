"""BERT, RoBERTa and XLM-RoBERTa, whose positions start after the padding id and whose head differs (Devlin et al. 2018, Liu et al. 2019);
ELECTRA, with RoBERTa's head and a factorized embedding (Clark et al. 2020); ERNIE, with task embeddings, of which the first is used (Sun et
al. 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MOST, EncoderConfig, act_of, refuse, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .ranking_head import RankingHead
    from .weights import Tensors

PREFIXES = ("bert.", "roberta.", "electra.", "ernie.")
OFFSET = ("roberta", "xlm-roberta", "camembert")
# What transformers takes for keys that a config leaves out.
UNSAID = {"bert": {"vocab_size": 30522}, "roberta": {"vocab_size": 50265}, "xlm-roberta": {"vocab_size": 30522},
          "camembert": {"vocab_size": 30522}, "ernie": {"vocab_size": 30522},
          "electra": {"vocab_size": 30522, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}}


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    kind = keys.text("model_type")
    refuse(keys, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    offset = keys.integer("pad_token_id", 1, low=0, high=MOST["vocab_size"]) + 1 if kind in OFFSET else 0
    rows = keys.integer("max_position_embeddings", 512, low=offset + 1, high=MOST["positions"])
    if kind == "ernie":
        keys.flag("use_task_id", False)
        keys.integer("task_type_vocab_size", 3, high=64)
    narrow = keys.integer("embedding_size", 128, high=MOST["hidden_size"]) if kind == "electra" else 0
    return EncoderConfig(
        kind, **sizes(keys, **UNSAID[kind]), context_length=rows - offset, norm_eps=keys.number("layer_norm_eps", 1e-12),
        embedding_size=narrow, hidden_act=act_of(keys, "hidden_act"), position_rows=rows, position_offset=offset,
        pad_id=offset - 1 if offset else None, type_rows=keys.integer("type_vocab_size", 2, high=64))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS, to_float32
    from .layers import Layer, Stack

    width, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
    narrow = config.embedding_size or width

    def layer(number: int) -> Layer:
        at = f"encoder.layer.{number}."
        parts, whole = [f"{at}attention.self.{part}" for part in ("query", "key", "value")], f"{at}attention.self.qkv"
        joined = tensors.has(f"{whole}.weight")  # as files of Jina's rerankers have them
        qkv = tensors.linear(whole, 3 * width, width) if joined else tensors.side_by_side(parts, width, width)
        return Layer(qkv, tensors.linear(f"{at}attention.output.dense", width, width),
                     tensors.linear(f"{at}intermediate.dense", inner, width), tensors.linear(f"{at}output.dense", width, inner),
                     (tensors.norm(f"{at}attention.output.LayerNorm", width, eps), tensors.norm(f"{at}output.LayerNorm", width, eps)))

    types = tensors.table("embeddings.token_type_embeddings.weight", config.type_rows, narrow) if config.type_rows else None
    if config.family == "ernie" and config.raw.get("use_task_id"):
        tasks = tensors.numbers("embeddings.task_type_embeddings.weight", config.raw.get("task_type_vocab_size") or 3, width)
        types = tasks[:1] if types is None else to_float32(types) + tasks[0]
    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, narrow),
                 tensors.table("embeddings.position_embeddings.weight", config.position_rows, narrow), types,
                 tensors.norm("embeddings.LayerNorm", narrow, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, position_offset=config.position_offset, pad_id=config.pad_id,
                 widened_by=tensors.linear("embeddings_project", width, narrow) if narrow != width else None)


def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
    """Raises CheckpointError."""
    import numpy as np

    from ..images.tower_ops import ACTIVATIONS
    from .ranking_head import RankingHead

    own, width = config.position_offset or config.family == "electra", config.hidden_size
    dense, last = ("classifier.dense", "classifier.out_proj") if own else ("pooler.dense", "classifier")
    # DistilBERT's, in a file
    curve = ACTIVATIONS["gelu"] if config.family == "electra" else np.tanh if config.type_rows else ACTIVATIONS["relu"]
    return RankingHead(tensors.linear(dense, width, width), curve, tensors.linear(last, 1, width))
