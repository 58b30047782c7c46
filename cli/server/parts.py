"""Where the parts of a request's messages lie in each API that has such, for whoever looks for pictures, sounds and files among them: the
parts, their field, and whether a tool gave them back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .responses_fields import OUTPUTS
from .turns import TOOL

if TYPE_CHECKING:
    from .fields import ChatAsked
    from .messages_fields import CountAsked
    from .responses_fields import ResponsesAsked


def of_chat(asked: ChatAsked) -> Iterator[tuple[object, str, bool]]:
    for number, message in enumerate(asked.messages):
        yield message.content, f"messages[{number}].content", message.role == TOOL


def of_responses(asked: ResponsesAsked) -> Iterator[tuple[object, str, bool]]:
    """Of messages, and of what tools gave back."""
    for number, item in enumerate(asked.input if isinstance(asked.input, list) else ()):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind in ("message", *OUTPUTS):
            field = "output" if kind in OUTPUTS else "content"
            yield item.get(field), f"input[{number}].{field}", kind in OUTPUTS


def of_messages(asked: CountAsked) -> Iterator[tuple[object, str, bool]]:
    """Of turns, and of the blocks of type tool_result in them."""
    for number, turn in enumerate(asked.messages):
        where = f"messages[{number}].content"
        yield turn.content, where, False
        for at, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            if isinstance(block, dict) and block.get("type") == "tool_result":
                yield block.get("content"), f"{where}[{at}].content", True
