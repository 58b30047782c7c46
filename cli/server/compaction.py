"""Compaction of OpenAI's Responses: a conversation is replaced by what its user said and a `compaction` item, which holds the model's
summary of everything before. A client that sends this item continues from the summary, with a prompt of a few hundred tokens instead of
thousands.

A request may ask for it when its prompt becomes long (`context_management`). Then the item comes before the answer and replaces everything
but the system prompt, since the user's own messages may be what is long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...runtime.events import Call, Done, Event, PromptRead, Stats, TextDelta
from .answer_queue import Start
from .encrypted_content import encode_summary
from .multiple_answers import AnswerEnded
from .openai_requests import Reasoning
from .problems import FAILED, Problem
from .response_store import named_items
from .responses_requests import COMPACTION, OUTPUTS, ResponsesRequest, history_start, is_system_message, item_type
from .responses_serializer import new_id, usage
from .serializers import AnswerSerializer

COMPACT = ("/v1/responses/compact", "/responses/compact")
MAX_SUMMARY_TOKENS = 2048  # unless the request sets a limit
MAX_FILL = 0.75  # the highest threshold, as a share of the context: the summary has to fit too
MODEL_ITEMS = ("function_call", "custom_tool_call", "reasoning")  # items of the model that precede tool outputs
VERBATIM_ROLES = ("user", "system", "developer")  # roles whose messages are kept verbatim
SUMMARY_PROMPT = (
    "Write down what was said so far, so that the conversation can go on from your notes alone: what is wanted, what was found out and "
    "decided, what was done and what is left, with names, numbers and file names as they were. Write nothing else.")


def summary_request(payload: ResponsesRequest, items: Sequence[dict[str, Any]], max_tokens: int | None = None) -> ResponsesRequest:
    """A request for a summary of these items in at most `max_tokens`, without reasoning unless the original request asks for it."""
    return payload.model_copy(update={
        "input": [*items, {"role": "user", "content": SUMMARY_PROMPT}], "tools": None, "tool_choice": None, "text": None, "stream": False,
        "reasoning": payload.reasoning or Reasoning(effort="none"),
        "max_output_tokens": MAX_SUMMARY_TOKENS if max_tokens is None else max_tokens})


def verbatim_items(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that are kept verbatim: clients look for the messages of their user."""
    return [item for item in items if item_type(item) == "message" and item.get("role") in VERBATIM_ROLES]


class CompactionSerializer(AnswerSerializer):
    """Serializes the result of /compact. `kept_items`: the items before the compaction item."""

    def __init__(self, kept_items: Sequence[dict[str, Any]]) -> None:
        self.id, self._kept_items, self._texts = new_id("resp"), kept_items, []

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        if isinstance(event, TextDelta) and event.kind == "answer":
            self._texts.append(event.text)
        return []

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        text = summary_text(self._texts)
        made = {"id": new_id("cmp"), "type": COMPACTION, "encrypted_content": encode_summary(text)}
        return {"id": self.id, "object": "response.compaction", "created_at": int(time.time()),
                "output": [*named_items(self._kept_items, self.id), made], "usage": usage(stats)}


def summary_text(texts: Sequence[str]) -> str:
    """The text of a summary from its chunks. Raises Problem for an empty one."""
    if not (text := "".join(texts).strip()):
        raise Problem(500, "the model wrote an empty summary", FAILED, code="empty_compaction",
                      hint="send the whole conversation, or only its newest part")
    return text


def summary_max_tokens(n_ctx: int) -> int:
    """The maximum length of a summary of a conversation that fills the context, so that there is room for an answer."""
    return min(MAX_SUMMARY_TOKENS, int((1 - MAX_FILL) * n_ctx))


def compaction_threshold(payload: ResponsesRequest, n_ctx: int) -> int | None:
    """The number of prompt tokens above which the conversation is compacted; None for no limit. Raises Problem."""
    threshold = None
    for number, each in enumerate(payload.context_management or ()):
        where = f"context_management[{number}]"
        if each.get("type") != COMPACTION:
            raise Problem(400, f"{where}.type has to be {COMPACTION}, not {each.get('type')!r:.40}", param=f"{where}.type")
        requested = each.get("compact_threshold")
        if requested is not None and (not isinstance(requested, int) or isinstance(requested, bool) or requested < 1):
            raise Problem(400, f"{where}.compact_threshold has to be a number of tokens, 1 or more", param=f"{where}.compact_threshold")
        threshold = min(int(MAX_FILL * n_ctx), requested or n_ctx)
    return threshold


def latest_turn(items: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The items at the end that are to be answered: the newest messages or tool outputs, with the calls of these outputs."""
    def is_input(item: dict[str, Any]) -> bool:
        return item_type(item) in OUTPUTS or item_type(item) == "message" and item.get("role") in VERBATIM_ROLES

    start = len(items)
    while start and is_input(items[start - 1]):
        start -= 1
    if any(item_type(item) in OUTPUTS for item in items[start:]):
        while start and item_type(items[start - 1]) in MODEL_ITEMS:
            start -= 1
    return items[start:]


def compacted(payload: ResponsesRequest, items: Sequence[dict[str, Any]], placeholder: str) -> ResponsesRequest | None:
    """The request with its earlier items replaced by a compaction item with the text `placeholder`, which `with_summary` replaces. None if
    there is nothing to summarize."""
    latest = latest_turn(items)
    earlier = items[history_start([*items]) : len(items) - len(latest)]
    if all(is_system_message(item) or item_type(item) == COMPACTION for item in earlier):
        return None
    systems = [item for item in items[: len(items) - len(latest)] if is_system_message(item)]
    summary = {"type": COMPACTION, "encrypted_content": encode_summary(placeholder, alone=True)}
    return payload.model_copy(update={"input": [*systems, summary, *latest]})


def after_summary(summarize: Start, answer: Callable[[str], Start]) -> Start:
    """The start of a summary, and after it of the answer to the compacted request."""

    def begin(cancelled: Callable[[], bool]) -> Iterator[Event | AnswerEnded]:
        texts: list[str] = []
        for event in summarize(cancelled):
            if isinstance(event, TextDelta):
                texts += [event.text] if event.kind == "answer" else []
            elif isinstance(event, Done) and not cancelled():
                yield AnswerEnded(replace(event.stats, text=summary_text(texts)))
            else:
                yield event
        if not cancelled():
            yield from answer(summary_text(texts))(cancelled)

    return begin


def with_summary(messages: Sequence[dict[str, Any]], placeholder: str, text: str) -> list[dict[str, Any]]:
    """The messages of a `compacted` request, with the summary in place of the placeholder."""
    def replaced(content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": replaced(part["text"])} if isinstance(part.get("text"), str) else part for part in content]
        return content.replace(placeholder, text) if isinstance(content, str) else content

    return [{**message, "content": replaced(message.get("content"))} for message in messages]
