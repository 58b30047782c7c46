"""Quantizing during the download, shard by shard: the same bytes as from a folder, one shard on disk at a time, also after kills."""

import fcntl
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import check_whole
from hub_server import Hub, always, running
from hub_user import FABLE, MINUTE, HubUser, on_disk, sharded
from test_pull_resume import wait_until, weights_served

from effllm.offload.partial_file import PartialFile
from effllm.runtime.events import Progress
from effllm.runtime.library.model_name import parse_reference
from effllm.runtime.pull import streaming_quantize
from effllm.runtime.pull.client import Client
from effllm.runtime.pull.disk import lock_path
from effllm.runtime.pull.plan import plan_pull, pull_target
from effllm.runtime.pull.pull import pull_model
from effllm.runtime.stores.container import read_container

REPO = "org/name"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        hub.add(REPO, files=sharded(FABLE))
        yield hub


@pytest.fixture(scope="module")
def from_folder(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights that `quantize` makes."""
    place = tmp_path_factory.mktemp("folder")
    user = HubUser(place, "http://127.0.0.1:9")
    assert user.run("quantize", FABLE, "-o", place / "out", "--bits", "4").code == 0
    return (place / "out" / "model.safetensors").read_bytes()


def kept(user: HubUser, hub: Hub, spec: str = "4bit") -> Path:
    return user.home / "data" / "effllm" / "models" / "org--name" / hub.repos[REPO].commit / spec


def weights(hub: Hub) -> int:
    return sum(len(content) for name, content in hub.repos[REPO].files.items() if name.endswith(".safetensors"))


def allocated(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


def test_the_bytes_are_those_that_quantize_makes(hub: Hub, user: HubUser, from_folder: bytes) -> None:
    ran = user.run("pull", REPO, "--bits", "4")
    assert ran.code == 0, ran.err
    folder = kept(user, hub)
    check_whole(folder, FABLE)
    assert (folder / "model.safetensors").read_bytes() == from_folder
    made = read_container(folder)
    assert made.source["repo"] == REPO and made.source["revision"] == hub.repos[REPO].commit and made.source["licence"] == "apache-2.0"
    assert sorted(path.name for path in folder.parent.iterdir()) == [".4bit.lock", "4bit"] and not user.blobs(REPO)
    assert weights_served(hub) == weights(hub)
    assert f"effllm run {REPO}:4bit" in ran.err
    # It is found by its name with and without the format; the whole model is not claimed to be here.
    for name in (f"{REPO}:4bit", f"{REPO}@main:4bit", f"{REPO}@{hub.repos[REPO].commit[:10]}:4bit", REPO):
        ran = user.run("run", name, "Once", "--raw", "-n", "2", "--temp", "0")
        assert ran.code == 0 and ("the full ones are not on this machine" in ran.err) == (":4bit" not in name), ran.err
    assert user.run("show", f"{REPO}:4bit", "--json").json["quantized"]["source"]["repo"] == REPO
    assert user.run("verify", f"{REPO}:4bit").code == 0
    hub.forget()
    assert "everything is downloaded already" in user.run("pull", REPO, "--bits", "4").err and not weights_served(hub)


def test_the_plan_knows_the_size_of_the_result(hub: Hub, user: HubUser) -> None:
    plan = user.run("pull", REPO, "--bits", "4", "--dry-run", "--json").json
    assert plan["bytes_read_for_plan"] <= 300_000 and not weights_served(hub)
    assert user.run("pull", REPO, "--bits", "4").code == 0
    size = sum(path.stat().st_size for path in kept(user, hub).iterdir())
    assert plan["bytes_kept"] == pytest.approx(size, rel=0.03) and plan["folder"] == str(kept(user, hub))


def test_no_more_than_one_shard_beside_the_result(hub: Hub, user: HubUser) -> None:
    client = Client(user.env)
    target = pull_target(parse_reference(f"{REPO}:4bit", user.env), user.env)
    plan = plan_pull(target, client, user.env)
    peak, phases = 0, []
    for item in pull_model(plan, client, user.env):
        peak = max(peak, allocated(user.home))
        if isinstance(item, Progress):
            phases.append(item.phase)
    result = allocated(kept(user, hub))
    largest = max(len(content) for name, content in hub.repos[REPO].files.items() if name.endswith(".safetensors"))
    assert {"downloading", "quantizing"} <= set(phases)
    assert result < peak <= 1.05 * (largest + result), (peak, largest, result)
    assert peak <= plan.disk_bytes * 1.02


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_bytes(hub: Hub, user: HubUser, from_folder: bytes) -> None:
    hub.rate = 6e6
    rng, kills = random.Random(), 0
    for _ in range(4):
        process = user.start("pull", REPO, "--bits", "4")
        goal = weights_served(hub) + rng.uniform(0.1, 0.4) * weights(hub)
        if wait_until(lambda goal=goal: weights_served(hub) >= goal, process):
            process.kill()
            kills += 1
        process.communicate(timeout=MINUTE)
    hub.rate = None
    assert user.run("pull", REPO, "--bits", "4").code == 0
    assert (kept(user, hub) / "model.safetensors").read_bytes() == from_folder
    assert kills and weights_served(hub) <= weights(hub) + kills * (2 << 20), "more than what was in flight came twice"


def test_stopped_between_shards_nothing_is_done_again(hub: Hub, user: HubUser, from_folder: bytes) -> None:
    client = Client(user.env)
    target = pull_target(parse_reference(f"{REPO}:4bit", user.env), user.env)
    running_pull = pull_model(plan_pull(target, client, user.env), client, user.env)
    for item in running_pull:
        if isinstance(item, Progress) and item.phase == "quantizing" and item.done > item.total // 2:
            break
    running_pull.close()
    assert not kept(user, hub).exists()
    ran = user.run("pull", REPO, "--bits", "4")
    assert ran.code == 0 and "resuming where an earlier run stopped" in ran.err
    assert weights_served(hub) == weights(hub) and (kept(user, hub) / "model.safetensors").read_bytes() == from_folder


def test_keep_leaves_the_published_weights_for_other_tools(hub: Hub, user: HubUser, from_folder: bytes) -> None:
    assert user.run("pull", REPO, "--bits", "4", "--keep").code == 0
    assert on_disk(user.snapshot(REPO, hub.repos[REPO].commit)) == hub.repos[REPO].files
    assert (kept(user, hub) / "model.safetensors").read_bytes() == from_folder
    assert {model["name"] for model in user.run("list", "--json").json["models"]} == {"fable", REPO, f"{REPO}:4bit"}


def test_what_the_cache_holds_is_not_loaded_again(hub: Hub, user: HubUser, from_folder: bytes) -> None:
    assert user.run("pull", REPO).code == 0
    hub.forget()
    ran = user.run("pull", f"{REPO}:4bit")
    assert ran.code == 0 and "made from local files" in ran.err and not weights_served(hub)
    assert (kept(user, hub) / "model.safetensors").read_bytes() == from_folder
    assert on_disk(user.snapshot(REPO, hub.repos[REPO].commit)) == hub.repos[REPO].files


def begun(user: HubUser) -> None:
    """A pull that is left when more than half of the tensors are made."""
    client = Client(user.env)
    running_pull = pull_model(plan_pull(pull_target(parse_reference(f"{REPO}:4bit", user.env), user.env), client, user.env), client,
                              user.env)
    for item in running_pull:
        if isinstance(item, Progress) and item.phase == "quantizing" and item.done > item.total // 2:
            break
    running_pull.close()


@pytest.mark.parametrize("gone", ("the repository", "a shard"))
def test_what_the_cache_has_lost_in_between_is_loaded(hub: Hub, user: HubUser, from_folder: bytes, gone: str) -> None:
    """What lay in the shared cache was linked. It is gone, and nothing may be put there in its name."""
    assert user.run("pull", REPO).code == 0
    begun(user)
    shard = user.snapshot(REPO, hub.repos[REPO].commit) / "model-00003-of-00003.safetensors"
    if gone == "a shard":
        shard.resolve().unlink()
    else:
        assert user.run("rm", REPO, "-y").code == 0
    left = set(user.blobs(REPO))
    hub.forget()
    ran = user.run("pull", REPO, "--bits", "4")
    assert ran.code == 0, ran.err
    assert (kept(user, hub) / "model.safetensors").read_bytes() == from_folder and set(user.blobs(REPO)) == left
    assert 0 < weights_served(hub) <= weights(hub)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        PartialFile(tmp_path / "data", tmp_path / "journal", 100, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


@pytest.mark.parametrize("what", ("pull", "rm"))
def test_what_a_kill_leaves_beside_a_whole_model_goes(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Killed between the model's last step and the removal of what it was made of."""
    with monkeypatch.context() as patch:
        patch.setattr(streaming_quantize.shutil, "rmtree", lambda *_, **__: None)
        assert user.run("pull", REPO, "--bits", "4").code == 0
    folder = kept(user, hub)
    source = folder.with_name(".4bit.source")
    assert (source / "tokenizer.json").is_file() and (folder / "effllm.json").is_file()
    if what == "rm":
        assert user.run("rm", f"{REPO}:4bit", "-y").code == 0 and not folder.parent.exists()
        return
    with lock_path(folder).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert user.run("pull", REPO, "--bits", "4").code == 0 and source.exists(), "another process has it"
    ran = user.run("pull", REPO, "--bits", "4")
    assert "everything is downloaded already" in ran.err and not source.exists()
    assert sorted(path.name for path in folder.parent.iterdir()) == [".4bit.lock", "4bit"]


def test_a_shard_with_wrong_bytes_is_never_quantized(hub: Hub, user: HubUser) -> None:
    name = "model-00002-of-00003.safetensors"
    good = hub.repos[REPO].files[name]
    hub.swap[name] = good[:-2] + bytes([good[-2] ^ 1, good[-1]])
    assert "wrong checksum" in user.run("pull", REPO, "--bits", "4").refused(6)
    assert not kept(user, hub).exists()
    hub.swap.clear()
    assert user.run("pull", REPO, "--bits", "4").code == 0
    check_whole(kept(user, hub), FABLE)


def test_a_head_that_was_damaged_on_the_way_is_not_kept(hub: Hub, user: HubUser) -> None:
    """Nothing is known of it but that it makes no sense: the same command goes on once the way is clean."""
    name = "model-00002-of-00003.safetensors"
    hub.swap[name] = bytes(len(hub.repos[REPO].files[name]))
    said = user.run("pull", REPO, "--bits", "4").refused(6)
    assert f"{name} has a damaged header" in said and "twice" in said and "another network" in said and str(user.home) not in said
    hub.swap.clear()
    assert user.run("pull", REPO, "--bits", "4").code == 0
    check_whole(kept(user, hub), FABLE)


def test_a_head_that_was_damaged_once_comes_again_in_the_same_pull(hub: Hub, user: HubUser) -> None:
    name = "model-00002-of-00003.safetensors"
    part = hub.repos[REPO].files[name][: 64 << 10]
    headers = {"Content-Range": f"bytes 0-{len(part) - 1}/{len(hub.repos[REPO].files[name])}"}
    hub.disturb = always(206, headers, bytes(8) + part[8:], f"{name}?signed", times=1)
    assert user.run("pull", REPO, "--bits", "4").code == 0
    check_whole(kept(user, hub), FABLE)


def test_a_single_file_of_weights(hub: Hub, user: HubUser, from_folder: bytes) -> None:
    hub.add("org/one", FABLE)
    assert user.run("pull", "org/one:4bit").code == 0
    (folder,) = (user.home / "data" / "effllm" / "models" / "org--one").glob("*/4bit")
    assert (folder / "model.safetensors").read_bytes() == from_folder
    assert json.loads((folder / "effllm.json").read_text())["spec"] == "4bit"


def test_the_plan_predicts_from_what_is_known_and_measures_nothing(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    from effllm.offload.predict import CACHED_ERROR, ERROR, KindRate
    from effllm.runtime.planning import roofs

    asked = []
    monkeypatch.setattr(roofs, "known", lambda wanted: asked.append(wanted) or roofs.Roofs(None, None))
    plan = user.run("pull", REPO, "--bits", "4", "--dry-run", "--json").json
    assert plan["tokens_per_s_estimate"] is None and "doctor was not run" in plan["speed_unknown"]
    assert "doctor was not run" in user.run("pull", REPO, "--dry-run").err
    kinds = {kind: KindRate(10e9, 10e9) for kind in ("bf16", "codebook4:16", "symmetric6:32")}
    machine = roofs.MachineRoofs("A CPU", 2, "2026-01-01 12:00", 20e9, 20e9, 1e-4, 1e-5, kinds, {"16bit": KindRate(10e9, 10e9)})
    monkeypatch.setattr(roofs, "known", lambda wanted: roofs.Roofs(machine, None))
    plan = user.run("pull", REPO, "--dry-run", "--json").json
    assert plan["tokens_per_s_estimate"] == pytest.approx(1 / (11_540_992 / 10e9 + 1e-4 + 6e-5))
    assert plan["tokens_per_s_error"] == pytest.approx(ERROR + CACHED_ERROR)  # 11 MB of weights stay in the processor's caches
    assert plan["speed_unknown"] is None and f"tokens/s (± {ERROR + CACHED_ERROR:.0%})" in user.run("pull", REPO, "--dry-run").err
    assert asked[0].kinds == ("symmetric6:32", "codebook4:16") and asked[0].file.is_dir()
