"""The person's own file of aliases: what it says of what comes with effllm, and what stays of what they wrote there by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from pulls import FABLE, Person

from effllm.runtime import aliases
from effllm.runtime.aliases import own_file
from effllm.runtime.catalog import resolve


# -- names for what comes with effllm ----------------------------------------------------------------------------------------------


def test_a_name_for_what_comes_with_effllm_is_kept_by_its_alias(person: Person, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its path would lead nowhere after the next installation, which here is a folder of another name."""
    assert "story is fable" in person.types("alias", "story", "fable").err
    assert person.types("alias", "tale", "story").code == 0, "a name of a name stands for the same"
    assert str(FABLE.parent) not in own_file(person.env).read_text()
    assert [each["packaged"] for each in person.types("alias", "--json").json["aliases"].values()] == ["fable", "fable"]
    (tmp_path / "next" / "models").mkdir(parents=True)
    (tmp_path / "next" / "models" / "fable").symlink_to(FABLE)
    monkeypatch.setattr(aliases, "files", lambda package: tmp_path / "next")
    for name in ("story", "tale"):
        assert resolve(name, person.env).folder == tmp_path / "next" / "models" / "fable"


def test_an_older_file_has_its_path_and_still_works(person: Person) -> None:
    path = own_file(person.env)
    path.parent.mkdir(parents=True)
    path.write_text(f"story: {{path: {FABLE}, licence: MIT, gated: false, params: 6M, size_gb: 0.01, default_bits: 16}}\n")
    assert resolve("story", person.env).folder == FABLE


def test_what_does_not_come_with_effllm_any_more_is_said(person: Person) -> None:
    assert person.types("alias", "story", "fable").code == 0
    own_file(person.env).write_text(own_file(person.env).read_text().replace("packaged: fable", "packaged: saga"))
    assert "effllm alias --rm story" in person.types("show", "story").refused(3)
    sound = own_file(person.env).read_text()
    for wrong in ("packaged: ../fable", "packaged: 5", "packaged: fable\n  path: /x"):
        own_file(person.env).write_text(sound.replace("packaged: saga", wrong))
        assert person.types("list").code == 1, wrong


def test_a_name_for_what_comes_with_effllm_can_go_and_the_model_cannot(person: Person) -> None:
    assert person.types("alias", "story", "fable").code == 0
    assert "effllm alias --rm story" in person.types("rm", "story", "-y").refused(2) and FABLE.is_dir()
