"""A conversation as JSON: messages, system prompt and sampling settings. Written by `/save ./FILE.json`, and part of every saved
session."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ... import EffllmError, UsageError
from ..files.atomic_write import write_text_atomic
from ..files.bounded_read import read_text
from ..sampler import SamplerSettings

FORMAT, VERSION = "effllm-session", 1
CALL_MESSAGE_FIELDS, RESULT_MESSAGE_FIELDS = frozenset({"reasoning_content"}), frozenset({"tool_call_id", "name"})
MAX_FILE_NBYTES = 256 << 20  # bytes of such a file
HINT = "give a file that /save wrote"


@dataclass(frozen=True)
class History:
    """A conversation."""

    messages: list[dict[str, Any]]  # with `role` and `content`, and the other fields of OpenAI's API for tool calls
    system: str | None
    settings: SamplerSettings

    def to_json(self) -> dict[str, object]:
        settings = {key: value for key, value in json.loads(json.dumps(asdict(self.settings))).items() if value is not None}
        return {"format": FORMAT, "version": VERSION, "system": self.system, "messages": self.messages, "settings": settings}


def save_conversation(history: History, path: Path) -> None:
    """Write a conversation, atomically."""
    # escaped: a lone surrogate has no UTF-8 encoding
    write_text_atomic(path, json.dumps(history.to_json(), indent=2) + "\n", "choose another place: /save FILE")


def load_conversation(path: Path) -> History:
    """Read a file that `save_conversation` wrote. Raises EffllmError if it is not one."""
    try:
        content = json.loads(read_text(path, MAX_FILE_NBYTES))
    except OSError as error:
        reason = os.strerror(errno.EISDIR) if path.is_dir() else error.strerror
        raise EffllmError(f"{path}: {reason}", HINT) from None
    except (ValueError, RecursionError):  # the JSON library's error would not help a user who named the wrong file
        raise EffllmError(f"{path} is not a conversation", HINT) from None
    return parse_conversation(content, str(path))


def parse_conversation(content: object, where: str, hint: str = HINT) -> History:
    """A conversation from its JSON. `where`: prefix of the errors; `hint`: their next step. Raises EffllmError."""
    if not isinstance(content, Mapping) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise EffllmError(f"{where} is not a conversation of this version", hint)
    messages = content.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)) or not isinstance(content.get("system"), str | None):
        raise EffllmError(f"{where}: the messages are malformed", hint)
    settings = content.get("settings", {})
    if not isinstance(settings, Mapping) or (unknown := set(settings) - {field.name for field in fields(SamplerSettings)}):
        what = f"unknown setting {min(unknown)!r:.80}" if isinstance(settings, Mapping) else "the settings are malformed"
        raise EffllmError(f"{where}: {what}", hint)
    try:
        settings = SamplerSettings(**settings)
    except UsageError as error:
        raise EffllmError(f"{where}: {error.message}", hint) from None
    return History(messages, content.get("system"), settings)


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in ("role", "content")):
        return False
    other_fields = {key: part for key, part in value.items() if key not in ("role", "content")}
    calls = other_fields.pop("tool_calls", None)
    if calls is not None and not (value["role"] == "assistant" and isinstance(calls, list) and calls and all(map(_is_call, calls))):
        return False
    allowed = CALL_MESSAGE_FIELDS if calls is not None else RESULT_MESSAGE_FIELDS if value["role"] == "tool" else frozenset()
    return other_fields.keys() <= allowed and all(isinstance(part, str) for part in other_fields.values())


def _is_call(value: object) -> bool:
    """Arguments must be the text of a JSON object; what a template makes of them is not checked here."""
    if not isinstance(value, dict) or value.keys() != {"id", "type", "function"} or value["type"] != "function":
        return False
    function = value["function"]
    if not isinstance(value["id"], str) or not isinstance(function, dict) or function.keys() != {"name", "arguments"}:
        return False
    try:
        return bool(function["name"]) and isinstance(function["name"], str) and isinstance(json.loads(function["arguments"]), dict)
    except (TypeError, ValueError, RecursionError):
        return False
