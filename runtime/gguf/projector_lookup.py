"""Where the part of a model that sees (mmproj) lies, of a GGUF file: in the same folder, or, in the hub cache, in one above it of the same
repository. Light: what is removed or verified asks here too."""

from __future__ import annotations

from pathlib import Path

from ... import UsageError
from ...offload.safetensors_header import is_blob
from ..hub import names_in
from . import file_names

NOTED = (".json", ".etag")  # beside a file in llama.cpp's cache, whose name begins with its repository's
SNAPSHOTS = "snapshots"  # of a repository in the hub cache, a folder for each commit


def sibling_projectors(model: Path) -> list[Path]:
    """In the nearest folder that has any; of one in several precisions that which is taken first. In llama.cpp's cache, one folder for all,
    those of the model's repository."""
    if is_blob(model.name):  # which of thousands belong to it, names do not say
        return []
    for folder in _folders(model):
        here = names_in(folder)
        found = file_names.projectors(here)
        if {f"{model.name}{ending}" for ending in NOTED} & {*here}:
            found = [name for name in found if model.name.startswith(name[: name.lower().index("mmproj")])]
        if found:
            return [folder / name for name in found]
    return []


def find_projector(model: Path) -> Path | None:
    """The one file; None for none. Raises UsageError where those of several models lie there."""
    found = sibling_projectors(model)
    if len(found) > 1:
        raise UsageError(f"there are {len(found)} mmproj files beside {model.name}: {', '.join(path.name for path in found[:4])}",
                         "name one: --mmproj FILE")
    return found[0] if found else None


def _folders(model: Path) -> list[Path]:
    above = [model.parent, *model.parent.parents]
    whole = next((number for number, folder in enumerate(above) if folder.parent.name == SNAPSHOTS), 0)
    return above[: whole + 1]
