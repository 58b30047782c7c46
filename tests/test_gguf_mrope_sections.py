"""GGUF files of vision-language models: the text model answers as its folder does, and as llama.cpp's own graph does."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from export_models import model, scores
from gguf_samples import write_model

from effllm import EffllmError
from effllm.offload.gguf_header import GgufHeader
from effllm.offload.safetensors_header import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.families.hunyuan_v1_dense import STRETCH
from effllm.runtime.gguf.family_context import FamilyContext
from effllm.runtime.gguf.family_keys import COMPLETE_BY_FAMILY
from effllm.runtime.gguf.transformer_names import COMPLETE_CONFIG

IDS = list(range(5, 90))
# Architecture -> the model that its text model is, and its sections, as converters write them: 8 or 16 pairs of channels.
FILES = {"qwen2vl": ("qwen2", {}, [2, 3, 3, 0]), "qwen3vl": ("qwen3", {}, [6, 5, 5, 0]), "qwen3vlmoe": ("qwen3_moe", {}, [6, 5, 5, 0]),
         "paddleocr": ("llama", {"head_dim": 16}, [2, 3, 3, 0]), "hunyuan_vl": ("hunyuan_v1_dense", {"head_dim": 32}, [4, 4, 4, 4]),
         "glm4moe": ("glm4_moe", {"num_nextn_predict_layers": 0}, [2, 3, 3, 0])}


def stating(arch: str, sections: object) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        if isinstance(sections, list):
            writer.add_array(f"{arch}.rope.dimension_sections", sections)
        elif sections is not None:
            writer.add_uint32(f"{arch}.rope.dimension_sections", sections)
        if arch == "hunyuan_vl":  # as stretched as the model is
            writer.add_float32("hunyuan_vl.rope.scaling.alpha", 9.0)
        if arch.startswith("qwen3vl"):
            writer.add_uint32(f"{arch}.n_deepstack_layers", 3)
        if arch == "qwen3vlmoe":
            writer.add_expert_count(6)
            writer.add_expert_used_count(2)
            writer.add_expert_feed_forward_length(32)
        if arch == "glm4moe":
            writer.add_rope_dimension_count(16)
            writer.add_expert_count(12)
            writer.add_expert_used_count(3)
            writer.add_expert_shared_count(2)
            writer.add_expert_feed_forward_length(32)
            writer.add_leading_dense_block_count(1)
            writer.add_expert_weights_scale(1.75)
            writer.add_expert_weights_norm(True)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    return change


@pytest.mark.parametrize("arch", FILES)
def test_text_turns_as_if_there_were_no_sections(tmp_path: Path, arch: str) -> None:
    name, changes, sections = FILES[arch]
    source = model(name, tmp_path / "source", **changes)
    write_model(source, tmp_path / "m.gguf", "F32", arch, change=stating(arch, sections))
    config = read_config(tmp_path / "m.gguf", strict=True)
    assert config.family == name and config.warnings == ()
    expected = scores(source, IDS)
    assert np.abs(scores(tmp_path / "m.gguf", IDS) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("arch", "family"), [("glm4", "glm4"), ("exaone4", "exaone4, windows")])
def test_the_layer_that_guesses_ahead_is_left_out(tmp_path: Path, arch: str, family: str) -> None:
    """Files of GLM-OCR and of EXAONE 4.5 count it among their blocks, and list it where they list layers with a window."""
    source = model(family, tmp_path / "source")
    config = read_config(source)

    def behind(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(config.num_hidden_layers + 1)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.ones((64, 128), np.float32))
        writer.add_tensor(f"blk.{config.num_hidden_layers}.post_attention_norm.weight", np.ones(64, np.float32))
        if arch == "exaone4":
            writer.add_sliding_window(next(filter(None, config.windows)))
            writer.add_sliding_window_pattern([*(each is not None for each in config.windows), False])
        else:
            writer.add_rope_dimension_count(16)

    write_model(source, tmp_path / "m.gguf", "F32", arch, change=behind)
    read = read_config(tmp_path / "m.gguf", strict=True)
    assert (read.num_hidden_layers, read.windows, read.mtp_layers) == (config.num_hidden_layers, config.windows, 1)
    expected = scores(source, IDS)
    assert np.abs(scores(tmp_path / "m.gguf", IDS) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("arch", "sections", "said"), [
    ("qwen2vl", [2, 2, 2, 2], r"sections \[2, 2, 2, 2\] for 8 pairs of channels"), ("qwen2vl", [0, 0, 0, 0], "for 8 pairs"),
    ("qwen3vl", [16, 0, 0, 0], "for 16 pairs"), ("qwen3vl", [6, 5], "three or four whole numbers"), ("qwen2vl", 8, "three or four whole"),
    ("glm4moe", [2, 3, 2, 1], "for 8 pairs")])
def test_pairs_that_would_not_turn_are_refused(tmp_path: Path, arch: str, sections: object, said: str) -> None:
    name, changes, _ = FILES[arch]
    write_model(model(name, tmp_path / "source", **changes), tmp_path / "m.gguf", "F32", arch, change=stating(arch, sections))
    with pytest.raises(EffllmError, match=said) as caught:
        read_config(tmp_path / "m.gguf")
    assert caught.value.hint


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen2vl", "qwen3vl", "qwen3vlmoe"])
def test_llamacpp_means_the_same(tmp_path: Path, arch: str) -> None:
    peer = pytest.importorskip("llama_cpp")
    name, changes, sections = FILES[arch]

    def named(writer: gguf.GGUFWriter) -> None:
        stating(arch, sections)(writer)
        writer.add_string("tokenizer.ggml.model", "no_vocab")
        writer.add_uint32(f"{arch}.vocab_size", 4096)

    write_model(model(name, tmp_path / "source", initializer_range=0.1, **changes), tmp_path / "m.gguf", "F16", arch, change=named)
    theirs = peer.Llama(str(tmp_path / "m.gguf"), n_ctx=128, n_threads=1, verbose=False, type_k=0, type_v=0, logits_all=True)
    try:
        theirs.eval(IDS)
        expected = theirs.scores[: len(IDS)].copy()
    finally:
        theirs.close()
    worst = np.abs(scores(tmp_path / "m.gguf", IDS) - expected).max(axis=1) / np.abs(expected).max()
    assert np.median(worst) < 5e-3 and (worst < 2e-2).mean() > 0.8, worst  # a router may choose another expert by 16 bits


@pytest.mark.parametrize("stated", [1e300, -2.0, float("nan"), 0.0, "nine", [9.0]])
def test_a_stretch_that_is_none_is_refused(tmp_path: Path, stated: object) -> None:
    given = FamilyContext(GgufHeader(tmp_path, {"general.architecture": "hunyuan_vl"}, {}), None, None)
    with pytest.raises(CheckpointError, match="rope.scaling.alpha .*expected a number above 0"):
        COMPLETE_BY_FAMILY["hunyuan_v1_dense"](given, {STRETCH: stated, "num_attention_heads": 4, "hidden_size": 128})


def test_heads_whose_width_no_key_states_are_stretched_too(tmp_path: Path) -> None:
    given = FamilyContext(GgufHeader(tmp_path, {"general.architecture": "hunyuan_vl"}, {}), None, None)
    raws = [{STRETCH: 1000.0, "num_attention_heads": 4, "hidden_size": 128, **width} for width in ({}, {"head_dim": 32})]
    for raw in raws:
        COMPLETE_BY_FAMILY["hunyuan_v1_dense"](given, raw)
    assert raws[0]["rope_theta"] == raws[1]["rope_theta"] == pytest.approx(10_000 * 1000 ** (32 / 30))


@pytest.mark.parametrize("stated", ["x", True, ["x"], np.array([[1.0]]), np.array([True])])
def test_numbers_that_are_none_are_damage(tmp_path: Path, stated: object) -> None:
    header = GgufHeader(tmp_path, {"general.architecture": "mpt", "mpt.attention.max_alibi_bias": stated}, {})
    with pytest.raises(CheckpointError, match="max_alibi_bias .*expected numbers"):
        COMPLETE_CONFIG["mpt"](FamilyContext(header, None, None), {})
