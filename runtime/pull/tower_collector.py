"""Collects a model's vision tower while its shards are downloaded and deleted: the tower tensors of each shard are saved beside it until
all are here, then become the file that `quantize` would write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ...offload.checkpoint import READ_NBYTES
from ...offload.folder_writer import FolderWriter
from ...offload.safetensors_header import TensorInfo
from ..events import Progress
from ..images.tower_copy import pieces_of, tower_tensors, write_tower
from ..images.tower_weights import tower_store

ENDING = ".sight"


class TowerCollector:
    """`folder` holds the shards, of which at first only the headers are here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._found = folder, tower_tensors(folder)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._found)

    def lacks(self, shard: str) -> bool:
        """Whether tensors of this shard were not kept yet."""
        return bool(self._of(shard)) and not self._kept(shard).is_file()

    def keep(self, shard: str) -> None:
        """Those of a shard that is whole."""
        if not self.lacks(shard):
            return
        kept = self._kept(shard)
        aside = kept.with_name(f"{kept.name}.new")
        with tower_store(self.folder) as store, aside.open("wb") as file:
            for info in self._of(shard):
                file.writelines(pieces_of(store, info))
            file.flush()
            os.fsync(file.fileno())
        aside.rename(kept)

    def write(self, writer: FolderWriter) -> Iterator[Progress]:
        """As of `write_tower`."""
        return write_tower(self._found, self._pieces(), writer)

    def _pieces(self) -> Iterator[bytes]:
        """Of all tensors in the order of the file, from what was kept of the shards."""
        places = {info.name: place for shard in {info.file.name for info in self._found} for info, place in self._placed(shard)}
        for info in self._found:
            with self._kept(info.file.name).open("rb") as file:
                file.seek(places[info.name])
                for begin in range(0, info.nbytes, READ_NBYTES):
                    yield file.read(min(READ_NBYTES, info.nbytes - begin))

    def _placed(self, shard: str) -> Iterator[tuple[TensorInfo, int]]:
        at = 0
        for info in self._of(shard):
            yield info, at
            at += info.nbytes

    def _of(self, shard: str) -> list[TensorInfo]:
        return [info for info in self._found if info.file.name == shard]

    def _kept(self, shard: str) -> Path:
        return self.folder / f".{shard}{ENDING}"
