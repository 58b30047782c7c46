"""A conversation of OpenAI's Responses API in short: what its user said, and an item of type compaction that holds what the model wrote of
all that came before. Who sends that item again goes on behind it, with a prompt of a few hundred tokens instead of thousands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...runtime.events import Call, PromptRead, Stats, TextDelta
from .fields import Reasoning
from .kept_responses import named_items
from .problems import FAILED, Problem
from .responses_fields import COMPACTION, ResponsesAsked, kind_of
from .responses_shape import new_id, usage
from .sealing import sealed
from .shapes import Shape

COMPACT = ("/v1/responses/compact", "/responses/compact")
MOST_TOKENS = 2048  # of what is written, unless a request says
STAYING = ("user", "system", "developer")  # whose messages are in the new list as they were
ASKS = ("Write down what was said so far, so that the conversation can go on from your notes alone: what is wanted, what was found out and "
        "decided, what was done and what is left, with names, numbers and file names as they were. Write nothing else.")


def summing_up(asked: ResponsesAsked, items: Sequence[dict[str, Any]]) -> ResponsesAsked:
    """A request for what these items come to. Reasoning about them is left out, unless it is asked for."""
    return asked.model_copy(update={
        "input": [*items, {"role": "user", "content": ASKS}], "tools": None, "tool_choice": None, "text": None, "stream": False,
        "reasoning": asked.reasoning or Reasoning(effort="none"),
        "max_output_tokens": MOST_TOKENS if asked.max_output_tokens is None else asked.max_output_tokens})


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
        if not (text := "".join(self._texts).strip()):
            raise Problem(500, "the model wrote nothing of the conversation down", FAILED, code="empty_compaction",
                          hint="send it whole, or its newest part alone")
        made = {"id": new_id("cmp"), "type": COMPACTION, "encrypted_content": sealed(text)}
        return {"id": self.id, "object": "response.compaction", "created_at": int(time.time()),
                "output": [*named_items(self._stays, self.id), made], "usage": usage(stats)}
