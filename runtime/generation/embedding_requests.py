"""Embedding and rerank requests of a served causal model. Each text is prefilled from an empty cache, short ones batched; the slot's
previous sequence is saved as for any other request."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from ... import UsageError
from ..adapters.loaded_adapters import LoadedAdapters
from ..config import ModelConfig
from ..engine import Engine
from ..events import Embedded, Event, Notice, Ranked, Yield
from ..tokenizer import Tokenizer
from .slot import Slot

if TYPE_CHECKING:
    from ..adapters.adapter_selection import AdapterScales
    from .dense import Dense
    from .embedding_prompts import EmbeddingPrompts
    from .listwise_reranker import ListwiseReranker
    from .reranker import Reranker

Result = TypeVar("Result")


def never() -> bool:
    return False


def check_token_ids(ids: Sequence[int], rows: int) -> list[int]:
    """Token ids sent by a client. Raises UsageError for an id outside a vocabulary of `rows`."""
    if bad := [token for token in ids if not 0 <= token < rows]:
        raise UsageError(f"token id {bad[0]} is outside the vocabulary of {rows}", "send ids of this model's tokenizer")
    return list(ids)


class EmbeddingRequests:
    """Mixin of `ServedModel`: embeddings and rerank scores."""

    engine: Engine
    tokenizer: Tokenizer
    default_scales: AdapterScales
    acquire_slot: Callable[[str | list[int], AdapterScales], AbstractContextManager[Slot]]
    check_token_ids: Callable[[Sequence[int]], list[int]]

    @property
    def config(self) -> ModelConfig:
        return self.engine.config

    @property
    def n_ctx(self) -> int:
        return self.engine.n_ctx

    @property
    def adapters(self) -> LoadedAdapters:
        """The LoRA adapters of the run."""
        return self.engine.prepared.adapters

    def embed(self, texts: Sequence[str | Sequence[int]], truncate: bool = False, cancelled: Callable[[], bool] = never,
              choice: AdapterScales | None = None, prompt_name: str | None = None) -> Iterator[Event]:
        """One vector per text, after the prompt of that name or the model's default one; token ids are taken as they are.

        `truncate`: a text longer than the context loses its end, except for EOS. `choice`: adapter scales. Raises EffllmError for a model
        that is no embedding model, or for texts that have no vector.
        """
        from .embedding import check_length, embed_texts

        pooling, n_ctx, prefix = self._pooling, self.engine.n_ctx, self.embedding_prompts.prefix(prompt_name)
        dense = self._dense
        rows: list[list[int]] = []
        for text in texts:  # all are checked before the first pass, which would drop the cached sequence
            ids = self._with_eos(prefix + text) if isinstance(text, str) else self.check_token_ids(text)
            if truncate and len(ids) > n_ctx:
                yield Notice(f"a text of {len(ids)} tokens is cut: the context is {n_ctx} tokens (-c)")
                suffix = self._eos_suffix if isinstance(text, str) else []
                ids = ids[: n_ctx - len(suffix)] + suffix
            check_length(ids, n_ctx)
            rows.append(ids)
            if cancelled():
                return
            yield Yield()
        embeddings = yield from self._run_on_slot(choice, lambda engine: embed_texts(engine, rows, pooling, cancelled, dense))
        if embeddings is not None:
            yield Embedded(embeddings, sum(map(len, rows)))

    def rank(self, query: str, documents: Sequence[str], instruction: str | None = None, cancelled: Callable[[], bool] = never,
             choice: AdapterScales | None = None) -> Iterator[Event]:
        """Relevance of each document to the query, optionally under an `instruction`. Raises EffllmError for a model that is no
        reranker."""
        reranker, rows = self.reranker, []
        for ids in reranker.prompts(query, documents, instruction, self.engine.n_ctx):
            rows.append(ids)
            if cancelled():
                return
            yield Yield()
        scores = yield from self._run_on_slot(choice, lambda engine: reranker.scores(engine, rows, cancelled))
        if scores is not None:
            yield Ranked(scores, sum(map(len, rows)))

    def _run_on_slot(self, choice: AdapterScales | None,
              read: Callable[[Engine], Generator[Event, None, Result | None]]) -> Generator[Event, None, Result | None]:
        """Run `read` on one slot; None if cancelled."""
        choice = self.default_scales if choice is None else choice
        with self.acquire_slot([], choice) as slot:
            if slot.prompt_cache is not None:
                yield from slot.prompt_cache.switch_to(None, [], slot.prompts, choice=choice)  # saves the sequence that is dropped here
            slot.engine.choose(choice)
            slot.prompts.cached, slot.prompt_tokens = ("", []), 0
            return (yield from read(slot.engine))

    @cached_property
    def reranker(self) -> Reranker | ListwiseReranker:
        """The reranker. Raises UsageError for a model that is none."""
        if self.config.listwise_reranker:
            from .listwise_reranker import read_listwise_reranker

            return read_listwise_reranker(self.tokenizer)
        from .reranker import read_reranker

        return read_reranker(self.engine.prepared.folder, self.tokenizer)

    @cached_property
    def embedding_prompts(self) -> EmbeddingPrompts:
        """The prompts (instruction prefixes) that the model was trained with."""
        from .embedding_prompts import read_embedding_prompts

        return read_embedding_prompts(self.engine.prepared.folder)

    @property
    def vector_width(self) -> int:
        """The embedding dimension."""
        return len(self._dense[-1].matrix) if self._dense else self.engine.config.hidden_size

    @cached_property
    def _dense(self) -> tuple[Dense, ...]:
        from .embedding import all_dense_layers

        return all_dense_layers(self.engine)

    @cached_property
    def _pooling(self) -> str:
        from .embedding import read_pooling_mode

        return read_pooling_mode(self.engine.prepared.folder)

    @cached_property
    def _eos_suffix(self) -> list[int]:
        from .embedding import eos_suffix

        return eos_suffix(self.engine.prepared.folder, self.tokenizer)

    def _with_eos(self, text: str) -> list[int]:
        """Token ids of a text, with EOS where the model expects one."""
        ids = self.tokenizer.encode(text)
        return ids if ids[-1:] == self._eos_suffix else ids + self._eos_suffix
