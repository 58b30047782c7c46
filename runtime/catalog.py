"""Resolves what the user types as MODEL to a folder of model files: alias, folder, own model, or repository in the hub cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .. import EffllmError, ModelNotFound, UsageError, ls, typed
from ..offload.safetensors_header import is_gguf
from ..offload.size import format_size
from . import hub
from .config_reader import show, show_name
from .gguf import file_names
from .library import storage, unfinished_downloads
from .library.aliases import NOT_STATED, CatalogEntry, catalog, entry_folder, parse_catalog
from .library.model_name import LIST_HINT, SEARCH_HINT, Reference, exists, parse_reference
from .library.name_suggestions import OLLAMA_PREFIX, close_matches, family_aliases, likely_typos, ollama_aliases

__all__ = ["Absent", "CatalogEntry", "ModelRef", "catalog", "entry_folder", "find_entry", "parse_catalog", "pull_hint", "resolve"]


class Absent(ModelNotFound):
    """A model whose files are not here, which `pull` would download. `entry`: its catalog entry, None if it has none."""

    reference: Reference = Reference("")
    repo: str = ""
    entry: CatalogEntry | None = None


@dataclass(frozen=True)
class ModelRef:
    """A model whose files are here. Catalog facts are None for a folder without alias."""

    text: str  # as typed
    folder: Path
    alias: str | None = None
    repo: str | None = None
    revision: str | None = None
    licence: str | None = None
    gated: bool = False
    size_bytes: int | None = None
    default_bits: int | None = None
    variant: str | None = None  # the format after a colon (`fable:4bit`) to which the folder's model is to be quantized
    notice: str = ""  # a caveat about the choice
    seen_from: Path | None = None  # of a quantized vision model, its source, which has the vision tower
    mmproj: str | None = None  # the projector file that the user or another program named
    go_template: Path | None = None  # the template file of the other program (Ollama)

    @property
    def whole(self) -> Path:
        """The folder with all parts of the model: a quantized folder may have only the text model."""
        return self.seen_from or self.folder


def resolve(text: str, env: Mapping[str, str]) -> ModelRef:
    """MODEL as typed -> a folder that exists; with a format, the quantized model kept in it. Raises Absent if `pull` would help,
    ModelNotFound with the next step, UsageError."""
    ref = _resolve(parse_reference(text, env), env)
    if ref.variant is None:
        return ref
    kept = storage.stored_folder(storage.models_folder(env), ref.folder, ref.variant, ref.repo or ref.alias, ref.revision)
    if not (kept / storage.MARKER).is_file():
        return ref
    return replace(ref, folder=kept, variant=None, seen_from=ref.folder if is_gguf(ref.folder) else None)


def _resolve(reference: Reference, env: Mapping[str, str]) -> ModelRef:
    if reference.path is not None:
        return _from_path(reference, reference.path)
    if reference.program is not None:
        return _from_program(reference, reference, env)
    entries = catalog(env)
    entry = find_entry(entries, reference.name)
    if entry is not None and entry.library:
        return _from_library_entry(reference, entry, env)
    if entry is not None and entry.path is not None:
        return _from_path_entry(reference, entry)
    if entry is not None:
        facts = {"alias": entry.alias, "licence": entry.licence, "gated": entry.gated, "size_bytes": entry.size_bytes,
                 "default_bits": entry.default_bits}
        found = _from_repo(reference, entry.repo, reference.revision or entry.revision, env, facts)
        if found is None:
            raise _absent_entry(reference, entry)
        return found
    if exists(path := Path(reference.base)):
        return _from_path(reference, path)
    found = _from_repo(reference, reference.name, reference.revision or "main", env, {})
    if found is None:
        raise _not_found(reference, entries, env)
    return found


def _from_program(reference: Reference, program_model: Reference, env: Mapping[str, str], alias: str | None = None) -> ModelRef:
    """The model file of another program, named by `program_model`."""
    from .library.external_models import find

    external = find(program_model, env)
    stored = external.stored
    return _from_gguf(reference, external.file, alias=alias, licence=external.licence,
                      mmproj=None if external.projector is None or stored is None else str(external.projector),
                      go_template=None if stored is None else stored.first("template"))


def _from_library_entry(reference: Reference, entry: CatalogEntry, env: Mapping[str, str]) -> ModelRef:
    """The other program's model behind an alias."""
    program_model = parse_reference(entry.library, env)
    if program_model.program is None:
        raise ModelNotFound(f"{entry.alias} is an alias of {show(entry.library)}, which is not a model of another program",
                            f"give the alias another model: effllm alias {entry.alias} MODEL")
    try:
        return _from_program(reference, program_model, env, entry.alias)
    except ModelNotFound as error:
        raise ModelNotFound(f"{entry.alias}: {error.message}", error.hint or LIST_HINT) from error


def find_entry(entries: Iterable[CatalogEntry], name: str) -> CatalogEntry | None:
    """The entry with an alias (case-insensitive) or a repository."""
    entries = list(entries)
    by_alias = next((entry for entry in entries if entry.alias == name.lower()), None)
    return by_alias or next((entry for entry in entries if entry.repo == name), None)


def _from_path(reference: Reference, path: Path) -> ModelRef:
    text, folder = reference.text, path
    if reference.file is not None:
        path = path / (_find_file(reference, path, show_name(str(path))) or reference.file)
    try:
        if path.is_dir():
            # A path may be "/", whose subfolders are not searched.
            files = [] if (path / "config.json").is_file() else file_names.model_files(hub.gguf_files(path, deep=False))
            if (file := file_names.default_model(files)) is not None and reference.file is None:
                return _from_gguf(reference, path / file)
            if files:
                raise ModelNotFound(f"{show_name(text)} holds GGUF files and no config.json", f"name one: {_listed(reference, files)}")
            return _with_source(ModelRef(text, path, variant=reference.variant))
        present = path.exists()
    except OSError as error:
        raise ModelNotFound(f"{show_name(text)} cannot be read: {error.strerror}",
                            f"check its permissions: {ls(path)}") from error
    if not present:
        if plain := _without_suffix(reference, folder):
            raise ModelNotFound(f"{show_name(text)}: local models have neither revisions nor tags",
                                f"leave that out: {typed(plain)}")
        others = file_names.model_files(hub.gguf_files(folder)) if reference.file else []
        if reference.file and folder.is_dir() and not is_gguf(path):
            raise ModelNotFound(f"{show_name(reference.base)} has no GGUF file of type {reference.file}",
                                f"name one: {_listed(reference, others)}" if others else f"leave it out: {reference.base}")
        similar = [] if others else _siblings(path)
        hint = f"name one: {_listed(reference, others)}" if others else f"did you mean {' or '.join(similar)}?" if similar else LIST_HINT
        raise ModelNotFound(f"there is no {'file' if reference.file or is_gguf(path) else 'folder'} {show_name(text)}", hint)
    if is_gguf(path):
        return _from_gguf(reference, path)
    in_model = (path.parent / "config.json").is_file()  # a weight file, named instead of its folder
    raise UsageError(f"{show_name(text)} is a file; a model is a folder or a GGUF file", f"try {path.parent}" if in_model else LIST_HINT)


def _without_suffix(reference: Reference, path: Path) -> str | None:
    """The path without a revision or tag, which only repositories have; None if that does not exist."""
    if reference.file is not None:
        return str(path) if path.is_file() else None
    before = str(path).rpartition("@")[0]
    return before if before and exists(Path(before)) else None


def _from_gguf(reference: Reference, path: Path, **facts: object) -> ModelRef:
    """The only place where a name becomes an existing GGUF file, on disk or in the cache."""
    return ModelRef(reference.text, path, variant=reference.variant, **facts)


def _find_file(reference: Reference, folder: Path, where: str) -> str | None:
    """The file below `folder` that a reference names by path or tag; None if there is none. Raises ModelNotFound for several."""
    if reference.file.lower().endswith(file_names.SUFFIX):
        return reference.file if exists(folder / reference.file) else None
    matches = file_names.matching(reference.file, hub.gguf_files(folder))
    if len(matches) > 1:
        raise ModelNotFound(f"{where} has {len(matches)} files of {reference.file}",
                            f"name one: {_listed(reference, matches)}")
    return matches[0] if matches else None


def _listed(reference: Reference, files: Sequence[str]) -> str:
    return " or ".join(f"{reference.base}:{file}" for file in files[:4])


def _with_source(ref: ModelRef) -> ModelRef:
    """Add the source that a quantized folder records. A damaged one, or one of a newer effllm, still resolves, so that it can be removed;
    loading it reports the error."""
    if not (ref.folder / storage.MARKER).is_file():
        return ref
    from ..offload.checkpoint import CheckpointError
    from .stores.container import read_container

    container = None
    with suppress(CheckpointError):
        container = read_container(ref.folder)
    source = container.source if container else {}
    facts = {key: value for key in ("repo", "revision", "licence") if isinstance(value := source.get(key), str)}
    return replace(ref, **{key: value for key, value in facts.items() if getattr(ref, key) is None})


def _from_path_entry(reference: Reference, entry: CatalogEntry) -> ModelRef:
    if reference.revision is not None:
        where = "has" if entry.own else "comes with effllm and has"
        raise UsageError(f"{entry.alias} {where} no other revision", f"leave it out: {entry.alias}")
    folder = entry_folder(entry)
    if not exists(folder):
        raise ModelNotFound(f"{entry.alias} refers to {folder}, which does not exist", f"effllm alias --rm {typed(entry.alias)}")
    if reference.file is not None or folder.is_file():
        return _from_path(reference, folder)
    return ModelRef(reference.text, folder, alias=entry.alias, licence=entry.licence, gated=entry.gated, size_bytes=entry.size_bytes,
                    default_bits=entry.default_bits, variant=reference.variant)


def _from_repo(reference: Reference, repo: str, revision: str, env: Mapping[str, str], facts: Mapping[str, object]) -> ModelRef | None:
    """A repository's files, or a quantized model made of them; None if neither is here."""
    snapshot = hub.find(env, repo, revision)
    if reference.file is not None:
        ref = _from_cached_file(reference, snapshot, facts, env) if snapshot else None
        if ref is None:
            _refuse_unfinished(reference, repo, revision, env)
        return ref
    stored = storage.find_stored(env, repo, snapshot.commit if snapshot else revision, reference.variant)
    missing = hub.missing_files(snapshot.folder) if snapshot else ()
    if snapshot is not None and not missing and not (reference.variant and stored):
        known = {**facts, "licence": facts.get("licence") or storage.stated_licence(env, snapshot)}
        return ModelRef(reference.text, snapshot.folder, repo=repo, revision=snapshot.commit, variant=reference.variant, **known)
    if stored:
        default = f"{facts.get('default_bits')}bit"
        best = next((model for model in stored if model.spec == default), stored[-1])
        notice = "" if reference.variant else f"{reference.text}: using the {best.spec} weights; the full ones are not on this machine"
        return _with_source(ModelRef(reference.text, best.folder, repo=repo, revision=best.revision, notice=notice, **facts))
    if "config.json" in missing and (files := file_names.model_files(hub.gguf_files(snapshot.folder))):
        if (file := file_names.default_model(files)) is not None and reference.variant is None:
            return _from_cached_file(replace(reference, file=file), snapshot, facts, env)
        raise _absent(reference, repo, f"only GGUF files of {repo} are here", f"name one: {_listed(reference, files)}")
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise _absent(reference, repo, f"{repo} is only partly downloaded: {show(missing[0])} is missing{rest}",
                      f"to complete it: effllm pull {reference.to_pull}")
    _refuse_unfinished(reference, repo, revision, env)
    return None


def _refuse_unfinished(reference: Reference, repo: str, revision: str, env: Mapping[str, str]) -> None:
    """Raises Absent for an interrupted download or build, with its progress."""
    builds = []
    if reference.variant and not reference.file:
        from .library import unfinished_builds  # imported late: completion in the shell does not need it

        builds = unfinished_builds.find_stopped(env, repo, revision, reference.variant)
    for build in builds[:1]:
        raise _absent(reference, repo, f"{repo}:{build.spec} is only partly built: {format_size(build.held)} of {format_size(build.size)} "
                      "are here",
                      f"to complete it: effllm pull {reference.to_pull}")
    for download in unfinished_downloads.find_stopped(env, repo, revision, reference.file)[:1]:
        what = f"{reference.file} of {repo}" if reference.file else repo
        raise _absent(reference, repo, f"{what} is only partly downloaded: {format_size(download.held)} of {format_size(download.size)} "
                      "are here", f"to complete it: effllm pull {reference.to_pull}")


def _from_cached_file(reference: Reference, snapshot: hub.Snapshot, facts: Mapping[str, object], env: Mapping[str, str]) -> ModelRef | None:
    """A complete GGUF file of a repository; None if none of it is here."""
    name = _find_file(reference, snapshot.folder, snapshot.repo)
    if name is None:
        return None
    if missing := [part for part in file_names.all_parts(name) if not (snapshot.folder / part).exists()]:
        raise _absent(reference, snapshot.repo, f"{name} of {snapshot.repo} is only partly downloaded: {missing[0]} is missing"
                      + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""), f"to complete it: effllm pull {reference.to_pull}")
    known = {key: facts[key] for key in ("alias", "licence", "gated") if key in facts}
    known = known or {"licence": _licence_of_file(snapshot, name, env)}
    return _from_gguf(reference, snapshot.folder / name, repo=snapshot.repo, revision=snapshot.commit, **known)


def _licence_of_file(snapshot: hub.Snapshot, name: str, env: Mapping[str, str]) -> str | None:
    """The licence in the repository's card, else in the file, else from the hub."""
    if hub.stated_licence(snapshot.folder) is None and storage.licence_notes(env, snapshot.repo, snapshot.commit):
        from .source import licence_of

        with suppress(EffllmError):
            if (licence := licence_of(snapshot.folder / name)) is not None:
                return licence
    return storage.stated_licence(env, snapshot)


def _absent(reference: Reference, repo: str, message: str, hint: str, entry: CatalogEntry | None = None) -> Absent:
    error = Absent(message, hint)
    error.reference, error.repo, error.entry = reference, repo, entry
    return error


def _absent_entry(reference: Reference, entry: CatalogEntry) -> Absent:
    label = entry.repo if entry.repo == reference.name else f"{entry.alias} ({entry.repo})"
    at = f" at {reference.revision}" if reference.revision else ""
    return _absent(reference, entry.repo, f"{label}{at} is not on this machine: {format_size(entry.size_bytes)} to download, licence "
                   f"{entry.licence or NOT_STATED}" + (", gated" if entry.gated else ""), _next_step(reference, entry), entry)


def _next_step(reference: Reference, entry: CatalogEntry) -> str:
    """The command that downloads the model. For a GGUF precision (`qwen3-8b:Q4_K_M`) of a safetensors repository: the closest
    alternative."""
    if not reference.file or reference.file.lower().endswith(file_names.SUFFIX):
        return pull_hint(entry, reference.to_pull)
    bits = next((letter for letter in reference.file if letter in "234568"), "4")
    return f"it holds no GGUF files: {pull_hint(entry, f'{reference.base} --bits {bits}')}; of others: org/repo:{reference.file}"


def pull_hint(entry: CatalogEntry, text: str = "") -> str:
    """The command that downloads an entry's files, and what must come before it."""
    consent = "accept the licence on the model's page, hf auth login, then: " if entry.gated else ""
    alternative = f" (without a gate: {entry.alternative})" if entry.gated and entry.alternative else ""
    return f"{consent}effllm pull {text or entry.alias}{alternative}"


def _not_found(reference: Reference, entries: Iterable[CatalogEntry], env: Mapping[str, str]) -> ModelNotFound:
    name, repos = reference.name, {snapshot.repo for snapshot in hub.snapshots(env)} | {kept.repo for kept in storage.stored_models(env)}
    pull = f"effllm pull {reference.to_pull}"
    if reference.revision and name in repos:
        return _absent(reference, name, f"{name} is here, but not at revision {reference.revision}", pull)
    if name in repos and (reference.file or reference.variant):
        return _absent(reference, name, f"{name} is here, but {reference.file or reference.variant} of it is not", pull)
    complete = [snapshot.commit[:12] for snapshot in hub.snapshots(env) if snapshot.repo == name and not hub.missing_files(snapshot.folder)]
    if complete:
        return _absent(reference, name, f"{name} is here at another revision only: {', '.join(complete)}",
                       f"name it, {typed(f'{name}@{complete[0]}')}, or: {pull}")
    if name in repos:
        return _absent(reference, name, f"{name} is only partly downloaded", f"to complete it: {pull}")
    is_repo = "/" in name and hub.is_repo(name) and not OLLAMA_PREFIX.match(name)
    if is_repo:
        similar = likely_typos(name, repos | {entry.repo for entry in entries if entry.repo})
    else:  # a tag that ends in a precision may begin with a size: qwen3:8b-q4_K_M
        is_tag = re.fullmatch(file_names.TAG, reference.file or "", re.IGNORECASE)
        similar = ollama_aliases(name, reference.file, entries) if is_tag else []
        similar = similar or _similar_names(name, entries, repos)
    if (ollama_name := _in_ollama(name, env)) is not None:
        similar = [ollama_name]
    if similar:
        return ModelNotFound(f"there is no model {show(name)}", f"did you mean {' or '.join(similar)}?")
    if is_repo:
        return _absent(reference, name, f"{name} is not on this machine", pull)
    return ModelNotFound(f"there is no model {show(name)}", SEARCH_HINT)


def _in_ollama(name: str, env: Mapping[str, str]) -> str | None:
    """How to name a model in Ollama's library that has this name; None if there is none."""
    from .library.external_models import local_name

    return local_name(name, env)


def _similar_names(name: str, entries: Sequence[CatalogEntry], repos: Iterable[str]) -> list[str]:
    """Suggestions for a single word, or for a name after Ollama's library/."""
    word = OLLAMA_PREFIX.sub("", name)
    return family_aliases(word, entries) or close_matches(word, _known(entries, repos)) or ([] if "/" in name else _siblings(Path(name)))


def near_names(name: str, env: Mapping[str, str]) -> list[str]:
    """At most three similar names, of the catalog or of local models."""
    repos = {snapshot.repo for snapshot in hub.snapshots(env)} | {kept.repo for kept in storage.stored_models(env)}
    return [similar for similar in close_matches(name, _known(catalog(env), repos)) if similar != name]


def _known(entries: Iterable[CatalogEntry], repos: Iterable[str]) -> list[str]:
    return [entry.alias for entry in entries] + [entry.repo for entry in entries if entry.repo] + sorted(repos)


def _siblings(path: Path) -> list[str]:
    """At most three models with similar names in the folder of a missing path."""
    names = hub.names_in(path.parent) if exists(path.parent) else []
    models = [name for name in names if is_gguf(Path(name)) or exists(path.parent / name / "config.json")]
    return [show(name) for name in close_matches(path.name, models)]
