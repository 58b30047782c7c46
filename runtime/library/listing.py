"""Listing of the models on this machine under the names that resolve to them, and aliases for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ... import EffllmError, ModelNotFound, UsageError, typed
from .. import hub
from ..catalog import ModelRef, find_entry, resolve
from ..config_reader import show
from ..gguf import file_names
from . import external_models, storage, unfinished_downloads
from .aliases import CatalogEntry, catalog, entry_folder
from .listing_cache import ListingCache, ModelFacts
from .local_model import LocalModel, facts_of, local_model, model_from_facts, read_folder
from .model_name import Reference, parse_reference


def local_models(env: Mapping[str, str]) -> list[LocalModel]:
    """Models that can run now: the packaged one, those that effllm built, the hub cache, and those of other programs; none that is damaged,
    incomplete or of an unsupported family."""
    entries, models, cache = catalog(env), [], ListingCache(env)
    local = partial(local_model, cache=cache)
    for stored in storage.stored_models(env):
        models.append(local(_stored_name(stored, entries, env), stored.folder, "effllm", None, stored.revision))
    for folder in storage.nameless_folders(env):
        models.append(local(str(folder), folder, "effllm", None))
    for folder in storage.registered(env):
        models.append(local(str(folder), folder, "folder", None))
    for snapshot in hub.snapshots(env):
        entry = find_entry(entries, snapshot.repo)
        licence = entry.licence if entry else hub.stated_licence(snapshot.folder)
        for name, path in _snapshot_models(snapshot, entries):
            if (model := local(name, path, "hub cache", licence, snapshot.commit)) is not None:
                models.append(model if model.licence else replace(model, licence=storage.stated_licence(env, snapshot)))
    others = {os.path.abspath(model.folder): model for model in models if model is not None}
    named = []
    for entry in entries:
        if entry.path and (known := others.pop(os.path.abspath(entry_folder(entry)), None)) is not None:
            # List a model once, under its shortest name.
            named.append(replace(known, name=entry.alias, licence=known.licence or entry.licence))
        elif entry.path:
            source = "folder" if entry.own and not entry.packaged else "effllm"
            named.append(local(entry.alias, entry_folder(entry), source, entry.licence))
    external_models_by_name = {model.name: model for model in _external_local_models(env, cache)}
    cache.keep()
    for entry in entries:
        if entry.library and (known := external_models_by_name.get(_library_name(entry, env))) is not None:
            named.append(replace(known, name=entry.alias))
    return [model for model in (*named, *others.values(), *external_models_by_name.values()) if model is not None]


def _external_local_models(env: Mapping[str, str], cache: ListingCache) -> Iterator[LocalModel]:
    """Models of other programs that can run here. Several names of one file are several models; the file is read once, or not at all if it
    is in the cache."""
    facts_by_file = dict[tuple[Path, Path | None], ModelFacts | None]()
    for external in external_models.all_models(env):
        if (file := (external.file, external.projector)) not in facts_by_file:
            facts_by_file[file] = cache.of(*file, facts_of)
        if (facts := facts_by_file[file]) is not None:
            has_template = facts.has_template or _has_known_template(external)
            yield model_from_facts(facts, external.name, external.file, external.title, external.licence, None, has_template,
                                   external.projector)


def _has_known_template(external: external_models.ExternalModel) -> bool:
    """Whether the program stores a chat template of a known format for it."""
    from ..templates.ollama_templates import detect_format

    return external.stored is not None and any(detect_format(layer.text()) for layer in external.stored.of("template"))


def _library_name(entry: CatalogEntry, env: Mapping[str, str]) -> str:
    """The name that `_external_local_models` has for the model of an alias."""
    reference = parse_reference(entry.library, env)
    try:
        return external_models.find(reference, env).name if reference.program else ""
    except EffllmError:
        return ""


@dataclass(frozen=True)
class Unreadable:
    """A model that effllm built and cannot read."""

    name: str  # as typed to remove it
    folder: Path
    why: str  # damaged, or built by a newer effllm


def unreadable_models(env: Mapping[str, str], readable: Iterable[LocalModel]) -> list[Unreadable]:
    """What effllm made that is not among those that can run `here`: else nobody would find what still takes its room on the disk."""
    entries, readable_folders = catalog(env), {os.path.abspath(model.folder) for model in readable}
    names_by_folder = {kept.folder: _stored_name(kept, entries, env) for kept in storage.stored_models(env)}
    for folder in (*storage.nameless_folders(env), *storage.registered(env)):
        names_by_folder.setdefault(folder, str(folder))
    unreadable = []
    for folder, name in names_by_folder.items():
        if os.path.abspath(folder) not in readable_folders and (folder / storage.MARKER).is_file():
            try:
                read_folder(name, folder, "", None)
            except EffllmError as error:
                unreadable.append(Unreadable(name, folder, error.message))
    return unreadable


@dataclass(frozen=True)
class Incomplete:
    """A model whose download or build was interrupted."""

    name: str  # as typed to continue or to remove it
    held: int  # bytes that are here
    size: int  # bytes of the whole
    is_pulled: bool = True  # `pull` continues it; otherwise the command that was building it


def incomplete_models(env: Mapping[str, str]) -> list[Incomplete]:
    """What was stopped: downloads in the order of their repositories, then what was being quantized as it came, then what was being made
    of what is here."""
    from .unfinished_builds import stopped_conversions, stopped_pulls

    entries, incomplete = catalog(env), []
    for stopped in unfinished_downloads.all_stopped(env):
        name = _revision_name(stopped.repo, stopped.revision, entries)
        incomplete.append(Incomplete(name if stopped.file is None else f"{name}:{stopped.file}", stopped.held, stopped.size))
    for stopped in stopped_pulls(env):
        name = _revision_name(stopped.repo, stopped.revision, entries)
        incomplete.append(Incomplete(f"{name}:{stopped.spec}", stopped.held, stopped.size))
    return incomplete + [Incomplete(_conversion_name(stopped.folder, stopped.of, entries, env), stopped.held, stopped.size,
                               False) for stopped in stopped_conversions(env)]


def model_names(env: Mapping[str, str]) -> list[str]:
    """What can be typed for a model that is here, without a look into any: for the shell, which waits."""
    entries = catalog(env)
    names = [entry.alias for entry in entries if entry.path or entry.library]
    names += [_stored_name(kept, entries, env) for kept in storage.stored_models(env)]
    names += [str(folder) for folder in (*storage.nameless_folders(env), *storage.registered(env))]
    names += [name for snapshot in hub.snapshots(env) for name, _ in _snapshot_models(snapshot, entries)]
    return names + external_models.all_names(env)


def _snapshot_models(snapshot: hub.Snapshot, entries: Iterable[CatalogEntry]) -> Iterator[tuple[str, Path]]:
    """What a snapshot holds, by name: its folder, unless GGUF files are all there is, and each of those, of a split one the first part."""
    snapshot_name, files = _snapshot_name(snapshot, entries), file_names.model_files(hub.gguf_files(snapshot.folder))
    if not files or (snapshot.folder / "config.json").exists():
        yield snapshot_name, snapshot.folder
    yield from ((f"{snapshot_name}:{file}", snapshot.folder / file) for file in files)


def _snapshot_name(snapshot: hub.Snapshot, entries: Iterable[CatalogEntry]) -> str:
    return _revision_name(snapshot.repo, "main" if snapshot.revision == "main" else snapshot.commit, entries)


def _revision_name(repo: str, revision: str, entries: Iterable[CatalogEntry]) -> str:
    """What to type for a repository at a branch, a tag or a commit."""
    if revision != "main":
        return f"{repo}@{revision[:12] if hub.COMMIT.fullmatch(revision) else revision}"
    entry = find_entry(entries, repo)
    return entry.alias if entry and entry.revision == "main" else repo


def _stored_name(stored: storage.StoredModel, entries: Iterable[CatalogEntry], env: Mapping[str, str]) -> str:
    """The shortest name that leads to it; its folder where none does, such as for what was made of a model that has changed since."""
    entry = find_entry(entries, stored.repo)
    for name in (entry.alias if entry else stored.repo, f"{stored.repo}@{stored.revision[:12]}"):
        if _resolves_to(f"{name}:{stored.spec}", stored, env):
            return f"{name}:{stored.spec}"
    # Of a file or a folder the name that a person typed, which may have stated the format already.
    source = str(storage.source_name(stored.folder)).removesuffix(f":{stored.spec}")
    return f"{source}:{stored.spec}" if _resolves_to(f"{source}:{stored.spec}", stored, env) else str(stored.folder)


def _conversion_name(folder: Path, of: str, entries: Iterable[CatalogEntry], env: Mapping[str, str]) -> str:
    """The shortest name under which `folder` would be kept; the folder itself where somebody else's choice put it there."""
    repo, revision, spec = folder.parents[1].name.replace("--", "/"), folder.parent.name, folder.name
    entry = find_entry(entries, repo)
    names = (entry.alias if entry else repo, f"{repo}@{revision[:12]}", of.removesuffix(f":{spec}"))
    return next((f"{name}:{spec}" for name in names if _would_store_in(f"{name}:{spec}", folder, env)), str(folder))


def _would_store_in(name: str, folder: Path, env: Mapping[str, str]) -> bool:
    """Whether a name with a format means a model whose build would be stored in `folder`."""
    try:
        ref = resolve(name, env)
    except EffllmError:
        return False
    if ref.variant is None:
        return False
    return storage.stored_folder(storage.models_folder(env), ref.folder, ref.variant, ref.repo or ref.alias, ref.revision) == folder


def _resolves_to(name: str, stored: storage.StoredModel, env: Mapping[str, str]) -> bool:
    try:
        return resolve(name, env).folder == stored.folder
    except EffllmError:
        return False


def entry_for(alias: str, text: str, env: Mapping[str, str]) -> CatalogEntry:
    """An alias of the person's for MODEL. Raises ModelNotFound for one that is neither here nor in the catalog: its facts are not known."""
    reference = parse_reference(text, env)
    known = find_entry(catalog(env), reference.name) if reference.path is None else None
    if known is not None and known.repo is not None and reference.variant is reference.file is None:
        return replace(known, alias=alias, revision=reference.revision or known.revision, own=True)
    ref = resolve(text, env)
    if ref.variant is not None:
        from ..stores.container import refuse_quantized

        refuse_quantized(ref.folder, reference.base, f":{ref.variant}")
        raise UsageError(f"{show(text)} would be quantized on load, and an alias must refer to a stored model",
                         f"effllm pull {text}, or: effllm quantize {reference.base} -o DIR --spec {ref.variant}, then give DIR")
    if reference.program is not None or known is not None and known.library:
        library = known.library if known is not None else external_models.find(reference, env).name
        return replace(_entry_from_headers(alias, text, ref, {"repo": None, "path": None}, reference), library=library)
    if known is not None and known.path is not None and (known.packaged or not known.own) and ref.folder == entry_folder(known):
        return replace(known, alias=alias, path=str(entry_folder(known)), own=True, packaged=known.packaged or known.alias)
    # A file of a repository is a path too: its link, because a blob's own name ends in no .gguf.
    cached = ref.repo is not None and reference.file is None and hub.cache_folder(env) in ref.folder.parents
    place = {"repo": ref.repo, "path": None} if cached else {"repo": None, "path": os.path.abspath(ref.folder)}
    return _entry_from_headers(alias, text, ref, place, reference)


def _entry_from_headers(alias: str, text: str, ref: ModelRef, place: Mapping[str, str | None], reference: Reference) -> CatalogEntry:
    """With what headers tell. Raises ModelNotFound for what cannot run here."""
    model = local_model(text, ref.folder, "", ref.licence, ref.revision)
    if model is None:
        raise ModelNotFound(f"{show(text)} is not a model that can run here", f"effllm show {typed(text)} says why")
    params = f"{model.params / 1e9:.2f}B" if model.params >= 1e9 else f"{model.params / 1e6:.2f}M"
    return CatalogEntry(alias, **place, revision=reference.revision or "main", licence=model.licence, gated=False,
                        params=params, size_bytes=model.size_bytes, default_bits=16, exclude="", note="", own=True)
