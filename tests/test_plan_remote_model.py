"""`effllm plan` for a model not downloaded: the report that a run would confirm, from the hub's metadata."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_samples import fable_gguf
from hub_server import Hub, running
from hub_user import FABLE, MINUTE, HubUser, sharded

from effllm.runtime.library.model_name import parse_reference

REPO = "org/name"
SAME = ("ctx", "kv", "devices", "kv_bytes", "workspace_bytes", "layers", "per_token", "speculation", "experts")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        hub.add(REPO, files=sharded(FABLE))
        yield hub


def planned(user: HubUser, *words: str) -> dict:
    """In a process of its own, because what that has in memory is a part of its plan."""
    out, err = (process := user.start("plan", *words, "--no-probe", "--device", "cpu", "--json")).communicate(timeout=MINUTE)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.parametrize("flags", [("-c", "700", "--kv", "4bit"), *(pytest.param(flags, marks=pytest.mark.slow)
                                                                  for flags in (("--bits", "4"), ("--ram", "2G")))])
def test_the_plan_before_a_pull_is_the_one_after_it(hub: Hub, user: HubUser, flags: tuple[str, ...]) -> None:
    before = planned(user, REPO, *flags)
    assert not hub.requests_for("model-0") and not hub.requests_for("tokenizer.json"), "weights or tokenizer were loaded to plan"
    assert sum(hub.served.values()) < 100_000 and not user.blobs(REPO)
    repo = hub.repos[REPO]
    assert before["pull"]["bytes_to_load"] == sum(map(len, repo.files.values())) and before["pull"]["licence"] == "apache-2.0"
    assert user.run("pull", REPO).code == 0
    after = planned(user, REPO, *flags)
    assert after["pull"] is None and {key: before[key] for key in SAME} == {key: after[key] for key in SAME}
    assert abs(before["weights_bytes"] - after["weights_bytes"]) < 0.01 * after["weights_bytes"]
    assert abs(before["total_bytes"] - after["total_bytes"]) < 0.1 * after["total_bytes"]
    for side in ("memory", "disk"):
        assert abs(before["tiers"][side]["weights_bytes"] - after["tiers"][side]["weights_bytes"]) < 0.02 * after["weights_bytes"]


def test_a_user_reads_that_it_is_not_here_and_what_a_pull_would_load(hub: Hub, user: HubUser) -> None:
    hub.add("Qwen/Qwen3-0.6B", FABLE)
    ran = user.run("plan", "qwen3-0.6b:4bit", "--no-probe")
    assert ran.code == 0, ran.err
    rows = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    assert "effllm pull qwen3-0.6b:4bit downloads 11.27 MiB, keeps 3." in rows["not here"], rows["not here"]
    assert "licence Apache-2.0" in rows["not here"] and {"context", "layers", "memory", "per token", "speed"} <= set(rows)
    here = user.run("plan", "fable", "--no-probe").out
    assert "not here" not in here
    assert "disagree" in user.run("plan", "qwen3-0.6b:4bit", "--bits", "3").refused(2)


def test_without_a_network_it_is_the_error_that_it_was(hub: Hub, user: HubUser) -> None:
    for away in (user.run("plan", REPO, HF_HUB_OFFLINE="1"), HubUser(user.home, "http://127.0.0.1:9").run("plan", REPO)):
        assert f"effllm pull {REPO}" in away.refused(3)
    assert not hub.requests


def test_what_cannot_be_planned_is_reported_with_the_next_step(hub: Hub, user: HubUser) -> None:
    hub.add("org/gated", FABLE, gate="good")
    assert "gated" in user.run("plan", "org/gated", "--no-probe").refused(3)
    assert "no repository" in user.run("plan", "org/nothing", "--no-probe").refused(3)
    said = user.run("plan", REPO, "--ram", "60M", "--no-probe").refused(4)
    assert "hint: " in said and "--ram" in said
    assert user.run("plan", REPO, "-c", "999999999", "--no-probe").code == 2
    assert parse_reference(REPO, user.env).name == REPO and not user.blobs(REPO)


def test_a_draft_is_left_out_of_it_in_words(hub: Hub, user: HubUser) -> None:
    ran = user.run("plan", REPO, "--draft", "fable", "--no-probe", "--device", "cpu")
    assert ran.code == 0 and "this plan leaves out drafts and predictors" in ran.err
    assert "not on this machine" in user.run("plan", "fable", "--draft", REPO, "--no-probe").refused(3)


def test_a_gguf_file_that_is_not_here_is_planned_by_its_tag(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    fable_gguf(tmp_path / "fable-Q8_0.gguf", "Q8_0")
    files = {"sub/fable-Q8_0.gguf": (tmp_path / "fable-Q8_0.gguf").read_bytes(), "other-Q4_0.gguf": b"no model" * 10}
    hub.add("org/files", files=files)
    before = planned(user, "org/files:q8_0")
    assert before["pull"]["files"] == ["sub/fable-Q8_0.gguf"] and not user.blobs("org/files")
    assert user.run("pull", "org/files:Q8_0").code == 0
    after = planned(user, "org/files:Q8_0")
    assert before["ctx"] == after["ctx"] and abs(before["total_bytes"] - after["total_bytes"]) < 0.1 * after["total_bytes"]
    said = user.run("plan", "org/files:other-Q4_0.gguf", "--no-probe").refused(3)
    assert "cannot be predicted" in said and "effllm pull org/files:other-Q4_0.gguf" in said
