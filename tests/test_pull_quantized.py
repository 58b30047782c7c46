"""`effllm pull` of a shared result of `effllm quantize`: complete, planned as the folder is, and the same when run."""

import json
from pathlib import Path

import pytest
from conversions import options, run
from hub_server import Hub
from hub_user import FABLE, HubUser, measure_nothing, on_disk

from effllm.runtime.files.model_folder_files import MEASUREMENTS, TOWER

REPO, FEW = "org/name", ("Once", "--raw", "-n", "4", "--temp", "0")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "fable-4bit"
    run(FABLE, folder, options("4bit"))
    return folder


@pytest.fixture
def user(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> HubUser:
    measure_nothing(monkeypatch)
    return HubUser(tmp_path, hub.endpoint)


def test_it_comes_whole_is_planned_as_the_folder_and_answers_the_same(hub: Hub, user: HubUser, made: Path) -> None:
    repo = hub.add(REPO, made)
    planned = user.run("plan", REPO, "--no-probe", "--json").json["pull"]
    assert not hub.served["model.safetensors"] and planned["bytes_total"] == sum(map(len, repo.files.values()))
    pulled = user.run("pull", REPO, "--json").json
    folder = user.snapshot(REPO, repo.commit)
    assert on_disk(folder) == repo.files and pulled["plan"]["memory"]["weights_bytes"] == planned["memory"]["weights_bytes"]
    here = user.run("plan", made, "--no-probe", "--json").json
    assert planned["memory"]["weights_bytes"] == here["weights_bytes"] and planned["memory"]["kv_bytes"] == here["kv_bytes"]
    assert user.run("run", REPO, *FEW).out == user.run("run", made, *FEW).out
    assert user.run("verify", REPO, "--json").json["damaged"] == []
    rows = {model["name"]: model for model in user.run("list", "--json").json["models"]}
    assert 4 < rows[REPO]["bits_per_weight"] < 5


def test_bits_that_are_typed_are_refused_and_those_of_the_settings_left_out(
        hub: Hub, user: HubUser, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, made)
    for words in ((REPO, "--bits", "4"), (f"{REPO}:8bit",)):
        said = user.run("pull", *words).refused(2)
        assert f"{REPO} is quantized already (4bit)" in said and said.endswith(f"hint: effllm pull {REPO}"), said
    assert not hub.served["model.safetensors"]
    monkeypatch.setenv("EFFLLM_BITS", "3")
    pulled = user.run("pull", REPO)
    assert pulled.code == 0 and "is quantized already (4bit): bits of EFFLLM_BITS is ignored" in pulled.err, pulled.err


def test_what_was_measured_and_what_it_sees_with_come_along(hub: Hub, user: HubUser, made: Path) -> None:
    beside = (*MEASUREMENTS, TOWER)
    hub.add(REPO, made, files=dict.fromkeys(beside, b"x"))
    assert set(beside) <= set(user.run("pull", REPO, "--dry-run", "--json").json["files"])
    hub.add("org/plain", FABLE, files=dict.fromkeys(beside, b"x"))
    assert not set(beside) & set(user.run("pull", "org/plain", "--dry-run", "--json").json["files"])


@pytest.mark.parametrize(("change", "said"), [
    ({"version": 2}, "newer effllm wrote it"), ({"tensors": {}}, "lists no tensors"), ({"format": "other"}, "says format"),
    ({"tensors": {"w": {"spec": "9bit", "shape": [1, 2], "crc32": 0}}}, "unknown format '9bit'"), (None, "damaged")])
def test_a_damaged_description_is_refused_before_weights_are_loaded(hub: Hub, user: HubUser, made: Path, change: dict | None,
                                                                    said: str) -> None:
    text = (made / "effllm.json").read_text()
    text = text[:100] if change is None else json.dumps(json.loads(text) | change)
    hub.add(REPO, files={path.name: path.read_bytes() for path in made.iterdir()} | {"effllm.json": text.encode()})
    answer = user.run("pull", REPO)
    assert answer.code == 1 and REPO in answer.err and said in answer.err and answer.err.count("\n") == 2, answer.err
    assert not hub.served["model.safetensors"]
