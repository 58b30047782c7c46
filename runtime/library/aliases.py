"""Model aliases: the packaged `models.yaml`, overridden by the user's own file in the config folder.

The schema is strict: every key is typed and unknown keys are errors. It is checked by the same reader as a checkpoint's config;
importing a schema library would cost a tenth of a second, a tenth of the time to the first token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from ... import ModelNotFound, UsageError, ls, not_written
from .. import hub
from ..config_reader import REFETCH_HINT, ConfigError, Keys, show
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded
from . import storage

NOT_STATED = "not stated"  # how a file, whose entries all have a licence, says that there is none
KEYS = frozenset({"repo", "path", "revision", "licence", "gated", "params", "size_gb", "default_bits", "exclude", "note", "alternative"})
USER_KEYS = KEYS | {"packaged", "library"}
ALIAS = re.compile(r"[a-z0-9][a-z0-9.-]*")
PARAMS = re.compile(r"[0-9]+(\.[0-9]+)?[MB]")
BITS = (2, 3, 4, 5, 6, 8, 16)
FILE = "models.yaml"
FILE_HEADER = """# Aliases made by `effllm alias`, which writes the lines of the name that it is given and leaves all others as they are.
# The keys are those of effllm's own models.yaml; `packaged` names a model that comes with effllm, `library` one of another program.
"""
MAX_NESTING = 100  # names and lists within one another
MAX_SIZE_RATIO = 1.6  # times as large, at most


@dataclass(frozen=True)
class CatalogEntry:
    """One alias. Exactly one of `repo` and `path` (a folder inside the package, or an absolute one) is set. `licence`: None where none is
    stated. `alternative` is an alias of about the same size that nobody has to be asked for. `own`: the person's, not the package's;
    `packaged`: the alias of the package that one of these stands for, whose `path` is where this installation has it. `library`: in the
    place of both the name of a model that another program keeps (`ollama:llama3.2:3b`)."""

    alias: str
    repo: str | None
    path: str | None
    revision: str
    licence: str | None
    gated: bool
    params: str
    size_bytes: int
    default_bits: int
    exclude: str
    note: str
    alternative: str = ""
    own: bool = False
    packaged: str = ""
    library: str = ""

    @property
    def stands_for(self) -> str:
        return self.packaged or self.repo or self.path or self.library

    def to_yaml(self) -> dict[str, object]:
        """The keys of a file that `parse_catalog` reads back as this entry."""
        # Not the path of what comes with the program: the next installation is elsewhere.
        place = next(name for name in ("packaged", "repo", "library", "path") if getattr(self, name))
        keys: dict[str, object] = {place: getattr(self, place)}
        if self.revision != "main":
            keys["revision"] = self.revision
        keys |= {"licence": self.licence or NOT_STATED, "gated": self.gated, "params": self.params, "size_gb": self.size_bytes / 1e9,
                 "default_bits": self.default_bits}
        return keys | {name: value for name in ("exclude", "note", "alternative") if (value := getattr(self, name))}


def _licence(text: str) -> str | None:
    return None if text == NOT_STATED else text


def parse_catalog(text: str, file: str = FILE, own: bool = False) -> tuple[CatalogEntry, ...]:
    """Entries of a catalog in YAML, in file order. Raises ConfigError naming the alias and the key."""
    import yaml

    try:
        if own and _is_nested_too_deeply(text):
            raise ConfigError(f"{file} is nested too deeply")
        raw = yaml.load(text, _loader())
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{file} is not valid YAML: {show(str(error))}") from error
    if own and raw is None:
        return ()
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} holds no aliases")
    return tuple(_entry(alias, values, file, own) for alias, values in raw.items())


def _is_nested_too_deeply(text: str) -> bool:
    """Whether a person's file is nested as none is: the C parser has no bound to that and ends the process. Raises YAMLError."""
    import yaml

    depth = 0
    for event in yaml.parse(text, _loader()):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            return True
    return False


def _loader() -> type:
    """The C parser where PyYAML was built with it."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _entry(alias: object, values: object, file: str, own: bool) -> CatalogEntry:
    where = f"{file}: {show(alias)}"
    if not isinstance(alias, str) or not ALIAS.fullmatch(alias) or not isinstance(values, dict):
        raise ConfigError(f"{where} is not an alias in lower case with its keys")
    keys, allowed = Keys(values, where), USER_KEYS if own else KEYS
    if unknown := sorted(str(key) for key in values.keys() - allowed):
        raise ConfigError(f"{where}: unknown key {show(unknown[0])}", f"known: {', '.join(sorted(allowed))}")
    repo, path = keys.text("repo", None), keys.text("path", None)
    packaged_alias, library = (keys.text(name, "") if own else "" for name in ("packaged", "library"))
    num_sources = [repo is not None, path is not None, bool(packaged_alias), bool(library)].count(True)
    if num_sources != 1 or (repo is not None and not (hub.is_repo(repo) and "/" in repo)):
        raise ConfigError(f"{where}: exactly one of repo (org/name){', path, packaged and library' if own else ' and path'} must be given")
    if packaged_alias and not ALIAS.fullmatch(packaged_alias):
        raise keys.fail("packaged", "an alias that comes with effllm")
    path = str(_packaged_folder(packaged_alias)) if packaged_alias else path
    if own and path is not None and ("\0" in path or not Path(path).is_absolute()):
        raise keys.fail("path", "an absolute path")
    revision, params, bits = keys.text("revision", "main"), keys.text("params"), keys.integer("default_bits")
    if not hub.is_revision(revision):
        raise keys.fail("revision", "a branch, tag or commit")
    if not PARAMS.fullmatch(params):
        raise keys.fail("params", "a count such as 135M or 8.0B")
    if bits not in BITS:
        raise keys.fail("default_bits", f"one of {BITS}")
    return CatalogEntry(alias, repo, path, revision, _licence(keys.text("licence")), keys.flag("gated"), params,
                        round(keys.number("size_gb") * 1e9), bits, keys.text("exclude", ""), keys.text("note", ""),
                        keys.text("alternative", ""), own, packaged_alias, library)


def _packaged_folder(alias: str) -> Path:
    """Where this installation has a model that comes with effllm; a folder that is not there for one that came with another version."""
    entry = next((each for each in packaged() if each.alias == alias and each.path is not None), None)
    return Path(str(files("effllm") / (entry.path if entry else f"models/{alias}")))


@cache
def packaged() -> tuple[CatalogEntry, ...]:
    return parse_catalog((files("effllm") / FILE).read_text(encoding="utf-8"))


def own_file(env: Mapping[str, str]) -> Path:
    return storage.config_folder(env) / FILE


def own_aliases(env: Mapping[str, str]) -> tuple[CatalogEntry, ...]:
    """The person's; none where there is no file. Raises ConfigError naming the file."""
    path = own_file(env)
    try:
        text = read_bounded(path, MAX_JSON_NBYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", f"check its permissions: {ls(path)}") from error
    try:
        return parse_catalog(text, str(path), own=True)
    except ConfigError as error:  # a file of the person's own, which is nowhere to be fetched from
        hint = "correct or remove that entry; `effllm alias NAME MODEL` writes complete ones"
        raise ConfigError(error.message, hint if error.hint == REFETCH_HINT else error.hint) from error


def library_aliases(env: Mapping[str, str]) -> dict[str, str]:
    """Of the person's those of models that other programs keep, by the model's name there; a file without any is not taken apart."""
    try:
        text = read_bounded(own_file(env), MAX_JSON_NBYTES)
    except OSError:
        return {}
    if b"library:" not in text:
        return {}
    with suppress(ConfigError):  # whoever asks for the model is told
        return {entry.alias: entry.library for entry in own_aliases(env) if entry.library}
    return {}


def catalog(env: Mapping[str, str] | None = None) -> tuple[CatalogEntry, ...]:
    """All aliases, the person's first among equals; without `env` the packaged ones."""
    own = own_aliases(env) if env is not None else ()
    own_names = {entry.alias for entry in own}
    return (*(entry for entry in packaged() if entry.alias not in own_names), *own)


def open_alternative(entries: Iterable[CatalogEntry], nbytes: int) -> str | None:
    """The alias of the model without a gate whose 16-bit weights are nearest to `nbytes`; None where none is of about the same size."""
    open_ones = [entry for entry in entries if not entry.gated and entry.repo is not None and entry.default_bits < 16]
    sizes = {entry.alias: max(entry.size_bytes / nbytes, nbytes / entry.size_bytes) for entry in open_ones if entry.size_bytes and nbytes}
    nearest = min(sizes, key=sizes.__getitem__, default=None)
    return nearest if nearest is not None and sizes[nearest] <= MAX_SIZE_RATIO else None


def entry_folder(entry: CatalogEntry) -> Path:
    """The folder of an entry with a path."""
    return Path(entry.path) if entry.own else Path(str(files("effllm") / entry.path))


def check_alias(name: str) -> None:
    if not ALIAS.fullmatch(name):
        raise UsageError(f"{show(name)} cannot be an alias", "use lower-case letters, digits, dots and dashes, such as my-model")


def write_alias(env: Mapping[str, str], entry: CatalogEntry) -> None:
    """Add an alias of the person's, or change it."""
    check_alias(entry.alias)
    _change(env, entry.alias, entry)


def remove_alias(env: Mapping[str, str], name: str) -> None:
    """Raises ModelNotFound where the person has no such alias."""
    if all(entry.alias != name for entry in own_aliases(env)):
        is_packaged = any(entry.alias == name for entry in packaged())
        raise ModelNotFound(f"{show(name)} is {'an alias that comes with effllm' if is_packaged else 'no alias of yours'}",
                            "effllm alias lists yours")
    _change(env, name, None)


def _change(env: Mapping[str, str], name: str, entry: CatalogEntry | None) -> None:
    """Write the person's file with `entry` for what `name` means, or without that name. Other processes change it as well. Where it is a
    link, into a folder of dotfiles for instance, the file that it shows is written: the link is the person's own."""
    path = own_file(env)
    place = Path(os.path.realpath(path))
    try:
        with storage.locked_file(path):
            storage.replace_text(place, _with_alias(_read_text(path), path, name, entry))
    except OSError as error:
        raise not_written(error, f"{path} cannot be written", f"check its folder: {ls(place.parent)}") from error


def _read_text(path: Path) -> str:
    """Raises ConfigError for what cannot be written back as it was."""
    try:
        content = read_bounded(path, MAX_JSON_NBYTES)
        return content.decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} is not in UTF-8 in line {line}, and would not be written back as it is", "save it as UTF-8") from error


def _with_alias(text: str, path: Path, name: str, entry: CatalogEntry | None) -> str:
    """The file with the lines of one name written anew, so that comments and the order of the others stay. Raises ConfigError where names
    are not written one below the other, as that takes, and comments would be lost."""
    expected = {each.alias: each for each in parse_catalog(text, str(path), own=True) if each.alias != name}
    expected |= {name: entry} if entry else {}
    edited = _replace_lines(text if text.strip() else FILE_HEADER, name, _to_yaml_text([entry]) if entry else "")
    with suppress(ConfigError):
        if {each.alias: each for each in parse_catalog(edited, str(path), own=True)} == expected:
            return edited
    if "#" in text:
        raise ConfigError(f"{path} is not in block style, and rewriting it would lose its comments", f"change {show(name)} by hand")
    edited = FILE_HEADER + _to_yaml_text(expected.values())
    parse_catalog(edited, str(path), own=True)
    return edited


def _to_yaml_text(entries: Iterable[CatalogEntry]) -> str:
    import yaml

    values = {entry.alias: entry.to_yaml() for entry in entries}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else ""


def _replace_lines(text: str, name: str, block: str) -> str:
    """`text` with `block` for the lines of a name, after the last line where it has none. Comments between two names are the second's."""
    import yaml

    root, lines, out, done = yaml.compose(text, _loader()), text.splitlines(keepends=True), [], 0
    keys = [key for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    ends = [*(key.start_mark.line for key in keys[1:]), len(lines)]
    for key, end in zip(keys, ends, strict=False):
        if key.value == name:
            begin = key.start_mark.line
            while end > begin + 1 and (lines[end - 1].startswith("#") or not lines[end - 1].strip()):
                end -= 1
            out += [*lines[done:begin], block]
            block, done = "", end
    out += lines[done:]
    if block and out and not out[-1].endswith("\n"):
        out.append("\n")
    return "".join([*out, block])
