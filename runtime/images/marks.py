"""A picture's place in a text: a mark that names it. Messages, rendered prompts and what is known of a cache are texts, and two of them are
the same only where their pictures are.

A mark is 32 digits of the picture's hash between two letters of Unicode's private area. A template is not shown it: the message becomes
parts, as processors of transformers take them, and what the template writes for a picture becomes the mark again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ... import EffllmError, UsageError

BEGIN, END = "\ue7a0", "\ue7a1"
MARK = re.compile(f"{BEGIN}([0-9a-f]{{32}}){END}")
Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


class PictureGone(EffllmError):
    """A picture has to be looked at again and is not at hand."""


def mark(digest: str) -> str:
    """What stands in a text for the picture of this hash."""
    return f"{BEGIN}{digest}{END}"


def digests(text: str) -> list[str]:
    """The pictures of a text, in order."""
    return MARK.findall(text)


def unmarked(text: str) -> str:
    """A text that a person reads: a picture is called one."""
    return MARK.sub(lambda found: f"[picture {found[1][:8]}]", text)


def parts_of(text: str) -> list[dict[str, str]]:
    """A text as a template takes it that knows of pictures: `{"type": "image"}` for each, in its place."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(MARK.split(text)):
        if number % 2:
            parts.append({"type": "image"})
        elif piece := piece.strip("\n") if MARK.search(text) else piece:
            parts.append({"type": "text", "text": piece})
    return parts


def rendered(render: Render, messages: Sequence[Message], placeholder: str, written: str | None = None) -> str:
    """A prompt of messages that have marks, by a template that writes `placeholder` for each picture. Templates differ in what they take as
    parts, and some know of no pictures, whose texts have `written` for each: the first way counts in which all pictures and all that the
    person said are there. Raises
    UsageError, and what `render` raises of the last way."""
    said = [each["content"] or "" for each in messages]
    pictures = [digest for each in said for digest in digests(each)]
    ways = (lambda text: parts_of(text) if MARK.search(text) else text, parts_of,
            lambda text: MARK.sub(lambda found: written or placeholder, text))
    texts = [part["text"].strip() for each in messages if each["role"] == "user" for part in parts_of(each["content"] or "")
             if part["type"] == "text"]
    failed: Exception | None = None
    if any(placeholder in text for text in said):
        raise UsageError(f"a message has {placeholder} in it, which stands for a picture here", "write it otherwise, as with a space in it")
    for way in ways:
        try:
            text = render([{**each, "content": each["content"] and way(each["content"])} for each in messages])
        except Exception as error:  # a stranger's program; of the last way it is raised
            failed = error
            continue
        pieces = text.split(placeholder)
        if len(pieces) == len(pictures) + 1 and all(each in text for each in texts):
            return pieces[0] + "".join(mark(digest) + piece for digest, piece in zip(pictures, pieces[1:], strict=True))
    if failed is not None:
        raise failed
    raise UsageError(f"this model's chat template has no place for {'a picture' if len(pictures) == 1 else 'these pictures'}",
                     "pictures go with a user's message; or one picture a message")
