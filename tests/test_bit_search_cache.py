"""An interrupted search for formats resumes where it stopped, and one for another size starts from its result."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from effllm.kernels.compile import cache_root
from effllm.quant.recipe import Recipe
from effllm.quant.spec import QuantSpec
from effllm.runtime.conversion import bit_search, bit_search_cache
from effllm.runtime.conversion.bit_search import BitAllocation
from effllm.runtime.conversion.convert_plan import ConversionPlan, plan_conversion
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice, Progress
from effllm.runtime.prepare import EngineOptions

FABLE = Path(__file__).parents[1] / "models" / "fable"
OWN = Recipe(QuantSpec.parse("4bit"))
IDS = np.random.default_rng(4).integers(5, 4000, 48).tolist()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", kv="32bit", ctx=512)))[-1]
    yield engine
    engine.close()


@pytest.fixture
def plan() -> Iterator[ConversionPlan]:
    plan = plan_conversion(FABLE, OWN)
    with plan.store:
        yield plan


def searched(plan: ConversionPlan, engine: Engine, target: float, ids: list[int] = IDS) -> tuple[BitAllocation, int, list[str]]:
    """What was found, after how many runs, and what was said."""
    *said, found = bit_search.search(plan, engine, ids, target, OWN)
    runs = max((item.total for item in said if isinstance(item, Progress)), default=0)
    return found, runs, [item.text for item in said if isinstance(item, Notice)]


def lines() -> list[Path]:
    return list(bit_search_cache.folder().glob("*.jsonl"))


def test_a_search_that_was_stopped_continues(plan: ConversionPlan, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole, runs, _ = searched(plan, engine, 4.25)
    assert runs == 43
    monkeypatch.setattr(bit_search_cache, "folder", lambda: tmp_path)
    stopped = bit_search.search(plan, engine, IDS, 4.25, OWN)
    for item in stopped:
        if isinstance(item, Progress) and item.done == 5:
            break
    stopped.close()
    found, runs, said = searched(plan, engine, 4.25)
    assert found == whole and runs == 43 - 5
    assert "tensor sensitivity was measured before, 5 of 43 runs" in said and any("38 runs of" in text for text in said)


@pytest.mark.slow
def test_another_size_needs_no_run(plan: ConversionPlan, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, _ = searched(plan, engine, 4.25)
    monkeypatch.setattr(bit_search, "_log_probabilities", None)
    again, runs, said = searched(plan, engine, 4.25)
    assert again == first and runs == 0 and said == ["tensor sensitivity was measured before, 43 of 43 runs"]
    assert searched(plan, engine, 3.2)[0].bits_per_weight < 3.2


@pytest.mark.parametrize("damage", (
    pytest.param(lambda text: text[: len(text) // 2], id="torn"),
    pytest.param(lambda text: text.replace("e", "\x00"), id="spoilt", marks=pytest.mark.slow),
    pytest.param(lambda text: "[]\n" * 9, id="other", marks=pytest.mark.slow),
    pytest.param(lambda text: text.replace('"damage": ', '"damage": NaN, "was": '), id="no number"),
    pytest.param(lambda text: text.replace('"2bit": ', '"2bit": -'), id="less than nothing", marks=pytest.mark.slow),
    pytest.param(lambda text: "[" * 100_000, id="deep", marks=pytest.mark.slow)))
def test_what_is_damaged_is_measured_again(plan: ConversionPlan, engine: Engine, damage) -> None:
    whole, _, _ = searched(plan, engine, 4.25)
    (path,) = lines()
    path.write_text(damage(path.read_text()))
    found, runs, _ = searched(plan, engine, 4.25)
    assert found == whole and 20 <= runs <= 43
    assert searched(plan, engine, 4.25)[1] == 0, "what was added is sound, whatever lies before it"


@pytest.mark.slow
def test_other_weights_and_other_texts_are_measured(engine: Engine, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(FABLE, copy)
    for ids, touched, runs in ((IDS, False, 43), (IDS, False, 0), (IDS[:40], False, 43), (IDS, True, 43)):
        if touched:
            os.utime(copy / "model.safetensors", ns=(0, 0))
        plan = plan_conversion(copy, OWN)
        with plan.store:
            assert searched(plan, engine, 4.25, ids)[1] == runs


def test_notes_are_bounded_and_need_no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bit_search_cache, "folder", lambda: tmp_path / "notes")
    errors = {"w": {"2bit": 0.5, "3bit": 0.1}}
    for i in range(bit_search_cache.MOST_FILES + 3):
        bit_search_cache.save_measurement(f"model{i}", 0.25, errors)
        os.utime(tmp_path / "notes" / f"model{i}.jsonl", (i, i))
    assert len(list((tmp_path / "notes").iterdir())) == bit_search_cache.MOST_FILES
    newest = f"model{bit_search_cache.MOST_FILES + 2}"
    assert bit_search_cache.load_measurements(newest, ["2bit", "3bit"]) == {("w",): (0.25, errors)}
    assert bit_search_cache.load_measurements("model0", ["2bit"]) == {}
    (tmp_path / "file").touch()
    monkeypatch.setattr(bit_search_cache, "folder", lambda: tmp_path / "file")
    bit_search_cache.save_measurement("model", 0.25, errors)
    assert bit_search_cache.load_measurements("model", ["2bit"]) == {}


@pytest.mark.slow
def test_a_killed_search_ends_with_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "effllm", "quantize", "fable", "--target", "4bpw", "--calib-tokens", "1024", "--json", "-o"]

    def environment(name: str) -> dict[str, str]:
        own = tmp_path / name / "effllm"
        own.mkdir(parents=True)
        (own / "kernels").symlink_to(cache_root() / "kernels")
        return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / name)}

    subprocess.run([*command, str(tmp_path / "whole")], env=environment("fresh"), check=True, capture_output=True)
    env = environment("killed")
    child = subprocess.Popen([*command, str(tmp_path / "out")], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    notes = tmp_path / "killed" / "effllm" / "damage"
    while sum(path.read_bytes().count(b"\n{") for path in notes.glob("*.jsonl")) < 3:
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    done = subprocess.run([*command, str(tmp_path / "out")], env=env, check=True, capture_output=True, text=True)
    assert "was measured before" in done.stderr and json.loads(done.stdout)["bits_per_weight"] <= 4
    for name in ("model.safetensors", "effllm.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
