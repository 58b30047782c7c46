"""Raw KV pages, sealed or exact slots, as arrays: the bytes of `layout.PageLayout` indexed by token, head and channel."""

from __future__ import annotations

import numpy as np

from .layout import F32, HEADER_NBYTES, STORED_BYTES, PageLayout


def views(page: np.ndarray, layout: PageLayout) -> tuple[np.ndarray, np.ndarray]:
    """Views of contiguous uint8 `page`, which may end after any part: K [parts, H, D, rows] and V [parts, H, rows, D]."""
    item, depth = STORED_BYTES[layout.stored], layout.head_dim
    typed = page[HEADER_NBYTES:].view(np.float32 if layout.stored == F32 else np.float16)
    outer, strides = (len(page) // layout.part_nbytes, layout.kv_heads), (layout.part_nbytes, layout.record_nbytes)
    keys = np.lib.stride_tricks.as_strided(typed, (*outer, depth, layout.rows), (*strides, layout.rows * item, item))
    return keys, np.lib.stride_tricks.as_strided(typed[layout.side_nbytes // item :], (*outer, layout.rows, depth),
                                                 (*strides, depth * item, item))


def keys_and_values(page: np.ndarray, layout: PageLayout) -> tuple[np.ndarray, np.ndarray]:
    """K and V in the stored type, [tokens, H, D], as copies."""
    keys, values = views(page, layout)
    shape = (-1, layout.kv_heads, layout.head_dim)
    return keys.transpose(0, 3, 1, 2).reshape(shape), values.transpose(0, 2, 1, 3).reshape(shape)
