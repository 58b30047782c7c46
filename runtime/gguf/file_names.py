"""GGUF file naming: parts of split files, and which files a name or tag refers to.

A split model is `name-00001-of-00003.gguf` and so on, and any part stands for it. A tag is what llama.cpp and Ollama write after a
repository's colon, `Q4_K_M`: the quantization type in the file names. Import-light: listing and shell completion use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SUFFIX = ".gguf"
PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
MAX_PARTS = 1024
PRECISION = r"(?:I?Q[1-8]|TQ[12]|BF16|F16|F32|MXFP4)(?:_[A-Za-z0-9]+)*"
TAG = "(?:[A-Za-z0-9]+-)?" + PRECISION
_PRECISION_IN_NAME = re.compile(rf"(?<=[-._]){PRECISION}(?=[-._])", re.IGNORECASE)
FOLDERS = r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]*/)*"  # no hidden folder, no ..
PATH = FOLDERS + r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.gguf"
PROJECTOR = re.compile(r"(?:^|[-._])mmproj(?=[-._])", re.IGNORECASE)  # in the name of a multimodal projector
DEFAULT_PRECISION = "Q4_K_M"  # what llama.cpp and Ollama pick from a repository by default
PROJECTOR_PRECISIONS = ("F16", "BF16", "Q8_0", "F32")  # preferred precisions of a projector, the best first


def part_names(name: str) -> tuple[str, ...] | None:
    """The names of all parts, from that of one; None for a name that is not of a part."""
    match = PART_NAME.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_PARTS:
        return None
    return tuple(f"{match[1]}-{number:05}-of-{match[3]}{match[4]}" for number in range(1, int(match[3]) + 1))


def all_parts(name: str) -> tuple[str, ...]:
    """The names of all files of a model, from that of one."""
    return part_names(name) or (name,)


def is_projector(name: str) -> bool:
    """Whether a file, named with or without folders, is a multimodal projector (mmproj)."""
    return name.lower().endswith(SUFFIX) and PROJECTOR.search(name.rpartition("/")[2]) is not None


def projectors(names: Iterable[str]) -> list[str]:
    """The projectors among `names`, sorted; of those that differ only in precision the preferred one."""
    by_base_name: dict[str, list[str]] = {}
    for name in sorted(filter(is_projector, names)):
        by_base_name.setdefault(_PRECISION_IN_NAME.sub("", name).lower(), []).append(name)
    return [min(each, key=_precision_rank) for each in by_base_name.values()]


def _precision_rank(name: str) -> int:
    precisions = [each.upper() for each in _PRECISION_IN_NAME.findall(name)]
    return next((rank for rank, kind in enumerate(PROJECTOR_PRECISIONS) if kind in precisions), len(PROJECTOR_PRECISIONS))


def model_files(names: Iterable[str]) -> list[str]:
    """GGUF model files among `names`, sorted; of a split one the first part."""
    models = sorted(name for name in names if name.lower().endswith(SUFFIX) and not is_projector(name))
    return [name for name in models if all_parts(name)[0] == name]


def matching(wanted: str, names: Iterable[str]) -> list[str]:
    """The `names` that `wanted` refers to: the file of that name or, for a tag (case-insensitive), every model whose name contains it."""
    names = list(names)
    if wanted.lower().endswith(SUFFIX):
        return [wanted] if wanted in names else []
    pattern = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?=[-./])", re.IGNORECASE)
    return [name for name in model_files(names) if pattern.search(name)]


def default_model(names: Iterable[str]) -> str | None:
    """The model to use if none is named: the only one, or else the only one of DEFAULT_PRECISION; None otherwise."""
    models = model_files(names)
    candidates = models if len(models) == 1 else matching(DEFAULT_PRECISION, models)
    return candidates[0] if len(candidates) == 1 else None


def nearest_precision(names: Iterable[str], bits: int) -> str:
    """Among `names`, the model whose quantization type is nearest to `bits`; of several, the usual kind."""
    def distance(name: str) -> tuple[int, bool, str]:
        stated_bits = [int(re.search(r"\d+", each)[0]) for each in _PRECISION_IN_NAME.findall(name)]
        return min((abs(each - bits) for each in stated_bits), default=32), "_k_m" not in name.lower(), name

    return min(names, key=distance)
