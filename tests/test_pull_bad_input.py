"""Bad input for `pull` and related commands: names, hubs that change midway, caches with foreign content. One line, a next step, the right
exit code, and nothing incomplete under a final name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import Hub, Reply, Request, always, etag
from hub_user import HubUser, measure_nothing, on_disk, tiny

from effllm.offload import transfer
from effllm.runtime.library.unfinished_downloads import DATA, NOTE

REPO = "org/name"


@pytest.fixture
def user(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> HubUser:
    measure_nothing(monkeypatch)
    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 18)
    return HubUser(tmp_path / "home", hub.endpoint)


def finals(user: HubUser) -> dict[str, bytes]:
    """What lies under a final name in the snapshots of the cache."""
    found = (user.home / "hf" / "hub").glob("models--*/snapshots/*/*")
    return {path.name: path.read_bytes() for path in found if path.is_file()}


@pytest.mark.parametrize("name", ["org/naïve", "org/..", "org//name", "a/b/c", "org/name?x=1", "org/name#x", "org/a%2f..", "org/a--b",
                                  "o\tg/x", "org/na me"])
def test_a_name_that_no_repository_has_is_not_asked_for(hub: Hub, user: HubUser, name: str) -> None:
    assert "is not a valid repository name" in user.run("pull", name).refused(3)
    for words in (("rm", name, "-y"), ("show", name), ("verify", name), ("run", name, "Hi", "-y")):
        user.run(*words).refused(3)
    assert not hub.requests


@pytest.mark.parametrize(("code", "said"), [("RevisionNotFound", "has no such revision"), ("", "has no file model.safetensors"),
                                            ("EntryNotFound", "has no file model.safetensors")])
def test_what_vanishes_between_the_plan_and_the_download(hub: Hub, user: HubUser, code: str, said: str) -> None:
    repo = hub.add(REPO, files=tiny())
    hub.disturb = always(404, {"X-Error-Code": code} if code else {}, b"{}", "model.safetensors")
    assert said in user.run("pull", REPO).refused(3)
    assert "model.safetensors" not in finals(user) and finals(user).items() <= repo.files.items()
    hub.disturb = None
    assert user.run("pull", REPO).code == 0 and finals(user) == repo.files


def test_another_version_comes_while_a_part_of_the_first_is_here(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=tiny())
    hub.disturb = lambda request: (451, {}, b"") if "signed" in request.path and hub.served["model.safetensors"] > 700_000 else None
    user.run("pull", REPO).refused(6)
    hub.disturb, repo = None, hub.add(REPO, files=tiny(seed=1))
    assert user.run("pull", REPO).code == 0 and on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    assert [each["name"] for each in user.run("list", "--json").json["incomplete"]] == [REPO], "the part of the first is not forgotten"
    assert user.run("rm", REPO, "-y").code == 0 and not user.blobs(REPO)


def test_a_pull_continues_with_a_server_that_ignores_ranges(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=tiny())
    hub.disturb = lambda request: (451, {}, b"") if "signed" in request.path and hub.served["model.safetensors"] > 700_000 else None
    user.run("pull", REPO).refused(6)
    hub.disturb, hub.ranges = None, False
    again = user.run("pull", REPO)
    assert again.code == 0 and "the server sends no ranges" in again.err and finals(user) == repo.files


@pytest.mark.parametrize("length", ["2500000", "1000", "9" * 30])
def test_a_length_that_lies(hub: Hub, user: HubUser, length: str) -> None:
    repo = hub.add(REPO, files=tiny())

    def lie(request: Request) -> Reply | None:
        if "signed" not in request.path or "model.safetensors" in request.path:
            return None
        return 200, {"Content-Length": length}, repo.files["tokenizer.json"]

    hub.disturb = lie
    said = user.run("pull", REPO).refused(6)
    assert f"tokenizer.json: the server sends {length} bytes, the hub says {len(repo.files['tokenizer.json'])}" in said
    assert "tokenizer.json" not in finals(user)
    hub.disturb = None
    assert user.run("pull", REPO).code == 0 and finals(user) == repo.files


@pytest.mark.parametrize("place", ["https://[bad/x", "//[", "http://127.0.0.1:99999/x", "ftp://127.0.0.1/x", "http://a..b/x", "/na\xefve"])
@pytest.mark.parametrize("word", ["/api/", "config.json", "model.safetensors"])
def test_a_hub_that_sends_on_to_what_is_no_address(hub: Hub, user: HubUser, word: str, place: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once: the same answer would come again."""
    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 22)  # the file is one range, asked for once
    hub.add(REPO, files=tiny())
    hub.disturb = always(302, {"Location": place}, b"", word)
    said = user.run("pull", REPO).refused(6)
    assert f"{hub.endpoint.removeprefix('http://')} redirects to something other than an http or https URL" in said
    assert len(hub.requests_for(word)) == 1


@pytest.mark.parametrize(("files", "exclude", "chosen"), [
    ({"new.safetensors": "model.safetensors", "old.safetensors": "model.safetensors"}, "old*", ["new.safetensors"]),
    ({"model-00001-of-00001.safetensors": "model.safetensors", "model.safetensors": "model.safetensors"}, "model.safetensors",
     ["model-00001-of-00001.safetensors", "model.safetensors.index.json"])], ids=["two of any name", "two ways to store it"])
def test_an_alias_of_ones_own_says_which_copy_of_the_weights(hub: Hub, user: HubUser, files: dict[str, str], exclude: str,
                                                             chosen: list[str]) -> None:
    made = tiny()
    index = {"model.safetensors.index.json": b'{"weight_map": {"x": "model-00001-of-00001.safetensors"}}'}
    hub.add(REPO, files={**{name: text for name, text in made.items() if name != "model.safetensors"}, **(index if len(chosen) > 1 else {}),
                         **{name: made[source] + name.encode() for name, source in files.items()}})
    own = user.home / "config" / "effllm" / "models.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(f"mine: {{repo: {REPO}, licence: mit, gated: false, params: 1M, size_gb: 0.01, default_bits: 16, exclude: '{exclude}'}}")
    assert user.run("pull", "mine").code == 0
    assert sorted(name for name in finals(user) if "safetensors" in name) == chosen


def test_a_listing_that_is_too_long_is_no_page_of_the_network(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=tiny())
    names = [{"rfilename": f"checkpoint-{number}/{'x' * 1000}"} for number in range(17_000)]
    hub.disturb = always(200, {"Content-Type": "application/json"}, json.dumps({"siblings": names}).encode(), "/api/")
    said = user.run("pull", REPO).refused(6)
    assert f"what the hub lists of {REPO} is longer than 16 MiB" in said and "sign-in" not in said and len(hub.requests_for("/api/")) == 1


def loop(root: Path, commit: str) -> Path:
    place = root / "snapshots" / commit
    place.parent.mkdir(parents=True)
    place.symlink_to(place)
    return place


def file_for_blobs(root: Path, commit: str) -> Path:
    root.mkdir(parents=True)
    (root / "blobs").write_text("x")
    return root / "blobs"


def link_for_a_part(root: Path, commit: str) -> Path:
    (root / "blobs").mkdir(parents=True)
    place = root / "blobs" / (etag("model.safetensors", tiny()["model.safetensors"]) + DATA)
    place.symlink_to(root.parents[2] / "precious")
    return place


@pytest.mark.parametrize("odd", [loop, file_for_blobs, link_for_a_part])
def test_something_else_lies_in_the_cache(hub: Hub, user: HubUser, odd: Callable[[Path, str], Path]) -> None:
    repo = hub.add(REPO, files=tiny())
    place = odd(user.snapshot(REPO, "x").parents[1], repo.commit)
    (user.home / "precious").write_text("precious")
    assert user.run("list").code == 0
    said = user.run("pull", REPO).refused(1)
    assert f"{place} is in the way" in said and "move it away" in said and (user.home / "precious").read_text() == "precious"
    place.unlink()
    assert user.run("pull", REPO).code == 0 and finals(user) == repo.files


def test_nothing_is_written_through_a_link_in_place_of_a_note(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=tiny())
    (user.home / "precious").parent.mkdir(exist_ok=True)
    (user.home / "precious").write_text("precious")
    blobs = user.snapshot(REPO, "x").parents[1] / "blobs"
    blobs.mkdir(parents=True)
    note = blobs / (etag("model.safetensors", repo.files["model.safetensors"]) + NOTE)
    for place in (note, note.with_name(f".{note.name}")):
        place.symlink_to(user.home / "precious")
    assert user.run("pull", REPO).code == 0 and finals(user) == repo.files
    assert (user.home / "precious").read_text() == "precious" and all(len(name) in (40, 64) for name in user.blobs(REPO))


def test_links_that_lead_nowhere(hub: Hub, user: HubUser) -> None:
    """A file of which the blob is lost is told of, and goes by its name; without any blobs too."""
    repo = hub.add(REPO, files={"a-Q8_0.gguf": b"g" * 50, "b-Q8_1.gguf": b"h" * 50})
    for name in repo.files:
        assert user.run("pull", f"{REPO}:{name}").code == 0
    folder = user.snapshot(REPO, repo.commit)
    (folder / "a-Q8_0.gguf").resolve().unlink()
    for words in (("show",), ("verify",), ("run", "Hi")):
        assert f"effllm pull {REPO}:Q8_0" in user.run(words[0], f"{REPO}:Q8_0", *words[1:]).refused(3)
    assert user.run("rm", f"{REPO}:Q8_0", "-y").code == 0 and [path.name for path in folder.iterdir()] == ["b-Q8_1.gguf"]
    shutil.rmtree(folder.parents[1] / "blobs")
    assert user.run("rm", f"{REPO}:b-Q8_1.gguf", "-y").code == 0 and not folder.parents[1].exists()


def test_rm_never_advises_to_remove_what_is_no_model(user: HubUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("/", ".", "..", str(tmp_path)):
        said = user.run("rm", name, "-y").refused(2)
        assert "is not a model" in said and "rm -r" not in said


@pytest.mark.parametrize("out", ["/", "o.txt"])
def test_an_export_without_the_name_of_a_gguf_file(user: HubUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    said = user.run("export", "fable", "-o", out).refused(2)
    assert f"effllm: {out} does not end in .gguf" in said and not said.endswith("-o .gguf") and list(tmp_path.iterdir()) == []
