"""Names of GGUF files: the parts of one that was split, and which files a name or a tag means.

A split model lies in `name-00001-of-00003.gguf` and its like, and any part stands for it. A tag is what llama.cpp and Ollama write after
the colon of a repository, `Q4_K_M`: the precision, as the names of files state it. Light: a list of models and the shell ask here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SUFFIX = ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
MOST_PARTS = 1024
TAG = r"(?:[A-Za-z0-9]+-)?(?:I?Q[1-8]|TQ[12]|BF16|F16|F32|MXFP4)(?:_[A-Za-z0-9]+)*"
FOLDERS = r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]*/)*"  # none is hidden, none leads out
PATH = FOLDERS + r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.gguf"
PICTURES = "mmproj"  # what llama.cpp names the part of a model that sees


def part_names(name: str) -> tuple[str, ...] | None:
    """The names of all parts, from that of one; None for a name that is not of a part."""
    found = PART.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]) <= MOST_PARTS:
        return None
    return tuple(f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1))


def all_parts(name: str) -> tuple[str, ...]:
    """The names of all files of a model, from that of one."""
    return part_names(name) or (name,)


def models(names: Iterable[str]) -> list[str]:
    """The GGUF files among `names`, sorted; of a split one the first part."""
    ours = sorted(name for name in names if name.lower().endswith(SUFFIX))
    return [name for name in ours if all_parts(name)[0] == name]


def meant(asked: str, names: Iterable[str]) -> list[str]:
    """Which of `names` are meant: the file of that name, or, for a tag in any case of its letters, every model whose name states it."""
    names = list(names)
    if asked.lower().endswith(SUFFIX):
        return [asked] if asked in names else []
    stated = re.compile(rf"(?:^|[-._/]){re.escape(asked)}(?=[-./])", re.IGNORECASE)
    return [name for name in models(names) if stated.search(name) and not name.rpartition("/")[2].lower().startswith(PICTURES)]
