"""The multi-token prediction layer under calibrated quantization: no calibration text goes through it."""

from pathlib import Path

import pytest
from conversions import options, run
from mtp_models import source

from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.stores.container import read_container

TEXT = "Once upon a time a fox met a king at the river, and they talked about the weather and the price of bread. " * 60


@pytest.mark.parametrize("more", ({"target": 5.5}, {"method": "gptq"}), ids=("target", "gptq"))
@pytest.mark.parametrize("name", (pytest.param("qwen3_5_text", marks=pytest.mark.slow), "qwen3_5_moe_text"))
def test_it_is_rounded_as_by_bits(tmp_path: Path, name: str, more: dict[str, object]) -> None:
    run(source(name, tmp_path / "source"), tmp_path / "out", options("4bit", calibration_text=TEXT, calibration_tokens=512, **more))
    stored = {each: own.spec for each, own in read_container(tmp_path / "out").tensors.items()}
    assert {str(spec) for each, spec in stored.items() if each.startswith("mtp.") and not spec.is_raw} == {"codebook4:16"}
    assert ("target" in more) == any(spec.bits > 6 and not spec.is_raw for each, spec in stored.items() if ".layers." in each)
    made = prepare(tmp_path / "out", EngineOptions(device="cpu", ctx=128, spec="mtp"))
    made.store.close()
    assert made.speculation.mtp
