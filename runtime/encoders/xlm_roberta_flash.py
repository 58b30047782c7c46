"""XLM-RoBERTa as Jina's own code has it (XLMRobertaFlashConfig): queries, keys and values in one matrix, other names of tensors. It is
jina-reranker-v2; configs state no model_type, so the class that they name tells it."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import Keys
from . import bert
from .jina_embeddings_v3 import PREFIXES, load, load_head
from .shape import EncoderConfig, refuse

__all__ = ["PREFIXES", "config", "load", "load_head"]

LIKE = "xlm-roberta"  # whose positions, sizes and head it has


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    refuse(keys, lora_adaptations=None, load_trained_adapters=False)
    for name in ("emb_pooler", "lora_alpha", "lora_dropout_p", "lora_main_params_trainable", "lora_rank", "matryoshka_dimensions",
                 "truncate_dim"):
        keys.holds(name)  # of adapters that it has not, and of vectors, which `pooling.py` reads
    return replace(bert.config(keys.saying(model_type=LIKE)), family="xlm_roberta_flash")
