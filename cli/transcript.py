"""A conversation as a document: Markdown for people, JSON for programs. The ending of the file's name says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from .. import UsageError
from ..runtime.images.marks import unmarked
from ..runtime.tokens.stream_filters import sanitize

if TYPE_CHECKING:
    from ..runtime.session import Session

ENDINGS = (".md", ".markdown", ".json")
NAMES = {"user": "You", "assistant": "Answer"}


def transcript(path: Path, model: str, session: Session) -> str:
    """The text for `path`. Raises UsageError for an ending that names no format."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"{path.name} ends in neither .md nor .json", "/export talk.md")
    return as_json(model, session) if path.suffix.lower() == ".json" else as_markdown(model, session)


def as_json(model: str, session: Session) -> str:
    """`{model, system, messages}`. Characters beyond ASCII are escaped, control characters with them."""
    messages = [{**message, "content": unmarked(message["content"])} for message in session.messages]
    return json.dumps({"model": model, "system": session.system, "messages": messages}, indent=2) + "\n"


def as_markdown(model: str, session: Session) -> str:
    """A heading per turn. Control characters are left out: the file may be shown with `cat`."""
    turns = [("System", session.system)] if session.system else []
    turns += [(NAMES.get(message["role"], message["role"]), unmarked(message["content"])) for message in session.messages]
    parts = [f"# A conversation with {model}", *(f"## {name}\n\n{text.strip()}" for name, text in turns)]
    return sanitize("\n\n".join(parts)) + "\n"
