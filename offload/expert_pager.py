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
AHEAD = 6  # prefetches in flight, at most


@dataclass
class ExpertStats:
    """Counters of single-token visits: `uses`; `hits` (already cached); `ready` (available without waiting, cached or prefetched); what
    became of prefetches; `chunk_reads`: reads for prefill."""

    uses: int = 0
    hits: int = 0
    ready: int = 0
    guessed: int = 0
    useful: int = 0
    wasted: int = 0
    chunk_reads: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.uses if self.uses else 0.0

    def to_json(self) -> dict[str, object]:
        return {"needed": self.uses, "found": self.hits, "hit_rate": self.hit_rate if self.uses else None, "ready": self.ready,
                "read_for_prompts": self.chunk_reads, "guessed": self.guessed, "guesses_used": self.useful, "guesses_wasted": self.wasted}

@dataclass(frozen=True)
class VisitSlots:
    """The slots of the experts of a visit: `ready` are in memory, `coming` must be waited for in this order."""

    slots: Mapping[int, int]
    ready: Sequence[int]
    coming: Sequence[int]


class ExpertPager(StreamingPager):
    """`parts` are the experts, `experts` per layer, layer after layer; `slots` of them fit in memory, at least twice the `per_token` of all
    layers. Prefetching looks up to `farthest` layers ahead. Otherwise as `StreamingPager`, without other parts."""

    stays = True
    reads_with = AsyncReader

    def __init__(self, store: TensorStore, always: Mapping[Hashable, Sequence[TensorInfo]], parts: Sequence[Part], experts: int,
                 per_token: int, slots: int, policy: Policy, cancelled: Callable[[], bool] = lambda: False, direct: bool = True,
                 farthest: int = 1) -> None:
        super().__init__(store, always, (), Residency((), (), 0, 0, 0), cancelled, direct)
        self.experts, self.per_token, self.layers = experts, per_token, len(parts) // experts
        self.slot_nbytes = max(part.nbytes for part in parts)
        self.pool, self.tally = ExpertSlots(slots, policy), ExpertStats()
        self.memory = anonymous(slots * self.slot_nbytes)
        self._staging = StagingBuffers(plan_staging(parts))
        self.nbytes += self.memory.nbytes + self._staging.nbytes
        self._experts_of = tuple(parts)
        self._least = min(len(parts), 2 * per_token * self.layers)
        self._width, self._residents = min(2 * per_token, experts), [0] * self.layers  # transient slots; experts per layer
        self._count(slots)
        self._tickets: dict[int, Ticket] = {}  # keys being read
        self.foresight = ExpertPredictor(per_token, farthest)
        self._guessed: set[int] = set()  # prefetched keys that have not been used yet
        self._on_guess: list[int] = []  # those of them that may still be in flight
        self._busy: frozenset[int] = frozenset()  # keys of the current visit whose products may not have run
        self._passage: list[int] = []  # transient slots for a chunk's experts
        self._through: list[int] = []  # experts of the visit that pass through those
        self._passing: dict[int, Ticket] = {}  # those of them being read
        self._stuck: list[tuple[int, Ticket]] = []  # slots that a cancelled read still writes to
        self._layer = 0
        self._trace = np.zeros((TRACE_TOKENS, self.layers, per_token), np.uint16)
        self._tokens = 0

    def views(self, key: int, slot: int) -> tuple[np.ndarray, ...]:
        """The tensors of an expert in a slot, as uint8 arrays."""
        part = self._experts_of[key]
        return views(self.memory, part, part.laid_out(slot * self.slot_nbytes)[1])

    def places(self, key: int) -> tuple[int, ...]:
        """The offsets of an expert's tensors within a slot."""
        return tuple(self._experts_of[key].laid_out()[1])

    # -- a visit ---------------------------------------------------------------------------------------------------------------

    def visit(self, layer: int, needed: Sequence[int], tokens: np.ndarray | None = None) -> VisitSlots:
        """Start reading those of a layer's `needed` experts that are not in memory. `tokens` [experts]: how many tokens of a chunk go to
        each; None for a single token. Experts of earlier visits may be evicted."""
        base, one = layer * self.experts, tokens is None
        self._reader.poll()
        if layer > self._layer:  # keep prefetches for layers still to come
            self._settle(frozenset(base + expert for expert in needed), base + self.experts)
        else:
            self._settle(frozenset(base + expert for expert in needed))
            self.foresight.forget()
        self._layer = layer
        self.pool.policy.enter(layer)
        if one:
            self._record(layer, needed)
            self.foresight.judge(layer, needed)
            self.pool.free += self._passage
            self._passage = []
        slots, ready, coming, missing, guessed = {}, [], [], [], self.tally.useful
        for expert in needed:
            key = base + expert
            slot = self.pool.find(key)
            if slot is None:
                missing.append(expert)
                continue
            slots[expert] = slot
            if key in self._guessed:
                self._guessed.remove(key)
                self.tally.useful += 1
            ticket = self._tickets.get(key)
            if ticket is not None and not ticket.left and ticket.error is None:
                del self._tickets[key]
                ticket = None
            (ready if ticket is None else coming).append(expert)
        if one:
            self.tally.uses += len(needed)
            self.tally.hits += len(needed) - len(missing) - (self.tally.useful - guessed)
            self.tally.ready += len(ready)
            for expert in missing:
                slots[expert] = self._bring(base + expert, urgent=True)
            return VisitSlots(slots, ready, coming + missing)
        while len(ready) + len(coming) > self._room:  # transient slots are needed too
            missing.append((ready or coming).pop())
            self._give_back(base + missing[-1])
        self.tally.chunk_reads += len(missing)
        missing.sort(key=lambda expert: (-int(tokens[expert]), expert))
        stay = max(0, min(len(self.pool.free) + len(self._passage) - self._width, self._share - self._residents[layer]))
        for expert in reversed(missing[:stay]):  # the most used come last, and so count as the most recent
            coming.append(expert)
            slots[expert] = self._bring(base + expert, urgent=True)
        self._pass_through(missing[stay:], slots)
        return VisitSlots(slots, ready, coming + missing[stay:])

    def wait(self, expert: int) -> None:
        """Block until an expert of the visit is in memory. The products of those before it must have run."""
        key = self._layer * self.experts + expert
        if expert not in self._passing:
            try:
                self._turns.wait(self._tickets[key])
            except CheckpointError:
                self._give_back(key)
                raise
            del self._tickets[key]
            return
        place = self._through.index(expert)
        following = place - 1 + len(self._passage)  # into the slot of the previous one, which has been multiplied
        if place and following < len(self._through):
            self._ask(following)
        self._turns.wait(self._passing[expert])

    def _pass_through(self, through: Sequence[int], slots: dict[int, int]) -> None:
        """Assign transient slots round robin, and start the first read of each."""
        while len(self._passage) < min(len(through), self._width):
            self._passage.append(self._free_slot(self._busy))
        self._through = list(through)
        for place, expert in enumerate(through):
            slots[expert] = self._passage[place % len(self._passage)]
        for place in range(min(len(through), len(self._passage))):
            self._ask(place)

    def _ask(self, place: int) -> None:
        """Read an expert over the previous one in its transient slot."""
        expert, slot = self._through[place], self._passage[place % len(self._passage)]
        self._passing[expert] = self._read(self._layer * self.experts + expert, slot, urgent=True)

    # -- slots -----------------------------------------------------------------------------------------------------------------

    def _bring(self, key: int, urgent: bool, spared: frozenset[int] | None = None) -> int:
        """Give a key a slot and read it; keys in `spared` (default: the visit's) are not evicted."""
        self.pool.free.append(self._free_slot(self._busy if spared is None else spared))
        slot, _ = self.pool.take(key, ())
        self._residents[key // self.experts] += 1
        self._tickets[key] = self._read(key, slot, urgent)
        return slot

    def _free_slot(self, busy: frozenset[int]) -> int:
        """A slot that nobody reads from or writes to, evicting a victim if necessary."""
        while True:
            if self.pool.free:
                return self.pool.free.pop()
            victim = self.pool.policy.victim(busy)
            if victim is not None:
                self._give_back(victim)
            else:
                with suppress(CheckpointError):  # all remaining slots are held by cancelled reads
                    self._turns.wait(self._stuck[0][1])
                self._reclaim()

    def _give_back(self, key: int) -> None:
        """Evict a key; its slot is free once no read writes to it."""
        slot, ticket = self.pool.drop(key), self._tickets.pop(key, None)
        self._residents[key // self.experts] -= 1
        if key in self._guessed:
            self._guessed.remove(key)
            self.tally.wasted += 1
        self._let_go(slot, ticket)

    def _let_go(self, slot: int, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._reader.drop(ticket)
        if ticket is not None and ticket.left:
            self._stuck.append((slot, ticket))
        else:
            self.pool.free.append(slot)

    def _count(self, slots: int) -> None:
        self.slots = slots
        self._room = max(0, slots - self._width)  # the most that a chunk's experts may occupy besides the transient slots
        self._share = self._room // self.layers

    def shed(self) -> int:
        """Between passes, release half of the slots, down to the experts of two tokens; returns the bytes released."""
        self._settle(frozenset())
        self.pool.free += self._passage
        self._passage, gone = [], []
        for _ in range(self.slots - max(self._least, self.slots // 2)):
            if not self.pool.free and (victim := self.pool.policy.victim(())) is not None:
                self._give_back(victim)
            if not self.pool.free:  # a cancelled read still writes to the slot
                break
            gone.append(self.pool.free.pop())
        for slot in gone:
            discard(self.memory[slot * self.slot_nbytes : (slot + 1) * self.slot_nbytes])
        self._count(self.slots - len(gone))
        return len(gone) * self.slot_nbytes

    def _settle(self, busy: frozenset[int], later: int = 0) -> None:
        """Finish the last visit, which may have been aborted; cancel prefetches that have not begun and are not needed, except keys from
        `later` on (if not 0)."""
        for expert, ticket in self._passing.items():
            slot = self._passage[self._through.index(expert) % len(self._passage)] if ticket.left else -1
            self._reader.drop(ticket)
            if ticket.left:
                self._stuck.append((slot, ticket))
        for slot in {slot for slot, _ in self._stuck}.intersection(self._passage):
            self._passage.remove(slot)
        self._passing, self._through, self._busy = {}, [], busy
        guesses, self._on_guess = self._on_guess, []
        for key in guesses:
            ticket = self._tickets.get(key) if key in self._guessed else None
            if ticket is None:
                continue  # used since, or cancelled
            if ticket.left and key not in busy and not 0 < later <= key:
                asked = ticket.left
                self._reader.drop(ticket)
                if ticket.left < asked:  # some of its reads were cancelled; little is lost
                    self._guessed.remove(key)
                    self.tally.guessed -= 1
                    self._give_back(key)
                    continue
            if ticket.left:
                self._on_guess.append(key)
            elif ticket.error is None:
                del self._tickets[key]  # as if it had always been there; an error is raised when it is used
        self._reclaim()

    def _reclaim(self) -> None:
        self.pool.free += [slot for slot, ticket in self._stuck if not ticket.left]
        self._stuck = [each for each in self._stuck if each[1].left]

    def _read(self, key: int, slot: int, urgent: bool) -> Ticket:
        part = self._experts_of[key]
        extents, places = part.laid_out(slot * self.slot_nbytes)
        most = ONE_READ_NBYTES if max((each.nbytes for each in extents), default=0) <= ONE_READ_NBYTES else READ_NBYTES
        jobs = [*reads_of(extents, self.memory, most), *part.repack_jobs(self.memory, places, self._staging)]
        return self._reader.submit(jobs, urgent)

    # -- prefetching -------------------------------------------------------------------------------------------------------------

    def guesses(self, layer: int) -> int:
        """How many layers ahead it is worth predicting."""
        if len(self.pool) >= self.layers * self.experts:
            return 0
        within = range(1, min(self.foresight.farthest, self.layers - 1 - layer) + 1)
        return max((distance for distance in within if self.foresight.worth(distance)), default=0)

    def look_ahead(self, layer: int, distance: int, likely: Sequence[int]) -> None:
        """Prefetch experts that the layer `distance` ahead will probably need, likeliest first, behind all demand reads and only while few
        prefetches are in flight."""
        keys = [layer * self.experts + expert for expert in likely]
        missing = [key not in self.pool for key in keys]
        self.foresight.guess(layer, distance, [expert if gone else None for expert, gone in zip(likely, missing, strict=True)])
        spared = self._busy.union(keys)
        room = AHEAD - sum(1 for key in self._on_guess if key in self._tickets and self._tickets[key].left)
        for key, gone in zip(keys[: self.foresight.worth(distance)], missing):
            if not gone:
                continue
            if room <= 0 or (not self.pool.free and self.pool.policy.victim(spared) is None):
                return
            self._bring(key, urgent=False, spared=spared)
            self._guessed.add(key)
            self._on_guess.append(key)
            self.tally.guessed += 1
            room -= 1

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
