"""Plans for other tools' quantized checkpoints before their download, against what the files turn out to be; what is refused."""

import json
from pathlib import Path

import pytest
from family_models import Case
from fp8_fp4_checkpoints import quark
from gguf_samples import FABLE
from saved_models import saved
from test_imported import CASES, GROUP, plain, written

from effllm.offload.checkpoint import CheckpointError
from effllm.quant.spec import QuantSpec
from effllm.runtime import families
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.conversion.compressed_tensors import export_compressed
from effllm.runtime.source import is_low_bit, open_store, open_weights, quantization_of
from effllm.runtime.stores.expected_formats import expected_formats
from effllm.runtime.stores.import_config import block_of, excluded_modules, matches_module


@pytest.mark.parametrize("name", [name for name in CASES if name != "mxfp4 beside fp8"])  # of experts alone, `test_deepseek_v4.py`
def test_a_plan_expects_what_the_files_hold(tmp_path: Path, name: str) -> None:
    """Each matrix of each layer in the same format, from its codes or widened."""
    section, _ = CASES[name]
    written(tmp_path / "m", name, layers=2)
    config = read_config(tmp_path / "m")
    formats, family = expected_formats(section), families.get(config.family)
    store, container = open_weights(tmp_path / "m")
    store.close()
    found = {} if container is None else container.tensors
    seen = 0
    for layer in range(config.num_hidden_layers):
        for role, rule in family.layer_tensors(config, layer).items():
            expected = formats(role, rule)
            if len(rule.shape) != 2:
                assert expected is None
                continue
            seen += 1
            assert expected == (found[rule.name].spec if rule.name in found else QuantSpec.raw("f16")), rule.name
    assert seen == 14


def test_blocks_are_those_that_all_groups_state() -> None:
    def section(*weights: dict) -> dict:
        return {"quant_method": "compressed-tensors", "config_groups": {f"g{i}": {"weights": each} for i, each in enumerate(weights)}}

    assert block_of(section({"group_size": 128})) == (0, 128) and block_of(section({"block_structure": [64, 128]})) == (64, 128)
    assert block_of(section({"group_size": 128}, {"group_size": 64})) == block_of(section({"group_size": -1})) == (0, 0)
    assert block_of(section({"block_structure": [128]})) == block_of(section({"group_size": "128"})) == block_of({}) == (0, 0)
    assert block_of({"quant_method": "fp8", "weight_block_size": [128, 128]}) == (128, 128)


@pytest.mark.parametrize(("section", "named"), [
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"), ({}, "quant_method"), ({"quant_method": "gptq", "bits": 5}, "bits 5"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"), ({"quant_method": "awq", "bits": 8}, "bits 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "format": "bitblas"}, "'bitblas'"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*gate": {}, "+:.*down.*": {"bits": 8}}}, "dynamic bits 8"),
    ({"quant_method": "awq", "bits": 4, "format": "GEMV_fast"}, "'gemv_fast'"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24'"),
    (plain("pack-quantized") | {"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 3}}}}, "pack-quantized"),
    (plain("int-quantized", num_bits=16), "'int' 16"), (plain("int-quantized", num_bits=8, type="float"), "'float' 8"),
    (plain("float-quantized", num_bits=[4]), "float-quantized"), (plain("nvfp4-pack-quantized", num_bits=8, type="float"), "nvfp4"),
    *(({"quant_method": method}, said) for method, said in (
        ("exl3", "'exl3' (ExLlamaV3"), ("exl2", "ExLlamaV2"), ("hqq", "(HQQ)"), ("torchao", "and GGUF files"), ("odd", "'odd' is"))),
    (quark({"dtype": "int4", "qscheme": "per_group", "group_size": 128}), "'int4'"), (quark({}, global_quant_config={}), "weights of {}"),
    (quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 16}), "'group_size': 16"), ({"quant_method": "quark"}, "no word of"),
    (quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, algo_config=[{"name": "rotation"}]), "algo_config 'rotation'"),
    (quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, export={"weight_format": "fake_quantized"}), "'fake_quantized'"),
    (quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, layer_quant_config={"*up*": {"weight": {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}}), "weights in several forms"),
    ({"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp4"}, {"dtype": "fp8_e4m3"}]}}, "and more beside"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION'"), ({"quant_method": "modelopt"}, "quant_algo None"),
    (plain("int-quantized", num_bits=8) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    (plain("int-quantized", num_bits=8) | {"transform_config": {"config_groups": {"R": {"apply": [
        {"location": "weight_input"}, {"location": "input"}]}}}}, "transform at 'input'"),
])
def test_other_methods_are_refused_by_name(tmp_path: Path, section: dict[str, object], named: str) -> None:
    raw = json.loads((FABLE / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": section}))
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path)
    assert named in caught.value.message + caught.value.hint and "quantization_config" in caught.value.message


@pytest.mark.parametrize("section", ["gptq", ["awq"], 4, False])
def test_a_section_that_is_no_object_is_said_to_be_none(section: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(json.loads((FABLE / "config.json").read_text()) | {"quantization_config": section})
    assert repr(section) in caught.value.message and "must be an object with a quant_method" in caught.value.hint


def test_the_older_name_of_the_section_is_named() -> None:
    """Unless the newer stands beside it."""
    section = plain("pack-quantized", num_bits=4, group_size=GROUP)
    raw = json.loads((FABLE / "config.json").read_text()) | {"compression_config": section}
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert "compression_config" in caught.value.message and "quantization_config" in caught.value.hint
    assert parse_config(raw | {"quantization_config": section}, strict=True).warnings == ()


def test_the_text_part_of_a_composite_may_say_how_it_is_quantized(tmp_path: Path) -> None:
    """Its weights are what they are where the whole model says it."""
    saved(Case("gemma3_text", {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}), tmp_path / "model")
    *_, made = export_compressed(tmp_path / "model", tmp_path / "words", "INT4")
    path = made.folder / "config.json"
    inner = json.loads(path.read_text())
    weights = {}
    for where in ("outer", "inner"):
        raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": dict(inner)}
        if where == "outer":
            raw["quantization_config"] = raw["text_config"].pop("quantization_config")
        path.write_text(json.dumps(raw))
        assert quantization_of(made.folder) == inner["quantization_config"] and is_low_bit(made.folder)
        with open_store(made.folder) as store:
            weights[where] = {name: store.read(info).tobytes() for name, info in store.tensors.items()}
    assert weights["outer"] == weights["inner"] and "model.layers.0.self_attn.q_proj.weight" in weights["inner"]


@pytest.mark.parametrize(("name", "beside"), [("gptq 4", "quantize_config.json"), ("gptq 4", "quant_config.json"), ("gptq 4", None),
                                              ("modelopt nvfp4", "hf_quant_config.json"), ("fp8 blocks", None)])
def test_codes_of_which_the_config_says_nothing_are_named(tmp_path: Path, name: str, beside: str | None) -> None:
    """Older tools described them in a file of their own."""
    written(tmp_path / "m", name)
    path = tmp_path / "m" / "config.json"
    raw = json.loads(path.read_text())
    section = raw.pop("quantization_config")
    path.write_text(json.dumps(raw))
    if beside:
        (tmp_path / "m" / beside).write_text(json.dumps(section))
    with pytest.raises(CheckpointError, match="weight.*does not mention") as caught:
        open_store(tmp_path / "m")
    assert (beside or "16-bit checkpoint") in caught.value.hint and ("modelopt" in caught.value.hint) == ("modelopt" in name)


@pytest.mark.parametrize(("listed", "tensor", "is_left_out"), [
    ("*.gate", "model.layers.0.mlp.gate.weight", True), ("*.gate", "model.layers.0.mlp.gate_proj.weight", False),
    ("*.self_attn.q", "model.layers.0.self_attn.q_proj.weight", False), ("*lm_head", "lm_head.weight", True),
    ("*self_attn*", "model.layers.0.self_attn.q_proj.weight", True), ("model.layers.0*", "model.layers.0.mlp.up_proj.weight", True)])
def test_a_pattern_of_what_was_left_out_is_of_the_whole_name(listed: str, tensor: str, is_left_out: bool) -> None:
    """Routers left out by `*.gate` were taken for all gates: a mixture was planned at twice its size."""
    (module,) = excluded_modules({"exclude": [listed]})
    assert matches_module(module, tensor) is is_left_out
