"""Exports of families whose checkpoints differ from Llama's: experts, fused matrices, the text model of a vision-language model."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import ERNIE_EXPERTS, GLM_EXPERTS, GRANITE, GRANITE_4, GROWING, TWO_ROPES, Case
from gguf_samples import FABLE, weights
from remapped_checkpoints import BASE_FAMILY
from safetensors.torch import load_file, save_file
from saved_models import saved

from effllm import UsageError
from effllm.offload.checkpoint import TensorStore
from effllm.quant.imports.compressed_tensors import quantize_groups
from effllm.runtime.conversion.compressed_tensors import export_compressed, reader
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.families import EMBEDDING_FAMILIES, FAMILIES, MODEL_TYPE_ALIASES
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.source import folder_files, open_store

IDS = [0, 1, 17, 200, 2, 40]
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "initializer_range": 0.08}
GEMMA = {**SIZES, **TWO_ROPES, "num_hidden_layers": 3, "head_dim": 64, "query_pre_attn_scalar": 64}
CASES = {
    "mixtral": Case("mixtral", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": Case("qwen3_moe", {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64,
                                    "mlp_only_layers": [1]}),
    "olmoe": Case("olmoe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": None}, dtype="bfloat16"),
    "qwen2_moe": Case("qwen2_moe", {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                                    "shared_expert_intermediate_size": 256}),
    "glm4_moe": Case("glm4_moe", {**SIZES, **GLM_EXPERTS, "moe_intermediate_size": 128, "head_dim": 64}),
    "ernie4_5_moe": Case("ernie4_5_moe", {**SIZES, **ERNIE_EXPERTS, "moe_intermediate_size": 128}, dtype="bfloat16"),
    "granitemoehybrid": Case("granitemoehybrid", {**SIZES, **GRANITE, **GRANITE_4, "shared_intermediate_size": 128,
                                                  "layer_types": ["full_attention"] * 2}),
    "phi3": Case("phi3", SIZES, dtype="bfloat16"),
    "glm4": Case("glm4", {**SIZES, "head_dim": 64}, dtype="bfloat16"),
    "gemma3": Case("gemma3_text", GEMMA, images=True, dtype="bfloat16"),
    "gemma3_text": Case("gemma3_text", GEMMA),
    "opt": Case("opt", {"hidden_size": 256, "ffn_dim": 384, "word_embed_proj_dim": 256, "num_hidden_layers": 2}),
}
ROUTERS = {"mixtral": ["model.layers.0.block_sparse_moe.gate", "model.layers.1.block_sparse_moe.gate"],
           "qwen3_moe": ["model.layers.0.mlp.gate"], "olmoe": ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
           "qwen2_moe": [f"model.layers.{layer}.mlp.{module}" for layer in (0, 1) for module in ("gate", "shared_expert_gate")],
           "glm4_moe": ["model.layers.1.mlp.gate"], "ernie4_5_moe": ["model.layers.1.mlp.gate"]}
PARTS = ("weight_packed", "weight_scale", "weight_shape")
KINDS = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """A model of a case and its export in 4 bits; made once."""

    @cache
    def made(name: str) -> tuple[Path, Path]:
        base = tmp_path_factory.mktemp(name)
        saved(CASES[name], base / "model")
        list(export_compressed(base / "model", base / "out", "INT4"))
        return base / "model", base / "out"

    return made


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def names(folder: Path) -> tuple[set[str], set[str]]:
    """Of the weights that are packed, with all their parts, and of what is stored as it was."""
    with TensorStore.open(folder) as store:
        found = set(store.tensors)
    packed = {name.removesuffix("_packed") for name in found if name.endswith("weight_packed")}
    parts = {name.removesuffix("weight") + part for name in packed for part in PARTS}
    assert parts <= found
    return packed, found - parts


def logits(folder: Path) -> np.ndarray:
    *_, engine = open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=True))
    assert isinstance(engine, Engine)
    try:
        return np.concatenate([rows.copy() for _, rows in engine.score(IDS)])
    finally:
        engine.close()


@pytest.mark.parametrize("name", [name for name in CASES if name != "gemma3"])
def test_tensors_bear_the_names_that_the_family_publishes(name: str, folders) -> None:
    source, out = folders(name)
    packed, kept = names(out)
    with TensorStore.open(source) as store:
        assert packed | kept == set(store.tensors) and not packed & kept


@pytest.mark.parametrize("name", CASES)
def test_every_linear_is_packed_or_named_as_one_that_is_not(name: str, folders) -> None:
    """A reader takes packed weights for every linear that `ignore` does not name; of what else is two-dimensional rows are looked up."""
    packed, kept = names(folders(name)[1])
    section = config(folders(name)[1])["quantization_config"]
    assert section["ignore"] == ["lm_head", *ROUTERS.get(name, [])] and section["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert not {weight.removesuffix(".weight") for weight in packed} & set(section["ignore"])
    with TensorStore.open(folders(name)[1]) as store:
        wide = {weight.removesuffix(".weight") for weight in kept if len(store.tensors[weight].shape) == 2 and weight.endswith(".weight")}
    assert all(module in section["ignore"] or module.endswith(("embed_tokens", "embed_positions")) for module in wide)
    assert not any("expert" in module for module in wide if not module.endswith(("shared_expert_gate", "correction_bias")))


@pytest.mark.parametrize("name", [name for name in CASES if name != "gemma3"])
def test_our_importer_reads_back_what_was_rounded(name: str, folders) -> None:
    source, out = folders(name)
    packed, _ = names(out)
    with open_store(out, dequant_dtype="f32") as store:
        for weight, values in weights(source).items():
            info = store.tensors[weight]
            found = store.read(info)
            if weight in packed:
                codes, scales = quantize_groups(values, 4, 128)
                back = found.view(np.float32).reshape(info.shape)
                assert np.array_equal(back, codes * np.repeat(scales, 128, axis=1)), weight
            else:
                with TensorStore.open(source) as before:
                    assert found.tobytes() == before.read(before.tensors[weight]).tobytes(), weight


@pytest.mark.parametrize("name", CASES)
def test_an_export_in_eight_bits_answers_like_its_source(name: str, folders, tmp_path: Path) -> None:
    """As closely as routers allow, which may choose another expert for a token."""
    source, _ = folders(name)
    list(export_compressed(source, tmp_path / "out", "INT8"))
    wanted = logits(source)
    lost = np.square(logits(tmp_path / "out") - wanted).mean(axis=1)  # of each token
    assert np.median(lost) < 0.1**2 * np.square(wanted).mean() and lost.mean() < 0.2**2 * np.square(wanted).mean()


def test_parts_that_lie_apart_are_joined_as_the_family_publishes_them(folders, tmp_path: Path) -> None:
    """phi3's config asks readers for q, k and v in one matrix, gate and up in another, however the source holds them."""
    source, out = folders("phi3")
    apart = {}
    for name, values in load_file(source / "model.safetensors").items():
        if "qkv_proj" in name:
            q, k, v = values.split([256, (len(values) - 256) // 2, (len(values) - 256) // 2])
            apart |= {name.replace("qkv", part): rows.contiguous() for part, rows in (("q", q), ("k", k), ("v", v))}
        elif "gate_up_proj" in name:
            apart |= {name.replace("gate_up", part): rows.contiguous() for part, rows in zip(("gate", "up"), values.chunk(2), strict=True)}
        else:
            apart[name] = values
    (tmp_path / "apart").mkdir()
    save_file(apart, tmp_path / "apart" / "model.safetensors")
    code = {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
    (tmp_path / "apart" / "config.json").write_text(json.dumps(config(source) | code))
    list(export_compressed(tmp_path / "apart", tmp_path / "out", "INT4"))
    found, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", out))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "model.layers.1.self_attn.qkv_proj.weight_packed" in found and not any("q_proj" in name for name in found)
    assert config(tmp_path / "out") == config(out), "the code that auto_map names does not go along"


def test_the_text_part_of_a_model_that_takes_images_is_a_model_of_its_own(folders, tmp_path: Path) -> None:
    source, out = folders("gemma3")
    said = [item.text for item in export_compressed(source, tmp_path / "again", "INT4") if isinstance(item, Notice)]
    assert said == ["gemma3 takes images too: only its text part is exported, gemma3_text"]
    described, whole = config(out), config(source)
    assert described["model_type"] == "gemma3_text" and described["architectures"] == ["Gemma3ForCausalLM"]
    assert not {"text_config", "vision_config"} & described.keys()
    assert all(described[key] == whole["text_config"][key] for key in ("hidden_size", "layer_types", "rope_parameters"))
    saved(CASES["gemma3_text"], tmp_path / "text")
    with TensorStore.open(tmp_path / "text") as store:
        assert set.union(*names(out)) == set(store.tensors), "the names of a text model"


def test_a_family_that_is_called_with_a_dash_keeps_its_name(tmp_path: Path) -> None:
    """Others know it by no other, and it is no part of a model that takes images."""
    block = {"attention": {"no_op": False, "n_heads_in_group": 2}, "ffn": {"no_op": False, "intermediate_size": 128}}
    saved(Case("nemotron_nas", {**SIZES, "head_dim": 64, "block_configs": [block] * 2}), tmp_path / "model")
    said = [item.text for item in export_compressed(tmp_path / "model", tmp_path / "out", "INT4") if isinstance(item, Notice)]
    assert said == [] and config(tmp_path / "out")["model_type"] == "nemotron-nas"
    engine = list(open_engine(tmp_path / "out", EngineOptions(kv="32bit", device="cpu", ctx=64)))[-1]
    engine.close()


def test_types_of_layers_are_those_of_the_layers_that_are_written(tmp_path: Path) -> None:
    """Published configs of EXAONE 4.5 list the type of one more, which guesses ahead."""
    saved(Case("exaone4", {**SIZES, "head_dim": 64, "sliding_window": 24, "layer_types": KINDS}), tmp_path / "model")
    stated = config(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({**stated, "layer_types": [*KINDS, KINDS[0]]}))
    list(export_compressed(tmp_path / "model", tmp_path / "out", "INT4"))
    assert config(tmp_path / "out")["layer_types"] == KINDS


def test_the_text_part_of_a_mistral_names_the_class_of_its_family(tmp_path: Path) -> None:
    """The class of the whole is spelled otherwise than that of either text model."""
    saved(Case("ministral3", {**SIZES, "head_dim": 64, "rope_parameters": GROWING}, images=True), tmp_path / "model")
    list(export_compressed(tmp_path / "model", tmp_path / "out", "INT4"))
    described = config(tmp_path / "out")
    assert described["model_type"] == "ministral3" and described["architectures"] == ["Ministral3ForCausalLM"]
    assert described["rope_parameters"]["llama_4_scaling_beta"] == 0.3


def test_a_folder_names_the_class_that_reads_it_though_its_source_does_not(tmp_path: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    apart = ("deepseek_ocr2_text", "ernie4_5_vl_moe_text", "glm5_next_text", "gpt_oss", "mistral4", "mistral_large4_text",
             "mllama_text_model", "molmo2_text", "muse_glimmer_text", "rwkv7", "step3p5", "unlimited_ocr_text", *BASE_FAMILY,
             *EMBEDDING_FAMILIES)
    read = [family for family in FAMILIES if family not in apart]
    spelled = {family: kind for kind, family in MODEL_TYPE_ALIASES.items() if "-" in kind}  # which a file's name has not
    wanted = {family: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[spelled.get(family, family)] for family in read}
    assert {family: reader(family) for family in read} == wanted
    *_, made = export_gguf(FABLE, tmp_path / "m.gguf", "F16", "a name")
    assert "architectures" not in json.loads(folder_files(made.path)["config.json"])
    list(export_compressed(made.path, tmp_path / "out", "INT4"))
    assert config(tmp_path / "out")["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(("family", "changes", "why"), [("gpt_neox", {}, "fused by head"), ("internlm2", {}, "fused by group"),
                                                        ("exaone", {}, "with the checkpoint's own code"), ("gpt2", {}, "transposed"),
                                                        ("stablelm", {"qk_layernorm": True}, "separate norms for each head")])
def test_what_other_tools_want_to_lie_otherwise_is_not_written(tmp_path: Path, family: str, changes: dict, why: str) -> None:
    saved(Case(family, changes), tmp_path / "model")
    with pytest.raises(UsageError, match=why):
        list(export_compressed(tmp_path / "model", tmp_path / "out", "INT4"))
