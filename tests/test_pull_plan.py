"""What a pull reports before it downloads: what fits where, alternatives, and the run that is to follow."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from hub_server import Hub
from hub_user import FABLE, HubUser, measure_nothing, on_disk, sharded, tiny

from effllm.offload.predict import KindRate
from effllm.runtime.events import Progress
from effllm.runtime.planning import roofs
from effllm.runtime.pull import run_estimate

REPO = "org/name"
LACKING = run_estimate.missing_measurement
CATALOGUED = "Qwen/Qwen3-0.6B"


@pytest.fixture
def user(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> HubUser:
    measure_nothing(monkeypatch)
    return HubUser(tmp_path, hub.endpoint)


def kept(user: HubUser, repo: str, spec: str = "4bit") -> Path:
    (found,) = (user.home / "data" / "effllm" / "models" / repo.replace("/", "--")).glob(f"*/{spec}")
    return found


def test_what_fits_where_is_drawn(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, FABLE)
    said = user.run("pull", REPO, "--dry-run").err
    for line in ("context   2048 of 2048 tokens", "layers    0-5 in memory", "memory    █", "█ weights 11.01 MiB  ▓ cache"):
        assert line in said, said
    memory = user.run("pull", REPO, "--dry-run", "--json").json["memory"]
    assert memory["layers"] == ["memory"] * 6 and memory["streamed_bytes"] == 0
    assert memory["weights_bytes"] == 11_540_992 and memory["total_bytes"] > memory["weights_bytes"] + memory["kv_bytes"]


def test_what_is_read_from_the_disk_is_drawn(hub: Hub, user: HubUser) -> None:
    wide = json.loads(tiny()["config.json"]) | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "vocab_size": 4096,
                                                "num_attention_heads": 16}
    hub.add(REPO, files=tiny() | {"config.json": json.dumps(wide).encode()})
    room = psutil.Process().memory_info().rss + 700_000_000  # what this process takes counts: 1.6 GB of weights do not fit, a layer does
    ran = user.run("run", REPO, "Once", "--ram", f"{room // 1_000_000}M", "-c", "256", answers="n\n")
    said = " ".join(ran.err.split())
    assert ran.code == 3 and "of weights, read for every token through" in said and "from the disk" in said, ran.err


def test_the_offer_is_of_the_run_that_was_asked_for(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, FABLE)
    words = ("run", REPO, "Once", "--raw", "-n", "2")
    usual = user.run(*words, answers="n\n").err
    assert "2048 of 2048 tokens, cache at 16bit" in usual
    assert "64 of 2048 tokens, cache at 4bit" in user.run(*words, "-c", "64", "--kv", "4bit", answers="n\n").err
    assert "does not fit now" in user.run(*words, "--ram", "60M", answers="n\n").err
    assert "more than the 2048 positions" in user.run(*words, "-c", "4096", "-y").refused(2)
    assert "64 of 2048" in user.run("chat", REPO, "-c", "64", answers="n\n").err
    assert not hub.requests_for("model.safetensors")


def test_a_repository_without_a_tokenizer_is_reported_before_it_is_loaded(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, FABLE)
    assert "tokenizer" not in user.run("pull", REPO, "--dry-run").err
    hub.add("org/bare", FABLE)
    del hub.repos["org/bare"].files["tokenizer.json"]
    said = user.run("pull", "org/bare", "--dry-run").err
    assert "tokenizer none: there is no tokenizer.json, so it will not run until one is put beside the weights" in " ".join(said.split())
    hub.repos["org/bare"].files["tekken.json"] = hub.repos[REPO].files["tekken.json"] = b"{}" + b" " * 1000
    assert "tokenizer" not in user.run("pull", "org/bare", "--dry-run").err
    listed = [json.loads(user.run("pull", name, "--dry-run", "--json").out)["files"] for name in ("org/bare", REPO)]
    assert ["tekken.json" in names for names in listed] == [True, False]  # another form of what is there is not loaded


def test_yes_to_a_run_does_not_load_what_could_not_run(hub: Hub, user: HubUser) -> None:
    """The hint is a command that does."""
    hub.add(REPO, FABLE)
    said = user.run("run", REPO, "Once", "--ram", "60M", "-y").refused(4)
    assert f"effllm pull {REPO} -y downloads it anyway" in said and not hub.requests_for("model.safetensors")
    said = user.run("run", REPO, "Once", "--ram", "60M", "--bits", "4", "-y").refused(4)
    assert f"hint: effllm pull {REPO} --bits 4 -y downloads it anyway" in said
    assert user.run("pull", REPO, "--bits", "4", "-y").code == 0


def test_fewer_bits_and_what_has_no_gate_are_named(hub: Hub, user: HubUser) -> None:
    hub.add(CATALOGUED, FABLE)
    said = user.run("pull", "qwen3-0.6b", "--dry-run").err
    plan = user.run("pull", "qwen3-0.6b", "--dry-run", "--json").json
    assert "smaller   --bits 8 keeps " in said and plan["smaller"]["bits"] == 8
    assert user.run("pull", "qwen3-0.6b", "--bits", "8").code == 0
    size = sum(path.stat().st_size for path in kept(user, CATALOGUED, "8bit").iterdir())
    assert plan["smaller"]["bytes_kept"] == pytest.approx(size, rel=0.03)
    assert "smaller" not in user.run("pull", "qwen3-0.6b", "--bits", "8", "--dry-run").err
    hub.add("google/gemma-3-1b-it", files=tiny(), gate="good")
    said = user.run("pull", "gemma3-1b", "--dry-run", HF_TOKEN="good").err
    assert "gated: your token must have access; about the same size without a gate: olmo2-1b" in said


def test_offline_only_what_was_asked_for_is_here(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, FABLE)
    assert user.run("pull", REPO, "--bits", "4").code == 0
    assert "downloads are off" in user.run("pull", REPO, "--offline").refused(6)  # only its weights of 4 bits are here
    assert "downloads are off" in user.run("pull", REPO, "--bits", "4", "--keep", "--offline").refused(6)
    assert "everything is downloaded already" in user.run("pull", REPO, "--bits", "4", "--offline").err
    assert user.run("pull", REPO).code == 0
    assert "everything is downloaded already" in user.run("pull", REPO, "--bits", "4", "--keep", "--offline").err
    hub.forget()
    made = user.run("pull", REPO, "--bits", "3", "--offline", "--json").json  # of the cache
    assert Path(made["folder"]) == kept(user, REPO, "3bit") and not hub.requests
    assert user.run("show", f"{REPO}:3bit", "--json").json["quantized"]["source"]["revision"] == repo.commit


def test_a_lone_file_may_have_any_name(hub: Hub, user: HubUser) -> None:
    files = on_disk(FABLE)
    files["fable-fp16.safetensors"] = files.pop("model.safetensors")
    hub.add(REPO, files=files)
    assert user.run("pull", REPO, "--bits", "4").code == 0
    hub.add("org/usual", FABLE)
    assert user.run("pull", "org/usual", "--bits", "4").code == 0
    one, other = (kept(user, repo) / "model.safetensors" for repo in (REPO, "org/usual"))
    assert one.read_bytes() == other.read_bytes()


def test_keep_after_a_pull_without_it_fetches_the_published_weights(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=sharded(FABLE))
    assert user.run("pull", REPO, "--bits", "4").code == 0
    before = (kept(user, REPO) / "effllm.json").stat()
    assert user.run("pull", REPO, "--bits", "4", "--keep").code == 0
    assert on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    assert (kept(user, REPO) / "effllm.json").stat() == before, "the same folder was made again"
    hub.forget()
    assert "everything is downloaded already" in user.run("pull", REPO, "--bits", "4", "--keep").err
    assert not hub.requests_for("model-0")


def test_a_branch_that_stands_for_a_commit_that_is_here_is_noted(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, FABLE, branches=("main", "v1.0"))
    assert user.run("pull", f"{REPO}@{repo.commit}", "--bits", "4").code == 0
    assert user.run("show", f"{REPO}@v1.0:4bit").code == 3
    assert "everything is downloaded already" in user.run("pull", f"{REPO}@v1.0", "--bits", "4").err
    assert user.run("show", f"{REPO}@v1.0:4bit").code == 0


def test_two_names_of_one_content_among_files_of_the_same_length(hub: Hub, user: HubUser) -> None:
    text = {"LICENSE": b"one licence", "NOTICE": b"same length", "LICENSE.md": b"same length", "USE_POLICY.md": b"one licence"}
    assert len(set(map(len, text.values()))) == 1
    hub.add(REPO, files=on_disk(FABLE) | text)
    assert user.run("pull", REPO, "--bits", "4").code == 0
    assert {name: (kept(user, REPO) / name).read_bytes() for name in text} == text


def test_a_machine_that_nobody_measured_is_measured_for_the_question(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal, announced, and for what the speed follows from alone; not for a script, --json, or where kernels are cold."""
    monkeypatch.setattr(run_estimate, "missing_measurement", LACKING)
    hub.add(REPO, FABLE)
    asked = []
    kinds = {"bf16": KindRate(10e9, 10e9)}
    machine = roofs.MachineRoofs("A CPU", 2, "2026-01-01 12:00", 20e9, 20e9, 1e-4, 1e-5, kinds, {})

    def probe(lacking: roofs.RoofsWanted, known: roofs.Roofs) -> Iterator[Progress | roofs.Roofs]:
        asked.append(lacking)
        yield Progress("measuring this machine", 0, 1, "figures")
        yield roofs.Roofs(machine, None)

    monkeypatch.setattr(roofs, "known", lambda wanted: roofs.Roofs(None, None))
    monkeypatch.setattr(roofs, "probe", probe)
    monkeypatch.setattr(roofs, "is_cold", lambda lacking: False)
    said = user.run("run", REPO, "Once", answers="n\n").err
    assert "measuring this machine once" in said and "speed     about " in said and "not known" not in said
    assert [(each.kinds, each.kv, each.file) for each in asked] == [(("bf16",), (), None)]
    for words, answers in ((("pull", REPO, "--dry-run"), "y\n"), (("pull", REPO, "--json"), "y\n"), (("pull", REPO), None)):
        assert "measuring" not in user.run(*words, answers=answers).err
    monkeypatch.setattr(roofs, "is_cold", lambda lacking: True)
    for words in (("pull", REPO, "--dry-run"), ("pull", REPO)):
        said = " ".join(user.run(*words, answers="y\n").err.split())
        assert "doctor was not run: effllm doctor measures this machine" in said and "measuring" not in said
        speed = re.search(r"speed about ([\d.e+]+) tokens/s \(± (\d+)%\) from memory bandwidth alone: ", said)
        weights = user.run("pull", REPO, "--dry-run", "--json").json["memory"]["weights_bytes"]
        assert speed and 0.5e9 < float(speed[1]) * weights < 1e12 and int(speed[2]) >= 45, said
    assert len(asked) == 1 and user.run("pull", REPO, "--dry-run").err.count("speed     not known: doctor was not run") == 1
    monkeypatch.setattr(roofs, "known", lambda wanted: roofs.Roofs(machine, None))  # what is known is not measured again
    monkeypatch.setattr(roofs, "is_cold", lambda lacking: False)
    assert "speed     about " in user.run("pull", REPO, answers="y\n").err and len(asked) == 1


@pytest.mark.parametrize(("parameters", "other"), [(8_000_000_000, "gemma4-e4b"), (1_400_000_000, "ouro-1.4b"), (900_000_000_000, None)])
def test_a_gated_repository_without_an_alias_is_reported_with_an_open_model_of_its_size(
        hub: Hub, user: HubUser, parameters: int, other: str | None) -> None:
    hub.add(REPO, files=tiny() | {"m-Q4_K_M.gguf": b"GGUF" + bytes(100)}, gate="good")
    with urlopen(f"{hub.endpoint}/api/models/{REPO}/revision/main") as answer:
        info = json.dumps(json.load(answer) | {"safetensors": {"total": parameters}}).encode()
    hub.disturb = lambda request: (200, {}, info) if "/api/models/" in request.path else None
    offered = f"without a gate: effllm pull {other}" if other else "then hf auth login"
    for name in (REPO, f"{REPO}:Q4_K_M"):
        said = user.run("pull", name).refused(3)
        assert "is gated" in said and said.endswith(offered), said
    opened = user.run("pull", REPO, "--dry-run", "--json", HF_TOKEN="good").json
    assert (opened["gated"], opened["alternative"]) == (True, other)
    assert (f"without a gate: {other}" in user.run("pull", REPO, "--dry-run", HF_TOKEN="good").err) == (other is not None)


@pytest.mark.parametrize(("typed", "meant"), [("Qwen/Qwen3-0.6", "Qwen/Qwen3-0.6B"), ("TinyLama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama/"),
                                              ("org/nothing-like-it", None)])
def test_a_repository_that_the_hub_does_not_show_may_have_been_misspelt(hub: Hub, user: HubUser, typed: str, meant: str | None) -> None:
    said = user.run("pull", typed).refused(3)
    assert "it does not exist, or it is private" in said and "check the spelling" in said
    assert f"did you mean {meant}" in said if meant else "did you mean" not in said
