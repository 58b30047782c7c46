"""A picture's, or a sound's, place in a text: a mark that names it. Messages, rendered prompts and what is known of a cache are texts, and
two of them are the same only where their pictures are.

A mark is 32 digits of the picture's hash between two letters of Unicode's private area. A template is not shown it: the message becomes
parts, as processors of transformers take them, and what the template writes for a picture becomes the mark again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ... import EffllmError, UsageError
from .senses import PICTURES, Sense

BEGIN, END, HEARD = "\ue7a0", "\ue7a1", "\ue7a2"  # HEARD ends the mark of a sound
MARK = re.compile(f"{BEGIN}([0-9a-f]{{32}})[{END}{HEARD}]")
Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


class PictureGone(EffllmError):
    """A picture has to be looked at again and is not at hand."""


def mark(digest: str, heard: bool = False) -> str:
    """What stands in a text for the picture, or the sound, of this hash."""
    return f"{BEGIN}{digest}{HEARD if heard else END}"


def digests(text: str) -> list[str]:
    """The pictures and sounds of a text, in order."""
    return MARK.findall(text)


def unmarked(text: str) -> str:
    """A text that a person reads: a picture, or a sound, is called one."""
    return MARK.sub(lambda found: f"[{'sound' if found[0].endswith(HEARD) else 'picture'} {found[1][:8]}]", text)


def parts_of(text: str, kind: str = "image") -> list[dict[str, str]]:
    """A text as a template takes it that knows of pictures, or what else is of this `kind`: `{"type": kind}` for each, in its place."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(MARK.split(text)):
        if number % 2:
            parts.append({"type": kind})
        elif piece := piece.strip("\n") if MARK.search(text) else piece:
            parts.append({"type": "text", "text": piece})
    return parts


def rendered(render: Render, messages: Sequence[Message], placeholder: str, written: str | None = None, sense: Sense = PICTURES) -> str:
    """A prompt of messages that have marks, by a template that writes `placeholder` for each picture. Templates differ in what they take as
    parts, and some know of no pictures, whose texts have `written` for each: the first way counts in which all pictures and all that the
    person said are there. Raises
    UsageError, and what `render` raises of the last way."""
    said = [each["content"] or "" for each in messages]
    marks = [found[0] for each in said for found in MARK.finditer(each)]
    in_parts = partial(parts_of, kind=sense.part)
    ways = (lambda text: in_parts(text) if MARK.search(text) else text, in_parts,
            lambda text: MARK.sub(lambda found: written or placeholder, text))
    texts = [part["text"].strip() for each in messages if each["role"] == "user" for part in parts_of(each["content"] or "")
             if part["type"] == "text"]
    failed: Exception | None = None
    if any(placeholder in text for text in said):
        raise UsageError(f"a message has {placeholder} in it, which stands for a {sense.noun} here",
                         "write it otherwise, as with a space in it")
    for way in ways:
        try:
            text = render([{**each, "content": each["content"] and way(each["content"])} for each in messages])
        except Exception as error:  # a stranger's program; of the last way it is raised
            failed = error
            continue
        pieces = text.split(placeholder)
        if len(pieces) == len(marks) + 1 and all(each in text for each in texts):
            return pieces[0] + "".join(own + piece for own, piece in zip(marks, pieces[1:], strict=True))
    if failed is not None:
        raise failed
    raise UsageError(f"this model's chat template has no place for {f'a {sense.noun}' if len(marks) == 1 else f'these {sense.noun}s'}",
                     f"{sense.noun}s go with a user's message; or one {sense.noun} a message")
