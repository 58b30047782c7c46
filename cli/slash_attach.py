"""`/file`, `/image`, `/video` and `/audio`: attachments of the next message of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import EffllmError
from .attachment import Attachment, expand_path, read_text
from .media_files import as_media_items, modality_of, read_media_file

if TYPE_CHECKING:
    from .conversation import Conversation


def attach(chat: Conversation, rest: str) -> None:
    """`/file PATH`, `/file off`, `/file` alone."""
    if rest == "off":
        chat.attached[:] = [attachment for attachment in chat.attached if attachment.media]
    elif rest:
        path = expand_path(rest)
        text = read_text(path)
        tokens = chat.session.count(text)
        available = chat.session.n_ctx - chat.session.used - sum(attachment.tokens for attachment in chat.attached)
        if tokens >= available:
            raise EffllmError(f"{path} has {tokens} tokens, and {max(0, available)} of the context of {chat.session.n_ctx} are free",
                              "a larger context (-c), /clear, or a part of the file")
        chat.attached.append(Attachment(path.name, text, tokens))
    list_attachments(chat)


def list_attachments(chat: Conversation) -> None:
    for attachment in chat.attached:
        chat.screen.note(f"{attachment.name}: {attachment.tokens} tokens attached to the next message (/{attachment.part} off drops them)")
    if not chat.attached:
        chat.screen.note("no files attached to the next message (/file PATH adds one)")


def attach_image(chat: Conversation, rest: str) -> None:
    """`/image PATH`, `/image off`, `/image` alone."""
    attach_media(chat, rest, "image")


def attach_video(chat: Conversation, rest: str) -> None:
    """`/video PATH`, `/video off`, `/video` alone."""
    attach_media(chat, rest, "video")


def attach_audio(chat: Conversation, rest: str) -> None:
    """`/audio PATH`, `/audio off`, `/audio` alone."""
    attach_media(chat, rest, "audio")


def attach_media(chat: Conversation, rest: str, part: str) -> None:
    """Attach media of the kind `part`: image, video or audio."""
    if rest == "off":
        chat.attached[:] = [attachment for attachment in chat.attached if attachment.part != part]
    elif rest:
        chat.session.require_modality(modality_of(part))
        path = expand_path(rest)
        with chat.screen.waiting(f"reading {path.name}"):
            file = read_media_file(path, part)
        chat.attached += as_media_items([file], chat.session)
    list_attachments(chat)
