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
from ..gguf.architecture import RERANKER_POOLING_TYPE
from ..hub import MODULES, RANKING, RANKING_KEPT
from ..templates.template import TemplateError
from ..tokenizer import Tokenizer
from .embedding import check_length, gguf_value, prefill_texts, read_json
from .prompt_segments import encode_segments

IMPLICIT_MODULES = {"transformer", "logitscore"}  # last words of the types of modules whose work is done here anyway
POOLING_TYPE, LABELS, TEMPLATE = "{}.pooling_type", "{}.classifier.output_labels", "tokenizer.chat_template.rerank"
# Placeholders: rendering the template with these shows where query, document and instruction belong.
QUERY, DOCUMENT, INSTRUCTION = "{query}", "{document}", "{instruction}"
OTHER_MODEL_HINT = "use a reranker, such as qwen3-reranker-0.6b"
NOT_A_RERANKER = "this model is not a reranker: {}"


@dataclass(frozen=True)
class Reranker:
    """A model that judges one document at a time."""

    yes: int  # token id
    no: int  # token id
    tokenizer: Tokenizer
    template: str | None = None  # the rerank template of a GGUF file; None: the chat template has the roles query and document

    def prompt_ids(self, query: str, document: str, instruction: str | None = None) -> list[int]:
        """Token ids of the prompt. Special tokens written in query or document are plain text.

        Raises UsageError for an instruction if the template has no place for one.
        """
        texts = {QUERY: query, DOCUMENT: document, INSTRUCTION: instruction or ""}
        rendered = self._render(None if instruction is None else INSTRUCTION)
        if instruction is not None and INSTRUCTION not in rendered:
            raise UsageError("this model's template does not take an instruction", "leave it out")
        parts = re.split("|".join(f"({re.escape(each)})" for each in texts), rendered)
        return encode_segments([(texts.get(part, part), part in texts) for part in parts if part], self.tokenizer)

    def prompts(self, query: str, documents: Sequence[str], instruction: str | None, n_ctx: int) -> Iterator[list[int]]:
        """`prompt_ids` for each document. Raises ContextOverflow for one that does not fit `n_ctx` tokens."""
        for document in documents:
            ids = self.prompt_ids(query, document, instruction)
            check_length(ids, n_ctx)
            yield ids

    def scores(self, engine: Engine, texts: Sequence[Sequence[int]],
               cancelled: Callable[[], bool]) -> Generator[Yield | Progress, None, list[float] | None]:
        return scores(engine, texts, self, cancelled)

    def _render(self, instruction: str | None) -> str:
        if self.template is not None:
            return self.template
        system_messages = [] if instruction is None else [{"role": "system", "content": instruction}]
        return self.tokenizer.render_chat([*system_messages, {"role": "query", "content": QUERY},
                                           {"role": "document", "content": DOCUMENT}])


def read_reranker(path: Path | None, tokenizer: Tokenizer) -> Reranker:
    """The reranker of the model at `path`. Raises UsageError for a model that is none, or of an unsupported kind."""
    if path is not None and is_gguf(path):
        reranker = _from_gguf(path, tokenizer)
    elif settings := None if path is None else read_json(path / RANKING) or read_json(path / RANKING_KEPT):
        reranker = _from_folder(path, settings, tokenizer)
    else:
        raise UsageError(NOT_A_RERANKER.format("its files state no rerank settings"), OTHER_MODEL_HINT)
    vocab_size = tokenizer.vocab_size
    if any(type(token) is not int or not 0 <= token < vocab_size for token in (reranker.yes, reranker.no)):
        raise UsageError("this model's files do not name the two tokens for reranking", OTHER_MODEL_HINT)
    try:
        rendered = reranker._render(None)
    except TemplateError as error:
        raise UsageError(f"this model's chat template does not take a query and a document: {error.message}", OTHER_MODEL_HINT) from error
    if QUERY not in rendered or DOCUMENT not in rendered:
        raise UsageError("this model's template does not take a query and a document", OTHER_MODEL_HINT)
    return reranker


def _from_folder(path: Path, settings: object, tokenizer: Tokenizer) -> Reranker:
    modules = read_json(path / MODULES)
    for module in modules if isinstance(modules, list) else () if modules is None else (modules,):
        module_type = module.get("type") if isinstance(module, dict) else None
        if not isinstance(module_type, str) or module_type.rpartition(".")[2].lower() not in IMPLICIT_MODULES:
            raise UsageError(f"this model's scores go through a module {show(module_type)}, which is not supported", OTHER_MODEL_HINT)
    token_ids = settings if isinstance(settings, dict) else {}
    return Reranker(token_ids.get("true_token_id"), token_ids.get("false_token_id"), tokenizer)


def _from_gguf(path: Path, tokenizer: Tokenizer) -> Reranker:
    labels, template = gguf_value(path, LABELS), gguf_value(path, TEMPLATE)
    if gguf_value(path, POOLING_TYPE) != RERANKER_POOLING_TYPE or not isinstance(template, str):
        raise UsageError(NOT_A_RERANKER.format("its file states no rerank pooling"), OTHER_MODEL_HINT)
    label_ids = [tokenizer.encode(str(each), False) for each in labels] if isinstance(labels, list) else []
    if [len(each) for each in label_ids] != [1, 1]:
        raise UsageError("this model reranks with a head of its own, which is not supported", OTHER_MODEL_HINT)
    return Reranker(label_ids[0][0], label_ids[1][0], tokenizer, template)


def scores(engine: Engine, texts: Sequence[Sequence[int]], reranker: Reranker,
           cancelled: Callable[[], bool]) -> Generator[Yield | Progress, None, list[float] | None]:
    """P(yes) against P(no) after each text, 0 to 1; None if cancelled. The engine's sequence is dropped. Raises ContextOverflow."""
    for ids in texts:
        check_length(ids, engine.n_ctx)
    margins = [0.0] * len(texts)

    def compare(index: int, states: np.ndarray, is_last: bool) -> None:
        if is_last:
            logits = engine.model.logits(states[-1:])
            engine.require_finite_logits(logits)
            margins[index] = float(logits[0, reranker.yes]) - float(logits[0, reranker.no])

    if not (yield from prefill_texts(engine, texts, "ranking", cancelled, compare, last_states=1)):
        return None
    return [1 / (1 + exp(-each)) if each > -700 else 0.0 for each in margins]  # exp overflows beyond
