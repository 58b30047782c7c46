"""`/file`, `/image` and `/audio`: what goes with the next message of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import EffllmError
from .attachment import Attachment, named_path, read_text
from .pictures import read_file, taken

if TYPE_CHECKING:
    from ..runtime.images.senses import Sense
    from .conversation import Conversation


def attach(chat: Conversation, rest: str) -> None:
    """`/file PATH`, `/file off`, `/file` alone."""
    if rest == "off":
        chat.attached[:] = [each for each in chat.attached if each.picture is not None]
    elif rest:
        path = named_path(rest)
        text = read_text(path)
        tokens, room = chat.session.count(text), chat.session.n_ctx - chat.session.used - sum(each.tokens for each in chat.attached)
        if tokens >= room:
            raise EffllmError(f"{path} has {tokens} tokens, and {max(0, room)} of the context of {chat.session.n_ctx} are free",
                              "a larger context (-c), /clear, or a part of the file")
        chat.attached.append(Attachment(path.name, text, tokens))
    say_attached(chat)


def say_attached(chat: Conversation) -> None:
    for each in chat.attached:
        off = "/file off" if each.picture is None else f"/{each.picture.sense.part} off"
        chat.screen.note(f"{each.name}: {each.tokens} tokens go with the next message ({off} drops them)")
    if not chat.attached:
        chat.screen.note("no file goes with the next message (/file PATH adds one)")


def attach_picture(chat: Conversation, rest: str) -> None:
    """`/image PATH`, `/image off`, `/image` alone."""
    from ..runtime.images.senses import PICTURES

    attach_taken(chat, rest, PICTURES)


def attach_sound(chat: Conversation, rest: str) -> None:
    """`/audio PATH`, `/audio off`, `/audio` alone."""
    from ..runtime.images.senses import SOUNDS

    attach_taken(chat, rest, SOUNDS)


def attach_taken(chat: Conversation, rest: str, sense: Sense) -> None:
    """`attach_picture` or `attach_sound`."""
    if rest == "off":
        chat.attached[:] = [each for each in chat.attached if each.picture is None or each.picture.sense is not sense]
    elif rest:
        chat.session.demand_sight(sense)
        path = named_path(rest)
        chat.attached += taken([(path.name, read_file(path, sense))], chat.session)
    say_attached(chat)
