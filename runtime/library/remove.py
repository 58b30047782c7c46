"""Removal of models: which files go and who owns them; nothing effllm did not write is removed unless the user says so.

In effllm's own data folder that is the model's folder; in a folder from `quantize -o`, the files effllm wrote there; in the shared hub
cache, the repository, or with `@revision` that revision and the blobs no other one references, or with `:FILE` the links to that file's
parts and the blobs nothing else references, or its partial download.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from ... import EffllmError, ModelNotFound, UsageError, ls, typed
from ...offload.folder_writer import is_being_written
from ...offload.safetensors_header import is_gguf
from .. import hub
from ..catalog import Absent, find_entry, resolve
from ..files.atomic_write import UNFINISHED
from ..files.model_folder_files import MEASUREMENTS, foreign_entry
from ..gguf import file_names, listwise
from ..pull.disk import allocated_nbytes
from . import storage, unfinished_builds, unfinished_downloads
from .aliases import catalog
from .model_name import Reference, parse_reference

OWN, FOLDER, SHARED = "effllm", "folder", "hub cache"


@dataclass(frozen=True)
class Removal:
    """`owner` is effllm, folder or hub cache; `paths` are files, links and folders that go, `nbytes` what the disk gets back. `is_part`: a
    download of it was stopped, or whoever made it (not `was_pulled`), and nothing of it could run."""

    name: str
    owner: str
    folder: Path
    paths: tuple[Path, ...]
    nbytes: int
    locks: Path | None = None
    is_part: bool = False
    was_pulled: bool = True

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "owner": self.owner, "folder": str(self.folder), "paths": [str(path) for path in self.paths],
                "bytes": self.nbytes}


def plan_removal(text: str, env: Mapping[str, str]) -> Removal:
    """Raises ModelNotFound for what is not here, UsageError for what is not effllm's to remove."""
    reference = parse_reference(text, env)
    _refuse_external(text, reference, env)
    try:
        ref = resolve(text, env)
        folder, repo, variant = ref.folder, ref.repo, ref.variant
        if repo is not None and reference.file is None and reference.path is None and is_gguf(folder):  # the one that a run takes
            folder = _downloaded_part(reference, repo, env) or folder
    except Absent as absent:
        if (stopped := _stopped_pull(reference, absent.repo, env)) is not None:
            return stopped
        folder, repo, variant = _downloaded_part(reference, absent.repo, env), absent.repo, None
        if folder is None:
            raise ModelNotFound(absent.message, "effllm list shows what is here") from absent
    except ModelNotFound:
        stopped = _leftovers(text, Path(os.path.abspath(reference.path))) if _is_own_path(reference, env) else None
        if stopped is None:
            raise
        return stopped
    if variant is not None:
        out = storage.stored_folder(storage.models_folder(env), folder, variant, repo or ref.alias, ref.revision)
        if (stopped := _leftovers(text, out)) is not None:
            return stopped
        raise ModelNotFound(f"{text} is not stored on this machine", "effllm list shows what is")
    if storage.models_folder(env) in (absolute := Path(os.path.abspath(folder))).parents:
        folder = absolute
        if folder.is_file():
            raise _untracked(folder)
        _require_own_files(folder)
        # What a kill has left of the files that it was made of, or of what was to replace it, goes first: by itself nothing would find it.
        left = unfinished_builds.leftover_folders(folder)
        return Removal(text, OWN, folder, (*left, folder), _nbytes(folder) + sum(map(allocated_nbytes, left)))
    if is_gguf(folder) and not folder.is_dir() and hub.repo_of(env, folder) is not None:
        return _cached_file_removal(reference, Path(os.path.abspath(folder)), hub.repo_of(env, folder), env)
    if repo is not None and hub.cache_folder(env) in folder.parents:
        return _cache_removal(text, reference, repo, folder, env)
    entry = find_entry(catalog(env), reference.name) if reference.path is None else None
    if entry is not None and entry.packaged:
        raise UsageError(f"{entry.alias} is {entry.packaged}, which comes with effllm",
                         f"to remove only the alias: effllm alias --rm {entry.alias}")
    if entry is not None and not entry.own:
        raise UsageError(f"{entry.alias} comes with effllm", "it is removed with the program: pip uninstall effllm")
    if entry is not None and not (folder / storage.MARKER).is_file():  # whoever types it here mostly means the name
        raise UsageError(f"{entry.alias} is {folder}, a folder that effllm did not quantize, and is left alone",
                         f"to remove only the alias: effllm alias --rm {typed(entry.alias)}")
    if folder.is_file():
        raise _untracked(folder)
    return _own_folder_removal(text, folder)


def _refuse_external(text: str, reference: Reference, env: Mapping[str, str]) -> None:
    """Raises UsageError for what another program keeps, by whatever name, but for what effllm made of it."""
    from . import external_models

    entry = find_entry(catalog(env), reference.name) if reference.path is None and reference.program is None else None
    if entry is not None and entry.library and not reference.variant:
        raise UsageError(f"{entry.alias} is {entry.library}, which effllm reads and never changes",
                         f"to remove only the alias: effllm alias --rm {entry.alias}")
    if reference.program is not None and not reference.variant:
        external_models.find(reference, env)  # what is not there is said first
        raise external_models.refuse_removal(text, reference.of_program, external_models.PROGRAMS[reference.program])
    if reference.path is not None and (owner := external_models.owner_of(reference.path, env)) is not None:
        raise external_models.refuse_removal(text, str(reference.path), owner)


def require_idle(removal: Removal) -> None:
    """Raises EffllmError where another program is writing there."""
    if removal.locks is not None:
        _check_unlocked(removal.locks, removal.name)
    if any(map(is_being_written, removal.paths)):
        raise EffllmError(f"{removal.name} is being written by another effllm process", "wait for it, or stop it")


def remove(removal: Removal, env: Mapping[str, str]) -> None:
    """Do it. Raises EffllmError where another program is writing there, or where the disk refuses."""
    require_idle(removal)
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
                          f"check its permissions: {ls(removal.folder)}") from error


def _is_own_path(reference: Reference, env: Mapping[str, str]) -> bool:
    """Whether a reference is no more than the path of something in our own folder."""
    if reference.path is None or reference.variant or reference.file:
        return False
    return storage.models_folder(env) in Path(os.path.abspath(reference.path)).parents


def _stopped_pull(reference: Reference, repo: str, env: Mapping[str, str]) -> Removal | None:
    """What a stopped `pull --bits` has left of a format; None where there is nothing of it."""
    if not reference.variant or reference.file or not hub.is_repo(repo):
        return None
    root, revision = storage.models_folder(env) / repo.replace("/", "--"), _revision(reference, env)
    noted = [each.folder for each in unfinished_builds.find_stopped(env, repo, revision, reference.variant)]
    unnoted = [root / commit / reference.variant for commit in hub.names_in(root)
               if reference.revision is None or commit.startswith(reference.revision)]
    return next((removal for out in (*noted, *unnoted) if (removal := _leftovers(reference.text, out)) is not None), None)


def _leftovers(text: str, out: Path) -> Removal | None:
    """What whoever was making `out` has left; None where there is nothing of it."""
    folders = unfinished_builds.leftover_folders(out)
    may_be_pulled = hub.COMMIT.fullmatch(out.parent.name) is not None
    return Removal(text, OWN, out, folders, sum(map(allocated_nbytes, folders)), out.parent, True, may_be_pulled) if folders else None


def _downloaded_part(reference: Reference, repo: str, env: Mapping[str, str]) -> Path | None:
    """What of a repository is here: the repository, one revision of it, or a part of the file that was asked for. Raises ModelNotFound
    where a tag means several files that are partly here."""
    root = hub.repo_folder(env, repo)
    if reference.variant or not root.is_dir():
        return None
    revision = _revision(reference, env)
    found = hub.find(env, repo, revision)
    if reference.file is None:
        commits = {found.commit} if found else {each.commit for each in unfinished_downloads.find_stopped(env, repo, revision, None)}
        if not _is_pinned(reference, env) or not commits and not hub.names_in(root / "snapshots"):
            return root
        return root / "snapshots" / min(commits) if commits else None
    links = [] if found is None else [path.relative_to(found.folder).as_posix() for path in found.folder.rglob("*") if is_gguf(path)]
    files = file_names.matching(reference.file, links)  # also those that lead nowhere
    paths = {found.folder / file for file in files} or {root / "snapshots" / each.commit / each.file for each
                                                         in unfinished_downloads.find_stopped(env, repo, revision, reference.file)}
    if len({place.name for place in paths}) > 1:
        raise ModelNotFound(f"{repo} has {len(paths)} files of {reference.file}",
                            "name one: " + " or ".join(f"{reference.base}:{place.name}" for place in sorted(paths)))
    return min(paths, default=None)


def _revision(reference: Reference, env: Mapping[str, str]) -> str:
    """The branch, tag or commit that a name means."""
    entry = find_entry(catalog(env), reference.name)
    return reference.revision or (entry.revision if entry else "main")


def _is_pinned(reference: Reference, env: Mapping[str, str]) -> bool:
    """Whether one revision is meant, by what was typed or by what an alias stands for. The name of a repository means all of it, whichever
    revision an alias of it is of."""
    entry = find_entry(catalog(env), reference.name)
    return reference.revision is not None or entry is not None and entry.repo != reference.name and entry.revision != "main"


def _untracked(file: Path) -> UsageError:
    return UsageError(f"{file} is a file that effllm does not manage", f"rm {typed(file)}")


def _require_own_files(folder: Path) -> None:
    """Raises UsageError for a folder with anything in it that effllm did not write, wherever it lies: a marker says who made the folder,
    not who put what into it since."""
    if (other := foreign_entry(folder)) is not None:
        raise UsageError(f"{folder} holds {other}, which effllm did not write and will not delete", "move it away first")


def _own_folder_removal(text: str, folder: Path) -> Removal:
    if not (folder / storage.MARKER).is_file() and not (folder / "config.json").exists():
        raise UsageError(f"{folder} is not a model", "effllm list shows the models that are here")
    if not (folder / storage.MARKER).is_file():
        raise UsageError(f"{folder} was not quantized by effllm, and is left alone", f"to remove it anyway: rm -r {typed(folder)}")
    _require_own_files(folder)
    if folder.is_symlink():  # its files would go, and what they are in would stay
        target = folder.resolve()
        raise UsageError(f"{folder} is a link to {target}",
                         f"the model: effllm rm {typed(target)}; the link alone: rm {typed(folder)}")
    folder = Path(os.path.abspath(folder))
    if folder == Path.cwd() or folder in Path.cwd().parents:
        raise UsageError(f"{folder} is the current directory", f"cd somewhere else, then effllm rm {typed(folder)}")
    if not os.access(folder.parent, os.W_OK | os.X_OK):  # before a file has gone
        raise EffllmError(f"{folder} cannot be removed from {folder.parent}: Permission denied",
                          f"check its permissions: {ls(folder.parent)}")
    # The marker last: what a kill leaves is still known for what it is.
    entries = sorted(folder.iterdir(), key=lambda path: (path.name == storage.MARKER, path.name))
    return Removal(text, FOLDER, folder, tuple(entries), _nbytes(folder))


def _cache_removal(text: str, reference: Reference, repo: str, folder: Path, env: Mapping[str, str]) -> Removal:
    root = hub.repo_folder(env, repo)
    locks = hub.cache_folder(env) / ".locks" / root.name
    stopped = [(each.commit, part) for each in unfinished_downloads.stopped_downloads(env, repo) for part in each.parts]
    other_commits = {*hub.names_in(root / "snapshots"), *(commit for commit, _ in stopped)} - {folder.name}
    if not _is_pinned(reference, env) or not other_commits or folder == root:
        return Removal(text, SHARED, root, (root, *storage.licence_notes(env, repo)), _nbytes(root), locks)
    used_blobs = {blob for name in other_commits for blob in _blobs(root / "snapshots" / name)}
    removed_blobs = sorted(blob for blob in _blobs(folder) if blob not in used_blobs and blob.parent == root / "blobs")
    parts = [part for commit, part in stopped if commit == folder.name]
    paths = (folder, *_refs(root, folder.name), *removed_blobs, *(each for part in parts for each in part.paths),
             *storage.licence_notes(env, repo, folder.name))
    nbytes = sum(blob.stat().st_size for blob in removed_blobs) + sum(part.held for part in parts)
    return Removal(text, SHARED, folder, paths, nbytes, locks)


def _cached_file_removal(reference: Reference, path: Path, repo: str, env: Mapping[str, str]) -> Removal:
    """The parts of a GGUF file, what was measured of them, what it sees with, where no other model does, and their blobs, as far as nothing
    else shows them, and what a download of it that was stopped has left; of folders what would be empty,
    and the repository where nothing would be left of it."""
    text, root = reference.text, Path(os.path.abspath(hub.repo_folder(env, repo)))
    locks, snapshots = hub.cache_folder(env) / ".locks" / root.name, root / "snapshots"
    commit, *inner = path.relative_to(snapshots).parts
    parts = [path.with_name(name) for name in file_names.all_parts(path.name)]
    measurements = [each for part in parts for measurement in MEASUREMENTS for name in [escape(f"{part.name}.{measurement}")]
              for pattern in (name, UNFINISHED.format(name)) for each in part.parent.glob(pattern)]
    removed = {each for each in (*parts, *measurements) if os.path.lexists(each)}
    removed |= _projectors(snapshots / commit, parts)
    used_blobs = set(_blobs(snapshots, removed))
    blobs = {blob for link in removed for blob in _link_target(link) if blob not in used_blobs and blob.parent == root / "blobs"}
    nbytes = sum(each.stat().st_size for each in (*blobs, *removed) if each.is_file() and not each.is_symlink())
    is_part, file = not all(part.exists() for part in parts), "/".join(inner)
    revisions = {commit} if reference.path is not None else {commit, _revision(reference, env)}
    stopped = {part for revision in revisions for download in unfinished_downloads.find_stopped(env, repo, revision, file)
               for part in download.parts}
    blobs |= {each for part in stopped for each in part.paths}
    nbytes += sum(part.held for part in stopped)
    for folder in path.parents:
        if folder == snapshots or folder.is_dir() and any(entry not in removed for entry in folder.iterdir()):
            break
        removed |= {folder} if folder.is_dir() else set()
    if set(snapshots.iterdir()) <= removed and {root / "blobs" / name for name in hub.names_in(root / "blobs")} <= blobs:
        return Removal(text, SHARED, root, (root, *storage.licence_notes(env, repo)), nbytes, locks, is_part)
    more = [*_refs(root, commit), *storage.licence_notes(env, repo, commit)] if snapshots / commit in removed else []
    return Removal(text, SHARED, path, (*sorted(removed, reverse=True), *more, *sorted(blobs)), nbytes, locks, is_part)


def _projectors(snapshot: Path, parts: Sequence[Path]) -> set[Path]:
    """What models see with (mmproj) or rank by, where no other model than that of these files is left to do so."""
    found = [path for path in snapshot.rglob("*") if is_gguf(path)]
    others = {path for path in found if not file_names.is_projector(path.name)} - {*parts}
    if others or any(file_names.is_projector(part.name) for part in parts):
        return set()
    return {*found, *snapshot.rglob(listwise.FILE)} - {*parts}


def _refs(root: Path, commit: str) -> list[Path]:
    return [path for path in sorted((root / "refs").rglob("*")) if path.is_file() and hub.read_ref(path) == commit]


def _blobs(snapshot: Path, excluded: Container[Path] = ()) -> Iterator[Path]:
    """What the links below a folder show."""
    for path in snapshot.rglob("*"):
        if path not in excluded:
            yield from _link_target(path)


def _link_target(path: Path) -> Iterator[Path]:
    """The blob of a link."""
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
    """Bytes that the disk gets back: what is still to come of a file that is partly here is a hole."""
    hole = unfinished_downloads.DATA
    return sum(min(path.stat().st_size, 512 * path.stat().st_blocks) if path.name.endswith(hole) else path.stat().st_size
               for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _remove_empty(folder: Path, root: Path) -> None:
    """Folders of a revision and a repository that hold no model any more, nor anything that effllm did not write there."""
    while folder != root and not any((folder / name).is_dir() or not name.startswith(".") for name in hub.names_in(folder)
                                     if name != storage.REFS):
        shutil.rmtree(folder)
        folder = folder.parent
