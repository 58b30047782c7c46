"""Where a model's parts are read from: a folder of safetensors with its tokenizer and settings, or one GGUF file that holds them all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .. import EffllmError, UsageError
from ..offload.checkpoint import TensorStore
from ..offload.header import is_gguf
from .config_reader import read_json
from .container import FILE, Container, read_container


def open_store(path: Path, wide: str = "f16") -> TensorStore:
    """The weights of a model as raw values; blocks of a GGUF file become `wide`, f16 or f32. Raises CheckpointError, ModelNotFound."""
    if is_gguf(path):
        from .gguf.store import open_gguf_store

        return open_gguf_store(path, wide)
    return _open_folder(path, wide, False)


def _open_folder(path: Path, wide: str, low_bit: bool) -> TensorStore:
    """The weights of a folder, those that another tool quantized as `wide` or, with `low_bit`, as codes where kernels multiply them."""
    store = TensorStore.open(path)
    section = None if os.path.exists(path / FILE) else quantization_of(path)
    if section is None:
        return store
    from .imported import ImportedStore

    try:
        return ImportedStore(store, section, wide, low_bit, _parted(path) if low_bit else ())
    except BaseException:
        store.close()
        raise


def _parted(path: Path) -> frozenset[str]:
    """Names of the tensors of which a model reads ranges of rows under other names."""
    from . import families
    from .config import read_config

    config = read_config(path)
    family = families.get(config.family)
    rules = (rule for i in range(config.num_hidden_layers) for rule in family.layer_tensors(config, i).values())
    return frozenset(rule.part_of[0] for rule in rules if rule.part_of)


def quantization_of(path: Path) -> Mapping[str, object] | None:
    """The `quantization_config` of a folder, where its config has one; it has been judged when the config was read."""
    raw = read_json(path / "config.json")
    section = raw.get("quantization_config")
    return section if isinstance(section, dict) else None


def open_weights(path: Path, low_bit: bool = True) -> tuple[TensorStore, Container | None]:
    """The weights of a model for a run, and what says which of them are low-bit. Without `low_bit` what other tools quantized is widened.

    Raises CheckpointError, ModelNotFound.
    """
    if not is_gguf(path):
        container = read_container(path)
        store = _open_folder(path, "f16", low_bit)
        return store, getattr(store, "container", None) if container is None else container
    from .gguf.store import open_gguf_store

    store = open_gguf_store(path, low_bit=low_bit)
    return store, store.container


def is_low_bit(path: Path, low_bit: bool = True) -> bool:
    """Whether `open_weights` will find low-bit weights, whatever else may be wrong with the model."""
    if not is_gguf(path):
        return os.path.exists(path / FILE) or (low_bit and _imports_codes(path))
    from ..quant.imports.gguf import KEPT
    from .gguf.store import read_header

    try:
        return low_bit and any(tensor.type in KEPT for tensor in read_header(path).tensors.values())
    except EffllmError:
        return False


def _imports_codes(path: Path) -> bool:
    from .imported import may_run_from_codes

    try:
        section = quantization_of(path)
    except EffllmError:
        return False
    return section is not None and may_run_from_codes(section)


def settings_of(path: Path) -> dict[str, object] | None:
    """The sampling settings that a GGUF file recommends, under the names of generation_config.json; None for a folder."""
    if not is_gguf(path):
        return None
    from .gguf.settings import generation_config

    return generation_config(path)


def folder_files(path: Path) -> dict[str, str]:
    """Name -> text of the files that a folder made of this model needs beside its weights, where the model is no folder to copy from."""
    if not is_gguf(path):
        return {}
    from .gguf.settings import folder_texts

    return folder_texts(path)


def check_mapping(path: Path | None) -> None:
    """Raises UsageError for weights that cannot be mapped from their file."""
    if path is not None and (is_gguf(path) or (not os.path.exists(path / FILE) and quantization_of(path) is not None)):
        raise UsageError(f"--load mmap: the weights of {path.name} are put in order as they are read", "leave --load away")
