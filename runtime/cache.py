"""The KV cache: a codec, a page pool and a policy, composed. It never hands out K and V; it answers `attend`.

Tokens lie on a fixed page grid: the first S are sinks, then page i holds tokens S + 128 i and on. At least the newest W tokens are exact:
they lie in open pages, each in a slot (`kv/exact_slots.py`). When the last token of a page is W tokens old, the codec seals the page into
the pool; a packed page is never reopened. A chunk of a prompt ends on a page boundary, and reads pages sealed before it began as packed. So
the result depends on positions, not on how the prompt was chunked.

For attention, a block is (0: open, or the kind of a sealed page; slot or page; first position; tokens held). One list of blocks serves
every layer of a step.

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
NO_CHOICE: Mapping[int, TokenSelection] = MappingProxyType({})


class KVCache(CacheBytes):
    """`layers`: the storage of the layers with pages, in layer order; `codecs` seal their pages; `layouts` are those of exact tokens,
    and `exact` their memory; `sealers` are notified when a page has been sealed; `pool` has the memory of sealed pages, those of
    `spilling` layers may be on disk. `probes`: what a policy sees of attention. `states`: of layers with a recurrent state, by number in
    `stateful`, instead of pages or `beside` them. `readers`: by number, layers that read other layers' keys and values; `choosing`: by
    position, layers with an indexer, and `apart` by number those of them that are readers. `n` tokens are held. `ends`: see
    `attention_ends`, of the current pass. Made by `build_cache`."""

    ends: Ends | None = None

    def __init__(self, layers: Sequence[LayerPages], codecs: Sequence[RawCodec | PackedCodec], policy: Policy, shape: CacheShape,
                 layouts: Sequence[PageLayout], exact: Sequence[np.ndarray] = (), sealers: Sequence[Sealer] = (),
                 pool: PagePool | None = None, probes: AttentionProbes | None = None, spilling: Sequence[LayerPages] = (),
                 states: States | None = None, stateful: Mapping[int, LayerStates] = NO_STATES,
                 readers: Mapping[int, LayerPages] = NO_READERS, beside: Collection[int] = (),
                 choosing: Mapping[int, TokenSelection] = NO_CHOICE, apart: Mapping[int, TokenSelection] = NO_CHOICE) -> None:
        self._sealers, self.pool, self.probes, self._spilling = sealers, pool, probes, spilling
        self.shape, self.codecs, self.policy, self.layouts = shape, codecs, policy, layouts
        self.slots = ExactSlots(shape, layouts, exact)
        self._layers = [LayerCache(pages, self, choosing=choosing.get(place)) for place, pages in enumerate(layers)]
        self.choosing = choosing
        self.chosen: Chosen | None = None  # of the current pass: what its tokens see in layers that choose; None: all before them
        reading = {index: LayerCache(each, self, choosing=apart.get(index)) for index, each in readers.items()}
        self.states, paged, others = states, iter(self._layers), {**stateful, **reading}
        self._of_model = [replace(next(paged), states=stateful[index]) if index in beside else others.get(index) or next(paged)
                          for index in range(len(layers) + len(others) - len(beside))]
        chosen_by = [each.choosing for each in self._of_model if isinstance(each, LayerCache) and each.choosing is not None]
        self.indexes = [kept for each in chosen_by for kept in (each.index, each.keys) if kept is not None]
        self.better = [codec.better for codec in codecs if codec.better is not None]
        self.step: Step | None = None
        self.clear()

    def clear(self) -> None:
        """Drop the sequence; memory stays allocated."""
        self.n = self.read_until = 0  # the second: behind the last prompt
        if self.states is not None:
            self.states.clear()
        self.sealed = 0  # pages sealed so far: they are sealed in order
        self._kinds: list[int] = []  # of sealed pages: 1, or 2 where a policy gave more bits
        self._steps: dict[int, Step] = {}  # the last of so many tokens since pages were sealed or dropped
        self.slots.clear()

    def layer(self, index: int) -> LayerCache | LayerStates:
        """The cache or state of layer `index`."""
        return self._of_model[index]

    def pieces(self, tokens: int, pages: int | None = None) -> Iterator[int]:
        """Split `tokens` more tokens into chunks. All but the last end on a fixed grid of page boundaries, `pages` (or the chunk) apart."""
        return chunk_lengths(self.n, self.n + tokens, self.shape.sinks, PAGE * (pages or max(1, self.shape.chunk // PAGE)))

    def begin(self, tokens: int, prompt: bool = False) -> Step:
        """Make room for `tokens` more, which are held after `commit`. `prompt`: they are prefill, for which no pages are picked, however
        few are left. Raises ValueError beyond the context, and for a prompt that does not continue from what is `lasting`."""
        if self.n + tokens > self.shape.ctx:
            raise ValueError(f"{self.n} + {tokens} tokens in a cache for {self.shape.ctx}")
        self.chosen = None
        if prompt or tokens > 1:  # a text that is not read as an answer is written
            if self.lasting < self.n:
                raise ValueError(f"a prompt behind {self.n} tokens, of which {self.lasting} last")
            self.read_until = self.n + tokens
        if self.states is not None:
            self.states.begin(self.n, tokens, prompt, self._way_back(self.n + tokens))
        if self.pool is not None and self.pool.stream is not None:
            if self.pool.stream.begin([self._seen(pages.window, tokens == 1 and not prompt) for pages in self._spilling]):
                self._steps.clear()
        if self._begin_again(tokens):
            return self.step
        positions, first, end = np.arange(self.n, self.n + tokens, dtype=np.int64), self._place(self.n), self._end(self.n + tokens)
        places, last = positions + (first - self.n), self.shape.page(first + tokens - 1)
        for page in range(max(0, self.shape.page(first)), last + 1):
            if page not in self.slots.of:
                self.slots.take(page)
        for page in (*([-1] if self.shape.sinks else ()), *range(max(0, self.shape.page(first)), last + 1)):
            self.slots.use(page, end)
        pages = np.where(places < self.shape.sinks, -1, (places - self.shape.sinks) // PAGE)
        starts = np.where(pages < 0, 0, self.shape.sinks + PAGE * pages)
        slots = np.array([self.slots.of[page] for page in range(pages[0], last + 1)], np.int64)[pages - pages[0]]
        self.step = self._steps[tokens] = Step(self.n, positions, slots, places - starts, self._blocks(end))
        return self.step

    def _place(self, position: int) -> int:
        """The storage position of a token: with a window on generated tokens, new ones replace the oldest. Attention does not depend on
        storage order, since keys are rotated by position."""
        written = position - self.read_until
        return position if self.shape.written is None or written < 0 else self.read_until + written % self.shape.written

    def _end(self, n: int) -> int:
        """How many storage positions `n` tokens take."""
        return n if self.shape.written is None else min(n, self.read_until + self.shape.written)

    @property
    def lasting(self) -> int:
        """How many first tokens a prompt can continue from: all, unless generated ones were replaced."""
        return self.n if self._end(self.n) == self.n else self.read_until

    def _way_back(self, end: int) -> int:
        """The checkpoint of recurrent states worth keeping for a pass that ends at `end`, for a later `truncate`."""
        tail = max(0, end - TAIL)
        return self.shape.start(self.shape.sealed_at(tail)) if self.is_packed else tail

    def _seen(self, window: int | None, picks: bool) -> tuple[int, int]:
        """Pages [begin, end) on disk that tokens from `n` on see through a window; none where `picks`, since any page may be picked."""
        if window is None and picks and self.pool.picks:
            return self.pool.first, self.pool.first
        begin = 0 if window is None else (self.n - window - self.shape.sinks - PAGE + 1) // PAGE + 1
        begin = max(begin, self.pool.first)
        return begin, max(begin, self.sealed)

    def _begin_again(self, tokens: int) -> bool:
        """`begin` for tokens in the same page as the previous step's, as many of them. The step's arrays are changed in place, because
        recorded jobs read them; other holders must look again."""
        last, first, end = self._steps.get(tokens), self._place(self.n), self._end(self.n + tokens)
        page = self.shape.page(first)
        if last is None or any(self.shape.page(each) != page for each in (*map(self._place, (last.position, last.positions[-1])),
                                                                     first + tokens - 1)):
            return False
        positions = np.arange(self.n, self.n + tokens)
        last.rows[:] = positions + (first - self.n - self.shape.start(page))
        last.blocks[-1, 3] = end - self.shape.start(self.shape.page(end - 1))
        self.slots.use(page, end)
        self.step = self._steps[tokens] = Step(self.n, positions, last.slots, last.rows, last.blocks)
        return True

    def _blocks(self, end: int) -> np.ndarray:
        """All blocks with a token before `end`, in position order."""
        rows = [(0, self.slots.of[-1], 0, min(end, self.shape.sinks))] if self.shape.sinks else []
        places = [0, 0, 0]  # pages of a kind lie side by side, whatever lies between them
        for page in range(self.shape.page(end - 1) + 1):
            if page < self.sealed:
                kind = self._kinds[page]
                rows.append((kind, places[kind], self.shape.start(page), PAGE))
                places[kind] += 1
            else:
                rows.append((0, self.slots.of[page], self.shape.start(page), self.shape.tokens_in(page, end)))
        return np.array(rows, np.int64)

    def held(self) -> np.ndarray:
        """The blocks of all held tokens, for readers that add none."""
        return self._blocks(self.n)

    @property
    def ahead(self) -> int:
        """How many tokens a speculative pass may take, so that each sees what it would in a pass of its own and rejected ones leave no
        trace: no page is sealed before the last, and all lie in the first one's open page."""
        if self.shape.written is not None:  # the next may take the place of one that this one sees
            return 1
        return min(self.shape.start(self.shape.page(self.n) + 1), self.shape.start(self.sealed + 1) + self.shape.window) - self.n

    def commit(self, tokens: int | None = None, seal: bool = True) -> None:
        """Hold this many of the step's tokens (None: all); pages that left the window are sealed, or without `seal` by a later commit,
        within a chunk of a prompt. Other tokens of the step are overwritten later. Raises ValueError for more than the step has,
        EffllmError for NaN in a page to be sealed, which then stays open. If the disk does not take a page, the tokens are not held:
        EffllmError, or Interrupted."""
        left = self.step.position + len(self.step.slots) - self.n
        if tokens is not None and tokens > left:
            raise ValueError(f"{tokens} tokens to commit, the step has {left}")
        before = self.n
        self.n += left if tokens is None else tokens
        # what an answer is held in beside its prompt is never packed, so that the next prompt can go on from the end of the last
        packs = self.n if self.shape.written is None else min(self.n, self.read_until)
        while seal and self.sealed < self.shape.sealed_at(packs):
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
            free = self.slots.of.pop(page)
            self.sealed += 1  # first: giving memory back takes a while, and Ctrl-C may interrupt it
            self._steps.clear()
            self.slots.release(free)

    def _kind(self, page: int) -> int:
        """2 if the policy gives the page more bits and the planned share has room, else 1."""
        more = self.policy.act(self._stats(page)) is Action.MORE and bool(self.better)
        return 2 if more and self._kinds.count(2) < max_upgraded(self.codecs[0].share, page + 1) else 1

    def _stats(self, page: int) -> PageStats:
        """What a policy may know of a page about to be sealed."""
        stats = PageStats(page, self.shape.start(page), PAGE)
        if not self.policy.probes:
            return stats
        near = dict.fromkeys((*((-1,) if self.shape.sinks else ()), page, page + self.probes.behind))
        keys = [[layer.pages.sides(0, self.slots.of[other])[0][: PAGE if other >= 0 else self.shape.sinks] for other in near]
                for layer in self._layers]
        return replace(stats, attention=self.probes.attention(page, keys))

    def _seal(self, page: int, slot: int, kind: int) -> None:
        place = page if not self.better else self._kinds.count(kind)
        for index, (layer, codec) in enumerate(zip(self._layers, self.better if kind == 2 else self.codecs, strict=True)):
            layer.pages.seal(slot, place, index, self.shape.start(page), codec)
        for sealer in self._sealers:
            sealer.flush()
        if self.pool is not None:
            self.pool.keep(page)
        self._kinds.append(kind)

    def truncate(self, n: int) -> int:
        """Drop tokens from `n` on; returns how many are held. With raw codecs the cache is then as if the later tokens had never come:
        sealed pages that reach into the window are exact again (fewer tokens are held if the disk fails to return such a page). With
        lossy codecs that is impossible: fewer are held, the caller prefills the rest, and re-run tokens see as packed what they saw
        exact before. With recurrent states, fewer are held, back to a checkpoint."""
        if n >= self.n:
            if self.states is not None:
                self.states.end_prompt()
            return self.n
        self._steps.clear()
        held = self._cut(*self._way_to(n))
        if self.states is not None:
            while (back := self.states.reach(held)) < held:  # a disk gave less than it was asked for
                held = self._cut(back, self.shape.sealed_at(back))
            self.states.truncate(held)
        return held

    def reach(self, n: int) -> int:
        """How many tokens `truncate` would leave, barring disk errors."""
        return self.n if n >= self.n else self._way_to(n)[0]

    def _way_to(self, n: int) -> tuple[int, int]:
        """(tokens, sealed pages): the most tokens, at most `n`, that the cache can be truncated to."""
        n = min(n, self.lasting)
        sealed = min(self.sealed, self.shape.sealed_at(n))
        if self.is_packed and sealed < self.sealed:
            n = min(n, self.shape.start(sealed))
        while self.states is not None and (back := self.states.reach(n)) < n:
            n, sealed = back, min(self.sealed, self.shape.sealed_at(back))
            if self.is_packed:
                sealed = min(self.sealed, max(0, back - self.shape.sinks) // PAGE)
                n = back if sealed == self.sealed else min(back, self.shape.start(sealed))
        return n, sealed

    def _cut(self, n: int, sealed: int) -> int:
        """Truncate to `n` tokens with `sealed` pages; returns how many are left."""
        if self.sealed > sealed:
            self.slots.release_behind(self.shape.page(n - 1))  # slots for those that are opened
            n = self._open_again(sealed, n)
            self.sealed = sealed
            del self._kinds[sealed:]
        self.slots.release_behind(self.shape.page(n - 1))
        self.n, self.read_until = n, min(self.read_until, n)
        return n

    def _open_again(self, first: int, n: int) -> int:
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

    # -- kept outside ----------------------------------------------------------------------------------------------------------

    def exact_blocks(self) -> list[tuple[int, int]]:
        """(page, tokens held) of exact tokens, in position order; -1 are the sinks."""
        end = self._end(self.n)
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
        """Hold `n` tokens, `sealed` pages of them packed, whose bytes are written next. Raises ValueError for an impossible combination."""
        most = (self.shape.slots - 1) * PAGE
        if not 0 <= n <= self.shape.ctx or sealed < 0 or (sealed and n < self.shape.start(sealed)) or n - self.shape.start(sealed) > most:
            raise ValueError(f"{n} tokens with {sealed} packed pages in a cache for {self.shape.ctx}")
        self.slots.forget_all()
        self.clear()
        self.n, self.read_until, self.sealed, self._kinds = n, n, sealed, [1] * sealed
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
