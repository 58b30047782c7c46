""""Did you mean" suggestions for model names that do not resolve: typos, and names used by other tools.

Ollama puts a size after a colon (`llama3.1:8b`, `qwen2.5:7b-instruct-q4_K_M`); GGUF repositories decorate the name
(`Meta-Llama-3.1-8B-Instruct-GGUF`). Family and sizes are extracted from each and compared with those of an alias and its repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .aliases import CatalogEntry

# Where Ollama keeps its models, and what stands there before the name of one.
OLLAMA_PREFIX = re.compile(r"(?:https?://)?(?:(?:www\.|registry\.)?ollama\.(?:com|ai)/)?library/|(?:https?://)?(?:www\.|registry\.)?ollama\.(?:com|ai)/",
                     re.IGNORECASE)
# What says how a model is stored or trained, and not which one it is.
DECORATIONS = re.compile(r"(?<![a-z0-9])(?:i?q\d\w*|[bf]p?f?(?:16|32)|gguf|latest|instruct|chat|it|hf|meta)(?![a-z0-9])")
SIZE = re.compile(r"[ae]?\d+(?:\.\d+)?[bm]|\d+x\d+b")
SIZE_TOLERANCE = 0.12  # parameters are counted in other ways: 7b is 7.25B to its makers
NAME_CUTOFF, WORD_CUTOFF = 0.75, 0.7  # of a name's letters, of a word's


@dataclass(frozen=True)
class ParsedName:
    """A model name split into the letters of its family, version included, and its sizes (`8b`, `a3b`)."""

    family: str
    sizes: frozenset[str]


def parse_name(name: str) -> ParsedName:
    words = [word for word in re.split(r"[-_:\s]+", DECORATIONS.sub("", name.lower().rpartition("/")[2])) if word]
    sizes = frozenset(word for word in words if SIZE.fullmatch(word))
    return ParsedName(letters("".join(word for word in words if word not in sizes)), sizes)


def letters(name: str) -> str:
    return "".join(each for each in name.lower() if each.isalnum())


def family_aliases(name: str, entries: Iterable[CatalogEntry]) -> list[str]:
    """Aliases of the family a name mentions, narrowed to its size where it states one and such aliases exist; none for an unknown
    family."""
    entries = [*entries]
    if whole := [entry.alias for entry in entries if entry.alias in (f"{name.lower()}b", f"{name.lower()}m")]:
        return whole  # a size without its letter: qwen3-8 is qwen3-8b, and not qwen3.8
    wanted = parse_name(name)
    of_family = [entry for entry in entries if wanted.family and wanted.family in _families(entry)]
    named = [entry.alias for entry in of_family if wanted.sizes <= parse_name(entry.alias).sizes | parse_name(entry.repo or "").sizes]
    counted = [entry.alias for entry in of_family if all(_is_of_size(entry, size) for size in wanted.sizes)]
    return named or counted or [entry.alias for entry in of_family]


def _families(entry: CatalogEntry) -> set[str]:
    return {parse_name(name).family for name in (entry.alias, entry.repo or "")}


def _is_of_size(entry: CatalogEntry, size: str) -> bool:
    wanted = _billions(size)
    return wanted > 0 and abs(_billions(entry.params.lower()) / wanted - 1) <= SIZE_TOLERANCE


def _billions(size: str) -> float:
    """8b -> 8.0; 0.0 for what is no plain count, as 8x7b and e4b."""
    return float(size[:-1]) / (1 if size[-1] == "b" else 1000) if re.fullmatch(r"\d+(\.\d+)?[bm]", size) else 0.0


def states_size(tag: str) -> bool:
    """Whether what stands behind a colon says how large a model is, as Ollama's tags do, or which one is the last."""
    return bool(parse_name(tag).sizes) or tag.lower() == "latest"


def ollama_aliases(base: str, tag: str, entries: Sequence[CatalogEntry]) -> list[str]:
    """Aliases for what Ollama calls `base:tag`."""
    base = OLLAMA_PREFIX.sub("", base)
    same = [entry.alias for entry in entries if tag == "latest" and entry.alias == base.lower()]
    same = same or family_aliases(f"{base}-{tag}", entries)
    wanted = letters(base + tag)
    same = same or [entry.alias for entry in entries if letters((entry.repo or "").rpartition("/")[2]).startswith(wanted)]
    same = same or family_aliases(base, entries)
    return same or [entry.alias for entry in entries if entry.alias.startswith(base.lower())][:3]


def close_matches(name: str, known: Iterable[str]) -> list[str]:
    """At most three of the known names, those spelled most similarly."""
    from difflib import get_close_matches  # not for a name that leads somewhere: the first word waits for those

    folded = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), folded, n=3, cutoff=NAME_CUTOFF)
    if not close and len(name) >= 3 and "/" not in name:
        close = [each for each in folded if name.lower() in each][:3]
    return [folded[each] for each in close]


def likely_typos(repo: str, known: Iterable[str]) -> list[str]:
    """Of the repositories that are written nearly as this one those that it can be a slip for: word by word the same or alike, and the same
    in all that has figures. The hub holds a million others: Qwen2.5-Coder-7B is none of Qwen2.5-7B."""
    return [each for each in close_matches(repo, known) if "/" in each and _is_typo(repo.lower(), each.lower())]


def _is_typo(repo: str, meant: str) -> bool:
    from difflib import SequenceMatcher

    words, others = re.split(r"[-_/]", repo), re.split(r"[-_/]", meant)
    return len(words) == len(others) and all(
        word == other or not re.search(r"\d", word + other) and SequenceMatcher(None, word, other).ratio() >= WORD_CUTOFF
        for word, other in zip(words, others))
