"""Folders whose config quantizes weights in different ways: compressed-tensors, ModelOpt, AutoRound."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import Case
from fp8_fp4_checkpoints import as_fp8, as_mxfp4_packed, as_mxfp8, as_nvfp4
from gguf_samples import weights
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from saved_models import saved
from test_imported import as_awq, as_bytes, as_compressed, as_gptq

from effllm.offload.checkpoint import CheckpointError
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Weight
from effllm.runtime import families
from effllm.runtime.config import read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.source import is_low_bit, open_store, open_weights
from effllm.runtime.stores.expected_formats import expected_formats
from effllm.runtime.stores.import_config import check_method, is_quantized
from effllm.runtime.stores.import_decoder import decoders_of

IDS = [3, 17, 5, 90, 4, 11]
Quantize = Callable[[np.ndarray], tuple[Mapping[str, object], np.ndarray]]


def group(*targets: str, written: str | None = None, **said: object) -> dict[str, object]:
    return {"targets": list(targets), "weights": said} | ({"format": written} if written else {})


def without_order(parts: tuple[dict[str, np.ndarray], np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """As AutoRound writes the codes of GPTQ, whose groups lie in order."""
    return {key: value for key, value in parts[0].items() if key != "g_idx"}, parts[1]


def in_blocks(values: np.ndarray) -> tuple[dict[str, object], np.ndarray]:
    """As ModelOpt writes FP8 in blocks: scales of four dimensions."""
    parts, meant = as_fp8(values, "blocks", "weight_scale")
    return parts | {"weight_scale": parts["weight_scale"][:, None, :, None]}, meant


def algorithms(**of: str) -> dict[str, object]:
    """ModelOpt's section for a model of two layers; role -> algorithm."""
    layers = {f"model.layers.{layer}.{role.replace('__', '.')}": {"quant_algo": algorithm, "group_size": 16}
              for layer in range(2) for role, algorithm in of.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["lm_head", "mtp*"]}


def auto_round(packing: str | None = "auto_round:auto_gptq", **said: object) -> dict[str, object]:
    section = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "data_type": "int", "act_bits": 16,
               "block_name_to_quantize": "model.layers", **said}
    return section | ({"packing_format": packing} if packing else {})


# Name -> a section; the ends of names of matrices and how each is stored, the first that fits; the formats in which kernels take them.
CASES: dict[str, tuple[dict[str, object], dict[str, Quantize | None], set[str]]] = {
    "nvfp4 and fp8": ({"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"], "config_groups": {
        "group_0": group("re:.*down_proj$", written="float-quantized", num_bits=8, type="float", strategy="channel"),
        "group_1": group("Linear", written="nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)}}, {
            "down_proj": lambda v: as_fp8(v, "rows"), "": lambda v: as_nvfp4(v, ("weight_packed", "weight_global_scale"), True)},
        {"float8:128", "nvfp4:16"}),
    "words of 4 and 8 bits beside nvfp4": ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "a": group(r"re:.*self_attn\.(q|k|v)_proj", written="pack-quantized", num_bits=8, group_size=64),
        "b": group("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", written="pack-quantized", num_bits=4, group_size=64),
        "c": group("Linear", written="nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)}}, {
            **{f"{role}_proj": lambda v: as_compressed(v, 8, False) for role in "qkv"}, "up_proj": lambda v: as_compressed(v, 4, True),
            "": lambda v: as_nvfp4(v, ("weight_packed", "weight_global_scale"), True)}, {"offset8:64", "offset4:64", "nvfp4:16"}),
    "words of two widths": ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
        "a": group("re:.*mlp.*", num_bits=4, group_size=64), "b": group("re:.*self_attn.*", num_bits=8, group_size=64)}}, {
            **{f"{role}_proj": lambda v: as_compressed(v, 8, False) for role in "qkvo"}, "": lambda v: as_compressed(v, 4, False)},
        {"offset8:64", "offset4:64"}),
    "bytes beside words": ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "a": group("re:.*o_proj", written="int-quantized", num_bits=8, strategy="channel"),
        "b": group("Linear", written="pack-quantized", num_bits=4, group_size=64)}}, {
            "o_proj": lambda v: as_bytes(v, 8, "rows"), "": lambda v: as_compressed(v, 4, False)}, {"offset8:128", "offset4:64"}),
    "modelopt": (algorithms(self_attn="FP8", mlp__gate_proj="NVFP4", mlp__up_proj="NVFP4", mlp__down_proj="UNQUANTIZED"), {
        **{f"{role}_proj": lambda v: as_fp8(v, "one") for role in "qkvo"}, "down_proj": None,
        "": lambda v: as_nvfp4(v, ("weight", "weight_scale_2"), False)}, {"float8:128", "nvfp4:16"}),
    "modelopt, blocks": (algorithms(self_attn="FP8", mlp__gate_proj="fp8_pb_wo", mlp__up_proj="FP8_PB_WO", mlp__down_proj="W4A16_NVFP4"), {
        **{f"{role}_proj": lambda v: as_fp8(v, "one") for role in "qkvo"},
        "down_proj": lambda v: as_nvfp4(v, ("weight", "weight_scale_2"), False), "": lambda v: in_blocks(v)},
        {"float8:128", "nvfp4:16"}),
    "AutoRound": (auto_round(extra_config={
        **{f"model.layers.{layer}.self_attn.v_proj": {"bits": 8} for layer in range(2)}, r".*layers\.1.*down_proj": {"bits": 16},
        "model.layers.0.mlp.gate_proj": {"bits": 3}}), {
            "v_proj": lambda v: without_order(as_gptq(v, 8)), "1.mlp.down_proj": None,
            "0.mlp.gate_proj": lambda v: without_order(as_gptq(v, 3)), "": lambda v: without_order(as_gptq(v, 4))},
        {"offset8:64", "offset4:64"}),
    "AutoRound, zero points as they are": (auto_round("auto_round", extra_config={"lm_head": {"bits": 4, "data_type": "int"}}), {
        "": lambda v: without_order(as_gptq(v, 4, plus_one=False))}, {"offset4:64"}),
    "AutoRound, as AWQ": (auto_round("auto_round:auto_awq"), {"": as_awq}, {"offset4:64"}),
    "AutoRound, MXFP4 and MXFP8": (auto_round("auto_round:llm_compressor", data_type="mx_fp", group_size=32, sym=True, act_bits=4,
                                              extra_config={r".*o_proj": {"bits": 8}}), {
        "o_proj": as_mxfp8, "": as_mxfp4_packed}, {"mxfp4:32"}),
    "AutoRound, NVFP4": (auto_round("auto_round:llm_compressor", data_type="nv_fp", group_size=16, sym=True, act_bits=4), {
        "": lambda v: as_nvfp4(v, ("weight_packed", "weight_global_scale"), True)}, {"nvfp4:16"}),
    "AutoRound, FP8 in blocks": (auto_round(None, data_type="fp", bits=8, group_size=[128, 128], sym=True, fmt="e4m3"), {
        "": lambda v: as_fp8(v, "blocks")}, {"float8:128"}),
    "AutoRound, FP8 by row": (auto_round("auto_round:fp8_static", data_type="fp", bits=8, group_size=-1, sym=True, act_bits=8), {
        "": lambda v: as_fp8(v, "rows")}, {"float8:128"}),
    "modelopt, powers of two beside others": (algorithms(self_attn="MXFP8", mlp__gate_proj="W4A8_MXFP4_FP8", mlp__up_proj="W4A8_NVFP4_FP8",
                                                         mlp__down_proj="FP8"), {
        "gate_proj": lambda v: as_mxfp4_packed(v, "weight"), "up_proj": lambda v: as_nvfp4(v, ("weight", "weight_scale_2"), False),
        "down_proj": lambda v: as_fp8(v, "rows"), "": as_mxfp8}, {"mxfp4:32", "nvfp4:16", "float8:128"}),
    "compressed-tensors, two of four bits": ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "a": group("re:.*self_attn.*", written="mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        "b": group("Linear", written="nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)}}, {
            **{f"{role}_proj": as_mxfp4_packed for role in "qkvo"},
            "": lambda v: as_nvfp4(v, ("weight_packed", "weight_global_scale"), True)}, {"mxfp4:32", "nvfp4:16"}),
    "AutoRound of 5 bits": (auto_round(None, bits=5), {"": lambda v: without_order(as_gptq(v, 5))}, set()),
}


def quantized(folder: Path, name: str) -> dict[str, np.ndarray]:
    """A small model as such a checkpoint; returns what its weights mean."""
    section, ways, _ = CASES[name]
    saved(Case("llama", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}), folder)
    tensors, meant = {}, weights(folder)
    for tensor, values in meant.items():
        module = tensor.removesuffix(".weight")
        heads = "lm_head" in section.get("extra_config", {}) and module == "lm_head" and values.shape[0] % 32 == 0
        way = next((way for end, way in ways.items() if module.endswith(end)), None) if module.endswith("_proj") or heads else None
        if way is None:
            tensors[tensor] = torch.from_numpy(values)
            continue
        parts, meant[tensor] = way(values)
        tensors |= {f"{module}.{part}": value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value)).contiguous()
                    for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": section}))
    return meant


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("mixed") / "m"
    return request.param, folder, quantized(folder, request.param)


def test_each_weight_means_what_its_format_says(checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    """To the last bit, wide and from its codes; a plan expects the formats that the files turn out to have."""
    name, folder, meant = checkpoint
    with open_store(folder, dequant_dtype="f32") as store:
        assert set(store.tensors) == set(meant)
        for tensor, values in meant.items():
            np.testing.assert_array_equal(store.read(store.tensors[tensor]).view(np.float32).reshape(values.shape), values, err_msg=tensor)
    store, container = open_weights(folder)
    with store:
        found = {} if container is None else container.tensors
        for tensor, stored in found.items():
            blob = store.read(store.tensors[tensor])
            np.testing.assert_array_equal(Weight.low_bit(stored.spec, stored.shape, blob).to_f32(), meant[tensor], err_msg=tensor)
        assert {str(stored.spec) for stored in found.values()} == CASES[name][2]
        widened = {tensor for tensor, info in store.tensors.items() if info.dtype in ("F16", "BF16")}
    assert is_low_bit(folder) == bool(CASES[name][2])
    config, formats = read_config(folder), expected_formats(CASES[name][0])
    seen = 0
    for layer in range(config.num_hidden_layers):
        for role, rule in families.get(config.family).layer_tensors(config, layer).items():
            here = found[rule.name].spec if rule.name in found else QuantSpec.raw("f16") if rule.name in widened else None
            assert formats(role, rule) == here, rule.name
            seen += here is not None
    assert seen >= 10


@pytest.mark.parametrize("checkpoint", ["nvfp4 and fp8", pytest.param("words of two widths", marks=pytest.mark.slow),
                                        pytest.param("AutoRound", marks=pytest.mark.slow)], indirect=True)
def test_they_run_as_what_they_mean(checkpoint: tuple[str, Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    """As transformers runs the weights that are meant."""
    from transformers import AutoModelForCausalLM

    _, folder, meant = checkpoint
    save_file({name: torch.from_numpy(values) for name, values in meant.items()}, tmp_path / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key != "quantization_config"}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    *_, engine = open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=True))
    found = engine.forward_logits(IDS).copy()
    engine.close()
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()  # 3 bits are widened to halves


def test_a_head_may_be_among_them() -> None:
    """Of AutoRound, where the section names it; a plan expects it then."""
    rule = families.TensorRule("lm_head.weight", (320, 128))
    for extra, expected in (({"lm_head": {"bits": 4}}, "offset4:64"), ({"lm_head": {"bits": 16}}, None), ({}, None)):
        found = expected_formats(auto_round(extra_config=extra))("head", rule)
        assert (None if found is None else str(found)) == expected


def test_a_list_as_long_as_a_mixture_is_looked_up() -> None:
    """ModelOpt lists modules, or their parents, also by the names used in vision-language models."""
    before = "model.language_model.layers"
    layers = {f"{before}.{layer}.mlp.experts.{expert}.up_proj": {"quant_algo": "NVFP4"} for layer in range(40) for expert in range(128)}
    layers |= {f"{before}.{layer}.mlp.shared_expert": {"quant_algo": "FP8"} for layer in range(40)}
    formats = expected_formats({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    rules = [families.TensorRule(f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", (256, 128))
             for layer in range(40) for expert in range(128)]
    assert {str(formats("experts.3.up", rule)) for rule in rules} == {"nvfp4:16"}
    assert str(formats("shared.up", families.TensorRule("model.layers.7.mlp.shared_expert.up_proj.weight", (256, 128)))) == "float8:128"
    assert formats("q", families.TensorRule("model.layers.7.self_attn.q_proj.weight", (256, 128))) is None


def test_words_of_a_width_that_nobody_states_are_named(tmp_path: Path) -> None:
    quantized(tmp_path / "m", "AutoRound")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    for part, value in as_gptq(weights_of(tmp_path, 256, 128), 2)[0].items():
        if part != "g_idx":
            tensors[f"{name}.{part}"] = torch.from_numpy(np.array(value)).contiguous()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.qweight.*none of 4, 8, 3 bits"):
        open_store(tmp_path / "m")


def test_scales_of_blocks_have_no_other_dimensions(tmp_path: Path) -> None:
    quantized(tmp_path / "m", "modelopt, blocks")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    save_file(tensors | {name: tensors[name].reshape(1, 2, 1, 1)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale is F32 \[1, 2, 1, 1\]"):
        open_store(tmp_path / "m")


def weights_of(path: Path, rows: int, depth: int) -> np.ndarray:
    return np.random.default_rng(len(path.parts)).standard_normal((rows, depth)).astype(np.float32)


def test_a_group_that_ends_in_part_is_widened(tmp_path: Path) -> None:
    """192 inputs in groups of 128 without a list of them: two groups, of which nobody takes equal shares."""
    saved(Case("llama", {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}), tmp_path / "m")
    path, codes = tmp_path / "m" / "model.safetensors", np.arange(128 * 192).reshape(128, 192) % 16
    tensors, scales = load_file(path), np.float16([1.0, 2.0])
    parts = {"qweight": torch.from_numpy(sum(codes.T[i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8)).view(np.int32)),
             "qzeros": torch.full((2, 16), 0x77777777, dtype=torch.int32), "scales": torch.from_numpy(scales)[:, None].repeat(1, 128)}
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors | {f"model.layers.0.mlp.down_proj.{key}": value.contiguous() for key, value in parts.items()}, path)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw | {"quantization_config": auto_round(group_size=128)}))
    store, container = open_weights(tmp_path / "m")
    with store:
        assert container is None
        found = store.read(store.tensors["model.layers.0.mlp.down_proj.weight"]).view(np.float16).reshape(128, 192)
    np.testing.assert_array_equal(found, (codes - 8) * np.repeat(scales, 128)[:192])
    rule = families.TensorRule("model.layers.0.mlp.down_proj.weight", (128, 192))
    assert expected_formats(auto_round(group_size=128))("down", rule) == QuantSpec.raw("f16")


@pytest.mark.parametrize(("section", "named"), [
    (auto_round("auto_round:fp8"), "'auto_round:fp8'"), (auto_round(["awq"]), "packing_format"), (auto_round(bits=9), "bits 9"),
    (auto_round("auto_round:auto_awq", bits=8), "bits 8"), (auto_round(data_type="nv_fp"), "'nv_fp'"),
    (auto_round(act_bits=8), "act_bits 8"),
    (auto_round(extra_config={"a": {"bits": "8"}}), "bits '8'"), (auto_round(extra_config={"a": {"data_type": "mx_fp"}}), "'mx_fp'"),
    (algorithms(mlp="W4A8_AWQ", self_attn="FP8"), "'W4A8_AWQ'"), (algorithms(mlp="MXFP6"), "'MXFP6'"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": []}, "no quantized_layers"),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "a": group("Linear", written="mxfp6-pack-quantized", num_bits=6, type="float"),
        "b": group("re:.*o_proj", written="float-quantized", num_bits=8, type="float")}}, "'mxfp6-pack-quantized'"),
    (auto_round("auto_round:llm_compressor"), "'auto_round:llm_compressor'"),
    (auto_round("auto_round:llm_compressor", data_type="mx_fp", bits=6, sym=True), "'mx_fp' and bits 6"),
    (auto_round("auto_round:llm_compressor", data_type="mx_fp", sym=True, rotation_config={"block_size": 32}), "rotation_config"),
    (auto_round("auto_round:fp8", data_type="fp", bits=8, fmt="e5m2", sym=True), "'fp' and bits 8"),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "a": group("Linear", num_bits=8, type="float")}}, "'mixed-precision'")])
def test_what_is_not_read_of_them_is_named(section: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_method(section)
    assert named in caught.value.message and caught.value.hint and "quantization_config" in caught.value.message


# ---- sections that say anything

WORDS = st.sampled_from(["FP8", "NVFP4", "fp8_pb_wo", "float-quantized", "pack-quantized", "nvfp4-pack-quantized", "int-quantized", "int",
                         "mxfp4-pack-quantized", "mx_fp", "fp", "auto_round:llm_compressor", "float", "Linear", "re:.*", "re:(",
                         "model.layers.0.mlp.up_proj", "", "lm_head", "auto_round:auto_awq"])
LEAF = st.one_of(WORDS, st.integers(-3, 20), st.none(), st.booleans(), st.sampled_from([4, 8, 16, 128]), st.floats())
VALUE = st.recursive(LEAF, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)), max_leaves=6)
GROUPS = st.dictionaries(st.sampled_from("abc"), st.fixed_dictionaries(
    {"weights": st.fixed_dictionaries({"num_bits": st.sampled_from([4, 8])}, optional={
        "type": st.sampled_from(["int", "float"]), "group_size": LEAF, "block_structure": VALUE, "actorder": LEAF})},
    optional={"format": WORDS, "targets": st.one_of(VALUE, st.lists(WORDS))}))
LAYERS = st.dictionaries(WORDS, st.one_of(VALUE, st.fixed_dictionaries({"quant_algo": WORDS})), max_size=3)
RULES = st.dictionaries(WORDS, st.fixed_dictionaries({}, optional={"bits": st.one_of(LEAF, st.sampled_from([3, 8, 16])),
                                                                    "group_size": LEAF, "data_type": LEAF}), max_size=3)


@given(st.one_of(
    st.fixed_dictionaries({"config_groups": st.one_of(GROUPS, VALUE), "format": st.one_of(st.just("mixed-precision"), WORDS)},
                          optional={"ignore": VALUE}).map(lambda said: {"quant_method": "compressed-tensors", **said}),
    st.fixed_dictionaries({"quantized_layers": st.one_of(LAYERS, VALUE)}).map(
        lambda said: {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", **said}),
    st.fixed_dictionaries({"extra_config": st.one_of(RULES, VALUE)}, optional={"packing_format": VALUE, "act_bits": LEAF}).map(
        lambda said: {"quant_method": "auto-round", "bits": 4, **said})))
def test_whatever_a_section_says_there_is_a_plan_or_one_line(section: dict[str, object]) -> None:
    try:
        check_method(section)
    except ConfigError as error:
        assert error.hint and "quantization_config" in error.message
        return
    formats = expected_formats(section)
    for role, name in (("up", "model.layers.0.mlp.up_proj.weight"), ("head", "lm_head.weight")):
        found = formats(role, families.TensorRule(name, (256, 128)))
        assert found is None or found.bits in (4, 8, 16)
    assert decoders_of(section) and is_quantized(section) in (True, False)


# Writes a folder as the package does, each group in its own format, and keeps what the package makes of it again.
WRITE = """
import sys, torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
source, out, meant = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
config = {"a": {"targets": ["re:.*down_proj$"], "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}},
          "b": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group",
                                                             "group_size": 64}},
          "c": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}}}
apply_quantization_config(model, QuantizationConfig(config_groups=config, ignore=["lm_head"]))
for name, module in model.named_modules():
    if hasattr(module, "weight_scale"):
        scale, weight = module.weight_scale, module.weight.detach()
        most = weight.abs().reshape(scale.shape[0], scale.shape[1], -1).amax(2)
        top = 448 if "down_proj" in name else 127 if "self_attn" in name else 7
        scale.data.copy_((most / top).reshape(scale.shape))
compressor = ModelCompressor.from_pretrained_model(model)
compressor.compress_model(model)
model.save_pretrained(out)
compressor.update_config(out)
model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
with torch.no_grad():
    model(torch.tensor([[1, 2, 3]]))
save_file({name: value.float().contiguous() for name, value in model.state_dict().items() if name.endswith("proj.weight")}, meant)
"""


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="the compressed-tensors package is not installed")
def test_folders_of_the_package_mean_what_it_says(tmp_path: Path) -> None:
    saved(Case("llama", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}), tmp_path / "source")
    ran = subprocess.run([sys.executable, "-P", "-c", WRITE, *map(str, (tmp_path / "source", tmp_path / "m", tmp_path / "meant"))],
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    section, meant = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"], load_file(tmp_path / "meant")
    assert section["format"] == "mixed-precision" and len(meant) == 14
    with open_store(tmp_path / "m", dequant_dtype="f32") as store:
        for name, values in meant.items():
            found = store.read(store.tensors[name]).view(np.float32).reshape(values.shape)
            np.testing.assert_allclose(found, values.numpy(), rtol=2.0**-7, err_msg=name)  # the package's products are bfloat16
    store, container = open_weights(tmp_path / "m")
    store.close()
    assert {str(stored.spec) for stored in container.tensors.values()} == {"float8:128", "offset8:64", "offset4:64"}


@pytest.mark.parametrize(("written", "blocks", "block"), [
    ("float-quantized", ([128, 128], None), (128, 128)), ("float-quantized", ([128, 128], [64, 64], [64, 64]), (0, 0)),
    ("int-quantized", ([128, 128], None), (0, 0)), ("int-quantized", ([64, 128], [64, 128]), (64, 128))])
def test_kinds_that_lie_alike_state_one_size_of_blocks_or_none(written: str, blocks: tuple, block: tuple[int, int]) -> None:
    """Of FP8 scales of a row or of a weight are told from those of blocks by their shape."""
    kind = "float" if written.startswith("float") else "int"
    groups = {str(place): group("Linear", written=written, num_bits=8, type=kind, **({"block_structure": each} if each else {}))
              for place, each in enumerate(blocks)}
    found = decoders_of({"quant_method": "compressed-tensors", "format": written, "config_groups": groups})
    assert [decoder.block for decoder in found] == [block]
