"""Listwise reranking (jina-reranker-v3, Wang, Li and Xiao 2025): one prompt has all documents, each ending in a marker token, and the query
last. Scores are cosines of projected hidden states at the markers.

A prompt takes as many documents as fit the context, at most 125. Queries of several prompts are averaged, weighted by the similarity of
their best document, so a score depends on the other documents; the model was trained so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ... import UsageError
from ...kernels.reference import normalise
from ..engine import Engine
from ..events import Progress, Yield
from ..tokenizer import Tokenizer
from .embedding import demand_room, dense_layers_of, prefill_texts
from .prompt_segments import Segment, encode_segments

ENDS_DOCUMENT, ENDS_QUERY = "<|embed_token|>", "<|rerank_token|>"
MOST = 125  # documents of a text
# The model's own prompt, which is part of its format as a chat template would be: it was trained on these words, and no file has them.
SYSTEM = ("<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on how relevant they "
          "are to the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If not, "
          "try to analyze the intent of the query and assess how well each passage satisfies the intent. If an instruction is provided, "
          "you should follow the instruction when determining the ranking.<|im_end|>\n<|im_start|>user\n")
TASK = ("I will provide you with {} passages, each indicated by a numerical identifier. "
        "Rank the passages based on their relevance to query: ")
ANSWER = "\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class ListwiseReranker:
    """The marker tokens after a document and after the query."""

    document: int
    query: int
    tokenizer: Tokenizer

    def prompts(self, query: str, documents: Sequence[str], instruction: str | None, room: int) -> Iterator[list[int]]:
        """Token ids of each text, which has as many of the documents, in order, as a context of `room` tokens holds. Raises
        ContextOverflow for one that has no room by itself."""
        around, with_one = (len(self._asked(query, each, instruction)) for each in ((), ("",)))
        sizes = [len(self.tokenizer.encode(each, False)) + with_one - around for each in documents]
        done = 0
        while done < len(documents):
            count, tokens = 1, around + sizes[done]
            while count < MOST and done + count < len(documents) and tokens + sizes[done + count] <= room:
                tokens += sizes[done + count]
                count += 1
            ids = self._asked(query, documents[done : done + count], instruction)
            while len(ids) > room and count > 1:  # numbers grow, and what stands together may be cut otherwise
                count -= 1
                ids = self._asked(query, documents[done : done + count], instruction)
            demand_room(ids, room)
            yield ids
            done += count

    def _asked(self, query: str, documents: Sequence[str], instruction: str | None) -> list[int]:
        parts: list[Segment] = [(SYSTEM + TASK.format(len(documents)), False), (query, True), ("\n", False)]
        if instruction:
            parts += [("<instruct>\n", False), (instruction, True), ("\n</instruct>\n", False)]
        for number, document in enumerate(documents):
            parts += [(f'<passage id="{number}">\n', False), (document, True), (f"{ENDS_DOCUMENT}\n</passage>\n", False)]
        parts += [("<query>\n", False), (query, True), (ENDS_QUERY + ANSWER, False)]
        return encode_segments(parts, self.tokenizer)

    def scores(self, engine: Engine, texts: Sequence[Sequence[int]],
               cancelled: Callable[[], bool]) -> Generator[Yield | Progress, None, list[float] | None]:
        """Cosine of each document with the query, -1 to 1; None if cancelled. The engine's sequence is dropped. Raises EffllmError for
        NaN."""
        norm, dense = engine.model.read_norm(), dense_layers_of(engine)
        marks = [np.isin(ids, (self.document, self.query)) for ids in texts]
        found: list[list[np.ndarray]] = [[] for _ in texts]
        read = [0] * len(texts)

        def see(place: int, states: np.ndarray, _: bool) -> None:
            own = states[marks[place][read[place] : read[place] + len(states)]]
            read[place] += len(states)
            engine.demand_finite(own)
            for row in normalise(own, norm.kind, norm.weight, norm.bias, norm.eps):
                for each in dense:
                    row = each(row)
                found[place].append(row)

        if not (yield from prefill_texts(engine, texts, "ranking", cancelled, see)):
            return None
        documents = [np.stack(each[:-1]).astype(np.float64) for each in found]
        queries = [each[-1].astype(np.float64) for each in found]
        weights = [(1 + _cosines(*each).max()) / 2 for each in zip(documents, queries, strict=True)]
        query = np.average(queries, axis=0, weights=weights) if sum(weights) else queries[0]
        return _cosines(np.concatenate(documents), query).tolist()


def _cosines(documents: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Cosines of rows [n, D] with a vector [D]; 0 for zero vectors."""
    lengths = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
    return documents @ query / np.where(lengths, lengths, 1)


def listwise_of(tokenizer: Tokenizer) -> ListwiseReranker:
    """The reranker of a model with such a projector. Raises UsageError if the vocabulary lacks the markers."""
    added = tokenizer.added
    if ENDS_DOCUMENT not in added or ENDS_QUERY not in added:
        raise UsageError(f"this model ranks documents by the tokens {ENDS_DOCUMENT} and {ENDS_QUERY}, which its tokenizer does not have",
                         "its files belong to different models: download it again")
    return ListwiseReranker(added[ENDS_DOCUMENT], added[ENDS_QUERY], tokenizer)
