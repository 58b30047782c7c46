"""Exports a conversation: Markdown for people, JSON for programs, by the file's extension."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from .. import UsageError
from ..runtime.images.media_markers import describe_markers
from ..runtime.tokens.terminal_text import sanitize

if TYPE_CHECKING:
    from ..runtime.session import Session

ENDINGS = (".md", ".markdown", ".json")
BRIEF = 100  # letters of a call, or of what it gave back
NAMES = {"user": "You", "assistant": "Answer"}


def transcript(path: Path, model: str, session: Session) -> str:
    """The text for `path`. Raises UsageError for an unknown extension."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"{path.name} ends in neither .md nor .json", "/export talk.md")
    return as_json(model, session) if path.suffix.lower() == ".json" else as_markdown(model, session)


def as_json(model: str, session: Session) -> str:
    """`{model, system, messages}` in ASCII, control characters escaped."""
    messages = [{**message, "content": describe_markers(message["content"])} for message in session.messages]
    return json.dumps({"model": model, "system": session.system, "messages": messages}, indent=2) + "\n"


def as_markdown(model: str, session: Session) -> str:
    """A heading per message, and one line per tool call and result. Control characters are removed, so that the file can be shown with
    `cat`."""
    turns = [("System", session.system)] if session.system else []
    for message in session.messages:
        name, text = NAMES.get(message["role"], message["role"]), describe_markers(message["content"])
        if message["role"] == "tool":
            text = f"> {message.get('name', 'a tool')} returned: {brief(text)}"
        for call in message.get("tool_calls", ()):
            text += f"\n\n> called `{call['function']['name']}({brief(call['function']['arguments'])})`"
        if turns and turns[-1][0] == "Answer" and name in ("tool", "Answer"):  # rounds of one answer
            turns[-1] = ("Answer", f"{turns[-1][1].strip()}\n\n{text.strip()}")
        else:
            turns.append((name, text))
    parts = [f"# A conversation with {model}", *(f"## {name}\n\n{text.strip()}" for name, text in turns)]
    return sanitize("\n\n".join(parts)) + "\n"


def brief(text: str) -> str:
    """The first line of a text, with its length if there is more."""
    line = " ".join(text.split())
    return line if len(line) <= BRIEF else f"{line[: BRIEF - 1]}… ({len(text)} characters)"
