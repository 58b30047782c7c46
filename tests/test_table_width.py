"""Tables in a terminal too narrow for all columns: optional columns are dropped, words are kept whole."""

import io
import os
from pathlib import Path

import pytest

from effllm.cli import doctor
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.cli.fitted_table import fitted_table
from effllm.cli.screen import Screen

FABLE = Path(__file__).parent.parent / "models" / "fable"
HEADINGS = ("name", "place", "size", "reason")
ROWS = [("a", "somewhere", "10", "because it is so"), ("bb", "elsewhere", "9", "and not otherwise")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, monkeypatch: pytest.MonkeyPatch, width: int) -> tuple[bool, list[str]]:
    monkeypatch.setenv("COLUMNS", str(width))
    screen = Screen(Environment(io.StringIO(), out, io.StringIO(), {"NO_COLOR": "1"}))
    return fitted_table(screen, HEADINGS, ROWS, ("size",), spare=("reason", "place")), out.getvalue().splitlines()


@pytest.mark.parametrize(("width", "headings"), [(80, "name  place      size  reason"), (38, "name  place      size"), (20, "name  size")])
def test_spare_columns_go_one_after_the_other(monkeypatch: pytest.MonkeyPatch, width: int, headings: str) -> None:
    whole, lines = shown(Terminal(), monkeypatch, width)
    assert (whole, lines[0]) == (width == 80, headings) and len(lines) == 3 and max(map(len, lines)) <= width
    assert lines[2].startswith("bb ") and lines[2].partition("     9")[1], "numbers are flush right whatever is left out"


def test_a_pipe_has_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, lines = shown(io.StringIO(), monkeypatch, 20)
    assert whole and lines[1] == "a     somewhere    10  because it is so"


@pytest.mark.parametrize(("width", "folded"), [(120, True), (80, True), (50, False), (24, False)])
def test_a_path_is_folded_into_few_lines_or_stands_alone(monkeypatch: pytest.MonkeyPatch, width: int, folded: bool) -> None:
    """Folded into more it was cut to pieces that nobody could tell apart, or paste."""
    paths = [f"/home/me/models/of-a-rather-long-name-{'and-more-of-it-' * 7}{number}" for number in (1, 2)]
    monkeypatch.setenv("COLUMNS", str(width))
    for out in (Terminal(), io.StringIO()):
        Screen(Environment(io.StringIO(), out, io.StringIO(), {"NO_COLOR": "1"})).table(
            ("model", "family", "size"), [(path, "llama", "1.00 GiB") for path in paths])
        lines = out.getvalue().splitlines()
        if not out.isatty():
            assert lines[1:] == [f"{path}  llama   1.00 GiB" for path in paths], "a pipe has them whole, whatever the terminal"
        elif folded:
            assert max(map(len, lines)) <= width and all(path in "".join(line.split()[0] for line in lines) for path in paths)
        else:
            assert [line for line in lines if not line.startswith("  ")] == paths and lines[1].startswith("  family llama")


def test_doctor_fits_a_terminal_and_says_where_all_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "trial", lambda: (True, "fable wrote 8 tokens"))
    monkeypatch.setenv("COLUMNS", "80")
    every: list[str] = []
    for kind in (io.StringIO, Terminal):
        out = kind()
        assert main(["doctor", "--no-probe"], Environment(io.StringIO(), out, io.StringIO(), {**os.environ, "NO_COLOR": "1"})) == 0
        kernels = out.getvalue().partition("\n\nkernel  ")[2].partition("\n\n")[0].splitlines()
        if kind is io.StringIO:
            assert "because" in kernels[0] and len(kernels) > 40
            every = [" ".join(line.split()) for line in kernels[1:]]
            continue
        *shown, others, where = [" ".join(line.split()) for line in kernels[1:]]
        assert "because" not in kernels[0] and max(map(len, kernels)) <= 80 and where.startswith("effllm doctor | less -S shows every one")
        left = [line for line in every if not any(line.startswith(f"{each} ") for each in shown)]
        assert others == f"{len(left)} others compiled" and len(left) > 20 and all(" compiled " in line for line in left)


def test_a_list_leaves_out_where_a_model_is_from_rather_than_cut_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "a-name-of-letters-to-type-4b"
    variables = {"HOME": str(tmp_path), "NO_COLOR": "1"}
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["alias", name, str(FABLE)], Environment(io.StringIO(), io.StringIO(), io.StringIO(), variables)) == 0
    seen = {}
    for kind in (Terminal, io.StringIO):
        out = kind()
        assert main(["list"], Environment(io.StringIO(), out, io.StringIO(), variables)) == 0
        seen[kind] = out.getvalue().splitlines()
    assert max(map(len, seen[Terminal])) <= 80 and any(line.startswith(f"{name} ") for line in seen[Terminal])
    assert "from" not in seen[Terminal][0] and "context" in seen[Terminal][0] and seen[io.StringIO][0].endswith("from")
