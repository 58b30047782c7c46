"""Imports an Ollama Modelfile: an alias, and a table of the user's settings file."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import UsageError, ls, not_written, typed
from .ollama_parameters import SEVERAL, WORDS, as_setting, table
from .settings import MODEL_TABLE, PROJECT_FILE, read_file, settings_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..runtime.library.aliases import CatalogEntry
    from ..runtime.library.modelfile import Instruction
    from .environment import Environment

HUBS = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
LICENCE_LETTERS = 40
# What is written for Ollama itself -> why it is ignored.
LEFT = {"TEMPLATE": "the model's own chat template is used", "MESSAGE": "conversations start empty",
        "RENDERER": "it is internal to Ollama", "PARSER": "it is internal to Ollama", "REQUIRES": "it requires a version of Ollama"}


def adopt(name: str, path: Path, environment: Environment) -> tuple[CatalogEntry, list[str]]:
    """Write the alias `name` and its settings. Returns a line for each instruction that was ignored. Raises EffllmError, and then nothing
    is written."""
    from ..runtime.library.aliases import check_alias, write_alias
    from ..runtime.library.modelfile import read_modelfile

    check_alias(name)
    path = Path(os.path.abspath(path.expanduser()))
    said = read_modelfile(path)
    settings, left = settings_of(said, path)
    entry, more = entry_of(name, said, path, environment)
    text = _with_table(name, settings, path, environment) if settings else None
    write_alias(environment.variables, entry)
    if text is not None:
        _write(text, environment)
    return entry, [*more, *left]


def settings_of(said: Sequence[Instruction], path: Path) -> tuple[dict[str, object], list[str]]:
    """Settings by key, and the instructions without a counterpart. Raises UsageError naming the line of an invalid value."""
    settings, left = {}, []
    for each in said:
        where = f"{path}:{each.line}"
        if each.name == "PARAMETER" and each.about.lower() in WORDS:
            key, value = as_setting(each.about.lower(), each.value, where)
            settings[key] = [*settings.get(key, ()), *value] if each.about.lower() == SEVERAL else value
        elif each.name == "PARAMETER":
            left.append(f"line {each.line}: PARAMETER {each.about} is ignored: effllm has no setting like it")
        elif each.name == "SYSTEM":
            settings["system"] = each.value
        elif each.name == "ADAPTER":
            adapter = _beside(path, each.value)
            if adapter is None or not os.path.exists(adapter):
                raise UsageError(f"{where}: there is no adapter {each.value}", "ADAPTER names a folder or a GGUF file")
            settings["lora"] = [*settings.get("lora", ()), str(adapter)]
        elif each.name in LEFT:
            left.append(f"line {each.line}: {each.name} is ignored: {LEFT[each.name]}")
    return settings, left


def entry_of(name: str, said: Sequence[Instruction], path: Path, environment: Environment) -> tuple[CatalogEntry, list[str]]:
    """The alias for the file's FROM, and its notes."""
    from ..runtime.library.external_models import local_name
    from ..runtime.library.listing import entry_for

    first, *others = [each for each in said if each.name == "FROM"]
    model = _beside(path, first.value)
    text = HUBS.sub("", first.value) if model is None else str(model)
    # Names in such a file are Ollama's first.
    entry = entry_for(name, (local_name(first.value, environment.variables) if model is None else None) or text, environment.variables)
    licence = next((line.strip() for each in said if each.name == "LICENSE" for line in each.value.splitlines() if line.strip()), None)
    if entry.licence is None and licence is not None:
        entry = replace(entry, licence=licence[:LICENCE_LETTERS].strip())
    return entry, [f"line {each.line}: a second FROM is ignored: a projector file is named by --mmproj {typed(each.value)}"
                   for each in others]


def _beside(path: Path, value: str) -> Path | None:
    """A path relative to the Modelfile; None for a name."""
    from ..runtime.library.model_name import exists

    place = Path(os.path.abspath(path.parent / Path(value).expanduser()))
    spelled = value.startswith((".", "/", "~"))
    return place if spelled or exists(place) else None


def own_table(name: str, environment: Environment) -> str | None:
    """Whether the user's file already has settings for that model."""
    settings = list(settings_files(environment.config_folder))[-1]
    return str(settings) if name in read_file(settings).models else None


def _with_table(name: str, settings: dict[str, object], path: Path, environment: Environment) -> str:
    """The user's settings file with a table for the alias appended. Raises UsageError if it has one, or cannot have one."""
    import tomllib

    file = environment.config_folder / "config.toml"
    if own_table(name, environment) is not None:
        raise UsageError(f"{file} has settings of {name} already", f'remove [{MODEL_TABLE}."{name}"] from it, or give another NAME')
    before = _read(file)
    text = before + ("\n" if before and not before.endswith("\n") else "") + ("\n" if before else "") + table(name, settings, str(path))
    try:
        tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{file} cannot take another table [{MODEL_TABLE}.{name}]: {error}",
                         f"write the tables of models as [{MODEL_TABLE}.NAME], or keep the settings in {PROJECT_FILE}") from error
    return text


def _read(file: Path) -> str:
    """Empty if there is no file; its contents have been checked."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return ""


def _write(text: str, environment: Environment) -> None:
    """Follows symbolic links."""
    from ..runtime.library.storage import locked_file, replace_text

    file = environment.config_folder / "config.toml"
    place = Path(os.path.realpath(file))
    try:
        with locked_file(file):
            replace_text(place, text)
    except OSError as error:
        raise not_written(error, f"{file} cannot be written", f"check its folder: {ls(place.parent)}") from error
