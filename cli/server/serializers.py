"""Serializers of answers: an API's object, or the chunks of its stream; here OpenAI's chat completions and completions.

Reasoning is `reasoning_content`, as with DeepSeek, llama.cpp and vLLM; `timings` are llama.cpp's."""

from __future__ import annotations

import time
import uuid
from typing import Any, Protocol

from ... import __version__
from ...runtime.events import Call, PromptRead, Stats, TextDelta
from ...runtime.tokenizer import Tokenizer
from .logprobs import LogprobColumns, LogprobList, join_columns
from .problems import Problem
from .tools import CallList

FINGERPRINT = f"effllm-{__version__}"
MS = 1000


class AnswerSerializer(Protocol):
    """Serializes one answer from the events passed to `add`.

    has_event_names: chunks are server-sent events named by their `type`.
    json_lines: chunks are JSON lines.
    is_json_list: chunks are elements of one JSON list.
    terminator: bytes after the last chunk.
    starts_early: the stream begins during prefill, not with the first text.
    has_comments: keep-alives are comments, not chunks.
    """

    has_event_names = json_lines = is_json_list = starts_early = False
    has_comments, terminator = True, b"data: [DONE]\n\n"

    def first_chunks(self) -> list[dict[str, object]]:
        """Chunks before the first text."""
        return []

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        """Add an event; returns its chunks."""

    def keep_alive_chunks(self) -> list[dict[str, object]]:
        """Chunks that keep a waiting stream alive."""
        return []

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        """Chunks after the last text."""

    def whole_answer(self, stats: Stats) -> dict[str, object] | list[dict[str, object]]:
        """The whole answer."""

    def sends_error_event(self, problem: Problem) -> bool:
        """Whether an error before the stream begins is sent as an event instead of an HTTP status."""
        return False

    def error_chunks(self, problem: Problem) -> list[dict[str, object]]:
        """Chunks that end a stream with an error."""
        return [problem.to_json()]

    def worker_lost_chunks(self, problem: Problem) -> list[dict[str, object]]:
        """Chunks that end a stream whose worker was lost."""
        return self.error_chunks(problem)


class CompletionSerializer(AnswerSerializer, Protocol):
    """The base of OpenAI's two formats. Subclasses define the choice of a chunk (`choice_of`), of the last one (`choice_at_end`) and of the
    whole answer (`whole_choice`).

    kind, chunk_kind: `object` of the answer and of its chunks.
    index: number of the answer among several.
    """

    prefix, kind, chunk_kind, index = "", "", "", 0
    null_usage = True  # chunks before the last have `"usage": null`, as OpenAI's do

    def __init__(self, model: str, include_usage: bool = False, tokenizer: Tokenizer | None = None) -> None:
        """With a `tokenizer` log-probabilities are included."""
        self.model, self.include_usage, self.tokenizer = model, include_usage, tokenizer
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.texts: dict[str, str] = {}  # by kind
        self.logprobs: dict[str, list[dict[str, object]]] = {}  # of a chat's tokens, by the name of their field
        self.call_list = CallList()

    def common_fields(self, kind: str) -> dict[str, object]:
        """The fields that an answer and its chunks share; `kind`: the `object` field."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": FINGERPRINT}

    def chunk(self, choice: dict[str, object] | None, **more: object) -> dict[str, object]:
        """A chunk of the stream with one choice, or none."""
        usage = {"usage": None} if self.include_usage and self.null_usage else {}
        choices = [] if choice is None else [{"index": self.index, **choice}]
        return {**self.common_fields(self.chunk_kind), "choices": choices, **usage, **more}

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        if isinstance(event, PromptRead):
            return []
        if isinstance(event, TextDelta):
            self.texts[event.kind] = self.texts.get(event.kind, "") + event.text
        return [self.chunk(self.choice_of(event))]

    def choice_of(self, event: TextDelta | Call) -> dict[str, object]:
        """The choice of a chunk."""

    def choice_at_end(self, stats: Stats) -> dict[str, object]:
        """The choice of the chunk with the finish reason."""

    def whole_choice(self) -> dict[str, object]:
        """The choice of the whole answer."""

    def finish_chunk(self, stats: Stats) -> dict[str, object]:
        """The chunk with the finish reason."""
        return self.chunk(self.choice_at_end(stats), timings=timings(stats))

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        chunks = [self.finish_chunk(stats)]
        return [*chunks, self.chunk(None, usage=usage(stats))] if self.include_usage else chunks

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        choice = {"index": self.index, "logprobs": None, **self.whole_choice(), "finish_reason": self.finish_reason(stats)}
        return {**self.common_fields(self.kind), "choices": [choice], "usage": usage(stats), "timings": timings(stats)}

    def finish_reason(self, stats: Stats) -> str:
        """The finish reason."""
        return "length" if stats.finish_reason != "stop" else "tool_calls" if self.call_list.calls else "stop"


class ChatSerializer(CompletionSerializer):
    """Serializes a chat completion."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, object]]:
        return [self.chunk({"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})]

    def choice_of(self, event: TextDelta | Call) -> dict[str, object]:
        if isinstance(event, Call):
            delta = {"tool_calls": [{"index": len(self.call_list.calls), **self.call_list.add(event)}]}
            return {"delta": delta, "logprobs": None, "finish_reason": None}
        name = "content" if event.kind == "answer" else "reasoning_content"
        return {"delta": {name: event.text}, "logprobs": self._chunk_logprobs(name, event), "finish_reason": None}

    def _chunk_logprobs(self, name: str, event: TextDelta) -> dict[str, object] | None:
        """The log-probabilities of a chunk, recorded for the whole answer."""
        if self.tokenizer is None:
            return None
        logprobs = LogprobList(self.tokenizer).to_json(event.tokens)
        self.logprobs.setdefault(name, []).extend(logprobs)
        return {"content": None, name: logprobs, "refusal": None}

    def choice_at_end(self, stats: Stats) -> dict[str, object]:
        return {"delta": {}, "logprobs": None, "finish_reason": self.finish_reason(stats)}

    def whole_choice(self) -> dict[str, object]:
        texts = self.texts
        reasoning = {"reasoning_content": texts["thinking"]} if texts.get("thinking") else {}
        calls = {"tool_calls": self.call_list.calls} if self.call_list.calls else {}
        content = texts.get("answer", None if calls else "")
        logprobs = None if self.tokenizer is None else {"content": None, **self.logprobs, "refusal": None}
        return {"message": {"role": "assistant", "content": content, **reasoning, **calls}, "logprobs": logprobs}


class TextSerializer(CompletionSerializer):
    """Serializes a text completion."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._columns, self._parts = self.tokenizer and LogprobColumns(self.tokenizer), []

    def choice_of(self, event: TextDelta) -> dict[str, object]:
        logprobs = self._columns and self._columns.to_json(event.tokens, event.text)
        self._parts += [logprobs] if logprobs else []
        return {"text": event.text, "logprobs": logprobs, "finish_reason": None}

    def choice_at_end(self, stats: Stats) -> dict[str, object]:
        return {"text": "", "logprobs": None, "finish_reason": self.finish_reason(stats)}

    def whole_choice(self) -> dict[str, object]:
        return {"text": "".join(self.texts.values()), "logprobs": self._columns and join_columns(self._parts)}


def usage(stats: Stats) -> dict[str, object]:
    """OpenAI's `usage` of an answer."""
    num_tokens = len(stats.token_ids)
    return {"prompt_tokens": stats.prompt_tokens, "completion_tokens": num_tokens, "total_tokens": stats.prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": stats.reasoning_tokens}}


def timings(stats: Stats) -> dict[str, object]:
    """llama-server's `timings` of an answer."""
    num_tokens = len(stats.token_ids)
    return {"cache_n": stats.cached_tokens, "prompt_n": stats.read_tokens, "prompt_ms": stats.prefill_s * MS,
            "prompt_per_token_ms": stats.prefill_s * MS / max(1, stats.read_tokens), "prompt_per_second": stats.prefill_tps,
            "predicted_n": num_tokens, "predicted_ms": stats.decode_s * MS,
            "predicted_per_token_ms": stats.decode_s * MS / max(1, num_tokens), "predicted_per_second": stats.decode_tps}
