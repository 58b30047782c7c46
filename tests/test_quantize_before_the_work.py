"""`quantize`: what a run would refuse, or could not do in the end, is said before it begins, and by its plan."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_cli_quantize import FABLE, Ran, copy, made

__all__ = ["made"]  # a fixture
TO_FOUR = ("--bits", "4", "--no-kv-profile")


@pytest.mark.parametrize("more", ((), ("--force",)))
def test_a_plan_refuses_the_place_that_a_run_refuses(tmp_path: Path, made: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    (tmp_path / "link").symlink_to(made)
    for place in (tmp_path / "mine", tmp_path / "link", tmp_path / "mine" / "file", tmp_path / "absent" / "out"):
        words = ("quantize", FABLE, "-o", place, *TO_FOUR, *more)
        assert Ran(*words, "--dry-run").refused(2) == Ran(*words).refused(2)


def test_a_plan_says_that_a_folder_is_in_the_way_unless_it_may_go(tmp_path: Path, made: Path) -> None:
    words = ("quantize", FABLE, "-o", copy(made, tmp_path / "out"), *TO_FOUR, "--dry-run")
    refused = Ran(*words)
    assert "exists" in refused.refused(2) and "--force replaces it" in refused.err
    assert Ran(*words, "--force").code == 0


@pytest.mark.parametrize("more", ((), ("--bundle-ffn",)))
def test_a_text_with_nothing_to_score_is_refused_by_name(tmp_path: Path, more: tuple[str, ...]) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a")
    words = ("quantize", FABLE, "-o", tmp_path / "out", "--eval", text, "--json", *(more or TO_FOUR))
    ran = Ran(*words)
    assert f"{text} has 1 token: nothing to score" in ran.refused(2) and "hint: a longer --eval\n" in ran.err
    assert not (tmp_path / "out").exists()
