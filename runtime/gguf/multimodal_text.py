"""Text part of a multimodal model with M-RoPE on export: its GGUF file states the sections, and for some families has an architecture of
its own, which the matching mmproj file requires.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ... import EffllmError
from ...offload.gguf_header import Value
from ...offload.safetensors_header import is_gguf
from ..config import ModelConfig
from ..images import raw_config
from ..images.mrope import mrope_axes
from .architecture import DEEPSTACK
from .mrope_sections import HEAD_COUNT_FIELDS, KEY, REORDERED_QK, half_split_rows
from .store import read_header

# Architecture of a text-only model -> of the text part of a multimodal one.
MULTIMODAL_ARCHITECTURES = {"glm4": "glm4", "glm4moe": "glm4moe", "qwen2": "qwen2vl", "qwen3": "qwen3vl", "qwen35": "qwen35",
                            "qwen35moe": "qwen35moe",
                            "qwen3moe": "qwen3vlmoe"}


def with_mrope_keys(source: Path, config: ModelConfig, metadata: Mapping[str, Value]) -> dict[str, Value]:
    """Export metadata of `source` with M-RoPE keys; unchanged for a model with one position per token."""
    text_architecture = str(metadata["general.architecture"])
    mrope_keys = _file_keys(source) if is_gguf(source) else _folder_keys(source, config)
    if text_architecture not in MULTIMODAL_ARCHITECTURES or not mrope_keys:
        return dict(metadata)
    name = MULTIMODAL_ARCHITECTURES[text_architecture]
    renamed = {f"{name}.{key.removeprefix(f'{text_architecture}.')}" if key.startswith(f"{text_architecture}.") else key: value
               for key, value in metadata.items()}
    return renamed | {"general.architecture": name} | {f"{name}.{key}": value for key, value in mrope_keys.items()}


def checkpoint_rows(name: str, config: ModelConfig, metadata: Mapping[str, Value]) -> np.ndarray | None:
    """The model's row for each row of a tensor of the file; None for the same order."""
    arch, part = metadata["general.architecture"], name.partition(".attn_")[2].partition(".")[0]
    return half_split_rows(config, part) if arch == REORDERED_QK and part in HEAD_COUNT_FIELDS and f"{arch}.{KEY}" in metadata else None


def _file_keys(source: Path) -> dict[str, Value]:
    """The M-RoPE keys of a GGUF file, without the architecture's prefix."""
    metadata = read_header(source).metadata
    name = metadata.get("general.architecture")
    return {key: metadata[f"{name}.{key}"] for key in (KEY,
                                                    DEEPSTACK) if name in MULTIMODAL_ARCHITECTURES.values() and f"{name}.{key}" in metadata}


def _folder_keys(folder: Path, config: ModelConfig) -> dict[str, Value]:
    """The M-RoPE keys of a checkpoint folder, without the architecture's prefix."""
    try:
        axes = mrope_axes(folder, config)
    except EffllmError:  # an error in the vision config, which text does not need
        return {}
    if axes is None or axes.max() > 2:
        return {}
    raw = raw_config(folder)
    vision = raw.get("thinker_config", raw).get("vision_config") or {}
    deepstack_layers = vision.get("deepstack_visual_indexes")
    return {KEY: np.bincount(axes, minlength=4).astype(np.int32),
            **({DEEPSTACK: len(deepstack_layers)} if isinstance(deepstack_layers, list) else {})}
