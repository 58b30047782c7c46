"""`effllm config show`: every setting, its value, and where that comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from .. import EffllmError, ModelNotFound, UsageError
from .errors import unset_hint
from .flags import add_command, flag, flags_of, place_of_field, valued, variable
from .help import PlainGroup
from .loading import bits_for, find_any, with_draft
from .options import OUTPUT, AnswerFlags, AnyModel, BitsFlag, Json, RunFlags, SamplingFlags
from .screen import Screen
from .settings import PROJECT_FILE, check_value, is_model_specific, known_settings, origin, overridden, place

if TYPE_CHECKING:
    from pathlib import Path

    from ..runtime.catalog import ModelRef
    from ..runtime.engine import EngineOptions


EXAMPLES = f"""examples

  effllm config show --origin
  effllm config show fable --json

A setting is a flag's long name without its dashes. It goes into {PROJECT_FILE} in the working directory, or into the user's file (--origin
shows where that is):

  temp = 0.5
  ctx-size = 4096

  [model.qwen3-4b]                  # for this model only, under the name you type (an alias works too)
  system = "Answer in one sentence."
  kv = "8bit"

The strongest comes first: a flag, its variable (EFFLLM_TEMP), {PROJECT_FILE}, the user's file, the model's generation_config.json, the
built-in value.
"""
OF_MACHINE = frozenset({"ram", "vram", "kv_ram", "device", "gpu_layers"})  # fields that it may not have
BUILT_IN, GENERATION = "built in", "generation_config.json"
SWITCH = {**dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True), **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False)}

Origin = Annotated[bool, flag(OUTPUT, "--origin", "", "show where each value comes from, and which files were looked for")]


@dataclass(frozen=True)
class ShownSetting:
    """A setting, its value, and its origin: a flag's default, a variable or a file."""

    key: str
    value: object
    origin: str


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=PlainGroup, rich_markup_mode=None, help="Show settings and where they come from.")
    add_command(group, "show", "commands", show, EXAMPLES)
    app.add_typer(group, name="config", rich_help_panel="inspect")


def show(context: typer.Context, model: AnyModel = None, origin: Origin = False, json: Json = False) -> None:
    """Show every setting and its value; with MODEL, the values for that model."""
    screen = Screen(context.obj)
    screen.environment.require_stdout()
    ref = asked_model(model, screen) if model is not None else None
    if model is not None:
        screen.environment.select_model(model)
    shown = list(settings(screen, ref and ref.folder))
    if ref is not None:
        shown = list(values_for_model(shown, ref, screen))
    if json:
        screen.json({each.key: {"value": each.value, "origin": each.origin} for each in shown})
        return
    if not origin:
        screen.pairs((each.key, written(each.value)) for each in shown)
        return
    screen.table(("setting", "value", "from"), [(each.key, written(each.value), each.origin) for each in shown])
    for path in (PROJECT_FILE, screen.environment.config_folder / "config.toml"):
        screen.note(f"looked for {path}")


def asked_model(model: str, screen: Screen) -> ModelRef:
    """The model whose settings are asked for. Raises UsageError for the name of a setting."""
    try:
        return find_any(model, screen)
    except ModelNotFound as error:
        if model.replace("_", "-") not in known_settings():
            raise
        raise UsageError(f"{model} is a setting, not a model", "effllm config show --origin shows every setting") from error


def settings(screen: Screen, folder: Path | None) -> Iterator[ShownSetting]:
    """The value of each setting without flags."""
    environment = screen.environment
    models_own = own_defaults(screen, folder)
    built_in = built_in_values()
    for key, (group, field, kind) in known_settings().items():
        text = environment.variables.get(variable(key))
        setting = environment.settings.get(key)
        if text or setting:
            value = of_variable(key, text, kind) if text else setting.value
            check_value(key, value, place(environment, key))
            yield ShownSetting(key, value, origin(environment, key))
        elif group is SamplingFlags and field in models_own:
            yield ShownSetting(key, models_own[field], GENERATION)
        else:
            yield ShownSetting(key, built_in.get(field), BUILT_IN)


def values_for_model(shown: Sequence[ShownSetting], ref: ModelRef, screen: Screen) -> Iterator[ShownSetting]:
    """The settings as they apply to a model: those that it does not support are ignored with a note, as in a run. Raises what the run would
    raise."""
    set_here = {known_settings()[each.key][1]: each.value for each in shown if each.origin not in (BUILT_IN, GENERATION)}
    own = {field for key, (_, field, _) in known_settings().items() if field in set_here and is_model_specific(screen.environment, key)}
    asked = {field: value for field, value in set_here.items() if field in RunFlags.__dataclass_fields__}
    weaker = overridden(screen.environment, asked)
    try:
        given = {field: value for field, value in asked.items() if field not in weaker}
        without, holds = left_out(given, own, ref, screen)
        left, held = weaker | without, ref.variant
        if "bits" in set_here:  # ignored beside a format in the name, and for weights that are quantized already
            held = bits_for(ref, BitsFlag(set_here["bits"], settled=frozenset({"bits"} - own)), screen)
            left |= {"bits"} if held != f"{set_here['bits']}bit" else set()
    except EffllmError as error:
        if error.option in own:
            error.say_place(place_of_field(screen.environment, error.option))
        raise
    if of_machine := OF_MACHINE & given.keys() - left:
        note_refused(ref, held, holds, of_machine, screen)
    built_in = built_in_values()
    for each in shown:
        field = known_settings()[each.key][1]
        yield ShownSetting(each.key, built_in.get(field), f"{BUILT_IN}, {each.origin} is left out") if field in left else each


def left_out(given: Mapping[str, object], own: Set[str], ref: ModelRef, screen: Screen) -> tuple[set[str], EngineOptions | None]:
    """Which of these fields of RunFlags a model does not support, each with a note and the value that applies (None if nothing is given).
    Raises what a run would raise for one of `own`, those set for this model."""
    if not given:
        return set(), None
    from ..runtime.planning.settings_fit import dropped_settings

    asked = with_draft(RunFlags(**given, settled=frozenset(given.keys() - own)), screen).options()
    holds, notices = dropped_settings(ref.folder, asked, own)
    for notice in notices:
        screen.note(notice)
    left = {field for field in given if getattr(holds, field) != getattr(asked, field)}
    left |= {"draft"} & given.keys() if asked.draft is None else set()  # which is not here
    return left | ({"kv", "cache_k", "cache_v"} & given.keys() if holds.kv != asked.kv else set()), holds


def note_refused(ref: ModelRef, bits: str | None, options: EngineOptions, fields: Set[str], screen: Screen) -> None:
    """A note if a run could not be planned with what `fields` ask of the machine; not an error, since memory or a GPU may be free the next
    time."""
    from ..runtime.planning.forecast import prepare_quantized
    from ..runtime.prepare import prepare

    try:
        planned = prepare(ref.folder, options, dry_run=True) if bits is None else prepare_quantized(ref.folder, bits, options)
    except EffllmError as error:
        places = ", ".join(sorted({origin(screen.environment, key) for key, (_, field, _) in known_settings().items()
                                   if field in fields}))
        screen.note(f"as this machine is now, a run would be refused because of {places}: {error.message} ({error.hint})")
    else:
        for each in filter(None, (planned, planned.speculation.draft)):
            each.store.close()


def of_variable(key: str, text: str, kind: Any) -> object:
    """A variable's text, parsed as its flag would be. Raises UsageError, as the command does."""
    try:
        return switch(text) if kind is bool else valued(kind, [text] if get_origin(kind) is list else text)
    except ValueError as error:
        raise UsageError(f"the variable {variable(key)}: {error}", unset_hint(variable(key))) from error


def switch(text: str) -> bool:
    """Parse a boolean. Raises ValueError."""
    if (word := text.strip().lower()) in SWITCH:
        return SWITCH[word]
    raise ValueError(f"{text!r} is neither true nor false")


def own_defaults(screen: Screen, folder: Path | None) -> dict[str, object]:
    """Field of SamplerSettings -> its value in the model's generation_config.json."""
    from ..runtime.sampler import SamplerSettings
    from ..runtime.sampling.generation_config import read_generation_config

    content, remarks = read_generation_config(folder) if folder is not None else ({}, [])
    for remark in remarks:
        screen.note(remark)
    own, usual = SamplerSettings.from_generation_config(content), SamplerSettings()
    stated = content.keys() | ({"temperature"} if content.get("do_sample") is False else set())
    return {field.name: getattr(own, field.name) for field in fields(SamplerSettings)
            if field.name in stated or getattr(own, field.name) != getattr(usual, field.name)}


def built_in_values() -> dict[str, object]:
    """Field of a group -> the default of its dataclass; None for one that is computed when needed."""
    from ..runtime.engine import EngineOptions
    from ..runtime.planning.plan_request import exact_ends
    from ..runtime.sampler import SamplerSettings
    from ..runtime.sessions.session_store import DISK

    values = {field.name: getattr(defaults, field.name) for group, defaults in
              ((RunFlags, EngineOptions()), (SamplingFlags, SamplerSettings())) for field in flags_of(group)}
    values |= {field.name: None for field in flags_of(AnswerFlags)} | dict(zip(("kv_sink", "kv_window"), exact_ends(EngineOptions())))
    return values | {"predict": -1, "reasoning_budget": -1, "think": "auto", "stats": False, "markdown": False, "keep": False,
                     "overflow": EngineOptions().overflow, "session_disk": DISK}


def written(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else ", ".join(map(repr, value)) if isinstance(value, list | tuple) else str(value)
