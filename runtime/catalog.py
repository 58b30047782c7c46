"""From what a person types to a folder of model files: alias, folder, a model that effllm keeps, or a repository in the hub cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from .. import EffllmError, ModelNotFound, UsageError
from ..offload.header import is_gguf
from . import hub, storage
from .aliases import CatalogEntry, catalog, entry_folder, parse_catalog
from .config_reader import show
from .reference import LOOK, Reference, exists, parse_reference

if TYPE_CHECKING:
    from ..offload.header import TensorInfo
    from .container import StoredTensor

__all__ = ["Absent", "CatalogEntry", "LocalModel", "ModelRef", "catalog", "entry_folder", "entry_for", "find_entry", "local_models",
           "model_names", "parse_catalog", "pull_hint", "resolve"]


class Absent(ModelNotFound):
    """The model is known or could be, and its files are not here: `pull` would get them. `entry`: of the catalog, if it has one."""

    reference: Reference = Reference("")
    repo: str = ""
    entry: CatalogEntry | None = None


@dataclass(frozen=True)
class ModelRef:
    """A model whose files are at hand. Catalog facts are None for a folder that no alias stands for.

    `variant` is the format that was named after a colon (`fable:4bit`): the folder holds the model that it is to be made of. `notice`
    says what a person may not expect of the choice.
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


@dataclass(frozen=True)
class LocalModel:
    """A line of `effllm list`. `name` is what to type; `source` is "effllm", "folder" or "hub cache"; `bits` are stored per weight."""

    name: str
    family: str
    folder: Path
    size_bytes: int
    params: int
    source: str
    licence: str | None
    bits: float = 0.0
    context: int = 0
    revision: str | None = None
    has_template: bool = False


def resolve(text: str, env: Mapping[str, str]) -> ModelRef:
    """MODEL as typed -> a folder that is there. Raises Absent where `pull` would help, ModelNotFound with the next step, UsageError."""
    reference = parse_reference(text, env)
    if reference.path is not None:
        return _from_path(reference, reference.path)
    entries = catalog(env)
    entry = find_entry(entries, reference.name)
    if entry is not None and entry.path is not None:
        return _from_path_entry(reference, entry, env)
    if entry is not None:
        facts = {"alias": entry.alias, "licence": entry.licence, "gated": entry.gated, "size_bytes": entry.size_bytes,
                 "default_bits": entry.default_bits}
        found = _from_repo(reference, entry.repo, reference.revision or entry.revision, env, facts)
        if found is None:
            raise _absent_entry(reference, entry, env)
        return found
    if exists(path := Path(reference.base)):
        return _from_path(reference, path)
    found = _from_repo(reference, reference.name, reference.revision or "main", env, {})
    if found is None:
        raise _not_found(reference, entries, env)
    return found


def find_entry(entries: Iterable[CatalogEntry], name: str) -> CatalogEntry | None:
    """The entry of an alias, in any case of its letters, or of a repository."""
    entries = list(entries)
    by_alias = next((entry for entry in entries if entry.alias == name.lower()), None)
    return by_alias or next((entry for entry in entries if entry.repo == name), None)


def _from_path(reference: Reference, path: Path) -> ModelRef:
    text = reference.text
    if reference.file is not None:
        path = path / reference.file
    try:
        if path.is_dir():
            return _of_folder(ModelRef(text, path, variant=reference.variant))
        present = path.exists()
    except OSError as error:
        raise ModelNotFound(f"{show(text)} cannot be read: {error.strerror}", f"check its permissions: ls -ld {path.parent}") from error
    if not present:
        raise ModelNotFound(f"there is no {'file' if reference.file or is_gguf(path) else 'folder'} {show(text)}", LOOK)
    if is_gguf(path):
        return _from_gguf(reference, path)
    raise UsageError(f"{show(text)} is a file, a model is a folder or a GGUF file", f"try {path.parent}")


def _from_gguf(reference: Reference, path: Path) -> ModelRef:
    """The one place where a name becomes a GGUF file that is there, from the disk or from the cache."""
    return ModelRef(reference.text, path, variant=reference.variant)


def _of_folder(ref: ModelRef) -> ModelRef:
    """What a quantized folder says about where it came from."""
    if not (ref.folder / storage.MARKER).is_file():
        return ref
    from .container import read_container

    made = read_container(ref.folder)
    said = {key: value for key in ("repo", "revision", "licence") if isinstance(value := made.source.get(key), str)} if made else {}
    return replace(ref, **{key: value for key, value in said.items() if getattr(ref, key) is None})


def _from_path_entry(reference: Reference, entry: CatalogEntry, env: Mapping[str, str]) -> ModelRef:
    if reference.revision is not None:
        where = "has" if entry.own else "comes with effllm and has"
        raise UsageError(f"{entry.alias} {where} no other revision", f"leave it away: {entry.alias}")
    folder = entry_folder(entry)
    if not exists(folder):
        raise ModelNotFound(f"{entry.alias} stands for {folder}, which is not there", f"effllm alias --rm {entry.alias}")
    if reference.file is not None or folder.is_file():
        return _from_path(reference, folder)
    ref = ModelRef(reference.text, folder, alias=entry.alias, licence=entry.licence, gated=entry.gated, size_bytes=entry.size_bytes,
                   default_bits=entry.default_bits, variant=reference.variant)
    if reference.variant is not None:
        kept = storage.own_folder(env, entry.alias, f"local-{storage.stamp(folder)}", reference.variant)
        if (kept / storage.MARKER).is_file():
            return replace(ref, folder=kept, variant=None)
    return ref


def _from_repo(reference: Reference, repo: str, revision: str, env: Mapping[str, str], facts: Mapping[str, object]) -> ModelRef | None:
    """A repository's files, or what effllm made of them; None where neither is here."""
    found = hub.find(env, repo, revision)
    if reference.file is not None:
        path = found.folder / reference.file if found else None
        return _from_gguf(reference, path) if path is not None and path.exists() else None
    kept = storage.find_kept(env, repo, found.commit if found else revision, reference.variant)
    missing = hub.missing_files(found.folder) if found else ()
    if found is not None and not missing and not (reference.variant and kept):
        own = facts or {"licence": hub.stated_licence(found.folder)}
        return ModelRef(reference.text, found.folder, repo=repo, revision=found.commit, variant=reference.variant, **own)
    if kept:
        usual = f"{facts.get('default_bits')}bit"
        best = next((each for each in kept if each.spec == usual), kept[-1])
        notice = "" if reference.variant else f"{reference.text}: its weights of {best.spec}; the full ones are not on this machine"
        return _of_folder(ModelRef(reference.text, best.folder, repo=repo, revision=best.revision, notice=notice, **facts))
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise _absent(reference, repo, f"{repo} is only partly downloaded: {show(missing[0])} is missing{rest}",
                      f"to complete it: effllm pull {reference.text}")
    return None


def _absent(reference: Reference, repo: str, message: str, hint: str, entry: CatalogEntry | None = None) -> Absent:
    error = Absent(message, hint)
    error.reference, error.repo, error.entry = reference, repo, entry
    return error


def _absent_entry(reference: Reference, entry: CatalogEntry, env: Mapping[str, str]) -> Absent:
    label = entry.repo if entry.repo == reference.name else f"{entry.alias} ({entry.repo})"
    at = f" at {reference.revision}" if reference.revision else ""
    return _absent(reference, entry.repo, f"{label}{at} is not on this machine: {entry.size_bytes / 1e9:.3g} GB to load, licence "
                   f"{entry.licence}" + (", gated" if entry.gated else ""), pull_hint(entry, reference.text), entry)


def pull_hint(entry: CatalogEntry, text: str = "") -> str:
    """The command that fetches an entry's files, and what must come before it."""
    before = "accept the licence on the model's page, hf auth login, then: " if entry.gated else ""
    after = f" (without a gate: {entry.alternative})" if entry.gated and entry.alternative else ""
    return f"{before}effllm pull {text or entry.alias}{after}"


def _not_found(reference: Reference, entries: Iterable[CatalogEntry], env: Mapping[str, str]) -> ModelNotFound:
    name, repos = reference.name, {snapshot.repo for snapshot in hub.snapshots(env)} | {kept.repo for kept in storage.kept_models(env)}
    pull = f"effllm pull {reference.text}"
    if reference.revision and name in repos:
        return _absent(reference, name, f"{name} is here, but not at revision {reference.revision}", pull)
    if name in repos and (reference.file or reference.variant):
        return _absent(reference, name, f"{name} is here, but {reference.file or reference.variant} of it is not", pull)
    if name in repos:
        return _absent(reference, name, f"{name} is only partly downloaded", f"to complete it: {pull}")
    near = _near(name, [entry.alias for entry in entries] + [entry.repo for entry in entries if entry.repo] + sorted(repos))
    if near:
        return ModelNotFound(f"there is no model {show(name)}", f"did you mean {' or '.join(near)}?")
    if "/" in name and hub.is_repo(name):
        return _absent(reference, name, f"{name} is not on this machine", pull)
    return ModelNotFound(f"there is no model {show(name)}", LOOK)


def _near(name: str, known: list[str]) -> list[str]:
    """At most three names that were probably meant."""
    import difflib

    folded = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.75)
    if not close and len(name) >= 3 and "/" not in name:
        close = [each for each in folded if name.lower() in each][:3]
    return [folded[each] for each in close]


def local_models(env: Mapping[str, str]) -> list[LocalModel]:
    """Models that can run now: the packaged one, what effllm made, the hub cache; nothing damaged, partial or of another family."""
    entries = catalog(env)
    found = []
    for entry in entries:
        if entry.path:
            found.append(_local(entry.alias, entry_folder(entry), "folder" if entry.own else "effllm", entry.licence))
    for kept in storage.kept_models(env):
        found.append(_local(_kept_name(kept, entries, env), kept.folder, "effllm", None, kept.revision))
    for folder in storage.registered(env):
        found.append(_local(str(folder), folder, "folder", None))
    for snapshot in hub.snapshots(env):
        entry = find_entry(entries, snapshot.repo)
        found.append(_local(_cached_name(snapshot, entries), snapshot.folder, "hub cache",
                            entry.licence if entry else hub.stated_licence(snapshot.folder), snapshot.commit))
    return [model for model in found if model is not None]


def model_names(env: Mapping[str, str]) -> list[str]:
    """What can be typed for a model that is here, without a look into any: for the shell, which waits."""
    entries = catalog(env)
    names = [entry.alias for entry in entries if entry.path]
    names += [_kept_name(kept, entries, env) for kept in storage.kept_models(env)]
    names += [str(folder) for folder in storage.registered(env)]
    return names + [_cached_name(snapshot, entries) for snapshot in hub.snapshots(env)]


def _cached_name(snapshot: hub.Snapshot, entries: Iterable[CatalogEntry]) -> str:
    if snapshot.revision != "main":
        return f"{snapshot.repo}@{snapshot.commit[:12]}"
    entry = find_entry(entries, snapshot.repo)
    return entry.alias if entry and entry.revision == "main" else snapshot.repo


def _kept_name(kept: storage.Kept, entries: Iterable[CatalogEntry], env: Mapping[str, str]) -> str:
    """The shortest name that leads to it; its folder where none does, such as for what was made of a model that has changed since."""
    entry = find_entry(entries, kept.repo)
    for name in (entry.alias if entry else kept.repo, f"{kept.repo}@{kept.revision[:12]}"):
        try:
            if resolve(f"{name}:{kept.spec}", env).folder == kept.folder:
                return f"{name}:{kept.spec}"
        except EffllmError:
            continue
    return str(kept.folder)


def _local(name: str, folder: Path, source: str, licence: str | None, revision: str | None = None) -> LocalModel | None:
    from ..offload.checkpoint import TensorStore
    from .config import read_config
    from .container import read_container

    try:
        config, made = read_config(folder), read_container(folder)
        with TensorStore.open(folder) as store:
            elements = sum(_weights(*each) for each in (store if made is None else made).tensors.items())
            said = made.source if made else {}
            return LocalModel(name, config.family, folder, store.nbytes, elements, source, licence or _text(said.get("licence")),
                              made.bits_per_weight if made else 8 * store.nbytes / max(1, elements), config.context_length,
                              revision or _text(said.get("revision")), has_template(folder))
    except EffllmError:
        return None


def _weights(name: str, tensor: TensorInfo | StoredTensor) -> int:
    """How many a tensor holds; of MXFP4, two in a byte, and none in what belongs to them."""
    if getattr(tensor, "dtype", "") == "U8" and name.endswith(("_proj_blocks", "_proj_scales")):
        return 2 * prod(tensor.shape) if name.endswith("_blocks") else 0
    return prod(tensor.shape)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def entry_for(alias: str, text: str, env: Mapping[str, str]) -> CatalogEntry:
    """An alias of the person's for MODEL. Raises ModelNotFound for one that is neither here nor in the catalog: its facts are not known."""
    reference = parse_reference(text, env)
    known = find_entry(catalog(env), reference.name) if reference.path is None else None
    if known is not None and known.repo is not None and reference.variant is None:
        return replace(known, alias=alias, revision=reference.revision or known.revision, own=True)
    ref = resolve(text, env)
    if ref.variant is not None:
        raise UsageError(f"{show(text)} would be quantized as it is loaded, and an alias stands for what is there",
                         f"effllm pull {text}, or: effllm quantize {reference.base} -o DIR --spec {ref.variant}, then give DIR")
    model = _local(text, ref.folder, "", ref.licence, ref.revision)
    if model is None:
        raise ModelNotFound(f"{show(text)} is no model that can run here", f"effllm show {text} says why")
    params = f"{model.params / 1e9:.2f}B" if model.params >= 1e9 else f"{model.params / 1e6:.2f}M"
    cached = ref.repo is not None and hub.cache_folder(env) in ref.folder.parents
    place = {"repo": ref.repo, "path": None} if cached else {"repo": None, "path": str(Path(ref.folder).resolve())}
    return CatalogEntry(alias, **place, revision=reference.revision or "main", licence=model.licence or "not stated", gated=False,
                        params=params, size_bytes=model.size_bytes, default_bits=16, exclude="", note="", own=True)


def has_template(folder: Path) -> bool:
    """Whether a chat template lies there, in a file of its own or in the tokenizer's config."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        return False
