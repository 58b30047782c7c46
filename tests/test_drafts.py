"""Where drafts come from and how long they are: suffixes against a naive search, recycled tokens, costs and trust without a clock."""

import random
from array import array
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effllm.runtime.prefill_chunks import COMPARED_TOKENS, common_prefix
from effllm.runtime.speculation.draft_length import (
    IN_MEMORY,
    MAX_COST_AGE,
    ON_DISK,
    SINGLE_TOKEN_INTERVAL,
    AcceptanceRates,
    DraftThresholds,
    PassCosts,
    best_length,
)
from effllm.runtime.speculation.drafts import MAX_MATCH, MAX_POSITIONS, MIN_MATCH, SUCCESSORS, RecycledTokens, SuffixMatch


def suffix(tokens: list[int], place: int) -> int:
    """Tokens up to `place` that are those at the end."""
    length = 0
    while length < MAX_MATCH and length <= place and tokens[place - length] == tokens[-1 - length]:
        length += 1
    return length


def longest(tokens: list[int]) -> int:
    found = max((suffix(tokens, place) for place in range(len(tokens) - 1)), default=0)
    return found if found >= MIN_MATCH else 0


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=MAX_POSITIONS), st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 9))
def test_the_longest_suffix_is_found_however_the_text_comes(tokens: list[int], cuts: list[int], most: int) -> None:
    matcher, at = SuffixMatch(), 0
    while at < len(tokens):
        step = cuts[at % len(cuts)]
        history = tokens[: at + step]
        matcher.follow(history, at)
        at = len(history)
        length, place = matcher.match()
        assert length == longest(history)
        if length:
            assert place < at - 1 and suffix(history, place) == length
            draft, repeated = matcher.propose(most), list(history)
            while len(repeated) < at + most:
                repeated.append(repeated[len(repeated) - (at - 1 - place)])
            assert draft.tokens == tuple(repeated[at:])


@given(st.lists(st.integers(0, 4), max_size=400))
def test_a_bounded_search_never_claims_more_than_is_there(tokens: list[int]) -> None:
    matcher = SuffixMatch()
    for at in range(len(tokens)):
        matcher.follow(tokens[: at + 1], at)
        length, place = matcher.match()
        assert length <= longest(tokens[: at + 1])
        assert length == (0 if place < 0 else suffix(tokens[: at + 1], place))


def test_another_text_begins_again() -> None:
    matcher = SuffixMatch()
    matcher.follow([1, 2, 3, 4, 1, 2], 0)
    assert matcher.propose(2).tokens == (3, 4)
    matcher.follow([9, 8, 1, 2], 0)
    assert matcher.propose(2) is None and matcher.propose(0) is None


def test_after_a_word_that_was_changed_the_text_continues_as_it_went() -> None:
    matcher, text = SuffixMatch(), [5, 6, 7, 8, 9, 10, 11, 5, 6, 7]
    matcher.follow(text, 0)
    assert matcher.propose(2).tokens == (8, 9) and matcher.propose(2).kind[0] == "match"
    matcher.follow([*text, 99], len(text))
    assert matcher.propose(2).tokens == (9, 10) and matcher.propose(2).kind == ("resumed", 0)
    matcher.follow([*text, 99, 9], len(text) + 1)
    assert matcher.propose(2).tokens == (10, 11) and matcher.propose(2).kind == ("resumed", 1)


def test_a_text_of_one_word_follows_itself() -> None:
    matcher = SuffixMatch()
    matcher.follow([4] * 200, 0)
    assert matcher.match()[0] == MAX_MATCH and matcher.propose(7).tokens == (4,) * 7


def test_recycled_tokens_are_the_likeliest_of_past_passes_and_leave_logits_alone() -> None:
    recycled, rows = RecycledTokens(), np.zeros((2, 10), np.float32)
    rows[0, [3, 7]], rows[1, [5, 2]] = (9, 8), (4, 3)
    before = rows.copy()
    recycled.observe([1, 3], rows)
    assert np.array_equal(rows, before)
    recycled.follow([8, 1], 0)
    assert recycled.propose(2).tokens == (3, 5) and recycled.propose(9).tokens == (3, 5), "nothing is known behind 5"
    rows[0, 7] = 10
    recycled.observe([1], rows[:1])
    assert recycled.propose(1).tokens == (7,), "what was found last counts most"
    assert all(len(found) <= SUCCESSORS for found in recycled._successors.values())
    recycled.follow([6], 0)
    assert recycled.propose(3) is None


def test_a_common_prefix_ends_at_the_first_that_differs() -> None:
    assert [common_prefix(*pair) for pair in (([1, 2, 3], [1, 2, 4]), ([], [1]), ([1], [1, 2]), ([2], [1]))] == [2, 0, 1, 0]
    long = [*range(2 * COMPARED_TOKENS)]
    for same in (COMPARED_TOKENS - 1, COMPARED_TOKENS, COMPARED_TOKENS + 1, 2 * COMPARED_TOKENS):
        for made in (list, tuple, partial(array, "Q")):
            assert common_prefix(made(long), [*long[:same], -1]) == same, "long ones are compared in pieces"


def costs(ratios: dict[int, float], pays: DraftThresholds = ON_DISK) -> PassCosts:
    made = PassCosts(pays)
    for columns, ratio in {1: 1.0, **ratios}.items():
        for _ in range(3):
            made.record(columns, ratio)
    return made


def test_length_follows_what_is_right_and_what_it_costs() -> None:
    free = costs(dict.fromkeys(range(2, 9), 1.0))
    assert best_length(0.95, free, 7)[0] == 7 and best_length(0.01, free, 7)[0] == 0 and best_length(0.95, free, 0)[0] == 0
    dear = costs({columns: 1 + 0.6 * (columns - 1) for columns in range(2, 9)})
    assert best_length(0.3, dear, 7)[0] == 0 and 0 < best_length(0.9, dear, 7)[0]
    step = costs({**dict.fromkeys(range(2, 5), 1.0), **dict.fromkeys(range(5, 9), 3.0)})
    assert best_length(0.9, step, 7)[0] == 3, "up to where the processor becomes the limit"
    assert best_length(0.9, free, 7, per_token=0.0)[1] > best_length(0.9, free, 7, per_token=0.2)[1]


def test_costs_are_measured_and_forgotten() -> None:
    made = PassCosts()
    assert made.single_token_is_due
    made.record(1, 1.0)
    made.record(1, 1.0)
    assert not made.single_token_is_due and made.ratio(4) == pytest.approx(1.3), "guessed low"
    made.record(4, 3.0)
    assert made.ratio(4) == 3.0 and made.ratio(3) == pytest.approx(1.2) and made.ratio(5) == pytest.approx(3.1)
    for _ in range(SINGLE_TOKEN_INTERVAL):
        made.record(2, 1.0)
    assert made.single_token_is_due
    for _ in range(MAX_COST_AGE + 1):
        made.record(1, 1.0)
    assert made.ratio(4) == pytest.approx(1.3), "what was long ago is tried again"


def test_in_memory_a_guess_is_begun_with_more_to_gain() -> None:
    untried = {pays: costs({}, pays) for pays in (ON_DISK, IN_MEMORY)}
    assert untried[IN_MEMORY].ratio(3) == pytest.approx(1.8) and untried[ON_DISK].ratio(3) == pytest.approx(1.2)
    assert best_length(0.5, untried[ON_DISK], 7)[0] > 0 == best_length(0.5, untried[IN_MEMORY], 7)[0], "a kind of guess that is new"
    assert best_length(0.9, untried[IN_MEMORY], 7)[0] > 2
    dear = {columns: 1 + 0.6 * (columns - 1) for columns in range(2, 9)}
    assert best_length(0.68, costs(dear), 7)[0] > 0 == best_length(0.68, costs(dear, IN_MEMORY), 7)[0]


def test_trust_is_of_late_and_by_kind() -> None:
    trust = AcceptanceRates()
    assert trust.rate("new") == 0.5
    for _ in range(200):
        trust.update("wrong", (1, 2), (3,))
        trust.update("right", (1, 2, 3), (1, 2, 3, 4))
    assert trust.rate("wrong") < 0.02 and trust.rate("right") > 0.95
    for _ in range(60):
        trust.update("wrong", (1, 2, 3), (1, 2, 3))
    assert trust.rate("wrong") > 0.7


def test_random_text_is_never_matched_long() -> None:
    text, matcher, found = [random.Random(1).randrange(1000) for _ in range(500)], SuffixMatch(), 0
    for at in range(len(text)):
        matcher.follow(text[: at + 1], at)
        found += matcher.match()[0] > 0
    assert found == sum(longest(text[: at + 1]) > 0 for at in range(len(text)))
