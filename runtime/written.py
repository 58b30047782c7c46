"""The names of what effllm writes into a model's folder: the model itself, and beside it what was measured of its weights."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from . import hub, storage

KV_PROFILE, KV_ARRAYS = "kv_profile.json", "kv_profile.f32"  # `kv_profile_file.py`
SPARSITY, PREDICTORS = "sparsity.json", "predictors.npz"  # `sparsity_file.py`, `predictors.py`
MEASURED = (KV_PROFILE, KV_ARRAYS, SPARSITY, PREDICTORS)
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", hub.INDEX)
NAMES = (*hub.COMPANIONS, *WEIGHTS, storage.MARKER, *MEASURED, *(f".{name}.partial" for name in MEASURED))


def foreign(folder: Path) -> str | None:
    """The name of an entry of `folder` that effllm does not write there; None where there is none."""
    entries = sorted(folder.iterdir())
    return next((entry.name for entry in entries if not entry.is_file() or not any(fnmatch(entry.name, name) for name in NAMES)), None)
