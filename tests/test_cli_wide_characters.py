"""Answers in double-width characters, in a terminal of forty columns: plain, and with rendered markdown."""

import os
import re
import sys
from pathlib import Path

import pexpect
import pytest
from prompt_toolkit.utils import get_cwidth

from effllm.cli.screen import align_columns

WIDTH, MINUTE = 40, 300
# Bytes of one character come in several tokens: the model's choice is replaced, all behind it is not.
CHILD = """
import sys
from effllm.cli.app import main
from effllm.runtime import sampler, tokenizer as tokenizers
made, first = tokenizers.Tokenizer.load, []
def load(folder, config):
    tokenizer = made(folder, config)
    first[:] = tokenizer.encode({text!r}, add_special_tokens=False) + [min(tokenizer.stop_ids)]
    return tokenizer
tokenizers.Tokenizer.load = load
sampler.Sampler.sample = lambda self, logits, history=(): first.pop(0) if len(first) > 1 else first[0]
sys.exit(main(sys.argv[1:]))
"""
PROSE = ("狐狸对国王说：「从前有一个很小的王国，那里住着一只聪明的狐狸。」🦊👑 The king laughed 😀 and said: 안녕하세요, "
         "여우야! ありがとうございます。\n\n"
         "第二段落 ends in a family 👩\u200d👩\u200d👧 and a flag 🇫🇷, then e\u0301 and straight on " + "🏰" * 23 + ".")
TABLE = "| 动物 | who | 🦊 |\n|---|---|---|\n| 狐狸 | fox | 🦊🦊 |\n| 王 | the king | ok |\n"
DRAWN = f"# 标题 🏰\n\n**国王**说：*你好*！\n\n- 第一 🦊\n- 第二\n\n{TABLE}\nThe end 终。"


class Screen:
    """What a terminal of `WIDTH` columns shows of what was written: a character of two columns goes to the next line where one is left."""

    def __init__(self, written: str) -> None:
        self.rows: list[list[str]] = [[]]
        self.column = 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[^\[]|[^\x1b]", written):
            self._put(part)

    def _put(self, part: str) -> None:
        if part == "\n":
            self.rows.append([])
        elif part == "\r":
            self.column = 0
        elif part[0] != "\x1b":
            wide = get_cwidth(part)
            if self.column + wide > WIDTH:
                self.rows.append([])
                self.column = 0
            row = self.rows[-1]
            row += [" "] * (self.column - len(row))
            if wide:
                row[self.column : self.column + wide] = [part, *[""] * (wide - 1)]
                self.column += wide
            elif row:
                row[self.column - 1 if row[self.column - 1] else self.column - 2] += part
        elif part.endswith("K"):
            del self.rows[-1][0 if "2" in part else self.column :]
        else:
            assert part.endswith(("m", "h", "l")), f"{part!r} moves the cursor over what was written"

    def lines(self) -> list[str]:
        return [line for row in self.rows if (line := "".join(row).rstrip())]


def typed(text: str, *flags: str) -> str:
    """What `run` writes to a terminal, both streams, where the answer is `text`. The width is said twice: pexpect sets that of the terminal
    when the program has begun, which on a busy machine is after it asked."""
    terminal = pexpect.spawn(sys.executable, ["-P", "-c", CHILD.format(text=text), "run", "fable", "Hi", "-n", "600", "--temp", "0",
                                              "--device", "cpu", *flags], encoding="utf-8", timeout=MINUTE, dimensions=(24, WIDTH),
                             env={**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", "COLUMNS": str(WIDTH)})
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0, terminal.before
    return terminal.before


@pytest.mark.parametrize("flags", [(), pytest.param(("--markdown",), marks=pytest.mark.slow)])
def test_prose_is_broken_between_words_and_characters(flags: tuple[str, ...]) -> None:
    """Whole characters, none lost, none drawn over, no word cut; what progress was shown before is gone."""
    written = typed(PROSE, *flags)
    assert "\ufffd" not in written
    shown = Screen(written).lines()
    meant = PROSE.replace("\n", "").replace(" ", "")
    while shown and len("".join(shown[1:]).replace(" ", "")) >= len(meant):
        del shown[0]
    assert "".join(shown).replace(" ", "") == meant and len(shown) == 8
    assert {"king", "laughed", "and", "said:", "ends", "in", "family", "flag", "straight"} <= {*" ".join(shown).split()}
    assert all(get_cwidth(line) > WIDTH - len("laughed ") for line in (*shown[:2], *shown[4:-2])), "room for a word was left"


def test_markdown_is_drawn_in_columns_of_characters_as_wide_as_they_are() -> None:
    lines = Screen(typed(DRAWN, "--markdown")).lines()
    table = [line for line in lines if "│" in line or "┼" in line]
    places = [[get_cwidth(line[:at]) for at, c in enumerate(line) if c in "│┼"] for line in table]
    assert len(table) == 4 and len(places[0]) == 2 and all(place == places[0] for place in places), table
    assert max(map(get_cwidth, lines)) <= WIDTH and "**" not in "".join(lines) and lines[-1] == "The end 终。"
    assert any(line.endswith("国王说：你好！") for line in lines)


@pytest.mark.slow
def test_a_table_that_is_too_wide_in_columns_stays_as_it_was_written() -> None:
    """Counted in columns, not in characters: 24 of them take 48."""
    wide = f"| {'狐' * 12} | {'王' * 12} |\n|---|---|\n| a | b |\n\nend"
    lines = Screen(typed(wide, "--markdown")).lines()
    assert not any("│" in line for line in lines) and lines[-1] == "end" and "".join(lines).count("狐") == 12


def test_columns_of_a_report_count_what_is_shown() -> None:
    lines = align_columns([("name", "size"), ("狐狸", "1"), ("🦊", "22")], right={1})
    assert [get_cwidth(line) for line in lines] == [10, 10, 10]


def left_on(width: int, argv: tuple[str, ...], state: Path) -> str:
    """What a command leaves on a terminal, its progress gone."""
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "XDG_STATE_HOME": str(state)}
    environment.pop("COLUMNS", None)
    child = pexpect.spawn(sys.executable, ["-m", "effllm", *argv], dimensions=(40, width), env=environment, encoding="utf-8",
                          timeout=MINUTE)
    child.expect(pexpect.EOF)
    shown = re.sub(r"[^\n]*\r(?!\n)", "", child.before.replace("\r\n", "\n"))
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown)


LONG = "./" + "a-folder-whose-name-is-longer-than-a-line" * 2
SAID = [(("run", "nosuch", "hi"), WIDTH), (("run", "fable", "Tell me a story.", "-n", "2", "--stats"), WIDTH),
        (("quantize", "--help"), WIDTH), (("list",), 20), (("plan", "fable", "--no-probe"), 24)]
SAID_TOO = [("run", "fable", "hi", "-c", "4096"), ("run", "fable", "-n", "x", "hi"), ("run", "fable", "hi", "--kv", "9bit"),
            ("quantize", "fable", "-o", "/tmp"), ("show", LONG), ("session", "list"), ("list",),
            ("eval", "ppl", "fable", "--text", "/nope"), ("plan", "fable", "--no-probe"), ("run", "--help"), ("--help",)]


@pytest.mark.parametrize(("argv", "width"), [*SAID, *(pytest.param(argv, WIDTH, marks=pytest.mark.slow) for argv in SAID_TOO)],
                         ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value))
def test_no_word_of_the_programs_own_is_cut(argv: tuple[str, ...], width: int, tmp_path) -> None:
    """Lines that are longer than the terminal hold a single word, or an example to be pasted."""
    shown = left_on(width, argv, tmp_path).partition("\nexamples\n")[0]
    longer = [line for line in shown.splitlines() if get_cwidth(line) > width and len(line.split()) > 1]
    assert shown.strip() and not longer


@pytest.mark.parametrize(("argv", "said"), [(("session", "list"), "no session is saved: effllm run MODEL --session NAME saves one"),
                                            (("alias",), "no aliases yet: effllm alias NAME MODEL adds one, stored in ")])
def test_nothing_has_no_heading(argv: tuple[str, ...], said: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert left_on(200, argv, tmp_path).startswith(said)


LEAVES_OUT = ["memory", "read", "of the roof", "predicted"]


@pytest.mark.parametrize(("width", "without"), [
    pytest.param(width, set(LEAVES_OUT[:count]), marks=() if width in (56, 32) else pytest.mark.slow)
    for count, width in enumerate((100, 70, 56, 48, 32))])
def test_rows_of_bench_are_lines(width: int, without: set[str], tmp_path) -> None:
    lines = left_on(width, ("bench", "fable", "-p", "16", "-n", "4", "-r", "1"), tmp_path).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert any(line.startswith("fable · size 11.01 MiB") for line in lines) and max(map(len, lines)) <= width, lines
    headings = [cell.strip() for cell in table[0].split("|")[1:-1]]
    assert headings == [name for name in ("test", "t/s", "predicted", "read", "of the roof", "memory") if name not in without]
    assert len(table) == 4 and [line.split("|")[1].strip() for line in table[2:]] == ["pp16", "tg4"]


def test_the_bars_of_a_plan_fit_in_one_line() -> None:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    argv = ["-m", "effllm", "plan", "fable", "--no-probe"]
    shown = pexpect.spawn(sys.executable, argv, dimensions=(40, WIDTH), env=environment, encoding="utf-8", timeout=MINUTE)
    shown.expect(pexpect.EOF)
    (line,) = [line for line in shown.before.splitlines() if line.startswith("memory ")]
    assert line.endswith("·" * 10) and get_cwidth(line) <= WIDTH and line.count("·") > 20


def test_ctrl_c_at_a_question_ends_its_line() -> None:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    child = pexpect.spawn(sys.executable, ["-m", "effllm", "run"], dimensions=(40, WIDTH), env=environment, encoding="utf-8",
                          timeout=MINUTE)
    child.expect(r"\[Y/n\] ")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.before.endswith("\r\n") and child.exitstatus == 130
