"""`effllm rm` removes what was named and nothing next to it: one revision of a repository, and of folders what effllm wrote there."""

import shutil
from pathlib import Path

import pytest
from hub_server import Hub
from hub_user import FABLE, HubUser, measure_nothing, sharded, tiny

from effllm.offload import transfer
from effllm.runtime.library import storage

REPO = "org/name"


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_nothing(monkeypatch)
    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 18)


# -- one revision of a repository --------------------------------------------------------------------------------------------------


def two_revisions(hub: Hub, user: HubUser) -> tuple[str, str]:
    """The commits of v1.0 and of main, both in the cache."""
    old = hub.add(REPO, files=tiny(seed=1), branches=("v1.0",)).commit
    assert user.run("pull", f"{REPO}@v1.0").code == 0
    new = hub.add(REPO, files=tiny(seed=2)).commit
    assert user.run("pull", REPO).code == 0
    return old, new


def test_an_alias_of_one_revision_takes_that_one_alone(hub: Hub, user: HubUser) -> None:
    old, new = two_revisions(hub, user)
    assert user.run("alias", "work", f"{REPO}@v1.0").code == 0
    typed = user.run("rm", f"{REPO}@v1.0", "--dry-run", "--json").json
    assert user.run("rm", "work", "--dry-run", "--json").json == typed | {"name": "work"}
    assert user.run("rm", "work", "-y").code == 0
    assert not user.snapshot(REPO, old).exists() and user.run("verify", f"{REPO}@{new}").code == 0


def test_an_alias_of_what_effllm_did_not_make_leads_to_the_name_alone(user: HubUser, tmp_path: Path) -> None:
    """`ollama rm` of such a name is meant for the name; the files are a user's own."""
    file, folder = tmp_path / "story.gguf", shutil.copytree(FABLE, tmp_path / "mine")
    assert user.run("export", "fable", "-o", file, "--type", "Q8_0").code == 0
    for name, place in (("work", file), ("tales", folder)):
        assert user.run("alias", name, place).code == 0
        said = user.run("rm", name, "-y").refused(2)
        assert f"{name} is {place}, a folder that effllm did not" in said and f"effllm alias --rm {name}" in said and place.exists()


def test_the_name_of_a_repository_is_all_of_it_whatever_an_alias_of_it_means(hub: Hub, user: HubUser) -> None:
    two_revisions(hub, user)
    assert user.run("alias", "work", f"{REPO}@v1.0").code == 0
    assert user.run("rm", REPO, "-y").code == 0 and not user.blobs(REPO)


def test_a_revision_that_is_not_here_takes_nothing(hub: Hub, user: HubUser) -> None:
    two_revisions(hub, user)
    before = user.blobs(REPO)
    user.run("rm", f"{REPO}@v9", "-y").refused(3)
    assert user.blobs(REPO) == before


def test_a_revision_that_is_partly_here_leaves_the_others(hub: Hub, user: HubUser) -> None:
    new = hub.add(REPO, files=tiny(seed=2)).commit
    assert user.run("pull", REPO).code == 0
    before = set(user.blobs(REPO))
    hub.add(REPO, files=tiny(seed=1) | {"LICENSE": b"of the old one"}, branches=("v1.0",))
    hub.served.clear()
    hub.disturb = lambda request: (451, {}, b"") if "signed" in request.path and hub.served["model.safetensors"] > 700_000 else None
    user.run("pull", f"{REPO}@v1.0").refused(6)
    assert set(user.blobs(REPO)) > before
    assert user.run("rm", f"{REPO}@v1.0", "-y").code == 0
    assert set(user.blobs(REPO)) == before and user.run("verify", f"{REPO}@{new}").code == 0
    assert user.run("list", "--json").json["incomplete"] == []


# -- effllm's own folder -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(user: HubUser) -> Path:
    """A model that was written into the models folder at the user's request."""
    folder = storage.models_folder(user.env) / "mine"
    folder.parent.mkdir(parents=True)
    assert user.run("quantize", "fable", "-o", folder, "--bits", "4").code == 0
    return folder


@pytest.mark.parametrize("theirs", ["thesis.txt", "chapters/one.txt"])
def test_what_a_user_has_put_into_a_model_of_ours_stays(user: HubUser, made: Path, theirs: str) -> None:
    place = made / theirs
    place.parent.mkdir(exist_ok=True)
    place.write_text("years of work")
    assert f"holds {Path(theirs).parts[0]}, which effllm did not write" in user.run("rm", made, "-y").refused(2)
    assert place.exists() and (made / "model.safetensors").exists()
    place.unlink()
    if place.parent != made:
        place.parent.rmdir()
    assert user.run("rm", made, "-y").code == 0 and not made.exists()


def test_so_it_does_beside_a_model_that_was_kept(user: HubUser) -> None:
    kept = storage.own_folder(user.env, "fable", f"local-{storage.local_fingerprint(FABLE)}", "4bit")
    kept.parent.mkdir(parents=True)
    assert user.run("quantize", "fable", "-o", kept, "--bits", "4").code == 0
    (kept / "thesis.txt").write_text("years of work")
    assert "thesis.txt" in user.run("rm", "fable:4bit").refused(2) and (kept / "thesis.txt").exists()


def test_a_file_in_the_folder_of_models_is_left_to_its_owner(user: HubUser) -> None:
    file = storage.models_folder(user.env) / "story.gguf"
    file.parent.mkdir(parents=True)
    assert user.run("export", "fable", "-o", file, "--type", "Q8_0").code == 0
    said = user.run("rm", file, "-y").refused(2)
    assert "does not manage" in said and f"rm {file}" in said and file.exists()


# -- models that cannot be read ----------------------------------------------------------------------------------------------------


def spoilt(folder: Path, how: str) -> None:
    """effllm.json as a full disk or a newer effllm would have left it."""
    place = folder / storage.MARKER
    text = place.read_text()
    place.write_text(text[:-40] if how == "damaged" else text.replace('"version": 1', '"version": 9', 1))


@pytest.mark.parametrize(("how", "why"), [("damaged", "damaged content"), ("newer", "a newer effllm wrote it")])
def test_a_kept_model_that_cannot_be_read_is_reported_and_can_be_removed(hub: Hub, user: HubUser, how: str, why: str) -> None:
    commit = hub.add(REPO, files=sharded(FABLE)).commit
    assert user.run("pull", f"{REPO}:4bit").code == 0
    kept = storage.own_folder(user.env, REPO, commit, "4bit")
    spoilt(kept, how)
    listed = user.run("list", "--json").json
    (told,) = listed["unreadable"]
    assert told["name"] == f"{REPO}:4bit" and told["folder"] == str(kept) and why in told["why"]
    assert told["name"] not in [each["name"] for each in listed["models"]]
    said = user.run("list").err
    assert why in said and f"`effllm rm {REPO}:4bit` removes it" in said
    for command in (("run", told["name"], "Once", "--raw"), ("show", told["name"]), ("verify", told["name"])):
        ran = user.run(*command)
        assert ran.code != 0 and why in ran.err, command
    assert user.run("rm", told["name"], "-y").code == 0 and not kept.exists()
    assert user.run("list", "--json").json["unreadable"] == []


@pytest.mark.parametrize("place", ["elsewhere", "ours"])
@pytest.mark.parametrize("how", ["damaged", "newer"])
def test_so_can_a_folder_by_its_path(user: HubUser, place: str, how: str) -> None:
    folder = (user.home if place == "elsewhere" else storage.models_folder(user.env)) / "mine"
    folder.parent.mkdir(parents=True, exist_ok=True)
    assert user.run("quantize", "fable", "-o", folder, "--bits", "4").code == 0
    spoilt(folder, how)
    assert [each["name"] for each in user.run("list", "--json").json["unreadable"]] == [str(folder)]
    assert user.run("rm", folder, "-y").code == 0 and not folder.exists()


def test_a_model_whose_weights_are_cut_off_is_told_as_well(user: HubUser, made: Path) -> None:
    weights = made / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (told,) = user.run("list", "--json").json["unreadable"]
    assert told["name"] == str(made) and "model.safetensors" in told["why"]


# -- whoever made it ---------------------------------------------------------------------------------------------------------------


def test_every_model_is_asked_about_wherever_it_lies(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=tiny())
    own = storage.models_folder(user.env) / "mine"
    own.parent.mkdir(parents=True)
    makes = ("quantize", "fable", "--bits", "4", "-o")
    for words in (("pull", REPO), (*makes, own), (*makes, user.home / "out")):
        assert user.run(*words).code == 0
    for name in (REPO, own, user.home / "out"):
        folder = Path(user.run("rm", name, "--dry-run", "--json").json["folder"])
        assert f"hint: -y removes it: effllm rm {name} -y" in user.run("rm", name).refused(2) and folder.is_dir()
        for reply in ("", "n\n", "perhaps\n"):
            declined = user.run("rm", name, "--json", answers=reply)
            assert declined.json["removed"] is False and "Remove it?" in declined.err and folder.is_dir()
        assert user.run("rm", name, answers="y\n").code == 0 and not folder.exists()
