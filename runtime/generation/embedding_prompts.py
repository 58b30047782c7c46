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

# What questions and what is searched are called.
QUERY, DOCUMENT = ("query", "retrieval.query"), ("document", "passage", "corpus", "retrieval.passage")


@dataclass(frozen=True)
class EmbeddingPrompts:
    """Prefixes by name. `usual`: the name of the default. `left_out`: excluded from mean pooling."""

    named: Mapping[str, str] = field(default_factory=dict)
    usual: str | None = None
    left_out: bool = False

    def before(self, name: str | None) -> str:
        """The prefix for a prompt name, None for the default. Raises UsageError for an unknown name."""
        name = self.usual if name is None else name
        if name is not None and name not in self.named:
            known = ", ".join(map(repr, self.named))
            raise UsageError(f"this model has no prompt {show(name)}",
                             f"it has {known}" if known else "its files name none: put any prefix into the text itself")
        prompt = "" if name is None else self.named[name]
        if prompt and self.left_out:
            raise UsageError(f"this model's prompt {show(name)} is excluded from pooling, which is not supported",
                             "put it into the text, where it is pooled")
        return prompt

    @property
    def query(self) -> str | None:
        """Name of the prompt for queries, the default if there is none."""
        return next((name for name in QUERY if name in self.named), self.usual)

    @property
    def document(self) -> str | None:
        """Name of the prompt for documents, the default if there is none."""
        return next((name for name in DOCUMENT if name in self.named), self.usual)


def prompts_of(path: Path | None) -> EmbeddingPrompts:
    """The prompts of the model at `path`; GGUF files have none. Raises ConfigError."""
    if path is None or is_gguf(path) or (stated := read_json(path / PROMPTS)) is None:
        return EmbeddingPrompts()
    named, usual = (stated.get("prompts") or {}, stated.get("default_prompt_name")) if isinstance(stated, dict) else (None, None)
    known = isinstance(named, dict) and all(isinstance(each, str) for each in named.values())
    if not known or usual is not None and not (isinstance(usual, str) and usual in named):
        raise ConfigError(f"{path / PROMPTS}: prompts are texts by name, and default_prompt_name is one of the names")
    pooling = next((found for name in (POOLING, POOLING_KEPT) if (found := read_json(path / name)) is not None), None)
    return EmbeddingPrompts(named, usual, isinstance(pooling, dict) and pooling.get("include_prompt") is False)
