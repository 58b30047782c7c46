"""A conversation of OpenAI's Responses API in short: what its user said, and an item of type compaction that holds what the model wrote of
all that came before. Who sends that item again goes on behind it, with a prompt of a few hundred tokens instead of thousands.

A request may ask for the same where its prompt is long (`context_management`). Then the item comes before the answer, and stands for all
but the system prompt: what its user said word by word might be what is long."""

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
MOST_TOKENS = 2048  # of what is written, unless a request says
MAX_FILL = 0.75  # of the context, the most that a request may ask for: what is written down has to fit beside
MADE = ("function_call", "custom_tool_call", "reasoning")  # by a model, before what tools gave back
STAYING = ("user", "system", "developer")  # whose messages are in the new list as they were
SUMMARY_PROMPT = (
    "Write down what was said so far, so that the conversation can go on from your notes alone: what is wanted, what was found out and "
    "decided, what was done and what is left, with names, numbers and file names as they were. Write nothing else.")


def summary_request(payload: ResponsesRequest, items: Sequence[dict[str, Any]], most: int | None = None) -> ResponsesRequest:
    """A request for what these items come to, in so many tokens. Reasoning about them is left out, unless it is asked for."""
    return payload.model_copy(update={
        "input": [*items, {"role": "user", "content": SUMMARY_PROMPT}], "tools": None, "tool_choice": None, "text": None, "stream": False,
        "reasoning": payload.reasoning or Reasoning(effort="none"),
        "max_output_tokens": MOST_TOKENS if most is None else most})


def verbatim_items(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of these, what is not summed up: programs look for what their user said."""
    return [item for item in items if item_type(item) == "message" and item.get("role") in STAYING]


class CompactionSerializer(AnswerSerializer):
    """`stays` is what stands before the item that is made."""

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
    """Raises Problem where there is nothing."""
    if not (text := "".join(texts).strip()):
        raise Problem(500, "the model wrote nothing of the conversation down", FAILED, code="empty_compaction",
                      hint="send it whole, or its newest part alone")
    return text


def summary_max_tokens(n_ctx: int) -> int:
    """The tokens of what is written down of a conversation that fills its context, behind which an answer has room."""
    return min(MOST_TOKENS, int((1 - MAX_FILL) * n_ctx))


def compaction_threshold(payload: ResponsesRequest, n_ctx: int) -> int | None:
    """The tokens that a prompt may have before it is made short; None where it is left as it is. Raises Problem."""
    most = None
    for number, each in enumerate(payload.context_management or ()):
        where = f"context_management[{number}]"
        if each.get("type") != COMPACTION:
            raise Problem(400, f"{where}.type is {COMPACTION}, not {each.get('type')!r:.40}", param=f"{where}.type")
        stated = each.get("compact_threshold")
        if stated is not None and (not isinstance(stated, int) or isinstance(stated, bool) or stated < 1):
            raise Problem(400, f"{where}.compact_threshold is a number of tokens, 1 or more", param=f"{where}.compact_threshold")
        most = min(int(MAX_FILL * n_ctx), stated or n_ctx)
    return most


def latest_turn(items: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The end of these to which an answer is wanted: what was said or given back last, with the calls that it was given back for."""
    at = len(items)
    while at and (item_type(items[at - 1]) in OUTPUTS or item_type(items[at - 1]) == "message" and items[at - 1].get("role") in STAYING):
        at -= 1
    if any(item_type(item) in OUTPUTS for item in items[at:]):
        while at and item_type(items[at - 1]) in MADE:
            at -= 1
    return items[at:]


def compacted(payload: ResponsesRequest, items: Sequence[dict[str, Any]], place: str) -> ResponsesRequest | None:
    """The request with what all of these come to in the place of those that are not its newest; the words are to be put where `place` is.
    None where it has nothing but these."""
    own = latest_turn(items)
    before = items[history_start([*items]) : len(items) - len(own)]
    if all(is_system_message(item) or item_type(item) == COMPACTION for item in before):
        return None
    systems = [item for item in items[: len(items) - len(own)] if is_system_message(item)]
    return payload.model_copy(update={"input": [*systems, {"type": COMPACTION, "encrypted_content": encode_summary(place, alone=True)},
                                                *own]})


def after_summary(notes: Start, answer: Callable[[str], Start]) -> Start:
    """An answer to what a conversation comes to, which `notes` writes down first."""

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
    """The messages of `shortened`, with the words in the place of what stands for them."""
    def of(content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": of(part["text"])} if isinstance(part.get("text"), str) else part for part in content]
        return content.replace(place, text) if isinstance(content, str) else content

    return [{**message, "content": of(message.get("content"))} for message in messages]
