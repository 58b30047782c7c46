"""GGUF files of Granite Swash: keys with another meaning, settings they cannot express, and contradictory metadata.

That a file means what its folder does, and what llama.cpp makes of it, is in `test_gguf_export_families.py`.
"""

from dataclasses import replace

import numpy as np
import pytest
from export_models import exported, model

from effllm import EffllmError
from effllm.offload.gguf_header import GgufHeader
from effllm.runtime.config import ModelConfig, read_config
from effllm.runtime.gguf.config import model_config
from effllm.runtime.gguf.config_export import export_architecture
from effllm.runtime.gguf.store import read_header

DENSE, MIXED = "granite_swa", "granitemoe_swa, a shared expert"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelConfig, GgufHeader]]:
    """The config of a folder, and the header of the file made of it."""
    made = {}
    for name in (DENSE, MIXED):
        place = tmp_path_factory.mktemp("swash")
        source = model(name, place / "source")
        made[name] = read_config(source), read_header(exported(source, place / "m.gguf"))
    return made


def changed(header: GgufHeader, key: str = "", value: object = None) -> ModelConfig:
    """What a file says with another value below its architecture's name; None takes the key away."""
    metadata = {own: each for own, each in header.metadata.items() if own != f"granite_swa.{key}"}
    if value is not None:
        metadata[f"granite_swa.{key}"] = np.array(value, np.int32) if isinstance(value, list) else value
    return model_config(replace(header, metadata=metadata), {}, strict=True)


@pytest.mark.parametrize("name", [DENSE, MIXED])
def test_a_file_says_what_the_config_of_its_folder_does(files: dict[str, tuple[ModelConfig, GgufHeader]], name: str) -> None:
    folder, header = files[name]
    file = changed(header)
    for field in ("family", "windows", "ropes", "intermediate_size", "hidden_act", "qkv_bias", "tie_word_embeddings"):
        assert getattr(file, field) == getattr(folder, field), field
    assert not file.warnings and (file.moe is None) == (name == DENSE)
    assert name == DENSE or file.moe.shared_expert_dim == folder.moe.shared_expert_dim == 64


def test_what_a_file_leaves_out(files: dict[str, tuple[ModelConfig, GgufHeader]]) -> None:
    header = files[DENSE][1]
    assert None not in changed(header, "attention.rope_pattern").ropes, "all layers turn"
    assert changed(header, "attention.rope_pattern", [0] * 4).ropes == (None,) * 4
    assert changed(header, "attention.sliding_window_pattern", [0] * 4).windows == (None,) * 4
    assert changed(header, "attention.sliding_window_pattern", [1, 1, 0, 1]).windows == (24, 24, None, 24)
    silent = replace(header, metadata={key: value for key, value in header.metadata.items() if not key.endswith("rope.freq_base")})
    assert changed(silent).rope.theta == 10_000.0


@pytest.mark.parametrize(("name", "key", "value", "said"), [
    (DENSE, "attention.rope_pattern", [1, 0], "a boolean for each of 4 layers"),
    (DENSE, "attention.rope_pattern", [1, 0, 2, 1], "a boolean"),
    (DENSE, "attention.rope_pattern", 1, "a boolean"), (DENSE, "attention.scale", None, "lacks key granite_swa.attention.scale"),
    (DENSE, "logit_scale", None, "lacks key granite_swa.logit_scale"), (DENSE, "attention.sliding_window", 0, "is unknown"),
    (DENSE, "attention.sliding_window", None, "is unknown"), (DENSE, "attention.sliding_window_pattern", [1, 0], "a boolean for each"),
    (MIXED, "expert_used_count", 6, "expert_used_count"), (MIXED, "expert_used_count", None, "expert_used_count")])
def test_lies(files: dict[str, tuple[ModelConfig, GgufHeader]], name: str, key: str, value: object, said: str) -> None:
    with pytest.raises(EffllmError) as caught:
        changed(files[name][1], key, value)
    assert said in caught.value.message and caught.value.hint and "\n" not in caught.value.message


def test_what_files_cannot_say(files: dict[str, tuple[ModelConfig, GgufHeader]]) -> None:
    folder = files[DENSE][0]
    for ropes, said in (((*folder.ropes[:3], replace(folder.ropes[3], theta=5e5)), "several bases"),
                        ((None,) * 4, "has no rotary positions")):
        with pytest.raises(EffllmError, match=said):
            export_architecture(replace(folder, ropes=ropes))
