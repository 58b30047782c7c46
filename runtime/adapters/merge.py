"""Merges a LoRA adapter into its base model: writes a copy of the model folder with updated weights.

Changed weights (`merge_changes.py`) are computed in float32 and rounded once, to the stored type. Files keep their names, and a tensor
is written some rows at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ... import EffllmError, UsageError, __version__
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.folder_writer import FolderWriter, finish_cleanup, needs_cleanup, partial_nbytes
from ...offload.safetensors_header import TensorInfo, is_gguf
from ...offload.shards import PlannedFile
from ...quant.weight import from_f32
from ..config import read_config
from ..convert import check_space, check_target, companion_files
from ..events import Notice, Progress
from ..files.model_folder_files import already_complete
from ..hub import PIECES, RANKS
from ..source import is_already_quantized
from ..stores.container import read_container
from .adapter import floats
from .merge_changes import Changes, changes

MARKER, INDEX = "config.json", "model.safetensors.index.json"
BLOCK_NBYTES = 16 << 20  # float32 rows at once
VOCABULARIES = ("tokenizer.json", *RANKS, PIECES)


@dataclass(frozen=True)
class Merged:
    """The folder written, and how many of its weights the adapter changed."""

    folder: Path
    nbytes: int
    changed: int
    tensors: int

    def to_json(self) -> dict[str, object]:
        return {"folder": str(self.folder), "file_bytes": self.nbytes, "changed_tensors": self.changed, "tensors": self.tensors}


def merge(source: Path, adapter: Path, out: Path) -> Iterator[Progress | Notice | Merged]:
    """Write the model in `source` with the adapter in `adapter`, a folder or a GGUF file, as the folder `out`; the result comes last.

    Raises UsageError where `out` exists, the model is quantized or no folder, and CheckpointError where the two do not fit.
    """
    out = Path(os.path.abspath(out))
    if not (is_named := needs_cleanup(out, MARKER)):
        check_target(out, None)
    config = read_config(source)
    if is_gguf(source) or read_container(source) is not None or is_already_quantized(source):
        raise UsageError(f"adapters can only be merged into a folder of 16-bit weights, and {source} is quantized or a GGUF file",
                         "use the original checkpoint; effllm quantize shrinks the result")
    with ExitStack() as opened:
        store = opened.enter_context(TensorStore.open(source))
        own = changes(adapter, source, config, store.tensors)
        opened.enter_context(own.store)
        if not own.deltas and not own.whole:
            raise CheckpointError(f"{adapter} changes no weight", "inspect it: its training may not have been saved")
        files = _files(store)
        sizes, fingerprint = sum(file.size for file in files), _fingerprint(store, own, files)
        made = Merged(out, sizes, len({*own.deltas, *own.whole}), len(store.tensors))
        if is_named:
            if finish_cleanup(out, fingerprint, MARKER) is not None:
                yield Notice(already_complete(out))
                yield made
                return
            check_target(out, None)
        check_space(out, sizes - partial_nbytes(out) + sum(path.stat().st_size for path in companion_files(source).values()))
        with FolderWriter(out, files, fingerprint, MARKER, source.name) as writer:
            if writer.resumed:
                yield Notice("resuming where an earlier run stopped")
            done, total = 0, sum(info.nbytes for info in store.tensors.values())
            for name, info in store.tensors.items():
                if name not in writer.finished:
                    _write(store, own, writer, info)
                done += info.nbytes
                yield Progress("merging", done, total, "bytes", name)
            store.check_unchanged()
            own.store.check_unchanged()
            check_target(out, None)  # it may have been filled meanwhile
            beside = companion_files(source)
            if theirs := _vocabulary(source, adapter):
                yield Notice("the tokenizer and the chat template are those of the adapter's folder")
                beside = {name: path for name, path in beside.items() if not _is_of_text(name)} | theirs
            if (index := source / INDEX).is_file():
                beside[INDEX] = index
            beside.pop(MARKER, None)
            writer.commit(beside, {MARKER: (source / MARKER).read_text(encoding="utf-8")})
    yield made


def _is_of_text(name: str) -> bool:
    """Does a file say how text becomes tokens, or a chat a text?"""
    return name in RANKS or name.startswith(("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template"))


def _vocabulary(source: Path, adapter: Path) -> dict[str, Path]:
    """The files about text that lie beside an adapter, which was trained with them, where they are whole and say something else."""
    theirs = {} if is_gguf(adapter) else {name: path for name, path in companion_files(adapter).items() if _is_of_text(name)}
    if "tokenizer_config.json" not in theirs or theirs.keys().isdisjoint(VOCABULARIES):
        return {}
    if _has_template(source) and not _has_template(adapter):
        return {}
    same = all((source / name).is_file() and (source / name).read_bytes() == path.read_bytes() for name, path in theirs.items())
    return {} if same else theirs


def _has_template(folder: Path) -> bool:
    settings = folder / "tokenizer_config.json"
    return any(folder.glob("chat_template*")) or settings.is_file() and b'"chat_template"' in settings.read_bytes()


def _files(store: TensorStore) -> tuple[PlannedFile, ...]:
    """The model's own files, laid out as they are."""
    made = []
    for path in store.files:
        fd = store.descriptor(path)
        length = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
        head = b""
        while len(head) < length:
            head += os.pread(fd, length - len(head), len(head))
        places = {name: info.offset for name, info in store.tensors.items() if info.file == path}
        made.append(PlannedFile(path.name, head, places, os.fstat(fd).st_size))
    return tuple(made)


def _fingerprint(store: TensorStore, adapter: Changes, files: tuple[PlannedFile, ...]) -> str:
    """A hash of all that decides the bytes of the weights."""
    stamps = [(str(path), (status := os.fstat(each.descriptor(path))).st_size, status.st_mtime_ns)
              for each in (store, adapter.store) for path in each.files]
    heads = [hashlib.sha256(file.head).hexdigest() for file in files]
    return hashlib.sha256(json.dumps([__version__, "merge", stamps, heads, adapter.stated]).encode()).hexdigest()


def _write(store: TensorStore, adapter: Changes, writer: FolderWriter, info: TensorInfo) -> None:
    """A tensor, some rows at a time; where nothing changes it, its bytes."""
    delta, whole = adapter.deltas.get(info.name), adapter.whole.get(info.name)
    rows, kind = info.shape[0] if info.shape else 1, info.dtype.lower()
    row_nbytes = info.nbytes // rows if rows else 0
    turned = delta is not None and info.name in adapter.turned  # its outputs, which lengths are of, are columns
    step = rows if turned else max(1, BLOCK_NBYTES // max(1, 2 * row_nbytes))
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        raw = store.read(info, begin, end) if whole is None else adapter.store.read(whole, begin, end)
        if delta is not None or whole is not None:
            values = floats(raw, info if whole is None else whole).reshape(end - begin, *info.shape[1:])
            made = values if delta is None else delta.onto(values.T, 0, info.shape[1]).T if turned else delta.onto(values, begin, end)
            if not np.isfinite(made).all():
                raise EffllmError(f"{info.name}: the adapter produces NaN or infinity", "the adapter is damaged: download it again")
            raw = np.ascontiguousarray(from_f32(made, kind)).reshape(-1).view(np.uint8)
        writer.write(info.name, begin * row_nbytes, memoryview(raw))
    writer.finish(info.name, {})
