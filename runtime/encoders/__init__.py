"""Encoder-only models: text embeddings, and reranking scores by a classification head. One file per family.

An encoder has no KV cache, sampler or chat, so it shares nothing with `prepare.py`, `model.py` and `engine.py`: texts of a request run
through the layers together, without padding, in float32 with NumPy on threads, as vision towers do (`runtime/images/tower_ops.py`).

A family is a module with `config`, which reads its config.json, and `load`, which reads its tensors into a `Stack` (and `load_head` into a
`RankingHead` where it has rerankers); ENCODERS maps each `model_type` to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ... import UsageError
from ...offload.safetensors_header import is_gguf
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded

# model_type -> module here
ENCODERS: Mapping[str, str] = {
    "bert": "bert", "camembert": "bert", "deberta-v2": "deberta_v2", "distilbert": "distilbert", "electra": "bert", "ernie": "bert",
    "eurobert": "eurobert", "gte": "gte", "jina_bert": "jina_bert", "jina_embeddings_v3": "jina_embeddings_v3",
    "modernbert": "modernbert", "mpnet": "mpnet", "new": "gte", "nomic_bert": "nomic_bert", "roberta": "bert", "xlm-roberta": "bert",
    "xlm_roberta_flash": "xlm_roberta_flash"}
WITHOUT_HEAD = ("jina_bert", "nomic_bert")  # no supported rerankers
ROBERTA_TYPE = "xlm-roberta"
# Config class in auto_map -> model_type, for configs that state none, or ROBERTA_TYPE.
AUTO_CONFIG_TYPES = {"XLMRobertaFlashConfig": "xlm_roberta_flash"}
# Architecture of a GGUF file -> model_type.
GGUF_ARCHITECTURES: Mapping[str, str] = {
    "bert": "bert", "eurobert": "eurobert", "jina-bert-v2": "jina_bert", "jina-bert-v3": "jina_embeddings_v3", "modern-bert": "modernbert",
    "nomic-bert": "nomic_bert", "nomic-bert-moe": "nomic_bert"}
# Suffixes of class names in `architectures`: usable for embeddings, whatever their head; rerankers; decoders with an encoder's model_type.
EMBEDDING_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", "RobertaLoRA")
RERANKER_SUFFIX = "ForSequenceClassification"
DECODER_SUFFIXES = ("ForCausalLM", "LMHeadModel")


def is_encoder(path: Path) -> bool:
    """Whether the model at `path` is an encoder, by its config; False if that cannot be read."""
    if is_gguf(path):
        from .gguf_encoder import is_encoder_file

        return is_encoder_file(path)
    try:
        raw = json.loads(read_bounded(path / "config.json", MAX_JSON_NBYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and is_encoder_config(raw)


def is_encoder_config(raw: Mapping[str, object]) -> bool:
    """Whether a config is that of an encoder."""
    architectures, model_type = raw.get("architectures"), model_type_of(raw)
    is_decoder = isinstance(architectures, list) and any(str(name).endswith(DECODER_SUFFIXES) for name in architectures)
    return model_type in ENCODERS and not is_decoder


def model_type_of(raw: Mapping[str, object]) -> str:
    """model_type of a config, or the one implied by its custom code; empty for neither."""
    stated, auto_map = raw.get("model_type"), raw.get("auto_map")
    config_class = auto_map.get("AutoConfig") if isinstance(auto_map, dict) else None
    implied = AUTO_CONFIG_TYPES.get(config_class.rpartition(".")[2], "") if isinstance(config_class, str) else ""
    if stated is None or stated == ROBERTA_TYPE and implied:
        return implied
    return stated if isinstance(stated, str) else ""


def refuse_generation(raw: Mapping[str, object]) -> None:
    """Raises UsageError for an encoder's config, where a generative model is needed."""
    if is_encoder_config(raw):
        architectures = raw.get("architectures")
        is_reranker = isinstance(architectures, list) and any(str(name).endswith(RERANKER_SUFFIX) for name in architectures)
        what = "a reranker" if is_reranker else "an embedding model"
        hint = 'effllm embed MODEL "a text"; effllm serve MODEL answers /v1/embeddings'
        if is_reranker:
            hint = "effllm serve MODEL answers /v1/rerank"
        raise UsageError(f"this is {what}, which does not generate text ({model_type_of(raw)})", hint)
