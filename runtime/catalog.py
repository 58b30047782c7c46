"""From what a person types to a folder of model files: alias, folder, or a repository already in the local hub cache.

`models.yaml` is data of the package: alias -> where the files come from, under which licence, how large. Its schema is strict, each
key typed and none unknown, and checked here by the reader that also judges a checkpoint's config: a schema library costs a tenth of
a second, which is a tenth of the time to the first word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from math import prod
from pathlib import Path

from .. import EffllmError, ModelNotFound, UsageError
from ..quant.spec import DEFAULTS
from . import hub
from .config import read_config
from .config_reader import ConfigError, Keys, show

KEYS = frozenset({"repo", "path", "revision", "licence", "gated", "params", "size_gb", "default_bits", "exclude", "note"})
ALIAS = re.compile(r"[a-z0-9][a-z0-9.-]*")
PARAMS = re.compile(r"[0-9]+(\.[0-9]+)?[MB]")
BITS = (2, 3, 4, 5, 6, 8, 16)
VARIANT = re.compile(rf"(.+):({'|'.join(DEFAULTS)})")
LOOK = "effllm list shows the models that are here; fable comes with effllm"


@dataclass(frozen=True)
class CatalogEntry:
    """One alias. Exactly one of `repo` and `path` (a folder inside the package) is set."""

    alias: str
    repo: str | None
    path: str | None
    revision: str
    licence: str
    gated: bool
    params: str
    size_bytes: int
    default_bits: int
    exclude: str
    note: str


@dataclass(frozen=True)
class ModelRef:
    """A model whose files are at hand. Catalog facts are None for a folder that no alias stands for.

    `variant` is the format that was named after a colon (`fable:4bit`): the folder holds the model that it is to be made of.
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


@dataclass(frozen=True)
class LocalModel:
    """A line of `effllm list`. `name` is what to type; `source` is "effllm" or "hub cache"."""

    name: str
    family: str
    folder: Path
    size_bytes: int
    params: int
    source: str
    licence: str | None


def parse_catalog(text: str) -> tuple[CatalogEntry, ...]:
    """Entries of a catalog in YAML, in file order. Raises ConfigError naming the alias and the key."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser where PyYAML was built with it
    try:
        raw = yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"models.yaml is not valid YAML: {show(str(error))}") from error
    if not isinstance(raw, dict):
        raise ConfigError("models.yaml holds no aliases")
    return tuple(_entry(alias, values) for alias, values in raw.items())


def _entry(alias: object, values: object) -> CatalogEntry:
    where = f"models.yaml: {show(alias)}"
    if not isinstance(alias, str) or not ALIAS.fullmatch(alias) or not isinstance(values, dict):
        raise ConfigError(f"{where} is not an alias in lower case with its keys")
    keys = Keys(values, where)
    if unknown := sorted(str(key) for key in values.keys() - KEYS):
        raise ConfigError(f"{where}: unknown key {show(unknown[0])}", f"known: {', '.join(sorted(KEYS))}")
    repo, path = keys.text("repo", None), keys.text("path", None)
    if (repo is None) == (path is None) or (repo is not None and not (hub.is_repo(repo) and "/" in repo)):
        raise ConfigError(f"{where}: exactly one of repo (org/name) and path must be given")
    revision, params, bits = keys.text("revision", "main"), keys.text("params"), keys.integer("default_bits")
    if not hub.is_revision(revision):
        raise keys.fail("revision", "a branch, tag or commit")
    if not PARAMS.fullmatch(params):
        raise keys.fail("params", "a count such as 135M or 8.0B")
    if bits not in BITS:
        raise keys.fail("default_bits", f"one of {BITS}")
    return CatalogEntry(alias, repo, path, revision, keys.text("licence"), keys.flag("gated"), params,
                        round(keys.number("size_gb") * 1e9), bits, keys.text("exclude", ""), keys.text("note", ""))


def catalog() -> tuple[CatalogEntry, ...]:
    """The packaged aliases."""
    return parse_catalog((files("effllm") / "models.yaml").read_text(encoding="utf-8"))


def packaged_folder(entry: CatalogEntry) -> Path:
    return Path(str(files("effllm") / entry.path))


def resolve(text: str, env: Mapping[str, str]) -> ModelRef:
    """MODEL as typed -> a folder that is there. Raises ModelNotFound with the next step, UsageError for what this version cannot take."""
    text = text.strip()
    if not text:
        raise UsageError("no model is named", LOOK)
    if (match := VARIANT.fullmatch(text)) and not _exists(Path(text)):
        ref = resolve(match.group(1), env)
        if ref.variant:
            raise UsageError(f"{show(text)} names two formats", f"leave one away: {show(match.group(1))}")
        return replace(ref, text=text, variant=match.group(2))
    looks_like_path = text.startswith(("/", "./", "../", "~", ".\\")) or text in (".", "..") or text.endswith("/")
    path = hub.expand(text, env) if text.startswith("~") else Path(text)
    if looks_like_path or (len(path.parts) > 1 and _exists(path)):
        return _from_path(text, path)
    name, revision = _split(text)
    entries = catalog()
    entry = next((e for e in entries if e.alias == name.lower() or e.repo == name), None)
    if entry is not None:
        return _from_entry(text, entry, revision, env)
    if _exists(path):
        return _from_path(text, path)
    found = hub.find(env, name, revision or "main")
    if found is None:
        raise _not_found(name, revision, entries, env)
    _check_complete(found.folder, found.repo, "")
    return ModelRef(text, found.folder, repo=found.repo, revision=found.commit, licence=hub.stated_licence(found.folder))


def _split(text: str) -> tuple[str, str | None]:
    """name[@revision]; what follows a colon and is no format is refused by name."""
    base, colon, variant = text.partition(":")
    if colon:
        raise UsageError(f"{show(':' + variant)} is no format that a model can be loaded in",
                         f"known: {', '.join(DEFAULTS)}; or leave it away: {show(base)}")
    name, at, revision = base.partition("@")
    if at and not hub.is_revision(revision):
        raise UsageError(f"{show(revision)} is no revision", "a branch, a tag or a commit follows the @")
    return name, revision if at else None


def _from_path(text: str, path: Path) -> ModelRef:
    try:
        if path.is_dir():
            return ModelRef(text, path)
        exists = path.exists()
    except OSError as error:
        raise ModelNotFound(f"{show(text)} cannot be read: {error.strerror}", f"check its permissions: ls -ld {path.parent}") from error
    if not exists:
        raise ModelNotFound(f"there is no folder {show(text)}", LOOK)
    if path.suffix.lower() == ".gguf":
        raise UsageError(f"{show(text)} is a GGUF file, which this version does not read",
                         "give a folder with config.json and *.safetensors")
    raise UsageError(f"{show(text)} is a file, a model is a folder", f"try {path.parent}")


def _from_entry(text: str, entry: CatalogEntry, revision: str | None, env: Mapping[str, str]) -> ModelRef:
    facts = {"alias": entry.alias, "licence": entry.licence, "gated": entry.gated, "size_bytes": entry.size_bytes,
             "default_bits": entry.default_bits}
    if entry.path is not None:
        if revision is not None:
            raise UsageError(f"{entry.alias} comes with effllm and has no other revision", f"leave it away: {entry.alias}")
        return ModelRef(text, packaged_folder(entry), **facts)
    found = hub.find(env, entry.repo, revision or entry.revision)
    if found is None:
        label = entry.repo if entry.repo == text else f"{entry.alias} ({entry.repo})"
        at = f" at {revision}" if revision else ""
        raise ModelNotFound(f"{label}{at} is not on this machine: {entry.size_bytes / 1e9:.3g} GB to load, licence {entry.licence}"
                            + (", gated" if entry.gated else ""), download_hint(entry, revision))
    _check_complete(found.folder, found.repo, entry.exclude)
    return ModelRef(text, found.folder, repo=entry.repo, revision=found.commit, **facts)


def download_hint(entry: CatalogEntry, revision: str | None = None) -> str:
    """The command that fetches an entry's files, and what must come before it."""
    before = "accept the licence on the model's page, hf auth login, then: " if entry.gated else ""
    after = f" ({entry.note})" if entry.gated and entry.note else ""
    return f"{before}{_download(entry.repo, revision, entry.exclude)}{after}"


def _download(repo: str, revision: str | None, exclude: str) -> str:
    return f"hf download {repo}" + (f" --revision {revision}" if revision else "") + (f' --exclude "{exclude}"' if exclude else "")


def _check_complete(folder: Path, repo: str, exclude: str) -> None:
    if missing := hub.missing_files(folder):
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelNotFound(f"{repo} is only partly downloaded: {show(missing[0])} is missing{rest}",
                            f"to complete it: {_download(repo, None, exclude)}")


def _exists(path: Path) -> bool:
    """Whether something is there; a folder that may not be looked into counts, so that its own error is shown."""
    try:
        return path.exists()
    except PermissionError:
        return True
    except (OSError, ValueError):  # too long a name, a zero byte
        return False


def _not_found(name: str, revision: str | None, entries: Iterable[CatalogEntry], env: Mapping[str, str]) -> ModelNotFound:
    cached = [snapshot.repo for snapshot in hub.snapshots(env)]
    if revision and name in cached:
        return ModelNotFound(f"{name} is here, but not at revision {revision}", _download(name, revision, ""))
    near = _near(name, [entry.alias for entry in entries] + [entry.repo for entry in entries if entry.repo] + cached)
    if near:
        return ModelNotFound(f"there is no model {show(name)}", f"did you mean {' or '.join(near)}?")
    if "/" in name and hub.is_repo(name):
        return ModelNotFound(f"{name} is not in the local hub cache", _download(name, revision, ""))
    return ModelNotFound(f"there is no model {show(name)}", LOOK)


def _near(name: str, known: list[str]) -> list[str]:
    """At most three names that were probably meant."""
    folded = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.75)
    if not close and len(name) >= 3 and "/" not in name:
        close = [each for each in folded if name.lower() in each][:3]
    return [folded[each] for each in close]


def local_models(env: Mapping[str, str]) -> list[LocalModel]:
    """Models that can run now: the packaged one, then the hub cache. What is damaged, partial or of another family is left out."""
    entries = catalog()
    aliases = {entry.repo: entry for entry in entries if entry.repo}
    found = [_local(entry.alias, packaged_folder(entry), "effllm", entry.licence) for entry in entries if entry.path]
    for snapshot in hub.snapshots(env):
        entry = aliases.get(snapshot.repo)
        name = snapshot.repo if snapshot.revision == "main" else f"{snapshot.repo}@{snapshot.commit[:12]}"
        licence = entry.licence if entry else hub.stated_licence(snapshot.folder)
        found.append(_local(entry.alias if entry and name == snapshot.repo else name, snapshot.folder, "hub cache", licence))
    return [model for model in found if model is not None]


def _local(name: str, folder: Path, source: str, licence: str | None) -> LocalModel | None:
    from ..offload.checkpoint import TensorStore
    from .container import read_container

    try:
        family, made = read_config(folder).family, read_container(folder)
        with TensorStore.open(folder) as store:
            elements = sum(prod(tensor.shape) for tensor in (store if made is None else made).tensors.values())
            return LocalModel(name, family, folder, store.nbytes, elements, source, licence)
    except EffllmError:
        return None
