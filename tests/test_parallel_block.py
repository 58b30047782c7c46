"""Blocks with attention and MLP in parallel (Cohere, GPT-NeoX, Phi): streamed weights are read in the order of use."""

from pathlib import Path

import numpy as np
import pytest
from family_models import CASES
from saved_models import saved
from streamed_models import streaming

from effllm.offload.read_ahead import ReadAhead
from effllm.runtime import families
from effllm.runtime.config import read_config
from effllm.runtime.engine import EngineOptions, open_engine
from effllm.runtime.weights import stream_layout

IDS = np.random.default_rng(0).integers(0, 300, 30).tolist()


@pytest.mark.parametrize("name", ["cohere", "gpt_neox", "phi", "stablelm, side by side"])
def test_weights_that_stream_come_once_a_token_and_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 8 << 10)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 512)
    saved(CASES[name], tmp_path)
    *_, resident = open_engine(tmp_path, EngineOptions(device="cpu", ctx=128))
    engine = streaming(tmp_path, ctx=128)
    try:
        used, enter, join = [], ReadAhead.enter, ReadAhead.join

        def joined(self: ReadAhead, place: int) -> bool:
            if found := join(self, place):
                used.append(place)
            return found

        monkeypatch.setattr(ReadAhead, "enter", lambda self, place: used.append(place) or enter(self, place))
        monkeypatch.setattr(ReadAhead, "join", joined)
        for given in (IDS, [3], [5]):
            used.clear()
            assert np.array_equal(engine.forward_logits(given), resident.forward_logits(given))
            assert used == sorted(set(used)) and len(used) > 20
    finally:
        engine.close()
        resident.close()


def test_other_layers_have_o_before_the_mlp(tmp_path: Path) -> None:
    for name in ("cohere2", "gpt_neox", "phi", "llama, tied, one KV head", "olmo2", "opt", "gemma2"):
        saved(CASES[name], tmp_path / name)
        config = read_config(tmp_path / name)
        stages = stream_layout.stages_of(families.get(config.family).layer_tensors(config, 0))
        assert sorted(stages) == sorted(stream_layout.STAGES)
        assert (stages.index(("o",)) > stages.index(("down",))) == (config.family in ("cohere2", "gpt_neox", "phi"))
