"""A hub repository's description, and selection of the files a run needs.

Weights are one copy of the top-level safetensors: repositories often hold the same weights again as pickles, as the publisher's own
files (`original/`, `consolidated`), for other programs (GGUF, ONNX) or at another precision.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from urllib.parse import quote

from ... import ModelNotFound
from ...quant.spec import QuantSpec
from ..config_reader import ADAPTER as ADAPTER_CONFIG
from ..config_reader import is_count, show
from ..files.model_folder_files import MEASUREMENTS, TOWER
from ..gguf import file_names, listwise
from ..hub import COMPANIONS, GGUF_PATH, INDEX, NESTED, RANKS, is_repo
from ..library.storage import MARKER
from .client import Client, DownloadFailed, RemoteFile

SINGLE, ADAPTER = "model.safetensors", "adapter_model.safetensors"
SHARD = re.compile(r"model-(\d{5,6})-of-(\d{5,6})\.safetensors")
TOP_LEVEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,200}")  # a name at the top level; never a path into another folder
MAX_LISTED = 12  # files in a hint
MAX_DEPTH, MAX_PATH = 4, 400  # folders and characters of a GGUF file's path
UNREAD_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".gguf", ".py", ".so")
MAX_COMPANION_NBYTES = 256 << 20
SHA256, SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Repository:
    """A repository at a commit."""

    requested_name: str
    repo: str  # its present name, after renames
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]
    unusable: tuple[str, ...]  # names of files in other folders, or without size or checksum
    licence: str | None
    gated: bool
    parameters: int | None  # None if the hub does not report them
    nbytes_read: int

    @property
    def default_file(self) -> str | None:
        """The GGUF file that the name alone means, if the repository holds no other weights."""
        return None if any(name.endswith(".safetensors") for name in self.files) else file_names.default_model(self.files)


def describe(client: Client, repo: str, revision: str) -> Repository:
    """Describe a repository, with one request. Raises ModelNotFound and DownloadFailed."""
    raw, nbytes = client.json(f"/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true", repo)
    name, commit, siblings = raw.get("id"), raw.get("sha"), raw.get("siblings")
    if not isinstance(commit, str) or not SHA1.fullmatch(commit) or not isinstance(siblings, list):
        raise DownloadFailed(f"{client.endpoint} does not answer like a model hub", "check HF_ENDPOINT")
    files, unusable = {}, []
    for sibling in siblings:
        file = _file(sibling)
        if isinstance(file, RemoteFile):
            files[file.name] = file
        elif file:
            unusable.append(file)
    totals = [each.get("total") for kind in ("safetensors", "gguf") if isinstance(each := raw.get(kind), dict)]
    counted = [total for total in totals if is_count(total)]
    return Repository(repo, name if isinstance(name, str) and is_repo(name) else repo, revision, commit, files, tuple(unusable),
                      stated_licence(raw), raw.get("gated") not in (None, False), counted[0] if counted else None, nbytes)


def _file(sibling: object) -> RemoteFile | str | None:
    """A usable file: at the top level, a GGUF file in a folder, or a config of sentence-transformers. The name of an unusable one; None
    for an invalid entry."""
    if not isinstance(sibling, dict) or not isinstance(name := sibling.get("rfilename"), str):
        return None
    lfs, size, etag = sibling.get("lfs"), sibling.get("size"), sibling.get("blobId")
    if isinstance(lfs, dict):
        size, etag = lfs.get("size", size), lfs.get("sha256")
    checksum = SHA256 if isinstance(lfs, dict) else SHA1
    if not (TOP_LEVEL.fullmatch(name) or _is_nested(name)) or not is_count(size) or not isinstance(etag, str) or \
            not checksum.fullmatch(etag):
        return name
    return RemoteFile(name, size, etag, isinstance(lfs, dict))


def _is_nested(name: str) -> bool:
    return name in NESTED or GGUF_PATH.fullmatch(name) is not None and name.count("/") <= MAX_DEPTH and len(name) <= MAX_PATH


def stated_licence(raw: Mapping[str, object]) -> str | None:
    """The licence in the hub's description of a repository."""
    card, tags = raw.get("cardData"), raw.get("tags")
    if isinstance(card, dict):
        for key in ("license_name", "license"):
            if isinstance(card.get(key), str):
                return card[key][:40]
    licences = [tag.removeprefix("license:") for tag in tags if isinstance(tag, str) and tag.startswith("license:")] \
        if isinstance(tags, list) else []
    return licences[0][:40] if licences else None


def companions(repository: Repository) -> list[RemoteFile]:
    """The files in addition to the weights. Other forms of the tokenizer are skipped if tokenizer.json exists. From a folder that
    `quantize` wrote also its container, measurements and vision tower, of any size."""
    duplicates = RANKS if "tokenizer.json" in repository.files else ()
    # The adapter of an audio model is part of it. Without its config it is somebody's leftover.
    adapter = (ADAPTER_CONFIG, ADAPTER) if {ADAPTER_CONFIG, "config.json"} <= repository.files.keys() else ()
    own = (MARKER, *MEASUREMENTS, TOWER) if MARKER in repository.files else ()
    return [file for file in repository.files.values() if any(fnmatch(file.name, pattern) for pattern in (*COMPANIONS, *adapter, *own))
            and not file.name.endswith(UNREAD_SUFFIXES) and file.name not in duplicates
            and (file.size <= MAX_COMPANION_NBYTES or file.name in own)]


def weights(repository: Repository, exclude: str = "", bits: str | None = None) -> list[RemoteFile]:
    """One copy of the weights in order, their index first. `exclude`: a pattern of names to ignore. Raises ModelNotFound if there are none
    that can be read, or if `bits` is given and there are none that can be quantized while downloading."""
    files = {name: file for name, file in repository.files.items() if not (exclude and fnmatch(name, exclude))}
    if SINGLE in files:
        return [files[SINGLE]]
    shards = sorted((name for name in files if SHARD.fullmatch(name)), key=lambda name: int(SHARD.fullmatch(name)[1]))
    if INDEX in files and shards:
        return [files[INDEX], *(files[name] for name in shards)]
    lone = [name for name in files if name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter_", listwise.FILE))]
    if len(lone) == 1:
        return [files[lone[0]]]
    raise _no_weights(repository, lone, bits)


def named_files(repository: Repository, name: str) -> list[RemoteFile]:
    """The file that a file name or tag means, with all parts of a split file. Raises ModelNotFound, with similar names, if there is none
    or more than one."""
    files, ggufs = file_names.matching(name, repository.files), file_names.model_files(repository.files)
    if len(files) > 1:
        raise ModelNotFound(f"{repository.repo} has {len(files)} files of {name}",
                            "name one: " + " or ".join(f"{repository.requested_name}:{file}" for file in files[:MAX_LISTED]))
    if not files:
        similar = difflib.get_close_matches(name, ggufs, n=3, cutoff=0.4) if name.lower().endswith(file_names.SUFFIX) else []
        more = f" and {len(ggufs) - MAX_LISTED} more" if len(ggufs) > MAX_LISTED else ""
        raise ModelNotFound(f"{repository.repo} has no file {show(name)}",
                            f"did you mean {' or '.join(similar)}?" if similar else "it has no .gguf files" if not ggufs
                            else f"it has {', '.join(ggufs[:MAX_LISTED])}{more}")
    parts = file_names.all_parts(files[0])
    for part in parts:
        if part not in repository.files:
            raise ModelNotFound(f"{repository.repo} has {show(files[0])}, which is a part of a model, and not {show(part)}",
                                f"choose another file: the files are at the page of {repository.repo}")
    return [repository.files[part] for part in parts]


def projector_file(repository: Repository, model: str) -> RemoteFile | None:
    """The projector (mmproj, the vision part) of the model in a GGUF file: from the nearest folder that has any, if there is one; of
    several precisions, the one of 16 bits."""
    if file_names.is_projector(model):
        return None
    folder, candidates = model.rpartition("/")[0], []
    while not candidates:
        candidates = file_names.projectors(name for name in repository.files if name.rpartition("/")[0] == folder)
        if not folder:
            break
        folder = folder.rpartition("/")[0]
    return repository.files[candidates[0]] if len(candidates) == 1 else None


def ranking_file(repository: Repository, model: str) -> RemoteFile | None:
    """The matrices in the folder of a GGUF file by which its model reranks documents listwise (`gguf/listwise.py`)."""
    folder = model.rpartition("/")[0]
    return repository.files.get(f"{folder}/{listwise.FILE}" if folder else listwise.FILE)


def _no_weights(repository: Repository, lone: Sequence[str], bits: str | None) -> ModelNotFound:
    every = [*repository.files, *repository.unusable]
    if ADAPTER in every:
        return ModelNotFound(f"{repository.repo} is a LoRA adapter, not a model",
                             "pull its base model; effllm export --lora DIR merges an adapter in a folder into it")
    if lone:
        return ModelNotFound(f"{repository.repo} has {len(lone)} safetensors files and no index to combine them",
                             "choose another repository of this model")
    if (ggufs := file_names.model_files(repository.files)) and bits is not None:
        wanted = QuantSpec.parse(bits).bits
        return ModelNotFound(f"{repository.repo} holds only GGUF files, which are pulled as they are and not at {bits}",
                             f"the nearest to {wanted} bits: effllm pull {repository.requested_name}:"
                             f"{file_names.nearest_precision(ggufs, wanted)}")
    if ggufs:
        return ModelNotFound(f"{repository.repo} holds only GGUF files",
                             "name one: effllm pull " + " or ".join(f"{repository.requested_name}:{file}" for file in _preferred(ggufs)))
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in every):
        return ModelNotFound(f"{repository.repo} holds only pickle weights: opening one runs whatever code is inside, so effllm refuses",
                             "choose a repository of this model with .safetensors")
    return ModelNotFound(f"{repository.repo} holds no weights", "choose another repository")


def _preferred(names: Iterable[str]) -> list[str]:
    """The names to list of several precisions, the most popular first."""
    return sorted(names, key=lambda name: ("q4_k_m" not in name.lower(), name))[:MAX_LISTED]
