"""Module name patterns from untrusted configs: what they match, and that none takes long."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.runtime.stores.name_patterns import matches

PIECES = st.sampled_from([r"\.", ".*", ".", "a", "b", "ab", r"\d+", "[ab]", "[^a]", "(a|b)", "(?:ab|.b)*", "a?", "b+", "(a|)", "^", "$",
                          r"\w", "[a-c]", "(a.*|b)+", "1"])


@given(st.lists(PIECES, max_size=8).map("".join), st.text("ab.1c", max_size=12))
def test_patterns_fit_as_a_library_says(pattern: str, name: str) -> None:
    assert matches(pattern, name) == (re.match(pattern, name) is not None)
    assert matches(pattern, name, anywhere=True) == (re.search(pattern, name) is not None)


@pytest.mark.parametrize("pattern", ["(", ")", "a{2}", "(?i)a", "(?=a)", r"\1", "[", "*", "a**", "\\", "[b-a]", "[]", "(" * 500 + ")" * 500,
                                     "a" * 5000])
def test_what_is_not_understood_fits_nothing(pattern: str) -> None:
    assert not matches(pattern, "a" * 20) and not matches(pattern, "", anywhere=True)


def test_a_pattern_that_a_library_never_finishes_is_answered() -> None:
    assert not matches("((a*)*)*" * 20 + "b", "a" * 200, anywhere=True) and matches("(a|aa)+$", "a" * 200)
