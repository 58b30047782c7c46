"""Expert offloading: everything stays in memory except the experts, which share a pool of slots and are read from disk on demand.

The experts of a decode step take slots chosen by an eviction policy (`expert_cache.py`). A prefill chunk visits most experts of a layer
once: as many as the layer's share of the pool stay, the rest pass through a few slots, so each is read at most once per chunk and what
decoding has gathered survives. Predicted experts are prefetched only while the disk is idle: their reads are queued behind all demand reads
and cancelled if they have not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from .async_reader import AsyncReader
from .checkpoint import CheckpointError, TensorInfo, TensorStore
from .direct_io import READ_NBYTES, Ticket
from .expert_cache import ExpertSlots, Policy
from .expert_prediction import ExpertPredictor
from .memory import anonymous, discard
from .placement import Residency
from .repack import StagingBuffers, plan_staging
from .streaming_pager import Part, StreamingPager, reads_of, views

ONE_READ_NBYTES = 4 << 20  # an expert of up to this size is a single read, a larger one several in parallel
TRACE_TOKENS = 512  # newest tokens kept in the trace
MAX_PREFETCHES = 6  # prefetches in flight, at most


@dataclass
class ExpertStats:
    """Counters of experts used by single tokens, and of reads for prefill."""

    uses: int = 0
    hits: int = 0  # were in memory, not by a prefetch
    ready: int = 0  # were available without waiting, cached or prefetched
    prefetched: int = 0
    prefetch_hits: int = 0  # prefetched and then used
    prefetch_misses: int = 0  # prefetched and evicted without being used
    chunk_reads: int = 0  # for prefill

    @property
    def hit_rate(self) -> float:
        return self.hits / self.uses if self.uses else 0.0

    def to_json(self) -> dict[str, object]:
        return {"needed": self.uses, "found": self.hits, "hit_rate": self.hit_rate if self.uses else None, "ready": self.ready,
                "read_for_prompts": self.chunk_reads, "guessed": self.prefetched, "guesses_used": self.prefetch_hits,
                "guesses_wasted": self.prefetch_misses}

@dataclass(frozen=True)
class VisitSlots:
    """The slots of the experts of a visit: `ready` are in memory, `coming` must be waited for in this order."""

    slots: Mapping[int, int]
    ready: Sequence[int]
    coming: Sequence[int]


class ExpertPager(StreamingPager):
    """A `StreamingPager` without streamed parts, whose experts share slots in memory.

    `parts`: the experts, `experts` per layer, layer after layer; a key is an index into them. `slots`: how many fit in memory, at least
    twice the `per_token` of all layers. Prefetching looks up to `farthest` layers ahead."""

    stays = True
    reads_with = AsyncReader

    def __init__(self, store: TensorStore, always: Mapping[Hashable, Sequence[TensorInfo]], parts: Sequence[Part], experts: int,
                 per_token: int, slots: int, policy: Policy, cancelled: Callable[[], bool] = lambda: False, direct: bool = True,
                 farthest: int = 1) -> None:
        super().__init__(store, always, (), Residency((), (), 0, 0, 0), cancelled, direct)
        self.experts, self.per_token, self.layers = experts, per_token, len(parts) // experts
        self.slot_nbytes = max(part.nbytes for part in parts)
        self.pool, self.stats = ExpertSlots(slots, policy), ExpertStats()
        self.memory = anonymous(slots * self.slot_nbytes)
        self._staging = StagingBuffers(plan_staging(parts))
        self.nbytes += self.memory.nbytes + self._staging.nbytes
        self._expert_parts = tuple(parts)
        self._min_slots = min(len(parts), 2 * per_token * self.layers)
        self._max_transient, self._resident_counts = min(2 * per_token, experts), [0] * self.layers  # transient slots; experts per layer
        self._set_slots(slots)
        self._tickets: dict[int, Ticket] = {}  # reads by key, until the key is used
        self.predictor = ExpertPredictor(per_token, farthest)
        self._prefetched: set[int] = set()  # prefetched keys that have not been used yet
        self._prefetches: list[int] = []  # those of them that may still be in flight
        self._busy: frozenset[int] = frozenset()  # keys of the current visit, whose products may not have run
        # In a prefill chunk, experts beyond a layer's share pass through a few slots.
        self._transient_slots: list[int] = []
        self._transient_experts: list[int] = []  # of the current visit
        self._transient_reads: dict[int, Ticket] = {}  # by expert
        self._cancelled_reads: list[tuple[int, Ticket]] = []  # slots that a cancelled read still writes to
        self._layer = 0
        self._trace = np.zeros((TRACE_TOKENS, self.layers, per_token), np.uint16)
        self._tokens = 0

    def views(self, key: int, slot: int) -> tuple[np.ndarray, ...]:
        """The tensors of an expert in a slot, as uint8 arrays."""
        part = self._expert_parts[key]
        return views(self.memory, part, part.laid_out(slot * self.slot_nbytes)[1])

    def places(self, key: int) -> tuple[int, ...]:
        """The offsets of an expert's tensors within a slot."""
        return tuple(self._expert_parts[key].laid_out()[1])

    # -- a visit ---------------------------------------------------------------------------------------------------------------

    def visit(self, layer: int, needed: Sequence[int], tokens: np.ndarray | None = None) -> VisitSlots:
        """Start reading those of a layer's `needed` experts that are not in memory. `tokens` [experts]: how many tokens of a chunk go to
        each; None for a single token. Experts of earlier visits may be evicted."""
        base, is_decode = layer * self.experts, tokens is None
        self._reader.poll()
        if layer > self._layer:  # keep prefetches for layers still to come
            self._finish_last_visit(frozenset(base + expert for expert in needed), base + self.experts)
        else:
            self._finish_last_visit(frozenset(base + expert for expert in needed))
            self.predictor.forget()
        self._layer = layer
        self.pool.policy.enter(layer)
        if is_decode:
            self._record(layer, needed)
            self.predictor.judge(layer, needed)
            self.pool.free += self._transient_slots
            self._transient_slots = []
        slots, ready, coming, missing, hits_before = {}, [], [], [], self.stats.prefetch_hits
        for expert in needed:
            key = base + expert
            slot = self.pool.find(key)
            if slot is None:
                missing.append(expert)
                continue
            slots[expert] = slot
            if key in self._prefetched:
                self._prefetched.remove(key)
                self.stats.prefetch_hits += 1
            ticket = self._tickets.get(key)
            if ticket is not None and not ticket.left and ticket.error is None:
                del self._tickets[key]
                ticket = None
            (ready if ticket is None else coming).append(expert)
        if is_decode:
            self.stats.uses += len(needed)
            self.stats.hits += len(needed) - len(missing) - (self.stats.prefetch_hits - hits_before)
            self.stats.ready += len(ready)
            for expert in missing:
                slots[expert] = self._load_expert(base + expert, urgent=True)
            return VisitSlots(slots, ready, coming + missing)
        while len(ready) + len(coming) > self._max_chunk_resident:  # transient slots are needed too
            missing.append((ready or coming).pop())
            self._evict(base + missing[-1])
        self.stats.chunk_reads += len(missing)
        missing.sort(key=lambda expert: (-int(tokens[expert]), expert))
        num_free = len(self.pool.free) + len(self._transient_slots) - self._max_transient
        num_kept = max(0, min(num_free, self._layer_share - self._resident_counts[layer]))
        for expert in reversed(missing[:num_kept]):  # the most used last, so that they count as most recent
            coming.append(expert)
            slots[expert] = self._load_expert(base + expert, urgent=True)
        self._pass_through(missing[num_kept:], slots)
        return VisitSlots(slots, ready, coming + missing[num_kept:])

    def wait(self, expert: int) -> None:
        """Block until an expert of the visit is in memory. The products of those before it must have run."""
        key = self._layer * self.experts + expert
        if expert not in self._transient_reads:
            try:
                self._turns.wait(self._tickets[key])
            except CheckpointError:
                self._evict(key)
                raise
            del self._tickets[key]
            return
        place = self._transient_experts.index(expert)
        following = place - 1 + len(self._transient_slots)  # into the slot of the previous one, which has been multiplied
        if place and following < len(self._transient_experts):
            self._read_transient(following)
        self._turns.wait(self._transient_reads[expert])

    def _pass_through(self, through: Sequence[int], slots: dict[int, int]) -> None:
        """Assign transient slots round robin, and start the first read of each."""
        while len(self._transient_slots) < min(len(through), self._max_transient):
            self._transient_slots.append(self._free_slot(self._busy))
        self._transient_experts = list(through)
        for place, expert in enumerate(through):
            slots[expert] = self._transient_slots[place % len(self._transient_slots)]
        for place in range(min(len(through), len(self._transient_slots))):
            self._read_transient(place)

    def _read_transient(self, place: int) -> None:
        """Read an expert over the previous one in its transient slot."""
        expert, slot = self._transient_experts[place], self._transient_slots[place % len(self._transient_slots)]
        self._transient_reads[expert] = self._read(self._layer * self.experts + expert, slot, urgent=True)

    # -- slots -----------------------------------------------------------------------------------------------------------------

    def _load_expert(self, key: int, urgent: bool, protected: frozenset[int] | None = None) -> int:
        """Give a key a slot and read it; keys in `protected` (default: the visit's) are not evicted."""
        self.pool.free.append(self._free_slot(self._busy if protected is None else protected))
        slot, _ = self.pool.take(key, ())
        self._resident_counts[key // self.experts] += 1
        self._tickets[key] = self._read(key, slot, urgent)
        return slot

    def _free_slot(self, busy: frozenset[int]) -> int:
        """A slot that nobody reads from or writes to, evicting a victim if necessary."""
        while True:
            if self.pool.free:
                return self.pool.free.pop()
            victim = self.pool.policy.victim(busy)
            if victim is not None:
                self._evict(victim)
            else:
                with suppress(CheckpointError):  # all remaining slots are held by cancelled reads
                    self._turns.wait(self._cancelled_reads[0][1])
                self._reclaim_slots()

    def _evict(self, key: int) -> None:
        """Evict a key; its slot is free once no read writes to it."""
        slot, ticket = self.pool.drop(key), self._tickets.pop(key, None)
        self._resident_counts[key // self.experts] -= 1
        if key in self._prefetched:
            self._prefetched.remove(key)
            self.stats.prefetch_misses += 1
        self._free_when_idle(slot, ticket)

    def _free_when_idle(self, slot: int, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._reader.drop(ticket)
        if ticket is not None and ticket.left:
            self._cancelled_reads.append((slot, ticket))
        else:
            self.pool.free.append(slot)

    def _set_slots(self, slots: int) -> None:
        self.slots = slots
        self._max_chunk_resident = max(0, slots - self._max_transient)  # slots for a chunk's experts besides the transient ones
        self._layer_share = self._max_chunk_resident // self.layers

    def shed(self) -> int:
        """Between passes, release half of the slots, down to the experts of two tokens; returns the bytes released."""
        self._finish_last_visit(frozenset())
        self.pool.free += self._transient_slots
        self._transient_slots, released = [], []
        for _ in range(self.slots - max(self._min_slots, self.slots // 2)):
            if not self.pool.free and (victim := self.pool.policy.victim(())) is not None:
                self._evict(victim)
            if not self.pool.free:  # a cancelled read still writes to the slot
                break
            released.append(self.pool.free.pop())
        for slot in released:
            discard(self.memory[slot * self.slot_nbytes : (slot + 1) * self.slot_nbytes])
        self._set_slots(self.slots - len(released))
        return len(released) * self.slot_nbytes

    def _finish_last_visit(self, busy: frozenset[int], first_later: int = 0) -> None:
        """Finish the last visit, which may have been aborted; cancel prefetches that have not begun and are not needed, except keys from
        `first_later` on (if not 0)."""
        for expert, ticket in self._transient_reads.items():
            slot = self._transient_slots[self._transient_experts.index(expert) % len(self._transient_slots)] if ticket.left else -1
            self._reader.drop(ticket)
            if ticket.left:
                self._cancelled_reads.append((slot, ticket))
        for slot in {slot for slot, _ in self._cancelled_reads}.intersection(self._transient_slots):
            self._transient_slots.remove(slot)
        self._transient_reads, self._transient_experts, self._busy = {}, [], busy
        prefetches, self._prefetches = self._prefetches, []
        for key in prefetches:
            ticket = self._tickets.get(key) if key in self._prefetched else None
            if ticket is None:
                continue  # used since, or cancelled
            if ticket.left and key not in busy and not 0 < first_later <= key:
                pending = ticket.left
                self._reader.drop(ticket)
                if ticket.left < pending:  # some of its reads were cancelled; little is lost
                    self._prefetched.remove(key)
                    self.stats.prefetched -= 1
                    self._evict(key)
                    continue
            if ticket.left:
                self._prefetches.append(key)
            elif ticket.error is None:
                del self._tickets[key]  # as if it had always been there; an error is raised when it is used
        self._reclaim_slots()

    def _reclaim_slots(self) -> None:
        self.pool.free += [slot for slot, ticket in self._cancelled_reads if not ticket.left]
        self._cancelled_reads = [each for each in self._cancelled_reads if each[1].left]

    def _read(self, key: int, slot: int, urgent: bool) -> Ticket:
        part = self._expert_parts[key]
        extents, places = part.laid_out(slot * self.slot_nbytes)
        max_nbytes = ONE_READ_NBYTES if max((each.nbytes for each in extents), default=0) <= ONE_READ_NBYTES else READ_NBYTES
        jobs = [*reads_of(extents, self.memory, max_nbytes), *part.repack_jobs(self.memory, places, self._staging)]
        return self._reader.submit(jobs, urgent)

    # -- prefetching -------------------------------------------------------------------------------------------------------------

    def prefetch_distance(self, layer: int) -> int:
        """How many layers ahead it is worth predicting."""
        if len(self.pool) >= self.layers * self.experts:
            return 0
        within = range(1, min(self.predictor.farthest, self.layers - 1 - layer) + 1)
        return max((distance for distance in within if self.predictor.worth(distance)), default=0)

    def look_ahead(self, layer: int, distance: int, likely: Sequence[int]) -> None:
        """Prefetch experts that the layer `distance` ahead will probably need, likeliest first, behind all demand reads and only while few
        prefetches are in flight."""
        keys = [layer * self.experts + expert for expert in likely]
        missing = [key not in self.pool for key in keys]
        self.predictor.guess(layer, distance, [expert if is_missing else None for expert, is_missing in zip(likely, missing, strict=True)])
        protected = self._busy.union(keys)
        num_allowed = MAX_PREFETCHES - sum(1 for key in self._prefetches if key in self._tickets and self._tickets[key].left)
        for key, is_missing in zip(keys[: self.predictor.worth(distance)], missing):
            if not is_missing:
                continue
            if num_allowed <= 0 or (not self.pool.free and self.pool.policy.victim(protected) is None):
                return
            self._load_expert(key, urgent=False, protected=protected)
            self._prefetched.add(key)
            self._prefetches.append(key)
            self.stats.prefetched += 1
            num_allowed -= 1

    # -- the trace -------------------------------------------------------------------------------------------------------------

    def _record(self, layer: int, needed: Sequence[int]) -> None:
        row = self._trace[self._tokens % TRACE_TOKENS, layer]
        row[: len(needed)], row[len(needed) :] = needed, needed[-1] if needed else 0  # padded where other layers have more per token
        if layer == self.layers - 1:
            self._tokens += 1

    def trace(self) -> np.ndarray:
        """The routing of the newest single tokens, uint16 [tokens, layers, per_token], oldest first."""
        if self._tokens <= TRACE_TOKENS:
            return self._trace[: self._tokens].copy()
        return np.roll(self._trace, -(self._tokens % TRACE_TOKENS), axis=0)

    def resident_arrays(self) -> Iterator[np.ndarray]:
        """Weights that are certain to be in memory."""
        yield from self._rest.resident_arrays()
