"""XLM-RoBERTa in Jina's code (XLMRobertaFlashConfig): fused QKV, other tensor names, learned or rotary positions, task adapters. Used by
jina-reranker-v2 and jina-embeddings-v3; their configs state no model_type or RoBERTa's, so the class they name identifies it."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import Keys
from . import bert
from .encoder_config import EncoderConfig
from .jina_embeddings_v3 import PREFIXES, load, load_head
from .task_adapters import read_tasks

__all__ = ["PREFIXES", "config", "load", "load_head"]

LIKE = "xlm-roberta"  # whose positions, sizes and head it has


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    rotary = keys.choice("position_embedding_type", {"absolute": "absolute", "rotary": "rotary"}, "absolute") == "rotary"
    found = bert.config(keys.with_values(model_type=LIKE, position_embedding_type="absolute"))
    theta = keys.number("rotary_emb_base", 10_000.0, above=1.0)
    if rotary:
        found = replace(found, context_length=found.position_rows, position_rows=0, position_offset=0, pad_id=None,
                        thetas=(theta,) * found.num_hidden_layers)
    for name in ("emb_pooler", "load_trained_adapters", "lora_alpha", "lora_dropout_p", "lora_main_params_trainable", "lora_rank",
                 "matryoshka_dimensions", "truncate_dim"):
        keys.has(name)  # read where adapters are, and of vectors by `pooling.py`, or without effect
    return replace(found, family="xlm_roberta_flash", tasks=tuple(read_tasks(keys).items()))
