"""`effllm verify` of a download: a missing file is as much damage as a changed one; what cannot be checked is named."""

from pathlib import Path

import pytest
from hub_server import Hub
from hub_user import HubUser, tiny

REPO = "org/name"


@pytest.fixture
def snapshot(hub: Hub, user: HubUser) -> Path:
    repo = hub.add(REPO, files=tiny())
    assert user.run("pull", REPO).code == 0
    return user.snapshot(REPO, repo.commit)


def test_a_whole_one_is_whole(user: HubUser, snapshot: Path) -> None:
    found = user.run("verify", REPO, "--json").json
    assert found["damaged"] == found["not_recorded"] == [] and found["files"] == len(list(snapshot.iterdir()))


def test_a_file_whose_blob_is_gone_is_damage(user: HubUser, snapshot: Path) -> None:
    (snapshot / "tokenizer.json").resolve().unlink()
    said = user.run("verify", REPO).refused(1)
    assert "is damaged: tokenizer.json is not as written" in said and "download it again" in said
    assert user.run("pull", REPO).code == 0 and user.run("verify", REPO).code == 0


def test_so_it_is_where_all_blobs_are_gone(user: HubUser, snapshot: Path) -> None:
    for path in snapshot.iterdir():
        path.resolve().unlink()
    assert "config.json" in user.run("verify", snapshot).refused(1)


def test_files_that_are_no_links_are_named_as_not_checked(user: HubUser, snapshot: Path) -> None:
    (snapshot / "kv_profile.json").write_text("{}")
    own = snapshot / "config.json"
    text = own.read_bytes()
    own.unlink()
    own.write_bytes(text)
    ran = user.run("verify", REPO)
    assert ran.code == 0 and "not checked, because no checksums were recorded: config.json, kv_profile.json" in ran.err
    assert user.run("verify", REPO, "--json").json["not_recorded"] == ["config.json", "kv_profile.json"]
