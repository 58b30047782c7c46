"""An interrupted download: what it left is listed, reported, resumed and removed by the file's name alone."""

import fcntl
import json
from collections.abc import Iterator

import pytest
from gguf_samples import add_fable_tokenizer, write_model
from hub_server import Hub, Reply, Request, running, sha256
from hub_user import FABLE, HubUser, sharded, tiny

from effllm.offload import transfer
from effllm.runtime.library.unfinished_downloads import NOTE

REPO = "org/name"
WHOLE, SPLIT = "fable-Q8_0.gguf", "Q4_0/fable-Q4_0-00001-of-00003.gguf"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """fable as a repository of GGUF files: one at the top level, one in a folder and in parts."""
    folder = tmp_path_factory.mktemp("made")
    write_model(FABLE, folder / "fable-Q8_0.gguf", "Q8_0", change=add_fable_tokenizer)
    write_model(FABLE, folder / "fable-Q4_0.gguf", "Q4_0", change=add_fable_tokenizer, per_file=20)
    return {path.name if "Q8" in path.name else f"Q4_0/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with running() as hub:
        hub.add(REPO, files=files)
        yield hub


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that something of every file comes before the line is cut."""
    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 16)
    monkeypatch.setattr(transfer, "PIECE_NBYTES", 1 << 15)


def stop(hub: Hub, user: HubUser, name: str, word: str, after: int = 1_000_000) -> None:
    """A pull whose storage goes away for good when `after` bytes of the files with `word` in their names have been sent."""

    def gone(request: Request) -> Reply | None:
        sent = sum(count for file, count in hub.served.items() if word in file)
        return (451, {}, b"") if word in request.path and "signed" in request.path and sent > after else None

    hub.forget()
    hub.disturb = gone
    user.run("pull", name).refused(6)
    hub.disturb = None


def incomplete(user: HubUser) -> dict[str, tuple[int, int]]:
    return {each["name"]: (each["bytes_here"], each["bytes_total"]) for each in user.run("list", "--json").json["incomplete"]}


def left(user: HubUser) -> list[str]:
    """Every file and link below the hub cache but for the locks, which all tools leave."""
    cache = user.home / "hf" / "hub"
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if not path.is_dir() and ".locks" not in path.parts)


@pytest.mark.parametrize(("file", "tag"), [(WHOLE, "Q8_0"), (SPLIT, "q4_0")])
def test_a_file_that_is_partly_here_is_listed_and_removed_by_its_tag(hub: Hub, user: HubUser, files: dict[str, bytes], file: str,
                                                                     tag: str) -> None:
    total = sum(len(raw) for name, raw in files.items() if tag.upper() in name)
    stop(hub, user, f"{REPO}:{tag}", tag.upper())
    here, size = incomplete(user)[f"{REPO}:{file}"]
    assert 250_000 < here < total and size == total
    assert [model["name"] for model in user.run("list", "--json").json["models"]] == ["fable"]
    shown = user.run("list")
    (line,) = [line for line in shown.out.splitlines() if file in line]
    assert "MiB" in line and "effllm rm NAME` removes it" in shown.err
    said = user.run("run", f"{REPO}:{tag}", "Hi").refused(3)
    assert "is only partly downloaded: " in said and f"effllm pull {REPO}:{tag}" in said
    planned = user.run("rm", f"{REPO}:{tag}", "--dry-run", "--json").json
    assert planned["bytes"] == here and left(user)
    assert "partly downloaded, is in the hub cache" in user.run("rm", f"{REPO}:{tag}").refused(2)
    removed = user.run("rm", f"{REPO}:{tag}", "-y")
    assert removed.code == 0 and "the partial download was removed" in removed.err
    assert left(user) == [] and incomplete(user) == {}
    assert "is not on this machine" in user.run("rm", f"{REPO}:{tag}", "-y").refused(3)


def test_only_that_file_goes_and_what_is_whole_beside_it_stays(hub: Hub, user: HubUser, files: dict[str, bytes]) -> None:
    assert user.run("pull", f"{REPO}:{WHOLE}").code == 0
    before = left(user)
    stop(hub, user, f"{REPO}:{SPLIT}", "Q4_0")
    for name in (f"{REPO}:Q4_0", f"{REPO}:{SPLIT}", f"{REPO}@{hub.repos[REPO].commit[:9]}:Q4_0"):
        removed = user.run("rm", name, "--dry-run", "--json").json
        assert removed["folder"] != str(user.home / "hf" / "hub" / "models--org--name"), "the repository holds another file"
    assert user.run("rm", f"{REPO}:Q4_0", "-y").code == 0
    assert left(user) == before and user.run("verify", f"{REPO}:{WHOLE}").code == 0 and incomplete(user) == {}


def test_a_pull_that_continues_leaves_no_note(hub: Hub, user: HubUser, files: dict[str, bytes]) -> None:
    stop(hub, user, f"{REPO}:Q4_0", "Q4_0")
    assert any(name.endswith(NOTE) for name in left(user))
    hub.forget()
    assert user.run("pull", f"{REPO}:Q4_0").code == 0
    assert not any("incomplete" in name for name in left(user)) and incomplete(user) == {}
    assert user.run("verify", f"{REPO}:Q4_0").code == 0
    assert sum(hub.served.values()) < sum(len(raw) for name, raw in files.items() if "Q4_0" in name), "what had come was loaded again"


def test_what_an_older_version_left_goes_with_the_file_that_took_its_place(hub: Hub, user: HubUser, files: dict[str, bytes]) -> None:
    stop(hub, user, f"{REPO}:Q8_0", "Q8_0")
    hub.add(REPO, files={WHOLE: files[WHOLE] + b"\0" * 32})
    assert user.run("pull", f"{REPO}:Q8_0").code == 0
    assert list(incomplete(user)) == [f"{REPO}:{WHOLE}"]
    assert user.run("rm", f"{REPO}:Q8_0", "-y").code == 0 and left(user) == []


def test_a_tag_of_two_files_that_are_partly_here_removes_neither(hub: Hub, user: HubUser, files: dict[str, bytes]) -> None:
    hub.add(REPO, files={"a-Q8_0.gguf": files[WHOLE], "b-Q8_0.gguf": files[WHOLE] + b"\0" * 32})
    for name in ("a-Q8_0.gguf", "b-Q8_0.gguf"):
        stop(hub, user, f"{REPO}:{name}", name)
    before = left(user)
    said = user.run("rm", f"{REPO}:Q8_0", "-y").refused(3)
    assert "2 files" in said and f"{REPO}:a-Q8_0.gguf or {REPO}:b-Q8_0.gguf" in said and left(user) == before
    assert user.run("rm", f"{REPO}:a-Q8_0.gguf", "-y").code == 0 and list(incomplete(user)) == [f"{REPO}:b-Q8_0.gguf"]


def test_a_whole_repository_that_is_partly_here_is_listed_by_its_name(hub: Hub, user: HubUser) -> None:
    hub.add("org/other", files=tiny(), branches=("main", "v1.0"))
    total = sum(map(len, tiny().values()))
    stop(hub, user, "org/other@v1.0", "model.safetensors", 1_000_000)
    here, size = incomplete(user)["org/other@v1.0"]
    assert 500_000 < here < total == size
    said = user.run("run", "org/other@v1.0", "Hi").refused(3)
    assert "org/other is only partly downloaded" in said and "to complete it: effllm pull org/other@v1.0" in said
    assert user.run("rm", "org/other@v1.0", "--dry-run", "--json").json["bytes"] < total, "a hole frees nothing"
    assert user.run("rm", "org/other@v1.0", "-y").code == 0 and left(user) == []


@pytest.mark.parametrize("lie", [{"name": "../../../../precious.gguf"}, {"commit": "../../.."}, {"name": 5}, {"revision": "../x"},
                                 {"name": ".."}])
def test_a_note_that_leads_elsewhere_is_not_believed(hub: Hub, user: HubUser, files: dict[str, bytes], lie: dict[str, object]) -> None:
    stop(hub, user, f"{REPO}:Q8_0", "Q8_0")
    (user.home / "precious.gguf").write_bytes(b"precious")
    place = user.blobs(REPO)[sha256(files[WHOLE]).hex() + NOTE]
    place.write_text(json.dumps({"name": WHOLE, "revision": "main", "commit": hub.repos[REPO].commit} | lie))
    assert incomplete(user) == {}
    assert user.run("rm", f"{REPO}:Q8_0", "-y").code == 3 and (user.home / "precious.gguf").exists()
    for torn in (b"", b"{", b"[" * 5000, b"\xff\xfe"):
        place.write_bytes(torn)
        assert incomplete(user) == {}
    assert user.run("rm", REPO, "-y").code == 0 and left(user) == []


def test_what_a_stopped_pull_of_bits_has_left_goes_by_the_name_of_the_format(hub: Hub, user: HubUser) -> None:
    repo = hub.add("org/other", files=sharded(FABLE))
    hub.disturb = lambda request: (451, {}, b"") if "00003-of" in request.path and hub.served["model-00002-of-00003.safetensors"] else None
    for name in ("org/other:4bit", f"org/other@{repo.commit[:9]}:4bit"):
        user.run("pull", "org/other", "--bits", "4").refused(6)
        place = user.home / "data" / "effllm" / "models" / "org--other" / repo.commit
        lock = place / ".4bit.lock"
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "is being downloaded" in user.run("rm", name).refused(1) and (place / ".4bit.source").is_dir()
        user.run("rm", "org/other:3bit").refused(3)
        removed = user.run("rm", name, "-y")
        assert removed.code == 0 and "the partial download was removed" in removed.err and not place.exists()
        user.run("rm", name).refused(3)
