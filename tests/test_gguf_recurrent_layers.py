"""GGUF files of models with recurrent layers: other forms of their metadata, and contradictory values.

That a file means what its folder does, and what llama.cpp makes of it, is in `test_gguf_export_families.py`.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_models import exported, model

from effllm import EffllmError
from effllm.offload.gguf_header import GgufHeader
from effllm.runtime.config import ModelConfig, read_config
from effllm.runtime.gguf.config import model_config
from effllm.runtime.gguf.file_architecture import file_architecture
from effllm.runtime.gguf.store import read_header

CONV, MOE, MAMBA, MIXED = "lfm2", "lfm2_moe", "granitemoehybrid, state spaces", "granitemoehybrid, experts"
JAMBA, ALONE, NORMED = "jamba", "mamba", "falcon_mamba"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelConfig, GgufHeader]]:
    """The config of a folder, and the header of the file made of it."""
    made = {}
    for name in (CONV, MOE, MAMBA, MIXED, JAMBA, ALONE, NORMED):
        place = tmp_path_factory.mktemp("stateful")
        source = model(name, place / "source")
        made[name] = read_config(source), read_header(exported(source, place / "m.gguf"))
    return made


def changed(files: dict[str, tuple[ModelConfig, GgufHeader]], name: str, key: str = "", value: object = None) -> ModelConfig:
    """What a file says with another value below its architecture's name; None takes the key away."""
    config, header = files[name]
    metadata = {own: each for own, each in header.metadata.items() if own != f"{file_architecture(config)}.{key}"}
    if value is not None:
        metadata[f"{file_architecture(config)}.{key}"] = np.array(value, np.int32) if isinstance(value, list) else value
    return model_config(replace(header, metadata=metadata), {}, strict=True)


@pytest.mark.parametrize("name", [CONV, MOE, MAMBA, MIXED, JAMBA, ALONE, NORMED])
def test_a_file_says_what_the_config_of_its_folder_does(files: dict[str, tuple[ModelConfig, GgufHeader]], name: str) -> None:
    folder, file = files[name][0], changed(files, name)
    if folder.moe is not None:  # factors are of 32 bits there
        assert file.moe.routed_scale == pytest.approx(folder.moe.routed_scale)
        file = replace(file, moe=replace(file.moe, routed_scale=folder.moe.routed_scale))
    for field in ("family", "recurrent", "recurrent_layers", "moe", "intermediate_size", "ropes", "qk_norm", "norm_eps", "attn_scale",
                  "residual_multiplier", "embedding_multiplier", "logits_scaling", "num_key_value_heads", "tie_word_embeddings"):
        assert getattr(file, field) == pytest.approx(getattr(folder, field)) if isinstance(getattr(folder, field), float) \
            else getattr(file, field) == getattr(folder, field), field
    assert not file.warnings


def test_what_a_file_may_leave_out(files: dict[str, tuple[ModelConfig, GgufHeader]]) -> None:
    """As llama.cpp takes it then."""
    assert changed(files, MAMBA, "rope.scaling.finetuned").rope is not None
    assert changed(files, MIXED, "rope.scaling.finetuned").rope is not None and files[MIXED][0].rope is None
    assert changed(files, MOE, "expert_gating_func").moe.sigmoid
    assert changed(files, CONV, "attention.head_count_kv", [2, 2, 0]).recurrent_layers == (2,)
    assert changed(files, JAMBA, "attention.head_count_kv", [2, 0, 0, 0]).attention_layers == (0,)


@pytest.mark.parametrize("name, key, value, said", [
    (CONV, "attention.head_count_kv", [0, 0, 0], "a number of heads for each layer"),
    (CONV, "attention.head_count_kv", [0, 2], "a number of heads for each layer"),
    (CONV, "attention.head_count_kv", [0, 2, 4], "another lfm2.attention.head_count_kv"),
    (CONV, "attention.head_count_kv", [0, -2, 0], "a number of heads for each layer"),
    (CONV, "attention.head_count_kv", None, "lacks key lfm2.attention.head_count_kv"),
    (CONV, "shortconv.l_cache", None, "lacks key lfm2.shortconv.l_cache"), (CONV, "shortconv.l_cache", 0, "lfm2.shortconv.l_cache"),
    (CONV, "shortconv.l_cache", 1 << 20, "lfm2.shortconv.l_cache"), (CONV, "attention.sliding_window", 32, "sliding_window"),
    (MOE, "expert_gating_func", 1, "expert_gating_func is not 2"), (MOE, "expert_used_count", 7, "expert_used_count 7"),
    (MAMBA, "ssm.inner_size", 127, "ssm.inner_size 127 for 4 heads"), (MAMBA, "ssm.inner_size", 0, "ssm.inner_size 0"),
    (MAMBA, "ssm.inner_size", None, "lacks key granitehybrid.ssm.inner_size"), (MAMBA, "ssm.group_count", 3, "ssm.group_count 3"),
    (MAMBA, "ssm.time_step_rank", 0, "ssm.time_step_rank"), (MAMBA, "ssm.conv_kernel", 1 << 20, "ssm.conv_kernel"),
    (MAMBA, "attention.scale", None, "lacks key granitehybrid.attention.scale"),
    (MAMBA, "rope.scaling.finetuned", 1, "expected true or false"), (MIXED, "expert_used_count", 7, "expert_used_count 7"),
    (JAMBA, "ssm.inner_size", 127, "inner_size 127 for a width of 64"), (JAMBA, "ssm.inner_size", 0, "inner_size 0 for a width"),
    (JAMBA, "ssm.inner_size", None, "lacks key jamba.ssm.inner_size"), (JAMBA, "ssm.time_step_rank", 0, "ssm.time_step_rank"),
    (JAMBA, "attention.head_count_kv", [2, 2, 0, 2], "attention in layers [0, 1, 3] of 4"),
    (JAMBA, "attention.head_count_kv", None, "lacks key jamba.attention.head_count_kv"), (JAMBA, "block_count", 5.0, "head_count_kv"),
    (JAMBA, "expert_used_count", 7, "expert_used_count 7"), (JAMBA, "attention.sliding_window", 32, "sliding_window"),
    (ALONE, "ssm.inner_size", 0, "inner_size 0, expected a width"), (ALONE, "ssm.inner_size", None, "lacks key mamba.ssm.inner_size"),
    (ALONE, "ssm.dt_b_c_rms", 1, "expected true or false"), (ALONE, "ssm.time_step_rank", 0, "time_step_rank"),
    (ALONE, "attention.sliding_window", 32, "sliding_window"), (NORMED, "ssm.state_size", -1, "state_size")])
def test_lies(files: dict[str, tuple[ModelConfig, GgufHeader]], name: str, key: str, value: object, said: str) -> None:
    with pytest.raises(EffllmError) as caught:
        changed(files, name, key, value)
    assert said in caught.value.message and caught.value.hint and "\n" not in caught.value.message


@pytest.mark.parametrize("layers", [5.0, 0.0, float("nan"), np.array([5.0, 5.0], np.float32)], ids=repr)
def test_layers_that_are_counted_with_a_window_are_a_whole_number(tmp_path: Path, layers: object) -> None:
    header = read_header(exported(model("exaone_moe", tmp_path / "source"), tmp_path / "m.gguf"))
    lying = replace(header, metadata={**header.metadata, "exaone-moe.block_count": layers})
    with pytest.raises(EffllmError, match="exaone-moe.block_count"):
        model_config(lying, {}, strict=True)


def test_lists_of_windows_may_continue_for_layers_that_guess_ahead(tmp_path: Path) -> None:
    """As files of K-EXAONE have them, which count one such layer among their blocks."""
    header = read_header(exported(model("exaone_moe", tmp_path / "source"), tmp_path / "m.gguf"))
    plain = model_config(header, {}, strict=True)
    listed = np.array([window is not None for window in plain.windows])
    key = "exaone-moe.attention.sliding_window_pattern"
    longer = {"exaone-moe.block_count": 6, "exaone-moe.nextn_predict_layers": 1}
    for stated in ([*listed, False], listed):
        own = replace(header, metadata={**header.metadata, **longer, key: np.array(stated)})
        assert replace(model_config(own, {}, strict=True), mtp_layers=0) == plain
    with pytest.raises(EffllmError, match="sliding_window_pattern"):
        model_config(replace(header, metadata={**header.metadata, **longer, key: np.array([*listed, False, False])}), {})
