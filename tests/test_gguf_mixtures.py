"""Mixtures of experts, and models split into several files, as GGUF: the answers of a folder with the same weights, against transformers
too."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from family_models import ERNIE_EXPERTS, FEW_EXPERTS, GLM_EXPERTS, GRANITE, Case, oracle, text, written
from gguf_samples import FABLE, add_expert_keys, fable_gguf, write_model
from safetensors.numpy import load_file, save_file
from saved_models import saved

from effllm import EffllmError, ModelNotFound
from effllm.offload.safetensors_header import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.gguf.file_names import part_names
from effllm.runtime.gguf.store import open_gguf_store
from effllm.runtime.prepare import EngineOptions, prepare

QUICK = {"device": "cpu", "kv": "32bit", "ctx": 256, "threads": 1}
SIZES = {"intermediate_size": 96, "hidden_size": 64}  # multiples of a block
MIXTURES = {
    "mixtral": ("llama", Case("mixtral", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "rope_theta": 10000.0})),
    "qwen3_moe": ("qwen3moe", Case("qwen3_moe", {**SIZES, **FEW_EXPERTS, "moe_intermediate_size": 32, "head_dim": 32,
                                                 "norm_topk_prob": True})),
    "qwen2_moe": ("qwen2moe", Case("qwen2_moe", {**SIZES, **FEW_EXPERTS, "moe_intermediate_size": 32,
                                                 "shared_expert_intermediate_size": 96})),
    "glm4_moe": ("glm4moe", Case("glm4_moe", {**SIZES, **GLM_EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, "use_qk_norm": True,
                                              "norm_topk_prob": True, "attention_bias": True})),
    "dots1": ("dots1", Case("dots1", {**SIZES, **GLM_EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, "sliding_window": None,
                                      "norm_topk_prob": False})),
    "granitemoe": ("granitemoe", Case("granitemoe", {**SIZES, **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2,
                                                     "attention_multiplier": 0.25, "residual_multiplier": 0.25})),
    "ernie4_5_moe": ("ernie4_5-moe", Case("ernie4_5_moe", {**SIZES, **ERNIE_EXPERTS, "moe_intermediate_size": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0}})),
    "olmoe": ("olmoe", Case("olmoe", {**SIZES, "num_experts": 3, "num_experts_per_tok": 2, "eos_token_id": None})),
}


def logits(path: Path, ids: list[int], **options: object) -> np.ndarray:
    *_, engine = open_engine(path, EngineOptions(**(QUICK | options)))
    try:
        return np.concatenate([rows.copy() for _, rows in engine.score(ids)])
    finally:
        engine.close()


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_answers_as_transformers_does(tmp_path: Path, family: str) -> None:
    arch, case = MIXTURES[family]
    model = written(case, tmp_path / "source")
    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", arch, add_expert_keys(MIXTURES[family][1]))
    config = read_config(tmp_path / "m.gguf", strict=True)
    assert (config.family, config.moe) == (family, read_config(tmp_path / "source").moe)
    for length in (1, 7, 200):
        ids = text(model, length)
        expected = oracle(model, ids)
        got = logits(tmp_path / "m.gguf", ids)
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
        np.testing.assert_array_equal(got, logits(tmp_path / "source", ids))


def test_layers_of_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    """A file counts them among its blocks."""
    arch, case = MIXTURES["glm4_moe"]
    saved(case, tmp_path / "source")

    def behind(writer: gguf.GGUFWriter) -> None:
        add_expert_keys(case)(writer)
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.ones((64, 128), np.float32))
        writer.add_tensor("blk.3.ffn_gate_inp.weight", np.ones((12, 64), np.float32))

    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", arch, behind)
    assert read_config(tmp_path / "m.gguf", strict=True).num_hidden_layers == 3
    ids = list(range(40))
    np.testing.assert_array_equal(logits(tmp_path / "m.gguf", ids), logits(tmp_path / "source", ids))


@pytest.mark.parametrize("family, key, said", [
    ("glm4_moe", "expert_weights_norm", "norm_topk_prob"), ("glm4_moe", "rope.dimension_count", "partial_rotary_factor"),
    ("ernie4_5_moe", "rope.freq_base", "rope_theta")])
def test_what_a_file_leaves_out_is_what_llamacpp_takes_for_granted(tmp_path: Path, family: str, key: str, said: str) -> None:
    """And not what transformers does of a config."""
    arch, case = MIXTURES[family]
    saved(case, tmp_path / "source")

    def without(writer: gguf.GGUFWriter) -> None:
        add_expert_keys(case)(writer)
        writer.kv_data[0].pop(f"{arch}.{key}", None)

    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", arch, without)
    config = read_config(tmp_path / "m.gguf", strict=True)
    found = {"norm_topk_prob": config.moe.renormalise, "partial_rotary_factor": config.rope.partial_rotary_factor,
             "rope_theta": config.rope.theta}
    assert found[said] == {"norm_topk_prob": False, "partial_rotary_factor": 1.0, "rope_theta": 10_000.0}[said]


@pytest.mark.parametrize("family", MIXTURES)
def test_how_many_experts_a_token_visits_must_be_said(tmp_path: Path, family: str) -> None:
    arch, case = MIXTURES[family]
    saved(case, tmp_path / "source")

    def without(writer: gguf.GGUFWriter) -> None:
        add_expert_keys(case)(writer)
        del writer.kv_data[0][f"{arch}.expert_used_count"]

    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", arch, without)
    with pytest.raises(CheckpointError, match="lacks key .*expert_used_count"):
        read_config(tmp_path / "m.gguf")


def test_scores_that_a_file_does_not_correct_are_not_corrected(tmp_path: Path) -> None:
    arch, case = MIXTURES["ernie4_5_moe"]
    saved(case, tmp_path / "source")
    write_model(tmp_path / "source", tmp_path / "whole.gguf", "F32", arch, add_expert_keys(case))
    assert read_config(tmp_path / "whole.gguf", strict=True).moe.correction_bias
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    kept = {name: values for name, values in tensors.items() if not name.endswith("e_score_correction_bias")}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "source" / "model.safetensors")
    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", arch, add_expert_keys(case))
    assert not read_config(tmp_path / "m.gguf", strict=True).moe.correction_bias
    assert np.isfinite(logits(tmp_path / "m.gguf", list(range(40)))).all()


def test_shared_experts_of_another_width_are_refused(tmp_path: Path) -> None:
    arch, case = MIXTURES["ernie4_5_moe"]
    saved(case, tmp_path / "source")

    def wider(writer: gguf.GGUFWriter) -> None:
        add_expert_keys(case)(writer)
        writer.add_expert_shared_feed_forward_length(96)

    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", arch, wider)
    with pytest.raises(CheckpointError, match="a width of 96 for 2 shared experts of 32"):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(("change", "said"), [
    (lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX), "expert_gating_func"),
    (lambda writer: writer.add_expert_group_count(2), "expert_group_count"),
    (lambda writer: writer.add_leading_dense_block_count(9), "leading_dense_block_count"),
    (lambda writer: writer.add_nextn_predict_layers(2**31), "nextn_predict_layers")])
def test_what_a_file_of_corrected_scores_may_not_say(tmp_path: Path, change: object, said: str) -> None:
    arch, case = MIXTURES["glm4_moe" if "nextn" in said else "dots1"]
    saved(case, tmp_path / "source")

    def both(writer: gguf.GGUFWriter) -> None:
        add_expert_keys(case)(writer)
        change(writer)

    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", arch, both)
    with pytest.raises(CheckpointError, match=said):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("family, kind", [
    pytest.param(family, kind, marks=() if kind == "Q4_0" or family == next(iter(MIXTURES)) else pytest.mark.slow)
    for family in MIXTURES for kind in ("Q8_0", "Q4_0", "Q5_1", "F16")])
def test_experts_in_blocks(tmp_path: Path, family: str, kind: str) -> None:
    """Each type means what the package says: in blocks as codes; the router stays exact."""
    arch, case = MIXTURES[family]
    saved(case, tmp_path / "source")
    meant = write_model(tmp_path / "source", tmp_path / "m.gguf", kind, arch, add_expert_keys(MIXTURES[family][1]))
    with open_gguf_store(tmp_path / "m.gguf", "f32") as store:
        assert store.tensors.keys() == meant.keys()
        for name, info in store.tensors.items():
            dtype = {"F32": np.float32, "F16": np.float16}[info.dtype]
            np.testing.assert_array_equal(store.read(info).view(dtype).astype(np.float32).reshape(info.shape), meant[name])
    with open_gguf_store(tmp_path / "m.gguf", low_bit=True) as store:
        low = set() if store.container is None else store.container.tensors.keys()
        assert any(".experts." in name for name in low) == (kind != "F16")
        assert not any(name.endswith((".gate.weight", "norm.weight")) for name in low)
    (tmp_path / "folder").mkdir()
    save_file({name: np.ascontiguousarray(values, np.float32) for name, values in meant.items()}, tmp_path / "folder" / "model.safetensors")
    (tmp_path / "folder" / "config.json").write_bytes((tmp_path / "source" / "config.json").read_bytes())
    ids = list(range(1, 60))
    expected = logits(tmp_path / "folder", ids)
    got = logits(tmp_path / "m.gguf", ids, exact=bool(low))  # with rounded activations a router may choose another expert
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.isfinite(logits(tmp_path / "m.gguf", ids)).all()


def test_a_tensor_for_every_expert_as_older_files_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, case = MIXTURES["mixtral"]
    saved(case, tmp_path / "source")
    write_model(tmp_path / "source", tmp_path / "new.gguf", "F32", arch, add_expert_keys(MIXTURES["mixtral"][1]))
    real = gguf.GGUFWriter.add_tensor

    def add_tensor(writer: gguf.GGUFWriter, name: str, data: np.ndarray, **more: object) -> None:
        parts = {name: data} if "_exps" not in name else {name.replace("_exps", f".{n}"): each for n, each in enumerate(data)}
        for own, each in parts.items():
            real(writer, own, each, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
    write_model(tmp_path / "source", tmp_path / "old.gguf", "F32", arch, add_expert_keys(MIXTURES["mixtral"][1]))
    ids = list(range(40))
    np.testing.assert_array_equal(logits(tmp_path / "old.gguf", ids), logits(tmp_path / "new.gguf", ids))


@pytest.mark.parametrize(("name", "value", "named"), [
    ("expert_count", 4, "the config says [4, 64]"), ("expert_used_count", 77, "expert"), ("expert_gating_func", 2, "expert_gating_func"),
    ("expert_shared_count", 1, "expert_shared_count"), ("attention.clamp_kqv", 8.0, "clamp_kqv")])
def test_mixtures_that_are_another(tmp_path: Path, name: str, value: object, named: str) -> None:
    arch, case = MIXTURES["olmoe"]
    saved(case, tmp_path / "source")

    def change(writer: gguf.GGUFWriter) -> None:
        stated = {"expert_count": 3, "expert_used_count": 2, name: value}
        for key, each in stated.items():
            (writer.add_float32 if isinstance(each, float) else writer.add_uint32)(f"{arch}.{key}", each)

    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", arch, change)
    with pytest.raises(EffllmError) as caught:
        prepare(tmp_path / "m.gguf", EngineOptions(**QUICK))
    assert named in caught.value.message and caught.value.hint, caught.value.message


def test_a_tensor_that_the_family_does_not_use_is_refused(tmp_path: Path) -> None:
    """It would be left out in silence, and the answer would be another model's."""
    arch, case = MIXTURES["qwen3_moe"]
    saved(case, tmp_path / "source")

    def change(writer: gguf.GGUFWriter) -> None:
        add_expert_keys(MIXTURES["qwen3_moe"][1])(writer)
        writer.add_tensor("blk.1.attn_q.bias", np.zeros(128, np.float32))

    write_model(tmp_path / "source", tmp_path / "m.gguf", "F32", arch, change)
    with pytest.raises(CheckpointError, match="blk.1.attn_q.bias"):
        prepare(tmp_path / "m.gguf", EngineOptions(**QUICK))


# -- several files -------------------------------------------------------------------------------------------------------------------


def split(folder: Path, per_file: int = 20) -> list[Path]:
    from gguf_samples import add_fable_tokenizer

    write_model(FABLE, folder / "fable.gguf", "Q8_0", change=add_fable_tokenizer, per_file=per_file)
    return sorted(folder.glob("fable-*-of-*.gguf"))


def test_any_part_of_a_split_model_stands_for_it(tmp_path: Path) -> None:
    parts = split(tmp_path)
    fable_gguf(tmp_path / "whole.gguf", "Q8_0")
    assert len(parts) == 3 and [part.name for part in parts] == list(part_names(parts[0].name))
    expected = logits(tmp_path / "whole.gguf", list(range(30)))
    for part in parts:
        np.testing.assert_array_equal(logits(part, list(range(30))), expected)
        assert read_config(part) == read_config(tmp_path / "whole.gguf")


@pytest.mark.slow
def test_a_split_model_is_run_shown_quantized_and_exported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from effllm.cli.app import main

    first, _, third = split(tmp_path)
    for words in (["run", str(first), "Hello", "-n", "3", "--temp", "0"], ["plan", str(first)], ["show", str(first)]):
        assert main(words) == 0, capfd.readouterr().err
    assert capfd.readouterr().out.strip()
    assert main(["quantize", str(first), "-o", str(tmp_path / "four"), "--bits", "4"]) == 0
    assert main(["export", str(first), "-o", str(tmp_path / "one.gguf"), "--type", "Q8_0"]) == 0
    before = third.read_bytes()
    assert main(["export", str(first), "-o", str(third), "--force"]) == 2
    assert "belongs to the model being exported" in capfd.readouterr().err and third.read_bytes() == before
    ids = list(range(30))
    one = logits(tmp_path / "one.gguf", ids)
    assert np.abs(one - logits(first, ids)).max() < 0.02 * np.abs(one).max()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    parts = split(tmp_path)
    lost = parts.pop(missing)
    lost.unlink()
    for part in parts:
        with pytest.raises(ModelNotFound) as caught:
            read_config(part)
        assert lost.name in caught.value.message and caught.value.hint


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second, third = split(tmp_path)
    raw = second.read_bytes()

    def refused(named: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            read_config(first)
        assert named in caught.value.message and "\n" not in caught.value.message, caught.value.message

    second.write_bytes(third.read_bytes())
    refused("split.no 2, its name says 1")
    second.write_bytes(first.read_bytes())
    refused("split.no 0, its name says 1")
    fable_gguf(second, "F16")
    refused("split.count None")
    second.write_bytes(raw[:-40])
    refused("cut short")
    second.write_bytes(raw)
    assert read_config(first).family == "llama"
    alone = tmp_path / "other" / "renamed.gguf"
    os.link(first, alone)
    with pytest.raises(CheckpointError, match="one of 3 parts of a split model"):
        read_config(alone)
    lone = tmp_path / "other" / "fable-00001-of-00001.gguf"
    fable_gguf(lone, "F16")
    assert read_config(lone).family == "llama"


def test_names_of_parts() -> None:
    assert part_names("m-00002-of-00003.gguf") == ("m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf")
    for other in ("m.gguf", "m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf", "m-1-of-3.gguf"):
        assert part_names(other) is None
