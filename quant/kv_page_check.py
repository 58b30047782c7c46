"""Validates sealed pages read from a file: kernels trust the bit widths in a record's header, so these are compared with what the cache
expects before a page is handed to a kernel.
"""

from __future__ import annotations

import numpy as np

from ..kernels.kv_layout import GROUP_CHANNELS, MEAN_K, unpack_tail
from ..kernels.layout import HEADER_NBYTES, PAGE, PageHeader, PageLayout
from .kv import PackedCodec, RawCodec


def check_stored(codec: RawCodec | PackedCodec, page: np.ndarray, layout: PageLayout, layer: int, first_token: int) -> None:
    """`page` is a layer-page, uint8; `layout` that of exact tokens. Raises ValueError naming layer, head and token of what is not."""
    heads, size = layout.kv_heads, layout.head_dim
    own = codec.layout(heads, size)
    if len(page) != own.layer_page_nbytes:
        raise ValueError(f"{len(page)} bytes for a page of {own.layer_page_nbytes}")
    for head in range(heads):
        start = own.head_offsets[head] if codec.is_packed else head * layout.record_nbytes
        bits, profile = (codec.bits[head], codec.basis.profile) if codec.is_packed else ((codec.bits, codec.bits), 0)
        header = PageHeader.unpack(page[start : start + HEADER_NBYTES].tobytes())
        wanted = (layer, head, first_token, PAGE, *bits, profile)
        if (header.layer, header.head, header.first_token, header.count, header.bits_k, header.bits_v, header.profile) != wanted:
            raise ValueError(f"layer {layer}, head {head}, token {first_token}: a page of something else")
        if codec.is_packed:
            raw = page[start : start + own.records[head].header_nbytes].tobytes()
            where = f"layer {layer}, head {head}, token {first_token}"
            _check_widths(raw, size // GROUP_CHANNELS, bits, codec.basis.k_mean is not None, where)


def _check_widths(raw: bytes, groups: int, bits: tuple[int, int], has_mean: bool, where: str) -> None:
    _, flags, sides = unpack_tail(raw, groups)
    if any(sum(widths) != mean * groups for widths, mean in zip(sides, bits, strict=True)) or (flags & MEAN_K > 0) != has_mean:
        raise ValueError(f"{where}: groups of other widths than its bits")
