"""`/lora` in a chat: the scale of each adapter from now on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import UsageError

if TYPE_CHECKING:
    from .conversation import Conversation

USAGE = "/lora [NAME SCALE]"


def set_adapter(chat: Conversation, rest: str) -> None:
    """`/lora`, `/lora NAME`, `/lora NAME 0.5`. Raises UsageError."""
    engine = chat.session.engine
    names, words = engine.prepared.adapters.names, rest.split()
    if not names:
        raise UsageError("this chat has no adapter", "load them at the start: effllm chat MODEL --lora ADAPTER, ADAPTER:0 for later")
    if words:
        name, *scales = words
        if name not in names or len(scales) > 1:
            raise UsageError(f"there is no adapter {name!r}" if name not in names else f"{' '.join(scales)} is not a scale", USAGE)
        if scales:
            previous = engine.adapter_scales
            engine.choose(tuple(_scale(*scales) if each == name else scale for each, scale in zip(names, previous, strict=True)))
            if engine.adapter_scales != previous and chat.session.messages:
                chat.screen.note("the next message processes the conversation again")
    width = max(map(len, names))
    for name, scale in zip(names, engine.adapter_scales, strict=True):
        if not words or name == words[0]:
            chat.screen.note(f"  {name:<{width}}  {scale:g}")


def _scale(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not an adapter scale", "0 disables it, 1 applies it fully, 0.5 half") from error
