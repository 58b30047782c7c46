"""Imports an Ollama Modelfile: an alias, and a table of the user's settings file."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import UsageError, ls, not_written, typed
from .ollama_parameters import REPEATABLE, SETTING_NAMES, as_setting, toml_table
from .settings import MODEL_TABLE, PROJECT_FILE, read_file, settings_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..runtime.library.aliases import CatalogEntry
    from ..runtime.library.modelfile import Instruction
    from .environment import Environment

HUBS = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
MAX_LICENCE_LENGTH = 40
# Instruction -> why it is ignored.
IGNORED = {"TEMPLATE": "the model's own chat template is used", "MESSAGE": "conversations start empty",
        "RENDERER": "it is internal to Ollama", "PARSER": "it is internal to Ollama", "REQUIRES": "it requires a version of Ollama"}


def import_modelfile(name: str, path: Path, environment: Environment) -> tuple[CatalogEntry, list[str]]:
    """Write the alias `name` and its settings. Returns the alias, and a note for each ignored instruction. If EffllmError is raised,
    nothing was written."""
    from ..runtime.library.aliases import check_alias, write_alias
    from ..runtime.library.modelfile import read_modelfile

    check_alias(name)
    path = Path(os.path.abspath(path.expanduser()))
    instructions = read_modelfile(path)
    settings, ignored = settings_of(instructions, path)
    entry, notes = alias_entry(name, instructions, path, environment)
    text = _with_table(name, settings, path, environment) if settings else None
    write_alias(environment.variables, entry)
    if text is not None:
        _write(text, environment)
    return entry, [*notes, *ignored]


def settings_of(instructions: Sequence[Instruction], path: Path) -> tuple[dict[str, object], list[str]]:
    """Settings by key, and the instructions without a counterpart. Raises UsageError naming the line of an invalid value."""
    settings, ignored = {}, []
    for instruction in instructions:
        where = f"{path}:{instruction.line}"
        if instruction.name == "PARAMETER" and instruction.about.lower() in SETTING_NAMES:
            key, value = as_setting(instruction.about.lower(), instruction.value, where)
            settings[key] = [*settings.get(key, ()), *value] if instruction.about.lower() == REPEATABLE else value
        elif instruction.name == "PARAMETER":
            ignored.append(f"line {instruction.line}: PARAMETER {instruction.about} is ignored: effllm has no setting like it")
        elif instruction.name == "SYSTEM":
            settings["system"] = instruction.value
        elif instruction.name == "ADAPTER":
            adapter = _relative_path(path, instruction.value)
            if adapter is None or not os.path.exists(adapter):
                raise UsageError(f"{where}: there is no adapter {instruction.value}", "ADAPTER names a folder or a GGUF file")
            settings["lora"] = [*settings.get("lora", ()), str(adapter)]
        elif instruction.name in IGNORED:
            ignored.append(f"line {instruction.line}: {instruction.name} is ignored: {IGNORED[instruction.name]}")
    return settings, ignored


def alias_entry(name: str, instructions: Sequence[Instruction], path: Path, environment: Environment) -> tuple[CatalogEntry, list[str]]:
    """The alias for the file's FROM, and its notes."""
    from ..runtime.library.external_models import local_name
    from ..runtime.library.listing import entry_for

    first, *others = [instruction for instruction in instructions if instruction.name == "FROM"]
    model = _relative_path(path, first.value)
    text = HUBS.sub("", first.value) if model is None else str(model)
    # A name in a Modelfile is first looked up in Ollama's library.
    entry = entry_for(name, (local_name(first.value, environment.variables) if model is None else None) or text, environment.variables)
    licence_lines = (line.strip() for instruction in instructions if instruction.name == "LICENSE"
                     for line in instruction.value.splitlines())
    licence = next(filter(None, licence_lines), None)
    if entry.licence is None and licence is not None:
        entry = replace(entry, licence=licence[:MAX_LICENCE_LENGTH].strip())
    return entry, [f"line {instruction.line}: a second FROM is ignored: a projector file is named by --mmproj {typed(instruction.value)}"
                   for instruction in others]


def _relative_path(path: Path, value: str) -> Path | None:
    """A path relative to the Modelfile; None for a name."""
    from ..runtime.library.model_name import exists

    resolved = Path(os.path.abspath(path.parent / Path(value).expanduser()))
    is_path = value.startswith((".", "/", "~"))
    return resolved if is_path or exists(resolved) else None


def find_settings_table(name: str, environment: Environment) -> str | None:
    """The user's settings file if it has a table for that model, else None."""
    settings = list(settings_files(environment.config_folder))[-1]
    return str(settings) if name in read_file(settings).models else None


def _with_table(name: str, settings: dict[str, object], path: Path, environment: Environment) -> str:
    """The user's settings file with a table for the alias appended. Raises UsageError if it has one, or cannot have one."""
    import tomllib

    file = environment.config_folder / "config.toml"
    if find_settings_table(name, environment) is not None:
        raise UsageError(f"{file} has settings of {name} already", f'remove [{MODEL_TABLE}."{name}"] from it, or give another NAME')
    before = _read(file)
    if before:
        before = before.removesuffix("\n") + "\n\n"
    text = before + toml_table(name, settings, str(path))
    try:
        tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{file} cannot take another table [{MODEL_TABLE}.{name}]: {error}",
                         f"write the tables of models as [{MODEL_TABLE}.NAME], or keep the settings in {PROJECT_FILE}") from error
    return text


def _read(file: Path) -> str:
    """The text of the settings file, which was checked before; empty if there is none."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return ""


def _write(text: str, environment: Environment) -> None:
    """Replace the user's settings file; a symbolic link is followed."""
    from ..runtime.library.storage import locked_file, replace_text

    file = environment.config_folder / "config.toml"
    target = Path(os.path.realpath(file))
    try:
        with locked_file(file):
            replace_text(target, text)
    except OSError as error:
        raise not_written(error, f"{file} cannot be written", f"check its folder: {ls(target.parent)}") from error
