"""The KV cache, composed of a codec, a page pool and a policy. It does not hand out K and V; it answers `attend`.

Tokens are stored on a fixed page grid: the first S are sinks, then page i holds the 128 tokens from S + 128 i on. At least the newest W
tokens are exact, in open pages with a slot each (`kv/exact_slots.py`). When the last token of a page is W tokens old, the codec seals the
page into the pool; a packed page is never reopened. A chunk of a prompt ends on a page boundary, and reads pages sealed before it began as
packed. So the result depends on positions, not on how the prompt was chunked.

For attention, a block is (0 for an open page, else the kind of a sealed page; slot or page; first position; number of tokens). All layers
of a step share one list of blocks.

Layers of linear attention have a recurrent state instead of pages (`kv/states.py`). The cache can only be truncated to where both allow it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from .. import EffllmError
from ..kernels.layout import PAGE, PageLayout
from ..offload.direct_io import Interrupted
from ..offload.page_pool import PagePool
from ..quant.kv import PackedCodec, RawCodec
from .kv.attention_probes import AttentionProbes
from .kv.cache_bytes import CacheBytes
from .kv.cache_components import LayerPages, Step, TokenSelection
from .kv.cache_shape import CacheShape
from .kv.exact_slots import ExactSlots
from .kv.layer_cache import LayerCache
from .kv.states import TAIL, LayerStates, States
from .policy.keep import Action, PageStats, Policy, max_upgraded
from .prefill_chunks import chunk_lengths

if TYPE_CHECKING:
    from ..kernels.cpu.indexer import Chosen
    from ..quant.kv_seal import Sealer
    from .kv.bidirectional import Ends

NO_STATES: Mapping[int, LayerStates] = MappingProxyType({})
NO_READERS: Mapping[int, LayerPages] = MappingProxyType({})
NO_SELECTIONS: Mapping[int, TokenSelection] = MappingProxyType({})


class KVCache(CacheBytes):
    """The cache of one sequence, as returned by `build_cache`; `n` tokens are in it.

    `layers`: the storage of the layers with pages, in layer order.
    `codecs`: they seal the pages of these layers.
    `policy`: decides which pages get more bits. `probes`: records the attention scores that it needs.
    `layouts`, `exact`: layout and memory of the exact tokens of these layers.
    `sealers`: flushed when a page has been sealed.
    `pool`: the memory of sealed pages; those of `spilling` layers may be on disk.
    `states`: recurrent states. `stateful`: by layer, those that have one; layers in `with_pages_and_state` have pages as well.
    `readers`: by layer, those that attend to an earlier layer's keys and values.
    `token_selections`: sparse attention, by index in `layers`. `reader_selections`: that of `readers`, by layer.
    `ends`: of the current pass, see `attention_ends`.
    """

    ends: Ends | None = None

    def __init__(self, layers: Sequence[LayerPages], codecs: Sequence[RawCodec | PackedCodec], policy: Policy, shape: CacheShape,
                 layouts: Sequence[PageLayout], exact: Sequence[np.ndarray] = (), sealers: Sequence[Sealer] = (),
                 pool: PagePool | None = None, probes: AttentionProbes | None = None, spilling: Sequence[LayerPages] = (),
                 states: States | None = None, stateful: Mapping[int, LayerStates] = NO_STATES,
                 readers: Mapping[int, LayerPages] = NO_READERS, with_pages_and_state: Collection[int] = (),
                 token_selections: Mapping[int, TokenSelection] = NO_SELECTIONS,
                 reader_selections: Mapping[int, TokenSelection] = NO_SELECTIONS) -> None:
        self._sealers, self.pool, self.probes, self._spilling = sealers, pool, probes, spilling
        self.shape, self.codecs, self.policy, self.layouts = shape, codecs, policy, layouts
        self.slots = ExactSlots(shape, layouts, exact)
        self._layers = [LayerCache(pages, self, token_selection=token_selections.get(position)) for position, pages in enumerate(layers)]
        self.token_selections = token_selections
        self.chosen: Chosen | None = None  # of the current pass, in layers with sparse attention; None: all tokens
        reading = {index: LayerCache(reader_pages, self, token_selection=reader_selections.get(index))
                   for index, reader_pages in readers.items()}
        self.states, paged, unpaged = states, iter(self._layers), {**stateful, **reading}
        num_layers = len(layers) + len(unpaged) - len(with_pages_and_state)
        self._by_layer = [replace(next(paged), states=stateful[index]) if index in with_pages_and_state
                          else unpaged.get(index) or next(paged) for index in range(num_layers)]
        selections = [layer.token_selection for layer in self._by_layer
                      if isinstance(layer, LayerCache) and layer.token_selection is not None]
        self.indexes = [part for selection in selections for part in (selection.index, selection.keys) if part is not None]
        self.upgraded_codecs = [codec.better for codec in codecs if codec.better is not None]
        self.step: Step | None = None
        self.clear()

    def clear(self) -> None:
        """Drop the sequence; memory stays allocated."""
        self.n = self.prompt_end = 0
        if self.states is not None:
            self.states.clear()
        self.sealed = 0  # pages sealed so far: they are sealed in order
        self._kinds: list[int] = []  # of sealed pages: 1, or 2 if the policy gave them more bits
        self._steps: dict[int, Step] = {}  # by number of tokens: the last such step, until pages are sealed or dropped
        self.slots.clear()

    def layer(self, index: int) -> LayerCache | LayerStates:
        """The cache or state of layer `index`."""
        return self._by_layer[index]

    def pieces(self, tokens: int, pages: int | None = None) -> Iterator[int]:
        """Split `tokens` more tokens into chunks. All but the last end on a fixed grid of page boundaries, `pages` (or the chunk) apart."""
        return chunk_lengths(self.n, self.n + tokens, self.shape.sinks, PAGE * (pages or max(1, self.shape.chunk // PAGE)))

    def begin(self, tokens: int, prompt: bool = False) -> Step:
        """Make room for `tokens` more, which `commit` adds. `prompt`: prefill, for which all pages are read, even with sparse reads.

        Raises ValueError beyond the context, and for a prompt that does not continue within the `resumable` tokens."""
        if self.n + tokens > self.shape.ctx:
            raise ValueError(f"{self.n} + {tokens} tokens in a cache for {self.shape.ctx}")
        self.chosen = None
        if prompt or tokens > 1:
            if self.resumable < self.n:
                raise ValueError(f"a prompt behind {self.n} tokens, of which {self.resumable} last")
            self.prompt_end = self.n + tokens
        if self.states is not None:
            self.states.begin(self.n, tokens, prompt, self._checkpoint_for(self.n + tokens))
        if self.pool is not None and self.pool.stream is not None:
            if self.pool.stream.begin([self._visible_disk_pages(pages.window, tokens == 1 and not prompt) for pages in self._spilling]):
                self._steps.clear()
        if self._reuse_step(tokens):
            return self.step
        positions = np.arange(self.n, self.n + tokens, dtype=np.int64)
        first, end = self._storage_position(self.n), self._storage_end(self.n + tokens)
        storage, last = positions + (first - self.n), self.shape.page(first + tokens - 1)
        for page in range(max(0, self.shape.page(first)), last + 1):
            if page not in self.slots.of:
                self.slots.take(page)
        for page in (*([-1] if self.shape.sinks else ()), *range(max(0, self.shape.page(first)), last + 1)):
            self.slots.use(page, end)
        pages = np.where(storage < self.shape.sinks, -1, (storage - self.shape.sinks) // PAGE)
        starts = np.where(pages < 0, 0, self.shape.sinks + PAGE * pages)
        slots = np.array([self.slots.of[page] for page in range(pages[0], last + 1)], np.int64)[pages - pages[0]]
        self.step = self._steps[tokens] = Step(self.n, positions, slots, storage - starts, self._blocks(end))
        return self.step

    def _storage_position(self, position: int) -> int:
        """The storage position of a token: with a window on generated tokens, new ones replace the oldest. Attention does not depend on
        storage order, since keys are rotated by position."""
        written = position - self.prompt_end
        return position if self.shape.written is None or written < 0 else self.prompt_end + written % self.shape.written

    def _storage_end(self, n: int) -> int:
        """How many storage positions `n` tokens take."""
        return n if self.shape.written is None else min(n, self.prompt_end + self.shape.written)

    @property
    def resumable(self) -> int:
        """How many tokens, from the first, a prompt can continue from: all, unless generated ones were overwritten."""
        return self.n if self._storage_end(self.n) == self.n else self.prompt_end

    def _checkpoint_for(self, end: int) -> int:
        """The checkpoint of recurrent states worth keeping for a pass that ends at `end`, for a later `truncate`."""
        tail = max(0, end - TAIL)
        return self.shape.start(self.shape.sealed_at(tail)) if self.is_packed else tail

    def _visible_disk_pages(self, window: int | None, picks: bool) -> tuple[int, int]:
        """Pages [begin, end) on disk that tokens from `n` on see through a window; none with `picks`, which read pages on demand."""
        if window is None and picks and self.pool.picks:
            return self.pool.first, self.pool.first
        begin = 0 if window is None else (self.n - window - self.shape.sinks - PAGE + 1) // PAGE + 1
        begin = max(begin, self.pool.first)
        return begin, max(begin, self.sealed)

    def _reuse_step(self, tokens: int) -> bool:
        """`begin` for as many tokens as an earlier step had, in the same page: its arrays are changed in place, because recorded jobs read
        them. False if there is no such step."""
        previous, first, end = self._steps.get(tokens), self._storage_position(self.n), self._storage_end(self.n + tokens)
        page = self.shape.page(first)
        if previous is None:
            return False
        ends = self._storage_position(previous.position), self._storage_position(previous.positions[-1]), first + tokens - 1
        if any(self.shape.page(position) != page for position in ends):
            return False
        positions = np.arange(self.n, self.n + tokens)
        previous.rows[:] = positions + (first - self.n - self.shape.start(page))
        previous.blocks[-1, 3] = end - self.shape.start(self.shape.page(end - 1))
        self.slots.use(page, end)
        self.step = self._steps[tokens] = Step(self.n, positions, previous.slots, previous.rows, previous.blocks)
        return True

    def _blocks(self, end: int) -> np.ndarray:
        """All blocks with a token before `end`, in position order."""
        rows = [(0, self.slots.of[-1], 0, min(end, self.shape.sinks))] if self.shape.sinks else []
        next_place = [0, 0, 0]  # by kind: pages of one kind are stored contiguously
        for page in range(self.shape.page(end - 1) + 1):
            if page < self.sealed:
                kind = self._kinds[page]
                rows.append((kind, next_place[kind], self.shape.start(page), PAGE))
                next_place[kind] += 1
            else:
                rows.append((0, self.slots.of[page], self.shape.start(page), self.shape.tokens_in(page, end)))
        return np.array(rows, np.int64)

    def held_blocks(self) -> np.ndarray:
        """The blocks of all held tokens, for readers that add none."""
        return self._blocks(self.n)

    @property
    def max_speculative_tokens(self) -> int:
        """How many tokens a speculative pass may take, so that each attends to what it would in a pass of its own and rejected ones leave
        no trace: no page is sealed before the last token, and all are in the same open page."""
        if self.shape.written is not None:  # a token may overwrite one that the token before it attends to
            return 1
        return min(self.shape.start(self.shape.page(self.n) + 1), self.shape.start(self.sealed + 1) + self.shape.window) - self.n

    def commit(self, tokens: int | None = None, seal: bool = True) -> None:
        """Add this many of the step's tokens to the cache (None: all); the others are overwritten later.

        Pages that left the window are sealed; without `seal`, within a chunk of a prompt, a later commit does that. Raises ValueError for
        more tokens than the step has, EffllmError for NaN in a page to be sealed, which then stays open. If a page cannot be written to
        disk, raises EffllmError or Interrupted, and the tokens are not added."""
        available = self.step.position + len(self.step.slots) - self.n
        if tokens is not None and tokens > available:
            raise ValueError(f"{tokens} tokens to commit, the step has {available}")
        before = self.n
        self.n += available if tokens is None else tokens
        # With a window on generated tokens only the prompt is packed, so that the next prompt can continue from its end.
        packable = self.n if self.shape.written is None else min(self.n, self.prompt_end)
        while seal and self.sealed < self.shape.sealed_at(packable):
            page, slot = self.sealed, self.slots.of[self.sealed]
            kind = self._kind(page)
            try:
                self._seal(page, slot, kind)
            except ValueError as error:
                hint = "--kv 16bit keeps it as it is; effllm verify MODEL looks for damage in the model's files"
                raise EffllmError(f"the KV cache cannot be packed: {error}", hint) from error
            except (EffllmError, Interrupted):
                self.truncate(before)
                raise
            freed = self.slots.of.pop(page)
            self.sealed += 1  # before releasing memory, which takes a while: Ctrl-C may interrupt it
            self._steps.clear()
            self.slots.release(freed)

    def _kind(self, page: int) -> int:
        """2 if the policy gives the page more bits and the planned share has room, else 1."""
        is_upgraded = self.policy.act(self._stats(page)) is Action.MORE and bool(self.upgraded_codecs)
        return 2 if is_upgraded and self._kinds.count(2) < max_upgraded(self.codecs[0].share, page + 1) else 1

    def _stats(self, page: int) -> PageStats:
        """What a policy may know of a page about to be sealed."""
        stats = PageStats(page, self.shape.start(page), PAGE)
        if not self.policy.probes:
            return stats
        near = dict.fromkeys((*((-1,) if self.shape.sinks else ()), page, page + self.probes.probe_distance))
        keys = [[layer.pages.sides(0, self.slots.of[other])[0][: PAGE if other >= 0 else self.shape.sinks] for other in near]
                for layer in self._layers]
        return replace(stats, attention=self.probes.attention(page, keys))

    def _seal(self, page: int, slot: int, kind: int) -> None:
        place = page if not self.upgraded_codecs else self._kinds.count(kind)
        for index, (layer, codec) in enumerate(zip(self._layers, self.upgraded_codecs if kind == 2 else self.codecs, strict=True)):
            layer.pages.seal(slot, place, index, self.shape.start(page), codec)
        for sealer in self._sealers:
            sealer.flush()
        if self.pool is not None:
            self.pool.keep(page)
        self._kinds.append(kind)

    def truncate(self, n: int) -> int:
        """Drop tokens from `n` on; returns how many remain, which may be fewer than `n`; the caller prefills the rest.

        With raw codecs the cache is then as if the later tokens had never come: sealed pages that reach into the window become exact again
        (fewer tokens remain if such a page cannot be read from disk). With lossy codecs that is impossible: the tokens of such pages are
        dropped, and when re-run they read packed pages that were exact the first time. Recurrent states go back to a checkpoint."""
        if n >= self.n:
            if self.states is not None:
                self.states.end_prompt()
            return self.n
        self._steps.clear()
        remaining = self._truncate_to(*self._truncation_point(n))
        if self.states is not None:
            while (reachable := self.states.reachable_length(remaining)) < remaining:  # pages could not be read from disk
                remaining = self._truncate_to(reachable, self.shape.sealed_at(reachable))
            self.states.truncate(remaining)
        return remaining

    def reachable_length(self, n: int) -> int:
        """How many tokens `truncate` would leave, barring disk errors."""
        return self.n if n >= self.n else self._truncation_point(n)[0]

    def _truncation_point(self, n: int) -> tuple[int, int]:
        """(tokens, sealed pages): the most tokens, at most `n`, that the cache can be truncated to."""
        n = min(n, self.resumable)
        sealed = min(self.sealed, self.shape.sealed_at(n))
        if self.is_packed and sealed < self.sealed:
            n = min(n, self.shape.start(sealed))
        while self.states is not None and (reachable := self.states.reachable_length(n)) < n:
            n, sealed = reachable, min(self.sealed, self.shape.sealed_at(reachable))
            if self.is_packed:
                sealed = min(self.sealed, max(0, reachable - self.shape.sinks) // PAGE)
                n = reachable if sealed == self.sealed else min(reachable, self.shape.start(sealed))
        return n, sealed

    def _truncate_to(self, n: int, sealed: int) -> int:
        """Truncate to `n` tokens with `sealed` pages; returns how many are left."""
        if self.sealed > sealed:
            self.slots.release_after(self.shape.page(n - 1))  # first: unsealed pages need slots
            n = self._unseal(sealed, n)
            self.sealed = sealed
            del self._kinds[sealed:]
        self.slots.release_after(self.shape.page(n - 1))
        self.n, self.prompt_end = n, min(self.prompt_end, n)
        return n

    def _unseal(self, first: int, n: int) -> int:
        """Move sealed raw pages from `first` on, of tokens before `n`, back into slots. Returns up to which token that succeeded."""
        for page in range(first, min(self.sealed, self.shape.page(n - 1) + 1)):
            slot = self.slots.take(page)
            self.slots.use(page, n)
            try:
                for layer in self._layers:
                    layer.pages.write_slot(slot, layer.pages.read_page(page))
            except (EffllmError, Interrupted):  # of the disk
                return self.shape.start(page)
        return n

    # -- saving and restoring ----------------------------------------------------------------------------------------------------------

    def exact_blocks(self) -> list[tuple[int, int]]:
        """(page, tokens held) of exact tokens, in position order; -1 are the sinks."""
        end = self._storage_end(self.n)
        last = self.shape.page(end - 1) if end else -1
        pages = [*([-1] if end and self.shape.sinks else []), *range(self.sealed, last + 1)]
        return [(page, self.shape.tokens_in(page, end)) for page in pages]

    def read(self, page: int) -> list[np.ndarray]:
        """The bytes of a page in every layer: as sealed, or of its exact slot; then its part of the `indexes`."""
        if 0 <= page < self.sealed:
            return [layer.pages.read_page(page) for layer in self._layers] + self.read_index(page)
        return [layer.pages.read_slot(self.slots.of[page]) for layer in self._layers] + self.read_index(page)

    def read_index(self, page: int) -> list[np.ndarray]:
        """The bytes of each of `indexes` for the tokens of a page."""
        first = self.shape.start(page)
        return [index.read(first, first + self.shape.tokens_in(page, self.n)) for index in self.indexes]

    def write(self, page: int, layers: Sequence[np.ndarray]) -> None:
        """Restore a page from `read`, after `adopt`."""
        for layer, data in zip(self._layers, layers[: len(self._layers)], strict=True):
            if 0 <= page < self.sealed:
                layer.pages.write_page(page, data)
            else:
                layer.pages.write_slot(self.slots.of[page], data)
        for index, data in zip(self.indexes, layers[len(self._layers) :], strict=True):
            index.write(self.shape.start(page), data)
        if 0 <= page < self.sealed:
            self.pool.keep(page)
            if self.pool.picks and page >= self.pool.first:
                for pages in self._spilling:
                    pages.selective.note(page, *pages.sides(1, page))

    def adopt(self, n: int, sealed: int) -> None:
        """Make room for `n` tokens, with `sealed` pages of them packed; `write` restores their bytes. Raises ValueError if impossible."""
        max_exact = (self.shape.slots - 1) * PAGE
        has_sealed = sealed == 0 or (sealed > 0 and n >= self.shape.start(sealed))
        if not 0 <= n <= self.shape.ctx or not has_sealed or n - self.shape.start(sealed) > max_exact:
            raise ValueError(f"{n} tokens with {sealed} packed pages in a cache for {self.shape.ctx}")
        self.slots.discard_all()
        self.clear()
        self.n, self.prompt_end, self.sealed, self._kinds = n, n, sealed, [1] * sealed
        for page, _ in self.exact_blocks():
            if page >= 0:
                self.slots.take(page)
            self.slots.use(page, n)

    def shed(self) -> int:
        """Between passes, move half of the pages in memory to the disk where allowed; returns the bytes freed."""
        freed = self.pool.shed(self.sealed) if self.pool is not None else 0
        self._steps.clear()
        return freed

    def close(self) -> None:
        """Delete the file of spilled pages."""
        if self.pool is not None:
            self.pool.close()
