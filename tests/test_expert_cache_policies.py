"""Expert slots and eviction policies against naive models, replay and the optimum on traces, and the choice of a policy. Pure
arithmetic."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effllm.offload.expert_cache import (
    HALVE_AFTER,
    LEAST_STALE,
    LEAST_TOKENS,
    LFU,
    LRU,
    MOST_COUNT,
    MOST_REPLAYED,
    PINNED_HOT,
    POLICIES,
    ExpertSlots,
    belady,
    choose,
    hottest,
    policy,
    replay,
    sample,
)

LAYERS, EXPERTS, TOP = 3, 7, 2


def traces(tokens: int = 40) -> st.SearchStrategy:
    """Traces [tokens, LAYERS, TOP] with numbers in rising order."""
    one = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP, max_size=TOP, unique=True).map(sorted)
    return st.lists(st.lists(one, min_size=LAYERS, max_size=LAYERS), min_size=1, max_size=tokens).map(np.array)


class Scan:
    """A cache that looks at all it holds for each victim. `rank` gives what goes first the lowest value."""

    def __init__(self, slots: int, rank) -> None:
        self.slots, self.rank, self.held, self.now = slots, rank, set(), 0
        self.last: dict[int, int] = {}
        self.visits, self.seen = Counter(), {}
        self.count: dict[int, int] = {}
        self.uses, self.left = 0, []

    def use(self, key: int) -> None:
        self.now += 1
        self.last[key], self.seen[key] = self.now, self.visits[key // EXPERTS]
        self.count[key] = min(MOST_COUNT, self.count.get(key, 0) + 1)
        self.uses += 1
        if self.uses >= HALVE_AFTER * self.slots:
            self.uses, self.count = 0, {key: value // 2 for key, value in self.count.items()}

    def replay(self, trace: np.ndarray) -> list[bool]:
        found = []
        for layers in trace.tolist():
            for layer, numbers in enumerate(layers):
                if self.left[-1:] != [layer]:
                    self.left = [each for each in self.left if each != layer] + [layer]
                self.visits[layer] += 1
                keys = [layer * EXPERTS + number for number in numbers]
                missing = [key for key in keys if key not in self.held]
                for key in keys:
                    if key in self.held:
                        self.use(key)
                for key in missing:
                    if len(self.held) == self.slots:
                        self.held.remove(min(self.held - set(keys), key=lambda each: self.rank(self, each)))
                    self.held.add(key)
                    self.use(key)
                found += [key not in missing for key in keys]
        return found


def hits(trace: np.ndarray, slots: int, name: str, hot: frozenset[int] = frozenset()) -> list[bool]:
    held, found = ExpertSlots(slots, policy(name, slots, LAYERS, EXPERTS, hot)), []
    for layers in trace.tolist():
        for layer, numbers in enumerate(layers):
            held.policy.enter(layer)
            keys = [layer * EXPERTS + number for number in numbers]
            missing = [key for key in keys if held.find(key) is None]
            places = {held.take(key, keys)[0] for key in missing}
            assert len(places) == len(missing) and all(key in held for key in keys) and len(held) <= slots
            found += [key not in missing for key in keys]
    return found


@given(traces(), st.integers(TOP, LAYERS * EXPERTS))
def test_lru_is_the_longest_unused(trace: np.ndarray, slots: int) -> None:
    assert hits(trace, slots, LRU) == Scan(slots, lambda scan, key: scan.last[key]).replay(trace)


@given(traces(), st.integers(TOP, LAYERS * EXPERTS))
def test_decayed_lfu_is_the_lowest_count(trace: np.ndarray, slots: int) -> None:
    """Of equal ones the longest unused, as far as halving leaves that order."""
    scan = Scan(slots, lambda scan, key: (scan.count.get(key, 0), scan.last[key]))
    ours, theirs = hits(trace, slots, LFU), scan.replay(trace)
    until = next((i for i in range(len(ours)) if i + 1 >= HALVE_AFTER * slots), len(ours))
    assert ours[:until] == theirs[:until]


@given(traces(), st.integers(TOP, LAYERS * EXPERTS), st.sets(st.integers(0, LAYERS * EXPERTS - 1), max_size=8))
def test_pinned_hot_gives_up_hot_ones_last(trace: np.ndarray, slots: int, hot: set[int]) -> None:
    scan = Scan(slots, lambda scan, key: (key in hot, scan.last[key]))
    assert hits(trace, slots, PINNED_HOT, frozenset(hot)) == scan.replay(trace)


@given(traces(), st.integers(TOP, LAYERS * EXPERTS))
def test_least_stale_evicts_after_the_pass(trace: np.ndarray, slots: int) -> None:
    """A victim is stale wherever a layer that the pass has left holds something stale; and no other expert of the victim's layer that is
    held was unused for longer."""
    held = ExpertSlots(slots, chosen := policy(LEAST_STALE, slots, LAYERS, EXPERTS))
    visits, seen, last, now, here = Counter(), {}, {}, 0, 0
    for layers in trace.tolist():
        for layer, numbers in enumerate(layers):
            chosen.enter(layer)
            visits[layer] += 1
            here = layer
            keys = [layer * EXPERTS + number for number in numbers]
            missing = []
            for key in keys:
                if held.find(key) is None:
                    missing.append(key)
                else:
                    now += 1
                    seen[key], last[key] = visits[layer], now
            for key in missing:
                inside = {each for each in range(LAYERS * EXPERTS) if each in held} - set(keys)
                stale = {each for each in inside if each // EXPERTS != here and seen[each] < visits[each // EXPERTS]}
                _, victim = held.take(key, keys)
                now += 1
                seen[key], last[key] = visits[layer], now
                if victim is not None:
                    assert victim in (stale or inside)
                    rivals = stale or inside
                    assert not [each for each in rivals if each // EXPERTS == victim // EXPERTS and last[each] < last[victim]]


@given(traces(25), st.integers(TOP, LAYERS * EXPERTS))
def test_nothing_beats_the_future(trace: np.ndarray, slots: int) -> None:
    best = belady(trace, EXPERTS, slots)
    assert all(replay(trace, EXPERTS, slots, name) <= best + 1e-12 for name in POLICIES)
    distinct = len(np.unique(trace + EXPERTS * np.arange(LAYERS)[:, None]))
    assert belady(trace, EXPERTS, LAYERS * EXPERTS) == (trace.size - distinct) / trace.size


def exhaustive(steps: list[frozenset[int]], slots: int) -> int:
    """The most hits of any sequence of victims, by trying all of them."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for keys in steps:
        after: dict[frozenset[int], int] = {}
        for held, found in best.items():
            whole, count = held | keys, found + len(held & keys)
            spare, over = sorted(whole - keys), len(whole) - slots
            choices = [frozenset(whole)] if over <= 0 else [whole - frozenset(gone) for gone in combinations(spare, over)]
            for choice in choices:
                after[choice] = max(after.get(choice, 0), count)
        best = after
    return max(best.values())


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True), min_size=1, max_size=8), st.integers(2, 4))
def test_the_optimum_is_the_optimum(steps: list[list[int]], slots: int) -> None:
    trace = np.array(steps)[:, None, :]
    assert belady(trace, 5, slots) == exhaustive([frozenset(step) for step in steps], slots) / trace.size


def local(tokens: int, layers: int, experts: int, top: int, stay: float, seed: int = 1) -> np.ndarray:
    """Routing in which each expert of a token is one of the token before with the chance `stay`."""
    rng = np.random.default_rng(seed)
    found = np.zeros((tokens, layers, top), np.uint16)
    for layer in range(layers):
        now = rng.choice(experts, top, replace=False)
        for token in range(tokens):
            kept = now[rng.random(top) < stay]
            now = np.concatenate([kept, rng.choice(np.setdiff1d(np.arange(experts), kept), top - len(kept), replace=False)])
            found[token, layer] = np.sort(now)
    return found


def test_the_best_policy_of_the_trace_is_chosen() -> None:
    trace = local(120, 4, 32, 4, 0.7)
    chosen = choose(trace, 32, 40, 4)
    rates = dict(chosen.rates)
    assert set(rates) == set(POLICIES) and chosen.hit_rate == max(rates.values()) == rates[chosen.policy] >= rates[LRU]
    assert chosen.hit_rate > 40 / 128, "better than routing without any pattern"
    assert chosen == choose(trace, 32, 40, 4)


def test_a_few_hot_experts_are_pinned() -> None:
    """Bursts of others drive them out of an LRU again and again."""
    rng = np.random.default_rng(3)
    trace = np.array([[[i % 4, 4 + rng.integers(0, 60)] for _ in range(2)] for i in range(400)])
    chosen = choose(trace, 64, 14, 2)
    assert chosen.policy in (PINNED_HOT, LFU) and dict(chosen.rates)[LRU] < chosen.hit_rate
    assert replay(trace, 64, 14, PINNED_HOT, 200) > 2 * replay(trace, 64, 14, LRU, 200)


def test_without_a_trace_nothing_is_claimed() -> None:
    for trace in (None, local(LEAST_TOKENS - 1, 2, 16, 2, 0.5)):
        chosen = choose(trace, 16, 8, 2)
        assert (chosen.policy, chosen.hit_rate, chosen.rates) == (LRU, 0.25, ())
    assert choose(local(50, 2, 16, 2, 0.5), 16, 32, 2).hit_rate == 1.0


def test_some_layers_stand_for_all() -> None:
    trace = local(160, 48, 32, 4, 0.6)
    some, slots = sample(trace, 700)
    assert some.shape[1] < 48 and some.size <= 1.5 * MOST_REPLAYED and slots == 700 * some.shape[1] // 48
    whole, part = (replay(each, 32, count, LRU, 30) for each, count in ((trace[:60], 700), (some[:60], slots)))
    assert abs(whole - part) < 0.02


def test_the_hottest() -> None:
    trace = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 4]], [[0, 1], [2, 5]]])
    assert hottest(trace, 10, 3) == {0, 1, 12} and hottest(trace, 10, 0) == frozenset()


def test_nothing_is_evicted_that_is_busy() -> None:
    for name in POLICIES:
        held = ExpertSlots(2, policy(name, 2, LAYERS, EXPERTS))
        held.policy.enter(0)
        assert [held.take(key, (0, 1))[1] for key in (0, 1)] == [None, None]
        assert held.take(2, (0, 1, 2)) is None and 2 not in held
        slot, victim = held.take(2, (1, 2))
        assert victim == 0 and slot == 0 and held.drop(2) == 0 and held.free == []
    with pytest.raises(ValueError, match="no policy"):
        policy("best", 2, 2, 2)
