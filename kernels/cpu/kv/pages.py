"""One layer's KV cache on the CPU with packed sealed pages: exact slots as in `pages.py` above, packed records behind them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...kv_layout import PackedLayout
from ...layout import PageLayout
from .. import attention, attention_decode
from ..inner_loops import TILE_COLUMNS
from ..ops import CpuOps, address
from ..pages import LayerPages
from . import arguments
from .decode import attend_packed_decode, page_of_eight, page_of_four
from .merge import merge_packed
from .prefill import attend_packed_prefill
from .softmax_weights import tables


class Basis(Protocol):
    """Rotations of queries and outputs (`quant/kv_basis.py`): [H, D, D] each, and K's channel scales [H, D]."""

    v_matrix: np.ndarray
    k_inverse: np.ndarray
    v_inverse: np.ndarray
    k_scale: np.ndarray


class Codec(Protocol):
    """Packs pages of this layer (`quant/kv.py`)."""

    basis: Basis
    better: Codec | None
    is_packed: bool

    def layout(self, kv_heads: int, head_dim: int) -> PackedLayout: ...
    def open(self, page: np.ndarray, kv_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]: ...
    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None: ...


class PackedPages(LayerPages):
    """`exact` holds raw slots of `layout`, `sealed` records in the codec's layout."""

    prefill_kernel, merge_kernel = attend_packed_prefill, merge_packed
    decode_kernels = (attention_decode.attend_decode, attend_packed_decode)
    base_slot, by_page_slot = arguments.PACKED, arguments.BY_PAGE

    def __init__(self, ops: CpuOps, layout: PageLayout, exact: np.ndarray, sealed: np.ndarray, scale: float, window: int | None,
                 softcap: float | None, codec: Codec) -> None:
        super().__init__(ops, layout, exact, np.empty(0, np.uint8), scale, window, softcap)
        packed = self.packed = codec.layout(layout.kv_heads, layout.head_dim)
        self.records, self.codec, self.sealed_by = sealed, codec, codec
        self._bases = (_padded(codec.basis.k_inverse), _padded(codec.basis.v_inverse.swapaxes(1, 2)),
                       np.ascontiguousarray(codec.basis.k_scale, np.float32), tables())
        block = np.zeros(arguments.PACKED_SLOTS, np.int64)
        block[: attention.ATTEND_SLOTS] = self._attend
        block[attention.PAGES] = 0
        self._heads = np.array([(at, record.record_nbytes, *record.offsets)
                                for at, record in zip(packed.head_offsets, packed.records, strict=False)], np.int64)
        block[arguments.PACKED : arguments.K_ROTATION] = address(sealed), packed.layer_page_nbytes, address(self._heads)
        block[arguments.K_ROTATION : arguments.PAGE_OF_FOUR] = [address(basis) for basis in self._bases]
        block[arguments.PAGE_OF_FOUR : arguments.BY_PAGE] = page_of_four.address, page_of_eight.address
        self._attend, self._attend_at = block, address(block)

    def seal(self, slot: int, page: int, layer: int, first_token: int, codec: object) -> None:
        """Pack exact slot `slot` into record place `page`, or let `sealed_by` record it for later."""
        self._note_abstract(slot, page)
        self.sealed_by.seal(self._slot(slot), self.layout, layer, first_token, self._page_memory(page))

    @property
    def stride(self) -> int:
        return self.packed.layer_page_nbytes

    def _resident_page(self, page: int) -> np.ndarray:
        return self.records[page * self.stride : (page + 1) * self.stride]

    def sides(self, sealed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V, float32 [PAGE, KVH, D], of a block."""
        if not sealed:
            return super().sides(sealed, index)
        k, v = self.codec.open(self._sealed_page(index), self.layout.kv_heads, self.layout.head_dim)
        return k.swapaxes(0, 1), v.swapaxes(0, 1)


def pages_of(ops: CpuOps, layout: PageLayout, exact: np.ndarray, sealed: np.ndarray, scale: float, window: int | None,
             softcap: float | None, codec: Codec | None, better_pages: np.ndarray | None) -> LayerPages:
    """A layer's page storage: raw, packed, or packed by two codecs, in which case pages of the `better` one are in `better_pages`."""
    if codec is None or not codec.is_packed:
        return LayerPages(ops, layout, exact, sealed, scale, window, softcap)
    if better_pages is None:
        return PackedPages(ops, layout, exact, sealed, scale, window, softcap, codec)
    from .mixed_codecs import MixedPages

    return MixedPages(ops, layout, exact, sealed, scale, window, softcap, codec, better_pages, codec.better)


def _padded(matrices: np.ndarray) -> np.ndarray:
    """float32 [H, D, D] with rows padded to the kernels' tile width."""
    heads, size, _ = matrices.shape
    out = np.zeros((heads, size, -(-size // TILE_COLUMNS) * TILE_COLUMNS), np.float32)
    out[:, :, :size] = matrices
    return out
