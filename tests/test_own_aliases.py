"""The user's own alias file: overrides of the built-in aliases, and handwritten content that is preserved."""

from pathlib import Path

import pytest
from hub_user import FABLE, HubUser

from effllm.runtime.catalog import resolve
from effllm.runtime.library import aliases
from effllm.runtime.library.aliases import own_file

# -- names for what comes with effllm ----------------------------------------------------------------------------------------------


def test_a_name_for_what_comes_with_effllm_is_kept_by_its_alias(user: HubUser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its path would lead nowhere after the next installation, which here is a folder of another name."""
    assert "story is fable" in user.run("alias", "story", "fable").err
    assert user.run("alias", "tale", "story").code == 0, "a name of a name stands for the same"
    rows = {row["name"]: row for row in user.run("list", "--json").json["models"]}
    assert rows["story"]["source"] == rows["tale"]["source"] == "effllm"
    assert str(FABLE.parent) not in own_file(user.env).read_text()
    assert [each["packaged"] for each in user.run("alias", "--json").json["aliases"].values()] == ["fable", "fable"]
    (tmp_path / "next" / "models").mkdir(parents=True)
    (tmp_path / "next" / "models" / "fable").symlink_to(FABLE)
    monkeypatch.setattr(aliases, "files", lambda package: tmp_path / "next")
    for name in ("story", "tale"):
        assert resolve(name, user.env).folder == tmp_path / "next" / "models" / "fable"


def test_an_older_file_has_its_path_and_still_works(user: HubUser) -> None:
    path = own_file(user.env)
    path.parent.mkdir(parents=True)
    path.write_text(f"story: {{path: {FABLE}, licence: MIT, gated: false, params: 6M, size_gb: 0.01, default_bits: 16}}\n")
    assert resolve("story", user.env).folder == FABLE


def test_what_does_not_come_with_effllm_any_more_is_reported(user: HubUser) -> None:
    assert user.run("alias", "story", "fable").code == 0
    own_file(user.env).write_text(own_file(user.env).read_text().replace("packaged: fable", "packaged: saga"))
    assert "effllm alias --rm story" in user.run("show", "story").refused(3)
    sound = own_file(user.env).read_text()
    for wrong in ("packaged: ../fable", "packaged: 5", "packaged: fable\n  path: /x"):
        own_file(user.env).write_text(sound.replace("packaged: saga", wrong))
        assert user.run("list").code == 1, wrong


def test_an_entry_that_lacks_something_is_named_with_what_to_do(user: HubUser) -> None:
    path = own_file(user.env)
    path.parent.mkdir(parents=True)
    path.write_text(f"story: {{path: {FABLE}}}\n")
    said = user.run("list").refused(1)
    assert f"{path}: 'story': params is missing" in said and "correct or remove that entry" in said and "fetch" not in said


def test_a_name_for_what_comes_with_effllm_can_go_and_the_model_cannot(user: HubUser) -> None:
    assert user.run("alias", "story", "fable").code == 0
    assert "effllm alias --rm story" in user.run("rm", "story", "-y").refused(2) and FABLE.is_dir()


# -- a file that a user writes too -----------------------------------------------------------------------------------------------

ENTRY = "licence: MIT\n  gated: false\n  params: 1M\n  size_gb: 1\n  default_bits: 4\n"
BY_HAND = f"""# names of mine, in an order of mine

# for work
work:  # ask Ada
  repo: org/work  # the public one
  {ENTRY}
# for the train
tiny: {{repo: org/tiny, licence: MIT, gated: false, params: 1M, size_gb: 1, default_bits: 4}}

last:
  repo: org/last
  {ENTRY}# end"""


@pytest.fixture
def by_hand(user: HubUser) -> Path:
    path = own_file(user.env)
    path.parent.mkdir(parents=True)
    path.write_text(BY_HAND)
    return path


def test_what_a_user_wrote_between_the_names_stays(user: HubUser, by_hand: Path) -> None:
    assert user.run("alias", "story", "fable").code == 0
    added = by_hand.read_text()
    assert added.startswith(BY_HAND + "\nstory:\n  packaged: fable\n")
    assert user.run("alias", "tiny", "llama3").code == 0
    changed = by_hand.read_text()
    before, after = BY_HAND.split("tiny: {")
    assert changed.startswith(before + "tiny:\n  repo: meta-llama/") and after.split("}", 1)[1] + "\nstory:" in changed
    assert user.run("alias", "--rm", "story").code == 0 and user.run("alias", "--rm", "tiny").code == 0
    assert by_hand.read_text() == before + after.split("}\n", 1)[1] + "\n"
    for name in ("work", "last"):
        assert user.run("alias", "--rm", name).code == 0
    assert by_hand.read_text() == "# names of mine, in an order of mine\n\n# for work\n\n# for the train\n\n# end\n"
    assert user.run("alias", "--json").json["aliases"] == {}


def test_a_new_file_says_who_writes_what(user: HubUser) -> None:
    for name in ("one", "two", "one"):
        assert user.run("alias", name, "fable").code == 0
    text = own_file(user.env).read_text()
    assert text.startswith("# Aliases made by `effllm alias`, which writes the lines of the name") and text.count("Aliases made") == 1
    assert list(user.run("alias", "--json").json["aliases"]) == ["one", "two"]


@pytest.mark.parametrize("comment", ["", "# mine\n"])
def test_names_in_braces_are_written_again_if_nothing_is_lost(user: HubUser, by_hand: Path, comment: str) -> None:
    entry = "{repo: org/work, licence: MIT, gated: false, params: 1M, size_gb: 1, default_bits: 4}"
    text = f"{comment}{{work: {entry}, other: {entry}}}\n"
    by_hand.write_text(text)
    if comment:
        assert "would lose its comments" in user.run("alias", "--rm", "work").refused(1) and by_hand.read_text() == text
    else:
        assert user.run("alias", "--rm", "work").code == 0
        assert list(user.run("alias", "--json").json["aliases"]) == ["other"]


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " + "{b: " * 5000 + "}" * 5000])
def test_a_file_that_is_nested_without_end_is_reported(user: HubUser, text: str) -> None:
    """The C parser would end the process."""
    own_file(user.env).parent.mkdir(parents=True)
    own_file(user.env).write_text(text)
    assert "nested too deeply" in user.run("run", "mine", "Hi").refused(1)


def test_a_name_that_others_are_made_of_is_not_taken_from_under_them(user: HubUser, by_hand: Path) -> None:
    text = BY_HAND.replace("tiny: {", "tiny: &same {") + "\nagain: *same\n"
    by_hand.write_text(text)
    assert "by hand" in user.run("alias", "--rm", "tiny").refused(1) and by_hand.read_text() == text
    assert user.run("alias", "--rm", "again").code == 0


def test_a_link_into_a_folder_of_dotfiles_stays_a_link(user: HubUser, by_hand: Path) -> None:
    dotfiles = user.home / "dotfiles"
    dotfiles.mkdir()
    by_hand.rename(dotfiles / "aliases")
    by_hand.symlink_to(dotfiles / "aliases")
    (dotfiles / "aliases").chmod(0o600)
    assert user.run("alias", "story", "fable").code == 0 and user.run("alias", "--rm", "work").code == 0
    assert (dotfiles / "aliases").stat().st_mode & 0o777 == 0o600
    assert by_hand.is_symlink() and "story" in (dotfiles / "aliases").read_text() and "org/work" not in (dotfiles / "aliases").read_text()
    (dotfiles / "aliases").unlink()
    assert user.run("alias", "story", "fable").code == 0 and by_hand.is_symlink() and (dotfiles / "aliases").is_file()
    assert [each.name for each in dotfiles.iterdir()] == ["aliases"]


def test_bytes_that_are_not_utf_8_are_not_written_back_as_something_else(user: HubUser, by_hand: Path) -> None:
    content = BY_HAND.encode().replace(b"Ada", b"Ren\xe9")
    by_hand.write_bytes(content)
    for words in (("story", "fable"), ("--rm", "work")):
        assert f"{by_hand} is not in UTF-8 in line 4" in user.run("alias", *words).refused(1)
        assert by_hand.read_bytes() == content
    assert user.run("list").code == 0, "it is read as before"
