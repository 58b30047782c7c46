"""Keyword search of hub repositories, with what the hub reports about each.

One request, in which the hub reports each repository's config and header summary. Whether a model is supported follows from its type and
format alone, whether it fits from its size; `plan` reads more, and is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from ... import DownloadFailed
from ...offload import hardware
from ...offload.safetensors_header import DTYPE_BITS
from ..config_reader import is_count, resolve_shared_model_type, show
from ..encoders import ENCODERS, GGUF_ARCHITECTURES
from ..families import COMPOSITE, FAMILIES, MODEL_TYPE_ALIASES, is_embedding_model
from ..gguf.architectures import ARCHITECTURES
from ..hub import is_repo
from ..stores.import_config import METHODS, MLX, MLX_FAMILIES
from .client import Client, NoSuchRepository
from .repository import stated_licence

ORDERS = {"downloads": "downloads", "likes": "likes", "trending": "trendingScore", "new": "createdAt"}  # ours -> the hub's
EXPANDED_FIELDS = ("config", "downloads", "gated", "gguf", "likes", "safetensors", "tags")
TEXT_GENERATION = "text-generation"  # the pipeline tag of a search without words
MAX_RESULTS = 500  # repositories in a response of the hub
OVERSAMPLING = 5  # repositories requested for each that is wanted, since some of most searches do not run
GGUF, SAFETENSORS = "GGUF", "safetensors"
SUPPORTED_METHODS = (*METHODS, "mxfp4")  # of quantization; the last is gpt-oss's, which its family reads
# Bits per weight, scales included: what `quantize --bits 4` makes of most models, Q4_K_M and Q8_0.
FOUR_BITS, FILE_FOUR_BITS, FILE_EIGHT_BITS = 4.5, 4.85, 8.5
OVERHEAD = 768 << 20  # bytes: the program, and the cache and workspace of a model of some billions of weights
FITS, FITS_SMALLER, LARGER = "yes", "at 4 bits", "larger"


@dataclass(frozen=True)
class SearchResult:
    """A repository that a search found."""

    repo: str
    kind: str  # the type of its config, or the architecture of its GGUF files
    form: str  # how its weights are stored
    parameters: int | None  # None if the hub does not report them
    nbytes: int | None  # None if the hub does not report them, and for GGUF files, which have several sizes
    licence: str | None
    gated: bool
    downloads: int
    likes: int
    is_embedding_model: bool  # an embedding model or reranker
    why_not: str  # why it does not run, empty if it does

    def fits(self, memory: int) -> str:
        """Whether it fits `memory` bytes, by size alone; empty if its size is unknown."""
        if self.form == GGUF:
            large, small = (self.parameters and self.parameters * bits / 8 for bits in (FILE_EIGHT_BITS, FILE_FOUR_BITS))
        else:
            large, small = self.nbytes, self.parameters and self.parameters * FOUR_BITS / 8
        if large is None:
            return ""
        return FITS if large + OVERHEAD <= memory else FITS_SMALLER if small and small + OVERHEAD <= memory else LARGER

    def to_json(self, memory: int) -> dict[str, object]:
        return {"repo": self.repo, "type": self.kind, "format": self.form, "parameters": self.parameters, "size_bytes": self.nbytes,
                "fits": self.fits(memory) or None, "licence": self.licence, "gated": self.gated, "downloads": self.downloads,
                "likes": self.likes, "makes_vectors": self.is_embedding_model, "why_not": self.why_not or None}


def search(client: Client, words: str, order: str = "downloads", wanted: int = 20) -> list[SearchResult]:
    """Repositories whose names contain `words`, in the hub's order; some do not run. Without words, those that generate text. Raises
    DownloadFailed."""
    query = [("search", words)] if words else [("pipeline_tag", TEXT_GENERATION)]
    query += [("sort", ORDERS[order]), ("limit", min(MAX_RESULTS, max(100, OVERSAMPLING * wanted))),
              *(("expand", key) for key in EXPANDED_FIELDS)]
    try:
        entries = client.objects(f"/api/models?{urlencode(query)}", f"a search for {show(words)}" if words else "a search")
    except NoSuchRepository:
        raise DownloadFailed(f"{client.host} does not search", "check HF_ENDPOINT, or call a repository by its name: org/repo") from None
    return [result for raw in entries if (result := _result(raw)) is not None]


def memory() -> int:
    """Bytes of memory that a model could use on this machine now."""
    return hardware.memory_available()


def _result(raw: Mapping[str, object]) -> SearchResult | None:
    """An entry of the response; None without a valid name."""
    repo = raw.get("id")
    if not isinstance(repo, str) or not is_repo(repo):
        return None
    config, stored, files = (raw[key] if isinstance(raw.get(key), dict) else {} for key in ("config", "safetensors", "gguf"))
    method = _method(config)
    form = (method or SAFETENSORS) if stored else GGUF if files else ""
    kind = str((resolve_shared_model_type(config).get("model_type") if stored else files.get("architecture")) or "")
    total = files.get("total") if form == GGUF else stored.get("total") if not method else None
    downloads, likes = (raw[key] if is_count(raw.get(key)) else 0 for key in ("downloads", "likes"))
    return SearchResult(repo, kind, form, total if is_count(total) else None, _nbytes(stored.get("parameters")), stated_licence(raw),
                        raw.get("gated") not in (None, False), downloads, likes, _is_encoder(kind, form), _why_not(kind, form, method))


def _method(config: Mapping[str, object]) -> str:
    """How its weights were quantized; empty if they were not."""
    section = config.get("quantization_config")
    if not isinstance(section, dict):
        return ""
    return str(section.get("quant_method") or MLX).lower()


def _nbytes(parameters: object) -> int | None:
    """Bytes of {dtype: number of weights}; None for anything else, or an unknown dtype."""
    if not isinstance(parameters, dict) or not parameters:
        return None
    if not all(dtype in DTYPE_BITS and is_count(count) for dtype, count in parameters.items()):
        return None
    return sum(DTYPE_BITS[dtype] * count // 8 for dtype, count in parameters.items())


def _is_encoder(kind: str, form: str) -> bool:
    return kind in GGUF_ARCHITECTURES if form == GGUF else kind in ENCODERS or is_embedding_model({"model_type": kind})


def _why_not(kind: str, form: str, method: str) -> str:
    if not form:
        return "neither safetensors nor GGUF"
    if not kind:
        return "its type is not stated"
    known: Sequence[Mapping[str, object]] = (ARCHITECTURES, GGUF_ARCHITECTURES) if form == GGUF else (FAMILIES, COMPOSITE,
                                                                                                      MODEL_TYPE_ALIASES, ENCODERS)
    if not any(kind in table for table in known):
        return f"type {kind} is not supported"
    if method == MLX and not {MODEL_TYPE_ALIASES.get(name, name) for name in COMPOSITE.get(kind, (kind,))} & {*MLX_FAMILIES}:
        return f"MLX-quantized weights are not supported for {kind} models"
    return f"quantized by {method}, which is not read" if method and method not in SUPPORTED_METHODS else ""
