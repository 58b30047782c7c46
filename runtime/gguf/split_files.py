"""Models split over several GGUF files, `name-00001-of-00003.gguf` and so on. The first states the metadata, each holds some tensors.

Any part stands for the model. All of them state the parts (`split.count`, `split.no`); that their names follow from one another is
llama.cpp's rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ... import ModelNotFound
from ...offload.checkpoint import OpenFile, open_regular_file
from ...offload.gguf_header import GgufHeader, read_gguf_header, shown_value
from ...offload.safetensors_header import CheckpointError, damaged, shown
from .file_names import all_parts
from .ollama_layout import text_part

_LAST: dict[tuple[tuple[Path, tuple[int, int]], ...], GgufHeader] = {}  # cache of the last header


def open_parts(path: Path) -> tuple[GgufHeader, dict[Path, OpenFile]]:
    """The header of a model with the tensors of all its files, and the open files, which the caller closes."""
    opened: dict[Path, OpenFile] = {}
    try:
        for part in map(path.with_name, all_parts(path.name)):
            opened[part] = _open(part, path)
        key = tuple((part, file.stamp) for part, file in opened.items())
        if key not in _LAST:  # config, tokenizer and weights each read it
            headers = [read_gguf_header(part, file.fd) for part, file in opened.items()]
            _LAST.clear()
            _LAST[key] = _merge_headers(path, headers)
        return _LAST[key], opened
    except BaseException:
        close_all(opened)
        raise


def close_all(opened: Mapping[Path, OpenFile]) -> None:
    for file in opened.values():
        file.close()


def _open(part: Path, requested: Path) -> OpenFile:
    if part != requested and not part.exists():
        raise ModelNotFound(f"{requested.name} is one part of a split model, and {shown(part.name)} is missing",
                            f"all parts belong into {requested.parent}; effllm pull org/repo:{requested.name} fetches all of them")
    return open_regular_file(part)


def _merge_headers(path: Path, headers: list[GgufHeader]) -> GgufHeader:
    """One header of all parts."""
    first, count = headers[0], headers[0].metadata.get("split.count", 0)
    if len(headers) == 1:
        if type(count) is int and count > 1:
            raise CheckpointError(f"{path} is one of {count} parts of a split model, and not named as one",
                                  f"restore the parts' original names: NAME-00001-of-{count:05}.gguf")
        return text_part(first)
    tensors = {}
    for number, header in enumerate(headers):
        for key, expected in (("split.count", len(headers)), ("split.no", number)):
            if header.metadata.get(key) != expected:
                damaged(header.path, f"states {key} {shown_value(header.metadata.get(key))}, its name says {expected}")
        for name, tensor in header.tensors.items():
            if name in tensors:
                damaged(header.path, f"holds tensor {shown(name)}, which {tensors[name].file.name} holds too")
            tensors[name] = tensor
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        damaged(first.path, f"states {shown_value(total)} tensors in all parts, they hold {len(tensors)}")
    return GgufHeader(first.path, first.metadata, tensors)
