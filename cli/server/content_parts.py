"""The content parts of a request's messages in each API, for those that look for media and files: the parts, their field, and whether a
tool returned them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .message_builder import TOOL
from .responses_requests import OUTPUTS

if TYPE_CHECKING:
    from .messages_requests import CountTokensRequest
    from .openai_requests import ChatRequest
    from .responses_requests import ResponsesRequest


def of_chat(payload: ChatRequest) -> Iterator[tuple[object, str, bool]]:
    for number, message in enumerate(payload.messages):
        yield message.content, f"messages[{number}].content", message.role == TOOL


def of_responses(payload: ResponsesRequest) -> Iterator[tuple[object, str, bool]]:
    """Of messages and tool outputs."""
    for number, item in enumerate(payload.input if isinstance(payload.input, list) else ()):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind in ("message", *OUTPUTS):
            field = "output" if kind in OUTPUTS else "content"
            yield item.get(field), f"input[{number}].{field}", kind in OUTPUTS


def of_messages(payload: CountTokensRequest) -> Iterator[tuple[object, str, bool]]:
    """Of messages, and of the tool_result blocks in them."""
    for number, turn in enumerate(payload.messages):
        where = f"messages[{number}].content"
        yield turn.content, where, False
        for at, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            if isinstance(block, dict) and block.get("type") == "tool_result":
                yield block.get("content"), f"{where}[{at}].content", True
