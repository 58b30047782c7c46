"""One layer's KV pages on the CPU: where they lie, writing new tokens, attention over a list of blocks.

Exact (open) pages sit in numbered slots, sealed pages in the layer's extent; raw pages of both kinds have the layout of
`layout.PageLayout`, so one kernel reads either. A block list is an int64 array `[n, 4]`: sealed (0 or 1), slot or page index, first
position, tokens held; it is the same for every layer of a step.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .. import reference
from ..layout import F32, PageLayout
from ..registry import Call
from ..workspace import address
from . import attention
from .ops import FEW, SHARE_FROM, CpuOps


class Codec(Protocol):
    """What seals a page (`quant/kv.py`)."""

    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None: ...


class LayerPages:
    """`exact` and `sealed` are uint8 memory; scale, window (None: all) and softcap are the layer's attention."""

    # For many tokens; for one: partials, then merging.
    many, few, merge = attention.attend_many, (attention.attend_few,), attention.merge_few

    def __init__(self, ops: CpuOps, layout: PageLayout, exact: np.ndarray, sealed: np.ndarray, scale: float, window: int | None,
                 softcap: float | None) -> None:
        self.ops, self.layout, self.exact, self.sealed = ops, layout, exact, sealed
        self.scale, self.window, self.softcap = scale, window, softcap
        self.choice = ops.registry.select(Call("attend", "f32" if layout.stored == F32 else "f16")).candidate
        shared = (layout.layer_page_nbytes, layout.record_nbytes, layout.side_nbytes)
        # The slots of the argument blocks that never change; what a call adds is below.
        self._attend = np.zeros(attention.ATTEND_SLOTS, np.int64)
        self._attend[attention.KV_HEADS], self._attend[attention.HEAD_DIM] = layout.kv_heads, layout.head_dim
        self._attend[attention.WINDOW], self._attend[attention.DTYPE] = window or 0, layout.stored
        self._attend[attention.EXACT], self._attend[attention.PAGES] = address(exact), address(sealed)
        self._attend[attention.PAGE_STRIDE : attention.SIDE + 1] = shared
        self._attend[attention.SCRATCH : attention.PARTIALS + 1] = ops.scratch, ops.scratch_stride, ops.partials
        reals = self._attend.view(np.float64)
        reals[attention.SCALE], reals[attention.SOFTCAP] = scale, softcap or 0.0
        self._write = np.zeros(attention.WRITE_SLOTS, np.int64)
        self._write[attention.W_HEADS : attention.W_EXACT + 1] = layout.kv_heads, layout.head_dim, layout.stored, address(exact)
        self._write[attention.W_PAGE_STRIDE : attention.W_SIDE + 1] = shared
        self._attend_at, self._write_at = address(self._attend), address(self._write)

    def write(self, k: np.ndarray, v: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
        """k, v `[T, KVH * D]` into row `rows[t]` of exact slot `slots[t]`; both int64.

        Once per forward pass: the argument block is the layer's own and may wait until the pass is run.
        """
        ops = self.ops
        self._write[: attention.W_ROWS + 1] = ops.at(k), ops.at(v), len(k), *ops.addresses_of_step(slots, rows)
        ops.run(attention.write_kv, self._write_at, k.size >= SHARE_FROM)

    def seal(self, slot: int, page: int, layer: int, first_token: int, codec: Codec) -> None:
        """Let the codec write exact slot `slot` as sealed page `page`."""
        size = self.layout.layer_page_nbytes
        exact, sealed = self.exact[slot * size : (slot + 1) * size], self.sealed[page * size : (page + 1) * size]
        codec.seal(exact, self.layout, layer, first_token, sealed)

    def attend(self, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
        """q `[T, H * D]` at positions `position`... over the blocks -> `[T, H * D]`. `sinks`: a logit per head, float32 `[H]`, as in
        `reference.attend`; it must stay where it is until the collected jobs have run."""
        out = self.ops.workspace.take("attend", *q.shape)
        self.choice.run(self, q, position, blocks, sinks, out)
        return out

    def compiled(self, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, out: np.ndarray) -> None:
        """The kernels: few tokens one by one, so that a token's bits do not depend on how many came with it; more, tile by tile."""
        ops, block, width = self.ops, self._attend, q.shape[1]
        q_at, out_at, table = ops.at(q), ops.at(out), ops.addresses_of_step(blocks, blocks)[0]
        heads = width // self.layout.head_dim
        block[attention.SINKS] = address(sinks)
        if len(q) > FEW:
            block[: attention.HEADS + 1] = q_at, out_at, len(q), position, len(blocks), table, heads
            ops.run(self.many, self._attend_at)
            return
        changing = block if len(q) > 1 else None
        if changing is None:
            ops.refresh(self._move)
        for t in range(len(q)):
            block[: attention.HEADS + 1] = q_at + 4 * t * width, out_at + 4 * t * width, 1, position + t, len(blocks), table, heads
            for partials in self.few:
                ops.run(partials, self._attend_at, width * len(blocks) * attention.PAGE >= SHARE_FROM, changing)
            ops.run(self.merge, self._attend_at, width * len(blocks) >= SHARE_FROM, changing)

    def _move(self, position: int) -> None:
        self._attend[attention.POSITION] = position

    def reference(self, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, out: np.ndarray) -> None:
        """Plain softmax over the gathered keys and values."""
        self.ops.flush()
        keys, values, at = [], [], []
        for sealed, index, first, count in blocks:
            k, v = self.sides(sealed, index)
            keys.append(k[:count])
            values.append(v[:count])
            at.append(first + np.arange(count))
        split = q.reshape(len(q), -1, self.layout.head_dim)
        result = reference.attend(split, np.concatenate(keys), np.concatenate(values), position, np.concatenate(at), self.scale,
                                  self.window, self.softcap, sinks)
        out[:] = result.reshape(out.shape)

    def sides(self, sealed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V as stored, [PAGE, KVH, D], of a block."""
        layout = self.layout
        page = (self.sealed if sealed else self.exact)[index * layout.layer_page_nbytes : (index + 1) * layout.layer_page_nbytes]
        kind = np.float32 if layout.stored == F32 else np.float16
        bodies = [page[layout.key_offset(head) : layout.key_offset(head) + 2 * layout.side_nbytes].view(kind).reshape(2, -1)
                  for head in range(layout.kv_heads)]
        return (np.stack([body[0].reshape(layout.head_dim, -1).T for body in bodies], 1),
                np.stack([body[1].reshape(-1, layout.head_dim) for body in bodies], 1))
