"""DeepSeek V4 as its instruct models are published: attention in FP8, experts in FP4 (two E2M1 values per byte, a power-of-two scale per 32
inputs), and names without `model.`."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import Case, assert_close, oracle
from fp8_fp4_checkpoints import as_fp8, as_mxfp4
from hybrid_models import IDS, opened, read, read_afresh
from safetensors.torch import load_file, save_file
from saved_models import saved
from streamed_models import paging, streaming
from test_deepseek_v4 import WIDE
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel

from effllm.offload.checkpoint import CheckpointError
from effllm.quant.weight import Weight
from effllm.runtime import families
from effllm.runtime.config import read_config
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.library.local_model import local_model
from effllm.runtime.source import is_low_bit, open_store, open_weights, quantization_of
from effllm.runtime.stores.canonical_names import split_groups
from effllm.runtime.stores.container import read_container
from effllm.runtime.stores.expected_formats import expected_formats
from effllm.runtime.tensors import check_tensors, parameters

STATED = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
EIGHT = ("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight")
OUTSIDE = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight",
           **{f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}}
SMALL = {**WIDE, "intermediate_size": 64, "o_lora_rank": 128}  # blocks of 128 rows end where groups do
EXPERTS, LAYERS = WIDE["n_routed_experts"], WIDE["num_hidden_layers"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """The folder, and what its experts mean; beside it, as `plain`, a folder of the numbers that all of its weights mean."""
    home = tmp_path_factory.mktemp("published")
    folder, plain = home / "model", home / "plain"
    saved(Case("deepseek_v4", SMALL), plain)
    folder.mkdir()
    tensors, meant, wide = {}, {}, {}
    for name, value in load_file(plain / "model.safetensors").items():
        own = OUTSIDE.get(name, name.removeprefix("model.")).replace(".attn.norm.", ".attn.kv_norm.")
        if ".experts." in name or ".shared_experts." in name or name.endswith(EIGHT) and "compressor" not in name:
            small = ".experts." in name
            parts, values = as_mxfp4(value.numpy(), "scale") if small else as_fp8(value.numpy(), "blocks", "scale", powers=True)
            tensors |= {own.removesuffix("weight") + part: torch.as_tensor(each).contiguous() for part, each in parts.items()}
            wide[name] = torch.as_tensor(values)
            if small:
                meant[name] = values
        else:
            tensors[own] = wide[name] = value
    save_file(wide, plain / "model.safetensors", {"format": "pt"})
    tensors["mtp.0.enorm.weight"] = torch.ones(4)  # of layers that are left out
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": STATED, "expert_dtype": "fp4"}))
    return folder, meant


@pytest.fixture(scope="module")
def folder(made: tuple[Path, dict[str, np.ndarray]]) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder.parent / "plain", dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("low_bit", [False, True])
def test_experts_are_what_was_published_bit_for_bit(made: tuple[Path, dict[str, np.ndarray]], low_bit: bool) -> None:
    folder, meant = made
    with open_store(folder, "f32", low_bit) as store:
        for name, values in meant.items():
            raw = store.read(store.tensors[name])
            if low_bit:
                stored = store.container.tensors[name]
                assert str(stored.spec) == "mxfp4:32" and stored.shape == values.shape
                np.testing.assert_array_equal(Weight.low_bit(stored.spec, stored.shape, raw).to_f32(), values)
            else:
                np.testing.assert_array_equal(raw.view(np.float32).reshape(values.shape), values)


def test_logits_are_those_of_transformers(folder: Path, theirs: PreTrainedModel) -> None:
    engine = opened(folder, kv="32bit", exact=True)
    read_afresh(engine, IDS[:60])
    rows = np.stack([engine.forward_logits([token])[0].copy() for token in IDS[60:70]])
    engine.close()
    expected = oracle(theirs, IDS[:70])[60:]
    assert np.abs(rows - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.peer
def test_transformers_reads_the_published_form_as_the_same_numbers(folder: Path, theirs: PreTrainedModel) -> None:
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                 quantization_config=FineGrainedFP8Config(dequantize=True)).eval()
    assert_close(oracle(model, IDS[:70]), oracle(theirs, IDS[:70]))


def test_groups_of_heads_keep_their_codes(folder: Path) -> None:
    """Of a matrix of which each has some rows; where a block of scales is of two groups, it is widened as a whole."""
    store, container = open_weights(folder)
    names = [f"model.layers.1.attn.wo_a.{group}.weight" for group in range(2)]
    whole = load_file(folder / "model.safetensors")
    scales = whole["layers.1.attn.wo_a.scale"].float().numpy()
    meant = whole["layers.1.attn.wo_a.weight"].float().numpy() * np.repeat(scales, 128, axis=0)
    with store:
        for place, name in enumerate(names):
            stored = container.tensors[name]
            found = Weight.low_bit(stored.spec, stored.shape, store.read(store.tensors[name])).to_f32()
            np.testing.assert_array_equal(found, meant[128 * place : 128 * (place + 1)])
    halves = replace(store.tensors["model.layers.1.attn_norm.weight"], name="model.layers.1.attn.wo_a.weight", shape=(3, 4))
    beside = SimpleNamespace(tensors={halves.name: halves})
    split_groups(beside, 2)
    assert list(beside.tensors) == [halves.name]


def test_without_kernels_for_codes_they_are_widened_without_loss(made: tuple[Path, dict[str, np.ndarray]]) -> None:
    """To bfloat16, which holds all that FP4 can say; half precision does not."""
    folder, meant = made
    name, values = next(iter(meant.items()))
    with open_store(folder) as store:
        assert store.tensors[name].dtype == "BF16" and any("MXFP4 weights are widened to bf16" in said for said in store.notices)
        wide = store.read(store.tensors[name]).view(np.uint16).astype(np.uint32) << np.uint32(16)
    np.testing.assert_array_equal(wide.view(np.float32).reshape(values.shape), values)


def test_a_plan_expects_what_the_files_hold(folder: Path) -> None:
    config, section = read_config(folder), quantization_of(folder)
    store, container = open_weights(folder)
    with store:
        tensors, formats = check_tensors(config, store, container), expected_formats(section)
        held = {role: tensor for key, own in tensors.items() if key != "outer" for role, tensor in own.items()
                if role.startswith("experts.") and len(tensor.shape) == 2}
        assert {str(tensor.spec) for tensor in held.values()} == {"mxfp4:32"} and is_low_bit(folder)
        for layer in range(LAYERS):
            for role, rule in families.get(config.family).layer_tensors(config, layer).items():
                if (expected := formats(role, rule)) is not None:
                    assert tensors[layer][role].spec == expected, role
        assert local_model("m", folder).params == parameters(tensors) + 4  # and what is left out


def test_experts_in_few_slots_and_weights_from_the_disk_give_the_same_bits(folder: Path) -> None:
    """Also where what a layer's experts are read from are two places in a file each. Of weights the head streams: others are converted."""
    engines = opened(folder), paging(folder, 7, ctx=640, chunk=128), streaming(folder, ctx=640, chunk=128)
    found = [np.stack([read(each, IDS[:150]), *[each.forward_logits([t])[0].copy() for t in IDS[150:160]]]) for each in engines]
    for each in engines:
        each.close()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_a_converted_folder_keeps_the_experts_and_a_plan_says_so(made: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    folder, meant = made
    _, said = run(folder, tmp_path / "8bit", options("8bit"))
    stored = read_container(tmp_path / "8bit").tensors
    assert {str(stored[name].spec) for name in meant} == {"mxfp4:32"} and str(stored["model.layers.1.attn.wq_b.weight"].spec) != "mxfp4:32"
    assert any(f"{3 * EXPERTS * LAYERS} tensors stay in mxfp4:32" in line for line in said)
    with open_store(tmp_path / "8bit") as store:
        for name, values in list(meant.items())[:5]:
            found = Weight.low_bit(stored[name].spec, stored[name].shape, store.read(store.tensors[name])).to_f32()
            np.testing.assert_array_equal(found, values)
    plan = plan_conversion(folder, options("3bit").recipe)
    plan.store.close()
    assert {job.spec.bits for job in plan.jobs if job.role.startswith("experts.") and job.group in ("gate", "up", "down")} == {3}
    engine, exact = opened(tmp_path / "8bit"), opened(folder)
    rows = [np.concatenate([logits.copy() for _, logits in each.score(IDS[:100])]) for each in (engine, exact)]
    for each in (engine, exact):
        each.close()
    assert np.abs(rows[0] - rows[1]).mean() < 0.3 * np.abs(rows[1] - rows[1].mean()).mean()


@pytest.mark.parametrize(("what", "named"), [("short", "do not fit"), ("nan", "NaN"), ("gone", "without one scale"), ("float", "F32")])
def test_experts_whose_scales_are_none_are_named(folder: Path, tmp_path: Path, what: str, named: str) -> None:
    tensors, name = load_file(folder / "model.safetensors"), "layers.1.ffn.experts.3.w2"
    own = tensors.pop(f"{name}.scale")
    if what == "nan":
        own.view(torch.uint8)[5, 1] = 255
    if what != "gone":
        tensors[f"{name}.scale"] = {"short": own[:, :1].contiguous(), "nan": own, "float": own.float()}[what]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for low_bit in (False, True):
        with pytest.raises(CheckpointError, match=f"experts.3.w2.*{named}") as caught, open_store(tmp_path, low_bit=low_bit) as store:
            store.read(store.tensors[f"model.{name}.weight"])
        assert caught.value.hint
