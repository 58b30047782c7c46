"""Tool results as text for the model, and images. They are untrusted: nothing in them is a special token or a terminal escape."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..images.media_markers import BEGIN, END
from ..tokens.plain_text import TOKEN_BREAK
from ..tokens.terminal_text import sanitize

EMPTY_RESULT = "(nothing)"
# Private characters by which our texts mark media and token breaks, replaced.
PRIVATE_CHARACTERS = dict.fromkeys(map(ord, (BEGIN, END, TOKEN_BREAK)), "\ufffd")


@dataclass(frozen=True)
class ToolResult:
    """What a tool returned."""

    text: str  # also names images and content that is neither text nor image
    images: tuple[bytes, ...] = ()  # image files
    is_error: bool = False


def sanitized(text: str) -> str:
    """Untrusted text without terminal escapes, control characters and the private characters used here."""
    return sanitize(text.encode("utf-8", "replace").decode()).translate(PRIVATE_CHARACTERS)


def parse_result(result: Mapping[str, Any]) -> ToolResult:
    """Parse the result of tools/call."""
    try:
        return _parse(result)
    except RecursionError:  # JSON may be read at a deeper nesting than it can be written
        return ToolResult("Error: the result is nested too deeply", is_error=True)


def _parse(result: Mapping[str, Any]) -> ToolResult:
    texts, images = [], []
    content = result.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping):
            text, image = _parse_part(part)
            texts.append(text)
            images += [image] if image else []
    if not texts and result.get("structuredContent") is not None:
        texts.append(json.dumps(result["structuredContent"], ensure_ascii=False))
    is_error = result.get("isError") is True
    text = sanitized("\n".join(texts)).strip() or EMPTY_RESULT
    return ToolResult(f"Error: {text}" if is_error else text, tuple(images), is_error)


def _parse_part(part: Mapping[str, Any]) -> tuple[str, bytes | None]:
    kind = part.get("type")
    if kind == "text":
        return str(part.get("text") or ""), None
    if kind == "image":
        try:
            return "", base64.b64decode(part.get("data") or "", validate=True) or None
        except (binascii.Error, ValueError, TypeError):
            return "[unreadable image]", None
    if kind == "resource":
        inside = part.get("resource") if isinstance(part.get("resource"), Mapping) else {}
        where = str(inside.get("uri") or "a file")
        return (f"{where}:\n{inside['text']}" if isinstance(inside.get("text"), str) else f"[{where}: not text, left out]"), None
    if kind == "resource_link":
        return f"[{part.get('title') or part.get('name') or 'a file'}: {part.get('uri')}]", None
    return f"[{'audio' if kind == 'audio' else 'unsupported content'}, left out]", None
