"""Finds the mmproj file of a GGUF model: in its folder or, in the hub cache, in a parent folder of the same repository. Import-light:
removal and verification use it too.
"""

from __future__ import annotations

from pathlib import Path

from ... import UsageError
from ...offload.safetensors_header import is_blob
from ..hub import names_in
from . import file_names

SIDECAR_SUFFIXES = (".json", ".etag")  # of files that llama.cpp's cache keeps beside a model; names there begin with the repository's
SNAPSHOTS = "snapshots"  # folder of a hub cache repository with one folder per commit


def sibling_projectors(model: Path) -> list[Path]:
    """The projectors in the nearest folder that has any, one per model: of one in several precisions the preferred file.

    In llama.cpp's cache, a single folder for all models, only those of the model's repository.
    """
    if is_blob(model.name):  # a blob folder holds files of all models, named by hash
        return []
    for folder in _search_folders(model):
        names = names_in(folder)
        projectors = file_names.projectors(names)
        if {f"{model.name}{ending}" for ending in SIDECAR_SUFFIXES} & {*names}:
            projectors = [name for name in projectors if model.name.startswith(name[: name.lower().index("mmproj")])]
        if projectors:
            return [folder / name for name in projectors]
    return []


def find_projector(model: Path) -> Path | None:
    """The model's projector file; None without one. Raises UsageError where those of several models are in the folder."""
    projectors = sibling_projectors(model)
    if len(projectors) > 1:
        raise UsageError(f"there are {len(projectors)} mmproj files beside {model.name}: {', '.join(path.name for path in projectors[:4])}",
                         "name one: --mmproj FILE")
    return projectors[0] if projectors else None


def _search_folders(model: Path) -> list[Path]:
    """The model's folder and, in the hub cache, its parents up to the snapshot's root, nearest first."""
    folders = [model.parent, *model.parent.parents]
    depth = next((number for number, folder in enumerate(folders) if folder.parent.name == SNAPSHOTS), 0)
    return folders[: depth + 1]
