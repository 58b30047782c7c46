"""Downloads of encoders: their pooling configuration is included, and their size is shown."""

from pathlib import Path

import pytest
from encoder_gguf_files import write_encoder
from encoder_models import made_encoder, random_model
from hub_server import Hub
from hub_user import HubUser, measure_nothing

REPO = "org/vectors"


@pytest.fixture
def user(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> HubUser:
    measure_nothing(monkeypatch)
    return HubUser(tmp_path / "home", hub.endpoint)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    folder = made_encoder(tmp_path / "m", random_model("Bert"), longest=64)
    write_encoder(folder, tmp_path / "m.gguf")
    read = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {**read, "small.gguf": (tmp_path / "m.gguf").read_bytes()}


def test_a_folder(hub: Hub, user: HubUser, files: dict[str, bytes]) -> None:
    hub.add(REPO, files=files)
    assert "it does not generate text" in user.run("pull", REPO, "--dry-run").err
    pulled = user.run("pull", REPO)
    assert pulled.code == 0, pulled.err
    shown = user.run("show", REPO, "--json").json
    assert (shown["pooling"], shown["context"]) == ("mean", 64)
    assert [each["family"] for each in user.run("list", "--json").json["models"] if each["name"] == REPO] == ["bert"]
    assert user.run("verify", REPO).code == 0
    assert "this is an embedding model, which does not generate text" in user.run("run", REPO, "a").err
    assert "runs as it is stored" in user.run("pull", f"{REPO}:4bit").refused(2)
    assert user.run("rm", REPO, "--yes").code == 0
    assert REPO not in user.run("list").out


def test_a_file(hub: Hub, user: HubUser, files: dict[str, bytes]) -> None:
    hub.add(REPO, files=files)
    assert user.run("pull", f"{REPO}:small.gguf").code == 0
    assert user.run("show", f"{REPO}:small.gguf", "--json").json["vector"] == 48
