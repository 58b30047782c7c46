"""`effllm rm` of a model reached other than by its folder's path: nothing is removed that was not named."""

import shutil
from pathlib import Path

import pytest
from hub_user import HubUser

from effllm.quant.recipe import Recipe
from effllm.quant.spec import QuantSpec
from effllm.runtime.convert import ConvertOptions, convert

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "model"
    for _ in convert(FABLE, out, ConvertOptions(Recipe(QuantSpec.parse("8bit")), "8bit")):
        continue
    return out


def held(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("flags", [(), ("-y",), ("--dry-run",)])
def test_a_link_to_a_model_is_refused_with_both_commands(made: Path, tmp_path: Path, user: HubUser, flags: tuple[str, ...]) -> None:
    link, before = tmp_path / "a link", held(made)
    link.symlink_to(made)
    ran = user.run("rm", link, *flags)
    assert f"is a link to {made}" in ran.refused(2) and held(made) == before
    assert f"effllm rm {made}; the link alone: rm '{link}'" in ran.err


def test_the_folder_that_one_is_in_stays(made: Path, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held(made)
    monkeypatch.chdir(made)
    for name in (".", made):
        assert "is the current directory" in user.run("rm", name).refused(2) and held(made) == before


def test_a_roundabout_path_is_still_the_folder(made: Path, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(made, made.parent / "copy")
    monkeypatch.chdir(made.parent)
    assert user.run("rm", "copy/../copy/.", "-y").code == 0 and not copy.exists()


def test_a_parent_that_may_not_be_written_is_found_before_a_file_goes(made: Path, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held(made)
    monkeypatch.setattr("effllm.runtime.library.remove.os.access", lambda path, mode: Path(path) != made.parent)
    assert "cannot be removed from" in user.run("rm", made).refused(1) and held(made) == before
