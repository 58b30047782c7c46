"""Saved measurements of `--target`: an interrupted search resumes, and a search for another size measures nothing again.

    <cache>/damage/<hash of the weights, the text and the formats>.jsonl    a line for each run

A line truncated by a kill is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from math import isfinite
from pathlib import Path

from ... import __version__
from ...kernels.compile import cache_root
from ...offload.checkpoint import TensorStore

MOST_FILES = 64  # of models and texts; the one that was not used for longest goes
LARGEST = 64 << 20  # bytes of a file

Errors = dict[str, dict[str, float]]  # tensor -> width -> squared error as a share of its squares


def folder() -> Path:
    return cache_root() / "damage"


def key_of(store: TensorStore, sample: Sequence[Sequence[int]], formats: Mapping[str, object]) -> str:
    """A name for all that decides what is measured: the weights' files, the tokens, what they are rounded to, the version."""
    stamps = [(path.name, (status := os.fstat(store.descriptor(path))).st_size, status.st_mtime_ns) for path in store.files]
    parts = [__version__, stamps, [list(window) for window in sample], {width: str(spec) for width, spec in formats.items()}]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load_measurements(key: str, widths: Sequence[str]) -> dict[tuple[str, ...], tuple[float, Errors]]:
    """Saved measurements, keyed by the tensors that were quantized together."""
    path, found = folder() / f"{key}.jsonl", {}
    try:
        with path.open("rb") as file:
            lines = file.read(LARGEST).splitlines()
        os.utime(path)
    except OSError:
        return {}
    for line in lines:
        with suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
            said = json.loads(line)
            names, damage = tuple(said["tensors"]), float(said["damage"])
            errors = {name: {width: float(said["errors"][name][width]) for width in widths} for name in names}
            if isfinite(damage) and all(isfinite(share) and share > 0 for own in errors.values() for share in own.values()):
                found[names] = damage, errors
    return found


def save_measurement(key: str, damage: float, errors: Errors) -> None:
    """Append a measurement of tensors that were quantized together. Does nothing where the cache is not writable."""
    path = folder() / f"{key}.jsonl"
    line = json.dumps({"tensors": list(errors), "damage": damage, "errors": errors}).encode()
    with suppress(OSError):
        begins = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b"\n" + line + b"\n")  # behind what a kill may have torn
        if begins:
            for old in sorted(folder().glob("*.jsonl"), key=lambda each: each.stat().st_mtime)[:-MOST_FILES]:
                old.unlink()
