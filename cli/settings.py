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
from .flags import names_and_types, token_count, variable
from .migration_hints import intended_variable
from .options import CONTRADICTIONS, AnswerFlags, RunFlags, SamplingFlags, SessionFlags, ShowFlags, WeightFlags, token_limit

if TYPE_CHECKING:
    from .environment import Environment

GROUPS = (RunFlags, WeightFlags, SamplingFlags, AnswerFlags, SessionFlags, ShowFlags)
PROJECT_FILE = "effllm.toml"
MODEL = "model"  # the table that holds one table per model with settings of its own
LARGEST, MOST_MODELS = 1 << 20, 1000  # bytes of a file, models that it names
NESTED = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){100}")  # for which tomllib takes minutes
SIZES, SIZES_ARE = ("ram", "vram", "kv_ram", "disk", "session_disk"), "a size between quotes"
OWN = f'[{MODEL}."NAME"], and its settings in the lines below'
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Setting:
    """A value from a file; `origin`: `FILE:LINE`. `of_model`: set for the model asked for, not for all."""

    value: object
    origin: str
    of_model: bool = False


@dataclass(frozen=True)
class FileSettings:
    """The settings of one file: general ones, and those of each model it names."""

    every: Mapping[str, Setting]
    models: Mapping[str, Mapping[str, Setting]]


class Settings(dict[str, Setting]):
    """The settings of all files, strongest first, where `model` is asked for; None: no model, or none yet."""

    def __init__(self, files: Sequence[FileSettings], model: str | None = None) -> None:
        self.files = files
        for each in files:
            for part in ({} if model is None else _said_of(each.models, model), each.every):
                for key, setting in part.items():
                    self.setdefault(key, setting)

    def of(self, model: str) -> Settings:
        return Settings(self.files, model)

    def above(self, weakest: FileSettings) -> Settings:
        """These settings, with `weakest` below them."""
        made = Settings(self.files)
        made.clear()
        made.update({**weakest.every, **self})
        return made


def _said_of(models: Mapping[str, Mapping[str, Setting]], name: str) -> Mapping[str, Setting]:
    """By the name as typed, else without its suffix (`:4bit`, `@revision`); another program's name, which contains a colon itself, without
    the last one (`ollama:llama3.2:3b`). A typed format overrides the `bits` of the name."""
    from ..runtime.library.model_name import OF_PROGRAM, names_format

    if name in models:
        return models[name]
    said = models.get(name.rpartition(":")[0] if OF_PROGRAM.match(name) else re.split("[:@]", name, maxsplit=1)[0], {})
    return {key: setting for key, setting in said.items() if key != "bits" or not names_format(name)}


@cache
def known_settings() -> Mapping[str, tuple[type, str, Any]]:
    """Key -> (group, field, type), in the order of the help."""
    return {name: (group, *named) for group in GROUPS for name, named in names_and_types(group).items()}


def origin(environment: Environment, key: str) -> str:
    """Where the value of a setting that was not typed comes from: its variable, or `FILE:LINE`."""
    setting = environment.settings.get(key)
    return variable(key) if environment.variables.get(variable(key)) or setting is None else setting.origin


def is_model_specific(environment: Environment, key: str) -> bool:
    """Whether the value of a setting that was not typed was set for the model asked for."""
    setting = environment.settings.get(key)
    return setting is not None and setting.of_model and not environment.variables.get(variable(key))


def place(environment: Environment, key: str) -> str:
    """`origin`, as the beginning of an error message."""
    where = origin(environment, key)
    return f"the variable {where}" if where == variable(key) else where


def overridden(environment: Environment, values: Mapping[str, object]) -> frozenset[str]:
    """Of `values`, by field, those that contradict one from a stronger source. Raises UsageError for two of the same source."""
    keys = {field: key for key, (_, field, _) in known_settings().items()}
    weaker = set()
    for pair in CONTRADICTIONS:
        holding = [name for name, value in pair if name in values and value in (None, values[name])]
        if len(holding) < 2 or weaker & set(holding):
            continue
        ranks = [_rank(environment, keys[name]) for name in holding]
        if ranks[0] == ranks[1]:
            first, second = (f"--{keys[name]} ({place(environment, keys[name])})" for name in holding)
            raise UsageError(f"{first} and {second} contradict each other", "leave one of them out")
        weaker.add(holding[ranks.index(min(ranks))])
    return frozenset(weaker)


def _rank(environment: Environment, key: str) -> int:
    """The precedence of a setting's source: user file, project file, variable."""
    where = origin(environment, key)
    return 2 if where == variable(key) else 1 if where.startswith(f"{PROJECT_FILE}:") else 0


def check_value(key: str, value: object, where: str) -> None:
    """Raise UsageError, beginning with `where`, for a value that is invalid in itself, whatever the model, the machine or the other
    flags."""
    from ..offload.size import parse_size
    from ..runtime.constraints.constraint import read_grammar_flag, read_schema_flag
    from ..runtime.conversion.on_load import check_format
    from ..runtime.engine import EngineOptions
    from ..runtime.sampler import SamplerSettings
    from ..runtime.sessions.session_name import check_name
    from ..runtime.tokens.stream_filters import StopStrings

    if key not in known_settings():  # a variable's, which no file may have
        return
    group, field, _ = known_settings()[key]
    own: dict[str, Callable[[Any], object]] = {
        "bits": lambda bits: check_format(f"{bits}bit"), "predict": token_limit, "stop": StopStrings, "session": check_name,
        "schema": read_schema_flag, "grammar": read_grammar_flag,
        **dict.fromkeys(SIZES, parse_size),
        "ram": lambda ram: (parse_size(ram), EngineOptions(ram=ram)),
        # one alone may not go with 16 bits
        **dict.fromkeys(("cache_k", "cache_v"), lambda kind: EngineOptions(cache_k=kind, cache_v=kind))}
    try:
        if field in own:
            own[field](value)
        elif group is SamplingFlags:
            SamplerSettings.from_generation_config({}, **SamplingFlags(**{field: value}).said())
        elif group is RunFlags:
            EngineOptions(**{field: value})
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from error


NOTHING = FileSettings({}, {})


def files(user_folder: Path) -> Iterator[Path]:
    """The settings files, strongest first."""
    yield Path(PROJECT_FILE)
    yield user_folder / "config.toml"


def read_settings(user_folder: Path) -> Settings:
    """The settings of all files. Raises UsageError naming file and line."""
    return Settings(tuple(map(read_file, files(user_folder))))


def read_file(path: Path) -> FileSettings:
    """The settings of one file; none if it does not exist."""
    try:
        data = read_bounded(path, LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return NOTHING
    except OSError as error:
        if os.path.realpath(path) == os.devnull:  # linked there to have none
            return NOTHING
        raise UsageError(f"{path}: {error.strerror}", "correct or remove this settings file") from error
    import tomllib

    try:
        text = data.decode("utf-8-sig")
        if NESTED.search(text):
            raise ValueError("names are nested too deeply")
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        where, reason = (f"{path}:{line[1]}", re.sub(r" \(at line.*", "", str(error))) if line else (str(path), str(error))
        raise UsageError(f"{where}: {reason[:200]}", "settings are lines of TOML, such as `temp = 0.5` or `kv = \"8bit\"`") from error
    named = content.pop(MODEL, {})
    if not isinstance(named, dict) or not all(isinstance(table, dict) for table in named.values()):
        raise UsageError(f"{path}:{line_of(text, MODEL)}: a model's own settings go under its name", OWN)
    if len(named) > MOST_MODELS:
        said = f"{path} has settings of {len(named):,} models, at most {MOST_MODELS:,} are read"
        raise UsageError(said, "remove those that are not used")
    models = {}
    for name, table in named.items():
        after = line_of(text, name, table=True)
        if (deeper := next((key for key, value in table.items() if isinstance(value, dict) and key not in known_settings()),
                           None)) is not None:
            raise UsageError(f"{path}:{after}: put a name with a dot in quotes", f'[{MODEL}."{name}.{deeper}"]')
        models[name] = _read(table, path, text, after, True)
    return FileSettings(_read(content, path, text, 0, False), models)


def _read(content: Mapping[str, object], path: Path, text: str, after: int, of_model: bool) -> dict[str, Setting]:
    """The settings of a file, or of the table that its line `after` opens."""
    found = {}
    for key, value in content.items():  # one by one: the first unknown one ends it
        place = f"{path}:{line_of(text, key, after)}"
        found[key] = Setting(checked(key, value, place), place, of_model)
    return found


def line_of(text: str, key: str, after: int = 0, table: bool = False) -> int:
    """The first line after `after` that sets a key, or opens the table of that name; with `table` only the latter."""
    opens = r"\s*\[\s*" + MODEL + r"\s*\.\s*" if table else r"\s*(?:\[+\s*)?"
    begins = re.compile(rf"{opens}[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
    return next((number for number, line in enumerate(text.splitlines(), 1) if number > after and begins.match(line)), max(after, 1))


def checked(key: str, value: object, where: str) -> object:
    """The value, if the key is known and the type is right."""
    if key not in known_settings():
        by_variable = {variable(name): name for name in known_settings()}
        alike = difflib.get_close_matches(key.replace("_", "-"), list(known_settings()), 1)
        meant = by_variable.get(intended_variable(key, by_variable)) or "".join(alike)
        raise UsageError(f"{where}: there is no setting {key!r}{f', did you mean {meant}?' if meant else ''}",
                         OWN.replace("NAME", key) if isinstance(value, dict) else "effllm config show lists them")
    kind = known_settings()[key][2]
    if get_origin(kind) is Literal:
        fits, wanted = value in get_args(kind), " or ".join(get_args(kind))
    elif get_origin(kind) is list:
        value = [value] if isinstance(value, str) else value
        fits, wanted = isinstance(value, list) and all(isinstance(each, str) for each in value), "text or a list of texts"
    elif kind is token_count:
        fits, wanted = type(value) in (int, str), 'a number of tokens, such as 4096 or "16k"'
        try:
            value = token_count(value) if fits else value
        except ValueError:
            fits = False
    elif kind is float:
        fits, wanted = isinstance(value, int | float) and not isinstance(value, bool), WORDS[kind]
    else:
        fits, wanted = type(value) is kind, WORDS[kind]
    is_long = type(value) is int and abs(value) >> 63 != 0  # more than TOML has; of some thousand digits Python writes none
    if not fits or is_long:
        given = str(value).lower() if isinstance(value, bool) else "one of more than 64 bits" if is_long else repr(value)
        quoted = known_settings()[key][1] in SIZES and type(value) in (int, float)
        raise UsageError(f"{where}: {key} is {SIZES_ARE if quoted else wanted}, not {given}"[:300],
                         f'with its unit: {key} = "{value}G", or M' if quoted else "correct the line, or remove it")
    return float(value) if kind is float else value
