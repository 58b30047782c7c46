"""Settings files: `effllm.toml` in the working directory, then `config.toml` in the user's settings folder.

A key is the long name of a flag without dashes (`ctx-size = 4096`); only flags on how a model runs and answers are allowed, not those of a
single invocation (an output, a yes). Precedence: flag, variable, project file, user file, the model's generation_config.json, built-in
default. A table `[model.NAME]` applies to the model asked for by this name, before the general settings of its file. An unknown key or a
wrong type is an error that names its line."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from .. import UsageError
from ..runtime.files.bounded_read import read_bounded
from .flags import names_and_types, token_count, variable_name
from .migration_hints import intended_variable, require_bits
from .options import CONTRADICTIONS, AnswerFlags, RunFlags, SamplingFlags, SessionFlags, ShowFlags, ToolFlags, WeightFlags, token_limit

if TYPE_CHECKING:
    from .environment import Environment

GROUPS = (RunFlags, WeightFlags, SamplingFlags, AnswerFlags, SessionFlags, ShowFlags)
PROJECT_FILE = "effllm.toml"
MODEL_TABLE = "model"  # the table of the tables for single models
MAX_FILE_BYTES, MAX_MODELS = 1 << 20, 1000  # of one file
DEEP_NESTING = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){100}")  # for which tomllib takes minutes
SIZE_FIELDS, SIZE_DESCRIPTION = ("ram", "vram", "kv_ram", "disk", "session_disk"), "a size between quotes"
MODEL_TABLE_HINT = f'[{MODEL_TABLE}."NAME"], and its settings in the lines below'
TYPE_DESCRIPTIONS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Setting:
    """A value from a settings file."""

    value: object
    origin: str  # FILE:LINE
    of_model: bool = False  # set for the model in use, not for all


@dataclass(frozen=True)
class FileSettings:
    """The settings of one file, by key."""

    general: Mapping[str, Setting]
    models: Mapping[str, Mapping[str, Setting]]  # name -> settings of that model


class Settings(dict[str, Setting]):
    """The settings of all files by key, for `model`; None for no model, or if it is not known yet.

    files: strongest first.
    """

    def __init__(self, settings_files: Sequence[FileSettings], model: str | None = None) -> None:
        self.files = settings_files
        for file in settings_files:
            for section in ({} if model is None else _settings_of_model(file.models, model), file.general):
                for key, setting in section.items():
                    self.setdefault(key, setting)

    def of(self, model: str) -> Settings:
        return Settings(self.files, model)

    def with_defaults(self, defaults: FileSettings) -> Settings:
        """These settings, with the general ones of `defaults` where a key is missing."""
        result = Settings(self.files)
        result.clear()
        result.update({**defaults.general, **self})
        return result


def _settings_of_model(models: Mapping[str, Mapping[str, Setting]], name: str) -> Mapping[str, Setting]:
    """The settings of the model `name`: those under the name as typed, else under the name without its suffix (`:4bit`, `@revision`; in
    `ollama:llama3.2:3b` only the last colon starts a suffix). A format in the typed name overrides `bits`."""
    from ..runtime.library.model_name import PROGRAM_NAME, names_format

    if name in models:
        return models[name]
    settings = models.get(name.rpartition(":")[0] if PROGRAM_NAME.match(name) else re.split("[:@]", name, maxsplit=1)[0], {})
    return {key: setting for key, setting in settings.items() if key != "bits" or not names_format(name)}


@cache
def known_settings() -> Mapping[str, tuple[type, str, Any]]:
    """Key -> (group, field, type), in the order of the help."""
    return {name: (group, *named) for group in GROUPS for name, named in names_and_types(group).items()}


def origin(environment: Environment, key: str) -> str:
    """The origin of a setting that was not typed: its variable, or `FILE:LINE`."""
    setting = environment.settings.get(key)
    return variable_name(key) if environment.variables.get(variable_name(key)) or setting is None else setting.origin


def is_model_specific(environment: Environment, key: str) -> bool:
    """Whether a setting that was not typed was set for the model in use."""
    setting = environment.settings.get(key)
    return setting is not None and setting.of_model and not environment.variables.get(variable_name(key))


def describe_origin(environment: Environment, key: str) -> str:
    """`origin` as the beginning of an error message."""
    where = origin(environment, key)
    return f"the variable {where}" if where == variable_name(key) else where


def overridden(environment: Environment, values: Mapping[str, object]) -> frozenset[str]:
    """The fields of `values` that contradict another one from a stronger source. Raises UsageError for a contradiction within one
    source."""
    keys = {field: key for key, (_, field, _) in known_settings().items()}
    overridden_fields = set()
    for pair in CONTRADICTIONS:
        conflicting = [name for name, value in pair if name in values and value in (None, values[name])]
        if len(conflicting) < 2 or overridden_fields & set(conflicting):
            continue
        ranks = [_rank(environment, keys[name]) for name in conflicting]
        if ranks[0] == ranks[1]:
            first, second = (f"--{keys[name]} ({describe_origin(environment, keys[name])})" for name in conflicting)
            raise UsageError(f"{first} and {second} contradict each other", "leave one of them out")
        overridden_fields.add(conflicting[ranks.index(min(ranks))])
    return frozenset(overridden_fields)


def _rank(environment: Environment, key: str) -> int:
    """The precedence of a setting's source: user file, project file, variable."""
    where = origin(environment, key)
    return 2 if where == variable_name(key) else 1 if where.startswith(f"{PROJECT_FILE}:") else 0


def check_value(key: str, value: object, origin_text: str) -> None:
    """Raise UsageError, beginning with `origin_text`, for a value that is invalid for every model and machine and with any other flags."""
    from ..offload.size import parse_size
    from ..runtime.constraints.constraint import read_grammar_flag, read_schema_flag
    from ..runtime.engine import EngineOptions
    from ..runtime.sessions.session_name import check_name
    from ..runtime.tokens.stream_filters import StopStrings

    if key not in known_settings():  # a flag that only variables can set
        return
    group, field, _ = known_settings()[key]
    checks: dict[str, Callable[[Any], object]] = {
        "bits": lambda bits: require_bits(str(bits)), "predict": token_limit, "stop": StopStrings, "session": check_name,
        "schema": read_schema_flag, "grammar": read_grammar_flag,
        **dict.fromkeys(SIZE_FIELDS, parse_size),
        "ram": lambda ram: (parse_size(ram), EngineOptions(ram=ram)),
        # both the same: many types cannot be combined with the default of the other
        **dict.fromkeys(("cache_k", "cache_v"), lambda kind: EngineOptions(cache_k=kind, cache_v=kind))}
    try:
        if field in checks:
            checks[field](value)
        elif group is SamplingFlags:
            SamplingFlags(**{field: value}).over({})
        elif group is RunFlags:
            EngineOptions(**{field: value})
    except UsageError as error:
        raise UsageError(f"{origin_text}: {error.message}", error.hint) from error


EMPTY = FileSettings({}, {})


def settings_files(user_folder: Path) -> Iterator[Path]:
    """The settings files, strongest first."""
    yield Path(PROJECT_FILE)
    yield user_folder / "config.toml"


def read_settings(user_folder: Path) -> Settings:
    """The settings of all files. Raises UsageError naming file and line."""
    return Settings(tuple(map(read_file, settings_files(user_folder))))


def read_file(path: Path) -> FileSettings:
    """The settings of one file; none if it does not exist."""
    try:
        data = read_bounded(path, MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return EMPTY
    except OSError as error:
        if os.path.realpath(path) == os.devnull:  # a way to turn settings off
            return EMPTY
        raise UsageError(f"{path}: {error.strerror}", "correct or remove this settings file") from error
    import tomllib

    try:
        text = data.decode("utf-8-sig")
        if DEEP_NESTING.search(text):
            raise ValueError("names are nested too deeply")
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        where, reason = (f"{path}:{line[1]}", re.sub(r" \(at line.*", "", str(error))) if line else (str(path), str(error))
        raise UsageError(f"{where}: {reason[:200]}", "settings are lines of TOML, such as `temp = 0.5` or `kv = \"8bit\"`") from error
    model_tables = content.pop(MODEL_TABLE, {})
    if not isinstance(model_tables, dict) or not all(isinstance(table, dict) for table in model_tables.values()):
        raise UsageError(f"{path}:{line_of(text, MODEL_TABLE)}: a model's own settings go under its name", MODEL_TABLE_HINT)
    if len(model_tables) > MAX_MODELS:
        message = f"{path} has settings of {len(model_tables):,} models, at most {MAX_MODELS:,} are read"
        raise UsageError(message, "remove those that are not used")
    models = {}
    for name, table in model_tables.items():
        table_line = line_of(text, name, table=True)
        if (nested_name := next((key for key, value in table.items() if isinstance(value, dict) and key not in known_settings()),
                           None)) is not None:
            raise UsageError(f"{path}:{table_line}: put a name with a dot in quotes", f'[{MODEL_TABLE}."{name}.{nested_name}"]')
        models[name] = _read_table(table, path, text, table_line, True)
    return FileSettings(_read_table(content, path, text, 0, False), models)


def _read_table(content: Mapping[str, object], path: Path, text: str, table_line: int, model_specific: bool) -> dict[str, Setting]:
    """The settings of a file, or of the table at line `table_line` of it. Raises UsageError for the first invalid one."""
    settings = {}
    for key, value in content.items():
        origin = f"{path}:{line_of(text, key, table_line)}"
        settings[key] = Setting(check_setting(key, value, origin), origin, model_specific)
    return settings


def line_of(text: str, key: str, after: int = 0, table: bool = False) -> int:
    """The number of the first line after line `after` that sets a key or opens the table of that name; with `table` only the latter."""
    opening = r"\s*\[\s*" + MODEL_TABLE + r"\s*\.\s*" if table else r"\s*(?:\[+\s*)?"
    pattern = re.compile(rf"{opening}[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
    return next((number for number, line in enumerate(text.splitlines(), 1) if number > after and pattern.match(line)), max(after, 1))


def check_setting(key: str, value: object, origin: str) -> object:
    """The value of a setting, converted to its type. Raises UsageError for an unknown key or a wrong type."""
    if key not in known_settings():
        by_variable = {variable_name(name): name for name in known_settings()}
        matches = difflib.get_close_matches(key.replace("_", "-"), list(known_settings()), 1)
        suggestion = by_variable.get(intended_variable(key, by_variable)) or "".join(matches)
        if key in names_and_types(ToolFlags):
            raise UsageError(f"{origin}: {key} is not allowed in a settings file, which must not decide which programs run",
                             f"--{key} on the command line, or {variable_name(key)}")
        raise UsageError(f"{origin}: there is no setting {key!r}{f', did you mean {suggestion}?' if suggestion else ''}",
                         MODEL_TABLE_HINT.replace("NAME", key) if isinstance(value, dict) else "effllm config show lists them")
    value_type = known_settings()[key][2]
    if get_origin(value_type) is Literal:
        is_valid, expected = value in get_args(value_type), " or ".join(get_args(value_type))
    elif get_origin(value_type) is list:
        value = [value] if isinstance(value, str) else value
        is_valid, expected = isinstance(value, list) and all(isinstance(each, str) for each in value), "text or a list of texts"
    elif value_type is token_count:
        is_valid, expected = type(value) in (int, str), 'a number of tokens, such as 4096 or "16k"'
        try:
            value = token_count(value) if is_valid else value
        except ValueError:
            is_valid = False
    elif value_type is float:
        is_valid, expected = isinstance(value, int | float) and not isinstance(value, bool), TYPE_DESCRIPTIONS[value_type]
    else:
        is_valid, expected = type(value) is value_type, TYPE_DESCRIPTIONS[value_type]
    is_long = type(value) is int and abs(value) >> 63 != 0  # not valid in TOML; Python cannot print integers of thousands of digits
    if not is_valid or is_long:
        actual = str(value).lower() if isinstance(value, bool) else "one of more than 64 bits" if is_long else repr(value)
        needs_unit = known_settings()[key][1] in SIZE_FIELDS and type(value) in (int, float)
        raise UsageError(f"{origin}: {key} is {SIZE_DESCRIPTION if needs_unit else expected}, not {actual}"[:300],
                         f'with its unit: {key} = "{value}G", or M' if needs_unit else "correct the line, or remove it")
    return float(value) if value_type is float else value
