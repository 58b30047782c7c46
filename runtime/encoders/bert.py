"""BERT (Devlin et al. 2018) and models with its layers.

RoBERTa and XLM-RoBERTa: positions start after the padding id, and the head differs (Liu et al. 2019). ELECTRA: RoBERTa's head and a
factorized embedding (Clark et al. 2020). ERNIE: task embeddings, of which the first is used (Sun et al. 2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MAX_SIZES, EncoderConfig, read_activation, read_sizes, require_values

if TYPE_CHECKING:
    from .layers import Stack
    from .ranking_head import RankingHead
    from .weights import Tensors

PREFIXES = ("bert.", "roberta.", "electra.", "ernie.")
OFFSET_TYPES = ("roberta", "xlm-roberta", "camembert")  # positions start after the padding id
# By model_type: transformers' defaults of sizes.
SIZE_DEFAULTS = {"bert": {"vocab_size": 30522}, "roberta": {"vocab_size": 50265}, "xlm-roberta": {"vocab_size": 30522},
                 "camembert": {"vocab_size": 30522}, "ernie": {"vocab_size": 30522},
                 "electra": {"vocab_size": 30522, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}}


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    model_type = keys.text("model_type")
    require_values(keys, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    offset = keys.integer("pad_token_id", 1, low=0, high=MAX_SIZES["vocab_size"]) + 1 if model_type in OFFSET_TYPES else 0
    rows = keys.integer("max_position_embeddings", 512, low=offset + 1, high=MAX_SIZES["positions"])
    if model_type == "ernie":
        keys.flag("use_task_id", False)
        keys.integer("task_type_vocab_size", 3, high=64)
    embedding_size = keys.integer("embedding_size", 128, high=MAX_SIZES["hidden_size"]) if model_type == "electra" else 0
    return EncoderConfig(
        model_type, **read_sizes(keys, **SIZE_DEFAULTS[model_type]), context_length=rows - offset,
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        embedding_size=embedding_size, hidden_act=read_activation(keys, "hidden_act"), position_rows=rows, position_offset=offset,
        pad_id=offset - 1 if offset else None, type_vocab_size=keys.integer("type_vocab_size", 2, high=64))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS, to_float32
    from .layers import Layer, Stack

    width, ffn_width, eps = config.hidden_size, config.intermediate_size, config.norm_eps
    embedding_size = config.embedding_size or width

    def layer(number: int) -> Layer:
        prefix = f"encoder.layer.{number}."
        parts, fused = [f"{prefix}attention.self.{part}" for part in ("query", "key", "value")], f"{prefix}attention.self.qkv"
        joined = tensors.has(f"{fused}.weight")  # in GGUF files of Jina's rerankers
        qkv = tensors.linear(fused, 3 * width, width) if joined else tensors.fused_linear(parts, width, width)
        return Layer(qkv, tensors.linear(f"{prefix}attention.output.dense", width, width),
                     tensors.linear(f"{prefix}intermediate.dense", ffn_width, width),
                     tensors.linear(f"{prefix}output.dense", width, ffn_width),
                     (tensors.norm(f"{prefix}attention.output.LayerNorm", width, eps),
                      tensors.norm(f"{prefix}output.LayerNorm", width, eps)))

    types = tensors.optional_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, embedding_size)
    if config.family == "ernie" and config.raw.get("use_task_id"):
        tasks = tensors.numbers("embeddings.task_type_embeddings.weight", config.raw.get("task_type_vocab_size") or 3, width)
        types = tasks[:1] if types is None else to_float32(types) + tasks[0]
    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, embedding_size),
                 tensors.table("embeddings.position_embeddings.weight", config.position_rows, embedding_size), types,
                 tensors.norm("embeddings.LayerNorm", embedding_size, eps), tuple(map(layer, range(config.num_hidden_layers))),
                 ACTIVATIONS[config.hidden_act], config.num_attention_heads, position_offset=config.position_offset, pad_id=config.pad_id,
                 embedding_projection=tensors.linear("embeddings_project", width, embedding_size) if embedding_size != width else None)


def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
    """Raises CheckpointError."""
    import numpy as np

    from ..images.tower_ops import ACTIVATIONS
    from .ranking_head import RankingHead

    has_roberta_head, width = config.position_offset or config.family == "electra", config.hidden_size
    dense, out = ("classifier.dense", "classifier.out_proj") if has_roberta_head else ("pooler.dense", "classifier")
    if config.family == "electra":
        activation = ACTIVATIONS["gelu"]
    else:  # a BERT without token types is DistilBERT in a GGUF file
        activation = np.tanh if config.type_vocab_size else ACTIVATIONS["relu"]
    return RankingHead(tensors.linear(dense, width, width), activation, tensors.linear(out, 1, width))
