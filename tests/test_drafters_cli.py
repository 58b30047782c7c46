"""Trained drafters on the command line: answers, plans, lists, downloads, and the message about one used by itself."""

from pathlib import Path

import pytest
from command_line import CliRun
from drafter_models import saved_head
from hub_server import Hub
from hub_user import HubUser, measure_nothing

ASKED = ("--raw", "The fox ran. The fox ran. The fox ran. The", "-n", "40", "--temp", "0", "--ignore-eos")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the packaged model, which it knows nothing of."""
    folder = tmp_path_factory.mktemp("head") / "fox-eagle3"
    saved_head(folder, 256, 4096, 512)
    return folder


def test_the_text_is_the_same_with_and_without(head: Path) -> None:
    plain, drafted = (CliRun("run", "fable", *ASKED, "--json", *more).json for more in (("--spec", "off"), ("--draft", str(head))))
    found = drafted["speculation"]
    assert drafted["text"] == plain["text"] and found["passes"] + found["accepted"] == 39


def test_the_plan_says_who_drafts(head: Path) -> None:
    found = CliRun("plan", "fable", "--no-probe", "--json", "--draft", str(head)).json["speculation"]
    assert found["draft"] == str(head) and found["draft_bytes"] > 2 * 4 * 256 * 512
    assert "drafts from the text and by fox-eagle3 (" in CliRun("plan", "fable", "--no-probe", "--draft", str(head)).out


def test_one_by_itself_says_what_it_is_for(head: Path) -> None:
    ran = CliRun("run", str(head), "a")
    assert ran.code == 2 and "this is an EAGLE-3 head: it only drafts for the model it was trained for" in ran.err
    assert "effllm run THAT-MODEL --draft THIS-ONE" in ran.err and len(ran.err.splitlines()) == 2


@pytest.mark.parametrize("pickled", (False, True), ids=("safetensors", "by torch.save"))
def test_one_comes_from_a_hub(head: Path, pickled: bool, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_nothing(monkeypatch)
    user, name = HubUser(tmp_path / "home", hub.endpoint), "org/fox-eagle3"
    if pickled:
        saved_head(head := tmp_path / "pickled", 256, 4096, 512, pickled=True)
    hub.add(name, files={path.name: path.read_bytes() for path in head.iterdir()})
    assert "once downloaded, effllm plan THAT-MODEL --draft THIS-ONE" in user.run("pull", name, "--dry-run").err
    assert "drafts for another model, and runs as it is stored" in user.run("pull", f"{name}:4bit").refused(2)
    pulled = user.run("pull", name)
    assert pulled.code == 0, pulled.err
    (listed,) = [each for each in user.run("list", "--json").json["models"] if each["name"] == name]
    assert (listed["family"], listed["context"]) == ("eagle3", 768)
    assert user.run("plan", "fable", "--no-probe", "--json", "--draft", name).json["speculation"]["draft_bytes"] > 0
    assert user.run("verify", name).code == 0
    assert user.run("rm", name, "--yes").code == 0 and name not in user.run("list").out
