"""Recorded expert routing, kept between runs to choose the next run's eviction policy and predict its hit rate.

    <cache>/experts/<hash of the routers>.npy    uint16 [tokens, layers with experts, experts per token], oldest first

A trace covers some hundreds of tokens of this machine's use of the model. It holds expert numbers, no text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.compile import cache_root
from ...offload.checkpoint import TensorStore
from ...offload.expert_pager import TRACE_TOKENS

if TYPE_CHECKING:
    from ..tensors import ModelTensor

MOST_FILES = 64  # models; the least recently used trace is removed
SAMPLE_NBYTES = 4096


def folder() -> Path:
    return cache_root() / "experts"


def key_of(tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore) -> str:
    """A key for the model's routing: a hash of its routers' shapes and first bytes."""
    digest = sha256()
    for key, roles in tensors.items():
        if (router := roles.get("router")) is not None:
            digest.update(f"{key} {router.info.dtype} {router.shape}\n".encode())
            rows = max(1, min(router.shape[0], SAMPLE_NBYTES * router.shape[0] // router.nbytes))
            digest.update(store.read(router.info, 0, rows).tobytes())
    return digest.hexdigest()[:32]


def load_trace(key: str, layers: int, per_token: int, experts: int) -> np.ndarray | None:
    """The stored trace of a model; None without one, or if it does not fit this model."""
    path = folder() / f"{key}.npy"
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if found.dtype != np.uint16 or found.ndim != 3 or found.shape[1:] != (layers, per_token) or not len(found) or found.max() >= experts:
        return None
    with suppress(OSError):
        os.utime(path)
    return found


def save_trace(key: str, trace: np.ndarray) -> None:
    """Append a run's trace, keeping the newest TRACE_TOKENS. Does nothing if the file cannot be written."""
    if not len(trace):
        return
    path = folder() / f"{key}.npy"
    before = load_trace(key, *trace.shape[1:], experts=1 << 16)
    joined = trace if before is None else np.concatenate([before, trace])
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as out:
            np.save(out, joined[-TRACE_TOKENS:], allow_pickle=False)
        unfinished.replace(path)
        for old in sorted(folder().glob("*.npy"), key=lambda each: each.stat().st_mtime)[:-MOST_FILES]:
            old.unlink()
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
