"""Suggestions where a model is absent, senseless requests, and a hub that lies."""

import json
from pathlib import Path

import pytest
from gguf_samples import add_fable_tokenizer, write_model
from hub_server import Hub, Repo, always
from hub_user import FABLE, HubUser, measure_nothing, on_disk, tiny

REPO = "org/name"


@pytest.fixture
def user(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> HubUser:
    measure_nothing(monkeypatch)
    return HubUser(tmp_path, hub.endpoint)


def test_run_of_an_absent_model_asks_once_at_a_terminal(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, FABLE)
    words = ("run", REPO, "Once", "--raw", "-n", "2")
    said = user.run(*words).refused(3)
    assert f"effllm pull {REPO}" in said and not hub.requests
    declined = user.run(*words, answers="n\n")
    assert declined.code == 3 and "download" in declined.err and not hub.requests_for("model.safetensors")
    ran = user.run(*words, answers="y\n")
    assert ran.code == 0 and ran.out.strip() and ran.err.count("[Y/n]") == 1
    assert on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    hub.forget()
    assert user.run(*words).code == 0 and not hub.requests


def test_run_with_yes_and_bits(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, FABLE)
    ran = user.run("run", REPO, "Once", "--raw", "-n", "2", "--bits", "4", "-y")
    assert ran.code == 0 and ran.out.strip()
    assert [model["name"] for model in user.run("list", "--json").json["models"]] == ["fable", f"{REPO}:4bit"]


@pytest.mark.parametrize(("words", "code", "said"), [
    (("pull", "fable:4bit"), 2, "comes with effllm"), (("pull", "./folder"), 2, "is a path"), (("pull", "lama3"), 3, "did you mean llama3"),
    (("pull", REPO, "--keep"), 2, "--bits 4 --keep"), (("pull", f"{REPO}:4bit", "--bits", "3"), 2, "disagree"),
    (("pull", REPO, "--bits", "7"), 2, "3 or 2, not 7"), (("pull", f"{REPO}:a.gguf", "--bits", "4"), 2, "without quantizing"),
    (("pull", "word"), 3, "no model 'word'"), (("pull", REPO + "@../x"), 2, "not a revision")])
def test_requests_that_make_no_sense(user: HubUser, hub: Hub, words: tuple[str, ...], code: int, said: str) -> None:
    assert said in user.run(*words).refused(code)
    assert not hub.requests


def test_what_comes_with_effllm_needs_no_download(user: HubUser, hub: Hub) -> None:
    """Whoever pulls before the first run, as elsewhere, is told that nothing is lacking, and a script goes on."""
    pulled = user.run("pull", "fable")
    assert (pulled.code, pulled.err) == (0, "fable needs no download: it comes with effllm; effllm run fable\n")
    assert user.run("pull", "fable", "--json").json == {"folder": str(FABLE), "bytes_loaded": 0, "seconds": 0.0, "plan": None}
    assert user.run("alias", "tale", FABLE).code == 0
    assert f"tale needs no download: it is at {FABLE}" in user.run("pull", "tale").err
    assert not hub.requests


def test_the_hub_is_not_believed(hub: Hub, user: HubUser) -> None:
    repo: Repo = hub.add(REPO, files=tiny())
    good = {"id": REPO, "sha": repo.commit, "siblings": []}
    for change in ({"sha": "../../x"}, {"siblings": 5}, {"sha": None}):
        hub.disturb = always(200, {"Content-Type": "application/json"}, json.dumps(good | change).encode(), "/api/")
        assert "does not answer like a model hub" in user.run("pull", REPO).refused(6)
    evil = [{"rfilename": "../../../evil.safetensors", "size": 3, "blobId": "0" * 40}, {"rfilename": "model.safetensors", "size": -1,
            "blobId": "0" * 40}, {"rfilename": "config.json", "size": 1, "blobId": "../x"}]
    hub.disturb = always(200, {"Content-Type": "application/json"}, json.dumps(good | {"siblings": evil}).encode(), "/api/")
    assert "no weights" in user.run("pull", REPO).refused(3)


def test_all_parts_of_a_split_gguf_file_come(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    write_model(FABLE, folder / "fable.gguf", "Q8_0", change=add_fable_tokenizer, per_file=20)
    parts = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(parts) == 3
    repo = hub.add(REPO, files=parts | {"other.gguf": b"x"})
    for name in parts:
        user.run("rm", REPO, "-y")
        hub.forget()
        assert user.run("pull", f"{REPO}:{name}").code == 0
        assert on_disk(user.snapshot(REPO, repo.commit)) == parts and not hub.requests_for("other.gguf")
    last = sorted(parts)[-1]
    ran = user.run("run", f"{REPO}:{last}", "Hi", "-n", "2")
    assert ran.code == 0 and ran.out.strip(), ran.err
    hub.add("org/lost", files={name: raw for name, raw in parts.items() if name != last})
    assert last in user.run("pull", f"org/lost:{sorted(parts)[0]}").refused(3)
