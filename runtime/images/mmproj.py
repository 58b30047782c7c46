"""Towers of GGUF models: an mmproj file as llama.cpp's converter writes it, next to the model's file or named by the user.

Its metadata is translated to the config of the original checkpoint (`gguf/projector_config.py`), so the families' towers load it like a
folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import EffllmError, ModelNotFound, UsageError
from ...offload.gguf_header import GgufHeader
from ...offload.safetensors_header import AGAIN, CheckpointError, is_gguf
from ..config_reader import ConfigError, Keys
from ..gguf import mrope_sections
from ..gguf.projector_config import ProjectorConfig, projector_config, projector_types
from ..gguf.projector_lookup import find_projector
from ..gguf.projector_store import ProjectorStore, read_projector_header
from ..gguf.store import read_header
from . import MediaEncoder, build_encoder
from .modality import IMAGE_INPUT, Modality
from .mrope import ORDERED, section_axes

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_weights import Weights

SAYS = re.compile(r"config\.json(: (?:audio|encoder|projector|vision)_config)?")  # in errors, where the file says it


class MmprojSource:
    """A `TowerSource` for an mmproj file. Raises CheckpointError, ModelNotFound."""

    without_word = "the two files are of different models, or the model's was converted without its image tokens"

    def __init__(self, model: Path, path: Path, said: ProjectorConfig) -> None:
        self.model, self.path, self.config, self._said = model, path, said.config, said

    def processor(self, known: Sequence[str]) -> tuple[Keys, Keys]:
        where = str(self.path)
        return Keys({key: value for key, value in self._said.processor.items() if value is not None}, where), Keys({}, where)

    def films(self) -> Keys:
        return Keys({}, str(self.path))

    def extractor(self, known: Sequence[str], usual: Mapping[str, object] | None = None) -> Keys:
        return Keys(dict(self._said.processor), str(self.path))

    def weights(self) -> Weights:
        from .tower_weights import Weights

        return Weights(ProjectorStore(self.path, self._said), "the file", self._said.modality)

    @contextmanager
    def saying(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            raise ConfigError(SAYS.sub(lambda found: str(self.path), error.message), AGAIN) from error


def mmproj_encoders(model: Path, config: ModelConfig, named: Path | None) -> tuple[dict[Modality, MediaEncoder | EffllmError],
                                                                                   np.ndarray | None]:
    """Encoders by modality, or the error why one cannot be used, from the mmproj file that is `named` or lies next to the model; and its
    M-RoPE axes (`mrope_axes`). Raises UsageError where there is none, and EffllmError for one that does not belong to the model."""
    if not is_gguf(model):
        raise UsageError(f"--mmproj is for GGUF files, and {model} is a folder, which contains its towers",
                         "leave it out")
    if config.cross_attention_layers:
        raise UsageError(f"{model.name} supports only text: the tower that its layers cross-attend to is read from a folder",
                         "for images use the folder of the original checkpoint, or one made by effllm quantize")
    path = named or (model if read_header(model).sees else find_projector(model))
    if path is None:
        raise UsageError(f"{model.name} contains only the text model, and there is no mmproj file next to it",
                         "put the model's mmproj-*.gguf into the same folder, or name it: --mmproj FILE")
    if not os.path.isfile(path):
        raise ModelNotFound(f"there is no file {path}", "--mmproj takes the mmproj-*.gguf file published with the model")
    header, text = read_projector_header(path), read_header(model).metadata
    found: dict[Modality, MediaEncoder | EffllmError] = {}
    axes = None
    for modality in projector_types(header):
        try:
            said = projector_config(header, str(text.get("general.architecture")), modality)
            found[modality] = _sight(header, said, model, config)
            axes = _axes(str(said.config["model_type"]), text, config) if modality is IMAGE_INPUT else axes
        except EffllmError as error:
            found[modality] = error
    if all(isinstance(each, EffllmError) for each in found.values()):
        raise next(iter(found.values()))
    return found, axes


def _sight(header: GgufHeader, said: ProjectorConfig, model: Path, config: ModelConfig) -> MediaEncoder:
    _demand_width(header, said, config)
    source = MmprojSource(model, header.path, said)
    with source.saying():
        return build_encoder(str(said.config["model_type"]), source, config, said.modality)


def _demand_width(header: GgufHeader, said: ProjectorConfig, config: ModelConfig) -> None:
    """Raises CheckpointError for a projector whose output width is not the model's hidden size."""
    last = header.tensors.get(said.projector.width_tensor)
    if last is None:
        raise CheckpointError(f"{header.path} holds no tensor {said.projector.width_tensor}", "the file is incomplete: download it again")
    width = last.shape[-1 if said.projector.width_is_last else 0]
    if width != config.hidden_size:
        raise CheckpointError(f"{header.path} projects to width {width}, but the model's hidden size is {config.hidden_size}",
                              "it belongs to another model or size: use the mmproj file published with this one")


def _axes(kind: str, text: Mapping[str, object], config: ModelConfig) -> np.ndarray | None:
    """M-RoPE axes of a model type, from the text model's metadata."""
    key = f"{text.get('general.architecture')}.{mrope_sections.KEY}"
    stated = text.get(key)
    stated = stated.tolist()[: 4 if kind in ORDERED else 3] if isinstance(stated, np.ndarray) else None
    return section_axes(kind, stated, config, key)
