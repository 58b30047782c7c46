"""Keyword search of hub repositories, with what can be told of each without reading its files.

One request, in which the hub reports each repository's config and header summary. Whether a model is supported is judged by its type and
format alone, whether it fits by its size; `plan` reads more, and is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from ... import DownloadFailed
from ...offload import hardware
from ...offload.safetensors_header import DTYPE_BITS
from ..config_reader import is_count, of_class, show
from ..encoders import ENCODERS, FILES
from ..families import COMPOSITE, FAMILIES, MODEL_TYPE_ALIASES, is_embedding_model
from ..gguf.architectures import ARCHITECTURES
from ..hub import is_repo
from ..stores.import_config import METHODS, MLX, MLX_FAMILIES
from .client import Client, NoSuchRepository
from .repository import stated_licence

ORDERS = {"downloads": "downloads", "likes": "likes", "trending": "trendingScore", "new": "createdAt"}  # ours -> the hub's
ASKED = ("config", "downloads", "gated", "gguf", "likes", "safetensors", "tags")
WRITING = "text-generation"  # what the hub calls what most are for: asked for where no word narrows the search
MOST, TIMES = 500, 5  # repositories in an answer, and how many are asked for of each that is wanted: of most searches some do not run
GGUF, SAFETENSORS = "GGUF", "safetensors"
READ = (*METHODS, "mxfp4")  # methods; the last is gpt-oss's, which its family reads
# Of a weight, scales included: what `quantize --bits 4` makes of most models, Q4_K_M and Q8_0.
FOUR_BITS, FILE_FOUR_BITS, FILE_EIGHT_BITS = 4.5, 4.85, 8.5
BESIDE = 768 << 20  # bytes: the program, and the cache and workspace of a model of some billions of weights
FITS, FITS_SMALLER, LARGER = "yes", "at 4 bits", "larger"


@dataclass(frozen=True)
class SearchResult:
    """A repository. `kind`: the type of its config, or the architecture of its GGUF files; `form`: how its weights are stored. `parameters`
    and `nbytes` are None where the hub does not tell them: of GGUF files, which are of several sizes, it tells no bytes. `why_not` says why
    it does not run, and is empty where it does; `makes_vectors`: it runs and writes nothing."""

    repo: str
    kind: str
    form: str
    parameters: int | None
    nbytes: int | None
    licence: str | None
    gated: bool
    downloads: int
    likes: int
    is_embedding_model: bool
    why_not: str

    def fits(self, memory: int) -> str:
        """Whether it fits that many bytes of memory, by size alone; empty where no size is told."""
        if self.form == GGUF:
            most, least = (self.parameters and self.parameters * bits / 8 for bits in (FILE_EIGHT_BITS, FILE_FOUR_BITS))
        else:
            most, least = self.nbytes, self.parameters and self.parameters * FOUR_BITS / 8
        if most is None:
            return ""
        return FITS if most + BESIDE <= memory else FITS_SMALLER if least and least + BESIDE <= memory else LARGER

    def to_json(self, memory: int) -> dict[str, object]:
        return {"repo": self.repo, "type": self.kind, "format": self.form, "parameters": self.parameters, "size_bytes": self.nbytes,
                "fits": self.fits(memory) or None, "licence": self.licence, "gated": self.gated, "downloads": self.downloads,
                "likes": self.likes, "makes_vectors": self.makes_vectors, "why_not": self.why_not or None}


def search(client: Client, words: str, order: str = "downloads", wanted: int = 20) -> list[SearchResult]:
    """Repositories whose names hold `words`, in the hub's order, some of which do not run; without words those that write text. Raises
    DownloadFailed."""
    asked = [("search", words)] if words else [("pipeline_tag", WRITING)]
    asked += [("sort", ORDERS[order]), ("limit", min(MOST, max(100, TIMES * wanted))), *(("expand", key) for key in ASKED)]
    try:
        listed = client.objects(f"/api/models?{urlencode(asked)}", f"a search for {show(words)}" if words else "a search")
    except NoSuchRepository:
        raise DownloadFailed(f"{client.host} does not search", "check HF_ENDPOINT, or call a repository by its name: org/repo") from None
    return [found for raw in listed if (found := _found(raw)) is not None]


def memory() -> int:
    """Bytes of memory that a model could have here now."""
    return hardware.memory_available()


def _found(raw: Mapping[str, object]) -> SearchResult | None:
    """None for what has no name that can be typed."""
    repo = raw.get("id")
    if not isinstance(repo, str) or not is_repo(repo):
        return None
    config, stored, files = (raw[key] if isinstance(raw.get(key), dict) else {} for key in ("config", "safetensors", "gguf"))
    method = _method(config)
    form = (method or SAFETENSORS) if stored else GGUF if files else ""
    kind = str((of_class(config).get("model_type") if stored else files.get("architecture")) or "")
    total = files.get("total") if form == GGUF else stored.get("total") if not method else None
    downloads, likes = (raw[key] if is_count(raw.get(key)) else 0 for key in ("downloads", "likes"))
    return SearchResult(repo, kind, form, total if is_count(total) else None, _nbytes(stored.get("parameters")), stated_licence(raw),
                 raw.get("gated") not in (None, False), downloads, likes, _reads_alone(kind, form), _why_not(kind, form, method))


def _method(config: Mapping[str, object]) -> str:
    """How its weights were quantized; empty where they were not."""
    section = config.get("quantization_config")
    if not isinstance(section, dict):
        return ""
    return str(section.get("quant_method") or MLX).lower()


def _nbytes(parameters: object) -> int | None:
    """Bytes of {type: how many of it}; None for what says no such thing, or a type that is not known."""
    if not isinstance(parameters, dict) or not parameters:
        return None
    if not all(dtype in DTYPE_BITS and is_count(count) for dtype, count in parameters.items()):
        return None
    return sum(DTYPE_BITS[dtype] * count // 8 for dtype, count in parameters.items())


def _reads_alone(kind: str, form: str) -> bool:
    return kind in FILES if form == GGUF else kind in ENCODERS or is_embedding_model({"model_type": kind})


def _why_not(kind: str, form: str, method: str) -> str:
    if not form:
        return "neither safetensors nor GGUF"
    if not kind:
        return "its type is not stated"
    known: Sequence[Mapping[str, object]] = (ARCHITECTURES, FILES) if form == GGUF else (FAMILIES, COMPOSITE, MODEL_TYPE_ALIASES, ENCODERS)
    if not any(kind in each for each in known):
        return f"type {kind} is not supported"
    if method == MLX and not {MODEL_TYPE_ALIASES.get(each, each) for each in COMPOSITE.get(kind, (kind,))} & {*MLX_FAMILIES}:
        return f"MLX-quantized weights are not supported for {kind} models"
    return f"quantized by {method}, which is not read" if method and method not in READ else ""
