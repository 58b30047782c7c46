"""Pooling of hidden states to an embedding, as sentence-transformers describes it: `modules.json` lists the modules after the encoder, each
with a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ... import UsageError
from ...offload.safetensors_header import is_gguf
from ..config_reader import ConfigError, read_json, show
from ..files.bounded_read import JSON_NBYTES, read_bounded
from ..generation.dense import Dense, dense_layers_of_folder
from ..hub import MODULES, POOLING, POOLING_KEPT

POOLING_MODES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "cls": lambda states: states[0], "lasttoken": lambda states: states[-1], "max": lambda states: states.max(0),
    "mean": lambda states: states.mean(0, dtype=np.float64).astype(np.float32),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / np.float32(np.sqrt(len(states))),
    "weightedmean": lambda states: np.average(states, 0, np.arange(1, len(states) + 1)).astype(np.float32)}
# Behind pooling_mode_, as it was written before.
FORMER = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "weightedmean_tokens": "weightedmean"}
OTHERS = "use an embedding model, such as sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True)
class Pooling:
    """`way`: a name of POOLING_MODES, followed by `dense` layers. The caller normalizes."""

    way: str
    dense: tuple[Dense, ...] = ()

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """Of one text's states float32 [T, D]."""
        made = POOLING_MODES[self.way](states)
        for each in self.dense:
            made = each(made)
        return made

    def width(self, hidden: int) -> int:
        """Dimension of an embedding."""
        return len(self.dense[-1].matrix) if self.dense else hidden


def read_pooling(folder: Path, hidden: int) -> Pooling:
    """Raises UsageError for a model that states no pooling, or an unsupported one, ConfigError, CheckpointError."""
    if is_gguf(folder):
        from .gguf_encoder import way_of

        if (way := way_of(folder)) is None:
            raise UsageError("this model's file states no pooling for embeddings", OTHERS)
        return Pooling(way)
    modules = _modules(folder)
    places = [place for kind, place in modules if kind == "pooling"]
    names = [f"{places[0]}/config.json"] if places else [POOLING, POOLING_KEPT]
    stated = next((read_json(folder / name) for name in names if (folder / name).is_file()), None)
    if stated is None and "emb_pooler" in (said := read_json(folder / "config.json")):
        stated = {"pooling_mode": said["emb_pooler"]}  # Jina's own key
    if stated is None:
        raise UsageError("this model's folder states no pooling for embeddings", OTHERS)
    for kind, _ in modules:
        if kind not in ("transformer", "pooling", "normalize", "dense"):
            raise UsageError(f"this model's embeddings go through module {show(kind)}, which is not supported", OTHERS)
    return Pooling(_way(stated), dense_layers_of_folder(folder, [place for kind, place in modules if kind == "dense"], hidden))


def _way(stated: Mapping[str, object]) -> str:
    mode = stated.get("pooling_mode")
    named = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else [
        FORMER.get(name.removeprefix("pooling_mode_"), name.removeprefix("pooling_mode_")) for name, value in stated.items()
        if name.startswith("pooling_mode_") and value is True]
    if len(named) != 1 or named[0] not in POOLING_MODES:
        raise UsageError(f"this model's pooling is {show(' and '.join(sorted(map(str, named))))}, which is not supported",
                         f"known: {', '.join(POOLING_MODES)}, one of them")
    return named[0]


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(lower-case class name, folder) of each module. Raises ConfigError."""
    if not os.path.lexists(folder / MODULES):  # a link that leads nowhere is no folder without a list
        return []
    import json

    try:
        listed = json.loads(read_bounded(folder / MODULES, JSON_NBYTES))
        found = [(each["type"].rpartition(".")[2].lower(), each.get("path") or "") for each in listed]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{folder / MODULES} is not a list of modules") from error
    if any(not isinstance(place, str) or "/" in place or place.startswith(".") for _, place in found):
        raise ConfigError(f"{folder / MODULES} names a module outside of the model's folder")
    return found
