"""Layout of effllm's own storage: models it built, folders it was told to write, and the user's own files.

    <data>/models/<org>--<repo>/<revision>/<format>/    built by `pull --bits`, `run --bits --keep`
    <data>/models/<org>--<repo>/refs/<branch>           the commit a branch pointed to when it was pulled
    <data>/folders.json                                 folders written by `quantize -o` elsewhere
    <data>/licences/<org>--<repo>@<commit>              the licence stated by the hub alone, for pulled models without a licence file
    <data>/listed.json                                  cached facts of listed models (`listing_cache.py`)
    <config>/models.yaml                                the user's aliases
    <state>/sessions/                                   saved conversations and their caches (`session_store.py`)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE

from ... import ls, not_written
from .. import hub
from ..files.atomic_write import atomic_file, file_lock

MARKER = "effllm.json"
REFS, LICENCES = "refs", "licences"
FORMAT, VERSION = "effllm-folders", 1
CONFIG, MAX_DEPTH = "config.json", 3  # what makes a folder a model's; levels of folders below that of all models
MAX_LICENCE_LENGTH = 40  # as many as are taken of what a hub says


@dataclass(frozen=True)
class StoredModel:
    """A model in the data folder. `repo` is an alias for a packaged or local one, whose revision is `local-...`."""

    repo: str
    revision: str
    spec: str
    folder: Path


def data_folder(env: Mapping[str, str]) -> Path:
    return _folder(env, "XDG_DATA_HOME", ".local/share", "user_data_path")


def config_folder(env: Mapping[str, str]) -> Path:
    return _folder(env, "XDG_CONFIG_HOME", ".config", "user_config_path")


def sessions_folder(env: Mapping[str, str]) -> Path:
    """Saved sessions: conversations, and the pages of their caches."""
    return _folder(env, "XDG_STATE_HOME", ".local/state", "user_state_path") / "sessions"


def served_folder(env: Mapping[str, str]) -> Path:
    """What a server keeps of prompts as long as it runs."""
    return sessions_folder(env).with_name("served")


def _folder(env: Mapping[str, str], variable: str, default: str, platformdirs_name: str) -> Path:
    """Where the platform puts such things; on Linux read from `env`, which the library of other platforms would not ask."""
    if sys.platform.startswith("linux"):
        value = env.get(variable, "").strip()
        return (Path(value) if value else hub.home(env) / default) / "effllm"
    import platformdirs

    return getattr(platformdirs, platformdirs_name)("effllm", appauthor=False)


def models_folder(env: Mapping[str, str]) -> Path:
    return data_folder(env) / "models"


def source_name(folder: Path) -> str | None:
    """The name of the model that one of our folders was built from; reads one file and imports no library."""
    try:
        source = json.loads((folder / MARKER).read_bytes())["source"]["model"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return source if isinstance(source, str) else None


def own_folder(env: Mapping[str, str], repo: str, revision: str, spec: str) -> Path:
    """Where a model of ours lies or would lie."""
    return models_folder(env) / repo.replace("/", "--") / revision / spec


def stored_folder(models: Path, folder: Path, spec: str, name: str | None = None, revision: str | None = None) -> Path:
    """Path of the build of `folder` (a folder or a GGUF file) in a format below `models`, whether or not it exists. `name`: its
    repository or alias; without one, a fingerprint of the local path stands for it."""
    if folder.is_file():  # one of several of its repository
        return models / folder.name / f"local-{local_fingerprint(folder)}" / spec
    return models / (name or folder.resolve().name).replace("/", "--") / (revision or f"local-{local_fingerprint(folder)}") / spec


def stored_models(env: Mapping[str, str]) -> Iterator[StoredModel]:
    """Complete models in the data folder, sorted."""
    for name in hub.names_in(models_folder(env)):
        repo = models_folder(env) / name
        for revision in hub.names_in(repo):
            for spec in hub.names_in(repo / revision) if revision != REFS else ():
                if not spec.startswith(".") and (repo / revision / spec / MARKER).is_file():
                    yield StoredModel(name.replace("--", "/"), revision, spec, repo / revision / spec)


def model_subfolders(env: Mapping[str, str]) -> Iterator[Path]:
    """Every folder at most three deep in the folder of models, in alphabetical order; what lies in a model, or is hidden, is left alone."""
    def walk(folder: Path, depth: int) -> Iterator[Path]:
        for name in hub.names_in(folder):
            path = folder / name
            if name == REFS or not path.is_dir():
                continue
            yield path
            if depth < MAX_DEPTH and not name.startswith(".") and not (path / CONFIG).is_file():
                yield from walk(path, depth + 1)

    return walk(models_folder(env), 1)


def nameless_folders(env: Mapping[str, str]) -> list[Path]:
    """Folders of models in our own that have no name there: what `export -o` and `quantize -o` were told to make in it."""
    kept = {each.folder for each in stored_models(env)}
    return [path for path in model_subfolders(env) if (path / CONFIG).is_file() and not path.name.startswith(".") and path not in kept]


def find_stored(env: Mapping[str, str], repo: str, revision: str, spec: str | None) -> list[StoredModel]:
    """Stored models of a repository at a branch, commit or commit prefix; `spec` None matches any format."""
    if not hub.is_repo(repo) or not hub.is_revision(revision):
        return []
    commit = hub.read_ref(models_folder(env) / repo.replace("/", "--") / REFS / revision) or revision
    return [kept for kept in stored_models(env) if kept.repo == repo and spec in (None, kept.spec)
            and (kept.revision == commit or hub.COMMIT.fullmatch(commit) and kept.revision.startswith(commit))]


def note_branch(env: Mapping[str, str], repo: str, branch: str, commit: str) -> None:
    """Remember what a branch stands for."""
    path = models_folder(env) / repo.replace("/", "--") / REFS / branch
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, commit)


def note_licence(env: Mapping[str, str], repo: str, commit: str, licence: str) -> None:
    """Remember what a hub states of a repository, which of its files alone nobody could tell. Raises OSError."""
    path = _licence_note(env, repo, commit)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, licence[:MAX_LICENCE_LENGTH])


def stated_licence(env: Mapping[str, str], snapshot: hub.Snapshot) -> str | None:
    """The licence of what lies in the cache: as its model card states it, else as the hub did when it was pulled."""
    if (licence := hub.stated_licence(snapshot.folder)) is not None:
        return licence
    try:
        with _licence_note(env, snapshot.repo, snapshot.commit).open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_LICENCE_LENGTH).strip() or None
    except OSError:
        return None


def licence_notes(env: Mapping[str, str], repo: str, commit: str | None = None) -> list[Path]:
    """What was remembered of a repository's licence, at one commit or at any."""
    if commit is not None:
        return [note] if (note := _licence_note(env, repo, commit)).is_file() else []
    folder, begin = data_folder(env) / LICENCES, _licence_note(env, repo, "").name
    return [folder / name for name in hub.names_in(folder) if name.startswith(begin)]


def _licence_note(env: Mapping[str, str], repo: str, commit: str) -> Path:
    return data_folder(env) / LICENCES / f"{repo.replace('/', '--')}@{commit}"


def registered(env: Mapping[str, str]) -> list[Path]:
    """Folders that `quantize -o` made, or is at, and that are models."""
    return [path for path in map(Path, _read(data_folder(env) / "folders.json")) if (path / MARKER).is_file()]


def register(env: Mapping[str, str], folder: Path, is_made: bool = True) -> None:
    """Let `list` show a folder outside the data folder. One that is still being built (not `is_made`) is shown as soon as it is a model,
    even if the build ends without a further call."""
    folder = Path(os.path.abspath(folder))
    if models_folder(env) not in folder.parents:
        pending = None if is_made else str(folder)
        _update_folders(env, lambda known: [*(path for path in known if path != str(folder)), str(folder)], pending)


def forget(env: Mapping[str, str], folder: Path) -> None:
    _update_folders(env, lambda known: [path for path in known if path != os.path.abspath(folder)])


def _update_folders(env: Mapping[str, str], change: Callable[[list[str]], list[str]], pending: str | None = None) -> None:
    """One process at a time; what is no model any more, nor is being made or `promised`, is dropped on the way."""
    from ...offload.folder_writer import partial_folder  # not for whoever lists them

    path = data_folder(env) / "folders.json"
    try:
        with locked_file(path):
            folders = [each for each in change(_read(path)) if each == pending or (Path(each) / MARKER).is_file()
                     or partial_folder(Path(each)).is_dir()]
            replace_text(path, json.dumps({"format": FORMAT, "version": VERSION, "folders": folders}, indent=1) + "\n")
    except OSError as error:
        raise not_written(error, f"{path} cannot be written", f"check its folder: {ls(path.parent)}") from error


def _read(path: Path) -> list[str]:
    """Absolute paths; a damaged list is an empty one, because the folders themselves are not lost with it."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    folders = raw.get("folders") if isinstance(raw, dict) and raw.get("format") == FORMAT else None
    return [each for each in folders if isinstance(each, str) and os.path.isabs(each)] if isinstance(folders, list) else []


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """A small file that is read, changed and written by one process at a time. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name(f".{path.stem}.lock")):
        yield


def replace_text(path: Path, text: str) -> None:
    """A small file that is either old or new, and opens to whom the old one did."""
    with atomic_file(path) as file:
        with suppress(OSError):  # none there yet, or a file system without permissions
            os.fchmod(file.fileno(), S_IMODE(path.stat().st_mode))
        file.write(text.encode())


def local_fingerprint(folder: Path) -> str:
    """Eight digits for a local folder or GGUF file and the state of its model: another one, or a changed one, is kept elsewhere. What is
    measured of a model or told of it changes nothing."""
    import hashlib
    from fnmatch import fnmatch

    patterns = (*hub.SETTINGS, "*.safetensors", hub.INDEX)
    entries = [entry for entry in folder.iterdir() if any(fnmatch(entry.name, name) for name in patterns)] if folder.is_dir() else [folder]
    files = sorted((entry.name, (status := entry.stat()).st_size, status.st_mtime_ns) for entry in entries if entry.is_file())
    return hashlib.sha256(repr((str(folder.resolve()), files)).encode()).hexdigest()[:8]
