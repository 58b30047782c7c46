"""An interrupted `pull --bits`: listed, reported, planned, resumed and removed by the name that was typed."""

import json
from collections.abc import Iterator

import pytest
from hub_server import Hub, running
from hub_user import FABLE, HubUser, sharded

from effllm.runtime.events import Progress
from effllm.runtime.library import unfinished_builds
from effllm.runtime.library.model_name import parse_reference
from effllm.runtime.pull.client import Client
from effllm.runtime.pull.plan import plan_pull, pull_target
from effllm.runtime.pull.pull import pull_model

REPO = "org/name"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        hub.add(REPO, files=sharded(FABLE), branches=("main", "v1"))
        yield hub


def stop(hub: Hub, user: HubUser, name: str = f"{REPO}:4bit") -> int:
    """A pull that ends after the first shard has become tensors, by the name of a model at four bits; the bytes that it loaded."""
    client = Client(user.env)
    target = pull_target(parse_reference(name, user.env), user.env)
    going = pull_model(plan_pull(target, client, user.env), client, user.env)
    for item in going:
        if isinstance(item, Progress) and item.phase == "quantizing" and item.done > item.total // 2:
            break
    going.close()
    return sum(count for file, count in hub.served.items() if file in hub.repos[REPO].files)


def test_it_is_listed_until_it_is_whole_and_its_bytes_are_not_planned_again(hub: Hub, user: HubUser) -> None:
    loaded, total = stop(hub, user), sum(map(len, hub.repos[REPO].files.values()))
    listed = user.run("list", "--json").json["incomplete"]
    assert listed == [{"name": f"{REPO}:4bit", "bytes_here": listed[0]["bytes_here"], "bytes_total": total}]
    assert 0.9 * loaded < listed[0]["bytes_here"] <= loaded < total, "the shard whose place was given back counts as well"
    for words in (("show", f"{REPO}:4bit"), ("run", f"{REPO}:4bit", "hi")):
        said = user.run(*words).refused(3)
        assert "only partly built" in said and f"to complete it: effllm pull {REPO}:4bit" in said
    planned = user.run("pull", listed[0]["name"], "--dry-run", "--json").json
    assert planned["bytes_here"] == listed[0]["bytes_here"] and planned["bytes_to_load"] == total - planned["bytes_here"]
    hub.forget()
    went_on = user.run("pull", listed[0]["name"], "--json").json
    assert went_on["bytes_loaded"] == planned["bytes_to_load"]
    assert user.run("list", "--json").json["incomplete"] == []
    whole = user.run("pull", f"{REPO}:4bit", "--dry-run", "--json").json
    assert whole["bytes_to_load"] == 0 == whole["disk_needed_bytes"]


def test_it_is_removed_by_its_name_and_branch(hub: Hub, user: HubUser) -> None:
    stop(hub, user, f"{REPO}@v1:4bit")
    assert [each["name"] for each in user.run("list", "--json").json["incomplete"]] == [f"{REPO}@v1:4bit"]
    assert "not on this machine" in user.run("rm", f"{REPO}:3bit").refused(3)
    assert user.run("rm", f"{REPO}@v1:4bit", "-y").code == 0
    assert user.run("list", "--json").json["incomplete"] == [] and not list((user.home / "data" / "effllm" / "models").iterdir())


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b'{"revision": "main"}', b'{"revision": "../x", "files": [], "done": []}',
                                  b'{"revision": "main", "files": [["../../x", 5, "0"]], "done": []}',
                                  b'{"revision": "main", "files": [["x", true, "0"]], "done": []}',
                                  b'{"revision": "main", "files": [[]], "done": []}', b'{"revision": "main", "files": 5, "done": [[]]}'])
def test_a_torn_note_counts_nothing(hub: Hub, user: HubUser, said: bytes) -> None:
    stop(hub, user)
    (note,) = (user.home / "data").rglob(unfinished_builds.NOTE)
    assert json.loads(note.read_bytes())["revision"] == "main"
    note.write_bytes(said)
    assert user.run("list", "--json").json["incomplete"] == []
    assert user.run("rm", f"{REPO}:4bit", "-y").code == 0 and not note.parent.exists()


def test_a_download_that_was_stopped_before_its_weights_began_is_measured_by_all_of_it(hub: Hub, user: HubUser) -> None:
    hub.disturb = lambda request: (451, {}, b"") if "tokenizer.json" in request.path and "signed" in request.path else None
    user.run("pull", REPO).refused(6)
    (listed,) = user.run("list", "--json").json["incomplete"]
    assert listed["bytes_here"] < listed["bytes_total"] == sum(map(len, hub.repos[REPO].files.values()))
