"""Downloads of other tools' quantized models: parts of a weight in two shards, and the plan for such a repository."""

import json
from pathlib import Path

import pytest
from hub_server import Hub
from hub_user import HubUser, sharded
from test_imported import written
from test_pull_bits import REPO, allocated, kept, weights, weights_served

from effllm.runtime.convert import ConvertOptions, convert, recipe_of
from effllm.runtime.events import Progress
from effllm.runtime.library.model_name import parse_reference
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.pull.client import Client
from effllm.runtime.pull.plan import plan_pull, pull_target
from effllm.runtime.pull.pull import pull_model
from effllm.runtime.pull.shard_disk_peak import peak_held_nbytes


@pytest.fixture
def user(tmp_path: Path, hub: Hub) -> HubUser:
    return HubUser(tmp_path / "home", hub.endpoint)


@pytest.mark.parametrize("name", ["awq", "gptq 4, act order", "nvfp4", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("int4, zero points", "fp8 blocks", "nf4", "bytes by row"))])
def test_a_weight_waits_for_the_shards_of_all_its_parts(hub: Hub, user: HubUser, tmp_path: Path, name: str) -> None:
    """Codes and scales lie in different shards here; what is made has the bytes that `quantize` makes of the folder."""
    written(tmp_path / "m", name)
    hub.add(REPO, files=sharded(tmp_path / "m"))
    assert user.run("quantize", tmp_path / "m", "-o", tmp_path / "out", "--bits", "4").code == 0
    ran = user.run("pull", REPO, "--bits", "4")
    assert ran.code == 0, ran.err
    assert (kept(user, hub) / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert weights_served(hub) == weights(hub) and not user.blobs(REPO)


def test_stopped_while_parts_wait_it_continues(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    written(tmp_path / "m", "awq")
    hub.add(REPO, files=sharded(tmp_path / "m", 4))
    assert user.run("quantize", tmp_path / "m", "-o", tmp_path / "out", "--bits", "4").code == 0
    client = Client(user.env)
    plan = plan_pull(pull_target(parse_reference(f"{REPO}:4bit", user.env), user.env), client, user.env)
    running_pull, peak = pull_model(plan, client, user.env), 0
    for item in running_pull:
        peak = max(peak, allocated(user.home))
        if isinstance(item, Progress) and item.phase == "quantizing" and item.done > item.total // 2:
            break
    running_pull.close()
    for _item in pull_model(plan, client, user.env):
        peak = max(peak, allocated(user.home))
    assert weights_served(hub) == weights(hub) and peak <= 1.02 * plan.disk_bytes
    assert (kept(user, hub) / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_shards_that_lie_on_the_disk_together() -> None:
    sizes = {"a": 5, "b": 7, "c": 1, "d": 4}
    apart = {"l.0.q.qweight": "a", "l.0.q.scales": "a", "l.1.q.qweight": "b", "l.2.q.qweight": "c", "l.3.q.qweight": "d"}
    assert peak_held_nbytes(sizes, apart) == 7
    assert peak_held_nbytes(sizes, apart | {"l.1.q.scales": "c"}) == 8  # b stays until c is here
    assert peak_held_nbytes(sizes, apart | {"l.0.q.scales": "d"}) == 5 + 7 and peak_held_nbytes({}, apart) == 0
    experts = {"l.0.experts.gate_up_proj_blocks": "a", "l.0.experts.gate_up_proj_scales": "b", "l.0.experts.down_proj_blocks": "c"}
    assert peak_held_nbytes(sizes, experts) == 12
    assert peak_held_nbytes(sizes, {name: "a" for name in experts}) == 7


def test_an_index_that_makes_no_sense_is_no_reason_to_fail_early(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    written(tmp_path / "m", "awq")
    files = sharded(tmp_path / "m", 2)
    for text in (b"[]", b'{"weight_map": 3}', b"{"):
        hub.add(REPO, files=files | {"model.safetensors.index.json": text})
        plan = user.run("pull", REPO, "--bits", "4", "--dry-run", "--json").json
        assert plan["disk_needed_bytes"] > weights(hub)
        assert plan["bits"] == "4bit"


def test_published_codes_of_experts_come_along_from_two_shards(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    from test_mxfp4 import packed_model

    packed_model(tmp_path / "m")
    usual = {b"model-0.": b"model-00001-of-00002.", b"model-1.": b"model-00002-of-00002."}
    for path in list((tmp_path / "m").iterdir()):
        for ours, theirs in usual.items():
            if path.suffix == ".json":
                path.write_bytes(path.read_bytes().replace(ours, theirs))
            elif path.name.startswith(ours.decode()):
                path.rename(path.with_name(theirs.decode() + "safetensors"))
    hub.add(REPO, tmp_path / "m")
    *_, made = convert(tmp_path / "m", tmp_path / "out", ConvertOptions(recipe_of("4bit", (), "rtn"), "4bit", threads=1))
    ran = user.run("pull", REPO, "--bits", "4", "-y")
    assert ran.code == 0 and "stay in mxfp4:32" in ran.err, ran.err
    assert (kept(user, hub) / "model.safetensors").read_bytes() == (made.folder / "model.safetensors").read_bytes()
    assert not user.blobs(REPO), "the published weights were kept, and nobody had asked for that"


@pytest.mark.parametrize("name", ["gptq 4, act order", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "gptq 4", "gptq 3", "awq", "int4", "int8, a scale per row", "fp8 blocks", "nvfp4", "nf4", "bytes by row"))])
def test_the_memory_is_that_of_the_run_that_follows(hub: Hub, user: HubUser, tmp_path: Path, name: str) -> None:
    """Codes that kernels multiply count as they are, what is widened with 16 bits, before a byte of them is here."""
    written(tmp_path / "m", name)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    section = raw["quantization_config"]
    if name.startswith("int"):  # as such configs are written; the test of the format needs less of them
        group = {"group_size": None, "strategy": "channel"} if "row" in name else {"group_size": 64, "strategy": "group"}
        section["config_groups"]["group_0"]["weights"] |= group
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float32", "quantization_config": section}))
    hub.add(REPO, tmp_path / "m")
    plan = user.run("pull", REPO, "--dry-run", "--json").json["memory"]
    assert not weights_served(hub)
    prepared = prepare(tmp_path / "m", EngineOptions())
    assert plan["weights_bytes"] == pytest.approx(prepared.placement.weights_bytes, rel=0.01)
    assert plan["total_bytes"] == pytest.approx(prepared.placement.total_bytes, rel=0.1)
    prepared.store.close()
