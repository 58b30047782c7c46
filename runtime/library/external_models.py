"""Models stored by other programs on this machine, under prefixed names: `ollama:llama3.2:3b`, `lmstudio:Qwen3-8B-Q4_K_M`.

They are read in place and never changed. A store is scanned only when a name asks for it or by `list`. In programs that keep GGUF files
in folders a model is named after its file, without `.gguf`, plus as many parent folders as make the name unique; for `model.gguf` the
folder is the name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import ModelNotFound, UsageError, typed
from .. import hub
from ..config_reader import show
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded
from ..gguf import file_names as gguf_names
from ..gguf.projector_lookup import sibling_projectors
from . import ollama
from .model_name import Reference
from .name_suggestions import close_matches

MAX_DEPTH = 4  # levels of folders below a program's models folder
MAX_ENTRIES = 20_000  # files and folders visited below one models folder
GENERIC_NAME = "model"  # a file name that does not identify the model
UNFINISHED_PREFIXES = ("incomplete-", "downloading_", ".")  # of files that programs are still downloading


@dataclass(frozen=True)
class ExternalModel:
    """A model stored by another program."""

    name: str  # as typed, with the program's prefix
    title: str  # display name of the program
    file: Path
    projector: Path | None = None  # its mmproj file, None if the program states none
    licence: str | None = None
    stored: ollama.OllamaModel | None = None  # its manifest, of Ollama's models


@dataclass(frozen=True)
class ExternalProgram:
    """A program whose models are found on this machine."""

    prefix: str  # before the names of its models
    title: str  # display name
    removal: str  # what removes one of its models, empty for `rm`
    folders: Callable[[Mapping[str, str]], list[Path]]  # environment -> folders that it may store models in


def _home(env: Mapping[str, str], *parts: str) -> Path:
    return hub.home(env).joinpath(*parts)


def _folder_from(env: Mapping[str, str], variable: str, *default: str) -> Path:
    value = env.get(variable, "").strip()
    return hub.expand(value, env) if value else _home(env, *default)


def _data_folder(env: Mapping[str, str], windows: str = "APPDATA") -> Path:
    """The platform's folder for data of programs."""
    if sys.platform == "darwin":
        return _home(env, "Library", "Application Support")
    if sys.platform == "win32":
        return _folder_from(env, windows, "AppData", "Roaming" if windows == "APPDATA" else "Local")
    return _folder_from(env, "XDG_DATA_HOME", ".local", "share")


def _lm_studio(env: Mapping[str, str]) -> list[Path]:
    home = _home(env, ".lmstudio")
    try:
        pointer = read_bounded(_home(env, ".lmstudio-home-pointer"), MAX_JSON_NBYTES).decode().strip()
        home = Path(pointer) if os.path.isabs(pointer) else home
    except (OSError, ValueError):
        pass  # it is where it usually is
    downloads = _configured_folder(home / "settings.json", "downloadsFolder")
    return [*([Path(downloads)] if downloads else []), home / "models", _home(env, ".cache", "lm-studio", "models")]


def _llama_cpp(env: Mapping[str, str]) -> list[Path]:
    if env.get("LLAMA_CACHE", "").strip():
        return [_folder_from(env, "LLAMA_CACHE")]
    if sys.platform == "darwin":
        return [_home(env, "Library", "Caches", "llama.cpp")]
    if sys.platform == "win32":
        return [_folder_from(env, "LOCALAPPDATA", "AppData", "Local") / "llama.cpp"]
    return [_folder_from(env, "XDG_CACHE_HOME", ".cache") / "llama.cpp"]


def _jan(env: Mapping[str, str]) -> list[Path]:
    config_folders = {_data_folder(env) / "Jan", _home(env, ".config", "Jan")}
    data_folders = [path for folder in sorted(config_folders) if (path := _configured_folder(folder / "settings.json", "data_folder"))]
    data = [*map(Path, data_folders), *(folder / "data" for folder in sorted(config_folders)), _home(env, "jan")]
    return [folder / subfolder for folder in data for subfolder in (Path("llamacpp", "models"), Path("models"))]


def _gpt4all(env: Mapping[str, str]) -> list[Path]:
    return [_data_folder(env, "LOCALAPPDATA") / "nomic.ai" / "GPT4All", _home(env, ".cache", "gpt4all")]


def _configured_folder(path: Path, key: str) -> str | None:
    """The absolute path under a key of a program's settings file, None if there is none."""
    try:
        content = json.loads(read_bounded(path, MAX_JSON_NBYTES))
    except (OSError, ValueError, RecursionError):
        return None
    value = content.get(key) if isinstance(content, dict) else None
    return value if isinstance(value, str) and os.path.isabs(value) and "\0" not in value else None


OLLAMA = ExternalProgram("ollama", "Ollama", "ollama rm", ollama.roots)
PROGRAMS = {each.prefix: each for each in (
    OLLAMA, ExternalProgram("lmstudio", "LM Studio", "LM Studio", _lm_studio), ExternalProgram("llamacpp", "llama.cpp", "", _llama_cpp),
    ExternalProgram("jan", "Jan", "Jan", _jan), ExternalProgram("gpt4all", "GPT4All", "GPT4All", _gpt4all))}


def all_models(env: Mapping[str, str]) -> Iterator[ExternalModel]:
    """Complete models of every program, judged by their names and sizes."""
    for stored in ollama.stored_models(env):
        yield _from_ollama(stored)
    for program in PROGRAMS.values():
        if program is not OLLAMA:
            yield from (ExternalModel(f"{program.prefix}:{name}", program.title, file, _projector(file))
                        for name, file in _named_files(program, env))


def all_names(env: Mapping[str, str]) -> list[str]:
    """Typable names of all external models, without opening any."""
    others = (f"{program.prefix}:{name}" for program in PROGRAMS.values() if program is not OLLAMA
              for name, _ in _named_files(program, env))
    return [*(f"{OLLAMA.prefix}:{name}" for name in ollama.names(env)), *others]


def find(reference: Reference, env: Mapping[str, str]) -> ExternalModel:
    """Resolve a reference to another program's model. Raises ModelNotFound with suggestions, UsageError for an ambiguous name."""
    prefix, name = reference.program or "", reference.of_program
    program = PROGRAMS[prefix]
    if program is OLLAMA:
        if (stored := ollama.find(name, env)) is not None:
            return _from_ollama(stored)
        if name in (names := ollama.names(env)):
            raise ModelNotFound(f"Ollama's manifest of model {show(name)} cannot be read", f"ollama pull {typed(name)} writes it anew")
        raise _not_found(program, name, names, env)
    models = list(_named_files(program, env))
    name_parts = _path_key(name).lower().split("/")
    exact = [(model_name, file) for model_name, file in models if model_name.lower() == "/".join(name_parts)]
    matches = exact or [(model_name, file) for model_name, file in models if _matches_suffix(file, name_parts)]
    if len(matches) > 1:
        raise UsageError(f"{program.title} has {len(matches)} models {show(name)}",
                         f"name one: {' or '.join(f'{prefix}:{model_name}' for model_name, _ in matches[:4])}")
    if not matches:
        raise _not_found(program, name, [model_name for model_name, _ in models], env)
    return ExternalModel(f"{prefix}:{matches[0][0]}", program.title, matches[0][1], _projector(matches[0][1]))


def local_name(name: str, env: Mapping[str, str]) -> str | None:
    """The name to type for a model that Ollama calls `name`, where Ollama has it."""
    try:
        stored = ollama.find(name, env)
    except ModelNotFound:
        return None
    return None if stored is None else _from_ollama(stored).name


def owner_of(file: Path, env: Mapping[str, str]) -> ExternalProgram | None:
    """The program whose store contains a file."""
    absolute = Path(os.path.abspath(file))
    return next((program for program in PROGRAMS.values()
                 for folder in program.folders(env) if Path(os.path.abspath(folder)) in absolute.parents), None)


def refuse_removal(text: str, name: str, program: ExternalProgram) -> UsageError:
    if program is OLLAMA:
        hint = f"ollama rm {typed(name)}"
    else:
        hint = f"remove it in {program.removal}" if program.removal else f"rm {typed(name)}"
    return UsageError(f"{text} is {program.title}'s, which effllm reads and never changes", hint)


def require_place_beside(file: Path, env: Mapping[str, str]) -> None:
    """Called before measurements of a model are saved beside it. Raises UsageError where that would write into another program's store."""
    if (owner := owner_of(file, env)) is not None:
        raise UsageError(f"{file} is {owner.title}'s, and effllm writes nothing there: measurements are stored beside the model",
                         f"link it into a folder of your own: ln -s {typed(file)} {owner.prefix}-model{gguf_names.SUFFIX}")


def _from_ollama(stored: ollama.OllamaModel) -> ExternalModel:
    return ExternalModel(f"{OLLAMA.prefix}:{stored.name}", OLLAMA.title, stored.model, stored.first("projector"), stored.licence, stored)


def _not_found(program: ExternalProgram, name: str, known: list[str], env: Mapping[str, str]) -> ModelNotFound:
    if not any(folder.is_dir() for folder in program.folders(env)):
        return ModelNotFound(f"there is no model {show(f'{program.prefix}:{name}')}: no library of {program.title} is here",
                             f"effllm looks in {program.folders(env)[0]}")
    similar = close_matches(name, known) or [each for each in known if each.lower().startswith(name.lower())][:3]
    hint = f"did you mean {' or '.join(f'{program.prefix}:{each}' for each in similar)}?" if similar else "effllm list shows what is here"
    return ModelNotFound(f"{program.title} has no model {show(name)}", hint)


def _named_files(program: ExternalProgram, env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """(shortest unique name, GGUF file) of a program's models."""
    files = [(_path_key(path.relative_to(root).as_posix()), path)
             for root in dict.fromkeys(program.folders(env)) for path in _model_files(root)]
    counts: dict[str, int] = {}
    for key, _ in files:
        for end in _suffixes(key):
            counts[end] = counts.get(end, 0) + 1
    for key, path in files:
        yield next((key[-len(end):] for end in _suffixes(key) if counts[end] == 1), str(path)), path


def _suffixes(key: str) -> list[str]:
    parts = key.lower().split("/")
    return ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _path_key(relative: str) -> str:
    """A file's relative path without `.gguf`; the folder's alone if the file has a generic name."""
    key = relative[: -len(gguf_names.SUFFIX)] if relative.lower().endswith(gguf_names.SUFFIX) else relative
    folder, _, name = key.rpartition("/")
    return folder if folder and name.lower() == GENERIC_NAME else key


def _matches_suffix(file: Path, name_parts: list[str]) -> bool:
    return _path_key(file.as_posix()).lower().split("/")[-len(name_parts):] == name_parts


def _model_files(root: Path) -> Iterator[Path]:
    """GGUF files of models below a folder, in alphabetical order: complete ones, and of a split file the first part. Unreadable folders are
    skipped, and so are those already visited through a link."""
    visited, remaining = set(), [MAX_ENTRIES]

    def walk(folder: Path, depth: int) -> Iterator[Path]:
        if (real_path := os.path.realpath(folder)) in visited:
            return
        visited.add(real_path)
        entries = hub.names_in(folder)
        remaining[0] -= len(entries)
        yield from (folder / name for name in gguf_names.model_files(each for each in entries if not each.startswith(UNFINISHED_PREFIXES))
                    if os.path.isfile(folder / name))
        for name in entries:
            is_hidden_or_gguf = name.startswith(".") or "." + name.rpartition(".")[2].lower() == gguf_names.SUFFIX
            if depth < MAX_DEPTH and remaining[0] > 0 and not is_hidden_or_gguf and os.path.isdir(folder / name):
                yield from walk(folder / name, depth + 1)

    return walk(root, 1)


def _projector(file: Path) -> Path | None:
    projectors = sibling_projectors(file)
    return projectors[0] if len(projectors) == 1 else None
