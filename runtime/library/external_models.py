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
from ..files.bounded_read import JSON_NBYTES, read_bounded
from ..gguf import file_names as gguf_names
from ..gguf.projector_lookup import sibling_projectors
from . import ollama
from .model_name import Reference
from .name_suggestions import close_matches

DEEPEST = 4  # levels of folders below that of a program's models
MOST = 20_000  # files and folders that are looked at in a library of folders
PLAIN = "model"  # the name of a file that says nothing of the model
UNFINISHED = ("incomplete-", "downloading_", ".")  # how programs begin the name of a file that is still coming


@dataclass(frozen=True)
class ExternalModel:
    """A model of another program. `name`: what to type; `projector`: its mmproj file, where the program states it. `stored`: its Ollama
    manifest."""

    name: str
    title: str
    file: Path
    projector: Path | None = None
    licence: str | None = None
    stored: ollama.OllamaModel | None = None


@dataclass(frozen=True)
class ExternalProgram:
    """`prefix` begins the names of its models, `title` is the program's display name, `removal` the command that removes one."""

    prefix: str
    title: str
    removal: str
    folders: Callable[[Mapping[str, str]], list[Path]]


def _home(env: Mapping[str, str], *parts: str) -> Path:
    return hub.home(env).joinpath(*parts)


def _stated(env: Mapping[str, str], variable: str, *usual: str) -> Path:
    given = env.get(variable, "").strip()
    return hub.expand(given, env) if given else _home(env, *usual)


def _data(env: Mapping[str, str], windows: str = "APPDATA") -> Path:
    """Where programs keep what is theirs."""
    if sys.platform == "darwin":
        return _home(env, "Library", "Application Support")
    if sys.platform == "win32":
        return _stated(env, windows, "AppData", "Roaming" if windows == "APPDATA" else "Local")
    return _stated(env, "XDG_DATA_HOME", ".local", "share")


def _lm_studio(env: Mapping[str, str]) -> list[Path]:
    own = _home(env, ".lmstudio")
    try:
        pointed = read_bounded(_home(env, ".lmstudio-home-pointer"), JSON_NBYTES).decode().strip()
        own = Path(pointed) if os.path.isabs(pointed) else own
    except (OSError, ValueError):
        pass  # it is where it usually is
    chosen = _entry(own / "settings.json", "downloadsFolder")
    return [*([Path(chosen)] if chosen else []), own / "models", _home(env, ".cache", "lm-studio", "models")]


def _llama_cpp(env: Mapping[str, str]) -> list[Path]:
    if env.get("LLAMA_CACHE", "").strip():
        return [_stated(env, "LLAMA_CACHE")]
    if sys.platform == "darwin":
        return [_home(env, "Library", "Caches", "llama.cpp")]
    if sys.platform == "win32":
        return [_stated(env, "LOCALAPPDATA", "AppData", "Local") / "llama.cpp"]
    return [_stated(env, "XDG_CACHE_HOME", ".cache") / "llama.cpp"]


def _jan(env: Mapping[str, str]) -> list[Path]:
    whole = {_data(env) / "Jan", _home(env, ".config", "Jan")}
    chosen = [path for folder in sorted(whole) if (path := _entry(folder / "settings.json", "data_folder"))]
    data = [*map(Path, chosen), *(folder / "data" for folder in sorted(whole)), _home(env, "jan")]
    return [folder / inner for folder in data for inner in (Path("llamacpp", "models"), Path("models"))]


def _gpt4all(env: Mapping[str, str]) -> list[Path]:
    return [_data(env, "LOCALAPPDATA") / "nomic.ai" / "GPT4All", _home(env, ".cache", "gpt4all")]


def _entry(path: Path, key: str) -> str | None:
    """A folder that a program's file of settings names; None where it names none."""
    try:
        content = json.loads(read_bounded(path, JSON_NBYTES))
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
        yield _of_ollama(stored)
    for program in PROGRAMS.values():
        if program is not OLLAMA:
            yield from (ExternalModel(f"{program.prefix}:{name}", program.title, file, _projector(file)) for name, file in _named(program,
                env))


def all_names(env: Mapping[str, str]) -> list[str]:
    """Typable names of all external models, without opening any."""
    others = (f"{program.prefix}:{name}" for program in PROGRAMS.values() if program is not OLLAMA for name, _ in _named(program, env))
    return [*(f"{OLLAMA.prefix}:{name}" for name in ollama.names(env)), *others]


def find(reference: Reference, env: Mapping[str, str]) -> ExternalModel:
    """Resolve a reference to another program's model. Raises ModelNotFound with suggestions, UsageError for an ambiguous name."""
    prefix, name = reference.program or "", reference.of_program
    program = PROGRAMS[prefix]
    if program is OLLAMA:
        if (stored := ollama.find(name, env)) is not None:
            return _of_ollama(stored)
        if name in (names := ollama.names(env)):
            raise ModelNotFound(f"Ollama's manifest of model {show(name)} cannot be read", f"ollama pull {typed(name)} writes it anew")
        raise _not_found(program, name, names, env)
    each = list(_named(program, env))
    asked = _key(name).lower().split("/")
    exact = [(own, file) for own, file in each if own.lower() == "/".join(asked)]
    found = exact or [(own, file) for own, file in each if _ends(file, asked)]
    if len(found) > 1:
        raise UsageError(f"{program.title} has {len(found)} models {show(name)}",
                         f"name one: {' or '.join(f'{prefix}:{own}' for own, _ in found[:4])}")
    if not found:
        raise _not_found(program, name, [own for own, _ in each], env)
    return ExternalModel(f"{prefix}:{found[0][0]}", program.title, found[0][1], _projector(found[0][1]))


def local_name(name: str, env: Mapping[str, str]) -> str | None:
    """The name to type for a model that Ollama calls `name`, where Ollama has it."""
    try:
        stored = ollama.find(name, env)
    except ModelNotFound:
        return None
    return None if stored is None else _of_ollama(stored).name


def owner_of(file: Path, env: Mapping[str, str]) -> ExternalProgram | None:
    """The program whose store contains a file."""
    place = Path(os.path.abspath(file))
    return next((program for program in PROGRAMS.values()
                 for folder in program.folders(env) if Path(os.path.abspath(folder)) in place.parents), None)


def refuse_removal(text: str, name: str, program: ExternalProgram) -> UsageError:
    how = f"ollama rm {typed(name)}" if program is OLLAMA else f"remove it in {program.removal}" if program.removal else f"rm {typed(name)}"
    return UsageError(f"{text} is {program.title}'s, which effllm reads and never changes", how)


def require_place_beside(file: Path, env: Mapping[str, str]) -> None:
    """Called before measurements of a model are saved beside it. Raises UsageError where that would write into another program's store."""
    if (owner := owner_of(file, env)) is not None:
        raise UsageError(f"{file} is {owner.title}'s, and effllm writes nothing there: measurements are stored beside the model",
                         f"link it into a folder of your own: ln -s {typed(file)} {owner.prefix}-model{gguf_names.SUFFIX}")


def _of_ollama(stored: ollama.OllamaModel) -> ExternalModel:
    return ExternalModel(f"{OLLAMA.prefix}:{stored.name}", OLLAMA.title, stored.model, stored.first("projector"), stored.licence, stored)


def _not_found(program: ExternalProgram, name: str, known: list[str], env: Mapping[str, str]) -> ModelNotFound:
    if not any(folder.is_dir() for folder in program.folders(env)):
        return ModelNotFound(f"there is no model {show(f'{program.prefix}:{name}')}: no library of {program.title} is here",
                             f"effllm looks in {program.folders(env)[0]}")
    alike = close_matches(name, known) or [each for each in known if each.lower().startswith(name.lower())][:3]
    hint = f"did you mean {' or '.join(f'{program.prefix}:{each}' for each in alike)}?" if alike else "effllm list shows what is here"
    return ModelNotFound(f"{program.title} has no model {show(name)}", hint)


def _named(program: ExternalProgram, env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """The GGUF files of models, by the shortest name that no other has."""
    files = [(_key(path.relative_to(root).as_posix()), path) for root in dict.fromkeys(program.folders(env)) for path in _files(root)]
    counts: dict[str, int] = {}
    for key, _ in files:
        for end in _all_ends(key):
            counts[end] = counts.get(end, 0) + 1
    for key, path in files:
        yield next((key[-len(end):] for end in _all_ends(key) if counts[end] == 1), str(path)), path


def _all_ends(key: str) -> list[str]:
    parts = key.lower().split("/")
    return ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _key(relative: str) -> str:
    """A file's place without what says nothing of the model."""
    key = relative[: -len(gguf_names.SUFFIX)] if relative.lower().endswith(gguf_names.SUFFIX) else relative
    folder, _, name = key.rpartition("/")
    return folder if folder and name.lower() == PLAIN else key


def _ends(file: Path, asked: list[str]) -> bool:
    return _key(file.as_posix()).lower().split("/")[-len(asked):] == asked


def _files(root: Path) -> Iterator[Path]:
    """The GGUF files of models below a folder that are no part of a download, in alphabetical order; of one that was split the first part.
    Folders that may not be read are left out, and so is what a link leads back to."""
    seen, left = set(), [MOST]

    def walk(folder: Path, deep: int) -> Iterator[Path]:
        if (real := os.path.realpath(folder)) in seen:
            return
        seen.add(real)
        entries = hub.names_in(folder)
        left[0] -= len(entries)
        yield from (folder / name for name in gguf_names.model_files(each for each in entries if not each.startswith(UNFINISHED))
                    if os.path.isfile(folder / name))
        for name in entries:
            if deep < DEEPEST and left[0] > 0 and not name.startswith(".") and "." + name.rpartition(".")[2].lower() != gguf_names.SUFFIX \
                    and os.path.isdir(folder / name):
                yield from walk(folder / name, deep + 1)

    return walk(root, 1)


def _projector(file: Path) -> Path | None:
    found = sibling_projectors(file)
    return found[0] if len(found) == 1 else None
