"""RoPE scaling in GGUF files, above all YaRN: the effect of its parameters here, in the checkpoint and in llama.cpp."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_samples import FABLE, add_fable_tokenizer, write_model

from effllm import EffllmError
from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.prepare import EngineOptions

FACTOR, TRAINED = 4.0, 128
USUAL = 0.1 * math.log(FACTOR) + 1
YARN = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": TRAINED}
IDS = [2, *range(40, 130, 3)]
Change = Callable[[gguf.GGUFWriter], None]


def checkpoint(folder: Path, **more: object) -> Path:
    """fable with its positions stretched."""
    folder.mkdir()
    for path in FABLE.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    raw = json.loads((FABLE / "config.json").read_text())
    raw.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(raw | {"rope_scaling": {**YARN, **more}}))
    return folder


def stating(numbers: Mapping[str, object]) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        add_fable_tokenizer(writer)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(FACTOR)
        writer.add_rope_scaling_orig_ctx_len(TRAINED)
        for key, value in numbers.items():
            (writer.add_string if isinstance(value, str) else writer.add_float32)(f"llama.rope.scaling.{key}", value)
    return change


def file_of(place: Path, numbers: Mapping[str, object]) -> Path:
    write_model(FABLE, place / "m.gguf", "F32", change=stating(numbers))
    return place / "m.gguf"


def logits(path: Path) -> np.ndarray:
    *_, engine = open_engine(path, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=True))
    assert isinstance(engine, Engine)
    try:
        return engine.forward_logits(IDS)[-1].copy()
    finally:
        engine.close()


@pytest.mark.parametrize(("numbers", "theirs", "said"), [
    ({}, {}, None),
    ({"yarn_attn_factor": 0.8}, {"attention_factor": 0.8}, "yarn_attn_factor 0.8: positions are scaled by it, as in the checkpoint; "
                                                           "llama.cpp ignores it and scales them by 1.139"),
    ({"yarn_attn_factor": USUAL}, {}, None),
    ({"yarn_attn_factor": 1.0}, {}, "yarn_attn_factor 1, which is read as none: positions are scaled by 1.139"),
    ({"attn_factor": 0.9}, {"attention_factor": 0.9 * USUAL}, None),
    ({"attn_factor": 1.0, "yarn_attn_factor": 0.8}, {"attention_factor": 0.8}, "yarn_attn_factor 0.8"),
    ({"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "yarn_ext_factor": 1.0}, {"beta_fast": 16.0, "beta_slow": 2.0}, None),
    ({"yarn_ext_factor": -1.0}, {}, None)], ids=str)
def test_numbers_of_yarn_are_those_of_the_checkpoint(tmp_path: Path, numbers: dict[str, float], theirs: dict[str, float],
                                                     said: str | None) -> None:
    path, source = file_of(tmp_path, numbers), checkpoint(tmp_path / "source", **theirs)
    config = read_config(path)
    assert [said in text for text in config.warnings] == ([True] if said else []), config.warnings
    wanted = logits(source)
    assert np.abs(logits(path) - wanted).max() < 1e-5 * np.abs(wanted).max()
    if theirs:
        usual = logits(checkpoint(tmp_path / "usual"))
        assert np.abs(wanted - usual).max() > 1e-3 * np.abs(usual).max(), "such a number is told from none"


@pytest.mark.parametrize(("numbers", "said"), [
    ({"yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor 0.5, which is not supported"),
    ({"yarn_ext_factor": 0.0}, "llama.rope.scaling.yarn_ext_factor 0, which is not supported"),
    ({"yarn_log_multiplier": 0.7}, "llama.rope.scaling.yarn_log_multiplier 0.7"),
    ({"attn_factor": 0.9, "yarn_attn_factor": 0.8}, "both llama.rope.scaling.attn_factor 0.9 and llama.rope.scaling.yarn_attn_factor 0.8"),
    ({"yarn_attn_factor": "much"}, "llama.rope.scaling.yarn_attn_factor"), ({"yarn_attn_factor": math.nan}, "expected a number"),
    ({"yarn_attn_factor": -1.5}, "attention_factor"), ({"attn_factor": "x"}, "llama.rope.scaling.attn_factor")], ids=str)
def test_numbers_that_would_mean_other_positions_are_refused_by_name(tmp_path: Path, numbers: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        read_config(file_of(tmp_path, numbers))
    assert said in refused.value.message and refused.value.hint


@pytest.mark.parametrize("own", [{}, {"attention_factor": 0.8}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"beta_fast": 16.0}], ids=str)
def test_a_stretched_model_travels_there_and_back(tmp_path: Path, own: dict[str, float]) -> None:
    source = checkpoint(tmp_path / "source", **own)
    list(export_gguf(source, tmp_path / "out.gguf", "F16", "a name"))
    wanted = logits(source)
    assert np.abs(logits(tmp_path / "out.gguf") - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize(("own", "said"), [({}, False), ({"beta_fast": 16.0}, True), ({"beta_slow": 2.0}, True)], ids=str)
def test_channels_that_llama_cpp_stretches_otherwise_are_reported(tmp_path: Path, own: dict[str, float], said: bool) -> None:
    told = [item.text for item in export_gguf(checkpoint(tmp_path / "source", **own), tmp_path / "m.gguf", "F16", "x")
            if isinstance(item, Notice)]
    assert [each for each in told if "beta_fast 32 and beta_slow 1, whatever a file says" in each] == told and bool(told) == said


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_stretches_the_same_channels_whatever_a_file_says(tmp_path: Path) -> None:
    """What the notice says."""
    peer = pytest.importorskip("llama_cpp")

    def theirs(own: dict[str, float]) -> np.ndarray:
        source, path = checkpoint(tmp_path / f"source{len(own)}", **own), tmp_path / f"m{len(own)}.gguf"
        list(export_gguf(source, path, "F16", "x"))
        model = peer.Llama(str(path), n_ctx=64, n_threads=1, verbose=False, logits_all=True, yarn_beta_fast=-1.0, yarn_beta_slow=-1.0)
        try:
            model.eval(IDS)
            return np.array(model.scores[: len(IDS)])
        finally:
            model.close()

    np.testing.assert_array_equal(theirs({"beta_slow": 2.0}), theirs({}))


def test_what_a_file_cannot_state_of_yarn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EffllmError, match="cannot state"):
        list(export_gguf(checkpoint(tmp_path / "source", truncate=False), tmp_path / "out.gguf", "F16", "a name"))


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_scales_positions_by_one_of_the_numbers_and_passes_over_the_other(tmp_path: Path) -> None:
    """What the notice about the other one says."""
    peer = pytest.importorskip("llama_cpp")

    def theirs(numbers: Mapping[str, float]) -> np.ndarray:
        model = peer.Llama(str(file_of(tmp_path, numbers)), n_ctx=64, n_threads=1, verbose=False, logits_all=True, type_k=0, type_v=0)
        try:
            model.eval(IDS)
            return np.array(model.scores[: len(IDS)])
        finally:
            model.close()

    usual = theirs({})
    ours = logits(checkpoint(tmp_path / "usual"))
    assert np.abs(usual[-1] - ours).max() < 0.02 * np.abs(ours).max()
    np.testing.assert_array_equal(theirs({"yarn_attn_factor": 0.8}), usual)
    scaled, own = theirs({"attn_factor": 0.8 / USUAL}), logits(checkpoint(tmp_path / "own", attention_factor=0.8))
    assert np.abs(scaled[-1] - own).max() < 0.02 * np.abs(own).max() < np.abs(usual[-1] - own).max()


@pytest.mark.parametrize(("keys", "factor"), [
    ({"scaling.factor": 4.0}, 4.0), ({"scale_linear": 2.0}, 2.0), ({"scaling.type": "linear", "scale_linear": 2.0}, 2.0),
    ({"scaling.type": "linear", "scaling.factor": 4.0, "scale_linear": 2.0}, 4.0), ({"scaling.type": "linear"}, None),
    ({"scaling.type": "linear", "scaling.factor": 0.0}, None), ({"scaling.type": "none", "scale_linear": 2.0}, None)])
def test_a_factor_is_linear_where_no_type_says_otherwise(tmp_path: Path, keys: dict[str, object], factor: float | None) -> None:
    """As llama.cpp reads it: 0 is 1, and the older key stands in for the newer."""
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            (writer.add_string if isinstance(value, str) else writer.add_float32)(f"llama.rope.{key}", value)

    write_model(FABLE, tmp_path / "m.gguf", "F32", change=change)
    assert read_config(tmp_path / "m.gguf").rope.params.get("factor") == factor
