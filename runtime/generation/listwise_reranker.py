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
from .embedding import all_dense_layers, check_length, prefill_texts
from .prompt_segments import Segment, encode_segments

DOCUMENT_MARKER, QUERY_MARKER = "<|embed_token|>", "<|rerank_token|>"
MAX_DOCUMENTS = 125  # of one prompt
# The prompt that the model was trained with; no file of the model has it.
SYSTEM = ("<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on how relevant they "
          "are to the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If not, "
          "try to analyze the intent of the query and assess how well each passage satisfies the intent. If an instruction is provided, "
          "you should follow the instruction when determining the ranking.<|im_end|>\n<|im_start|>user\n")
TASK = ("I will provide you with {} passages, each indicated by a numerical identifier. "
        "Rank the passages based on their relevance to query: ")
ANSWER = "\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class ListwiseReranker:
    """A model that ranks all documents of a prompt against each other."""

    document_marker: int  # id of the token after a document
    query_marker: int  # id of the token after the query
    tokenizer: Tokenizer

    def prompts(self, query: str, documents: Sequence[str], instruction: str | None, n_ctx: int) -> Iterator[list[int]]:
        """Token ids of each prompt, which has as many of the documents, in order, as fit a context of `n_ctx` tokens.

        Raises ContextOverflow for a document that does not fit even alone.
        """
        frame_tokens, one_empty = (len(self._prompt_ids(query, each, instruction)) for each in ((), ("",)))
        sizes = [len(self.tokenizer.encode(each, False)) + one_empty - frame_tokens for each in documents]
        first = 0
        while first < len(documents):
            count, tokens = 1, frame_tokens + sizes[first]
            while count < MAX_DOCUMENTS and first + count < len(documents) and tokens + sizes[first + count] <= n_ctx:
                tokens += sizes[first + count]
                count += 1
            ids = self._prompt_ids(query, documents[first : first + count], instruction)
            while len(ids) > n_ctx and count > 1:  # the sum of parts is an estimate: ids get longer, and texts may merge differently
                count -= 1
                ids = self._prompt_ids(query, documents[first : first + count], instruction)
            check_length(ids, n_ctx)
            yield ids
            first += count

    def _prompt_ids(self, query: str, documents: Sequence[str], instruction: str | None) -> list[int]:
        parts: list[Segment] = [(SYSTEM + TASK.format(len(documents)), False), (query, True), ("\n", False)]
        if instruction:
            parts += [("<instruct>\n", False), (instruction, True), ("\n</instruct>\n", False)]
        for number, document in enumerate(documents):
            parts += [(f'<passage id="{number}">\n', False), (document, True), (f"{DOCUMENT_MARKER}\n</passage>\n", False)]
        parts += [("<query>\n", False), (query, True), (QUERY_MARKER + ANSWER, False)]
        return encode_segments(parts, self.tokenizer)

    def scores(self, engine: Engine, texts: Sequence[Sequence[int]],
               cancelled: Callable[[], bool]) -> Generator[Yield | Progress, None, list[float] | None]:
        """Cosine of each document with the query, -1 to 1; None if cancelled. The engine's sequence is dropped. Raises EffllmError for
        NaN."""
        norm, dense = engine.model.read_norm(), all_dense_layers(engine)
        marker_masks = [np.isin(ids, (self.document_marker, self.query_marker)) for ids in texts]
        projected: list[list[np.ndarray]] = [[] for _ in texts]
        read_tokens = [0] * len(texts)

        def on_states(index: int, states: np.ndarray, _: bool) -> None:
            marker_states = states[marker_masks[index][read_tokens[index] : read_tokens[index] + len(states)]]
            read_tokens[index] += len(states)
            engine.require_finite_logits(marker_states)
            for row in normalise(marker_states, norm.kind, norm.weight, norm.bias, norm.eps):
                for layer in dense:
                    row = layer(row)
                projected[index].append(row)

        if not (yield from prefill_texts(engine, texts, "ranking", cancelled, on_states)):
            return None
        documents = [np.stack(part[:-1]).astype(np.float64) for part in projected]
        queries = [part[-1].astype(np.float64) for part in projected]
        weights = [(1 + _cosines(*part).max()) / 2 for part in zip(documents, queries, strict=True)]
        query = np.average(queries, axis=0, weights=weights) if sum(weights) else queries[0]
        return _cosines(np.concatenate(documents), query).tolist()


def _cosines(documents: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Cosines of rows [n, D] with a vector [D]; 0 for zero vectors."""
    lengths = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
    return documents @ query / np.where(lengths, lengths, 1)


def read_listwise_reranker(tokenizer: Tokenizer) -> ListwiseReranker:
    """The reranker of a model with such a projector. Raises UsageError if the vocabulary lacks the markers."""
    added = tokenizer.added
    if DOCUMENT_MARKER not in added or QUERY_MARKER not in added:
        raise UsageError(f"this model ranks documents by the tokens {DOCUMENT_MARKER} and {QUERY_MARKER}, "
                         "which its tokenizer does not have",
                         "its files belong to different models: download it again")
    return ListwiseReranker(added[DOCUMENT_MARKER], added[QUERY_MARKER], tokenizer)
