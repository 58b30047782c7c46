"""Prompts of embedding models: instruction prefixes such as `task: search result | query: `, by name.

They come from sentence-transformers' `config_sentence_transformers.json`; one may be the default. Models that exclude the prompt from mean
pooling are refused when a prompt would apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ... import UsageError
from ...offload.safetensors_header import is_gguf
from ..config_reader import ConfigError, show
from ..hub import POOLING, POOLING_KEPT, PROMPTS
from .embedding import read_json

# Names of the prompts for queries and for documents, by preference.
QUERY_NAMES, DOCUMENT_NAMES = ("query", "retrieval.query"), ("document", "passage", "corpus", "retrieval.passage")


@dataclass(frozen=True)
class EmbeddingPrompts:
    """Prefixes of texts, by name."""

    prefixes: Mapping[str, str] = field(default_factory=dict)
    default_name: str | None = None  # applies where a request names none
    excluded_from_pooling: bool = False  # the model excludes the prefix from mean pooling

    def prefix(self, name: str | None) -> str:
        """The prefix for a prompt name, None for the default. Raises UsageError for an unknown name."""
        name = self.default_name if name is None else name
        if name is not None and name not in self.prefixes:
            names = ", ".join(map(repr, self.prefixes))
            raise UsageError(f"this model has no prompt {show(name)}",
                             f"it has {names}" if names else "its files name none: put any prefix into the text itself")
        prompt = "" if name is None else self.prefixes[name]
        if prompt and self.excluded_from_pooling:
            raise UsageError(f"this model's prompt {show(name)} is excluded from pooling, which is not supported",
                             "put it into the text, where it is pooled")
        return prompt

    @property
    def query(self) -> str | None:
        """Name of the prompt for queries, the default if there is none."""
        return next((name for name in QUERY_NAMES if name in self.prefixes), self.default_name)

    @property
    def document(self) -> str | None:
        """Name of the prompt for documents, the default if there is none."""
        return next((name for name in DOCUMENT_NAMES if name in self.prefixes), self.default_name)


def read_embedding_prompts(path: Path | None) -> EmbeddingPrompts:
    """The prompts of the model at `path`; GGUF files have none. Raises ConfigError."""
    if path is None or is_gguf(path) or (config := read_json(path / PROMPTS)) is None:
        return EmbeddingPrompts()
    prefixes, default_name = (config.get("prompts") or {}, config.get("default_prompt_name")) if isinstance(config, dict) else (None, None)
    is_valid = isinstance(prefixes, dict) and all(isinstance(prefix, str) for prefix in prefixes.values())
    if not is_valid or default_name is not None and not (isinstance(default_name, str) and default_name in prefixes):
        raise ConfigError(f"{path / PROMPTS}: prompts are texts by name, and default_prompt_name is one of the names")
    pooling = next((found for name in (POOLING, POOLING_KEPT) if (found := read_json(path / name)) is not None), None)
    return EmbeddingPrompts(prefixes, default_name, isinstance(pooling, dict) and pooling.get("include_prompt") is False)
