"""`quantize`, and runs that quantize: whatever would be refused or fail in the end is reported before the work begins, and in the plan."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from test_cli_quantize import FABLE, Ran, copy, made

from effllm.kernels import warm
from effllm.runtime import convert

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


def test_a_plan_of_sizes_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that never ran a model it took a quarter of a minute, for a table."""
    monkeypatch.setattr(warm, "is_cold", lambda kinds=(): True)
    monkeypatch.setattr(warm, "warm", lambda kinds=(): pytest.fail("kernels are compiled"))
    assert Ran("quantize", FABLE, "-o", tmp_path / "out", *TO_FOUR, "--dry-run").code == 0


def test_a_disk_that_is_too_small_is_reported_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "is_cold", lambda kinds=(): True)
    monkeypatch.setattr(warm, "warm", lambda kinds=(): pytest.fail("kernels are compiled"))
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    said = Ran("quantize", FABLE, "-o", tmp_path / "out", *TO_FOUR).refused(4)
    assert "out needs 3.5" in said and "has 1.00 MiB free" in said


@pytest.mark.parametrize("more", ((), ("--bundle-ffn",)))
def test_a_text_with_nothing_to_score_is_refused_by_name(tmp_path: Path, more: tuple[str, ...]) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a")
    words = ("quantize", FABLE, "-o", tmp_path / "out", "--eval", text, "--json", *(more or TO_FOUR))
    ran = Ran(*words)
    assert f"{text} has 1 token: nothing to score" in ran.refused(2) and "hint: a longer --eval\n" in ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "settings", "code", "said"), [
    (("--kv", "4bit", "-c", "256", "--strict"), "", 2, "nothing will be packed in a context of 256 tokens"),
    (("--strict",), "ctx-size = 9999\n", 2, "a context of 9999 is more than the 2048 positions"),
    (("-c", "9999"), "", 2, "a context of 9999 is more than the 2048 positions"),
    (("--ram", "10M"), "", 4, "of memory even with weights read from the disk"),
    (("--predict-neurons",), "", 2, "there is nothing to predict")])
def test_what_the_plan_of_a_run_refuses_is_not_quantized_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...],
                                                                settings: str, code: int, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("effllm.toml").write_text(settings)
    ran = Ran("run", "fable", "Hi", "-n", "1", "--device", "cpu", "--bits", "4", *words)
    assert said in ran.refused(code) and "weights take about" not in ran.err and "quantized on load" not in ran.err
