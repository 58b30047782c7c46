"""`/file`, `/image`, `/video` and `/audio`: attachments of the next message of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import EffllmError
from .attachment import Attachment, named_path, read_text
from .media_files import as_media_items, read_media_file, sense_of

if TYPE_CHECKING:
    from .conversation import Conversation


def attach(chat: Conversation, rest: str) -> None:
    """`/file PATH`, `/file off`, `/file` alone."""
    if rest == "off":
        chat.attached[:] = [each for each in chat.attached if each.shown]
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
        chat.screen.note(f"{each.name}: {each.tokens} tokens attached to the next message (/{each.part} off drops them)")
    if not chat.attached:
        chat.screen.note("no files attached to the next message (/file PATH adds one)")


def attach_picture(chat: Conversation, rest: str) -> None:
    """`/image PATH`, `/image off`, `/image` alone."""
    attach_taken(chat, rest, "image")


def attach_video(chat: Conversation, rest: str) -> None:
    """`/video PATH`, `/video off`, `/video` alone."""
    attach_taken(chat, rest, "video")


def attach_sound(chat: Conversation, rest: str) -> None:
    """`/audio PATH`, `/audio off`, `/audio` alone."""
    attach_taken(chat, rest, "audio")


def attach_taken(chat: Conversation, rest: str, part: str) -> None:
    """Attach media of the kind `part`: image, video or audio."""
    if rest == "off":
        chat.attached[:] = [each for each in chat.attached if each.part != part]
    elif rest:
        chat.session.demand_sight(sense_of(part))
        path = named_path(rest)
        with chat.screen.waiting(f"reading {path.name}"):
            given = read_media_file(path, part)
        chat.attached += as_media_items([given], chat.session)
    say_attached(chat)
