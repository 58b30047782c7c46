"""Where a tower's config and weights are: in the model's folder, or in an mmproj file next to a GGUF model (`mmproj.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from ..audio.log_mel import read_extractor
from ..config_reader import Keys, read_model
from .modality import Modality
from .preprocessor import read_films, read_processor
from .tower_weights import Weights, check_has_tower, tower_store


class TowerSource(Protocol):
    """`model`: the folder or GGUF file with the vocabulary, named in errors. `config`: the whole config.json. `without_word`: the hint
    where the vocabulary lacks a required special token."""

    model: Path
    config: Mapping[str, object]
    without_word: str

    def processor(self, known: Sequence[str]) -> tuple[Keys, Keys]:
        """As of `read_processor`."""

    def films(self) -> Keys:
        """The video preprocessor's configuration."""

    def extractor(self, known: Sequence[str], usual: Mapping[str, object] | None = None) -> Keys:
        """As `read_extractor`, for audio."""

    def weights(self) -> Weights:
        """A newly opened store; the caller closes it."""

    def saying(self) -> AbstractContextManager[None]:
        """Context in which config errors name the file that they come from."""


class FolderSource:
    """A model folder. Raises UsageError for one without the tower."""

    without_word = "fetch its tokenizer.json again"

    def __init__(self, folder: Path, modality: Modality) -> None:
        check_has_tower(folder, modality)
        self.model, self.config, self.modality = folder, read_model(folder), modality

    def processor(self, known: Sequence[str]) -> tuple[Keys, Keys]:
        return read_processor(self.model, known)

    def films(self) -> Keys:
        return read_films(self.model)

    def extractor(self, known: Sequence[str], usual: Mapping[str, object] | None = None) -> Keys:
        return read_extractor(self.model, known, usual)

    def weights(self) -> Weights:
        return Weights(tower_store(self.model), "config.json", self.modality)

    def saying(self) -> AbstractContextManager[None]:
        return nullcontext()
