"""An encoder behind an API: embeddings and rerank scores, with the same methods as `EmbeddingRequests`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from ... import UsageError
from ..adapters.loaded_adapters import NO_ADAPTERS
from ..encoders.encoder import Encoder
from ..encoders.encoder_config import EncoderConfig
from ..events import Embedded, Event, Notice, Ranked, Yield
from .embedding import check_length, normalized
from .embedding_prompts import EmbeddingPrompts, read_embedding_prompts
from .embedding_requests import check_token_ids, never

if TYPE_CHECKING:
    from ..adapters.adapter_selection import AdapterScales

TOO_LONG_HINT = "shorten it: this is what the model takes"
NO_INSTRUCTION = "this model does not take an instruction"


class ServedEncoder:
    """One encoder, without adapters or images."""

    adapters, default_scales, accepts_images, accepts_audio = NO_ADAPTERS, (), False, False

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.tokenizer = encoder, encoder.tokenizer

    @property
    def config(self) -> EncoderConfig:
        return self.encoder.config

    @property
    def n_ctx(self) -> int:
        return self.encoder.n_ctx

    @property
    def vector_width(self) -> int:
        """The embedding dimension."""
        return self.encoder.width

    @cached_property
    def embedding_prompts(self) -> EmbeddingPrompts:
        """The prompts (instruction prefixes) that the model was trained with."""
        found = read_embedding_prompts(self.encoder.folder)
        return replace(found, prefixes={**dict(self.config.tasks), **found.prefixes})

    @property
    def reranker(self) -> None:
        """Raises UsageError for a model that is no reranker."""
        self.encoder.require_ranking()

    def embed(self, texts: Sequence[str | Sequence[int]], truncate: bool = False, cancelled: Callable[[], bool] = never,
              choice: AdapterScales | None = None, prompt_name: str | None = None) -> Iterator[Event]:
        """One vector of length 1 per text, after the prompt of that name or the model's default one; token ids are taken as they are.

        A prompt name that is one of the model's tasks selects the task's adapter too. `truncate`: a text longer than the model takes loses
        its end, except for the final special token. Raises EffllmError for a model that is no embedding model, or for texts that have no
        vector.
        """
        self.encoder.require_embeddings()
        rows, prefix = [], self.embedding_prompts.prefix(prompt_name)
        for text in texts:
            ids = self.tokenizer.encode(prefix + text) if isinstance(text, str) else check_token_ids(text, self.config.vocab_size)
            if truncate and len(ids) > self.n_ctx:
                yield Notice(f"a text of {len(ids)} tokens is cut: the model takes {self.n_ctx} at most")
                suffix = ids[-1:] if isinstance(text, str) else []
                ids = ids[: self.n_ctx - len(suffix)] + suffix
            check_length(ids, self.n_ctx, TOO_LONG_HINT)
            rows.append(ids)
            if cancelled():
                return
            yield Yield()
        vectors = yield from self.encoder.vectors(rows, cancelled, prompt_name or self.embedding_prompts.default_name)
        if vectors is not None:
            yield Embedded([normalized(each) for each in vectors], sum(map(len, rows)))

    def rank(self, query: str, documents: Sequence[str], instruction: str | None = None, cancelled: Callable[[], bool] = never,
             choice: AdapterScales | None = None) -> Iterator[Event]:
        """Relevance of each document to the query, 0 to 1. Special tokens written in them are plain text.

        Raises EffllmError for a model that is no reranker, and for a pair that is too long.
        """
        self.encoder.require_ranking()
        if instruction is not None:
            raise UsageError(NO_INSTRUCTION, "leave it out")
        rows, segment_rows, plain_tokenizer = [], [], self.tokenizer.without_special_tokens
        for document in documents:
            ids, segments = plain_tokenizer.encode_pair(query, document)
            check_length(ids, self.n_ctx, TOO_LONG_HINT)
            rows.append(ids)
            segment_rows.append(segments)
            if cancelled():
                return
            yield Yield()
        scores = yield from self.encoder.scores(rows, segment_rows, cancelled)
        if scores is not None:
            yield Ranked(scores, sum(map(len, rows)))
