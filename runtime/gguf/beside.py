"""Where the part of a model that sees (mmproj) lies, of a GGUF file: in the same folder, or, in the hub cache, in one above it of the same
repository. Light: what is removed or verified asks here too."""

from __future__ import annotations

from pathlib import Path

from ... import UsageError
from ..hub import names_in
from . import names

SNAPSHOTS = "snapshots"  # of a repository in the hub cache, a folder for each commit


def projectors_beside(model: Path) -> list[Path]:
    """In the nearest folder that has any; of one in several precisions that which is taken first."""
    for folder in _folders(model):
        if found := names.projectors(names_in(folder)):
            return [folder / name for name in found]
    return []


def beside(model: Path) -> Path | None:
    """The one file; None for none. Raises UsageError where those of several models lie there."""
    found = projectors_beside(model)
    if len(found) > 1:
        raise UsageError(f"{len(found)} mmproj files lie beside {model.name}: {', '.join(path.name for path in found[:4])}",
                         "name one: --mmproj FILE")
    return found[0] if found else None


def _folders(model: Path) -> list[Path]:
    above = [model.parent, *model.parent.parents]
    whole = next((number for number, folder in enumerate(above) if folder.parent.name == SNAPSHOTS), 0)
    return above[: whole + 1]
