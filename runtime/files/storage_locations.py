"""Where effllm stores things on this machine, how much disk space they take, and how much is free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...kernels.compile import cache_root
from .. import hub
from ..kv.kv_spill import spill_folder
from ..library import storage
from ..planning import roofs
from ..prepare import EngineOptions


@dataclass(frozen=True)
class StorageLocation:
    """`nbytes` of the files there, links not followed (0 where it does not exist); `free_nbytes` on its disk, None where unknown."""

    name: str
    path: Path
    nbytes: int
    free_nbytes: int | None

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "path": str(self.path), "bytes": self.nbytes, "free_bytes": self.free_nbytes}


def list_locations(env: Mapping[str, str]) -> tuple[StorageLocation, ...]:
    """The user's storage locations under these environment variables. Creates nothing."""
    found = (("kernel cache", cache_root() / "kernels"), ("hub cache", hub.cache_folder(env)), ("own models", storage.models_folder(env)),
             ("sessions", storage.sessions_folder(env)), ("served prompts", storage.served_folder(env)),
             ("spilled cache", spill_folder(EngineOptions())), ("measurements", roofs.roofs_file()))
    return tuple(StorageLocation(name, path, stored_nbytes(path), free_nbytes(path)) for name, path in found)


def stored_nbytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder. Files that vanish meanwhile or are unreadable count zero."""
    if not path.is_dir():
        return _nbytes(path)
    return sum(_nbytes(Path(folder) / name) for folder, _, names in os.walk(path) for name in names)


def _nbytes(path: Path) -> int:
    try:
        return 0 if path.is_symlink() else path.stat().st_size
    except OSError:
        return 0


def free_nbytes(path: Path) -> int | None:
    for each in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(each).free
        except OSError:
            continue  # it is not there yet: the disk is that of the folder above
    return None
