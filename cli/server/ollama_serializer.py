"""Answers in the format of Ollama's API: one object, or one per line with a chunk each, the last with the statistics. Durations are in
nanoseconds."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Protocol

from ...runtime.events import Call, PromptRead, Stats, TextDelta
from ...runtime.tokenizer import Tokenizer
from ...runtime.tool_calls.cursor import parse_json
from .logprobs import LogprobList
from .problems import Problem
from .serializers import AnswerSerializer
from .tools import CallList

NS = 1_000_000_000
LAST = 253_402_300_799  # the last second that a date can have; files may be younger than that
LOAD, UNLOAD = "load", "unload"


def timestamp(seconds: float | None = None) -> str:
    """A time, or now, in RFC 3339."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(min(max(seconds, 0), LAST), UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaSerializer(AnswerSerializer, Protocol):
    """The base of both endpoints' formats, which differ in how texts and calls are placed (`message_fields`)."""

    json_lines, terminator, has_comments = True, b"", False

    def __init__(self, model: str, waited_ns: int = 0, tokenizer: Tokenizer | None = None) -> None:
        """`waited_ns`: time spent loading the model. `tokenizer`: for log-probabilities."""
        self.model, self._waited_ns, self._began = model, waited_ns, time.monotonic()
        self._logprob_list, self._logprobs = tokenizer and LogprobList(tokenizer), []
        self.texts: dict[str, str] = {}  # by kind
        self.call_list = CallList()

    def message_fields(self, answer: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, object]:
        """The fields of an object with this part of the answer."""

    def loaded(self, reason: str = LOAD) -> dict[str, object]:
        """The response to a request that only loads or unloads the model."""
        return self._chunk(self.message_fields(), done=True, done_reason=reason)

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        if isinstance(event, PromptRead):
            return []
        if isinstance(event, Call):
            return [self._chunk(self.message_fields(calls=[self._call(self.call_list.add(event), len(self.call_list.calls) - 1)]))]
        self.texts[event.kind] = self.texts.get(event.kind, "") + event.text
        logprobs = self._logprob_list.to_json(event.tokens) if self._logprob_list else []
        self._logprobs += logprobs
        return [self._chunk(self.message_fields(**{event.kind: event.text}), **_logprobs_field(logprobs))]

    def keep_alive_chunks(self) -> list[dict[str, object]]:
        return [self._chunk(self.message_fields())]

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        return [self._chunk(self.message_fields(), done=True, **self._cost(stats))]

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        calls = [self._call(call, number) for number, call in enumerate(self.call_list.calls)]
        fields = self.message_fields(**self.texts, calls=calls)
        return self._chunk(fields, done=True, **self._cost(stats), **_logprobs_field(self._logprobs))

    def error_chunks(self, problem: Problem) -> list[dict[str, object]]:
        return [problem.to_ollama()]

    def _chunk(self, message_fields: dict[str, object], done: bool = False, **extra: object) -> dict[str, object]:
        return {"model": self.model, "created_at": timestamp(), **message_fields, "done": done, **extra}

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        function = call["function"]
        return {"id": call["id"], "function": {"index": number, "name": function["name"], "arguments": parse_json(function["arguments"])}}

    def _cost(self, stats: Stats) -> dict[str, object]:
        return {"done_reason": "stop" if stats.finish_reason == "stop" else "length",
                "total_duration": self._waited_ns + round((time.monotonic() - self._began) * NS), "load_duration": self._waited_ns,
                "prompt_eval_count": stats.prompt_tokens, "prompt_eval_duration": round(stats.prefill_s * NS),
                "eval_count": len(stats.token_ids), "eval_duration": round(stats.decode_s * NS)}


def _logprobs_field(logprobs: list[dict[str, object]]) -> dict[str, object]:
    """Log-probabilities of reasoning and answer, in order; left out where there are none."""
    return {"logprobs": logprobs} if logprobs else {}


class OllamaChatSerializer(OllamaSerializer):
    """/api/chat."""

    def message_fields(self, answer: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, object]:
        more = {"thinking": thinking} if thinking else {}
        return {"message": {"role": "assistant", "content": answer, **more, **({"tool_calls": calls} if calls else {})}}


class OllamaGenerateSerializer(OllamaSerializer):
    """/api/generate."""

    def message_fields(self, answer: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, object]:
        return {"response": answer, **({"thinking": thinking} if thinking else {})}
