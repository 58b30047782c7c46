"""`generation_config.json`: the sampling settings that a model recommends.

Such files are written by many tools, and by hand. An unusable entry (text for a number, a list, a value out of range) is skipped with a
notice; a file that is not a JSON object is an error, because it is damaged.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from ... import EffllmError, UsageError
from ..config_reader import show
from ..files.bounded_read import read_bounded
from ..sampler import REQUEST_SETTINGS, SamplerSettings

NAME = "generation_config.json"
MAX_BYTES = 1 << 20
REPAIR = "correct the file, or remove it to use the built-in defaults"
SETTINGS = tuple(field.name for field in fields(SamplerSettings) if field.name not in REQUEST_SETTINGS)


def read_generation_config(folder: Path) -> tuple[dict[str, object], list[str]]:
    """(usable entries, a notice for each unusable one), from the file or the GGUF metadata in its place; empty if neither exists."""
    from ..source import settings_of

    if (stated := settings_of(folder)) is not None:
        return usable(stated)
    path = folder / NAME
    try:
        text = read_bounded(path, MAX_BYTES)
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        raise EffllmError(f"{path} cannot be read: {error.strerror}", REPAIR) from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise EffllmError(f"{path} is not a JSON object of settings", REPAIR)
    return usable(content)


def usable(content: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """The entries that the sampler takes, and notices about the others. null counts as absent, as in transformers."""
    kept, notices = dict(content), []
    for name in SETTINGS:
        value = content.get(name)
        if value is None:
            kept.pop(name, None)
        elif not (name == "top_k" and value == -1 and not isinstance(value, bool)) and (problem := refusal(name, value)):
            del kept[name]
            notices.append(f"{NAME}: {problem}: it is left out")
    if not isinstance(content.get("do_sample"), bool | None):
        del kept["do_sample"]
        notices.append(f"{NAME}: do_sample must be true or false, not {show(content['do_sample'])}: it is left out")
    return kept, notices


def refusal(name: str, value: object) -> str:
    """Why the sampler cannot take a value; empty if it can."""
    try:
        SamplerSettings(**{name: value})
    except UsageError as error:
        return error.message if len(error.message) <= 120 else f"{name} cannot be {show(value)}"
    except (OverflowError, ValueError):  # an int beyond any float, or with more digits than Python prints
        return f"{name} is too large"
    return ""
