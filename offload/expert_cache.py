"""A cache of experts in memory slots: eviction policies, and trace replay to choose between them. Pure.

An expert is a key, layer * experts + number. A pass visits the layers in order and needs several keys of each at once. Every policy finds
its victim in constant time, since scanning all slots on a miss slows large caches down. No policy is best for every model, so the one that
would have done best on this model's own routing is used (`choose`).
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

LRU, LFU, LEAST_STALE, PINNED_HOT = "lru", "decayed-lfu", "least-stale", "pinned-hot"
POLICIES = (LRU, LFU, LEAST_STALE, PINNED_HOT)  # on a tie the first is chosen
MOST_COUNT = 15  # uses that decayed LFU tells apart
HALVE_AFTER = 8  # uses per slot between halvings
HOT_SHARE = 0.5  # of the slots, for the most used experts of pinned-hot
MOST_REPLAYED = 30_000  # uses replayed at most: a sample of layers stands for all
LEAST_TOKENS = 32  # below that a trace says nothing


class Policy(Protocol):
    """An eviction policy."""

    def enter(self, layer: int) -> None:
        """A pass enters a layer."""

    def use(self, key: int) -> None:
        """A key was hit or inserted."""

    def forget(self, key: int) -> None:
        """A key was removed."""

    def victim(self, busy: Collection[int]) -> int | None:
        """The key to evict, not one of `busy`; None if all are busy."""


class _Order(OrderedDict):
    """Keys from least to most recently used."""

    def use(self, key: int) -> None:
        self[key] = None
        self.move_to_end(key)

    def oldest(self, busy: Collection[int]) -> int | None:
        return next((key for key in self if key not in busy), None)  # busy keys were used last, so they are at the end


class LeastRecent(Policy):
    """Least recently used."""

    def __init__(self) -> None:
        self._order = _Order()

    def enter(self, layer: int) -> None:
        """LRU ignores layers."""

    def use(self, key: int) -> None:
        self._order.use(key)

    def forget(self, key: int) -> None:
        del self._order[key]

    def victim(self, busy: Collection[int]) -> int | None:
        return self._order.oldest(busy)


class DecayedFrequency(Policy):
    """LFU with counts up to MOST_COUNT, kept for evicted keys too and halved every HALVE_AFTER uses per slot; ties go to the least recently
    used."""

    def __init__(self, slots: int) -> None:
        self._period, self._uses = HALVE_AFTER * slots, 0
        self._counts: dict[int, int] = {}
        self._by_count = [_Order() for _ in range(MOST_COUNT + 1)]

    def enter(self, layer: int) -> None:
        """LFU ignores layers."""

    def use(self, key: int) -> None:
        before = self._counts.get(key, 0)
        after = self._counts[key] = min(MOST_COUNT, before + 1)
        self._by_count[before].pop(key, None)
        self._by_count[after].use(key)
        self._uses += 1
        if self._uses >= self._period:
            self._halve()

    def forget(self, key: int) -> None:
        del self._by_count[self._counts.get(key, 0)][key]

    def victim(self, busy: Collection[int]) -> int | None:
        return next((key for order in self._by_count if (key := order.oldest(busy)) is not None), None)

    def _halve(self) -> None:
        self._uses = 0
        self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
        merged = [_Order() for _ in self._by_count]
        for count, order in enumerate(self._by_count):
            merged[count // 2].update(order)
        self._by_count = merged


class LeastStale(Policy):
    """Layers that the pass has left are needed last, the one just left last of all: of that layer, keys that were not used go first, least
    recently used first. After SpecMD (arXiv 2602.03921). Where nothing is stale, LRU."""

    def __init__(self, layers: int, experts: int) -> None:
        self._experts, self._here = experts, 0
        self._order, self._rows = _Order(), [_Order() for _ in range(layers)]
        self._visits, self._used = [0] * layers, {}  # per layer; the visit in which a key was last used
        self._left: OrderedDict[int, None] = OrderedDict()  # layers that may have stale keys, in the order in which they were left

    def enter(self, layer: int) -> None:
        if layer != self._here:
            self._left[self._here] = None
            self._left.move_to_end(self._here)
            self._here = layer
        self._left.pop(layer, None)
        self._visits[layer] += 1

    def use(self, key: int) -> None:
        layer = key // self._experts
        self._order.use(key)
        self._rows[layer].use(key)
        self._used[key] = self._visits[layer]

    def forget(self, key: int) -> None:
        del self._order[key], self._rows[key // self._experts][key], self._used[key]

    def victim(self, busy: Collection[int]) -> int | None:
        while self._left:
            layer = next(reversed(self._left))
            key = self._rows[layer].oldest(busy)
            if key is not None and self._used[key] < self._visits[layer]:
                return key
            del self._left[layer]
        return self._order.oldest(busy)


class PinnedHot(Policy):
    """LRU, except that `hot` keys are evicted last."""

    def __init__(self, hot: Collection[int]) -> None:
        self._hot, self._orders = frozenset(hot), (_Order(), _Order())

    def enter(self, layer: int) -> None:
        """Pinning ignores layers."""

    def use(self, key: int) -> None:
        self._orders[key in self._hot].use(key)

    def forget(self, key: int) -> None:
        del self._orders[key in self._hot][key]

    def victim(self, busy: Collection[int]) -> int | None:
        cold, hot = self._orders
        return found if (found := cold.oldest(busy)) is not None else hot.oldest(busy)


def policy(name: str, slots: int, layers: int, experts: int, hot: Collection[int] = ()) -> Policy:
    """Create a policy by name; `hot` is for pinned-hot only."""
    if name == LFU:
        return DecayedFrequency(slots)
    if name == LEAST_STALE:
        return LeastStale(layers, experts)
    if name == PINNED_HOT:
        return PinnedHot(hot)
    if name != LRU:
        raise ValueError(f"no policy {name!r}")
    return LeastRecent()


class ExpertSlots:
    """A fixed number of slots and the keys that occupy them."""

    def __init__(self, count: int, policy: Policy) -> None:
        self.policy = policy
        self.free = list(range(count - 1, -1, -1))
        self._slots: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        """Occupied slots."""
        return len(self._slots)

    def find(self, key: int) -> int | None:
        """The slot of a key, recorded as a use; None on a miss."""
        slot = self._slots.get(key)
        if slot is not None:
            self.policy.use(key)
        return slot

    def take(self, key: int, busy: Collection[int]) -> tuple[int, int | None] | None:
        """A slot for a missing key, and the key that was evicted for it. None if all are busy."""
        victim = None
        if self.free:
            slot = self.free.pop()
        else:
            victim = self.policy.victim(busy)
            if victim is None:
                return None
            slot = self.drop(victim)
        self._slots[key] = slot
        self.policy.use(key)
        return slot, victim

    def drop(self, key: int) -> int:
        """Remove a key; its slot is the caller's, to fill or to return to `free`."""
        self.policy.forget(key)
        return self._slots.pop(key)


def hottest(trace: np.ndarray, experts: int, count: int) -> frozenset[int]:
    """The `count` most used keys of a trace [tokens, layers, k]."""
    uses = Counter((trace.astype(np.int64) + experts * np.arange(trace.shape[1])[:, None]).reshape(-1).tolist())
    return frozenset(key for key, _ in uses.most_common(count))


def replay(trace: np.ndarray, experts: int, slots: int, name: str, warm: int = 0) -> float:
    """The hit rate of a policy on a trace [tokens, layers, k], counted from token `warm` on; pinned-hot pins what was used most before
    that."""
    hot = hottest(trace[:warm], experts, round(HOT_SHARE * slots)) if name == PINNED_HOT else ()
    held, hits, uses = ExpertSlots(slots, policy(name, slots, trace.shape[1], experts, hot)), 0, 0
    for token, layers in enumerate(trace.tolist()):
        for layer, numbers in enumerate(layers):
            held.policy.enter(layer)
            keys = [layer * experts + number for number in numbers]
            missing = [key for key in keys if held.find(key) is None]
            for key in missing:
                held.take(key, keys)
            if token >= warm:
                uses += len(keys)
                hits += len(keys) - len(missing)
    return hits / uses if uses else 0.0


def belady(trace: np.ndarray, experts: int, slots: int, warm: int = 0) -> float:
    """The hit rate of the optimal policy, which evicts the key whose next use is farthest (L. Belady, 1966)."""
    steps = [[layer * experts + number for number in numbers] for layers in trace.tolist() for layer, numbers in enumerate(layers)]
    never, width = len(steps), trace.shape[1]
    following: list[dict[int, int]] = [{} for _ in steps]
    upcoming: dict[int, int] = {}
    for at in range(len(steps) - 1, -1, -1):
        for key in steps[at]:
            following[at][key] = upcoming.get(key, never)
        upcoming.update(dict.fromkeys(steps[at], at))
    held: dict[int, int] = {}  # key -> its next use
    heap: list[tuple[int, int]] = []
    hits = uses = 0
    for at, keys in enumerate(steps):
        hit = sum(key in held for key in keys)
        if at // width >= warm:
            uses, hits = uses + len(keys), hits + hit
        for key in keys:
            held[key] = following[at][key]
        while len(held) > slots:
            distance, key = heapq.heappop(heap)
            if held.get(key) == -distance and key not in following[at]:
                del held[key]
        for key in keys:
            heapq.heappush(heap, (-held[key], key))
    return hits / uses if uses else 0.0


@dataclass(frozen=True)
class PolicyChoice:
    """A policy and its expected hit rate; `rates`: of all policies tried, empty without a trace. `hot`: for pinned-hot."""

    policy: str
    hit_rate: float
    rates: tuple[tuple[str, float], ...] = ()
    hot: frozenset[int] = frozenset()


def choose(trace: np.ndarray | None, experts: int, slots: int, layers: int) -> PolicyChoice:
    """The policy with the best hit rate on a trace [tokens, layers, k], warmed up on its first half and judged on the second. Without a
    trace: LRU, and the hit rate of uniform routing."""
    if trace is None or len(trace) < LEAST_TOKENS:
        return PolicyChoice(LRU, min(1.0, slots / (experts * layers)))
    if slots >= experts * layers:
        return PolicyChoice(LRU, 1.0)
    some, own = sample(trace, slots)
    rates = tuple((name, replay(some, experts, own, name, len(some) // 2)) for name in POLICIES)
    best, rate = max(rates, key=lambda each: each[1])
    hot = hottest(trace, experts, round(HOT_SHARE * slots)) if best == PINNED_HOT else frozenset()
    return PolicyChoice(best, rate, rates, hot)


def sample(trace: np.ndarray, slots: int) -> tuple[np.ndarray, int]:
    """At most MOST_REPLAYED uses of a trace: its newest tokens, in layers spread evenly over the depth, with a proportional share of the
    slots."""
    tokens, layers, top = trace.shape
    count = min(layers, max(1, MOST_REPLAYED // (top * min(tokens, 512))))
    chosen = np.linspace(0, layers - 1, count).round().astype(int)
    newest = max(LEAST_TOKENS, MOST_REPLAYED // (top * count))
    return trace[-newest:, chosen], max(2 * top * count, slots * count // layers)
