"""Parser of MODEL as typed: `alias | org/repo | folder | file.gguf`, then `[@revision]`, then `[:FILE | :TAG]`, then `[:4bit]`; or
`PROGRAM:NAME` for a model stored by another program, then `[:4bit]`.

The single parser for every command. It touches the disk for one thing only: whether a name that could be a path is one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import ModelNotFound, UsageError
from ...quant.spec import DEFAULTS
from .. import hub
from ..config_reader import show
from ..gguf.file_names import PATH, TAG
from .aliases import catalog
from .name_suggestions import OLLAMA_PREFIX, ollama_aliases, states_size

VARIANT = re.compile(rf"(.+):({'|'.join(DEFAULTS)})", re.DOTALL)
BITS = re.compile(r"\d+[-_ ]?bits?", re.IGNORECASE)  # a precision, and no size of a model
FILE = re.compile(rf"(.+):({PATH}|{TAG})", re.DOTALL | re.IGNORECASE)
# What a browser shows of a repository, of a branch of it or of a file in it.
URL = re.compile(r"(?:https?://[^/]+|hf\.co|huggingface\.co)/([^/:]+/[^/:?#]+)(?:/(?:tree|blob|resolve)/([^/?#]+)(?:/([^?#]+\.gguf))?)?"
                     r"[^:]*(:[^/]+)?", re.IGNORECASE)
# What goes before the name of a model of another program (`external_models.py`, which a name without one does not load).
PROGRAMS = ("ollama", "lmstudio", "llamacpp", "jan", "gpt4all")
PROGRAM_NAME = re.compile(rf"({'|'.join(PROGRAMS)}):(.+)", re.DOTALL | re.IGNORECASE)
LIST_HINT = "effllm list shows the models that are here; fable comes with effllm"
SEARCH_HINT = "effllm list --all shows what is here and some models of the hub; effllm search WORDS finds more, each named org/repo"


@dataclass(frozen=True)
class Reference:
    """`path` is set for what lies on the disk, `name` for an alias or a repository. `variant` is a format (4bit), `file` a GGUF
    file of the repository or folder, or a tag that states which (Q4_K_M). `program`: which other one keeps it, and begins its `name`."""

    text: str
    name: str = ""
    path: Path | None = None
    revision: str | None = None
    variant: str | None = None
    file: str | None = None
    program: str | None = None

    @property
    def base(self) -> str:
        """The text without format and file."""
        named = self.name if self.path is None else str(self.path)
        return named + (f"@{self.revision}" if self.revision else "")

    @property
    def of_program(self) -> str:
        """The name without its program's."""
        return self.name[len(self.program or "") + 1 :]

    @property
    def to_pull(self) -> str:
        """What `pull` takes: a file of a repository comes as it is, and gets its format when it is loaded."""
        return f"{self.base}:{self.file}" if self.file else self.text


def parse_reference(text: str, env: Mapping[str, str]) -> Reference:
    """Raises UsageError for what has no such form, ModelNotFound for a name of another program that means a model here."""
    text = text.strip()
    if not text:
        raise UsageError("no model given", LIST_HINT)
    base, variant, file = text, None, None
    if not exists(Path(text)):
        if match := URL.fullmatch(base):
            repo, revision, file, more = match.groups()
            meant = repo + (f"@{revision}" if revision not in (None, "main") else "") + (f":{file}" if file else "") + (more or "")
            raise UsageError(f"{show(text)} is a URL; models are given by name", f"did you mean {show(meant)}?")
        if match := VARIANT.fullmatch(base):
            base, variant = match.groups()
            if VARIANT.fullmatch(base) and not exists(Path(base)):
                raise UsageError(f"{show(text)} names two formats", f"leave one out: {show(base)}")
        if (match := PROGRAM_NAME.fullmatch(base)) is not None:
            return Reference(text, f"{match[1].lower()}:{match[2]}", variant=variant, program=match[1].lower())
        if (match := FILE.fullmatch(base)) and not exists(Path(base)):
            base, file = match.groups()
    if (path := _as_path(base, env)) is not None:
        return Reference(text, path=path, variant=variant, file=file)
    name, revision = _split(base, env)
    return Reference(text, name, None, revision, variant, file)


def names_format(text: str) -> bool:
    """Does a model's name end in a format? Where it was kept before, what is found by that name is its folder."""
    return VARIANT.fullmatch(text) is not None


def spells_path(text: str) -> bool:
    """Whether a text can be nothing but a path, there or not."""
    return text.startswith(("/", "./", "../", "~", ".\\")) or text in (".", "..") or text.endswith("/")


def _as_path(text: str, env: Mapping[str, str]) -> Path | None:
    """The path that a text spells by its form; one that is also a name counts as a path if it has folders in it and exists."""
    path = hub.expand(text, env) if text.startswith("~") else Path(text)
    return path if spells_path(text) or len(path.parts) > 1 and exists(path) else None


def _split(text: str, env: Mapping[str, str]) -> tuple[str, str | None]:
    """name[@revision]; what follows a colon and is no format is refused by name."""
    base, colon, variant = text.partition(":")
    if not base.partition("@")[0]:
        raise UsageError(f"{show(text)} is not a model name", LIST_HINT)
    if colon and not variant and base.lower() in PROGRAMS:
        raise UsageError(f"{show(text)} is not a model name", f"effllm list shows the names that begin so: {base.lower()}:NAME")
    if colon:
        from .external_models import local_name

        if (there := local_name(text, env)) is not None:
            raise ModelNotFound(f"there is no model {show(text)}", f"did you mean {there}?")
        entries = catalog(env)
        if not BITS.fullmatch(variant) and (meant := ollama_aliases(base, variant, entries)):
            raise ModelNotFound(f"there is no model {show(text)}", f"did you mean {' or '.join(meant)}?")
        is_one = "/" in base and not OLLAMA_PREFIX.match(base) or any(entry.alias == base.partition("@")[0].lower() for entry in entries)
        if not is_one and states_size(variant):
            raise ModelNotFound(f"there is no model {show(text)}", SEARCH_HINT)
        raise UsageError(f"{show(':' + variant)} is not a known weight format",
                         f"known: {', '.join(DEFAULTS)}, or the name or the tag (Q4_K_M) of a .gguf file; "
                         + (f"or leave it out: {show(base)}" if is_one else f"and {show(base)} is not a model here: {SEARCH_HINT}"))
    name, at, revision = base.partition("@")
    if at and not hub.is_revision(revision):
        raise UsageError(f"{show(revision)} is not a revision", "give a branch, tag or commit after the @")
    return name, revision if at else None


def exists(path: Path) -> bool:
    """Whether something is there; a folder that may not be looked into counts, so that its own error is shown."""
    try:
        return path.exists()
    except PermissionError:
        return True
    except (OSError, ValueError):  # too long a name, a zero byte
        return False
