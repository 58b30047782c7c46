"""Pooling of hidden states to an embedding, as sentence-transformers describes it.

`modules.json` lists the modules after the encoder, each with its own folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ... import UsageError
from ...offload.safetensors_header import is_gguf
from ..config_reader import ConfigError, read_json, show
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded
from ..generation.dense import Dense, dense_layers_of_folder
from ..hub import MODULES, POOLING, POOLING_KEPT

POOLING_MODES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "cls": lambda states: states[0], "lasttoken": lambda states: states[-1], "max": lambda states: states.max(0),
    "mean": lambda states: states.mean(0, dtype=np.float64).astype(np.float32),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / np.float32(np.sqrt(len(states))),
    "weightedmean": lambda states: np.average(states, 0, np.arange(1, len(states) + 1)).astype(np.float32)}
# Names of modes in old configs, after pooling_mode_ -> present names.
OLD_MODES = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "weightedmean_tokens": "weightedmean"}
MODEL_HINT = "use an embedding model, such as sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True)
class Pooling:
    """Pools a text's hidden states. The caller normalizes the embedding."""

    mode: str  # a name of POOLING_MODES
    dense: tuple[Dense, ...] = ()  # layers after pooling

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """The embedding of one text's states float32 [T, D]."""
        embedding = POOLING_MODES[self.mode](states)
        for layer in self.dense:
            embedding = layer(embedding)
        return embedding

    def width(self, hidden: int) -> int:
        """Dimension of an embedding, for states of width `hidden`."""
        return len(self.dense[-1].matrix) if self.dense else hidden


def read_pooling(folder: Path, hidden: int) -> Pooling:
    """The pooling of a folder or GGUF file, for states of width `hidden`.

    Raises UsageError for a model that states none or an unsupported one, ConfigError, CheckpointError.
    """
    if is_gguf(folder):
        from .gguf_encoder import pooling_mode_of

        if (mode := pooling_mode_of(folder)) is None:
            raise UsageError("this model's file states no pooling for embeddings", MODEL_HINT)
        return Pooling(mode)
    modules = _modules(folder)
    folders = [path for module_type, path in modules if module_type == "pooling"]
    files = [f"{folders[0]}/config.json"] if folders else [POOLING, POOLING_KEPT]
    settings = next((read_json(folder / name) for name in files if (folder / name).is_file()), None)
    if settings is None and "emb_pooler" in (raw := read_json(folder / "config.json")):
        settings = {"pooling_mode": raw["emb_pooler"]}  # the key of Jina's configs
    if settings is None:
        raise UsageError("this model's folder states no pooling for embeddings", MODEL_HINT)
    for module_type, _ in modules:
        if module_type not in ("transformer", "pooling", "normalize", "dense"):
            raise UsageError(f"this model's embeddings go through module {show(module_type)}, which is not supported", MODEL_HINT)
    dense_folders = [path for module_type, path in modules if module_type == "dense"]
    return Pooling(_mode(settings), dense_layers_of_folder(folder, dense_folders, hidden))


def _mode(settings: Mapping[str, object]) -> str:
    """The pooling mode of a module's config. Raises UsageError unless it is one that is supported."""
    mode = settings.get("pooling_mode")
    if isinstance(mode, str | list):
        modes = [mode] if isinstance(mode, str) else mode
    else:  # old configs have a flag for each mode
        flags = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
        modes = [OLD_MODES.get(flag, flag) for flag in (name.removeprefix("pooling_mode_") for name in flags)]
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        raise UsageError(f"this model's pooling is {show(' and '.join(sorted(map(str, modes))))}, which is not supported",
                         f"known: {', '.join(POOLING_MODES)}, one of them")
    return modes[0]


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(lower-case class name, folder) of each module. Raises ConfigError."""
    if not os.path.lexists(folder / MODULES):  # a dangling link is an error, not a missing list
        return []
    import json

    try:
        modules = json.loads(read_bounded(folder / MODULES, MAX_JSON_NBYTES))
        entries = [(module["type"].rpartition(".")[2].lower(), module.get("path") or "") for module in modules]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{folder / MODULES} is not a list of modules") from error
    if any(not isinstance(path, str) or "/" in path or path.startswith(".") for _, path in entries):
        raise ConfigError(f"{folder / MODULES} names a module outside of the model's folder")
    return entries
