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
from .library.model_name import ELSEWHERE, LOOK, Reference, exists, parse_reference
from .library.name_suggestions import OLLAMAS, close_matches, family_aliases, likely_typos, ollama_aliases

__all__ = ["Absent", "CatalogEntry", "ModelRef", "catalog", "entry_folder", "find_entry", "parse_catalog", "pull_hint", "resolve"]


class Absent(ModelNotFound):
    """A model whose files are not here, which `pull` would fetch. `entry`: of the catalog, if any."""

    reference: Reference = Reference("")
    repo: str = ""
    entry: CatalogEntry | None = None


@dataclass(frozen=True)
class ModelRef:
    """A model whose files are here. Catalog facts are None for a folder without alias.

    `variant` is the format named after a colon (`fable:4bit`), to be made of the model in the folder. `notice`: a caveat about the choice.
    `seen_from`: the source of a quantized vision model, which has the vision tower. `mmproj`: the projector file that the user or another
    program named. `go_template`: the file of the template that the other program (Ollama) uses.
    """

    text: str
    folder: Path
    alias: str | None = None
    repo: str | None = None
    revision: str | None = None
    licence: str | None = None
    gated: bool = False
    size_bytes: int | None = None
    default_bits: int | None = None
    variant: str | None = None
    notice: str = ""
    seen_from: Path | None = None
    mmproj: str | None = None
    go_template: Path | None = None

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


def _from_program(reference: Reference, own: Reference, env: Mapping[str, str], alias: str | None = None) -> ModelRef:
    """The model file of another program that `own` names."""
    from .library.external_models import find

    kept = find(own, env)
    stored = kept.stored
    return _from_gguf(reference, kept.file, alias=alias, licence=kept.licence,
                      mmproj=None if kept.projector is None or stored is None else str(kept.projector),
                      go_template=None if stored is None else stored.first("template"))


def _from_library_entry(reference: Reference, entry: CatalogEntry, env: Mapping[str, str]) -> ModelRef:
    """The other program's model behind an alias."""
    own = parse_reference(entry.library, env)
    if own.program is None:
        raise ModelNotFound(f"{entry.alias} is an alias of {show(entry.library)}, which is not a model of another program",
                            f"give the alias another model: effllm alias {entry.alias} MODEL")
    try:
        return _from_program(reference, own, env, entry.alias)
    except ModelNotFound as error:
        raise ModelNotFound(f"{entry.alias}: {error.message}", error.hint or LOOK) from error


def find_entry(entries: Iterable[CatalogEntry], name: str) -> CatalogEntry | None:
    """The entry with an alias (case-insensitive) or a repository."""
    entries = list(entries)
    by_alias = next((entry for entry in entries if entry.alias == name.lower()), None)
    return by_alias or next((entry for entry in entries if entry.repo == name), None)


def _from_path(reference: Reference, path: Path) -> ModelRef:
    text, folder = reference.text, path
    if reference.file is not None:
        path = path / (_meant(reference, path, show_name(str(path))) or reference.file)
    try:
        if path.is_dir():
            # "/" is a path too
            files = [] if (path / "config.json").is_file() else file_names.model_files(hub.gguf_files(path, deep=False))
            if (file := file_names.default_model(files)) is not None and reference.file is None:
                return _from_gguf(reference, path / file)
            if files:
                raise ModelNotFound(f"{show_name(text)} holds GGUF files and no config.json", f"name one: {_listed(reference, files)}")
            return _of_folder(ModelRef(text, path, variant=reference.variant))
        present = path.exists()
    except OSError as error:
        raise ModelNotFound(f"{show_name(text)} cannot be read: {error.strerror}",
                            f"check its permissions: {ls(path)}") from error
    if not present:
        if plain := _without_end(reference, folder):
            raise ModelNotFound(f"{show_name(text)}: local models have neither revisions nor tags",
                                f"leave that out: {typed(plain)}")
        others = file_names.model_files(hub.gguf_files(folder)) if reference.file else []
        if reference.file and folder.is_dir() and not is_gguf(path):
            raise ModelNotFound(f"{show_name(text)}: no name of a GGUF file in {folder} states {reference.file}",
                                f"name one: {_listed(reference, others)}" if others else f"leave it out: {reference.base}")
        beside = [] if others else _siblings(path)
        hint = f"name one: {_listed(reference, others)}" if others else f"did you mean {' or '.join(beside)}?" if beside else LOOK
        raise ModelNotFound(f"there is no {'file' if reference.file or is_gguf(path) else 'folder'} {show_name(text)}", hint)
    if is_gguf(path):
        return _from_gguf(reference, path)
    inside = (path.parent / "config.json").is_file()  # such as weights, named in place of their folder
    raise UsageError(f"{show_name(text)} is a file; a model is a folder or a GGUF file", f"try {path.parent}" if inside else LOOK)


def _without_end(reference: Reference, path: Path) -> str | None:
    """The existing path without a suffix that only repositories have, None if there is none."""
    if reference.file is not None:
        return str(path) if path.is_file() else None
    before = str(path).rpartition("@")[0]
    return before if before and exists(Path(before)) else None


def _from_gguf(reference: Reference, path: Path, **facts: object) -> ModelRef:
    """The only place where a name becomes an existing GGUF file, from disk or from the cache."""
    return ModelRef(reference.text, path, variant=reference.variant, **facts)


def _meant(reference: Reference, folder: Path, where: str) -> str | None:
    """The file below `folder` that a reference names, or by its tag; None for none. Raises ModelNotFound for several."""
    if reference.file.lower().endswith(file_names.SUFFIX):
        return reference.file if exists(folder / reference.file) else None
    found = file_names.matching(reference.file, hub.gguf_files(folder))
    if len(found) > 1:
        raise ModelNotFound(f"{where} has {len(found)} files of {reference.file}",
                            f"name one: {_listed(reference, found)}")
    return found[0] if found else None


def _listed(reference: Reference, files: Sequence[str]) -> str:
    return " or ".join(f"{reference.base}:{file}" for file in files[:4])


def _of_folder(ref: ModelRef) -> ModelRef:
    """Where a quantized folder says it came from. A damaged one, or one of a newer effllm, still resolves, so that it can be removed;
    loading it reports the error."""
    if not (ref.folder / storage.MARKER).is_file():
        return ref
    from ..offload.checkpoint import CheckpointError
    from .stores.container import read_container

    made = None
    with suppress(CheckpointError):
        made = read_container(ref.folder)
    said = {key: value for key in ("repo", "revision", "licence") if isinstance(value := made.source.get(key), str)} if made else {}
    return replace(ref, **{key: value for key, value in said.items() if getattr(ref, key) is None})


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
    """A repository's files, or what effllm made of them; None if neither is here."""
    found = hub.find(env, repo, revision)
    if reference.file is not None:
        whole = _from_cached_file(reference, found, facts, env) if found else None
        if whole is None:
            _refuse_begun(reference, repo, revision, env)
        return whole
    kept = storage.find_stored(env, repo, found.commit if found else revision, reference.variant)
    missing = hub.missing_files(found.folder) if found else ()
    if found is not None and not missing and not (reference.variant and kept):
        own = {**facts, "licence": facts.get("licence") or storage.stated_licence(env, found)}
        return ModelRef(reference.text, found.folder, repo=repo, revision=found.commit, variant=reference.variant, **own)
    if kept:
        usual = f"{facts.get('default_bits')}bit"
        best = next((each for each in kept if each.spec == usual), kept[-1])
        notice = "" if reference.variant else f"{reference.text}: using the {best.spec} weights; the full ones are not on this machine"
        return _of_folder(ModelRef(reference.text, best.folder, repo=repo, revision=best.revision, notice=notice, **facts))
    if "config.json" in missing and (files := file_names.model_files(hub.gguf_files(found.folder))):
        if (file := file_names.default_model(files)) is not None and reference.variant is None:
            return _from_cached_file(replace(reference, file=file), found, facts, env)
        raise _absent(reference, repo, f"only GGUF files of {repo} are here", f"name one: {_listed(reference, files)}")
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise _absent(reference, repo, f"{repo} is only partly downloaded: {show(missing[0])} is missing{rest}",
                      f"to complete it: effllm pull {reference.to_pull}")
    _refuse_begun(reference, repo, revision, env)
    return None


def _refuse_begun(reference: Reference, repo: str, revision: str, env: Mapping[str, str]) -> None:
    """Raises Absent for an interrupted download, with its progress."""
    begun = []
    if reference.variant and not reference.file:
        from .library import unfinished_builds  # not for the shell, which waits for names

        begun = unfinished_builds.find_stopped(env, repo, revision, reference.variant)
    for each in begun[:1]:
        raise _absent(reference, repo, f"{repo}:{each.spec} is only partly built: {format_size(each.held)} of {format_size(each.size)} "
                      "are here",
                      f"to complete it: effllm pull {reference.to_pull}")
    for each in unfinished_downloads.find_stopped(env, repo, revision, reference.file)[:1]:
        what = f"{reference.file} of {repo}" if reference.file else repo
        raise _absent(reference, repo, f"{what} is only partly downloaded: {format_size(each.held)} of {format_size(each.size)} are here",
                      f"to complete it: effllm pull {reference.to_pull}")


def _from_cached_file(reference: Reference, found: hub.Snapshot, facts: Mapping[str, object], env: Mapping[str, str]) -> ModelRef | None:
    """A complete GGUF file of a repository; None if none of it is here."""
    name = _meant(reference, found.folder, found.repo)
    if name is None:
        return None
    if lost := [part for part in file_names.all_parts(name) if not (found.folder / part).exists()]:
        raise _absent(reference, found.repo, f"{name} of {found.repo} is only partly downloaded: {lost[0]} is missing"
                      + (f" and {len(lost) - 1} more" if len(lost) > 1 else ""), f"to complete it: effllm pull {reference.to_pull}")
    own = {key: facts[key] for key in ("alias", "licence", "gated") if key in facts} or {"licence": _licence_of_file(found, name, env)}
    return _from_gguf(reference, found.folder / name, repo=found.repo, revision=found.commit, **own)


def _licence_of_file(found: hub.Snapshot, name: str, env: Mapping[str, str]) -> str | None:
    """The licence in the repository's card, else in the file, else from the hub."""
    if hub.stated_licence(found.folder) is None and storage.licence_notes(env, found.repo, found.commit):
        from .source import licence_of

        with suppress(EffllmError):
            if (said := licence_of(found.folder / name)) is not None:
                return said
    return storage.stated_licence(env, found)


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
    """For a GGUF precision (`qwen3-8b:Q4_K_M`), which safetensors repositories do not have: the closest alternative."""
    if not reference.file or reference.file.lower().endswith(file_names.SUFFIX):
        return pull_hint(entry, reference.to_pull)
    bits = next((each for each in reference.file if each in "234568"), "4")
    return f"it holds no GGUF files: {pull_hint(entry, f'{reference.base} --bits {bits}')}; of others: org/repo:{reference.file}"


def pull_hint(entry: CatalogEntry, text: str = "") -> str:
    """The command that downloads an entry's files, and what must come before it."""
    before = "accept the licence on the model's page, hf auth login, then: " if entry.gated else ""
    after = f" (without a gate: {entry.alternative})" if entry.gated and entry.alternative else ""
    return f"{before}effllm pull {text or entry.alias}{after}"


def _not_found(reference: Reference, entries: Iterable[CatalogEntry], env: Mapping[str, str]) -> ModelNotFound:
    name, repos = reference.name, {snapshot.repo for snapshot in hub.snapshots(env)} | {kept.repo for kept in storage.stored_models(env)}
    pull = f"effllm pull {reference.to_pull}"
    if reference.revision and name in repos:
        return _absent(reference, name, f"{name} is here, but not at revision {reference.revision}", pull)
    if name in repos and (reference.file or reference.variant):
        return _absent(reference, name, f"{name} is here, but {reference.file or reference.variant} of it is not", pull)
    whole = [each.commit[:12] for each in hub.snapshots(env) if each.repo == name and not hub.missing_files(each.folder)]
    if whole:
        return _absent(reference, name, f"{name} is here at another revision only: {', '.join(whole)}",
                       f"name it, {typed(f'{name}@{whole[0]}')}, or: {pull}")
    if name in repos:
        return _absent(reference, name, f"{name} is only partly downloaded", f"to complete it: {pull}")
    is_repo = "/" in name and hub.is_repo(name) and not OLLAMAS.match(name)
    if is_repo:
        meant = likely_typos(name, repos | {entry.repo for entry in entries if entry.repo})
    else:  # what ends in a precision may state a size before it: qwen3:8b-q4_K_M
        meant = ollama_aliases(name, reference.file, entries) if re.fullmatch(file_names.TAG, reference.file or "", re.IGNORECASE) else []
        meant = meant or _meant_by(name, entries, repos)
    if (there := _in_ollama(name, env)) is not None:
        meant = [there]
    if meant:
        return ModelNotFound(f"there is no model {show(name)}", f"did you mean {' or '.join(meant)}?")
    if is_repo:
        return _absent(reference, name, f"{name} is not on this machine", pull)
    return ModelNotFound(f"there is no model {show(name)}", ELSEWHERE)


def _in_ollama(name: str, env: Mapping[str, str]) -> str | None:
    """What to type for an unknown name that is in Ollama's library."""
    from .library.external_models import local_name

    return local_name(name, env)


def _meant_by(name: str, entries: Sequence[CatalogEntry], repos: Iterable[str]) -> list[str]:
    """Names for one word, or for what stands behind Ollama's library/."""
    word = OLLAMAS.sub("", name)
    return family_aliases(word, entries) or close_matches(word, _known(entries, repos)) or ([] if "/" in name else _siblings(Path(name)))


def near_names(name: str, env: Mapping[str, str]) -> list[str]:
    """At most three similar names, of the catalog or of local models."""
    repos = {snapshot.repo for snapshot in hub.snapshots(env)} | {kept.repo for kept in storage.stored_models(env)}
    return [each for each in close_matches(name, _known(catalog(env), repos)) if each != name]


def _known(entries: Iterable[CatalogEntry], repos: Iterable[str]) -> list[str]:
    return [entry.alias for entry in entries] + [entry.repo for entry in entries if entry.repo] + sorted(repos)


def _siblings(path: Path) -> list[str]:
    """At most three models beside a missing path with similar names."""
    around = hub.names_in(path.parent) if exists(path.parent) else []
    beside = [name for name in around if is_gguf(Path(name)) or exists(path.parent / name / "config.json")]
    return [show(name) for name in close_matches(path.name, beside)]
