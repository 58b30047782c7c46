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


def flag(panel: str, names: str, metavar: str, help: str, command: str = "", **more: Any) -> Any:
    """Declare a flag: `flag("memory", "-c --ctx-size", "N", "context in tokens")`.

    panel: the section of the help page.
    names: its names, separated by spaces; the first long one also names its variable and its setting.
    metavar: the placeholder of its value, empty for a boolean. Words between bars (`auto|on|off`) are completed by a shell.
    command: set if the flag means something else in this command than in others, so that it needs a variable of its own.
    """
    long = long_name(names.split())
    variable = variable_name(f"{command}-{long.removeprefix('--')}" if command else long)
    if "|" in metavar and "FILE" not in metavar:
        more = {"autocompletion": word_completer(metavar.split("|")), **more}
    return typer.Option(*names.split(), help=f"{help}; its variable is {variable}" if command else help, rich_help_panel=panel,
                        metavar=metavar or None, envvar=variable, show_envvar=False, show_default=False, **more)


def word_completer(words: Sequence[str]) -> Callable[[str], list[str]]:
    """A completion function for a fixed list of words."""
    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def long_name(names: Iterable[str]) -> str:
    """The first long name of a flag, after which its variable and its setting are named."""
    return next(name for name in names if name.startswith("--"))


def variable_name(name: str) -> str:
    return "EFFLLM_" + name.removeprefix("--").upper().replace("-", "_")


def token_count(text: str | int) -> int:
    """Parse a number of tokens: `16k` or `16K` is 16384, `1m` 1048576. As metadata of a flag it replaces `int` as the converter. Raises
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


LINE_KEY = f"{__name__}.line"  # key in a context's meta: the arguments, until the model among them is known
MODEL_PARAMETERS = ("model", "models")  # parameters that name models
FROM_SETTINGS = "from_settings"  # the field of FlagGroup that is no flag


def flags_of(group: type) -> list[Any]:
    """The fields of a group that are flags."""
    return [field for field in fields(group) if field.name != FROM_SETTINGS]


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given on the command line, not by a variable, a file or a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def add_command(app: typer.Typer, name: str, panel: str, function: Command, examples: str = "") -> None:
    """Register a function as a command. Its groups of flags are expanded, `--debug` and `--no-color` are added, and its docstring is the
    help text."""
    call, grouped = expand_groups(function)
    kinds = {parameter: value_type(annotation) for parameter, annotation in call.__annotations__.items() if parameter != "context"}
    named = type(f"{name.capitalize()}Command", (FlagCommand,), {"kinds": kinds, "grouped": grouped})
    app.command(name, cls=named, rich_help_panel=panel, epilog=examples)(call)


class FlagCommand(PlainCommand):
    """A command that converts values without the library's converter, and reads missing ones from settings files."""

    kinds: dict[str, Any] = {}  # parameter -> type
    grouped: frozenset[str] = frozenset()  # parameters from flag groups, which settings files may set

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            kind, from_group = self.kinds.get(parameter.name, bool), parameter.name in self.grouped
            if get_origin(kind) is list and parameter.param_type_name == "option":
                parameter.value_from_envvar = partial(unsplit_variable, parameter)
            if kind is not bool:
                parameter.process_value = partial(converted_value, parameter, parameter.process_value, kind, from_group)
            elif from_group:
                parameter.process_value = partial(boolean_value, parameter, parameter.process_value)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[LINE_KEY] = [*args]
        return super().parse_args(ctx, args)


def unsplit_variable(parameter: Any, context: typer.Context) -> tuple[str, ...] | None:
    """The variable of a repeatable flag as a single value; the library would split it at blanks."""
    text = parameter.resolve_envvar_value(context)
    return None if text is None else (text,)


def boolean_value(parameter: Any, library_converter: Callable[[Any, Any], Any], context: typer.Context, value: Any) -> Any:
    """A boolean flag: as given, else from a settings file, else None. A flag that was not given does not go through the library's
    converter, which takes 70 ms to load."""
    if context.resilient_parsing:  # shell completion: nothing is required, and values are not used
        return value
    return value_from_settings(parameter, context, None) if value is None or value is False else library_converter(context, value)


def value_from_settings(parameter: Any, context: typer.Context, default: Any) -> Any:
    """The value of a flag in the settings files, else `default`."""
    environment = context.find_root().obj
    if (line := context.meta.pop(LINE_KEY, None)) is not None and environment.may_have_model_settings(line):
        if (model := named_model(context, line)) is not None:
            environment.select_model(model)
    setting = environment.settings.get(long_name(parameter.opts).removeprefix("--"))
    return default if setting is None else setting.value


def named_model(context: typer.Context, line: Sequence[str]) -> str | None:
    """The single model that an unparsed command line names; None if there is none, or several."""
    values, _, _ = context.command.make_parser(context).parse_args(args=translate_flags(context.command, line))
    names: list[str] = []
    for parameter in MODEL_PARAMETERS:
        value = values.get(parameter)
        if isinstance(value, str):
            names += [value] if value else []
        elif isinstance(value, list | tuple):
            names += value
    return names[0] if len(names) == 1 else None


def converted_value(parameter: Any, library_converter: Callable[[Any, Any], Any], kind: Any, from_group: bool, context: typer.Context,
                    value: Any) -> Any:
    """A value converted to the flag's type, with the value from settings files or the default if it was not given. A required flag that is
    missing is reported by the library."""
    if context.resilient_parsing:
        return value
    if value is None or value == ():
        if from_group:
            return value_from_settings(parameter, context, parameter.default)
        return library_converter(context, value) if parameter.required else parameter.default
    try:
        return parse_value(kind, value)
    except ValueError as error:
        raise typer.BadParameter(str(error), context, parameter) from error


def parse_value(kind: Any, text: Any) -> Any:
    """A flag's text converted to its type. Raises ValueError with the reason."""
    if get_origin(kind) is list:
        return [*text]
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(f"{text!r} is not one of {', '.join(get_args(kind))}")
        return text
    try:
        return kind(text)
    except ValueError as error:
        description = {int: "whole number", token_count: "number of tokens, such as 4096 or 16k"}.get(kind, "number")
        raise ValueError(f"{text!r} is not a {description}") from error


def value_type(annotation: Any) -> Any:
    """`Annotated[int | None, ...]` -> int; metadata after the flag, such as `token_count`, replaces it."""
    declared, _, *override = get_args(annotation)
    if override:
        return override[0]
    if get_origin(declared) in (Union, UnionType):
        return next(kind for kind in get_args(declared) if kind is not NoneType)
    return declared


def expand_groups(function: Command) -> tuple[Command, frozenset[str]]:
    """(the function with the fields of its dataclass parameters as keyword parameters, the names of these fields)."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        group = hints[parameter.name]
        if is_dataclass(group):
            groups[parameter.name] = group
            annotations = get_type_hints(group, include_extras=True)
            parameters += [keyword_parameter(field.name, annotations[field.name], field.default) for field in flags_of(group)]
        else:
            parameters.append(keyword_parameter(parameter.name, group, parameter.default))
    parameters += [keyword_parameter("debug", Debug, False), keyword_parameter("no_color", NoColor, False)]

    def call(**arguments: Any) -> int | None:
        del arguments["debug"], arguments["no_color"]
        warn_variables_of_other_commands(arguments["context"])
        environment, model_fields = arguments["context"].find_root().obj, set()
        for name, group in groups.items():
            values = {field.name: arguments.pop(field.name) for field in flags_of(group)}
            from_settings = frozenset(flag for flag, value in values.items()
                                if value is not None and value is not False and not is_typed(arguments["context"], flag))
            if from_settings:
                overridden_fields, model_specific = check_settings(environment, group, {flag: values[flag] for flag in from_settings})
                values, from_settings = values | dict.fromkeys(overridden_fields), from_settings - overridden_fields - model_specific
                model_fields |= model_specific - overridden_fields
            arguments[name] = group(**values, from_settings=from_settings)
        try:
            return function(**arguments)
        except EffllmError as error:
            if (field := faulty_field(error, model_fields, groups.values())) is None:
                raise
            error.prefix_origin(describe_field_origin(environment, field))
            raise

    call.__name__, call.__doc__, call.__module__ = function.__name__, function.__doc__, function.__module__
    call.__signature__ = inspect.Signature(parameters)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call, frozenset(field.name for group in groups.values() for field in flags_of(group))


def check_settings(environment: Environment, group: type, values: Mapping[str, object]) -> tuple[frozenset[str], frozenset[str]]:
    """Check values that come from variables or settings files.

    Returns the fields that are overridden by a stronger source, and those that were set for this very model, which count as typed. Raises
    UsageError for a value that is invalid for every command, naming its variable or line.
    """
    from .settings import check_value, describe_origin, is_model_specific, overridden

    model_specific = set()
    for key, (field, _) in names_and_types(group).items():
        if field in values:
            check_value(key, values[field], describe_origin(environment, key))
            if is_model_specific(environment, key):
                model_specific.add(field)
    return overridden(environment, values), frozenset(model_specific)


def faulty_field(error: EffllmError, candidates: Collection[str], groups: Iterable[type]) -> str | None:
    """The field among `candidates` that an error is about: the one it names, or the one whose flag its message begins with."""
    if error.option in candidates:
        return error.option
    first_word = error.message.partition(" ")[0].rstrip(":")
    for group in groups:
        annotations = get_type_hints(group, include_extras=True)
        for field in candidates & {flag_field.name for flag_field in flags_of(group)}:
            option = get_args(annotations[field])[1]
            if first_word in " ".join((option.default, *(option.param_decls or ()))).split():
                return field
    return None


def describe_field_origin(environment: Environment, field: str) -> str:
    """The variable or settings file that a field's value comes from, as the beginning of an error message."""
    from .settings import describe_origin, known_settings

    return describe_origin(environment, next(key for key, (_, name, _) in known_settings().items() if name == field))


def warn_variables_of_other_commands(context: typer.Context) -> None:
    """Warn about a set variable that belongs to a flag of this name in other commands, but not in this one."""
    for parameter in context.command.params:
        if parameter.param_type_name != "option" or not parameter.envvar:
            continue
        long_flag, environment = long_name(parameter.opts), context.find_root().obj
        source = context.get_parameter_source(parameter.name)
        usual_variable = variable_name(long_flag)
        if parameter.envvar != usual_variable and environment.variables.get(usual_variable) and source.name == "DEFAULT":
            from .screen import Screen

            Screen(environment).note(f"{usual_variable} has no effect on {context.command.name}: "
                                     f"the variable of its {long_flag} is {parameter.envvar}")


def keyword_parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def names_and_types(group: type) -> dict[str, tuple[str, type]]:
    """Flag name without dashes -> (field, type) of a group: `{"top-k": ("top_k", int), ...}`."""
    result = {}
    annotations = get_type_hints(group, include_extras=True)
    for field in (field.name for field in flags_of(group)):
        annotation = annotations[field]
        option = get_args(annotation)[1]
        long_flag = long_name((option.default, *(option.param_decls or ())))
        result[long_flag.removeprefix("--")] = field, value_type(annotation)
    return result
