"""Components of a KV cache: the step of a pass, sealing kernels, page selection on disk, per-layer codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...kernels.layout import PageLayout
from ...offload.memory import anonymous
from ...offload.page_pool import PagePool
from ...quant.kv import PackedCodec, PackedFormat, RawCodec

if TYPE_CHECKING:
    from ...kernels.cpu.compressed import CompressedKeys
    from ...kernels.cpu.indexer import LayerIndex
    from ...kernels.cpu.kv.selective import Selective
    from ...quant.kv_seal import Sealer
    from .kv_profile import Profile


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass are stored, and what they attend to."""

    position: int  # of the first token
    positions: np.ndarray  # int64 [T]
    slots: np.ndarray  # exact slot of each token, int64 [T]
    rows: np.ndarray  # row within the slot, int64 [T]
    blocks: np.ndarray  # int64 [blocks, 4], see `cache.py`


@dataclass(frozen=True)
class TokenSelection:
    """Sparse attention of a layer."""

    index: LayerIndex | None  # the indexer; None: the layer reuses an earlier layer's selection, or attends to all of `keys`
    latent: bool  # keys double as values
    keys: CompressedKeys | None = None  # compressed keys of several tokens each, to select from


class LayerPages(Protocol):
    """A backend's storage for one layer (`kernels/cpu/pages.py`, `kernels/cuda/pages.py`)."""

    def write(self, k: object, v: object, slots: np.ndarray, rows: np.ndarray) -> None: ...
    def attend(self, q: object, position: int, blocks: np.ndarray, sinks: object | None = None) -> object: ...
    def seal(self, slot: int, page: int, layer: int, first_token: int, codec: RawCodec | PackedCodec) -> None: ...
    def read_page(self, page: int) -> np.ndarray: ...
    def write_page(self, page: int, data: np.ndarray) -> None: ...
    def read_slot(self, slot: int) -> np.ndarray: ...
    def write_slot(self, slot: int, data: np.ndarray) -> None: ...
    def reader(self) -> LayerPages: ...


def page_selector(pages: LayerPages, codec: RawCodec | PackedCodec, pool: PagePool) -> Selective:
    """Selects among a CPU layer's pages on disk."""
    from ...kernels.cpu.kv.selective import Selective, abstract_nbytes

    nbytes = abstract_nbytes(pages.layout.kv_heads, pages.layout.head_dim)
    memory = anonymous((pool.pages - pool.first) * nbytes)
    return Selective(pages, memory, pool.first, codec.basis.v_matrix.swapaxes(1, 2) if codec.is_packed else None)


def sealers(backends: Sequence[object], layers: Sequence[LayerPages], codecs: Sequence[RawCodec | PackedCodec],
             layouts: Sequence[PageLayout]) -> list[Sealer]:
    """Compiled sealing for the CPU's packed layers, registered with them."""
    packed = [i for i, codec in enumerate(codecs) if codec.is_packed and backends[i].name == "cpu"]
    if not packed:
        return []
    from ...quant.kv_seal import DeferredCodec, Sealer

    sealer = Sealer(backends[packed[0]], layouts, [codec.basis for codec in codecs], [codec.bits for codec in codecs])
    for i in packed:
        layers[i].sealed_by = DeferredCodec(sealer, i)
    return [sealer]


def layer_codecs(kv: RawCodec | PackedFormat, heads: Sequence[tuple[int, int]],
                 profile: Profile | None = None) -> list[RawCodec | PackedCodec]:
    """The page codecs of layers, given their KV heads and head sizes; with a profile, in its bases and at its bits. Raises UsageError for a
    head size that cannot be packed."""
    if not isinstance(kv, PackedFormat):
        return [kv] * len(heads)
    if kv.policy:
        more, fewer, share = kv.mixed
        first, second = layer_codecs(fewer, heads, profile), layer_codecs(more, heads, profile)
        # Both codecs share one basis, so that pages of both are rotated back together.
        return [replace(codec, better=replace(other, basis=codec.basis), share=share) for codec, other in zip(first, second, strict=True)]
    if profile is None:
        return kv.layers(heads)
    bits = profile.bits_for(kv.bits_k, kv.bits_v)
    return kv.layers(heads, profile.bases(bits), bits)
