"""Repetition counts in GBNF: nested counts collapsed into one, zero, and invalid ones reported by position."""

import time

import pytest
from test_constraint import engine, tokenizer

from effllm import UsageError
from effllm.runtime.constraints.constraint import grammar_constraint, located_in_gbnf
from effllm.runtime.constraints.gbnf import GbnfError, gbnf_position, to_lark
from effllm.runtime.constraints.gbnf_repeats import Repeat

__all__ = ["engine", "tokenizer"]  # fixtures

SMALL = [(least, most) for least in range(5) for most in (*range(least, 6), None)]
TOP = 60  # numbers up to this are held against each other
NESTED = 'root ::= ((a{1,100}){1,100}){1,100}\na ::= "a"\n'


def numbers(count: Repeat) -> set[int]:
    return set(range(count.least, TOP + 1 if count.most is None else min(count.most, TOP) + 1))


def of_each_other(outer: Repeat, inner: Repeat) -> set[int]:
    """How often a part may come, found by adding up."""
    found, sums, times = set(), {0}, 0
    while times <= (TOP + 2 if outer.most is None else outer.most):
        found |= sums if times >= outer.least else set()
        sums = {one + more for one in sums for more in numbers(inner) if one + more <= TOP}
        times += 1
    return found


def test_one_count_says_what_two_say_wherever_there_is_one() -> None:
    made = 0
    for outer in (Repeat(*bounds) for bounds in SMALL):
        for inner in (Repeat(*bounds) for bounds in SMALL):
            one, expected = outer.of(inner), of_each_other(outer, inner)
            if one is None:
                assert expected != set(range(min(expected), max(expected) + 1)), (outer, inner)
            else:
                made += 1
                assert numbers(one) == expected, (outer, inner, one)
            assert one is None or Repeat.read(str(one)) == one
    assert 300 < made < len(SMALL) ** 2


@pytest.mark.parametrize(("grammar", "part"), [
    (NESTED, "){1,1000000}"), ('root ::= (("x"*)+)?', "(/x/)*"), ('root ::= ("x"{2}){3}', "(/x/){6}"),
    ('root ::= ("x"{2}){2,3}', "((/x/){2}){2,3}"), ('root ::= x{2}\nx ::= "x"{1,4}', "(/x/){2,8}"),
    ('root ::= ("x"{100000}){100000}', "((/x/){100000}){100000}")])
def test_what_is_read_has_as_few_counts_as_say_it(grammar: str, part: str) -> None:
    assert part in to_lark(grammar, as_one=False)


def test_a_count_of_none_is_nothing() -> None:
    for grammar in ('root ::= "a"{0} "b"', 'root ::= ("a"{0,0})* "b"', 'root ::= "a" | x{0}\nx ::= "c" x | "d"'):
        grammar_constraint(grammar, "--grammar", "it")
        assert "{0" not in to_lark(grammar)


def test_an_answer_of_counts_of_counts_is_not_interrupted(tokenizer) -> None:
    held = grammar_constraint(NESTED, "--grammar", "it").compile(tokenizer, tokenizer.vocab_size).begin()
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    for _ in range(2000):
        held.accept(letter, free=False)
    assert held.is_whole


def test_a_count_that_is_too_large_is_refused_by_its_place() -> None:
    begun = time.process_time()
    with pytest.raises(GbnfError, match="line 2: expected a count of at most 2147483647 after"):
        to_lark('root ::=\n "a"{2147483648} | "b"')
    assert time.process_time() - begun < 1


def test_places_are_those_of_the_grammar_that_was_written() -> None:
    text = 'root ::= x "c"\n# x and y\nx ::= "a"{3} y\ny ::= "b" x | "d"\n'
    lark = to_lark(text, as_one=False)
    stands = {part: gbnf_position(text, lark, 1 + next(at for at, line in enumerate(lark.splitlines()) if part in line and ": " in line))
              for part in ("/c/", "/a/", "/b/", "/d/", "r1_x: ")}
    assert stands == {"/c/": (1, "root"), "/a/": (3, "x"), "/b/": (4, "y"), "/d/": (4, "y"), "r1_x: ": (3, "x")}
    assert gbnf_position(text, lark, 1) is None and gbnf_position(text, lark, 99) is None
    line = 1 + next(at for at, each in enumerate(lark.splitlines()) if "/a/" in each and ": " in each)
    told = UsageError(f"--grammar: it: line {line}, column 24: no such number", "correct it")
    assert located_in_gbnf(told, text, lark).message == "--grammar: it: line 3, in the rule x: no such number"
    assert located_in_gbnf(UsageError("--grammar: it: too large"), text, lark).message == "--grammar: it: too large"
