"""`effllm.json`, the manifest of a quantized safetensors folder: each tensor's format and checksum, and where the model came from.

`quantize` writes it last, so a folder that has one is complete. A quantized weight keeps its name in the safetensors header but is U8 of
`[nbytes]`, a blob of `kernels/tiles.py`; all other tensors are stored as usual. The file is untrusted input: every value is checked for
type and range, and `check_stored` compares it with the headers before anything is sized from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from zlib import crc32

from ... import ModelNotFound, UsageError
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.safetensors_header import AGAIN, MAX_HEADER, damaged, parse_json, pread_exactly, shown
from ...offload.shards import PAD
from ...quant.spec import QuantSpec
from ..config_reader import is_count

FORMAT, VERSION = "effllm-weights", 1
FILE = "effllm.json"
REQUANTIZE = "quantize or download it again"
DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}  # raw spec -> safetensors


@dataclass(frozen=True)
class StoredTensor:
    """`shape` is the weight's, `[N, K]` for a quantized one whatever its blob measures; `crc32` is of the stored bytes.

    `error_db` is 10 log10(sum of squared errors / sum of squares); None for a raw or an exactly kept tensor.
    """

    name: str
    spec: QuantSpec
    shape: tuple[int, ...]
    crc32: int
    error_db: float | None = None

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes(self.shape)


@dataclass(frozen=True)
class Container:
    """The content of an `effllm.json`. `spec_text` is what the person asked for; `bits_per_weight` counts every tensor. `files`: CRC-32 of
    the small files that came along, config and tokenizer; none where they were not recorded."""

    spec_text: str
    bits_per_weight: float
    tensors: dict[str, StoredTensor]
    source: Mapping[str, object]
    tool: Mapping[str, object]
    method: Mapping[str, object]
    calibration: Mapping[str, object]
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_low_bit(self) -> bool:
        """Does it hold codes?"""
        return any(not stored.spec.is_raw for stored in self.tensors.values())

    @property
    def licence(self) -> str | None:
        """What the model was published under, if that was known when it was quantized."""
        stated = self.source.get("licence")
        return stated if isinstance(stated, str) else None

    def with_files(self, copies: Mapping[str, Path], texts: Mapping[str, str]) -> Container:
        """The same, of a folder into which files are copied and texts written."""
        checksums = {name: crc32(path.read_bytes()) for name, path in copies.items()}
        return replace(self, files=checksums | {name: crc32(text.encode()) for name, text in texts.items()})

    def to_json(self) -> str:
        """The text of the file, the same for the same values."""
        tensors = {}
        for stored in self.tensors.values():
            tensors[stored.name] = {"spec": str(stored.spec), "shape": list(stored.shape), "crc32": stored.crc32,
                                    "error_db": None if stored.error_db is None else round(stored.error_db, 3)}
        head = {"format": FORMAT, "version": VERSION, "spec": self.spec_text, "bits_per_weight": round(self.bits_per_weight, 4),
                "source": self.source, "tool": self.tool, "method": self.method, "calibration": self.calibration,
                **({"files": dict(sorted(self.files.items()))} if self.files else {})}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in tensors.items())
        return json.dumps(head, indent=1, allow_nan=False)[:-2] + f',\n "tensors": {{\n{lines}\n }}\n}}\n'


@contextmanager
def requantize_hint() -> Iterator[None]:
    """What is damaged within is of a folder that `quantize` made, perhaps on this machine: there may be nothing to download."""
    try:
        yield
    except CheckpointError as error:
        if error.hint != AGAIN:
            raise
        raise CheckpointError(error.message, REQUANTIZE) from error


def read_container(folder: Path) -> Container | None:
    """The container of a folder; None where there is no effllm.json: an ordinary checkpoint.

    Raises CheckpointError for a damaged file and for one of a newer version.
    """
    with requantize_hint():
        return _read(Path(folder) / FILE)


def refuse_quantized(folder: Path, name: str, option: str) -> None:
    """Raises UsageError where the model named `called` was already quantized by this program; `asked` is the option that requests it
    again."""
    if (container := read_container(folder)) is not None:
        raise UsageError(f"{name} is quantized already ({container.spec_text})", f"leave out {option}", "bits")


def _read(path: Path) -> Container | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise ModelNotFound(f"no permission to read {path}", f"chmod -R u+rX {path.parent}, or run as its owner") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}", AGAIN) from error
    try:
        size = os.fstat(fd).st_size
        if size > MAX_HEADER:
            damaged(path, f"is {size} bytes, more than the {MAX_HEADER} it may have")
        raw = parse_json(path, "content", pread_exactly(path, fd, size, 0))
    finally:
        os.close(fd)
    return parse_container(raw, path)


def parse_container(raw: Mapping[str, object], path: Path) -> Container:
    """A Container of parsed JSON; `path` begins the errors."""
    if raw.get("format") != FORMAT:
        damaged(path, f"says format {shown(raw.get('format'))}, expected {FORMAT}")
    version = raw.get("version")
    if not is_count(version) or version == 0:
        damaged(path, f"says version {shown(version)}, expected a whole number")
    if version > VERSION:
        raise CheckpointError(f"{path} is of version {version}, this effllm reads up to {VERSION}: a newer effllm wrote it",
                              "upgrade effllm: git pull, then pip install . in its clone")
    bits, spec, tensors = raw.get("bits_per_weight"), raw.get("spec"), raw.get("tensors")
    if not isinstance(spec, str):
        damaged(path, f"says spec {shown(spec)}, expected a text")
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 <= bits <= 64:
        damaged(path, f"says {shown(bits)} bits per weight")
    if not isinstance(tensors, dict) or not tensors:
        damaged(path, "lists no tensors")
    sections = []
    for name in ("source", "tool", "method", "calibration"):
        value = raw.get(name)
        if not isinstance(value, dict):
            damaged(path, f"says {name} {shown(value)}, expected an object")
        sections.append(value)
    files = raw.get("files", {})
    if not isinstance(files, dict) or not all(map(_is_checksum, files.values())):
        damaged(path, f"says files {shown(files)}, expected a checksum for each")
    if invalid_names := [name for name in files if "/" in name or name in ("", ".", "..")]:
        damaged(path, f"says files {shown(invalid_names[0])}, expected the name of one beside it")
    return Container(spec, float(bits), {name: _parse_tensor(name, entry, path) for name, entry in tensors.items()}, *sections, files)


def _parse_tensor(name: str, entry: object, path: Path) -> StoredTensor:
    if not isinstance(entry, dict):
        damaged(path, f"describes tensor {shown(name)} by {shown(entry)}")
    spec, shape, checksum, error = entry.get("spec"), entry.get("shape"), entry.get("crc32"), entry.get("error_db")
    if not isinstance(spec, str):
        damaged(path, f"has tensor {shown(name)} of format {shown(spec)}")
    try:
        parsed = QuantSpec.parse(spec)
    except UsageError:
        damaged(path, f"has tensor {shown(name)} of unknown format {shown(spec)}")
    if not isinstance(shape, list) or not all(is_count(n) for n in shape) or prod(shape) >= 1 << 48:
        damaged(path, f"has tensor {shown(name)} with an impossible shape {shown(shape)}")
    if not parsed.is_raw and (len(shape) != 2 or 0 in shape):
        damaged(path, f"has tensor {shown(name)} of format {spec} with shape {shown(shape)}, expected rows and columns")
    if not _is_checksum(checksum):
        damaged(path, f"has tensor {shown(name)} with an impossible checksum {shown(checksum)}")
    if error is not None and (isinstance(error, bool) or not isinstance(error, int | float) or not abs(error) < 1e6):
        damaged(path, f"has tensor {shown(name)} with an impossible error {shown(error)}")
    return StoredTensor(name, parsed, tuple(shape), checksum, None if error is None else float(error))


def check_stored(container: Container, store: TensorStore) -> None:
    """Hold every tensor against the headers. Raises CheckpointError naming the first that is missing, extra or of another size."""
    with requantize_hint():
        _check_stored(container, store, store.folder / FILE)


def _check_stored(container: Container, store: TensorStore, path: Path) -> None:
    for stored in container.tensors.values():
        info = store.tensors.get(stored.name)
        if info is None:
            damaged(path, f"lists tensor {shown(stored.name)}, which no weight file holds")
        dtype, shape = (DTYPES[stored.spec.scheme], stored.shape) if stored.spec.is_raw else ("U8", (stored.nbytes,))
        if (info.dtype, info.shape) != (dtype, shape):
            damaged(info.file, f"holds tensor {shown(info.name)} as {info.dtype} {list(info.shape)}, {FILE} says {dtype} {list(shape)}")
    for name, info in store.tensors.items():
        if name not in container.tensors and not name.startswith(PAD):
            damaged(info.file, f"holds tensor {shown(name)}, which {FILE} does not list")


def _is_checksum(value: object) -> bool:
    return is_count(value) and value < 1 << 32
