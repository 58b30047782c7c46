"""Serializers of answers: an API's object, or the chunks of its stream; here OpenAI's chat completions and completions.

Reasoning is `reasoning_content`, as with DeepSeek, llama.cpp and vLLM; `timings` are llama.cpp's."""

from __future__ import annotations

import time
import uuid
from typing import Any, Protocol

from ... import __version__
from ...runtime.events import Call, PromptRead, Stats, TextDelta
from ...runtime.tokenizer import Tokenizer
from .logprobs import LogprobColumns, LogprobList, joined
from .problems import Problem
from .tools import CallList

FINGERPRINT = f"effllm-{__version__}"
MS = 1000


class AnswerSerializer(Protocol):
    """Serializes one answer, whose events it gets by `add`. `named`: chunks are server-sent events named by their `type`; `by_line`: JSON
    lines; `in_list`: elements of one list; `ending`: bytes after the last chunk; `early`: the stream begins while the prompt is read, not
    with the first text; `has_comments`: keep-alives are comments, not chunks."""

    named, by_line, in_list, ending, early, has_comments = False, False, False, b"data: [DONE]\n\n", False, True

    def first(self) -> list[dict[str, object]]:
        """Chunks before the first text."""
        return []

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        """Add an event; returns its chunks."""

    def waiting(self) -> list[dict[str, object]]:
        """Chunks that keep a waiting stream alive."""
        return []

    def last(self, stats: Stats) -> list[dict[str, object]]:
        """Chunks after the last text."""

    def whole(self, stats: Stats) -> dict[str, object] | list[dict[str, object]]:
        """The whole answer."""

    def tells(self, problem: Problem) -> bool:
        """Whether an error before the stream begins is sent as an event instead of an HTTP status."""
        return False

    def failed(self, problem: Problem) -> list[dict[str, object]]:
        """Chunks that end a stream with an error."""
        return [problem.to_json()]

    def broken_off(self, problem: Problem) -> list[dict[str, object]]:
        """Chunks that end a stream which a worker began and did not end."""
        return self.failed(problem)


class CompletionSerializer(AnswerSerializer, Protocol):
    """The base of OpenAI's two formats: `kind` and `chunk_kind` name the objects; subclasses define the choice of a chunk (`choice_of`), of
    the last one (`choice_at_end`) and of the whole (`whole_choice`). `index`: which of several answers it is."""

    prefix, kind, chunk_kind, index = "", "", "", 0
    says_none = True  # whether chunks before the last have a null usage, as OpenAI's do

    def __init__(self, model: str, include_usage: bool = False, tokenizer: Tokenizer | None = None) -> None:
        """With a `tokenizer` log-probabilities are included."""
        self.model, self.include_usage, self.tokenizer = model, include_usage, tokenizer
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.texts: dict[str, str] = {}  # by kind
        self.told: dict[str, list[dict[str, object]]] = {}  # of a chat's tokens, by the name of their text
        self.calls = CallList()

    def head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": FINGERPRINT}

    def chunk(self, choice: dict[str, object] | None, **more: object) -> dict[str, object]:
        """A chunk of the stream with one choice, or none."""
        usage = {"usage": None} if self.include_usage and self.says_none else {}
        return {**self.head(self.chunk_kind), "choices": [] if choice is None else [{"index": self.index, **choice}], **usage, **more}

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

    def end(self, stats: Stats) -> dict[str, object]:
        return self.chunk(self.choice_at_end(stats), timings=timings(stats))

    def last(self, stats: Stats) -> list[dict[str, object]]:
        chunks = [self.end(stats)]
        return [*chunks, self.chunk(None, usage=usage(stats))] if self.include_usage else chunks

    def whole(self, stats: Stats) -> dict[str, object]:
        choice = {"index": self.index, "logprobs": None, **self.whole_choice(), "finish_reason": self.finish(stats)}
        return {**self.head(self.kind), "choices": [choice], "usage": usage(stats), "timings": timings(stats)}

    def finish(self, stats: Stats) -> str:
        """The finish reason."""
        return "length" if stats.finish_reason != "stop" else "tool_calls" if self.calls.made else "stop"


class ChatSerializer(CompletionSerializer):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self) -> list[dict[str, object]]:
        return [self.chunk({"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})]

    def choice_of(self, event: TextDelta | Call) -> dict[str, object]:
        if isinstance(event, Call):
            delta = {"tool_calls": [{"index": len(self.calls.made), **self.calls.add(event)}]}
            return {"delta": delta, "logprobs": None, "finish_reason": None}
        name = "content" if event.kind == "answer" else "reasoning_content"
        return {"delta": {name: event.text}, "logprobs": self._told(name, event), "finish_reason": None}

    def _told(self, name: str, event: TextDelta) -> dict[str, object] | None:
        """The log-probabilities of a chunk, recorded for the whole answer."""
        if self.tokenizer is None:
            return None
        told = LogprobList(self.tokenizer).told(event.tokens)
        self.told.setdefault(name, []).extend(told)
        return {"content": None, name: told, "refusal": None}

    def choice_at_end(self, stats: Stats) -> dict[str, object]:
        return {"delta": {}, "logprobs": None, "finish_reason": self.finish(stats)}

    def whole_choice(self) -> dict[str, object]:
        texts = self.texts
        reasoning = {"reasoning_content": texts["thinking"]} if texts.get("thinking") else {}
        calls = {"tool_calls": self.calls.made} if self.calls.made else {}
        content = texts.get("answer", None if calls else "")
        logprobs = None if self.tokenizer is None else {"content": None, **self.told, "refusal": None}
        return {"message": {"role": "assistant", "content": content, **reasoning, **calls}, "logprobs": logprobs}


class TextSerializer(CompletionSerializer):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._columns, self._parts = self.tokenizer and LogprobColumns(self.tokenizer), []

    def choice_of(self, event: TextDelta) -> dict[str, object]:
        told = self._columns and self._columns.told(event.tokens, event.text)
        self._parts += [told] if told else []
        return {"text": event.text, "logprobs": told, "finish_reason": None}

    def choice_at_end(self, stats: Stats) -> dict[str, object]:
        return {"text": "", "logprobs": None, "finish_reason": self.finish(stats)}

    def whole_choice(self) -> dict[str, object]:
        return {"text": "".join(self.texts.values()), "logprobs": self._columns and joined(self._parts)}


def usage(stats: Stats) -> dict[str, object]:
    made = len(stats.token_ids)
    return {"prompt_tokens": stats.prompt_tokens, "completion_tokens": made, "total_tokens": stats.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": stats.reasoning_tokens}}


def timings(stats: Stats) -> dict[str, object]:
    made = len(stats.token_ids)
    return {"cache_n": stats.cached_tokens, "prompt_n": stats.read_tokens, "prompt_ms": stats.prefill_s * MS,
            "prompt_per_token_ms": stats.prefill_s * MS / max(1, stats.read_tokens), "prompt_per_second": stats.prefill_tps,
            "predicted_n": made, "predicted_ms": stats.decode_s * MS, "predicted_per_token_ms": stats.decode_s * MS / max(1, made),
            "predicted_per_second": stats.decode_tps}
