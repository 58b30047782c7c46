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
from .embedding import demand_room, normalized
from .embedding_prompts import EmbeddingPrompts, prompts_of
from .embedding_requests import known, never

if TYPE_CHECKING:
    from ..adapters.adapter_selection import AdapterScales

LONGER = "shorten it: this is what the model takes"
NO_INSTRUCTION = "this model does not take an instruction"


class ServedEncoder:
    """One encoder, without adapters or images."""

    adapted, usual, sees, hears = NO_ADAPTERS, (), False, False

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
        found = prompts_of(self.encoder.folder)
        return replace(found, named={**dict(self.config.tasks), **found.named})

    @property
    def ranking(self) -> None:
        """Raises UsageError for a model that is no reranker."""
        self.encoder.demand_ranking()

    def embed(self, texts: Sequence[str | Sequence[int]], cut: bool = False, cancelled: Callable[[], bool] = never,
              choice: AdapterScales | None = None, prompt_name: str | None = None) -> Iterator[Event]:
        """One vector of each text, behind the prompt of that name or the model's usual one, or of token ids as they stand, of length 1; a
        prompt that is called as a task of the model's has its adapter with it. Of
        a text that is longer than the model takes, its end is left out with `cut`, but for the token that ends every text. Raises
        EffllmError where the model makes none, or of these none."""
        self.encoder.demand_vectors()
        rows, before = [], self.embedding_prompts.before(prompt_name)
        for text in texts:
            ids = self.tokenizer.encode(before + text) if isinstance(text, str) else known(text, self.config.vocab_size)
            if cut and len(ids) > self.n_ctx:
                yield Notice(f"a text of {len(ids)} tokens is cut: the model takes {self.n_ctx} at most")
                ends = ids[-1:] if isinstance(text, str) else []
                ids = ids[: self.n_ctx - len(ends)] + ends
            demand_room(ids, self.n_ctx, LONGER)
            rows.append(ids)
            if cancelled():
                return
            yield Yield()
        made = yield from self.encoder.vectors(rows, cancelled, prompt_name or self.embedding_prompts.usual)
        if made is not None:
            yield Embedded([normalized(each) for each in made], sum(map(len, rows)))

    def rank(self, query: str, documents: Sequence[str], instruction: str | None = None, cancelled: Callable[[], bool] = never,
             choice: AdapterScales | None = None) -> Iterator[Event]:
        """How well each document answers a query, 0 to 1. Marks that are written in them are letters. Raises EffllmError where the model
        was not made for it, or one of these has no room."""
        self.encoder.demand_ranking()
        if instruction is not None:
            raise UsageError(NO_INSTRUCTION, "leave it out")
        rows, kinds, letters = [], [], self.tokenizer.of_letters
        for document in documents:
            ids, types = letters.pair(query, document)
            demand_room(ids, self.n_ctx, LONGER)
            rows.append(ids)
            kinds.append(types)
            if cancelled():
                return
            yield Yield()
        made = yield from self.encoder.scores(rows, kinds, cancelled)
        if made is not None:
            yield Ranked(made, sum(map(len, rows)))
