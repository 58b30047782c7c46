"""Cache of model facts read from headers, so that listing fifty GGUF files does not parse fifty vocabularies or import NumPy, and
listing a multimodal folder does not import its vision encoder.

A file is identified by path, size and mtime (all parts of a split one), a folder by those of its files; anything else is read again.
Models that cannot run are not cached: a newer effllm may support them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ... import __version__
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded
from ..gguf.file_names import all_parts
from . import storage

FORMAT, FILE = "effllm-listed", "listed.json"
INPUT_MODALITIES = "image", "audio"  # other words are of an older effllm, whose facts are read again


@dataclass(frozen=True)
class ModelFacts:
    """Of a file: as of `LocalModel`."""

    family: str
    size_bytes: int
    params: int
    licence: str | None
    bits: float
    context: int
    has_template: bool
    takes: list[str]
    writes: bool


FACT_TYPES = {"family": str, "size_bytes": int, "params": int, "licence": (str, type(None)), "bits": float, "context": int,
              "has_template": bool, "takes": list, "writes": bool}


class ListingCache:
    """The facts used by one listing. `keep` writes changes back, where the file is writable."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._path = storage.data_folder(env) / FILE
        self._before, self._taken_before = _read(self._path)
        self._now: dict[str, list[object]] = {}
        self._taken_now: dict[str, list[object]] = {}

    def of(self, file: Path, projector: Path | None, read: Callable[[Path, Path | None], ModelFacts | None]) -> ModelFacts | None:
        """What is known of a file and what it sees with, else what `read` makes of them: None for what cannot run."""
        try:
            state = [number for part in all_parts(file.name) for number in _file_state(file.with_name(part))]
        except OSError:
            return None
        if projector is not None and projector.exists():
            state += _file_state(projector)
        cached = self._before.get(str(file))
        facts = cached[1] if cached is not None and cached[0] == state else read(file, projector)
        if facts is not None:
            self._now[str(file)] = [state, facts]
        return facts

    def taken(self, folder: Path, read: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """What the model of a folder takes beside text, as it is known, else as `read` says."""
        try:
            state = [number for path in sorted(folder.iterdir()) if path.is_file() for number in (path.name, *_file_state(path))]
        except OSError:
            return read()
        cached = self._taken_before.get(str(folder))
        takes = cached[1] if cached is not None and cached[0] == state else read()
        self._taken_now[str(folder)] = [state, list(takes)]
        return tuple(takes)

    def keep(self) -> None:
        if (self._now, self._taken_now) == (self._before, self._taken_before):
            return
        files = {name: [state, asdict(facts)] for name, (state, facts) in self._now.items()}
        with suppress(OSError):  # a list is as good without
            self._path.parent.mkdir(parents=True, exist_ok=True)
            storage.replace_text(self._path, json.dumps({"format": FORMAT, "version": __version__, "files": files,
                                                         "folders": self._taken_now}))


def _file_state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _read(path: Path) -> tuple[dict[str, list[object]], dict[str, list[object]]]:
    """Of files, and of folders. Nothing where it is damaged, or of another effllm."""
    try:
        content = json.loads(read_bounded(path, MAX_JSON_NBYTES))
    except (OSError, ValueError, RecursionError):
        return {}, {}
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, __version__):
        return {}, {}
    files, folders = (each if isinstance(each := content.get(name), dict) else {} for name in ("files", "folders"))
    return ({name: [each[0], ModelFacts(**each[1])] for name, each in files.items() if _is_file_entry(each)},
            {name: each for name, each in folders.items() if _is_folder_entry(each)})


def _is_folder_entry(each: object) -> bool:
    return isinstance(each, list) and len(each) == 2 and isinstance(each[1], list) and all(word in INPUT_MODALITIES for word in each[1])


def _is_file_entry(each: object) -> bool:
    if not isinstance(each, list) or len(each) != 2 or not isinstance(each[1], dict) or each[1].keys() != FACT_TYPES.keys():
        return False
    facts = each[1]
    has_types = all(isinstance(value, FACT_TYPES[name]) for name, value in facts.items())
    return has_types and all(modality in INPUT_MODALITIES for modality in facts["takes"])
