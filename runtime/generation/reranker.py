"""Pointwise reranking by causal models: the prompt asks whether a document answers the query, and the score is P(yes) against P(no).

The two tokens come from sentence-transformers' `modules.json` and `1_LogitScore/config.json` (kept as `ranking.json` in folders that effllm
made), and the chat template knows the roles query and document. A GGUF file has a rerank template and two labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

import numpy as np

from ... import UsageError
from ...offload.safetensors_header import is_gguf
from ..config_reader import show
from ..engine import Engine
from ..events import Progress, Yield
from ..gguf.architecture import RANK
from ..hub import MODULES, RANKING, RANKING_KEPT
from ..templates.template import TemplateError
from ..tokenizer import Tokenizer
from .embedding import demand_room, prefill_texts, read_json, stated_in
from .prompt_segments import encode_segments

USUAL = {"transformer", "logitscore"}  # modules that do what is done here, by the last word of their type
POOLING_TYPE, LABELS, TEMPLATE = "{}.pooling_type", "{}.classifier.output_labels", "tokenizer.chat_template.rerank"
# What stands in a prompt for what is asked about, while it is looked at where that comes.
QUERY, DOCUMENT, INSTRUCTION = "{query}", "{document}", "{instruction}"
OTHERS = "use a reranker, such as qwen3-reranker-0.6b"
NOT_MADE = "this model is not a reranker: {}"


@dataclass(frozen=True)
class Reranker:
    """The yes and no tokens, and a GGUF file's rerank `template`, None for the chat template's roles."""

    yes: int
    no: int
    tokenizer: Tokenizer
    template: str | None = None

    def asked(self, query: str, document: str, instruction: str | None = None) -> list[int]:
        """Token ids of the prompt. Special tokens written in query or document are plain text. Raises UsageError for an instruction that
        the model has no place for."""
        texts = {QUERY: query, DOCUMENT: document, INSTRUCTION: instruction or ""}
        framed = self._framed(None if instruction is None else INSTRUCTION)
        if instruction is not None and INSTRUCTION not in framed:
            raise UsageError("this model's template does not take an instruction", "leave it out")
        parts = re.split("|".join(f"({re.escape(each)})" for each in texts), framed)
        return encode_segments([(texts.get(part, part), part in texts) for part in parts if part], self.tokenizer)

    def prompts(self, query: str, documents: Sequence[str], instruction: str | None, room: int) -> Iterator[list[int]]:
        """`asked` for each document. Raises ContextOverflow for one that does not fit `room` tokens."""
        for document in documents:
            ids = self.asked(query, document, instruction)
            demand_room(ids, room)
            yield ids

    def scores(self, engine: Engine, texts: Sequence[Sequence[int]],
               cancelled: Callable[[], bool]) -> Generator[Yield | Progress, None, list[float] | None]:
        return scores(engine, texts, self, cancelled)

    def _framed(self, instruction: str | None) -> str:
        if self.template is not None:
            return self.template
        said = [] if instruction is None else [{"role": "system", "content": instruction}]
        return self.tokenizer.render_chat([*said, {"role": "query", "content": QUERY}, {"role": "document", "content": DOCUMENT}])


def ranking_of(path: Path | None, tokenizer: Tokenizer) -> Reranker:
    """The reranker of the model at `path`. Raises UsageError for a model that is none, or of an unsupported kind."""
    if path is not None and is_gguf(path):
        found = _of_gguf(path, tokenizer)
    elif path is not None and (stated := next((each for name in (RANKING, RANKING_KEPT) if (each := read_json(path / name))), None)):
        found = _of_folder(path, stated, tokenizer)
    else:
        raise UsageError(NOT_MADE.format("its files state no rerank settings"), OTHERS)
    rows = tokenizer.vocab_size
    if any(type(each) is not int or not 0 <= each < rows for each in (found.yes, found.no)):
        raise UsageError("this model's files do not name the two tokens for reranking", OTHERS)
    try:
        framed = found._framed(None)
    except TemplateError as error:
        raise UsageError(f"this model's chat template does not take a query and a document: {error.message}", OTHERS) from error
    if QUERY not in framed or DOCUMENT not in framed:
        raise UsageError("this model's template does not take a query and a document", OTHERS)
    return found


def _of_folder(path: Path, stated: object, tokenizer: Tokenizer) -> Reranker:
    modules = read_json(path / MODULES)
    for module in modules if isinstance(modules, list) else () if modules is None else (modules,):
        kind = module.get("type") if isinstance(module, dict) else None
        if not isinstance(kind, str) or kind.rpartition(".")[2].lower() not in USUAL:
            raise UsageError(f"this model's scores go through a module {show(kind)}, which is not supported", OTHERS)
    words = stated if isinstance(stated, dict) else {}
    return Reranker(words.get("true_token_id"), words.get("false_token_id"), tokenizer)


def _of_gguf(path: Path, tokenizer: Tokenizer) -> Reranker:
    labels, template = stated_in(path, LABELS), stated_in(path, TEMPLATE)
    if stated_in(path, POOLING_TYPE) != RANK or not isinstance(template, str):
        raise UsageError(NOT_MADE.format("its file states no rerank pooling"), OTHERS)
    words = [tokenizer.encode(str(each), False) for each in labels] if isinstance(labels, list) else []
    if [len(each) for each in words] != [1, 1]:
        raise UsageError("this model reranks with a head of its own, which is not supported", OTHERS)
    return Reranker(words[0][0], words[1][0], tokenizer, template)


def scores(engine: Engine, texts: Sequence[Sequence[int]], ranking: Reranker,
           cancelled: Callable[[], bool]) -> Generator[Yield | Progress, None, list[float] | None]:
    """P(yes) against P(no) after each text, 0 to 1; None if cancelled. The engine's sequence is dropped. Raises ContextOverflow."""
    for ids in texts:
        demand_room(ids, engine.n_ctx)
    found = [0.0] * len(texts)

    def compare(place: int, states: np.ndarray, is_last: bool) -> None:
        if is_last:
            logits = engine.model.logits(states[-1:])
            engine.demand_finite(logits)
            found[place] = float(logits[0, ranking.yes]) - float(logits[0, ranking.no])

    if not (yield from prefill_texts(engine, texts, "ranking", cancelled, compare, wanted=1)):
        return None
    return [1 / (1 + exp(-each)) if each > -700 else 0.0 for each in found]  # beyond which exp has no number
