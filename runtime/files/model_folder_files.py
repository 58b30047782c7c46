"""File names that effllm writes into a model folder: the model itself, and measurements of its weights beside it."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path

from ... import UsageError
from ...offload.folder_writer import is_journal
from .. import hub
from ..library import storage
from .atomic_write import UNFINISHED

KV_PROFILE, KV_ARRAYS = "kv_profile.json", "kv_profile.f32"  # `kv_profile_file.py`
SPARSITY, PREDICTORS = "sparsity.json", "predictors.npz"  # `sparsity_file.py`, `activation_predictors.py`
MEASUREMENTS = (KV_PROFILE, KV_ARRAYS, SPARSITY, PREDICTORS)
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", hub.INDEX)
TOWER = "sight.safetensors"  # what a model sees and hears with (`images/tower_copy.py`)
OWN_FILES = (*hub.COMPANIONS, *WEIGHTS, TOWER, storage.MARKER, *MEASUREMENTS, *map(UNFINISHED.format, MEASUREMENTS),
         *(f".{name}.partial" for name in MEASUREMENTS))


def foreign_entry(folder: Path) -> str | None:
    """Name of an entry of `folder` that effllm does not write; None where there is none."""
    entries = sorted(folder.iterdir())
    return next((entry.name for entry in entries if not entry.is_file()
                 or not any(fnmatch(entry.name, name) for name in OWN_FILES) and not is_journal(entry)), None)


def already_complete(out: Path) -> str:
    """Notice for an output folder that an interrupted earlier run had finished, and that was tidied up now."""
    return f"{out} is complete: an earlier run was stopped after it had finished"


def require_folder(folder: Path, elsewhere: str = "choose another path with -o") -> None:
    """Raises UsageError unless `folder`, into which a result goes, exists; where a file occupies its path or that of a parent, mkdir
    would fail too."""
    if folder.is_dir():
        return
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if existing.is_dir():
        raise UsageError(f"there is no folder {folder}", f"mkdir -p {folder}")
    what = describe_existing(existing) if existing.is_symlink() and not existing.exists() else "a file"
    raise UsageError(f"{existing} is {what}, not a folder", elsewhere)


def describe_existing(place: Path) -> str:
    """Describe what already exists at the path of a result, for error messages."""
    kinds = (("a folder", Path.is_dir), ("a file", Path.is_file), ("something else than a file", Path.exists))
    what = next((name for name, holds in kinds if holds(place)), None)
    if not place.is_symlink():
        return what or "nothing"
    return "a dangling link" if what is None else f"a link to {what}"
