"""Recurrent states, which cannot be truncated: after any pass, interruption, draft or rollback, a pass starts from the state of exactly the
tokens held.

The layers here are made up: a slot holds the tokens that went into it. Kernels are in `test_state_kernels.py`, models in `test_hybrid.py`.
"""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.kernels.delta_shape import DeltaShape
from effllm.kernels.layout import F16, MAX_DECODE_TOKENS, PAGE, PageLayout
from effllm.kernels.state_shape import AFTER, FROM, KEPT, NO_SLOT, TO
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_shape import CacheShape
from effllm.runtime.kv.states import TAIL, States, controls
from effllm.runtime.policy.keep import Keep

SHAPE = DeltaShape(1, 1, 4, 4, 2)


class Tokens:
    """What `LayerStates` are, of lists of tokens."""

    def __init__(self, told: np.ndarray) -> None:
        self.told, self.slots, self.last = told, {slot: ["nothing"] for slot in range(SHAPE.slots)}, []

    def run(self, tokens: list[int], whole: bool = True) -> list[int]:
        """A pass; returns what it read. One that is not `whole` breaks off with a slot half written."""
        source, target = self.told[FROM], self.told[TO]
        before = [] if source == NO_SLOT else self.slots[source]
        assert source != target and (not self.told[AFTER] or self.told[KEPT] not in (source, target))
        self.slots[target] = [*before, *tokens] if whole else ["broken"]
        if self.told[AFTER]:
            self.slots[self.told[KEPT]] = [*before, *tokens[: self.told[AFTER]]] if whole else ["broken"]
        self.last = tokens
        return list(before)

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        assert len(self.last) <= MAX_DECODE_TOKENS
        self.slots[target] = [*([] if source == NO_SLOT else self.slots[source]), *self.last[:tokens]]

    def read_slot(self, slot: int) -> np.ndarray:
        return np.array(self.slots[slot])

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        self.slots[slot] = data.tolist()


class Text:
    """A cache without pages to speak of, and the tokens that it holds."""

    def __init__(self) -> None:
        told = controls()
        self.layer, self.held, self.next = Tokens(told), [], 0
        self.cache = KVCache([], [], Keep(), CacheShape(100_000, window=128, chunk=512), [PageLayout(1, 16, F16)],
                             states=States([self.layer], [SHAPE], told), stateful={0: self.layer})

    def new(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def prompt(self, count: int) -> None:
        tokens = self.new(count)
        for piece in self.cache.pieces(count):
            self.cache.begin(piece, prompt=True)
            assert self.layer.run(tokens[:piece]) == self.held
            self.cache.commit()
            self.held += tokens[:piece]
            tokens = tokens[piece:]

    def write(self, count: int) -> None:
        for token in self.new(count):
            self.cache.begin(1)
            assert self.layer.run([token]) == self.held
            self.cache.commit()
            self.held.append(token)

    def draft(self, count: int, right: int) -> None:
        """A pass of `count` tokens, of which `right` come true one by one."""
        tokens = self.new(count)
        self.cache.begin(count)
        assert self.layer.run(tokens) == self.held
        for _ in range(right):
            self.cache.commit(1)
        self.held += tokens[:right]

    def broken(self, count: int, prompt: bool) -> None:
        self.cache.begin(count, prompt)
        assert self.layer.run(self.new(count), whole=False) == self.held

    def back(self, to: int) -> int:
        kept = self.cache.truncate(to)
        assert kept == self.cache.n <= max(to, 0)
        del self.held[kept:]
        return kept


ACTIONS = st.one_of(
    st.tuples(st.just("prompt"), st.integers(1, 700)), st.tuples(st.just("write"), st.integers(1, 5)),
    st.integers(1, MAX_DECODE_TOKENS).flatmap(lambda count: st.tuples(st.just("draft"), st.just(count), st.integers(0, count))),
    st.tuples(st.just("broken"), st.integers(1, 200), st.booleans()), st.tuples(st.just("back"), st.floats(0, 1)))


@given(st.lists(ACTIONS, max_size=25))
def test_a_pass_reads_the_state_after_what_is_held(actions: list[tuple]) -> None:
    text = Text()
    for name, *values in actions:
        if name == "back":
            text.back(int(values[0] * len(text.held)))
        else:
            getattr(text, name)(*values)
        assert text.cache.n == len(text.held)
    text.write(1)


def test_rollback_slots() -> None:
    """A draft goes back to any of its tokens, a prompt to a little before its end, the turn before to where it ended."""
    text = Text()
    text.prompt(1000)
    assert text.back(999) == 1000 - TAIL
    text.prompt(TAIL)
    text.write(50)
    assert text.back(len(text.held) - 1) == len(text.held), "the last token is forgotten"
    text.draft(6, 6)
    end = len(text.held)
    assert text.back(end - 4) == end - 4
    text.write(1)
    turn = len(text.held)
    text.prompt(200)
    text.write(20)
    assert text.back(turn + 150) == turn, "a slot before the end of the prompt would be later"


def test_a_short_prompt_is_read_again() -> None:
    text = Text()
    text.prompt(TAIL)
    text.write(30)
    assert text.back(TAIL) == 0
    text.prompt(40)


def test_what_is_kept_outside_comes_back() -> None:
    text = Text()
    assert text.cache.states.read(0) == []
    text.prompt(300)
    text.draft(5, 3)
    other = Text()
    other.cache.adopt(len(text.held), 0)
    other.cache.states.write(len(text.held), text.cache.states.read(text.cache.n))
    other.held, other.next = list(text.held), text.next
    other.write(2)
    assert other.back(100) == 0


def test_a_long_pass_is_held_as_a_whole() -> None:
    text = Text()
    text.cache.begin(100)
    text.layer.run(text.new(100))
    text.cache.commit(50)
    with pytest.raises(RuntimeError, match="no state behind 50"):
        text.cache.begin(1)


def test_slots_suffice_whatever_the_order() -> None:
    draw, text = random.Random(1), Text()
    for _ in range(300):
        text.prompt(draw.choice((5, 20, TAIL, 100, 5 * PAGE)))
        text.draft(8, draw.randrange(9))
        if draw.random() < 0.5:
            text.back(draw.randrange(len(text.held) + 1))
