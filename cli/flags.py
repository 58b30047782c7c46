"""The machinery of flags: how a flag is declared, named in the environment, and gathered into a dataclass.

`flag()` derives the variable from the name (`--ctx-size` is EFFLLM_CTX_SIZE), so the two cannot drift apart. `add_command()` lets a
function take whole groups (`def run(context, model, engine: EngineFlags, ...)`): the fields of a group become flags, and arrive as one
value. Values are converted here: the library's converter loads a schema library, 70 ms on the way to the first token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from .. import EffllmError
from .help import PlainCommand
from .migration_hints import translate_flags

if TYPE_CHECKING:
    from .environment import Environment

Command = Callable[..., int | None]
TOKEN_UNITS = {"k": 1 << 10, "m": 1 << 20}


def flag(panel: str, names: str, value: str, help: str, command: str = "", **more: Any) -> Any:
    """`flag("memory", "-c --ctx-size", "N", "context in tokens")`; a flag without a value has an empty one. `command`: the one that means
    something else by this name than others do, and has a variable of its own. Words between bars are completed by a shell."""
    long = long_name(names.split())
    own = variable(f"{command}-{long.removeprefix('--')}" if command else long)
    if "|" in value and "FILE" not in value:
        more = {"autocompletion": completing(value.split("|")), **more}
    return typer.Option(*names.split(), help=f"{help}; its variable is {own}" if command else help, rich_help_panel=panel,
                        metavar=value or None, envvar=own, show_envvar=False, show_default=False, **more)


def completing(words: Sequence[str]) -> Callable[[str], list[str]]:
    """A completion function for a fixed list of words."""
    def begun(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return begun


def long_name(names: Iterable[str]) -> str:
    """The flag's long name, which its variable and its setting are named by."""
    return next(name for name in names if name.startswith("--"))


def variable(name: str) -> str:
    return "EFFLLM_" + name.removeprefix("--").upper().replace("-", "_")


def token_count(text: str | int) -> int:
    """`16k` or `16K` is 16384, `1m` 1048576: contexts come in powers of two. As metadata of a flag it takes the place of `int`. Raises
    ValueError."""
    number, unit = (text[:-1], text[-1:].lower()) if isinstance(text, str) and text[-1:].lower() in TOKEN_UNITS else (text, "")
    return int(number) * TOKEN_UNITS.get(unit, 1)


def set_no_color(context: typer.Context, value: bool) -> bool:
    if value:
        context.find_root().obj.no_color = True
    return value


def set_debug(context: typer.Context, value: bool) -> bool:
    if value:
        context.find_root().obj.debug = True
    return value


NoColor = Annotated[bool, flag("general", "--no-color", "", "no colour, even if FORCE_COLOR is set", callback=set_no_color,
                               is_eager=True)]
Debug = Annotated[bool, flag("general", "--debug", "", "show the traceback of a failure", callback=set_debug, is_eager=True)]


LINE = f"{__name__}.line"  # key of a context's arguments, until the model among them is known
MODELS = ("model", "models")  # parameters that name what is asked for
SETTLED = "settled"  # the field of a group that is no flag


def flags_of(group: type) -> list[Any]:
    """The fields of a group that are flags."""
    return [field for field in fields(group) if field.name != SETTLED]


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given on the command line, not by a variable, a file or a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def add_command(app: typer.Typer, name: str, panel: str, function: Command, examples: str = "") -> None:
    """Register a function as a command: groups of flags are spread out, `--debug` and `--no-color` are added, the docstring is the help."""
    call, grouped = spread(function)
    kinds = {parameter: value_type(annotation) for parameter, annotation in call.__annotations__.items() if parameter != "context"}
    named = type(f"{name.capitalize()}Command", (FlagCommand,), {"kinds": kinds, "grouped": grouped})
    app.command(name, cls=named, rich_help_panel=panel, epilog=examples)(call)


class FlagCommand(PlainCommand):
    """A command that converts its own values. `kinds`: parameter -> type; `grouped`: those of a group, which settings files may set."""

    kinds: dict[str, Any] = {}
    grouped: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for parameter in self.params:
            kind, kept = self.kinds.get(parameter.name, bool), parameter.name in self.grouped
            if get_origin(kind) is list and parameter.param_type_name == "option":
                parameter.value_from_envvar = partial(whole, parameter)
            if kind is not bool:
                parameter.process_value = partial(converted, parameter, parameter.process_value, kind, kept)
            elif kept:
                parameter.process_value = partial(switched, parameter, parameter.process_value)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[LINE] = [*args]
        return super().parse_args(ctx, args)


def whole(parameter: Any, context: typer.Context) -> tuple[str, ...] | None:
    """The variable of a repeatable flag is a single value: the library would split it at blanks."""
    text = parameter.resolve_envvar_value(context)
    return None if text is None else (text,)


def switched(parameter: Any, library: Callable[[Any, Any], Any], context: typer.Context, value: Any) -> Any:
    """A boolean as given, else from a settings file, else None: the library's converter takes 70 ms to load."""
    if context.resilient_parsing:  # shell completion: nothing is required, and values are not used
        return value
    return from_file(parameter, context, None) if value is None or value is False else library(context, value)


def from_file(parameter: Any, context: typer.Context, otherwise: Any) -> Any:
    """The value of a flag in the settings files, where it was not given."""
    environment = context.find_root().obj
    if (line := context.meta.pop(LINE, None)) is not None and environment.may_have_model_settings(line):
        if (model := asked_for(context, line)) is not None:
            environment.select_model(model)
    setting = environment.settings.get(long_name(parameter.opts).removeprefix("--"))
    return otherwise if setting is None else setting.value


def asked_for(context: typer.Context, line: Sequence[str]) -> str | None:
    """The single model that an unparsed command line names; None if there is none, or several."""
    given, _, _ = context.command.make_parser(context).parse_args(args=translate_flags(context.command, line))
    models = [name for each in MODELS if (name := given.get(each)) and isinstance(name, str | list | tuple)]
    named = [each for name in models for each in ([name] if isinstance(name, str) else name)]
    return named[0] if len(named) == 1 else None


def converted(parameter: Any, library: Callable[[Any, Any], Any], kind: Any, kept: bool, context: typer.Context, value: Any) -> Any:
    """A value converted to the flag's type. Missing ones go through the library, which reports them."""
    if context.resilient_parsing:
        return value
    if value is None or value == ():
        if kept:
            return from_file(parameter, context, parameter.default)
        return library(context, value) if parameter.required else parameter.default
    try:
        return valued(kind, value)
    except ValueError as error:
        raise typer.BadParameter(str(error), context, parameter) from error


def valued(kind: Any, given: Any) -> Any:
    """A flag's text converted to its type. Raises ValueError with the reason."""
    if get_origin(kind) is list:
        return [*given]
    if get_origin(kind) is Literal:
        if given not in get_args(kind):
            raise ValueError(f"{given!r} is not one of {', '.join(get_args(kind))}")
        return given
    try:
        return kind(given)
    except ValueError as error:
        what = {int: "whole number", token_count: "number of tokens, such as 4096 or 16k"}.get(kind, "number")
        raise ValueError(f"{given!r} is not a {what}") from error


def value_type(annotation: Any) -> Any:
    """`Annotated[int | None, ...]` -> int; metadata after the flag, such as `token_count`, replaces it."""
    declared, _, *instead = get_args(annotation)
    if instead:
        return instead[0]
    if get_origin(declared) in (Union, UnionType):
        return next(kind for kind in get_args(declared) if kind is not NoneType)
    return declared


def spread(function: Command) -> tuple[Command, frozenset[str]]:
    """The function with the fields of its dataclass parameters as keyword parameters, and their names."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            kinds = get_type_hints(kind, include_extras=True)
            parameters += [keyword(field.name, kinds[field.name], field.default) for field in flags_of(kind)]
        else:
            parameters.append(keyword(parameter.name, kind, parameter.default))
    parameters += [keyword("debug", Debug, False), keyword("no_color", NoColor, False)]

    def call(**given: Any) -> int | None:
        del given["debug"], given["no_color"]
        say_variables_of_others(given["context"])
        environment, own = given["context"].find_root().obj, set()
        for name, kind in groups.items():
            values = {field.name: given.pop(field.name) for field in flags_of(kind)}
            settled = frozenset(flag for flag, value in values.items()
                                if value is not None and value is not False and not is_typed(given["context"], flag))
            if settled:
                left, of_model = judge_settled(environment, kind, {flag: values[flag] for flag in settled})
                values, settled = values | dict.fromkeys(left), settled - left - of_model
                own |= of_model - left
            given[name] = kind(**values, settled=settled)
        try:
            return function(**given)
        except EffllmError as error:
            if (field := at_fault(error, own, groups.values())) is None:
                raise
            error.say_place(place_of_field(environment, field))
            raise

    call.__name__, call.__doc__, call.__module__ = function.__name__, function.__doc__, function.__module__
    call.__signature__ = inspect.Signature(parameters)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call, frozenset(field.name for kind in groups.values() for field in flags_of(kind))


def judge_settled(environment: Environment, group: type, values: Mapping[str, object]) -> tuple[frozenset[str], frozenset[str]]:
    """Which of these values are overridden by a stronger source, and which were set for this very model, which count as typed. Raises
    UsageError for one that is invalid for every command, naming its variable or line."""
    from .settings import check_value, is_model_specific, overridden, place

    own = set()
    for key, (field, _) in names_and_types(group).items():
        if field in values:
            check_value(key, values[field], place(environment, key))
            if is_model_specific(environment, key):
                own.add(field)
    return overridden(environment, values), frozenset(own)


def at_fault(error: EffllmError, own: Collection[str], groups: Iterable[type]) -> str | None:
    """Of these fields the one that an error is about, by its name or by the flag that the message begins with."""
    if error.option in own:
        return error.option
    begins = error.message.partition(" ")[0].rstrip(":")
    for group in groups:
        kinds = get_type_hints(group, include_extras=True)
        for field in own & {each.name for each in flags_of(group)}:
            option = get_args(kinds[field])[1]
            if begins in " ".join((option.default, *(option.param_decls or ()))).split():
                return field
    return None


def place_of_field(environment: Environment, field: str) -> str:
    """Where a value that was not typed comes from, as the beginning of an error message."""
    from .settings import known_settings, place

    return place(environment, next(key for key, (_, name, _) in known_settings().items() if name == field))


def say_variables_of_others(context: typer.Context) -> None:
    """Warn about a variable that other commands use for a flag of this name, but this one does not."""
    for parameter in context.command.params:
        if parameter.param_type_name != "option" or not parameter.envvar:
            continue
        long, environment = long_name(parameter.opts), context.find_root().obj
        source = context.get_parameter_source(parameter.name)
        if parameter.envvar != (other := variable(long)) and environment.variables.get(other) and source.name == "DEFAULT":
            from .screen import Screen

            Screen(environment).note(f"{other} has no effect on {context.command.name}: the variable of its {long} is {parameter.envvar}")


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def names_and_types(group: type) -> dict[str, tuple[str, type]]:
    """Flag name without dashes -> (field, type) of a group: `{"top-k": ("top_k", int), ...}`."""
    found = {}
    kinds = get_type_hints(group, include_extras=True)
    for field in (field.name for field in flags_of(group)):
        annotation = kinds[field]
        option = get_args(annotation)[1]
        long = long_name((option.default, *(option.param_decls or ())))
        found[long.removeprefix("--")] = field, value_type(annotation)
    return found
