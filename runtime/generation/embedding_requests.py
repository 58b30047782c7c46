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

Made = TypeVar("Made")


def never() -> bool:
    return False


def known(ids: Sequence[int], rows: int) -> list[int]:
    """Token ids sent by a client. Raises UsageError for an id outside a vocabulary of `rows`."""
    if bad := [token for token in ids if not 0 <= token < rows]:
        raise UsageError(f"token id {bad[0]} is outside the vocabulary of {rows}", "send ids of this model's tokenizer")
    return list(ids)


class EmbeddingRequests:
    """Mixin of `ServedModel`: embeddings and rerank scores."""

    engine: Engine
    tokenizer: Tokenizer
    usual: AdapterScales
    slot_for: Callable[[str | list[int], AdapterScales], AbstractContextManager[Slot]]
    demand_known: Callable[[Sequence[int]], list[int]]

    @property
    def config(self) -> ModelConfig:
        return self.engine.config

    @property
    def n_ctx(self) -> int:
        return self.engine.n_ctx

    @property
    def adapted(self) -> LoadedAdapters:
        """The LoRA adapters of the run."""
        return self.engine.prepared.adapters

    def embed(self, texts: Sequence[str | Sequence[int]], cut: bool = False, cancelled: Callable[[], bool] = never,
              choice: AdapterScales | None = None, prompt_name: str | None = None) -> Iterator[Event]:
        """One vector per text, after the prompt of that name or the model's default one; token ids are taken as they are. With `cut`, a
        text longer than the context loses its end, except for EOS. `choice`: adapter scales. Raises EffllmError for a model that is no
        embedding model, or for texts that have no vector."""
        from .embedding import demand_room, vectors

        pooling, room, before = self._pooling, self.engine.n_ctx, self.embedding_prompts.before(prompt_name)
        dense = self._dense
        rows: list[list[int]] = []
        for text in texts:  # all of them before the first costs a pass, and what the cache holds
            ids = self._ended(before + text) if isinstance(text, str) else self.demand_known(text)
            if cut and len(ids) > room:
                yield Notice(f"a text of {len(ids)} tokens is cut: the context is {room} tokens (-c)")
                ends = self._ends if isinstance(text, str) else []
                ids = ids[: room - len(ends)] + ends
            demand_room(ids, room)
            rows.append(ids)
            if cancelled():
                return
            yield Yield()
        made = yield from self._each(choice, lambda engine: vectors(engine, rows, pooling, cancelled, dense))
        if made is not None:
            yield Embedded(made, sum(map(len, rows)))

    def rank(self, query: str, documents: Sequence[str], instruction: str | None = None, cancelled: Callable[[], bool] = never,
             choice: AdapterScales | None = None) -> Iterator[Event]:
        """Relevance of each document to the query, optionally under an `instruction`. Raises EffllmError for a model that is no
        reranker."""
        ranking, rows = self.ranking, []
        for ids in ranking.prompts(query, documents, instruction, self.engine.n_ctx):
            rows.append(ids)
            if cancelled():
                return
            yield Yield()
        made = yield from self._each(choice, lambda engine: ranking.scores(engine, rows, cancelled))
        if made is not None:
            yield Ranked(made, sum(map(len, rows)))

    def _each(self, choice: AdapterScales | None,
              read: Callable[[Engine], Generator[Event, None, Made | None]]) -> Generator[Event, None, Made | None]:
        """Run `read` on one slot; None if cancelled."""
        choice = self.usual if choice is None else choice
        with self.slot_for([], choice) as own:
            if own.kept is not None:
                yield from own.kept.switch_to(None, [], own.prompts, choice=choice)  # keeps what is lost here
            own.engine.choose(choice)
            own.prompts.held, own.prompt = ("", []), 0
            return (yield from read(own.engine))

    @cached_property
    def ranking(self) -> Reranker | ListwiseReranker:
        """The reranker. Raises UsageError for a model that is none."""
        if self.config.listwise_reranker:
            from .listwise_reranker import listwise_of

            return listwise_of(self.tokenizer)
        from .reranker import ranking_of

        return ranking_of(self.engine.prepared.folder, self.tokenizer)

    @cached_property
    def embedding_prompts(self) -> EmbeddingPrompts:
        """The prompts (instruction prefixes) that the model was trained with."""
        from .embedding_prompts import prompts_of

        return prompts_of(self.engine.prepared.folder)

    @property
    def vector_width(self) -> int:
        """The embedding dimension."""
        return len(self._dense[-1].matrix) if self._dense else self.engine.config.hidden_size

    @cached_property
    def _dense(self) -> tuple[Dense, ...]:
        from .embedding import dense_layers_of

        return dense_layers_of(self.engine)

    @cached_property
    def _pooling(self) -> str:
        from .embedding import pooling_of

        return pooling_of(self.engine.prepared.folder)

    @cached_property
    def _ends(self) -> list[int]:
        from .embedding import ending

        return ending(self.engine.prepared.folder, self.tokenizer)

    def _ended(self, text: str) -> list[int]:
        """Token ids of a text, with EOS where the model expects one."""
        ids = self.tokenizer.encode(text)
        return ids if ids[-1:] == self._ends else ids + self._ends
