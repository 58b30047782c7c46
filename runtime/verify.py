"""`verify`: the bytes of a quantized folder against the checksums that were recorded when it was made."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import ModelNotFound, UsageError
from ..offload.checkpoint import TensorStore
from .container import check_stored, read_container
from .events import Progress

PIECE = 8 << 20


@dataclass(frozen=True)
class Verified:
    """`damaged` names the tensors whose bytes are not those that were written."""

    tensors: int
    nbytes: int
    damaged: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {"tensors": self.tensors, "bytes": self.nbytes, "damaged": list(self.damaged)}


def verify(folder: Path) -> Iterator[Progress | Verified]:
    """Read every tensor; yields Progress and the result last.

    Raises CheckpointError where effllm.json or a header is damaged already, UsageError for a folder without checksums.
    """
    container = read_container(folder)
    if container is None:
        if not folder.is_dir():
            raise ModelNotFound(f"there is no folder {folder}", "effllm list shows the models on this machine")
        raise UsageError(f"{folder} has no checksums: effllm quantize records them, other checkpoints come without",
                         "give a folder that effllm quantize made")
    with TensorStore.open(folder) as store:
        check_stored(container, store)
        total = sum(store.tensors[name].nbytes for name in container.tensors)
        done, damaged = 0, []
        piece = np.empty(PIECE, np.uint8)
        for stored in container.tensors.values():
            info, crc = store.tensors[stored.name], 0
            for at in range(0, info.nbytes, PIECE):
                view = memoryview(piece[: min(PIECE, info.nbytes - at)])
                store.read_at(info.file, info.offset + at, view)
                crc = zlib.crc32(view, crc)
                done += len(view)
                yield Progress("verifying", done, total, "bytes", stored.name)
            if crc != stored.crc32:
                damaged.append(stored.name)
        store.check_unchanged()
    yield Verified(len(container.tensors), total, tuple(damaged))
