"""When a model's own multi-token prediction layer is planned, and what is reported where it is not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from family_models import CASES, Case
from hybrid_models import CTX, IDS, opened
from mtp_models import save_mtp_model
from safetensors.numpy import load_file, save_file
from speculative_runs import answer
from test_mtp import FEW, FIRST, MIXTURES, Made, drafting, folder, made, small

from effllm import UsageError
from effllm.offload.notes import Fallback
from effllm.runtime import prepare
from effllm.runtime.planning import process_memory
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.speculation.speculation_plan import NO_MTP_MEMORY, NO_MTP_ON_GPU, decide
from effllm.runtime.stores.container import read_container

__all__ = ["folder", "made", "small"]  # fixtures


def planned(folder: Path, **asked: object) -> prepare.Prepared:
    made = prepare.prepare(folder, EngineOptions(device="cpu", **{"ctx": CTX, "chunk": 128, "threads": 2, **asked}))
    made.store.close()
    return made


def test_when_it_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "baseline", lambda kinds: 200 << 20)  # what else a process of tests holds comes and goes
    for spec, wanted in (("auto", True), ("mtp", True), ("off", False), ("lookup", False)):
        found = planned(folder, spec=spec)
        assert found.speculation.mtp is wanted and found.speculation.lookup is (spec != "off")
        assert not any(isinstance(each, Fallback) and "layer" in each for each in found.notices)
    whole = planned(folder, spec="mtp")
    tight = f"{whole.placement.total_bytes - (whole.speculation.mtp_nbytes // 2)}"
    short = planned(folder, spec="mtp", ram=tight)
    assert not short.speculation.mtp and short.speculation.lookup and NO_MTP_MEMORY in short.notices
    assert not planned(folder, ram=tight).speculation.mtp
    with pytest.raises(UsageError, match="too little memory"):
        planned(folder, spec="mtp", ram=tight, strict=True)
    config = whole.config
    beside = replace(whole.placement, budget=replace(whole.placement.budget, vram=1))
    assert decide(EngineOptions(spec="mtp"), config, beside, None)[1] == (NO_MTP_ON_GPU,)


def test_models_without_are_reported(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "without"
    shutil.copytree(folder, path)
    tensors = load_file(path / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if name != "mtp.fc.weight"}, path / "model.safetensors")
    with pytest.raises(UsageError, match="was left out of these weights"):
        planned(path, spec="mtp")
    assert not planned(path).speculation.mtp
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "mtp_num_hidden_layers": 0}))
    with pytest.raises(UsageError, match=r"this model \(qwen3_5_text\) has none"):
        planned(path, spec="mtp")
    left = planned(path, spec="mtp", from_settings=frozenset({"spec"}))
    assert not left.speculation.mtp and any("ignored, since it is a setting for all models" in each for each in left.notices)
    with pytest.raises(UsageError, match="--spec mtp a layer of this one"):
        EngineOptions(draft="other", spec="mtp")


def test_a_mixture_drafts_by_it_where_it_is_asked(made: Made) -> None:
    for name in MIXTURES:
        assert planned(made[name][0], spec="mtp").speculation.mtp and not planned(made[name][0]).speculation.mtp


def test_quantized_folders_keep_it(small: dict[str, Path]) -> None:
    container = read_container(small[FIRST])
    own = {name: stored for name, stored in container.tensors.items() if name.startswith("mtp.")}
    assert len(own) == 15
    assert {name for name, stored in own.items() if stored.spec.is_raw} == {
        name for name in own if name.endswith("norm.weight") or "pre_fc_norm" in name}
    assert planned(small[FIRST]).speculation.mtp and planned(small["glm4_moe_lite"], spec="mtp").speculation.mtp


def test_a_model_that_streams_anyway_drafts_by_it(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "baseline", lambda kinds: 200 << 20)
    whole = planned(large, spec="off").placement.total_bytes
    tight = planned(large, ram=f"{whole - (24 << 20)}", spec="mtp")
    assert tight.placement.streamed_bytes and tight.speculation.mtp and tight.speculation.waits
    without = planned(large, ram=f"{whole - (24 << 20)}", spec="lookup")
    assert 0 < prepare.MTP_READ_FACTOR * without.placement.streamed_bytes < tight.placement.streamed_bytes
    asks_nothing = planned(large, ram=f"{whole - (24 << 20)}")
    assert asks_nothing.placement == without.placement and not asks_nothing.speculation.mtp, "for its room a token would read far more"
    monkeypatch.setattr(prepare, "MTP_READ_FACTOR", 2.0)
    assert planned(large, ram=f"{whole - (24 << 20)}").placement == tight.placement
    engine, resident = opened(large, ram=f"{whole - (24 << 20)}"), opened(large, spec="off")
    assert engine.placement.streamed_bytes
    engine.speculation = drafting(engine)
    assert answer(engine, IDS[:50], 40) == answer(resident, IDS[:50], 40) and engine.speculation.counts.drafted
    for each in (engine, resident):
        each.close()
    barely = planned(large, ram=f"{whole + (1 << 20)}")
    assert not barely.placement.streamed_bytes and not barely.speculation.mtp, "it would push others out"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices that are worth streaming."""
    path = tmp_path_factory.mktemp("large") / "model"
    save_mtp_model(Case("qwen3_5_text", {**CASES["qwen3_5_text"].changes, **FEW, "hidden_size": 512, "intermediate_size": 4096,
                                         "attention_bias": False}), path)
    return path
