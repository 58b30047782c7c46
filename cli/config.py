"""`effllm config show`: every setting, its value, and where that comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from .. import EffllmError, ModelNotFound, UsageError
from .errors import unset_hint
from .flags import add_command, describe_field_origin, flag, flags_of, parse_value, variable_name
from .help import PlainGroup
from .loading import effective_bits, find_model_variant, resolve_draft
from .options import OUTPUT, AnswerFlags, AnyModel, BitsFlag, Json, RunFlags, SamplingFlags
from .screen import Screen
from .settings import PROJECT_FILE, check_value, describe_origin, is_model_specific, known_settings, origin, overridden

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
MACHINE_FIELDS = frozenset({"ram", "vram", "kv_ram", "device", "gpu_layers"})  # fields that need resources of the machine
BUILT_IN, GENERATION = "built in", "generation_config.json"
BOOLEANS = {**dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True), **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False)}

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
    ref = resolve_model(model, screen) if model is not None else None
    if model is not None:
        screen.environment.select_model(model)
    shown = list(settings(screen, ref and ref.folder))
    if ref is not None:
        shown = list(values_for_model(shown, ref, screen))
    if json:
        screen.json({each.key: {"value": each.value, "origin": each.origin} for each in shown})
        return
    if not origin:
        screen.pairs((each.key, format_value(each.value)) for each in shown)
        return
    screen.table(("setting", "value", "from"), [(each.key, format_value(each.value), each.origin) for each in shown])
    for path in (PROJECT_FILE, screen.environment.config_folder / "config.toml"):
        screen.note(f"looked for {path}")


def resolve_model(model: str, screen: Screen) -> ModelRef:
    """The model to show the settings for. Raises UsageError if the name is that of a setting."""
    try:
        return find_model_variant(model, screen)
    except ModelNotFound as error:
        if model.replace("_", "-") not in known_settings():
            raise
        raise UsageError(f"{model} is a setting, not a model", "effllm config show --origin shows every setting") from error


def settings(screen: Screen, folder: Path | None) -> Iterator[ShownSetting]:
    """Each setting with the value that a command without flags would use. `folder`: of the model, None for none."""
    environment = screen.environment
    model_values = model_defaults(screen, folder)
    built_in = built_in_values()
    for key, (group, field, value_type) in known_settings().items():
        text = environment.variables.get(variable_name(key))
        setting = environment.settings.get(key)
        if text or setting:
            value = parse_variable(key, text, value_type) if text else setting.value
            check_value(key, value, describe_origin(environment, key))
            yield ShownSetting(key, value, origin(environment, key))
        elif group is SamplingFlags and field in model_values:
            yield ShownSetting(key, model_values[field], GENERATION)
        else:
            yield ShownSetting(key, built_in.get(field), BUILT_IN)


def values_for_model(shown: Sequence[ShownSetting], ref: ModelRef, screen: Screen) -> Iterator[ShownSetting]:
    """The settings as a run of the model would use them: unsupported ones are ignored with a note. Raises what the run would raise."""
    configured = {known_settings()[each.key][1]: each.value for each in shown if each.origin not in (BUILT_IN, GENERATION)}
    model_fields = {field for key, (_, field, _) in known_settings().items()
                    if field in configured and is_model_specific(screen.environment, key)}
    engine_values = {field: value for field, value in configured.items() if field in RunFlags.__dataclass_fields__}
    overridden_fields = overridden(screen.environment, engine_values)
    try:
        applicable = {field: value for field, value in engine_values.items() if field not in overridden_fields}
        unsupported, effective = unsupported_fields(applicable, model_fields, ref, screen)
        ignored, bits = overridden_fields | unsupported, ref.variant
        if "bits" in configured:  # ignored for a format in the name, and for weights that are quantized already
            bits = effective_bits(ref, BitsFlag(configured["bits"], from_settings=frozenset({"bits"} - model_fields)), screen)
            ignored |= {"bits"} if bits != f"{configured['bits']}bit" else set()
    except EffllmError as error:
        if error.option in model_fields:
            error.prefix_origin(describe_field_origin(screen.environment, error.option))
        raise
    if machine_fields := MACHINE_FIELDS & applicable.keys() - ignored:
        note_refused(ref, bits, effective, machine_fields, screen)
    built_in = built_in_values()
    for each in shown:
        field = known_settings()[each.key][1]
        yield ShownSetting(each.key, built_in.get(field), f"{BUILT_IN}, {each.origin} is left out") if field in ignored else each


def unsupported_fields(given: Mapping[str, object], model_fields: Set[str], ref: ModelRef,
                       screen: Screen) -> tuple[set[str], EngineOptions | None]:
    """The fields of RunFlags among `given` that a model does not support, each of which is noted, and the options that apply instead (None
    if nothing is given). Raises what a run would raise for one of `model_fields`, which were set for this model."""
    if not given:
        return set(), None
    from ..runtime.planning.settings_fit import dropped_settings

    requested = resolve_draft(RunFlags(**given, from_settings=frozenset(given.keys() - model_fields)), screen).options()
    effective, notices = dropped_settings(ref.folder, requested, model_fields)
    for notice in notices:
        screen.note(notice)
    fields = {field for field in given if getattr(effective, field) != getattr(requested, field)}
    fields |= {"draft"} & given.keys() if requested.draft is None else set()  # the draft model is missing
    return fields | ({"kv", "cache_k", "cache_v"} & given.keys() if effective.kv != requested.kv else set()), effective


def note_refused(ref: ModelRef, bits: str | None, options: EngineOptions, fields: Set[str], screen: Screen) -> None:
    """Write a note if a run would be refused because of what `fields` require of the machine. This is no error: memory or a GPU may be free
    next time. `bits`: the format to quantize to, None for the stored weights."""
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


def parse_variable(key: str, text: str, kind: Any) -> object:
    """The value of an environment variable, parsed like its flag. Raises UsageError, as the command does."""
    try:
        return parse_boolean(text) if kind is bool else parse_value(kind, [text] if get_origin(kind) is list else text)
    except ValueError as error:
        raise UsageError(f"the variable {variable_name(key)}: {error}", unset_hint(variable_name(key))) from error


def parse_boolean(text: str) -> bool:
    """Parse a boolean. Raises ValueError."""
    if (word := text.strip().lower()) in BOOLEANS:
        return BOOLEANS[word]
    raise ValueError(f"{text!r} is neither true nor false")


def model_defaults(screen: Screen, folder: Path | None) -> dict[str, object]:
    """Field of SamplerSettings -> its value in the model's generation_config.json."""
    from ..runtime.sampler import SamplerSettings
    from ..runtime.sampling.generation_config import read_generation_config

    content, warnings = read_generation_config(folder) if folder is not None else ({}, [])
    for warning in warnings:
        screen.note(warning)
    model_settings, defaults = SamplerSettings.from_generation_config(content), SamplerSettings()
    explicit = content.keys() | ({"temperature"} if content.get("do_sample") is False else set())
    return {field.name: getattr(model_settings, field.name) for field in fields(SamplerSettings)
            if field.name in explicit or getattr(model_settings, field.name) != getattr(defaults, field.name)}


def built_in_values() -> dict[str, object]:
    """Field of a flag group -> default value; None if it is computed for each run."""
    from ..runtime.engine import EngineOptions
    from ..runtime.planning.plan_request import exact_ends
    from ..runtime.sampler import SamplerSettings
    from ..runtime.sessions.session_store import DEFAULT_BUDGET

    values = {field.name: getattr(defaults, field.name) for group, defaults in
              ((RunFlags, EngineOptions()), (SamplingFlags, SamplerSettings())) for field in flags_of(group)}
    values |= {field.name: None for field in flags_of(AnswerFlags)} | dict(zip(("kv_sink", "kv_window"), exact_ends(EngineOptions())))
    return values | {"predict": -1, "reasoning_budget": -1, "think": "auto", "stats": False, "markdown": False, "keep": False,
                     "overflow": EngineOptions().overflow, "session_disk": DEFAULT_BUDGET}


def format_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else ", ".join(map(repr, value)) if isinstance(value, list | tuple) else str(value)
