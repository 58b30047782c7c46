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
    """Models that can run now: the packaged one, what effllm made, the hub cache, what other programs keep; nothing damaged, partial or of
    another family."""
    entries, found, before = catalog(env), [], ListingCache(env)
    local = partial(local_model, before=before)
    for kept in storage.stored_models(env):
        found.append(local(_kept_name(kept, entries, env), kept.folder, "effllm", None, kept.revision))
    for folder in storage.nameless_folders(env):
        found.append(local(str(folder), folder, "effllm", None))
    for folder in storage.registered(env):
        found.append(local(str(folder), folder, "folder", None))
    for snapshot in hub.snapshots(env):
        entry = find_entry(entries, snapshot.repo)
        licence = entry.licence if entry else hub.stated_licence(snapshot.folder)
        for name, path in _cached(snapshot, entries):
            if (model := local(name, path, "hub cache", licence, snapshot.commit)) is not None:
                found.append(model if model.licence else replace(model, licence=storage.stated_licence(env, snapshot)))
    others = {os.path.abspath(model.folder): model for model in found if model is not None}
    named = []
    for entry in entries:
        if entry.path and (known := others.pop(os.path.abspath(entry_folder(entry)), None)) is not None:
            # The same thing once, under the shorter name.
            named.append(replace(known, name=entry.alias, licence=known.licence or entry.licence))
        elif entry.path:
            source = "folder" if entry.own and not entry.packaged else "effllm"
            named.append(local(entry.alias, entry_folder(entry), source, entry.licence))
    kept = {model.name: model for model in _of_programs(env, before)}
    before.keep()
    for entry in entries:
        if entry.library and (known := kept.get(_library_name(entry, env))) is not None:
            named.append(replace(known, name=entry.alias))
    return [model for model in (*named, *others.values(), *kept.values()) if model is not None]


def _of_programs(env: Mapping[str, str], before: ListingCache) -> Iterator[LocalModel]:
    """What other programs keep and can run here. Several names of one file are several models, and the file is read once, unless it was
    listed before."""
    read = dict[tuple[Path, Path | None], ModelFacts | None]()
    for kept in external_models.all_models(env):
        if (file := (kept.file, kept.projector)) not in read:
            read[file] = before.of(*file, facts_of)
        if (facts := read[file]) is not None:
            yield model_from_facts(facts, kept.name, kept.file, kept.title, kept.licence, None, facts.has_template or _is_asked(kept),
                                   kept.projector)


def _is_asked(kept: external_models.ExternalModel) -> bool:
    """Whether its program has a template for it of a format that is known here."""
    from ..templates.ollama_templates import detect_format

    return kept.stored is not None and any(detect_format(layer.text()) for layer in kept.stored.of("template"))


def _library_name(entry: CatalogEntry, env: Mapping[str, str]) -> str:
    """The name that `_of_programs` has for what an alias stands for."""
    own = parse_reference(entry.library, env)
    try:
        return external_models.find(own, env).name if own.program else ""
    except EffllmError:
        return ""


@dataclass(frozen=True)
class Unreadable:
    """A model that effllm made and cannot read, and `why`: damaged, or of a newer effllm. `name` is what to type to remove it."""

    name: str
    folder: Path
    why: str


def unreadable_models(env: Mapping[str, str], here: Iterable[LocalModel]) -> list[Unreadable]:
    """What effllm made that is not among those that can run `here`: else nobody would find what still takes its room on the disk."""
    entries, runs = catalog(env), {os.path.abspath(model.folder) for model in here}
    made = {kept.folder: _kept_name(kept, entries, env) for kept in storage.stored_models(env)}
    for folder in (*storage.nameless_folders(env), *storage.registered(env)):
        made.setdefault(folder, str(folder))
    found = []
    for folder, name in made.items():
        if os.path.abspath(folder) not in runs and (folder / storage.MARKER).is_file():
            try:
                read_folder(name, folder, "", None)
            except EffllmError as error:
                found.append(Unreadable(name, folder, error.message))
    return found


@dataclass(frozen=True)
class Incomplete:
    """A model of which a download was stopped, or which was being made of what is here. `name` is what to type to go on with it or to
    remove it. Bytes: `held` of `size`. `is_pulled`: `pull` goes on with it, else the command that was making it."""

    name: str
    held: int
    size: int
    is_pulled: bool = True


def incomplete_models(env: Mapping[str, str]) -> list[Incomplete]:
    """What was stopped: downloads in the order of their repositories, then what was being quantized as it came, then what was being made
    of what is here."""
    from .unfinished_builds import stopped_conversions, stopped_pulls

    entries, found = catalog(env), []
    for each in unfinished_downloads.all_stopped(env):
        name = _revision_name(each.repo, each.revision, entries)
        found.append(Incomplete(name if each.file is None else f"{name}:{each.file}", each.held, each.size))
    for each in stopped_pulls(env):
        found.append(Incomplete(f"{_revision_name(each.repo, each.revision, entries)}:{each.spec}", each.held, each.size))
    return found + [Incomplete(_name_to_make(each.folder, each.of, entries, env), each.held, each.size,
                               False) for each in stopped_conversions(env)]


def model_names(env: Mapping[str, str]) -> list[str]:
    """What can be typed for a model that is here, without a look into any: for the shell, which waits."""
    entries = catalog(env)
    known = [entry.alias for entry in entries if entry.path or entry.library]
    known += [_kept_name(kept, entries, env) for kept in storage.stored_models(env)]
    known += [str(folder) for folder in (*storage.nameless_folders(env), *storage.registered(env))]
    known += [name for snapshot in hub.snapshots(env) for name, _ in _cached(snapshot, entries)]
    return known + external_models.all_names(env)


def _cached(snapshot: hub.Snapshot, entries: Iterable[CatalogEntry]) -> Iterator[tuple[str, Path]]:
    """What a snapshot holds, by name: its folder, unless GGUF files are all there is, and each of those, of a split one the first part."""
    own, files = _cached_name(snapshot, entries), file_names.model_files(hub.gguf_files(snapshot.folder))
    if not files or (snapshot.folder / "config.json").exists():
        yield own, snapshot.folder
    yield from ((f"{own}:{file}", snapshot.folder / file) for file in files)


def _cached_name(snapshot: hub.Snapshot, entries: Iterable[CatalogEntry]) -> str:
    return _revision_name(snapshot.repo, "main" if snapshot.revision == "main" else snapshot.commit, entries)


def _revision_name(repo: str, revision: str, entries: Iterable[CatalogEntry]) -> str:
    """What to type for a repository at a branch, a tag or a commit."""
    if revision != "main":
        return f"{repo}@{revision[:12] if hub.COMMIT.fullmatch(revision) else revision}"
    entry = find_entry(entries, repo)
    return entry.alias if entry and entry.revision == "main" else repo


def _kept_name(kept: storage.StoredModel, entries: Iterable[CatalogEntry], env: Mapping[str, str]) -> str:
    """The shortest name that leads to it; its folder where none does, such as for what was made of a model that has changed since."""
    entry = find_entry(entries, kept.repo)
    for name in (entry.alias if entry else kept.repo, f"{kept.repo}@{kept.revision[:12]}"):
        if _leads_to(f"{name}:{kept.spec}", kept, env):
            return f"{name}:{kept.spec}"
    # Of a file or a folder the name that a person typed, which may have stated the format already.
    typed = str(storage.source_name(kept.folder)).removesuffix(f":{kept.spec}")
    return f"{typed}:{kept.spec}" if _leads_to(f"{typed}:{kept.spec}", kept, env) else str(kept.folder)


def _name_to_make(folder: Path, of: str, entries: Iterable[CatalogEntry], env: Mapping[str, str]) -> str:
    """The shortest name under which `folder` would be kept; the folder itself where somebody else's choice put it there."""
    repo, revision, spec = folder.parents[1].name.replace("--", "/"), folder.parent.name, folder.name
    entry = find_entry(entries, repo)
    names = (entry.alias if entry else repo, f"{repo}@{revision[:12]}", of.removesuffix(f":{spec}"))
    return next((f"{name}:{spec}" for name in names if _would_make(f"{name}:{spec}", folder, env)), str(folder))


def _would_make(name: str, folder: Path, env: Mapping[str, str]) -> bool:
    """Whether a name in a format is that of a model here which would be kept in `folder`."""
    try:
        ref = resolve(name, env)
    except EffllmError:
        return False
    kept = storage.models_folder(env)
    return ref.variant is not None and storage.stored_folder(kept, ref.folder, ref.variant, ref.repo or ref.alias, ref.revision) == folder


def _leads_to(name: str, kept: storage.StoredModel, env: Mapping[str, str]) -> bool:
    try:
        return resolve(name, env).folder == kept.folder
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
        return replace(_entry_of(alias, text, ref, {"repo": None, "path": None}, reference), library=library)
    if known is not None and known.path is not None and (known.packaged or not known.own) and ref.folder == entry_folder(known):
        return replace(known, alias=alias, path=str(entry_folder(known)), own=True, packaged=known.packaged or known.alias)
    # A file of a repository is a path too: its link, because a blob's own name ends in no .gguf.
    cached = ref.repo is not None and reference.file is None and hub.cache_folder(env) in ref.folder.parents
    place = {"repo": ref.repo, "path": None} if cached else {"repo": None, "path": os.path.abspath(ref.folder)}
    return _entry_of(alias, text, ref, place, reference)


def _entry_of(alias: str, text: str, ref: ModelRef, place: Mapping[str, str | None], reference: Reference) -> CatalogEntry:
    """With what headers tell. Raises ModelNotFound for what cannot run here."""
    model = local_model(text, ref.folder, "", ref.licence, ref.revision)
    if model is None:
        raise ModelNotFound(f"{show(text)} is not a model that can run here", f"effllm show {typed(text)} says why")
    params = f"{model.params / 1e9:.2f}B" if model.params >= 1e9 else f"{model.params / 1e6:.2f}M"
    return CatalogEntry(alias, **place, revision=reference.revision or "main", licence=model.licence, gated=False,
                        params=params, size_bytes=model.size_bytes, default_bits=16, exclude="", note="", own=True)
