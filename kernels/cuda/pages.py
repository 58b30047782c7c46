"""One layer's KV pages on a torch device: the bytes of `layout.PageLayout` as strided tensors.

Exact slots and sealed pages are uint8 memory with records byte-identical to the CPU's, so a page can move between tiers unchanged; K and V
are strided views `[page, KVH, 128, D]` of it. Attention gathers the visible pages of a layer before reading them: one temporary as large as
what is seen, and no kernel that follows a table of addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..layout import F32, HEADER_NBYTES, STORED_BYTES, PageLayout
from .attention import attend_blocks, finish, merged_blocks, with_keys
from .kernel_choice import FEW_TOKENS, KernelChoice

if TYPE_CHECKING:
    from .compressed import TorchKeys

SEALED, INDEX, FIRST, COUNT = range(4)
HALF_MAX = 65504.0
TOLERANCE = 1e-4  # relative to the largest result: rounding of scores of some hundreds, after exp


class Codec(Protocol):
    """Seals pages (`quant/kv.py`), on the host."""

    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None: ...


def saturated(x: torch.Tensor) -> torch.Tensor:
    """Finite values clamped to the half-precision range; infinity and NaN unchanged."""
    return torch.where(x.abs() == math.inf, x, x.clamp(-HALF_MAX, HALF_MAX))


def keys_and_values(memory: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of every part of the layer-pages in uint8 `memory`, as views [parts, KVH, rows, D]; K is stored channel-major, V token-major.
    """
    item = STORED_BYTES[layout.stored]
    typed = memory.view(torch.float32 if layout.stored == F32 else torch.float16)
    shape = (len(memory) // layout.part_nbytes, layout.kv_heads, layout.rows, layout.head_dim)
    outer = (layout.part_nbytes // item, layout.record_nbytes // item)
    keys = typed.as_strided(shape, (*outer, 1, layout.rows), HEADER_NBYTES // item)
    return keys, typed.as_strided(shape, (*outer, layout.head_dim, 1), (HEADER_NBYTES + layout.side_nbytes) // item)


def pages_of(side: torch.Tensor, index: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Pages `index` [n] of the views from `keys_and_values`: [n, KVH, 128, D], a copy. If the last slot is truncated, its missing part
    repeats the existing one."""
    if layout.parts == 1:
        return side[index]
    parts = index[:, None] * layout.parts + torch.arange(layout.parts, device=index.device)
    return side[parts.clamp(max=len(side) - 1)].swapaxes(1, 2).flatten(2, 3)


def visible_span(blocks: np.ndarray, position: int, tokens: int, window: int | None) -> slice:
    """The blocks that any of `tokens` queries from `position` on can see."""
    is_visible = blocks[:, FIRST] < position + tokens
    if window:
        is_visible &= blocks[:, FIRST] + blocks[:, COUNT] - 1 > position - window
    visible = np.flatnonzero(is_visible)
    return slice(visible[0], visible[-1] + 1)


def runs(is_sealed: np.ndarray) -> list[slice]:
    """Blocks split where sealed and exact ones meet."""
    cuts = [0, *(np.flatnonzero(np.diff(is_sealed)) + 1), len(is_sealed)]
    return [slice(begin, end) for begin, end in zip(cuts, cuts[1:])]


class TorchLayerPages:
    """`exact` and `sealed` are uint8 tensors on the device; scale, window (None: all) and softcap are the layer's attention.

    `upload` copies a NumPy array to the device, once per step for arrays shared by all layers; `places` creates positions there.
    """

    choice = "torch"

    def __init__(self, upload: Callable[[np.ndarray], torch.Tensor], layout: PageLayout, exact: torch.Tensor, sealed: torch.Tensor,
                 scale: float, window: int | None, softcap: float | None,
                 kernel_choice: KernelChoice, make_positions: Callable[[int, int], torch.Tensor] | None = None) -> None:
        self._positions = make_positions or (lambda position, tokens: torch.arange(position, position + tokens, device=exact.device))
        self.upload, self.layout, self.exact, self.sealed = upload, layout, exact, sealed
        self.scale, self.window, self.softcap, self._kernel_choice = scale, window, softcap, kernel_choice
        self._exact_sides, self._sealed_sides = keys_and_values(exact, layout), keys_and_values(sealed, layout)

    def reader(self) -> TorchLayerPages:
        """The same pages for another layer that attends to them."""
        return self

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: np.ndarray, rows: np.ndarray) -> None:
        """k, v `[T, KVH * D]` into row `rows[t]` of exact slot `slots[t]`. As on the CPU, finite values saturate as halves, and infinity is
        kept: a page with one is refused when it is packed."""
        slot, row = self.upload(slots), self.upload(rows)
        if len(k) > FEW_TOKENS:
            self._put(k, v, slot, row)
            return
        by_triton = lambda: _kernels().write(k, v, slot, row, self.exact, self.layout)  # noqa: E731
        self._kernel_choice.chosen(("write", self.layout), "keeps keys and values", by_triton, lambda: self._put(k, v, slot, row),
                                   lambda: (self._rows_of(by_triton(), slot, row), self._rows_of(self._put(k, v, slot, row), slot, row)))

    def _put(self, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """`write` with torch ops; returns the slots' memory."""
        layout = self.layout
        part, row = slot * layout.parts + row // layout.rows, row % layout.rows
        for side, new in zip(self._exact_sides, (k, v)):
            new = new.unflatten(1, (layout.kv_heads, layout.head_dim))
            side[part, :, row] = (new if layout.stored == F32 else saturated(new)).to(side.dtype)
        return self.exact

    def _rows_of(self, _: torch.Tensor, slot: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """The current contents of these rows."""
        part, row = slot * self.layout.parts + row // self.layout.rows, row % self.layout.rows
        return torch.stack([side[part, :, row] for side in self._exact_sides]).float()

    def seal(self, slot: int, page: int, layer: int, first_token: int, codec: Codec) -> None:
        """Let the codec write exact slot `slot` as sealed page `page`; the bytes pass through the host."""
        record = np.zeros(self.layout.layer_page_nbytes, np.uint8)
        codec.seal(self.read_slot(slot), self.layout, layer, first_token, record)
        self.write_page(page, record)

    def read_page(self, page: int) -> np.ndarray:
        """The bytes of a sealed page, uint8 on the host: the input of `write_page` for another storage of this layout."""
        return self._sealed_page(page).cpu().numpy().copy()

    def write_page(self, page: int, data: np.ndarray) -> None:
        """Write the bytes of a sealed page to its place."""
        self._sealed_page(page).copy_(torch.from_numpy(np.array(data)))

    def read_slot(self, slot: int) -> np.ndarray:
        """The bytes of an exact slot, uint8 on the host."""
        return self._slot(slot).cpu().numpy().copy()

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        target = self._slot(slot)
        target.copy_(torch.from_numpy(np.array(data[: len(target)])))

    def _slot(self, slot: int) -> torch.Tensor:
        return self.exact[slot * self.layout.layer_page_nbytes : (slot + 1) * self.layout.layer_page_nbytes]

    def _sealed_page(self, page: int) -> torch.Tensor:
        return self.sealed[page * self.layout.layer_page_nbytes : (page + 1) * self.layout.layer_page_nbytes]

    def attend(self, q: torch.Tensor, position: int, blocks: np.ndarray, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """q `[T, H * D]` at positions `position`... over the blocks, in position order -> `[T, H * D]`. `sinks`: logits `[H]`."""
        tokens, span = len(q), visible_span(blocks, position, len(q), self.window)
        table = self.upload(blocks)[span]
        positions, depth = self._positions(position, tokens), self.layout.head_dim

        def by_torch() -> torch.Tensor:
            keys, values = self._gather(blocks[span, SEALED], table[:, INDEX])
            return attend_blocks(q.unflatten(1, (-1, depth)), keys, values, table[:, FIRST], table[:, COUNT], positions, self.scale,
                                 self.window, self.softcap, sinks)

        queries = q.numel() // (depth * self.layout.kv_heads)
        if tokens > FEW_TOKENS or self.layout.parts > 1:
            return by_torch()
        by_triton = lambda: _kernels("triton_attention").attend(q, table, positions, self.exact, self.sealed, self.layout, self.scale,  # noqa: E731
                                                       self.window, self.softcap, sinks)
        kind = "attend", self.layout, queries // tokens, bool(self.softcap), sinks is not None
        return self._kernel_choice.chosen(kind, "attends", by_triton, by_torch, lambda: (by_triton(), by_torch()), TOLERANCE)

    def attend_compressed(self, q: torch.Tensor, position: int, blocks: np.ndarray, sinks: torch.Tensor | None, keys: TorchKeys,
                          visible: torch.Tensor | None) -> torch.Tensor:
        """`attend` over the tokens within the window and over compressed `keys`; `visible`: which of them each token sees, None for all."""
        tokens, span, shape = len(q), visible_span(blocks, position, len(q), self.window), keys.shape
        table, positions, split = self.upload(blocks)[span], self._positions(position, tokens), q.unflatten(1, (-1, self.layout.head_dim))
        near = merged_blocks(split, *self._gather(blocks[span, SEALED], table[:, INDEX]), table[:, FIRST], table[:, COUNT], positions,
                             self.scale, self.window, self.softcap)
        rows = keys.rows[: shape.keys(position + tokens)]
        return finish(with_keys(near, split, rows, positions, shape.tokens_per_key, self.scale, visible), tokens, 1, sinks)

    def _gather(self, is_sealed: np.ndarray, index: torch.Tensor) -> Iterator[torch.Tensor]:
        """K, then V, of the blocks in order: one copy per run of sealed or exact blocks."""
        for exact, sealed in zip(self._exact_sides, self._sealed_sides):
            yield torch.cat([pages_of(sealed if is_sealed[run.start] else exact, index[run], self.layout) for run in runs(is_sealed)])


def _kernels(name: str = "triton_stages") -> ModuleType:
    return import_module(f".{name}", __package__)
