"""`effllm session list` with the first words of each conversation, and an unwritable session folder, reported before the answer."""

import io
import json
import os
from pathlib import Path

import pytest
from hub_user import Terminal

from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.cli.number_format import age
from effllm.cli.screen import cell_width
from effllm.cli.session import COLUMNS, fit_columns
from effllm.runtime.sessions.session_format import SavedSession
from effllm.runtime.sessions.session_store import SessionStore

STORY = "Tell me a story about the fox and the king."
KEPT = ("--session", "tale", "--temp", "0", "-n", "4", "-c", "256")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "effllm" / "sessions"


def ran(*argv: str, out: io.StringIO | None = None, err: io.StringIO | None = None) -> tuple[int, str]:
    out = out or io.StringIO()
    code = main([*argv], Environment(io.StringIO(), out, err or io.StringIO(), os.environ))
    return code, out.getvalue()


def test_a_session_is_listed_with_its_first_words(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran("run", "fable", STORY, *KEPT)[0] == 0 and ran("run", "fable", "And then?", *KEPT)[0] == 0
    assert ran("session", "list")[1].endswith(f" ago  {STORY}\n")
    (entry,) = json.loads(ran("session", "list", "--json")[1])["sessions"]
    assert entry["begins"] == STORY and entry["messages"] == 4
    monkeypatch.setenv("COLUMNS", "80")
    headings, row = ran("session", "list", out=Terminal())[1].splitlines()
    assert "cache" not in headings and row.startswith("tale ") and " Tell me a story" in row and row.endswith(" ...")


def test_an_age_is_in_whole_units() -> None:
    assert [age(seconds) for seconds in (8.9, 186, 7300, 90_000, 200_000)] == ["8 s ago", "3 min ago", "2 h ago", "1 day ago", "2 days ago"]


SAID = ("Tell me of the   fox\n", "Und dann? " * 30, "然后呢" * 40)


@pytest.mark.parametrize(("width", "columns"), [(None, 9), (200, 9), (120, 9), (80, 7), (60, 5), (40, 5)])
def test_a_narrow_terminal_does_without_other_columns_first(width: int | None, columns: int) -> None:
    begins = [SavedSession("x", "m", 0.0, {"messages": [{"role": "user", "content": said}]}, None).begins for said in SAID]
    rows = [("tale", "fable", "4", "102", "16bit", "262.61 KiB", "262.61 KiB", "3 min ago", said) for said in begins]
    kept, shown = fit_columns(width, COLUMNS, rows)
    assert len(kept) == columns and {"session", "model", "messages", "saved", "begins"} <= {*kept}
    assert all(len(row) == columns for row in shown) and shown[0][-1] == "Tell me of the fox"
    if width is None:
        assert shown == rows and len(begins[1]) == 100
        return
    wide = sum(max(cell_width(row[at]) for row in (kept, *shown)) for at in range(columns)) + 2 * (columns - 1)
    assert wide <= width or width == 40, "there a row is a paragraph"
    assert shown[2][-1].endswith(" ...") and shown[1][-1].endswith(" ...") == (width < 200)
    assert shown[1][-1].startswith("Und dann?") and shown[2][-1][0] == "然"


def test_what_a_user_said_first_is_read_from_odd_conversations_too() -> None:
    for messages, begins in (([], ""), ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "Hi"),
                             ([{"role": "user", "content": ["x"]}, "y", {"role": "user"}, {"role": "user", "content": " \n"}], ""),
                             ({"role": "user"}, "")):
        assert SavedSession("x", "m", 0.0, {"messages": messages}, None).begins == begins


def test_that_it_cannot_be_saved_is_reported_before_the_answer(home: Path) -> None:
    home.parent.write_text("a file where the folder should be")
    both = io.StringIO()
    assert ran("run", "fable", STORY, *KEPT, out=both, err=both)[0] == 1
    first, second, *_ = both.getvalue().splitlines()
    assert first == (f"session tale cannot be saved: Not a directory; this conversation is not saved (check its "
                     f"folder: ls -ld {home.parent})")
    assert second == "session tale is new", "and the answer after both"


def test_trying_a_folder_out_leaves_nothing_in_it(home: Path) -> None:
    store = SessionStore(home)
    store.try_out("tale")
    assert [path.name for path in home.iterdir()] == ["pages"] and store.names() == []
