"""Anthropic-defined client tools (bash, text editor, memory): requests give a type and no schema, as Anthropic's models are trained on
them. Other models get a description and a schema, as for any function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _commands(*names: str) -> Schema:
    return {"type": "string", "enum": [*names], "description": "What to do."}


RANGE = {"type": "array", "items": {"type": "integer"},
         "description": "Of view: the first and the last line, from 1; -1 is the last of all."}
IN_A_FILE = {
    "path": _text("The absolute path of the file or folder."), "view_range": RANGE,
    "file_text": _text("Of create: the whole text of the file."),
    "old_str": _text("Of str_replace: the text to replace, which is in the file once."),
    "insert_line": {"type": "integer", "description": "Of insert: the line behind which the text comes; 0 is the beginning."}}
OF_EDITORS = {**IN_A_FILE, "new_str": _text("Of str_replace: what takes its place."), "insert_text": _text("Of insert: the text.")}
OF_FIRST_EDITORS = {**IN_A_FILE, "new_str": _text("Of str_replace: what takes its place. Of insert: the text.")}
RESTART = {"type": "boolean", "description": "True begins a new shell, without a command."}
BASH = ("Runs a command in a bash shell that stays open, and gives back what it prints.",
        _object((), command=_text("The command."), restart=RESTART))
EDITOR = "Looks at files and folders, creates and changes files."
MEMORY = ("Keeps notes in files below /memories, from one conversation to the next: look there before anything else.",
          _object(("command",), command=_commands("view", "create", "str_replace", "insert", "delete", "rename"), **OF_EDITORS,
                  old_path=_text("Of rename: the path as it is."), new_path=_text("Of rename: the path as it is to be.")))
FIRST_EDITOR = EDITOR, _object(("command", "path"), command=_commands("view", "create", "str_replace", "insert", "undo_edit"),
                               **OF_FIRST_EDITORS)
# Tool type -> description and schema of the function.
KNOWN: Mapping[str, tuple[str, Schema]] = {
    "bash_20241022": BASH, "bash_20250124": BASH, "memory_20250818": MEMORY, "text_editor_20241022": FIRST_EDITOR,
    "text_editor_20250124": FIRST_EDITOR,
    "text_editor_20250429": (EDITOR, _object(("command", "path"), command=_commands("view", "create", "str_replace", "insert"),
                                             **OF_FIRST_EDITORS)),
    "text_editor_20250728": (EDITOR, _object(("command", "path"), command=_commands("view", "create", "str_replace", "insert"),
                                             **OF_EDITORS))}
