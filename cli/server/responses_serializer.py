"""Answers in the format of OpenAI's Responses API: a list of items (reasoning, message, calls), whole or as events that build it. Reasoning
is an item's content, or its summary where the request asks for one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...runtime.events import Call, PromptRead, Stats, TextDelta
from ...runtime.tokenizer import Tokenizer
from .custom_tools import input_of
from .encrypted_content import encode_summary
from .logprobs import LogprobList
from .multiple_answers import AnswerEnded
from .problems import TOO_LONG, Problem
from .responses_requests import COMPACTION, ResponsesRequest, ToolNames
from .serializers import AnswerSerializer
from .tools import CallList

COMPLETED, INCOMPLETE = "completed", "incomplete"
QUEUED, IN_PROGRESS, CANCELLED = "queued", "in_progress", "cancelled"  # states of a background response


@dataclass(frozen=True)
class ItemKind:
    """A kind of text item."""

    prefix: str  # of its id
    item: str  # type of the item
    part: str  # type of its part
    place: str  # field of the item with the parts
    index: str  # field of events with the number of the part
    part_event: str  # prefix of events about the part
    text_event: str  # prefix of events about the text


MESSAGE = ItemKind("msg", "message", "output_text", "content", "content_index", "response.content_part", "response.output_text")
REASONING = ItemKind("rs", "reasoning", "reasoning_text", "content", "content_index", "response.content_part", "response.reasoning_text")
SUMMARY = ItemKind("rs", "reasoning", "summary_text", "summary", "summary_index", "response.reasoning_summary_part",
                   "response.reasoning_summary_text")


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseSerializer(AnswerSerializer):
    """Serializes an answer as a response.

    payload: the request, whose fields the response repeats.
    names: the client's names of tools.
    tokenizer: to include log-probabilities, None for none.
    keep: called with the response when it has ended.
    """

    has_event_names, terminator, starts_early = True, b"", True

    def __init__(self, model: str, payload: ResponsesRequest, names: ToolNames, tokenizer: Tokenizer | None = None,
                 keep: Callable[[dict[str, object]], None] | None = None) -> None:
        self._keep = keep
        self.model, self.payload, self.names = model, payload, names
        self._logprob_list, self._logprobs = tokenizer and LogprobList(tokenizer), []  # of the incomplete message
        self.id, self.created = new_id("resp"), int(time.time())
        wants = payload.reasoning and payload.reasoning.summary
        self.thinking = SUMMARY if wants and wants != "none" else REASONING
        self.items: list[dict[str, Any]] = []  # complete
        self._open: tuple[ItemKind, str, list[str]] | None = None  # kind, id and texts of the incomplete one
        self._call_list, self._num_events = CallList(), 0

    def first_chunks(self) -> list[dict[str, object]]:
        if not self.payload.background:
            return [self._event("response.created", response=self.response(IN_PROGRESS)), *self.in_progress_chunks()]
        response = self.response(QUEUED)
        return [self._event("response.created", response=response), self._event("response.queued", response=response)]

    def in_progress_chunks(self) -> list[dict[str, object]]:
        """The event at the start of generation."""
        return [self._event("response.in_progress", response=self.response(IN_PROGRESS))]

    def add(self, event: PromptRead | TextDelta | Call | AnswerEnded) -> list[dict[str, object]]:
        if isinstance(event, PromptRead):
            return []
        if isinstance(event, AnswerEnded):
            return self._compaction_events(event.stats.text)
        if isinstance(event, Call):
            return [*self._close_item(), *self._call_events(event)]
        kind = MESSAGE if event.kind == "answer" else self.thinking
        chunks = [] if self._open and self._open[0] is kind else [*self._close_item(), *self._begin_item(kind)]
        _, item_id, texts = self._open
        texts.append(event.text)
        logprobs = self._logprob_list.to_json(event.tokens) if self._logprob_list and kind is MESSAGE else []
        self._logprobs += logprobs
        fields = {**self._position(kind, item_id), **_logprobs_field(kind, logprobs)}
        return [*chunks, self._event(f"{kind.text_event}.delta", delta=event.text, **fields)]

    def keep_alive_chunks(self) -> list[dict[str, object]]:
        return [self._event("keepalive")]

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        status = status_of(stats)
        closing = self._close_item(status)
        return [*closing, self._event(f"response.{status}", response=self._final_response(status, stats))]

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        status = status_of(stats)
        self._close_item(status)
        return self._final_response(status, stats)

    def _final_response(self, status: str, stats: Stats) -> dict[str, object]:
        response = self.response(status, stats)
        if self._keep is not None:
            self._keep(response)
        return response

    def sends_error_event(self, problem: Problem) -> bool:
        """True for a full context, as in OpenAI's streams: clients shorten the conversation after that event."""
        return problem.code == TOO_LONG

    def error_chunks(self, problem: Problem) -> list[dict[str, object]]:
        events = [] if self._num_events else self.first_chunks()
        self._close_item(INCOMPLETE)
        error = {"code": problem.code or problem.type, "message": problem.client_message}
        return [*events, self._event("response.failed", response={**self.response("failed"), "error": error})]

    def cancelled_response(self) -> dict[str, object]:
        """The response as it was when it was cancelled."""
        self._close_item(INCOMPLETE)
        return self.response(CANCELLED)

    def worker_lost_chunks(self, problem: Problem) -> list[dict[str, object]]:
        """An error event without the response, which the router does not have."""
        return [self._event("error", code=problem.code or problem.type, message=problem.message, param=problem.param)]

    def response(self, status: str, stats: Stats | None = None) -> dict[str, object]:
        """The response as it is now."""
        payload, reasoning, conversation_id = self.payload, self.payload.reasoning, self.payload.conversation_id
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model, "output": [*self.items],
            "completed_at": int(time.time()) if status == COMPLETED else None, "background": self.payload.background is True, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None, "instructions": payload.instructions,
            "max_output_tokens": payload.max_output_tokens, "metadata": payload.metadata or {},
            "previous_response_id": payload.previous_response_id, "conversation": conversation_id and {"id": conversation_id},
            "parallel_tool_calls": payload.parallel_tool_calls is not False, "service_tier": "default", "store": payload.store is not False,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
            "text": {"format": payload.text and payload.text.format or {"type": "text"}}, "temperature": payload.temperature,
            "top_p": payload.top_p, "top_logprobs": payload.top_logprobs or 0, "tools": payload.tools or [],
            "tool_choice": payload.tool_choice or "auto", "truncation": "disabled",
            "usage": stats and usage(stats)}

    def _event(self, kind: str, **fields: object) -> dict[str, object]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _position(self, kind: ItemKind, item_id: str) -> dict[str, object]:
        """The position of a part."""
        return {"item_id": item_id, "output_index": len(self.items), kind.index: 0}

    def _item(self, kind: ItemKind, item_id: str, status: str, parts: list[dict[str, object]]) -> dict[str, Any]:
        fields = {"role": "assistant"} if kind is MESSAGE else {"summary": [], "content": [], "encrypted_content": None}
        return {"id": item_id, "type": kind.item, "status": status, **fields, kind.place: parts}

    def _begin_item(self, kind: ItemKind) -> list[dict[str, object]]:
        """Events that begin an item of text."""
        item_id = new_id(kind.prefix)
        self._open = kind, item_id, []
        return [self._event("response.output_item.added", output_index=len(self.items), item=self._item(kind, item_id, IN_PROGRESS, [])),
                self._event(f"{kind.part_event}.added", part=_part(kind, "", []), **self._position(kind, item_id))]

    def _close_item(self, status: str = COMPLETED) -> list[dict[str, object]]:
        """Events that end the open item, if any."""
        if self._open is None:
            return []
        kind, item_id, texts = self._open
        self._open, text, position = None, "".join(texts), self._position(kind, item_id)
        logprobs, self._logprobs = self._logprobs, []
        part = _part(kind, text, logprobs)
        item = self._item(kind, item_id, status, [part])
        events = [self._event(f"{kind.text_event}.done", text=text, **position, **_logprobs_field(kind, logprobs)),
                self._event(f"{kind.part_event}.done", part=part, **position),
                self._event("response.output_item.done", output_index=len(self.items), item=item)]
        self.items.append(item)
        return events

    def _call_events(self, call: Call) -> list[dict[str, object]]:
        """The events of a complete call."""
        space, name = self.names.spaces.get(call.name, (None, call.name))
        is_free = call.name in self.names.free
        prefix, kind, place = ("ctc", "custom_tool_call", "input") if is_free else ("fc", "function_call", "arguments")
        arguments = input_of(call.arguments) if is_free else call.arguments
        item_id, index = new_id(prefix), len(self.items)
        item = {"id": item_id, "type": kind, "status": IN_PROGRESS, "call_id": self._call_list.add(call)["id"], "name": name, place: "",
                **({"namespace": space} if space else {})}
        completed = {**item, "status": COMPLETED, place: arguments}
        event, where = f"response.{kind}_{place}", {"item_id": item_id, "output_index": index}
        events = [self._event("response.output_item.added", output_index=index, item=item),
                self._event(f"{event}.delta", delta=arguments, **where),
                self._event(f"{event}.done", **{place: arguments}, **where, **({} if is_free else {"name": name})),
                self._event("response.output_item.done", output_index=index, item=completed)]
        self.items.append(completed)
        return events

    def _compaction_events(self, notes: str) -> list[dict[str, object]]:
        """The compaction item that replaces earlier items, after which the answer follows."""
        item, index = {"id": new_id("cmp"), "type": COMPACTION, "encrypted_content": encode_summary(notes, alone=True)}, len(self.items)
        self.items.append(item)
        return [self._event(f"response.output_item.{step}", output_index=index, item=item) for step in ("added", "done")]


def _part(kind: ItemKind, text: str, logprobs: list[dict[str, object]]) -> dict[str, object]:
    extra = {"annotations": []} if kind is MESSAGE else {}
    return {"type": kind.part, "text": text, **extra, **_logprobs_field(kind, logprobs)}


def _logprobs_field(kind: ItemKind, logprobs: list[dict[str, object]]) -> dict[str, object]:
    return {"logprobs": logprobs} if kind is MESSAGE else {}


def status_of(stats: Stats) -> str:
    return COMPLETED if stats.finish_reason == "stop" else INCOMPLETE


def usage(stats: Stats) -> dict[str, object]:
    num_tokens = len(stats.token_ids)
    return {"input_tokens": stats.prompt_tokens, "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_tokens, "output_tokens_details": {"reasoning_tokens": stats.reasoning_tokens},
            "total_tokens": stats.prompt_tokens + num_tokens}
