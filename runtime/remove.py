"""Removing a model: which files go, whose they are, and nothing that effllm did not make unless a person says so.

In effllm's own folder it is the model's folder; in a folder that `quantize -o` made, the files that effllm wrote there; in the hub cache,
which other tools share, the repository, or with `@revision` that revision and the blobs that no other one shows.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import EffllmError, ModelNotFound, UsageError
from . import hub, storage
from .aliases import catalog
from .catalog import Absent, find_entry, resolve
from .reference import Reference, parse_reference
from .written import foreign

OWN, FOLDER, SHARED = "effllm", "folder", "hub cache"


@dataclass(frozen=True)
class Removal:
    """`owner` is effllm, folder or hub cache; `paths` are files, links and folders that go, `nbytes` what the disk gets back."""

    name: str
    owner: str
    folder: Path
    paths: tuple[Path, ...]
    nbytes: int
    locks: Path | None = None

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "owner": self.owner, "folder": str(self.folder), "paths": [str(path) for path in self.paths],
                "bytes": self.nbytes}


def plan_removal(text: str, env: Mapping[str, str]) -> Removal:
    """Raises ModelNotFound for what is not here, UsageError for what is not effllm's to remove."""
    reference = parse_reference(text, env)
    try:
        ref = resolve(text, env)
        folder, repo, variant = ref.folder, ref.repo, ref.variant
    except Absent as absent:
        if not hub.repo_folder(env, absent.repo).is_dir() or reference.variant:
            raise
        folder, repo, variant = hub.repo_folder(env, absent.repo), absent.repo, None  # a part of a download
    if variant is not None:
        raise ModelNotFound(f"{text} is not kept on this machine", "effllm list shows what is")
    if storage.models_folder(env) in folder.parents:
        return Removal(text, OWN, folder, (folder,), _nbytes(folder))
    if repo is not None and hub.cache_folder(env) in folder.parents:
        return _from_cache(text, reference, repo, folder, env)
    entry = find_entry(catalog(env), reference.name) if reference.path is None else None
    if entry is not None and not entry.own:
        raise UsageError(f"{entry.alias} comes with effllm", "it goes with the program: pip uninstall effllm")
    if folder.is_file():
        raise UsageError(f"{folder} is a file that effllm does not keep track of", f"rm {folder}")
    return _made_folder(text, folder)


def remove(removal: Removal, env: Mapping[str, str]) -> None:
    """Do it. Raises EffllmError where another program is writing there, or where the disk refuses."""
    if removal.locks is not None:
        _check_unlocked(removal.locks, removal.name)
    try:
        for path in removal.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if removal.owner == OWN:
            _remove_empty(removal.folder.parent, storage.models_folder(env))
        elif removal.owner == FOLDER:
            removal.folder.rmdir()
            storage.forget(env, removal.folder)
    except OSError as error:
        raise EffllmError(f"{error.filename} cannot be removed: {error.strerror}",
                          f"check its permissions: ls -ld {removal.folder}") from error


def _made_folder(text: str, folder: Path) -> Removal:
    if not (folder / storage.MARKER).is_file():
        raise UsageError(f"{folder} was not made by effllm, which leaves it alone", f"if it is to go: rm -r {folder}")
    if (other := foreign(folder)) is not None:
        raise UsageError(f"{folder} holds {other}, which effllm did not write and will not delete", "move it away first")
    # The marker last: what a kill leaves is still known for what it is.
    entries = sorted(folder.iterdir(), key=lambda path: (path.name == storage.MARKER, path.name))
    return Removal(text, FOLDER, folder, tuple(entries), _nbytes(folder))


def _from_cache(text: str, reference: Reference, repo: str, folder: Path, env: Mapping[str, str]) -> Removal:
    root = hub.repo_folder(env, repo)
    locks = hub.cache_folder(env) / ".locks" / root.name
    others = [name for name in hub.names_in(root / "snapshots") if name != folder.name]
    if reference.revision is None or not others or folder == root:
        return Removal(text, SHARED, root, (root,), _nbytes(root), locks)
    shown = {blob for name in others for blob in _blobs(root / "snapshots" / name)}
    gone = sorted(blob for blob in _blobs(folder) if blob not in shown and blob.parent == root / "blobs")
    refs = [path for path in sorted((root / "refs").rglob("*")) if path.is_file() and hub.read_ref(path) == folder.name]
    return Removal(text, SHARED, folder, (folder, *refs, *gone), sum(blob.stat().st_size for blob in gone), locks)


def _blobs(snapshot: Path) -> Iterator[Path]:
    """What the links of a snapshot show."""
    for path in snapshot.rglob("*"):
        if path.is_symlink() and path.exists():
            yield Path(os.path.normpath(path.parent / os.readlink(path)))


def _check_unlocked(locks: Path, name: str) -> None:
    for lock in locks.glob("*.lock"):
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EffllmError(f"{name} is being downloaded by another program", "wait for it, or stop it") from None
        finally:
            os.close(fd)


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _remove_empty(folder: Path, root: Path) -> None:
    """Folders of a revision and a repository that hold no model any more."""
    while folder != root and not any((folder / name).is_dir() for name in hub.names_in(folder) if name != storage.REFS):
        shutil.rmtree(folder)
        folder = folder.parent
