"""Word wrap of a streamed answer: no word is cut, nothing is lost, and how the text was split makes no difference."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effllm.cli.environment import Environment
from effllm.cli.markdown import MarkdownStream
from effllm.cli.screen import Screen
from effllm.cli.word_wrap import LONG, WordWrap, display_width

WIDTH = 20
STORY = "Once upon a time there was a fox who wanted to be king of all the forests."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wrapped(text: str, *cuts: int, width: int = WIDTH) -> str:
    stream = WordWrap(lambda: width)
    edges = [0, *sorted(cuts), len(text)]
    return "".join([*(stream.push(text[a:b]) for a, b in zip(edges, edges[1:])), stream.flush()])


def test_lines_end_between_words() -> None:
    assert wrapped(STORY).split("\n") == ["Once upon a time", "there was a fox who", "wanted to be king of", "all the forests."]


def test_a_word_waits_near_the_edge_alone() -> None:
    stream = WordWrap(lambda: 80)
    assert stream.push("A wo") == "A wo" and stream.push("rd " * 16) == "rd" + " rd" * 15, "far from it each letter passes at once"
    assert stream.push("kin") == "", "there is room, but it may become longer"
    assert stream.push("g ") == " king" and stream.push("internationali") == ""
    assert stream.push("sation ") == " internationalisation" and stream.push("end.") == "" and stream.flush() == "\nend."


@pytest.mark.parametrize(("text", "lines"), [
    ("word " + "x" * 45 + " end", ["word", "x" * 45 + " end"]),
    ("- a point of a list that is long", ["- a point of a list", "  that is long"]),
    ("  12. numbered and long, too", ["  12. numbered and", "      long, too"]),
    ("> a quotation of some length", ["> a quotation of", "  some length"]),
    (" there was a fox in the forest\n a line that is indented", [" there was a fox in", "the forest", " a line that is", " indented"]),
    (" - a point of a list that is long", [" - a point of a list", "   that is long"]),
    ("four    blanks  stay there", ["four    blanks  stay", "there"]),
    ("exactly twenty here.\nnext", ["exactly twenty here.", "next"]),
    ("a\n\n\nb", ["a", "", "", "b"]),
    ("从前有一个很小的王国，那里住着一只聪明的狐狸。", ["从前有一个很小的王", "国，那里住着一只聪明", "的狐狸。"]),
    ("「狐狸对国王说从前有「一」", ["「狐狸对国王说从前有", "「一」"]),
    ("여우가 왕에게 말했다 그리고 갔다", ["여우가 왕에게 말했다", "그리고 갔다"]),
    ("flags: 🇫🇷🇩🇪🇮🇹🇪🇸", ["flags: 🇫🇷🇩🇪🇮🇹", "🇪🇸"]),
    ("1234567890123 👩\u200d👩\u200d👧", ["1234567890123 👩\u200d👩\u200d👧"]),
    ("123456789012345 👩\u200d👩\u200d👧", ["123456789012345", "👩\u200d👩\u200d👧"]),
    ("e\u0301" * 12 + " " + "e\u0301" * 8, ["e\u0301" * 12, "e\u0301" * 8]),
])
def test_what_a_line_is_made_of(text: str, lines: list[str]) -> None:
    assert wrapped(text).split("\n") == lines


CODE = "```python\nprint('a line of code that is longer than that', 1)\n    indented = 'and so is this line'\n```\n"


def test_code_and_tables_stay_as_they_are_and_prose_after_them_does_not() -> None:
    table = "| a long cell of a table | and one more of them |\n"
    shown = wrapped(f"{CODE}{table}{STORY}")
    assert shown == CODE + table + wrapped(STORY)
    unclosed = "~~~\n```\nstill a line of code that is long enough"
    assert wrapped(unclosed) == unclosed


def test_json_is_not_broken_whose_texts_hold_no_line_breaks() -> None:
    text = '\n{"a name of some length": "and a text that is\\n longer than a line", "b": 1}\nand words behind it, too'
    assert wrapped(text) == text
    stream = WordWrap(lambda: WIDTH)
    stream.is_preformatted = True
    listed = '["a text that is longer", "than a line"]'
    assert stream.push(listed) + stream.flush() == listed


LETTERS = st.sampled_from(["word ", "a", " ", "  ", "\n", "- ", "```\n", "| ", "狐", "。", "「", "🦊", "👩\u200d👧", "🇫🇷", "\t",
                           "x" * (LONG - 1), "\x1b[1m", "\x1b[0m"])


@settings(max_examples=200)
@given(st.lists(LETTERS, max_size=30).map("".join), st.data())
def test_pieces_make_no_difference_and_nothing_is_lost(text: str, data: st.DataObject) -> None:
    # A code comes whole, as all that `markdown` gives does.
    ends = [at for at in range(len(text)) if not re.search(r"\x1b[^m]*\Z", text[:at])]
    cuts = data.draw(st.lists(st.sampled_from(ends or [0]), max_size=6))
    assert wrapped(text, *cuts) == wrapped(text)
    bare = re.sub(r"\x1b\[\dm", "", wrapped(text))
    assert "".join(bare.split()) == "".join(re.sub(r"\x1b\[\dm", "", text).split())


@given(st.lists(st.sampled_from(["a", "fox", "king", "goldsmiths", "狐狸", "說。"]), min_size=1, max_size=40).map(" ".join),
       st.integers(12, 60))
def test_no_line_is_longer_than_the_terminal(text: str, width: int) -> None:
    shown = wrapped(text, width=width)
    lines = shown.split("\n")
    assert max(map(display_width, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert set(re.findall("[a-z]+", shown)) <= set(text.split()), "a word was cut"


def test_a_style_continues_after_the_break_and_its_indent_has_none() -> None:
    drawn = MarkdownStream(WIDTH).push("- **bold words that go on** end\n")
    assert wrapped(drawn) == "• \x1b[1mbold words that go\x1b[0m\n  \x1b[1mon\x1b[0m end\n"


def test_a_window_that_changes_its_size_in_the_middle() -> None:
    widths = [20, 20, 40]
    stream = WordWrap(lambda: widths.pop(0) if len(widths) > 1 else widths[0])
    shown = "".join(stream.push(f"{word} ") for word in STORY.split()) + stream.flush()
    assert max(map(len, shown.split("\n"))) > 20 and " ".join(shown.split()) == STORY


def screen(out: io.StringIO, err: io.StringIO) -> Screen:
    return Screen(Environment(io.StringIO(), out, err, {"NO_COLOR": "1"}))


def test_a_pipe_gets_the_text_as_it_is_a_terminal_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = STORY + "\n"
    for kind, expected in ((io.StringIO, text), (Terminal, wrapped(text, width=40))):
        out, err = kind(), kind()
        shown = screen(out, err)
        for at in range(0, len(text), 3):
            shown.thinking(text[at : at + 3])
        for at in range(0, len(text), 3):
            shown.answer(text[at : at + 3])
        shown.end_answer()
        assert (out.getvalue(), err.getvalue()) == (expected, expected)


def test_a_remark_amid_an_answer_comes_after_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    both = Terminal()
    shown = screen(both, both)
    shown.answer("A fox went out and in again and sai")
    shown.note("a remark")
    shown.answer("d that it was so")
    shown.end_answer()
    assert both.getvalue() == "A fox went out and in again and sai\na remark\nd that it was so\n"
