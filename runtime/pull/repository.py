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
from ..config_reader import ADAPTER as STATED
from ..config_reader import is_count, show
from ..files.model_folder_files import MEASURED, TOWER
from ..gguf import file_names, listwise
from ..hub import COMPANIONS, GGUF_PATH, INDEX, NESTED, RANKS, is_repo
from ..library.storage import MARKER
from .client import Client, DownloadFailed, RemoteFile

SINGLE, ADAPTER = "model.safetensors", "adapter_model.safetensors"
SHARD = re.compile(r"model-(\d{5,6})-of-(\d{5,6})\.safetensors")
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,200}")  # a name at the top level; never a way into another folder
MOST_NAMED = 12  # files in a hint
DEEPEST, LONGEST = 4, 400  # folders and letters of a GGUF file's path
PROGRAMS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".gguf", ".py", ".so")
LARGEST_COMPANION = 256 << 20
SHA256, SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Repository:
    """A repository at a commit. `asked` is the name it was asked for by, `repo` the one it has now; `parameters` None if not told."""

    asked: str
    repo: str
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]
    unusable: tuple[str, ...]
    licence: str | None
    gated: bool
    parameters: int | None
    nbytes_read: int

    @property
    def usual_file(self) -> str | None:
        """The GGUF file that the name alone means, of a repository that holds no other weights."""
        return None if any(name.endswith(".safetensors") for name in self.files) else file_names.default_model(self.files)


def describe(client: Client, repo: str, revision: str) -> Repository:
    """Ask the hub, in one request. Raises ModelNotFound and DownloadFailed."""
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
    """A file at the top level, or in a folder a GGUF file or what says of embeddings; the name of one that lies elsewhere or has no size;
    None for nothing."""
    if not isinstance(sibling, dict) or not isinstance(name := sibling.get("rfilename"), str):
        return None
    lfs, size, etag = sibling.get("lfs"), sibling.get("size"), sibling.get("blobId")
    if isinstance(lfs, dict):
        size, etag = lfs.get("size", size), lfs.get("sha256")
    good = SHA256 if isinstance(lfs, dict) else SHA1
    if not (PLAIN.fullmatch(name) or _is_nested(name)) or not is_count(size) or not isinstance(etag, str) or not good.fullmatch(etag):
        return name
    return RemoteFile(name, size, etag, isinstance(lfs, dict))


def _is_nested(name: str) -> bool:
    return name in NESTED or GGUF_PATH.fullmatch(name) is not None and name.count("/") <= DEEPEST and len(name) <= LONGEST


def stated_licence(raw: Mapping[str, object]) -> str | None:
    """Of what the hub says about a repository."""
    card, tags = raw.get("cardData"), raw.get("tags")
    if isinstance(card, dict):
        for key in ("license_name", "license"):
            if isinstance(card.get(key), str):
                return card[key][:40]
    named = [tag.removeprefix("license:") for tag in tags if isinstance(tag, str) and tag.startswith("license:")] \
        if isinstance(tags, list) else []
    return named[0][:40] if named else None


def companions(repository: Repository) -> list[RemoteFile]:
    """The files beside the weights. Another form of the tokenizer is none where tokenizer.json is there. Of a folder that `quantize` made
    what it says of the weights, what was measured of them, and what the model sees with, however large."""
    twice = RANKS if "tokenizer.json" in repository.files else ()
    # What a model was taught to hear by lies beside its weights. Where nothing describes it, it is somebody's leftover.
    taught = (STATED, ADAPTER) if {STATED, "config.json"} <= repository.files.keys() else ()
    made = (MARKER, *MEASURED, TOWER) if MARKER in repository.files else ()
    return [file for file in repository.files.values() if any(fnmatch(file.name, pattern) for pattern in (*COMPANIONS, *taught, *made))
            and not file.name.endswith(PROGRAMS) and file.name not in twice and (file.size <= LARGEST_COMPANION or file.name in made)]


def weights(repository: Repository, exclude: str = "", bits: str | None = None) -> list[RemoteFile]:
    """One copy of the weights in order, their index first, and not of those that `exclude` names. Raises ModelNotFound where there are none
    that can be read, or that can be quantized as they come where `bits` asks for it."""
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


def named_files(repository: Repository, asked: str) -> list[RemoteFile]:
    """The file that a name or a tag after a colon means, with all other parts where it is one of several. Raises ModelNotFound with the
    nearest names where that is none, or more than one."""
    files, listed = file_names.matching(asked, repository.files), file_names.model_files(repository.files)
    if len(files) > 1:
        raise ModelNotFound(f"{repository.repo} has {len(files)} files of {asked}",
                            "name one: " + " or ".join(f"{repository.asked}:{file}" for file in files[:MOST_NAMED]))
    if not files:
        near = difflib.get_close_matches(asked, listed, n=3, cutoff=0.4) if asked.lower().endswith(file_names.SUFFIX) else []
        more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
        raise ModelNotFound(f"{repository.repo} has no file {show(asked)}",
                            f"did you mean {' or '.join(near)}?" if near else "it has no .gguf files" if not listed
                            else f"it has {', '.join(listed[:MOST_NAMED])}{more}")
    parts = file_names.all_parts(files[0])
    for part in parts:
        if part not in repository.files:
            raise ModelNotFound(f"{repository.repo} has {show(files[0])}, which is a part of a model, and not {show(part)}",
                                f"choose another file: the files are at the page of {repository.repo}")
    return [repository.files[part] for part in parts]


def projector_file(repository: Repository, model: str) -> RemoteFile | None:
    """The part that sees (mmproj) of the model in a GGUF file: of the nearest folder that has any, where that is one; where it has
    several precisions, of those that of 16 bits."""
    if file_names.is_projector(model):
        return None
    folder, found = model.rpartition("/")[0], []
    while not found:
        found = file_names.projectors(name for name in repository.files if name.rpartition("/")[0] == folder)
        if not folder:
            break
        folder = folder.rpartition("/")[0]
    return repository.files[found[0]] if len(found) == 1 else None


def ranking_file(repository: Repository, model: str) -> RemoteFile | None:
    """The matrices by which the model in a GGUF file ranks documents of one text, which lie in its folder."""
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
                             f"the nearest to {wanted} bits: effllm pull {repository.asked}:{file_names.nearest_precision(ggufs, wanted)}")
    if ggufs:
        return ModelNotFound(f"{repository.repo} holds only GGUF files",
                             "name one: effllm pull " + " or ".join(f"{repository.asked}:{file}" for file in _preferred(ggufs)))
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in every):
        return ModelNotFound(f"{repository.repo} holds only pickle weights: opening one runs whatever code is inside, so effllm refuses",
                             "choose a repository of this model with .safetensors")
    return ModelNotFound(f"{repository.repo} holds no weights", "choose another repository")


def _preferred(names: Iterable[str]) -> list[str]:
    """A few of several precisions, what most people would take first."""
    return sorted(names, key=lambda name: ("q4_k_m" not in name.lower(), name))[:MOST_NAMED]
