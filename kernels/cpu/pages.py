"""One layer's KV pages on the CPU: where they lie, writing new tokens, attention over a list of blocks.

Exact (open) pages sit in numbered slots, sealed pages in the layer's extent; raw pages of both kinds have the layout of
`layout.PageLayout`, so one kernel reads either. A block list is an int64 array `[n, 4]`: sealed (0 or 1), slot or page index, first
position, tokens held; it is the same for every layer of a step.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .. import reference
from ..layout import F32, HEADER_NBYTES, STORED_BYTES, PageLayout
from ..registry import Call
from . import attention
from .intrinsics import HAS_HALF
from .ops import FEW, SHARE_FROM, CpuOps, address

SEALED, INDEX, FIRST, COUNT = range(4)


class Codec(Protocol):
    """What seals a page (`quant/kv.py`)."""

    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None: ...


class LayerPages:
    """`exact` and `sealed` are uint8 memory; scale, window (None: all) and softcap are the layer's attention."""

    def __init__(self, ops: CpuOps, layout: PageLayout, exact: np.ndarray, sealed: np.ndarray, scale: float, window: int | None,
                 softcap: float | None) -> None:
        self.ops, self.layout, self.exact, self.sealed = ops, layout, exact, sealed
        self.scale, self.window, self.softcap = scale, window, softcap
        self._bases = np.array([address(exact), address(sealed)], np.int64)
        self._row = layout.head_dim * STORED_BYTES[layout.stored]
        half = layout.stored != F32 and not HAS_HALF
        self.choice = "NumPy reference" if "reference" in ops.registry.select(Call("rotate")).candidate.name else (
            "compiled, half by shifts" if half else "compiled")

    def write(self, k: np.ndarray, v: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
        """k, v `[T, KVH * D]` into row `rows[t]` of exact slot `slots[t]`."""
        places = np.empty((len(slots), 2), np.int64)
        places[:, 0] = self._bases[0] + slots * self.layout.layer_page_nbytes + HEADER_NBYTES + rows * self._row
        places[:, 1] = places[:, 0] + self.layout.side_nbytes
        self.ops._args[:8] = (address(k), address(v), len(k), self.layout.kv_heads, self.layout.head_dim, address(places),
                              self.layout.record_nbytes, self.layout.stored)
        self.ops.pool.run(attention.write_kv, self.ops._where, k.size >= SHARE_FROM)

    def seal(self, slot: int, page: int, layer: int, first_token: int, codec: Codec) -> None:
        """Let the codec write exact slot `slot` as sealed page `page`."""
        size = self.layout.layer_page_nbytes
        exact, sealed = self.exact[slot * size : (slot + 1) * size], self.sealed[page * size : (page + 1) * size]
        codec.seal(exact, self.layout, layer, first_token, sealed)

    def attend(self, q: np.ndarray, position: int, blocks: np.ndarray) -> np.ndarray:
        """q `[T, H * D]` at positions `position`... over the blocks -> `[T, H * D]`."""
        out = self.ops.workspace.take("attend", *q.shape)
        if self.choice == "NumPy reference":
            return self._reference(q, position, blocks, out)
        table = np.empty((len(blocks), attention.COLUMNS), np.int64)
        table[:, attention.KEYS] = self._bases[blocks[:, SEALED]] + blocks[:, INDEX] * self.layout.layer_page_nbytes + HEADER_NBYTES
        table[:, attention.VALUES] = table[:, attention.KEYS] + self.layout.side_nbytes
        table[:, attention.HEAD_STRIDE] = self.layout.record_nbytes
        table[:, attention.FIRST :] = blocks[:, FIRST:]
        if len(q) > FEW:
            self._fill(q, out, position, table)
            self.ops.pool.run(attention.attend_many, self.ops._where)
            return out
        for t in range(len(q)):  # one by one: a token's bits then do not depend on how many came with it
            self._fill(q[t : t + 1], out[t : t + 1], position + t, table)
            self.ops.pool.run(attention.attend_few, self.ops._where, q.shape[1] * len(blocks) * attention.PAGE >= SHARE_FROM)
            self.ops.pool.run(attention.merge_few, self.ops._where, q.shape[1] * len(blocks) >= SHARE_FROM)
        return out

    def _fill(self, q: np.ndarray, out: np.ndarray, position: int, table: np.ndarray) -> None:
        """Write the argument block of the attend kernels. The first entry of a buffer is its address whatever the shape taken."""
        ops, heads = self.ops, q.shape[1] // self.layout.head_dim
        ops._args[:16] = (address(q), address(out), len(q), heads, self.layout.kv_heads, self.layout.head_dim, 0, self.window or 0, 0,
                          position, len(table), address(table), self.layout.stored, address(ops.workspace.take("scratch", 1)), ops._stride,
                          address(ops.workspace.take("partials", 1)))
        ops._reals[attention.SCALE], ops._reals[attention.SOFTCAP] = self.scale, self.softcap or 0.0

    def _reference(self, q: np.ndarray, position: int, blocks: np.ndarray, out: np.ndarray) -> np.ndarray:
        layout = self.layout
        keys, values, at = [], [], []
        for sealed, index, first, count in blocks:
            page = (self.sealed if sealed else self.exact)[index * layout.layer_page_nbytes : (index + 1) * layout.layer_page_nbytes]
            kind = np.float32 if layout.stored == F32 else np.float16
            side = [np.stack([page[start : start + layout.side_nbytes].view(kind).reshape(-1, layout.head_dim)[:count]
                              for start in map(offset, range(layout.kv_heads))], 1) for offset in (layout.key_offset, layout.value_offset)]
            keys.append(side[0])
            values.append(side[1])
            at.append(first + np.arange(count))
        split = q.reshape(len(q), -1, layout.head_dim)
        result = reference.attend(split, np.concatenate(keys), np.concatenate(values), position, np.concatenate(at), self.scale,
                                  self.window, self.softcap)
        out[:] = result.reshape(out.shape)
        return out
