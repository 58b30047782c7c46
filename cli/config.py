"""`effllm config show`: every setting, its value, and where that comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from .. import UsageError
from .errors import unset
from .flags import add_command, flag, flags_of, valued, variable
from .help import PlainGroup
from .options import OUTPUT, AnswerFlags, AnyModel, Json, RunFlags, SamplingFlags
from .screen import Screen
from .settings import PROJECT_FILE, demand_usable, known, origin, place

if TYPE_CHECKING:
    from pathlib import Path


EXAMPLES = f"""examples

  effllm config show --origin
  effllm config show fable --json

A setting is a flag without its dashes, in {PROJECT_FILE} in the working directory or in the user's file (named by --origin):

  temp = 0.5
  ctx-size = 4096

A flag wins over its variable (EFFLLM_TEMP), that over {PROJECT_FILE}, that over the user's file, that over the model's
generation_config.json, that over what is built in.
"""
BUILT_IN = "built in"
SWITCH = {**dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True), **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False)}

Origin = Annotated[bool, flag(OUTPUT, "--origin", "", "say where each value comes from, and which files were looked for")]


@dataclass(frozen=True)
class Shown:
    key: str
    value: object
    origin: str


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=PlainGroup, rich_markup_mode=None, help="Settings that stay, and where they come from.")
    add_command(group, "show", "commands", show, EXAMPLES)
    app.add_typer(group, name="config", rich_help_panel="look around")


def show(context: typer.Context, model: AnyModel = None, origin: Origin = False, json: Json = False) -> None:
    """Every setting and its value; with MODEL, the values that this model's own defaults lead to."""
    from .loading import find

    screen = Screen(context.obj)
    folder = find(model, screen).folder if model is not None else None
    shown = list(settings(screen, folder))
    if json:
        screen.json({each.key: {"value": each.value, "origin": each.origin} for each in shown})
        return
    if not origin:
        screen.pairs((each.key, written(each.value)) for each in shown)
        return
    screen.table(("setting", "value", "from"), [(each.key, written(each.value), each.origin) for each in shown])
    for path in (PROJECT_FILE, screen.environment.config_folder / "config.toml"):
        screen.note(f"looked for {path}")


def settings(screen: Screen, folder: Path | None) -> Iterator[Shown]:
    """What holds for each setting, where no flag is given."""
    environment = screen.environment
    models_own = own_defaults(screen, folder)
    built_in = built_in_values()
    for key, (group, field, kind) in known().items():
        text = environment.variables.get(variable(key))
        setting = environment.settings.get(key)
        if text or setting:
            value = of_variable(key, text, kind) if text else setting.value
            demand_usable(key, value, place(environment, key))
            yield Shown(key, value, origin(environment, key))
        elif group is SamplingFlags and field in models_own:
            yield Shown(key, models_own[field], "generation_config.json")
        else:
            yield Shown(key, built_in.get(field), BUILT_IN)


def of_variable(key: str, text: str, kind: Any) -> object:
    """A variable's text as its flag takes it. Raises UsageError, as the command does that reads it."""
    try:
        return switch(text) if kind is bool else valued(kind, [text] if get_origin(kind) is list else text)
    except ValueError as error:
        raise UsageError(f"the variable {variable(key)}: {error}", unset(variable(key))) from error


def switch(text: str) -> bool:
    """Raises ValueError."""
    if (word := text.strip().lower()) in SWITCH:
        return SWITCH[word]
    raise ValueError(f"{text!r} is neither true nor false")


def own_defaults(screen: Screen, folder: Path | None) -> dict[str, object]:
    """Field of SamplerSettings -> what the model's generation_config.json makes of it."""
    from ..runtime.generation_config import read_generation_config
    from ..runtime.sampler import SamplerSettings

    content, remarks = read_generation_config(folder) if folder is not None else ({}, [])
    for remark in remarks:
        screen.note(remark)
    own, usual = SamplerSettings.from_generation_config(content), SamplerSettings()
    stated = content.keys() | ({"temperature"} if content.get("do_sample") is False else set())
    return {field.name: getattr(own, field.name) for field in fields(SamplerSettings)
            if field.name in stated or getattr(own, field.name) != getattr(usual, field.name)}


def built_in_values() -> dict[str, object]:
    """Field of a group -> the default of the dataclass that it feeds; None where a default is worked out when it is needed."""
    from ..runtime.engine import EngineOptions
    from ..runtime.sampler import SamplerSettings
    from ..runtime.session_store import DISK

    values = {field.name: getattr(defaults, field.name) for group, defaults in
              ((RunFlags, EngineOptions()), (SamplingFlags, SamplerSettings())) for field in flags_of(group)}
    values |= {field.name: None for field in flags_of(AnswerFlags)}
    return values | {"predict": -1, "think": "auto", "overflow": EngineOptions().overflow, "keep": False, "stats": False, "markdown": False,
                     "session_disk": DISK}


def written(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else ", ".join(map(repr, value)) if isinstance(value, list) else str(value)
