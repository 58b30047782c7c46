"""What goes to which stream, and what is not sent to a terminal: pure text against simulated streams."""

import io
import itertools
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm import EffllmError
from effllm.cli.environment import Environment
from effllm.cli.loading import show_progress
from effllm.cli.number_format import rounded
from effllm.cli.screen import Screen, cell_width, format_progress, wrap_line
from effllm.offload.notes import Detail
from effllm.runtime.events import Notice, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(out: io.StringIO | None = None, err: io.StringIO | None = None, stdin: object = None, **variables: str) -> Screen:
    return Screen(Environment(stdin or io.StringIO(), out or io.StringIO(), err or io.StringIO(), variables))


def texts(shown: Screen) -> tuple[str, str]:
    return shown.environment.stdout.getvalue(), shown.environment.stderr.getvalue()


def test_a_pipe_gets_the_answer_as_it_is_and_one_newline() -> None:
    shown = screen()
    for piece in ("Once ", "\x1b[31mred\x1b[0m", " end"):
        shown.answer(piece)
    shown.end_answer()
    assert texts(shown) == ("Once \x1b[31mred\x1b[0m end\n", "")
    shown = screen()
    shown.answer("ends with one\n")
    shown.end_answer()
    assert texts(shown)[0] == "ends with one\n"
    shown = screen()
    shown.end_answer()
    assert texts(shown)[0] == "", "nothing was said, so nothing is written"


@given(st.lists(st.sampled_from(["word ", "\x1b", "[2J", "\x1b[31m", "]0;title\x07", "\x9b", "\r", "\n", "é", "\u202e"]), max_size=12))
def test_a_terminal_gets_no_control_characters_however_they_are_cut(pieces: list[str]) -> None:
    shown = screen(out=Terminal())
    for piece in pieces:
        shown.answer(piece)
    shown.end_answer()
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c == "\u202e" for c in texts(shown)[0])


def test_thinking_goes_to_stderr_dim_on_a_terminal_plain_in_a_pipe() -> None:
    for err, expected in ((Terminal(), "\x1b[2mhm\x1b[0m\n"), (io.StringIO(), "hm\n")):
        shown = screen(err=err)
        shown.thinking("hm")
        shown.answer("Yes.")
        shown.end_answer()
        assert texts(shown) == ("Yes.\n", expected)


def test_a_note_never_lands_in_a_line_of_the_answer() -> None:
    shown = screen(out=Terminal(), err=Terminal(), NO_COLOR="1")
    shown.answer("half a line")
    shown.note("a remark\nin one line")
    assert texts(shown) == ("half a line\n", "a remark in one line\n")
    piped = screen()
    piped.answer("half a line")
    piped.note("a remark")
    assert texts(piped) == ("half a line", "a remark\n"), "into a file no line break is added for the sake of a screen"


@given(st.text(alphabet="ab 狐é", max_size=60), st.integers(4, 30), st.integers(0, 3))
def test_a_line_is_broken_between_words_alone(text: str, width: int, hang: int) -> None:
    lines = wrap_line(text, width, hang)
    assert "".join(lines).replace(" ", "") == text.replace(" ", ""), "every word is there, whole and once"
    assert [word for line in lines for word in line.split()] == text.split()
    for index, line in enumerate(lines):
        alone = len(line.split()) < 2
        assert cell_width(line.rstrip()) <= width or alone, (line, width)
        assert not index or not line.strip() or line.startswith(" " * hang)


@pytest.mark.parametrize(("text", "lines"), [
    ("hint: give an alias or org/repo: effllm list --all", ["hint: give an alias or org/repo:", "  effllm list --all"]),
    ('effllm run MODEL "your prompt" in quotes', ['effllm run MODEL "your prompt" in quotes']),
    ("a; effllm pull org/model:4bit --keep; then say so", ["a; effllm pull org/model:4bit --keep;", "  then say so"]),
    ("correct it, or in the end `unset EFFLLM_SEED`, and go on", ["correct it, or in the end", "  `unset EFFLLM_SEED`, and go on"]),
    ("effllm list shows the models that are here; so", ["effllm list shows the models that are", "  here; so"]),
    ("two  blanks  `a b`  c", ["two  blanks  `a b`  c"])])
def test_a_command_that_fits_a_line_stays_whole(text: str, lines: list[str]) -> None:
    """It is there to be pasted."""
    assert wrap_line(text, 40, 2) == lines


def test_figures_are_rounded_without_powers_of_ten() -> None:
    assert [rounded(value) for value in (0.5234, 18.24, 159.4, 1333.0, 99_960.0)] == ["0.523", "18.2", "159", "1330", "100000"]
    assert rounded(1333.0, 2) == "1300" and rounded(0.00001234) == "1.23e-05"


def test_a_pipe_gets_a_line_whole() -> None:
    figures = "prompt 17 tokens · answer 90 tokens · first token 1.74 s · load 0.65 s · seed 4 · and more than fits in a line"
    piped, shown = screen(), screen(err=Terminal(), NO_COLOR="1")
    piped.note(figures)
    shown.note(figures)
    assert texts(piped)[1] == figures + "\n"
    assert len(texts(shown)[1].splitlines()) > 1 and texts(shown)[1].replace("\n  ", " ") == figures + "\n"


def test_a_table_that_no_folding_fits_is_told_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    headings, rows = ("model", "family", "parameters", "size", "licence"), [
        ("fable", "llama", "5.8M", "11.01 MiB", "Apache-2.0"), ("狐狸", "qwen2", "", "1.00 GiB", "MIT")]
    monkeypatch.setenv("COLUMNS", "40")
    shown = screen(out=Terminal(), NO_COLOR="1")
    shown.table(headings, rows, right=(2, 3))
    assert texts(shown)[0] == ("fable\n  family llama · parameters 5.8M · size\n  11.01 MiB · licence Apache-2.0\n"
                               "狐狸\n  family qwen2 · size 1.00 GiB · licence\n  MIT\n")
    monkeypatch.setenv("COLUMNS", "60")
    wide = screen(out=Terminal(), NO_COLOR="1")
    wide.table(headings, rows, right=(2, 3))
    assert texts(wide)[0].splitlines()[0].split() == list(headings)


def ticking(shown: Screen) -> Screen:
    """A clock that moves on by a second each time it is asked."""
    shown.environment.clock = map(float, itertools.count()).__next__
    return shown


def test_a_cell_without_a_heading_stands_after_its_dot_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = screen(out=Terminal(), NO_COLOR="1")
    shown.table(("not here", "repository", "size", "parameters", "licence", ""),
                [("llama3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "2.33 GiB", "1.24B", "llama3.2", "gated")])
    assert texts(shown)[0].splitlines()[-1].strip() == "licence llama3.2 · gated"


def test_progress_is_redrawn_on_a_terminal_and_taken_away() -> None:
    shown = ticking(screen(err=Terminal(), NO_COLOR="1"))
    for done in (0, 1 << 20, 2 << 20):
        shown.progress(Progress("loading", done, 4 << 20, "bytes"))
    shown.answer("a")
    err = texts(shown)[1]
    assert "loading  1.00 MiB of 4.00 MiB  25%  1.00 MiB/s" in err and err.count("\n") == 0
    assert err.endswith("\r\x1b[K"), "the line is cleared before the answer"


def test_progress_is_taken_away_where_a_failure_is_told_next() -> None:
    """A download whose server went away: the message stood behind the bytes, in the same line."""
    def broken_off() -> Iterator[Progress]:
        yield from (Progress("downloading", done, 4 << 20, "bytes") for done in (0, 1 << 20))
        raise EffllmError("connection refused")

    shown = ticking(screen(err=Terminal(), NO_COLOR="1"))
    with pytest.raises(EffllmError):
        list(show_progress(broken_off(), shown, str))
    err = texts(shown)[1]
    assert "downloading  1.00 MiB of 4.00 MiB" in err and err.endswith("\r\x1b[K")


def test_a_run_leaves_out_what_only_a_plan_says() -> None:
    said = (Notice(Detail("weights are repacked")), Notice("the context is shorter"), "opened")
    shown = screen()
    assert list(show_progress(said, shown, str)) == ["opened"] and texts(shown)[1] == "the context is shorter\n"


def test_an_operation_of_the_same_name_begins_again() -> None:
    """The second prompt of a chat, or its second saving: neither what passed between them counts, nor what the cache held."""
    now = [0.0]
    shown = screen(err=Terminal(), NO_COLOR="1")
    shown.environment.clock = lambda: now[0]
    for at, event in ((0.0, Progress("saving", 0, 4 << 20, "bytes")), (9.0, Progress("saving", 4 << 20, 4 << 20, "bytes")),
                      (99.0, Progress("saving", 1 << 20, 8 << 20, "bytes")), (101.0, Progress("saving", 4 << 20, 8 << 20, "bytes")),
                      (110.0, Progress("reading", 64, 100, "tokens", rate=32.0)),
                      (150.0, Progress("reading", 128, 300, "tokens", rate=32.0)),
                      (151.0, Progress("reading", 192, 300, "tokens", rate=32.0))):
        now[0] = at
        shown.progress(event)
    drawn = [line for line in texts(shown)[1].replace("\x1b[K", "").split("\r") if line]
    assert drawn == ["saving  4.00 MiB of 4.00 MiB  100%  455.11 KiB/s", "saving  4.00 MiB of 8.00 MiB  50%  1.50 MiB/s",
                     "reading  192/300 tokens  64%  32 tokens/s"]


def test_phases_that_take_turns_have_the_rate_of_their_own_time() -> None:
    """Calibrating and quantizing, layer by layer, taken up where 1000 tokens were done: 10 tokens a second, and 1 MiB."""
    now, mib = 0.0, 1 << 20
    shown = screen(err=Terminal(), NO_COLOR="1")
    shown.environment.clock = lambda: now
    for layer in range(3):
        for step in range(11):
            shown.progress(Progress("calibrating", 1000 + 110 * layer + 10 * step, 2000, "tokens"))
            now += 1
        for step in range(4):
            shown.progress(Progress("quantizing", (4 * layer + step) * mib, 100 * mib, "bytes"))
            now += 1
    rates = [re.search(r"  (\S+ ?\S*)/s", line)[1] for line in texts(shown)[1].split("\r") if "/s" in line]
    assert len(rates) > 30 and set(rates) == {"10 tokens", "1.00 MiB"}, rates


def test_progress_of_wide_characters_stays_in_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = ticking(screen(err=Terminal(), NO_COLOR="1"))
    for done in (0, 1 << 20):
        shown.progress(Progress("狐狸" * 10, done, 4 << 20, "bytes"))
    drawn = texts(shown)[1].split("\x1b[K")[-1]
    assert 37 < cell_width(drawn) <= 39, "a line that the terminal wraps is not taken away by a carriage return"


@pytest.mark.parametrize(("columns", "shown"), (
    (200, "downloading  900.00 MiB of 1000.00 MiB  90%  10.00 MiB/s  10 s left  model-00002-of-00003.safetensors"),
    (80, "downloading  900.00 MiB of 1000.00 MiB  90%  10.00 MiB/s  10 s left"),
    (40, "downloading  90%  10.00 MiB/s  10 s left"), (39, "downloading  90%  10 s left"), (20, "downloading  90%")))
def test_progress_in_a_narrow_terminal_leaves_figures_out_whole(columns: int, shown: str) -> None:
    """91% that is cut is 9%."""
    event = Progress("downloading", 900 << 20, 1000 << 20, "bytes", "model-00002-of-00003.safetensors", rate=float(10 << 20))
    assert format_progress(event, 9.0, columns) == shown


def test_progress_in_a_log_is_rare_and_plain() -> None:
    shown = ticking(screen())
    for done in range(40):
        shown.progress(Progress("compiling kernels", done, 100, "kernels"))
    lines = texts(shown)[1].splitlines()
    assert lines == ["compiling kernels  2/100  2%", "compiling kernels  17/100  17%", "compiling kernels  32/100  32%"]


def test_a_dumb_terminal_is_not_redrawn() -> None:
    assert not screen(err=Terminal(), TERM="dumb").environment.can_redraw(io.StringIO())
    environment = screen(err=Terminal(), TERM="dumb").environment
    assert not environment.can_redraw(environment.stderr) and not environment.is_styled(environment.stderr)


def test_tables_are_wrapped_for_no_pipe() -> None:
    shown = screen()
    shown.table(("name", "size"), [("m" * 300, "1"), ("b", "22")], right=(1,))
    lines = texts(shown)[0].splitlines()
    assert len(lines) == 3 and "m" * 300 in lines[1] and all(line == line.rstrip() for line in lines)
    assert lines[1].endswith(" 1") and lines[2].endswith("22")


def test_a_table_without_the_library_is_the_librarys() -> None:
    """The same lines, whichever of the two draws them; what does not fit, or is wide, goes to the library."""
    headings, right = ("model", "size", ""), (1,)
    rows = [("a", "1.5 MiB", "x"), ("longer name", "100 B", ""), ("", "2", "note with  spaces")]
    plain, drawn = screen(), screen()
    plain.table(headings, rows, right)
    drawn._rich_table(headings, rows, right)
    assert texts(plain)[0] == texts(drawn)[0]
    narrow = screen(out=Terminal(), TERM="xterm")
    narrow.table(("a", "b"), [("x" * 70, "y" * 70)])
    seen = re.sub(r"\x1b\[[0-9;]*m", "", texts(narrow)[0])
    assert max(map(len, seen.splitlines())) <= 80 and seen.count("y") == 70
    wide = screen()
    wide.table(("a", "b"), [("狐", "1"), ("ab", "2")])
    assert texts(wide)[0].splitlines()[1:] == ["狐  1", "ab  2"]
    bold = screen(out=Terminal(), TERM="xterm")
    bold.table(("a", "b"), [("x", "y")])
    assert texts(bold)[0] == "\x1b[1ma  b\x1b[0m\nx  y\n"


def test_markup_in_names_is_text() -> None:
    shown = screen()
    shown.pairs([("model", "[/INST] [bold]x[/bold]")])
    assert "[/INST] [bold]x[/bold]" in texts(shown)[0]


def test_json_is_one_line_of_strict_json() -> None:
    shown = screen()
    shown.json({"text": "zwölf\n"})
    assert texts(shown)[0] == '{"text": "zwölf\\n"}\n'
    with pytest.raises(ValueError):
        shown.json({"rate": float("nan")})


@pytest.mark.parametrize(("reply", "expected"), [("\n", True), ("y\n", True), ("Yes\n", True), ("n\n", False), ("maybe\n", False),
                                                 ("", False)])
def test_a_question_takes_enter_for_yes_and_the_end_of_input_for_no(reply: str, expected: bool) -> None:
    shown = screen(stdin=io.StringIO(reply))
    assert shown.confirm("Use fable?") is expected
    assert texts(shown)[1].startswith("Use fable? [Y/n] ")
