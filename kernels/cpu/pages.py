"""One layer's KV pages on the CPU: storage, writing new tokens, and attention over a list of blocks.

Exact (open) pages are in numbered slots, sealed pages in the layer's extent; raw pages of both kinds have the layout of
`layout.PageLayout`, so one kernel reads either. A block list is an int64 array `[n, 4]`: sealed (0 or 1), slot or page index, first
position, tokens held; it is the same for every layer of a step.

From some page on, sealed pages may be on disk (`SpilledPages`). Attention then processes the table in several calls: first what is in
memory, then run after run of pages for as long as each is leased, then the open pages. Every kernel gives the same result either way.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from copy import copy
from functools import partial
from typing import Protocol

import numpy as np

from .. import raw_pages, reference
from ..compile import Kernel
from ..layout import F32, PageLayout
from ..registry import Call
from ..workspace import address
from . import attention, attention_decode, compressed
from .compressed import CompressedKeys
from .indexer import Chosen, attend
from .kv.selective import Selective
from .ops import FEW_TOKENS, CpuOps
from .row_ops import MIN_PARALLEL_SIZE


class Codec(Protocol):
    """Seals pages (`quant/kv.py`)."""

    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None: ...


class SpilledPages(Protocol):
    """The pages of one layer that are on disk (`offload/page_stream.py`)."""

    first: int  # pages from this one on
    lead: int  # rows of the block table before page 0
    staging: np.ndarray  # memory in which the next page is sealed

    def reads(self) -> tuple[int, int]:
        """Which of them the current pass reads, [first, end)."""

    def come(self) -> Generator[Sequence[tuple[int, int, int]]]:
        """Those pages, in order, as runs (first page, end, address of the first), as they are loaded. A run stays valid until the next is
        requested."""

    def page(self, index: int) -> np.ndarray:
        """A copy of one page."""

    most: int  # pages that `fetch` yields at once; 0 if all are read in runs

    def fetch(self, pages: Sequence[int], among: int = 0) -> Iterator[list[tuple[int, int]]]:
        """(page, address) of each, as they are loaded, those already in memory first. They stay valid until the next fetch. `among`: how
        many they were selected from."""

    def prefetch(self, pages: Sequence[int], keep: Sequence[int]) -> None:
        """Pages that may be fetched next."""


class LayerPages:
    """`exact` and `sealed` are uint8 memory; scale, window (None: all) and softcap are the layer's attention."""

    # Kernels for many tokens, for few (partials), and for merging the partials of few.
    prefill_kernel, decode_kernels, merge_kernel = attention.attend_prefill, (attention_decode.attend_decode,
                                                                              ), attention_decode.merge_decode
    base_slot = attention.PAGES  # argument slot of the address of page 0
    by_page_slot: int | None = None  # argument slot that requests a partial per page, if pages are otherwise merged while being read
    spilled: SpilledPages | None = None
    selective: Selective | None = None
    ends: np.ndarray | None = None  # `ends` and `among` of the last call of `attend`
    among: np.ndarray | None = None

    def __init__(self, ops: CpuOps, layout: PageLayout, exact: np.ndarray, sealed: np.ndarray, scale: float, window: int | None,
                 softcap: float | None) -> None:
        self.ops, self.layout, self.exact, self.sealed = ops, layout, exact, sealed
        self.scale, self.window, self.softcap = scale, window, softcap
        self.choice = ops.registry.select(Call("attend", "f32" if layout.stored == F32 else "f16")).candidate
        shared = (layout.layer_page_nbytes, layout.record_nbytes, layout.side_nbytes)
        parts = layout.rows, layout.part_nbytes
        # The slots of the argument blocks that never change. `attend` and `write` set the others.
        self._attend = np.zeros(attention.ATTEND_SLOTS, np.int64)
        self._attend[attention.KV_HEADS], self._attend[attention.HEAD_DIM] = layout.kv_heads, layout.head_dim
        self._attend[attention.WINDOW], self._attend[attention.DTYPE] = window or 0, layout.stored
        self._attend[attention.EXACT], self._attend[attention.PAGES] = address(exact), address(sealed)
        self._attend[attention.PAGE_STRIDE : attention.PART_STRIDE + 1] = *shared, *parts
        self._attend[attention.SCRATCH : attention.PARTIALS + 1] = ops.scratch, ops.scratch_stride, ops.partials
        reals = self._attend.view(np.float64)
        reals[attention.SCALE], reals[attention.SOFTCAP] = scale, softcap or 0.0
        self._write = np.zeros(attention.WRITE_SLOTS, np.int64)
        self._write[attention.W_HEADS : attention.W_EXACT + 1] = layout.kv_heads, layout.head_dim, layout.stored, address(exact)
        self._write[attention.W_PAGE_STRIDE : attention.W_PART_STRIDE + 1] = *shared, *parts
        self._attend_at, self._write_at = address(self._attend), address(self._write)

    def reader(self, ops: CpuOps | None = None, window: int | None = None) -> LayerPages:
        """The same pages for another layer that attends to them, with its own argument blocks, since jobs of both are pending together.
        `ops`: those of a layer of another model, whose workspace it uses and which sees the pages through its own `window`."""
        reader = copy(self)
        reader._attend = self._attend.copy()
        reader._attend_at = address(reader._attend)
        if ops is not None:
            reader.ops, reader.window, reader._attend[attention.WINDOW] = ops, window, window or 0
            reader._attend[attention.SCRATCH : attention.PARTIALS + 1] = ops.scratch, ops.scratch_stride, ops.partials
        return reader

    def write(self, k: np.ndarray, v: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
        """k, v `[T, KVH * D]` into row `rows[t]` of exact slot `slots[t]`; both int64."""
        ops = self.ops
        self._write[: attention.W_ROWS + 1] = ops.address_of(k), ops.address_of(v), len(k), *ops.addresses_of_step(slots, rows)
        ops.run(attention.write_kv, self._write_at, k.size >= MIN_PARALLEL_SIZE, self._write)

    def seal(self, slot: int, page: int, layer: int, first_token: int, codec: Codec) -> None:
        """Let the codec write exact slot `slot` as sealed page `page`."""
        self._note_abstract(slot, page)
        codec.seal(self._slot(slot), self.layout, layer, first_token, self._page_memory(page))

    def _note_abstract(self, slot: int, page: int) -> None:
        if self.selective is not None and page >= self.spilled.first:
            self.selective.note(page, *self.sides(0, slot))

    def read_page(self, page: int) -> np.ndarray:
        """The bytes of a sealed page, uint8, a copy: the input of `write_page` for another storage of this layout."""
        return self._sealed_page(page).copy()

    def write_page(self, page: int, data: np.ndarray) -> None:
        """Write the bytes of a sealed page to its place."""
        self._page_memory(page)[:] = data

    def read_slot(self, slot: int) -> np.ndarray:
        """The bytes of an exact slot, uint8 `[layout.layer_page_nbytes]`, a copy; fewer for the last slot if it has fewer parts."""
        return self._slot(slot).copy()

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        target = self._slot(slot)
        target[:] = data[: len(target)]

    def _slot(self, slot: int) -> np.ndarray:
        return self.exact[slot * self.layout.layer_page_nbytes : (slot + 1) * self.layout.layer_page_nbytes]

    def _page_memory(self, page: int) -> np.ndarray:
        """The address at which a page is sealed."""
        return self.spilled.staging if self._is_spilled(page) else self._resident_page(page)

    def _sealed_page(self, page: int) -> np.ndarray:
        """The content of a sealed page; a copy if it is on disk."""
        return self.spilled.page(page) if self._is_spilled(page) else self._resident_page(page)

    def _is_spilled(self, page: int) -> bool:
        return self.spilled is not None and page >= self.spilled.first

    def _resident_page(self, page: int) -> np.ndarray:
        return self.sealed[page * self.stride : (page + 1) * self.stride]

    def attend(self, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None = None,
               out: np.ndarray | None = None, ends: np.ndarray | None = None, among: np.ndarray | None = None) -> np.ndarray:
        """q `[T, H * D]` at positions `position`... over the blocks -> `[T, H * D]`, in `out` if given. `sinks`: a logit per head, float32
        `[H]`, as in `reference.attend`, and `ends` and `among` int64 `[T]`, for unpacked pages in memory; all must stay alive until the
        collected jobs have run."""
        out, self.ends, self.among = self.attended(q) if out is None else out, ends, among
        self._attend[attention.LAST_VISIBLE : attention.VISIBLE + 1] = address(ends), address(among)
        self.choice.run(self, q, position, blocks, sinks, out)
        return out

    def attend_chosen(self, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, chosen: Chosen, same: bool,
                      out: np.ndarray | None = None) -> np.ndarray:
        """`attend` over the units `chosen` per token; `same`: keys are values."""
        out = self.attended(q) if out is None else out
        attend(self, q, position, blocks, sinks, out, chosen, same)
        return out

    def attend_compressed(self, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, keys: CompressedKeys,
                          chosen: Chosen | None, out: np.ndarray | None = None) -> np.ndarray:
        """`attend` over the tokens within the window and over compressed `keys`; `chosen`: those selected per token, None for all."""
        out = self.attended(q) if out is None else out
        compressed.attend(self, q, position, blocks, sinks, keys, chosen, out)
        return out

    def attended(self, q: np.ndarray) -> np.ndarray:
        """Buffer for the output of `attend` of queries `[T, H * D]`."""
        return self.ops.workspace.take("attend", *q.shape)

    def compiled(self, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, out: np.ndarray) -> None:
        """Run the kernels: few tokens one by one, so that a token's bits do not depend on how many were processed together; more, tile by
        tile."""
        ops, block, (tokens, width) = self.ops, self._attend, q.shape
        table = ops.addresses_of_step(blocks, blocks)[0]
        block[attention.SINKS] = address(sinks)
        if tokens > (FEW_TOKENS if self.spilled is None and self.ends is None else 1):
            ops.discard_recording()
        if self.spilled is not None:
            if (read := self.spilled.reads())[0] < read[1]:
                self._attend_with_spilled(read, q, position, blocks, table, out)
                return
            if self.selective is not None and self.window is None and (end := int(blocks[:, attention.SEALED].sum())) > self.spilled.first:
                self.selective.attend(q, position, blocks, table, out, end)
                return
        if tokens > FEW_TOKENS or self.ends is not None:
            block[: attention.TO + 1] = (ops.address_of(q), ops.address_of(out), tokens, position, len(blocks), table,
                                         width // self.layout.head_dim, 0,
                                         len(blocks))
            # Copied: a pass may contain several texts, each with its own attention.
            ops.run(self.prefill_kernel, self._attend_at, True, block)
            return
        calls = self.calls_by_group(block, q, position, blocks, table, out)
        for call in calls:
            self.run_few([(kernel, call) for kernel in (*self.decode_kernels, self.merge_kernel)], width * len(blocks))

    def calls_by_group(self, block: np.ndarray, q: np.ndarray, position: int, blocks: np.ndarray, table: int,
                       out: np.ndarray) -> np.ndarray:
        """Argument blocks like `block` for few tokens: one per group of tokens whose partials fit."""
        ops, (tokens, width) = self.ops, q.shape
        heads = width // self.layout.head_dim
        limit = attention_decode.max_tokens(ops.workspace.floats["partials"], heads, self.layout, len(blocks))
        begins = np.arange(0, tokens, limit)
        calls = np.repeat(block[None], len(begins), 0)
        calls[:, attention.Q], calls[:, attention.OUT] = ops.address_of(q) + 4 * width * begins, ops.address_of(out) + 4 * width * begins
        calls[:, attention.TOKENS], calls[:, attention.POSITION] = np.minimum(limit, tokens - begins), position + begins
        calls[:, attention.BLOCKS : attention.TO + 1] = len(blocks), table, heads, 0, len(blocks)
        ops.keep_alive(calls)
        ops.refresh(partial(_shift_positions, calls[:, attention.POSITION]))
        return calls

    def run_few(self, jobs: Sequence[tuple[Kernel, np.ndarray]], width: int) -> None:
        """Run kernels in order, the last of which merges partials of `width` numbers per token; parallel if that is worth it."""
        for index, (kernel, call) in enumerate(jobs):
            numbers = int(call[attention.TOKENS]) * width * (1 if index == len(jobs) - 1 else attention.PAGE)
            self.ops.run(kernel, address(call), numbers >= MIN_PARALLEL_SIZE)

    def _attend_with_spilled(self, read: tuple[int, int], q: np.ndarray, position: int, blocks: np.ndarray, table: int,
                             out: np.ndarray) -> None:
        """`compiled` with on-disk pages between those in memory. Pending jobs run while the first of them are loaded."""
        calls, lead = self.calls(q, position, blocks, table, out), self.spilled.lead
        self.enqueue_rows(calls, 0, lead + read[0])
        self.ops.host_step(partial(self._attend_loaded_runs, calls))
        self.enqueue_rows(calls, lead + read[1], len(blocks))
        self.enqueue_merge(calls)

    def _attend_loaded_runs(self, calls: Sequence[np.ndarray]) -> None:
        """Attention over the pages that are read from disk, all of them sealed."""
        lead, kernels = self.spilled.lead, self.decode_kernels[-1:]
        with closing(self.spilled.come()) as loaded:
            for runs in loaded:
                for begin, end, where in runs:
                    self.enqueue_rows(calls, lead + begin, lead + end, where - begin * self.stride, kernels)
                self.ops.flush()

    def calls(self, q: np.ndarray, position: int, blocks: np.ndarray, table: int, out: np.ndarray) -> list[np.ndarray]:
        """Argument blocks for attention in several calls: one for each of few tokens, or one for many."""
        ops, (tokens, width) = self.ops, q.shape
        heads, is_few = width // self.layout.head_dim, tokens <= FEW_TOKENS
        calls = [self._copy_block(self._attend) for _ in range(tokens if is_few else 1)]
        for t, call in enumerate(calls):
            call[: attention.HEADS + 1] = (ops.address_of(q) + 4 * t * width, ops.address_of(out) + 4 * t * width, 1 if is_few else tokens,
                                           position + t,
                                           len(blocks), table, heads)
            if is_few:  # a token's partials: a row and its (m, l) per head and block
                call[attention.PARTIALS] += 4 * t * len(blocks) * (width + 2 * heads)
            else:
                call[attention.STATE] = address(ops.workspace.take("state", 1))
        return calls

    def enqueue_rows(self, calls: Sequence[np.ndarray], begin: int, end: int, base: int | None = None,
                     kernels: Sequence[Kernel] | None = None) -> None:
        """Enqueue attention over rows [begin, end) of the table; `base`: address of page 0, if not in memory's extent; `kernels`: the
        kernels for few tokens, if not all are needed."""
        for call in calls if begin < end else ():
            block = self.rows_block(call, begin, end)
            if base is not None:
                block[self.base_slot] = base
            for kernel in (kernels or self.decode_kernels) if call[attention.STATE] == 0 else (self.prefill_kernel,):
                self.ops.run(kernel, address(block))

    def rows_block(self, call: np.ndarray, begin: int, end: int) -> np.ndarray:
        """The argument block for rows [begin, end) of the table."""
        block = self._copy_block(call)
        block[attention.FROM], block[attention.TO] = begin, end
        return block

    def enqueue_merge(self, calls: Sequence[np.ndarray]) -> None:
        """Enqueue merging of partials, for few tokens."""
        for call in calls:
            if call[attention.STATE] == 0:
                self.ops.run(self.merge_kernel, address(self._copy_block(call)))

    def scattered(self, call: np.ndarray, blocks: np.ndarray) -> ScatteredPages:
        """Attention over scattered on-disk pages for the one token of `call`, where partials merge by page."""
        block, table = self._copy_block(call), blocks.copy()
        block[attention.TABLE] = address(table)
        return ScatteredPages(self, block, table)

    def _copy_block(self, call: np.ndarray) -> np.ndarray:
        """A job's own copy of an argument block, which may be replayed from another position."""
        block = call.copy()
        self.ops.keep_alive(block)
        self.ops.refresh(partial(block.__setitem__, attention.POSITION))
        return block

    @property
    def stride(self) -> int:
        """Bytes from a sealed page to the next."""
        return self.layout.layer_page_nbytes

    def reference(self, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, out: np.ndarray) -> None:
        """Plain softmax over the gathered keys and values."""
        self.ops.flush()
        keys, values, at = self.gathered(blocks)
        split = q.reshape(len(q), -1, self.layout.head_dim)
        result = reference.attend(split, keys, values, position, at, self.scale, self.window, self.softcap, sinks, self.ends,
                                  self.among)
        out[:] = result.reshape(out.shape)

    def gathered(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """K and V in the stored type, [n, KVH, D], of all tokens of the blocks, and their positions."""
        sides = [[side[:count] for side in self.sides(sealed, index)] for sealed, index, _, count in blocks]
        at = [first + np.arange(count) for _, _, first, count in blocks]
        return *map(np.concatenate, zip(*sides, strict=True)), np.concatenate(at)

    def sides(self, sealed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V in the stored type, [PAGE, KVH, D], of a block; fewer tokens for a slot with fewer parts."""
        return raw_pages.keys_and_values(self._sealed_page(index) if sealed else self._slot(index), self.layout)


def _shift_positions(positions: np.ndarray, position: int) -> None:
    """Shift ascending positions so that the first is `position`, in place."""
    positions += position - int(positions[0])


class ScatteredPages:
    """Attention of one token over scattered on-disk pages, some at a time: `call` is its argument block, `table` a block table of its own
    whose indices are byte offsets."""

    def __init__(self, pages: LayerPages, call: np.ndarray, table: np.ndarray) -> None:
        self._pages, self._call, self._table, self._call_address = pages, call, table, address(call)
        call[pages.base_slot + 1] = 1  # stride of pages

    def enqueue(self, loaded: Sequence[tuple[int, int]]) -> None:
        """Enqueue attention over pages, each with its address. It must run before the next pages are enqueued."""
        table, call, lead, loaded = self._table, self._call, self._pages.spilled.lead, sorted(loaded)
        begin, end, base = lead + loaded[0][0], lead + loaded[-1][0] + 1, loaded[0][1]
        table[begin:end, attention.SEALED] = attention.SKIPPED
        for page, where in loaded:
            # A skipped row gets the index of the next row that is not: kernels prefetch it.
            table[begin : lead + page + 1, attention.INDEX] = where - base
            table[lead + page, attention.SEALED] = 1
            begin = lead + page + 1
        call[attention.FROM], call[attention.TO], call[self._pages.base_slot] = lead + loaded[0][0], end, base
        self._pages.ops.run(self._pages.decode_kernels[-1], self._call_address)
