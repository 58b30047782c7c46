"""Where a tower is described, and where its weights lie: in the folder of a model, or in a file of their own beside a GGUF file
(`mmproj.py`)."""

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
    """`model`: the folder or the GGUF file with the vocabulary, which errors name. `config`: what config.json says of all parts.
    `without_word`: what helps where the vocabulary lacks a word that pictures need."""

    model: Path
    config: Mapping[str, object]
    without_word: str

    def processor(self, known: Sequence[str]) -> tuple[Keys, Keys]:
        """As of `read_processor`."""

    def films(self) -> Keys:
        """What is said of videos alone."""

    def extractor(self, known: Sequence[str], usual: Mapping[str, object] | None = None) -> Keys:
        """As of `read_extractor`, of sounds."""

    def weights(self) -> Weights:
        """Opened anew; whoever asks closes them."""

    def saying(self) -> AbstractContextManager[None]:
        """In which errors of what is described name the file that says it."""


class FolderSource:
    """Of a folder, and of what it sees or hears with. Raises UsageError for one that holds the text part alone."""

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
