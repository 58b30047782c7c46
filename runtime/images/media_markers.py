"""Markers: what stands in a text for an image or audio clip. Messages, rendered prompts and cache keys are texts, so two of them are equal
only if their media are.

A marker is 32 hex digits of the item's hash between two private-use code points. Chat templates never see it: the message becomes a list of
content parts, as processors of transformers take them, and the placeholder that the template writes becomes the marker again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ... import EffllmError, UsageError
from .modality import AUDIO_INPUT, IMAGE_INPUT, Modality

BEGIN, END, AUDIO_END = "\ue7a0", "\ue7a1", "\ue7a2"  # AUDIO_END ends the marker of an audio clip
MARKER = re.compile(f"{BEGIN}([0-9a-f]{{32}})[{END}{AUDIO_END}]")
ADJACENT_MARKER = re.compile(f"(?<=[{END}{AUDIO_END}]){MARKER.pattern}")  # a marker directly after another
Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


class MediaGone(EffllmError):
    """An item has to be encoded again and its data is no longer in memory."""


def media_marker(digest: str, heard: bool = False) -> str:
    """The marker of the item with this digest."""
    return f"{BEGIN}{digest}{AUDIO_END if heard else END}"


def marker_digests(text: str) -> list[str]:
    """Digests of the media in a text, in order."""
    return MARKER.findall(text)


def describe_markers(text: str) -> str:
    """A text for display, with a short description in place of each marker."""
    return MARKER.sub(lambda found: f"[{marker_modality(found).noun} {found[1][:8]}]", text)


def marker_modality(found: re.Match[str]) -> Modality:
    """The modality of a MARKER match."""
    return AUDIO_INPUT if found[0].endswith(AUDIO_END) else IMAGE_INPUT


def content_parts(text: str) -> list[dict[str, str]]:
    """Content parts for a chat template with media support: `{"type": "image"}` or "audio" for each marker, "text" between."""
    parts: list[dict[str, str]] = []
    kinds = [{"type": marker_modality(found).part} for found in MARKER.finditer(text)]
    for number, piece in enumerate(MARKER.split(text)):
        if number % 2:
            parts.append(kinds[number // 2])
        elif piece := piece.strip("\n") if kinds else piece:
            parts.append({"type": "text", "text": piece})
    return parts


def render_with_media(render: Render, messages: Sequence[Message], places: Mapping[Modality, tuple[str, str]]) -> str:
    """Render messages that contain markers. `places`: for each modality the placeholder that the template writes, and the text to use where
    the template has none. Templates differ in the content format they accept, so formats are tried in turn; the first counts whose output
    has all placeholders in order and all user text. Raises UsageError, and what `render` raised for the last format."""
    contents = [message["content"] or "" for message in messages]
    markers = [found for content in contents for found in MARKER.finditer(content)]
    modalities = [marker_modality(found) for found in markers]
    if unsupported := [modality for modality in modalities if modality not in places]:
        raise UsageError(f"this conversation contains {unsupported[0].plural}, which the model does not accept",
                         "continue with a model that does")
    for text in contents:
        for modality, (placeholder, _) in places.items():
            if placeholder in text:
                raise UsageError(f"a message contains {placeholder}, the placeholder for an {modality.noun}",
                                 "rewrite it, for example with a space inside")
    formats = (lambda text: content_parts(text) if MARKER.search(text) else text, content_parts,
               lambda text: MARKER.sub(lambda found: places[marker_modality(found)][1], text))
    user_texts = [part["text"].strip() for message in messages if message["role"] == "user"
                  for part in content_parts(message["content"] or "") if part["type"] == "text"]
    placeholder_pattern = re.compile("|".join(f"({re.escape(placeholder)})" for placeholder, _ in places.values()))
    expected, failed, drops_text = [places[modality][0] for modality in modalities], None, False
    for convert in formats:
        try:
            text = render([{**message, "content": message["content"] and convert(message["content"])} for message in messages])
        except Exception as error:  # untrusted code may raise anything; the last format's error is raised
            failed = error
            continue
        if [found[0] for found in placeholder_pattern.finditer(text)] != expected:
            continue
        if all(user_text in text for user_text in user_texts):
            pieces = iter(markers)
            return placeholder_pattern.sub(lambda found, pieces=pieces: next(pieces)[0], text)
        drops_text = bool(markers)
    if drops_text:
        raise UsageError(f"this model's chat template drops text next to an {modalities[0].noun}",
                         f"send the {modalities[0].noun} without text")
    if failed is not None:
        raise failed
    if not markers:
        (modality, _), *_ = places.items()
        raise UsageError(f"this model's chat template drops text without an {modality.noun}",
                         f"send an {modality.noun} with it (run and chat: --{modality.part})")
    found = dict.fromkeys(modalities or places)
    one, many = " or ".join(modality.noun for modality in found), " or ".join(modality.plural for modality in found)
    raise UsageError(f"this model's chat template has no place for {f'this {one}' if len(markers) == 1 else f'these {many}'}",
                     f"attach {many} to a user's message, one {one} per message")
