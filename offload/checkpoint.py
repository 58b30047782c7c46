"""Hugging Face checkpoint folders as a table of tensors, read by byte range.

Opening a folder reads headers only (validated by `safetensors_header.py`); weight bytes are read on request. A folder holds
model.safetensors, or shards named by an index, or a single safetensors file under another name. Pickles are never opened here
(`torch_checkpoint.py` locates tensors in one without executing it). Files stay open from header to last read: a folder that is replaced
meanwhile cannot mix two checkpoints, at the price of one descriptor per shard.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from .. import ModelNotFound
from .safetensors_header import (
    AGAIN,
    MAX_HEADER,
    CheckpointError,
    TensorInfo,
    damaged,
    parse_json,
    pread_exactly,
    pread_into,
    read_header,
    shown,
)

if TYPE_CHECKING:
    import numpy as np

    from .repack import Repack

__all__ = ["CheckpointError", "OpenFile", "TensorInfo", "TensorStore", "open_regular_file"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
READ_NBYTES = 4 << 20
_LIST = "effllm list shows the models on this machine"


@dataclass(frozen=True)
class OpenFile:
    """A descriptor, and the (size, mtime) of its file when the header was read."""

    fd: int
    stamp: tuple[int, int]

    def close(self) -> None:
        os.close(self.fd)


class TensorStore:
    """The tensors of one folder: headers in memory, bytes read on request from any thread. A context manager."""

    repacks_on_read = False  # are another tool's weights repacked or widened on read?
    notices: tuple[str, ...] = ()  # conversions on load that the user did not ask for

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo], opened: dict[Path, OpenFile]) -> None:
        self.folder = folder
        self.tensors = tensors
        self.files = tuple(opened)
        self.nbytes = sum(info.nbytes for info in tensors.values())
        self._opened = opened

    @classmethod
    def open(cls, folder: Path | str) -> TensorStore:
        """Read and check the headers in `folder`; ModelNotFound where it cannot be read, CheckpointError where it is damaged."""
        folder = Path(folder)
        return cls._of(folder, *_weight_files(folder))

    @classmethod
    def of_file(cls, path: Path) -> TensorStore:
        """Like `open`, for one safetensors file of a folder, whatever else the folder holds."""
        return cls._of(path.parent, {}, [path])

    @classmethod
    def _of(cls, folder: Path, index: dict[str, str], paths: Sequence[Path]) -> TensorStore:
        tensors: dict[str, TensorInfo] = {}
        opened: dict[Path, OpenFile] = {}
        try:
            for path in paths:
                opened[path] = open_regular_file(path)
                for info in read_header(path, opened[path].fd, opened[path].stamp[0]):
                    if info.name in tensors:
                        damaged(path, f"holds tensor {shown(info.name)}, which {tensors[info.name].file.name} holds too")
                    tensors[info.name] = info
            for name, shard in index.items():
                if name not in tensors or tensors[name].file.name != shard:
                    damaged(folder / _INDEX, f"places tensor {shown(name)} in {shard}, which does not hold it")
        except BaseException:
            _close(opened)
            raise
        return cls(folder, tensors, opened)

    def read(self, info: TensorInfo, row_begin: int = 0, row_end: int | None = None) -> np.ndarray:
        """Bytes (uint8) of rows [row_begin, row_end) of the first dimension; a scalar is one row."""
        import numpy as np  # deferred: listing models reads only headers, and this import would be a third of its time

        rows = info.shape[0] if info.shape else 1
        row_end = rows if row_end is None else row_end
        if not 0 <= row_begin <= row_end <= rows:
            raise ValueError(f"rows {row_begin}:{row_end} of {info.name}, which has {rows}")
        if rows and info.nbytes % rows:
            raise ValueError(f"a row of {info.name} ({info.dtype}) does not end on a byte")
        row_nbytes = info.nbytes // rows if rows else 0
        out = np.empty((row_end - row_begin) * row_nbytes, np.uint8)
        self.read_at(info.file, info.offset + row_begin * row_nbytes, memoryview(out))
        return out

    def read_into(self, info: TensorInfo, out: np.ndarray | memoryview) -> None:
        """Fill `out`, exactly `info.nbytes` contiguous bytes, with the whole tensor."""
        view = memoryview(out)
        if view.nbytes != info.nbytes:
            raise ValueError(f"{info.name} has {info.nbytes} bytes, the buffer {view.nbytes}")
        if info.nbytes:
            self.read_at(info.file, info.offset, view.cast("B"))

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        """Calls that together fill `out` (`info.nbytes` long), for any threads in any order, each with the bytes that it fills."""
        for at in range(0, info.nbytes, READ_NBYTES):
            piece = memoryview(out[at : at + READ_NBYTES])
            yield partial(self.read_at, info.file, info.offset + at, piece), len(piece)

    def read_at(self, file: Path, offset: int, out: memoryview) -> None:
        """Fill `out` from `file`; CheckpointError where the file ends early or the disk fails."""
        pread_into(file, self.descriptor(file), out, offset)

    def place(self, info: TensorInfo) -> int | None:
        """Where the tensor's bytes lie in a file exactly as `read` returns them; None where they are converted on read."""
        return info.offset

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        """How tensors that have no place are made each time they are needed, piece by piece; None where they cannot be."""
        return None

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        """The files needed to read a tensor; several where it is assembled from parts."""
        return frozenset((info.file,))

    def stored_nbytes(self, info: TensorInfo) -> int:
        """Bytes of a tensor on disk; fewer than `nbytes` where it is widened on read."""
        return info.nbytes

    def descriptor(self, file: Path) -> int:
        """The open descriptor of a file (for mmap); it belongs to the store."""
        if file not in self._opened:
            raise ValueError(f"{file} is not open in this store")
        return self._opened[file].fd

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a file was truncated or rewritten since its header was read."""
        for path, file in self._opened.items():
            if _stamp(os.fstat(file.fd)) != file.stamp:
                damaged(path, "changed while it was being read")

    def take_files(self) -> dict[Path, OpenFile]:
        """Transfer ownership of the open files to a store that replaces this one; closing this one leaves them open."""
        opened, self._opened = self._opened, {}
        return opened

    def close(self) -> None:
        # Emptied first: a read after close must fail, and never reach a descriptor number that has been reused.
        opened, self._opened = self._opened, {}
        _close(opened)

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _weight_files(folder: Path) -> tuple[dict[str, str], list[Path]]:
    """The index's weight map (empty without one) and the safetensors files that make up the checkpoint."""
    try:
        names = sorted(os.listdir(folder))
    except PermissionError as error:
        raise ModelNotFound(f"no permission to read the model folder {folder}", f"chmod -R u+rX {folder}, or run as its owner") from error
    except NotADirectoryError as error:
        raise ModelNotFound(f"{folder} is a file, not a model folder", "give the folder that holds config.json and the weights") from error
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"there is no model folder {shown(str(folder))}", _LIST) from error
    if _SINGLE in names:
        return {}, [folder / _SINGLE]
    if _INDEX in names:
        index = _read_index(folder / _INDEX)
        shards = sorted(set(index.values()))
        missing = [shard for shard in shards if shard not in names]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(f"{folder} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}{more}", AGAIN)
        return index, [folder / shard for shard in shards]
    return {}, [folder / _lone_file(folder, [name for name in names if not name.startswith(".")])]


def _lone_file(folder: Path, names: list[str]) -> str:
    """The only safetensors file of a folder that has neither model.safetensors nor an index."""
    weights = [name for name in names if name.endswith(".safetensors")]
    if weights == ["adapter_model.safetensors"]:
        raise CheckpointError(f"{folder} holds a LoRA adapter, not a model",
                              f"effllm export MODEL -o DIR --lora {folder} merges it into its model")
    if len(weights) == 1:
        return weights[0]
    if weights:
        raise CheckpointError(f"{folder} holds {len(weights)} safetensors files but no {_INDEX}", "download the index file too")
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise CheckpointError(
            f"{folder} holds only pickle weights ({pickles[0]}): unpickling can execute any code, so effllm refuses",
            "if you trust it, convert it once with transformers: model.save_pretrained(folder, safe_serialization=True)",
        )
    raise ModelNotFound(f"{folder} holds no safetensors weights", _LIST)


def _read_index(path: Path) -> dict[str, str]:
    """The index's map from tensor name to shard file name; every shard must be a plain name inside the folder."""
    file = open_regular_file(path)
    try:
        size = file.stamp[0]
        if size > MAX_HEADER:
            damaged(path, f"is {size} bytes, more than the {MAX_HEADER} an index may have")
        index = parse_json(path, "index", pread_exactly(path, file.fd, size, 0))
    finally:
        os.close(file.fd)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        damaged(path, "has no weight_map")
    for name, shard in weight_map.items():
        # A path instead of a plain name would let the index point outside the folder.
        if not (isinstance(shard, str) and len(shard) < 256 and shard.isprintable() and not set(shard) & set("/\\")):
            damaged(path, f"places tensor {shown(name)} in {shown(shard)}, which is not the name of a file in this folder")
        if not shard.endswith(".safetensors"):
            damaged(path, f"places tensor {shown(name)} in {shard}, which is not a safetensors file")
    return weight_map


def open_regular_file(path: Path) -> OpenFile:
    """Open a regular file for reading. A pipe or device under a weight file's name must neither block nor be read forever."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise ModelNotFound(f"no permission to read {path}", f"chmod u+r {path}, or run as its owner") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}", AGAIN) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        damaged(path, "is not a regular file")
    return OpenFile(fd, _stamp(status))


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _close(opened: dict[Path, OpenFile]) -> None:
    for file in opened.values():
        os.close(file.fd)
