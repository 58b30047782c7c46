"""Projection matrices of a listwise reranker (jina-reranker-v3), stored in a safetensors file beside its GGUF file.

A Qwen 3 GGUF with them is such a reranker, whatever its name; without them it is a plain Qwen 3 and cannot rerank.
"""

from __future__ import annotations

from pathlib import Path

from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.safetensors_header import is_blob

ARCHITECTURE, CLASS = "qwen3", "JinaForRanking"
FILE = "projector.safetensors"
NAMES = ("projector.0.weight", "projector.2.weight")


def has_ranking_file(model: Path, architecture: object) -> bool:
    """Whether the matrices are beside the file of a model of this architecture. Raises CheckpointError for a damaged file."""
    matrices = model.parent / FILE
    if architecture != ARCHITECTURE or is_blob(model.name) or not matrices.is_file():
        return False
    store = TensorStore.of_file(matrices)
    store.close()
    return {*NAMES} <= store.tensors.keys()


def open_ranking_file(model: Path) -> TensorStore:
    """Open the file, with these matrices alone. Raises CheckpointError where they are missing."""
    store = TensorStore.of_file(model.parent / FILE)
    if not {*NAMES} <= store.tensors.keys():
        store.close()
        raise CheckpointError(f"{model.parent / FILE} lacks {NAMES[0]} or {NAMES[1]}", "download it again with the file beside it")
    store.tensors = {name: store.tensors[name] for name in NAMES}
    return store
