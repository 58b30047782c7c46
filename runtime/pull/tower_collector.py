"""Collects a model's vision tower while its shards are downloaded and deleted: the tower tensors of each shard are saved to a file until
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

SUFFIX = ".sight"


class TowerCollector:
    """`folder` holds the shards, of which at first only the headers are here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._tensors = folder, tower_tensors(folder)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._tensors)

    def lacks(self, shard: str) -> bool:
        """Whether tower tensors of this shard are not saved yet."""
        return bool(self._tensors_in(shard)) and not self._saved_path(shard).is_file()

    def collect(self, shard: str) -> None:
        """Save the tower tensors of a complete shard."""
        if not self.lacks(shard):
            return
        path = self._saved_path(shard)
        temporary = path.with_name(f"{path.name}.new")
        with tower_store(self.folder) as store, temporary.open("wb") as file:
            for info in self._tensors_in(shard):
                file.writelines(pieces_of(store, info))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    def write(self, writer: FolderWriter) -> Iterator[Progress]:
        """Write the tower's file, see `write_tower`."""
        return write_tower(self._tensors, self._pieces(), writer)

    def _pieces(self) -> Iterator[bytes]:
        """The bytes of all tensors in the order of the file, from the saved ones."""
        offsets = {info.name: offset for shard in {info.file.name for info in self._tensors} for info, offset in self._offsets(shard)}
        for info in self._tensors:
            with self._saved_path(info.file.name).open("rb") as file:
                file.seek(offsets[info.name])
                for begin in range(0, info.nbytes, READ_NBYTES):
                    yield file.read(min(READ_NBYTES, info.nbytes - begin))

    def _offsets(self, shard: str) -> Iterator[tuple[TensorInfo, int]]:
        offset = 0
        for info in self._tensors_in(shard):
            yield info, offset
            offset += info.nbytes

    def _tensors_in(self, shard: str) -> list[TensorInfo]:
        return [info for info in self._tensors if info.file.name == shard]

    def _saved_path(self, shard: str) -> Path:
        return self.folder / f".{shard}{SUFFIX}"
