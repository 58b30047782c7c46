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
from .fields import Reasoning
from .kept_responses import named_items
from .multiple_answers import AnswerEnded
from .problems import FAILED, Problem
from .responses_fields import COMPACTION, OUTPUTS, ResponsesAsked, begin_of, is_systems, kind_of
from .responses_shape import new_id, usage
from .sealing import sealed
from .shapes import Shape

COMPACT = ("/v1/responses/compact", "/responses/compact")
MOST_TOKENS = 2048  # of what is written, unless a request says
FULL = 0.75  # of the context, the most that a request may ask for: what is written down has to fit beside
MADE = ("function_call", "custom_tool_call", "reasoning")  # by a model, before what tools gave back
STAYING = ("user", "system", "developer")  # whose messages are in the new list as they were
ASKS = ("Write down what was said so far, so that the conversation can go on from your notes alone: what is wanted, what was found out and "
        "decided, what was done and what is left, with names, numbers and file names as they were. Write nothing else.")


def summing_up(asked: ResponsesAsked, items: Sequence[dict[str, Any]], most: int | None = None) -> ResponsesAsked:
    """A request for what these items come to, in so many tokens. Reasoning about them is left out, unless it is asked for."""
    return asked.model_copy(update={
        "input": [*items, {"role": "user", "content": ASKS}], "tools": None, "tool_choice": None, "text": None, "stream": False,
        "reasoning": asked.reasoning or Reasoning(effort="none"),
        "max_output_tokens": MOST_TOKENS if most is None else most})


def staying(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of these, what is not summed up: programs look for what their user said."""
    return [item for item in items if kind_of(item) == "message" and item.get("role") in STAYING]


class CompactionShape(Shape):
    """`stays` is what stands before the item that is made."""

    def __init__(self, stays: Sequence[dict[str, Any]]) -> None:
        self.id, self._stays, self._texts = new_id("resp"), stays, []

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        if isinstance(event, TextDelta) and event.kind == "answer":
            self._texts.append(event.text)
        return []

    def whole(self, stats: Stats) -> dict[str, object]:
        text = written_down(self._texts)
        made = {"id": new_id("cmp"), "type": COMPACTION, "encrypted_content": sealed(text)}
        return {"id": self.id, "object": "response.compaction", "created_at": int(time.time()),
                "output": [*named_items(self._stays, self.id), made], "usage": usage(stats)}


def written_down(texts: Sequence[str]) -> str:
    """Raises Problem where there is nothing."""
    if not (text := "".join(texts).strip()):
        raise Problem(500, "the model wrote nothing of the conversation down", FAILED, code="empty_compaction",
                      hint="send it whole, or its newest part alone")
    return text


def notes_room(n_ctx: int) -> int:
    """The tokens of what is written down of a conversation that fills its context, behind which an answer has room."""
    return min(MOST_TOKENS, int((1 - FULL) * n_ctx))


def most_of(asked: ResponsesAsked, n_ctx: int) -> int | None:
    """The tokens that a prompt may have before it is made short; None where it is left as it is. Raises Problem."""
    most = None
    for number, each in enumerate(asked.context_management or ()):
        where = f"context_management[{number}]"
        if each.get("type") != COMPACTION:
            raise Problem(400, f"{where}.type is {COMPACTION}, not {each.get('type')!r:.40}", param=f"{where}.type")
        stated = each.get("compact_threshold")
        if stated is not None and (not isinstance(stated, int) or isinstance(stated, bool) or stated < 1):
            raise Problem(400, f"{where}.compact_threshold is a number of tokens, 1 or more", param=f"{where}.compact_threshold")
        most = min(int(FULL * n_ctx), stated or n_ctx)
    return most


def newest(items: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The end of these to which an answer is wanted: what was said or given back last, with the calls that it was given back for."""
    at = len(items)
    while at and (kind_of(items[at - 1]) in OUTPUTS or kind_of(items[at - 1]) == "message" and items[at - 1].get("role") in STAYING):
        at -= 1
    if any(kind_of(item) in OUTPUTS for item in items[at:]):
        while at and kind_of(items[at - 1]) in MADE:
            at -= 1
    return items[at:]


def shortened(asked: ResponsesAsked, items: Sequence[dict[str, Any]], place: str) -> ResponsesAsked | None:
    """The request with what all of these come to in the place of those that are not its newest; the words are to be put where `place` is.
    None where it has nothing but these."""
    own = newest(items)
    before = items[begin_of([*items]) : len(items) - len(own)]
    if all(is_systems(item) or kind_of(item) == COMPACTION for item in before):
        return None
    systems = [item for item in items[: len(items) - len(own)] if is_systems(item)]
    return asked.model_copy(update={"input": [*systems, {"type": COMPACTION, "encrypted_content": sealed(place, alone=True)}, *own]})


def behind_notes(notes: Start, answer: Callable[[str], Start]) -> Start:
    """An answer to what a conversation comes to, which `notes` writes down first."""

    def begin(cancelled: Callable[[], bool]) -> Iterator[Event | AnswerEnded]:
        texts: list[str] = []
        for event in notes(cancelled):
            if isinstance(event, TextDelta):
                texts += [event.text] if event.kind == "answer" else []
            elif isinstance(event, Done) and not cancelled():
                yield AnswerEnded(replace(event.stats, text=written_down(texts)))
            else:
                yield event
        if not cancelled():
            yield from answer(written_down(texts))(cancelled)

    return begin


def filled(messages: Sequence[dict[str, Any]], place: str, text: str) -> list[dict[str, Any]]:
    """The messages of `shortened`, with the words in the place of what stands for them."""
    def of(content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": of(part["text"])} if isinstance(part.get("text"), str) else part for part in content]
        return content.replace(place, text) if isinstance(content, str) else content

    return [{**message, "content": of(message.get("content"))} for message in messages]
