"""`effllm rm` takes what was named and nothing beside it: one revision of a repository, and of folders what effllm wrote there."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hub_server import Hub
from pulls import Person, measure_nothing, tiny

from effllm.offload import transfer

REPO = "org/name"


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_nothing(monkeypatch)
    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 18)


# -- one revision of a repository --------------------------------------------------------------------------------------------------


def two_revisions(hub: Hub, person: Person) -> tuple[str, str]:
    """The commits of v1.0 and of main, both in the cache."""
    old = hub.add(REPO, files=tiny(seed=1), branches=("v1.0",)).commit
    assert person.types("pull", f"{REPO}@v1.0").code == 0
    new = hub.add(REPO, files=tiny(seed=2)).commit
    assert person.types("pull", REPO).code == 0
    return old, new


def test_an_alias_of_one_revision_takes_that_one_alone(hub: Hub, person: Person) -> None:
    old, new = two_revisions(hub, person)
    assert person.types("alias", "work", f"{REPO}@v1.0").code == 0
    as_typed = person.types("rm", f"{REPO}@v1.0", "--dry-run", "--json").json
    assert person.types("rm", "work", "--dry-run", "--json").json == as_typed | {"name": "work"}
    assert person.types("rm", "work", "-y").code == 0
    assert not person.snapshot(REPO, old).exists() and person.types("verify", f"{REPO}@{new}").code == 0


def test_the_name_of_a_repository_is_all_of_it_whatever_an_alias_of_it_means(hub: Hub, person: Person) -> None:
    two_revisions(hub, person)
    assert person.types("alias", "work", f"{REPO}@v1.0").code == 0
    assert person.types("rm", REPO, "-y").code == 0 and not person.blobs(REPO)


def test_a_revision_that_is_not_here_takes_nothing(hub: Hub, person: Person) -> None:
    two_revisions(hub, person)
    before = person.blobs(REPO)
    person.types("rm", f"{REPO}@v9", "-y").refused(3)
    assert person.blobs(REPO) == before


def test_a_revision_that_is_partly_here_leaves_the_others(hub: Hub, person: Person) -> None:
    new = hub.add(REPO, files=tiny(seed=2)).commit
    assert person.types("pull", REPO).code == 0
    before = set(person.blobs(REPO))
    hub.add(REPO, files=tiny(seed=1) | {"LICENSE": b"of the old one"}, branches=("v1.0",))
    hub.served.clear()
    hub.disturb = lambda request: (451, {}, b"") if "signed" in request.path and hub.served["model.safetensors"] > 700_000 else None
    person.types("pull", f"{REPO}@v1.0").refused(6)
    assert set(person.blobs(REPO)) > before
    assert person.types("rm", f"{REPO}@v1.0", "-y").code == 0
    assert set(person.blobs(REPO)) == before and person.types("verify", f"{REPO}@{new}").code == 0
    assert person.types("list", "--json").json["incomplete"] == []
