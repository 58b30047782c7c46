"""XLM-RoBERTa in Jina's code (XLMRobertaFlashConfig): fused QKV, other tensor names, learned or rotary positions, task adapters.

Used by jina-reranker-v2 and jina-embeddings-v3. Their configs state no model_type or RoBERTa's, so they are recognized by the class in
auto_map.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import Keys
from . import bert
from .encoder_config import EncoderConfig
from .jina_embeddings_v3 import PREFIXES, load, load_head
from .task_adapters import read_tasks

__all__ = ["PREFIXES", "config", "load", "load_head"]

ROBERTA_TYPE = "xlm-roberta"  # positions, sizes and head are its


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    is_rotary = keys.choice("position_embedding_type", {"absolute": "absolute", "rotary": "rotary"}, "absolute") == "rotary"
    encoder_config = bert.config(keys.with_values(model_type=ROBERTA_TYPE, position_embedding_type="absolute"))
    theta = keys.number("rotary_emb_base", 10_000.0, above=1.0)
    if is_rotary:
        encoder_config = replace(encoder_config, context_length=encoder_config.position_rows, position_rows=0, position_offset=0,
                                 pad_id=None,
                                 rope_thetas=(theta,) * encoder_config.num_hidden_layers)
    for name in ("emb_pooler", "load_trained_adapters", "lora_alpha", "lora_dropout_p", "lora_main_params_trainable", "lora_rank",
                 "matryoshka_dimensions", "truncate_dim"):
        keys.has(name)  # read by `task_adapters.py` or `pooling.py`, or without effect
    return replace(encoder_config, family="xlm_roberta_flash", tasks=tuple(read_tasks(keys).items()))
