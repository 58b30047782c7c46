"""What a cache is put together from where pages are packed by compiled kernels, or picked from a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..kernels.layout import PageLayout
from ..offload.memory import anonymous
from ..offload.pages import PagePool
from ..quant.kv import PackedCodec, RawCodec

if TYPE_CHECKING:
    from ..kernels.cpu.selective import Selective
    from ..quant.kv_seal import Sealer
    from .cache import LayerPages


def selective(pages: LayerPages, codec: RawCodec | PackedCodec, pool: PagePool) -> Selective:
    """What picks among a CPU layer's pages on the disk."""
    from ..kernels.cpu.selective import Selective, abstract_nbytes

    nbytes = abstract_nbytes(pages.layout.kv_heads, pages.layout.head_dim)
    memory = anonymous((pool.pages - pool.first) * nbytes)
    return Selective(pages, memory, pool.first, codec.basis.v_matrix.swapaxes(1, 2) if codec.is_packed else None)


def sealers(backends: Sequence[object], layers: Sequence[LayerPages], codecs: Sequence[RawCodec | PackedCodec],
             layout: PageLayout) -> list[Sealer]:
    """Compiled sealing for the packed layers of the CPU, which are told of it."""
    packed = [i for i, codec in enumerate(codecs) if codec.is_packed and backends[i].name == "cpu"]
    if not packed:
        return []
    from ..quant.kv_seal import NotingCodec, Sealer

    sealer = Sealer(backends[packed[0]], layout, [codec.basis for codec in codecs], [codec.bits for codec in codecs])
    for i in packed:
        layers[i].sealed_by = NotingCodec(sealer, i)
    return [sealer]
