"""Answers in the format of Anthropic's Messages API: a list of content blocks (thinking, text, tool use), whole or as events that build
it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from ...runtime.events import Call, PromptRead, Stats, TextDelta
from ...runtime.tool_calls.cursor import parse_json
from .messages_requests import CountTokensRequest
from .problems import Problem
from .serializers import AnswerSerializer
from .tools import CallList

THINKING, TEXT, TOOL_USE, SIGNATURE = "thinking", "text", "tool_use", "signature"
SIGNED = "effllm"  # a placeholder: clients send it back, and it is not verified


class MessageSerializer(AnswerSerializer):
    """`keep` is called with the answer's id and blocks when it has ended."""

    has_event_names, terminator = True, b""

    def __init__(self, model: str, payload: CountTokensRequest, keep: Callable[[str, list[dict[str, Any]]], None] | None = None) -> None:
        self._keep = keep
        self.model, self.stop_sequences, self.max_tokens = model, payload.stop_sequences or [], payload.max_tokens
        self.id = f"msg_{uuid.uuid4().hex}"
        self.blocks: list[dict[str, Any]] = []  # complete
        self._open: tuple[str, list[str]] | None = None  # kind and texts of the incomplete one
        self._call_list, self._prompt_read = CallList(), PromptRead(0, 0)

    def first_chunks(self) -> list[dict[str, object]]:
        message = self._message([], None, None, usage(self._prompt_read.tokens, self._prompt_read.cached))
        return [{"type": "message_start", "message": message}]

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        if isinstance(event, PromptRead):
            self._prompt_read = event
            return []
        if isinstance(event, Call):
            return [*self._close_block(), *self._call_events(event)]
        kind = TEXT if event.kind == "answer" else THINKING
        chunks = [] if self._open and self._open[0] == kind else [*self._close_block(), *self._begin_block(kind)]
        self._open[1].append(event.text)
        return [*chunks, self._delta(f"{kind}_delta", kind, event.text)]

    def keep_alive_chunks(self) -> list[dict[str, object]]:
        return [{"type": "ping"}]

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        closing = self._end_answer()
        reason, stop = self._stop_reason(stats)
        return [*closing, {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop, "stop_details": None},
                           "usage": usage_of(stats)},
                {"type": "message_stop"}]

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        self._end_answer()
        return self._message(self.blocks, *self._stop_reason(stats), usage_of(stats))

    def _end_answer(self) -> list[dict[str, object]]:
        """End the last block, and store the answer."""
        events = self._close_block()
        if self._keep is not None:
            self._keep(self.id, self.blocks)
        return events

    def error_chunks(self, problem: Problem) -> list[dict[str, object]]:
        return [problem.to_anthropic()]

    def _message(self, blocks: list[dict[str, Any]], reason: str | None, stop: str | None, cost: dict[str, object]) -> dict[str, object]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": blocks, "stop_reason": reason,
                "stop_sequence": stop, "stop_details": None, "usage": cost}

    def _stop_reason(self, stats: Stats) -> tuple[str, str | None]:
        """The stop reason, and the stop sequence that ended the answer."""
        if stats.finish_reason != "stop":
            return "max_tokens" if len(stats.token_ids) == self.max_tokens else "model_context_window_exceeded", None
        if stats.stop_string in self.stop_sequences:
            return "stop_sequence", stats.stop_string
        return ("tool_use" if self._call_list.calls else "end_turn"), None

    def _delta(self, kind: str, field: str, text: str) -> dict[str, object]:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": {"type": kind, field: text}}

    def _begin_block(self, kind: str) -> list[dict[str, object]]:
        self._open = kind, []
        return [{"type": "content_block_start", "index": len(self.blocks), "content_block": _block(kind, "", "")}]

    def _close_block(self) -> list[dict[str, object]]:
        """Events that end the open block, if any."""
        if self._open is None:
            return []
        (kind, texts), self._open = self._open, None
        signed = [self._delta(f"{SIGNATURE}_delta", SIGNATURE, SIGNED)] if kind == THINKING else []
        events = [*signed, {"type": "content_block_stop", "index": len(self.blocks)}]
        self.blocks.append(_block(kind, "".join(texts), SIGNED))
        return events

    def _call_events(self, call: Call) -> list[dict[str, object]]:
        """The events of a complete call."""
        block = {"type": TOOL_USE, "id": self._call_list.add(call)["id"], "name": call.name, "input": {}}
        index = len(self.blocks)
        events = [{"type": "content_block_start", "index": index, "content_block": block},
                self._delta("input_json_delta", "partial_json", call.arguments), {"type": "content_block_stop", "index": index}]
        self.blocks.append({**block, "input": parse_json(call.arguments)})
        return events


def _block(kind: str, text: str, signed: str) -> dict[str, object]:
    return {"type": THINKING, THINKING: text, SIGNATURE: signed} if kind == THINKING else {"type": TEXT, TEXT: text}


def usage(prompt: int, cached: int, output_tokens: int = 0, reasoning_tokens: int = 0) -> dict[str, object]:
    """Anthropic's `usage`, in which cached prompt tokens are not part of the input tokens."""
    return {"input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
            "output_tokens": output_tokens, "output_tokens_details": {"thinking_tokens": reasoning_tokens}}


def usage_of(stats: Stats) -> dict[str, object]:
    return usage(stats.prompt_tokens, stats.cached_tokens, len(stats.token_ids), stats.reasoning_tokens)
