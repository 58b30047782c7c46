"""Markdown on a terminal: what is shown, independent of how the text was split, and no escape codes but our own get out."""

import io
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from effllm.cli.environment import Environment
from effllm.cli.markdown import MAX_SPAN, MarkdownStream
from effllm.cli.screen import Screen

CODES = re.compile(r"\x1b\[([0-9;]+)m")
BOLD, DIM, ITALIC, UNDERLINE, CODE = "1", "2", "3", "4", "36"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(text: str, *cuts: int, width: int = 80) -> str:
    stream = MarkdownStream(width)
    edges = [0, *sorted(cuts), len(text)]
    return "".join([*(stream.push(text[a:b]) for a, b in zip(edges, edges[1:])), stream.flush()])


def plain(text: str) -> str:
    return CODES.sub("", text)


def letters(text: str) -> list[tuple[str, frozenset[str]]]:
    """(character, styles it is shown in), which is what a user sees."""
    seen, on, at = [], frozenset(), 0
    for code in CODES.finditer(text):
        seen += [(c, on) for c in text[at : code.start()]]
        on = frozenset() if code[1] == "0" else on | set(code[1].split(";"))
        at = code.end()
    assert at == len(text) or not on, "a style was left on"
    return seen + [(c, on) for c in text[at:]]


def styles(text: str, word: str) -> set[str]:
    seen = letters(drawn(text))
    at = "".join(c for c, _ in seen).index(word)
    assert len({on for _, on in seen[at : at + len(word)]}) == 1
    return set(seen[at][1])


@pytest.mark.parametrize(("text", "word", "expected"), [
    ("a **bold** word", "bold", {BOLD}), ("an *italic* word", "italic", {ITALIC}), ("an _italic_ word", "italic", {ITALIC}),
    ("***both***", "both", {BOLD, ITALIC}), ("**bold and *both* here**", "both", {BOLD, ITALIC}), ("run `ls -l` now", "ls -l", {CODE}),
    ("``a ` b``", "a ` b", {CODE}), ("# Title", "Title", {BOLD, UNDERLINE}), ("### Part", "Part", {BOLD}),
    ("## A `b` c", "b", {BOLD, CODE}), ("[the wood](http://x.org)", "the wood (http://x.org)", {UNDERLINE}),
    ("```py\nx = *1*\n```\nafter", "x = *1*", {CODE}), ("```py\nx\n```\nafter", "after", set()), ("> said", "said", set()),
])
def test_marks_become_styles(text: str, word: str, expected: set[str]) -> None:
    assert styles(text, word) == expected


@pytest.mark.parametrize("text", ["2 * 3 * 4", "snake_case_name", "__init__x", "5 *stars", "a ` tick", "[no link]", "f(*args, **kwargs)",
                                  "c:\\new", "a_b_", "** spaced **", "#hashtag", "-5 degrees", "1. one", "    indented", "*", "`", "["])
def test_what_is_no_mark_is_shown_as_it_was_written(text: str) -> None:
    assert plain(drawn(text)) == text


def test_blocks() -> None:
    text = "- one\n* two\n  - three\n> so\n---\n\\*not\\*\n"
    assert plain(drawn(text)) == "• one\n• two\n  • three\n│ so\n" + "─" * 40 + "\n*not*\n"
    assert plain(drawn("---", width=30)) == "─" * 29


PIECES = st.lists(st.sampled_from(["word ", "*", "**", "_", "`", "```", "~~~", "\n", "\n\n", "# ", "- ", "> ", "| a | b |\n", "|---|---|\n",
                                   "[x", "](u)", "\\", " ", "é", "狐", "🦊", "--", "1. ", "x" * 60]), max_size=14)


@settings(max_examples=300)
@given(PIECES, st.lists(st.integers(0, 400), max_size=8))
@example(["**", "x" * 60, "word " * 80, "**"], [1, 2, 300, 399])
def test_the_cut_makes_no_difference_and_styles_never_leak(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    shown = drawn(text, *(min(cut, len(text)) for cut in cuts))
    assert letters(shown) == letters(drawn(text))
    assert letters(drawn(text, *range(len(text)))) == letters(drawn(text))
    assert "\x1b" not in plain(shown)


def test_plain_words_are_shown_at_once_and_marks_wait_a_bounded_time() -> None:
    stream = MarkdownStream(80)
    assert stream.push("Once upon") == "Once upon" and stream.push(" a *time") == " a "
    assert stream.push(" there") == ""
    assert plain(stream.push(" was" * MAX_SPAN)).startswith("*time there was"), "an emphasis that never ends is no emphasis"
    stream = MarkdownStream(80)
    assert stream.push("```\nx = 1") .endswith("\x1b[36mx = 1\x1b[0m"), "code streams too"


def test_tables_stand_in_columns_where_they_fit() -> None:
    table = "| name | *n* |\n|---|---:|\n| 狐 fox | 1 |\n| 🦊 | **22** |\nafter"
    lines = plain(drawn(table, width=40)).splitlines()
    assert lines[-1] == "after" and len(lines) == 5
    assert {get_cwidth(line.partition("│")[0]) for line in lines[:1] + lines[2:4]} == {7}, "wide characters count two columns"
    wide = f"| {'w' * 30} | {'x' * 30} |\n|---|---|\n| a | b |\n"
    assert drawn(wide, width=40) == wide, "what does not fit stays as it was written"
    assert drawn("| no table\n") == "| no table\n"
    assert all(get_cwidth(line) < 40 for line in plain(drawn(table + "\n\n---\n", width=40)).splitlines())


@given(st.lists(st.sampled_from(["word ", "**", "`", "\x1b", "[31m", "\x1b[2J", "\x1b]0;title\x07", "\x9b", "\r", "\n",
                                 "| a |\n", "|-|\n"]),
                max_size=12))
def test_escape_sequences_of_a_model_never_reach_the_terminal(pieces: list[str]) -> None:
    out = Terminal()
    screen = Screen(Environment(io.StringIO(), out, Terminal(), {}))
    screen.markdown = True
    for piece in pieces:
        screen.answer(piece)
    screen.end_answer()
    rest = re.sub(r"\x1b\[(?:[1234]|36|0)(?:;(?:[1234]|36))*m", "", out.getvalue())
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in rest), "more than our own styles"


@pytest.mark.parametrize(("out", "variables"), [(io.StringIO(), {}), (Terminal(), {"NO_COLOR": "1"}), (Terminal(), {"TERM": "dumb"})])
def test_only_a_terminal_with_styles_draws(out: io.StringIO, variables: dict[str, str]) -> None:
    screen = Screen(Environment(io.StringIO(), out, io.StringIO(), variables))
    screen.markdown = True
    assert not screen.markdown
    screen.answer("a **bold** `word`")
    screen.end_answer()
    assert out.getvalue() == "a **bold** `word`\n"


def test_one_answer_does_not_colour_the_next() -> None:
    out = Terminal()
    screen = Screen(Environment(io.StringIO(), out, Terminal(), {}))
    screen.markdown = True
    for answer in ("```\nnever closed", "plain words"):
        screen.answer(answer)
        screen.end_answer()
    assert out.getvalue().endswith("\nplain words\n")
