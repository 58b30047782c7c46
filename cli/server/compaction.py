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
MOST_TOKENS = 2048  # of a summary, unless the request sets a limit
MAX_FILL = 0.75  # share of the context, the highest threshold: the summary has to fit beside it
MADE = ("function_call", "custom_tool_call", "reasoning")  # items of a model before tool outputs
STAYING = ("user", "system", "developer")  # roles whose messages are kept verbatim
SUMMARY_PROMPT = (
    "Write down what was said so far, so that the conversation can go on from your notes alone: what is wanted, what was found out and "
    "decided, what was done and what is left, with names, numbers and file names as they were. Write nothing else.")


def summary_request(payload: ResponsesRequest, items: Sequence[dict[str, Any]], most: int | None = None) -> ResponsesRequest:
    """A request for a summary of these items, in at most so many tokens, without reasoning unless the request asks for it."""
    return payload.model_copy(update={
        "input": [*items, {"role": "user", "content": SUMMARY_PROMPT}], "tools": None, "tool_choice": None, "text": None, "stream": False,
        "reasoning": payload.reasoning or Reasoning(effort="none"),
        "max_output_tokens": MOST_TOKENS if most is None else most})


def verbatim_items(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that stay as they were: clients look for what their user said."""
    return [item for item in items if item_type(item) == "message" and item.get("role") in STAYING]


class CompactionSerializer(AnswerSerializer):
    """`stays`: the items before the compaction item."""

    def __init__(self, stays: Sequence[dict[str, Any]]) -> None:
        self.id, self._stays, self._texts = new_id("resp"), stays, []

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        if isinstance(event, TextDelta) and event.kind == "answer":
            self._texts.append(event.text)
        return []

    def whole(self, stats: Stats) -> dict[str, object]:
        text = summary_text(self._texts)
        made = {"id": new_id("cmp"), "type": COMPACTION, "encrypted_content": encode_summary(text)}
        return {"id": self.id, "object": "response.compaction", "created_at": int(time.time()),
                "output": [*named_items(self._stays, self.id), made], "usage": usage(stats)}


def summary_text(texts: Sequence[str]) -> str:
    """Raises Problem if there is none."""
    if not (text := "".join(texts).strip()):
        raise Problem(500, "the model wrote an empty summary", FAILED, code="empty_compaction",
                      hint="send the whole conversation, or only its newest part")
    return text


def summary_max_tokens(n_ctx: int) -> int:
    """Tokens for a summary of a conversation that fills its context, so that an answer has room after it."""
    return min(MOST_TOKENS, int((1 - MAX_FILL) * n_ctx))


def compaction_threshold(payload: ResponsesRequest, n_ctx: int) -> int | None:
    """The number of prompt tokens above which the conversation is compacted; None for no limit. Raises Problem."""
    most = None
    for number, each in enumerate(payload.context_management or ()):
        where = f"context_management[{number}]"
        if each.get("type") != COMPACTION:
            raise Problem(400, f"{where}.type has to be {COMPACTION}, not {each.get('type')!r:.40}", param=f"{where}.type")
        stated = each.get("compact_threshold")
        if stated is not None and (not isinstance(stated, int) or isinstance(stated, bool) or stated < 1):
            raise Problem(400, f"{where}.compact_threshold has to be a number of tokens, 1 or more", param=f"{where}.compact_threshold")
        most = min(int(MAX_FILL * n_ctx), stated or n_ctx)
    return most


def latest_turn(items: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The items at the end that the answer is about: the newest messages or tool outputs, with the calls of these outputs."""
    at = len(items)
    while at and (item_type(items[at - 1]) in OUTPUTS or item_type(items[at - 1]) == "message" and items[at - 1].get("role") in STAYING):
        at -= 1
    if any(item_type(item) in OUTPUTS for item in items[at:]):
        while at and item_type(items[at - 1]) in MADE:
            at -= 1
    return items[at:]


def compacted(payload: ResponsesRequest, items: Sequence[dict[str, Any]], place: str) -> ResponsesRequest | None:
    """The request with its earlier items replaced by a compaction item, whose text is to be put in place of `place`. None if there is
    nothing to summarize."""
    own = latest_turn(items)
    before = items[history_start([*items]) : len(items) - len(own)]
    if all(is_system_message(item) or item_type(item) == COMPACTION for item in before):
        return None
    systems = [item for item in items[: len(items) - len(own)] if is_system_message(item)]
    return payload.model_copy(update={"input": [*systems, {"type": COMPACTION, "encrypted_content": encode_summary(place, alone=True)},
                                                *own]})


def after_summary(notes: Start, answer: Callable[[str], Start]) -> Start:
    """Generate a summary by `notes`, then the answer to the compacted request."""

    def begin(cancelled: Callable[[], bool]) -> Iterator[Event | AnswerEnded]:
        texts: list[str] = []
        for event in notes(cancelled):
            if isinstance(event, TextDelta):
                texts += [event.text] if event.kind == "answer" else []
            elif isinstance(event, Done) and not cancelled():
                yield AnswerEnded(replace(event.stats, text=summary_text(texts)))
            else:
                yield event
        if not cancelled():
            yield from answer(summary_text(texts))(cancelled)

    return begin


def with_summary(messages: Sequence[dict[str, Any]], place: str, text: str) -> list[dict[str, Any]]:
    """The messages of a `compacted` request, with the summary in place of the placeholder."""
    def of(content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": of(part["text"])} if isinstance(part.get("text"), str) else part for part in content]
        return content.replace(place, text) if isinstance(content, str) else content

    return [{**message, "content": of(message.get("content"))} for message in messages]
