"""Reads the local Hugging Face hub cache: which models were downloaded, by this and other tools.

Layout: `models--org--name/refs/<branch>` holds a commit, `snapshots/<commit>/` the files as links. The folder comes from HF_HUB_CACHE or
HF_HOME, as for every tool of that family. Reading it directly takes well under a millisecond; importing huggingface_hub takes a third of a
second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from .config_reader import ConfigError, read_json
from .gguf.file_names import PATH, SUFFIX

REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
COMMIT = re.compile(r"[0-9a-f]{7,40}")
INDEX = "model.safetensors.index.json"
# Files that a folder of weights needs to run, and those that its licence requires to be passed on.
WORLD = "rwkv_vocab_v20230424.txt"  # RWKV's vocabulary, for greedy longest match
RANKS = ("tekken.json", "tiktoken.model", "hy.tiktoken", WORLD)  # tokenizers that are read if there is no tokenizer.json
PIECES = "tokenizer.model"  # SentencePiece's, often in addition to tokenizer.json
# Pooling of embedding models in sentence-transformers' layout, and its name in a folder without subfolders.
MODULES, POOLING, POOLING_KEPT = "modules.json", "1_Pooling/config.json", "pooling.json"
RANKING, RANKING_KEPT = "1_LogitScore/config.json", "ranking.json"  # the same of rerankers
PROMPTS = "config_sentence_transformers.json"  # prefixes of texts to embed
SENTENCES = "sentence_*_config.json"  # maximum length of such texts
# Dense layers after the pooling: folder -> name in a GGUF file.
DENSE = {"2_Dense": "dense_2.weight", "3_Dense": "dense_3.weight"}
NESTED = {POOLING: POOLING_KEPT, RANKING: RANKING_KEPT,
          **{f"{folder}/config.json": name.replace(".weight", ".json") for folder, name in DENSE.items()},
          **{f"{folder}/model.safetensors": name.replace(".weight", ".matrix") for folder, name in DENSE.items()}}
SETTINGS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
            "chat_template*", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", *RANKS,
            MODULES, PROMPTS, SENTENCES, *NESTED.values())
COMPANIONS = (*SETTINGS, *NESTED, "LICENSE*", "LICENCE*", "NOTICE*", "README*", "USE_POLICY*")
GGUF_PATH = re.compile(PATH, re.IGNORECASE)
LICENCE_LINE = re.compile(r"^license(_name)?:[ \t]*[\"']?([A-Za-z0-9.+_-]{1,40})[\"']?[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Snapshot:
    """A commit of a repository in the cache. `revision`: the name it was found by."""

    repo: str
    revision: str
    commit: str
    folder: Path


def is_repo(text: str) -> bool:
    return REPO.fullmatch(text) is not None and ".." not in text and "--" not in text


def is_revision(text: str) -> bool:
    """Whether it can be a branch, tag or commit; never a path out of the cache folder."""
    return REVISION.fullmatch(text) is not None and ".." not in text


def home(env: Mapping[str, str]) -> Path:
    return Path(env.get("HOME") or Path.home())


def expand(text: str, env: Mapping[str, str]) -> Path:
    """A path with variables and a leading ~ replaced from `env`."""
    text = Template(text).safe_substitute(env)
    return home(env) / text[2:] if text.startswith("~/") else home(env) if text == "~" else Path(text)


def cache_folder(env: Mapping[str, str]) -> Path:
    """The hub cache of this machine, whether or not it exists."""
    direct = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    if direct:
        return expand(direct, env)
    return hf_home(env) / "hub"


def hf_home(env: Mapping[str, str]) -> Path:
    """Hugging Face's home folder: the token, and the cache unless another variable names it."""
    if env.get("HF_HOME"):
        return expand(env["HF_HOME"], env)
    base = expand(env["XDG_CACHE_HOME"], env) if env.get("XDG_CACHE_HOME") else home(env) / ".cache"
    return base / "huggingface"


def repo_folder(env: Mapping[str, str], repo: str) -> Path:
    """A repository's folder in the cache, whether or not it exists."""
    return cache_folder(env) / ("models--" + repo.replace("/", "--"))


def repo_of(env: Mapping[str, str], path: Path) -> str | None:
    """The repository whose cache folder a path is in; None for any other path."""
    cache, path = Path(os.path.abspath(cache_folder(env))), Path(os.path.abspath(path))
    if cache not in path.parents or len(parts := path.relative_to(cache).parts) < 4 or parts[1] != "snapshots":
        return None
    repo = parts[0].removeprefix("models--").replace("--", "/")
    return repo if parts[0] == "models--" + repo.replace("/", "--") else None


def find(env: Mapping[str, str], repo: str, revision: str = "main") -> Snapshot | None:
    """The snapshot of a branch, a tag, or a commit or its prefix (7 digits or more). None if it is missing or unreadable."""
    if not is_repo(repo) or not is_revision(revision):
        return None
    root = repo_folder(env, repo)
    commits = names_in(root / "snapshots")
    commit = read_ref(root / "refs" / revision)
    if commit is None and COMMIT.fullmatch(revision):
        matches = [name for name in commits if name.startswith(revision)]
        commit = matches[0] if len(matches) == 1 else None
    return Snapshot(repo, revision, commit, root / "snapshots" / commit) if commit in commits else None


def repos(env: Mapping[str, str]) -> Iterator[str]:
    """The repositories in the cache, sorted."""
    for name in names_in(cache_folder(env)):
        repo = name.removeprefix("models--").replace("--", "/")
        if name == "models--" + repo.replace("/", "--"):
            yield repo


def snapshots(env: Mapping[str, str]) -> Iterator[Snapshot]:
    """For every repository, sorted, the snapshot of `main`, then those of other commits."""
    for repo in repos(env):
        main = find(env, repo)
        if main is not None:
            yield main
        for commit in names_in(repo_folder(env, repo) / "snapshots"):
            if (main is None or commit != main.commit) and (found := find(env, repo, commit)) is not None:
                yield found


def missing_files(folder: Path) -> tuple[str, ...]:
    """The files that an interrupted download has left out: config.json, or shards that the index names. Empty if complete."""
    names = set(names_in(folder))
    missing = [] if "config.json" in names and (folder / "config.json").exists() else ["config.json"]
    if INDEX in names and (folder / INDEX).exists():
        try:
            shards = read_json(folder / INDEX).get("weight_map")
        except ConfigError:
            return (*missing, INDEX)
        names_in_index = sorted({name for name in shards.values() if isinstance(name, str)}) if isinstance(shards, dict) else []
        missing += [name for name in names_in_index if name not in names or not (folder / name).exists()]
    elif not any(name.endswith((".safetensors", ".bin")) and (folder / name).exists() for name in names):
        missing.append("model.safetensors")
    return tuple(missing)


def gguf_files(folder: Path, deep: bool = True) -> list[str]:
    """The GGUF files of a folder, with `deep` also of subfolders three levels deep, by relative path; without broken links."""
    patterns = ("*", "*/*", "*/*/*") if deep else ("*",)
    paths = (path for pattern in patterns for path in folder.glob(pattern) if path.name.lower().endswith(SUFFIX))
    by_name = {path.relative_to(folder).as_posix(): path for path in paths}
    return sorted(name for name, path in by_name.items() if GGUF_PATH.fullmatch(name) and path.is_file())


# Licences in SPDX's spelling; model cards have them in lower case, as the hub requires.
SPDX = {name.lower(): name for name in """
Apache-2.0 MIT MIT-0 ISC Zlib Unlicense WTFPL 0BSD BSD-2-Clause BSD-3-Clause BSD-3-Clause-Clear BSL-1.0 MPL-2.0 AFL-3.0
OSL-3.0 EPL-1.0 EPL-2.0 ECL-2.0 EUPL-1.1 EUPL-1.2 MS-PL NCSA PostgreSQL Artistic-2.0 GPL-2.0 GPL-3.0 LGPL-2.1 LGPL-3.0
AGPL-3.0 CC0-1.0 CC-BY-2.0 CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0 CC-BY-NC-2.0 CC-BY-NC-3.0 CC-BY-NC-4.0
CC-BY-ND-4.0 CC-BY-NC-ND-3.0 CC-BY-NC-ND-4.0 CC-BY-NC-SA-2.0 CC-BY-NC-SA-3.0 CC-BY-NC-SA-4.0
""".split()}


def shown_licence(licence: str | None, none: str = "") -> str:
    """A licence for display: in SPDX spelling if it is one of those, else as stated."""
    return SPDX.get(licence.lower(), licence) if licence else none


def stated_licence(folder: Path) -> str | None:
    """The licence in the front matter of a model card, if stated."""
    card = folder / "README.md"
    try:
        if not card.is_file():  # reading a pipe would block
            return None
        with card.open(encoding="utf-8", errors="replace") as file:
            head = file.read(20_000)
    except OSError:
        return None
    block = head.split("\n---", 1)[0] if head.startswith("---") else ""
    stated = {suffix or "": value for suffix, value in LICENCE_LINE.findall(block)}
    return stated.get("_name") or stated.get("")


def names_in(folder: Path) -> list[str]:
    """Entries of a folder, sorted; none if it is absent or unreadable."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def read_ref(path: Path) -> str | None:
    """The commit that a branch or tag points at."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            commit = file.read(64).strip()
    except OSError:
        return None
    return commit if re.fullmatch(r"[0-9a-f]{40}|[A-Za-z0-9_][A-Za-z0-9_-]*", commit) else None
