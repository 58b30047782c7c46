"""Whole runs of a bundled model larger than its budget, in processes of their own: memory within bounds, the same answers, correct
plans."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from streamed_models import larger_than_memory
from test_forecast import KNOWN
from test_streamed_runs import MIB, answer, finish, peak, start

from effllm.cli.plan_report import lines, report
from effllm.offload.size import format_size
from effllm.runtime.conversion.bundle_ffn import bundle
from effllm.runtime.planning.forecast import forecast, suggest
from effllm.runtime.prepare import EngineOptions, prepare

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A ReLU model as published, and bundled."""
    base = tmp_path_factory.mktemp("models")
    larger_than_memory(base / "plain", hidden_act="relu")
    assert list(bundle(base / "plain", base / "bundled"))
    return base / "plain", base / "bundled"


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> dict:
    """The answer of whole matrices in memory."""
    return json.loads(finish(start(*answer(models[0])))[0])


def test_bundles_in_memory_answer_as_whole_matrices(models: tuple[Path, Path], expected: dict) -> None:
    found = json.loads(finish(start(*answer(models[1])))[0])
    assert found["token_ids"] == expected["token_ids"] and found["io"]["disk_wait_s"] == 0.0


@pytest.fixture(scope="module")
def least(models: tuple[Path, Path]) -> int:
    """MiB of the smallest budget, as the refusal of a smaller one names it."""
    _, err = finish(start(*answer(models[1], "--ram", "100M")), 4)
    assert "even with weights read from the disk" in err
    return int(re.search(r"it takes --ram (\d+)Mi", err).group(1))


@pytest.mark.parametrize("more", (1, 60, 120))
def test_a_window_keeps_to_the_budget_and_the_answer(more: int, least: int, models: tuple[Path, Path], expected: dict) -> None:
    ram = least + more
    out, err = finish(start(*answer(models[1], "--ram", f"{ram}Mi")))
    found = json.loads(out)
    assert found["token_ids"] == expected["token_ids"]
    assert peak(err) <= ram * MIB
    assert "neurons are on the disk" in err
    assert found["io"]["disk_bytes_read"] > found["memory"]["weights_bytes"] / 4


def test_the_plan_says_where_neurons_are_and_whether_that_pays(models: tuple[Path, Path], least: int) -> None:
    arguments = ("plan", models[1], "--ram", f"{least + 60}Mi", "-c", 512, "--no-probe")
    said, _ = finish(start(*arguments))
    assert "neurons" in said and "calibrate-sparsity" in said
    told = json.loads(finish(start(*arguments, "--json"))[0])
    assert told["tiers"]["disk"]["neuron_bytes"] == 8 * 4096 * 4096
    assert told["per_token"]["disk_bytes"] > 0


def test_the_plan_counts_neurons_in_what_a_token_reads_and_in_the_memory_that_would_hold_all(models: tuple[Path, Path]) -> None:
    asked = EngineOptions(device="cpu", ctx=512, threads=2)
    whole = prepare(models[1], asked).placement.total_bytes
    tight = prepare(models[1], replace(asked, ram=str(whole - (60 << 20))))
    assert tight.placement.slots and not tight.placement.streamed_bytes
    found = forecast(tight, KNOWN)
    told = report("a model", tight, KNOWN, found, None)["per_token"]["disk_bytes"]
    assert told == round(found.work.missed_bytes) > 0
    assert f"{format_size(told)} of them from the disk" in dict(lines("a model", tight, KNOWN, found, None))["per token"]
    advised = suggest(tight, KNOWN)
    assert advised.flag.startswith("--ram ") and advised.gain > 1.2, advised
    assert prepare(models[1], replace(asked, ram=advised.flag[6:])).streaming is None
