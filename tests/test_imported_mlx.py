"""Folders quantized by MLX: encoded here from its description, read with the same meaning, run from their codes where kernels can."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import Case
from family_models import written as random_model
from gguf_samples import FABLE
from hypothesis import given
from hypothesis import strategies as st
from mlx_checkpoints import CASES, CODES, affine, stream, switched, written
from safetensors.torch import load_file, save_file
from test_paged_models import paged, resident
from test_paged_repacking import QWEN, SLOTS

from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.offload.notes import Fallback
from effllm.quant.imports import mlx
from effllm.quant.weight import Weight, to_f32
from effllm.runtime import families
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.engine import EngineOptions, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.library.local_model import local_model
from effllm.runtime.source import is_low_bit, open_store, open_weights
from effllm.runtime.stores.expected_formats import expected_formats
from effllm.runtime.stores.import_config import quantization_section
from effllm.runtime.stores.mlx_names import canonicalize_mlx_names
from effllm.runtime.stores.tensor_views import gathered_rows

IDS = [0, 1, 17, 300, 2, 4000, 91, 1234]
UP = "model.layers.1.mlp.up_proj"


def logits_of(folder: Path, **options: object) -> tuple[np.ndarray, list[str]]:
    """Of all of IDS, and what was said when the model was opened."""
    *items, engine = open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=2, **options))
    logits = engine.forward_logits(IDS).copy()
    engine.close()
    return logits, [item.text for item in items if isinstance(item, Notice)]


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, np.ndarray]]:
    """A case's name, its folder, for reading alone, and what its weights mean."""
    folder = tmp_path_factory.mktemp("mlx") / "m"
    return request.param, folder, written(folder, request.param)


@given(bits=st.sampled_from(mlx.BITS), seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), groups=st.integers(1, 4))
def test_a_stream_of_bits_is_its_codes(bits: int, seed: int, rows: int, groups: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 32 * groups))
    packed = stream(codes, bits).numpy().view(np.uint8).reshape(rows, -1)
    np.testing.assert_array_equal(mlx.unpack_codes(packed, bits), codes)


@given(depth=st.integers(0, 700), packed=st.integers(0, 300), groups=st.integers(0, 30), affine_=st.booleans())
def test_a_form_is_one_of_mlx_or_none(depth: int, packed: int, groups: int, affine_: bool) -> None:
    form = mlx.infer_format(depth, packed, groups, affine_)
    if form is not None:
        assert form.bits * depth == 32 * packed and form.group * groups == depth and (form.mode == "affine") == affine_
        assert form.spec is None or form.spec.bits == form.bits


def test_weights_are_what_they_mean(checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    """Codes to the last bit, and whole tensors of them also when read in chunks; what has no such format is widened, in any rows."""
    name, folder, meant = checkpoint
    store, container = open_weights(folder)
    with store:
        found = {} if container is None else container.tensors
        assert len(found) == (43 if name in CODES else 0) and is_low_bit(folder) == (name in CODES)
        for tensor, stored in found.items():
            blob = store.read(store.tensors[tensor])
            assert blob.nbytes == stored.nbytes == store.tensors[tensor].nbytes
            values = Weight.low_bit(stored.spec, stored.shape, blob).to_f32()
            if "floats" in name:  # whose scales and biases become halves
                grouped = np.abs(meant[tensor]).reshape(len(values), -1, 64)
                assert (np.abs(values - meant[tensor]).reshape(grouped.shape) <= grouped.max(-1, keepdims=True) * 2.0**-10).all()
                assert (values != meant[tensor]).any() and any("rounded to half" in notice for notice in store.notices)
            else:
                np.testing.assert_array_equal(values, meant[tensor], err_msg=tensor)
        repack_plan = store.repack_plan([store.tensors[f"{UP}.weight"]])
        (piece,), out = repack_plan.pieces(), np.zeros(repack_plan.nbytes[0], np.uint8)
        raws = [np.fromfile(each.file, np.uint8, each.nbytes, offset=each.offset) for each in piece.ranges]
        assert sum(raw.nbytes for raw in raws) == repack_plan.file_nbytes == store.stored_nbytes(store.tensors[f"{UP}.weight"])
        piece.put(raws, [out])
        np.testing.assert_array_equal(out, store.read(store.tensors[f"{UP}.weight"]))
    with open_store(folder, dequant_dtype="f32") as store:
        for tensor, values in meant.items():
            info = store.tensors[tensor]
            raw = store.read(info, len(values) // 3, len(values))
            np.testing.assert_array_equal(to_f32(raw.view(np.float32), "f32").reshape(-1, *values.shape[1:]), values[len(values) // 3 :])


@pytest.mark.parametrize("checkpoint", ["affine 4", "affine 8", "mxfp8"], indirect=True)
def test_they_run_and_are_announced(tmp_path: Path, checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    (name, folder, meant), plain = checkpoint, tmp_path / "plain"
    plain.mkdir()
    save_file({tensor: torch.from_numpy(values) for tensor, values in meant.items()}, plain / "model.safetensors")
    (plain / "config.json").write_bytes((FABLE / "config.json").read_bytes())
    (ours, said), (wanted, _) = logits_of(folder, exact=True), logits_of(plain, exact=True)
    assert any("43 MLX weights of" in text and ("repacked" if name in CODES else "widened to bf16") in text for text in said)
    assert np.abs(ours - wanted).max() < 2e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("checkpoint", ["affine 4", "affine 3"], indirect=True)
def test_a_list_counts_weights_and_not_words(checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    name, folder, meant = checkpoint
    facts = local_model("m", folder)
    assert facts.params == sum(values.size for values in meant.values()) and abs(facts.bits - float(name[-1])) < 0.6


def test_a_plan_expects_what_the_files_hold(checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    _, folder, _ = checkpoint
    raw = json.loads((folder / "config.json").read_text())
    formats, config = expected_formats(quantization_section(raw)), read_config(folder)
    family = families.get(config.family)
    store, container = open_weights(folder)
    with store:
        for role, rule in (family.outer_tensors(config) | family.layer_tensors(config, 2)).items():
            expected = formats(role, rule)
            if len(rule.shape) == 2:
                assert expected.nbytes(rule.shape) == store.tensors[rule.name].nbytes
                assert (rule.name in container.tensors if container else False) == (not expected.is_raw)


def test_experts_that_lie_as_one_and_routers(tmp_path: Path) -> None:
    random_model(Case("qwen3_moe", {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4,
                                    "num_experts_per_tok": 2, "num_hidden_layers": 2, "norm_topk_prob": True}), tmp_path)
    meant = switched(tmp_path)
    store, container = open_weights(tmp_path)
    with store:
        routers = [name for name in meant if name.endswith("mlp.gate.weight")]
        assert len(routers) == 2 and not container.tensors.keys() & {*routers}, "routers choose: they are what their codes mean"
        for name in routers:
            assert store.tensors[name].dtype == "F32"
            np.testing.assert_array_equal(store.read(store.tensors[name]).view(np.float32).reshape(meant[name].shape), meant[name])
        assert not [said for said in store.notices if isinstance(said, Fallback)]
        experts = [name for name in meant if ".experts." in name]
        assert len(experts) == 2 * 4 * 3
        for name in experts:
            stored = container.tensors[name]
            values = Weight.low_bit(stored.spec, stored.shape, store.read(store.tensors[name])).to_f32()
            np.testing.assert_array_equal(values, meant[name], err_msg=name)
    *_, engine = open_engine(tmp_path, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=2, strict=True))
    assert np.isfinite(engine.forward_logits([1, 5, 9])).all()
    engine.close()


def test_experts_from_the_disk_give_the_same_bits(tmp_path: Path) -> None:
    random_model(QWEN, tmp_path)
    switched(tmp_path)
    assert np.array_equal(paged(tmp_path, SLOTS), resident(tmp_path))


def test_matrices_that_lie_in_one_another_keep_their_codes(tmp_path: Path) -> None:
    """By rows that take turns: of Qwen 3 Next what reads a layer's input."""
    random_model(Case("qwen3_next", {
        "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16}), tmp_path)
    meant, found = switched(tmp_path), gathered_rows(read_config(tmp_path))
    store, container = open_weights(tmp_path)
    with store:
        coded = {name: each for name, each in found.items() if name in container.tensors}
        assert {name.split(".")[-2] for name in coded} == {"in_proj_qkv", "in_proj_z"} and len(found) == 4
        for name, (whole, rows) in coded.items():
            stored, info = container.tensors[name], store.tensors[name]
            values = Weight.low_bit(stored.spec, stored.shape, store.read(info)).to_f32()
            np.testing.assert_array_equal(values, meant[whole][rows], err_msg=name)
            assert store.repack_plan([info]) is None and store.stored_nbytes(info) == len(rows) * (64 // 2 + 2 * 4)
    with open_store(tmp_path, dequant_dtype="f32") as store:
        for name, (whole, rows) in found.items():
            read = store.read(store.tensors[name], 1, len(rows) - 1).view(np.float32).reshape(-1, 64)
            np.testing.assert_array_equal(read, meant[whole][rows][1:-1], err_msg=name)


LATENT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
          "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24, "first_k_dense_replace": 2,
          "intermediate_size": 96, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
          "moe_intermediate_size": 32}
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


def by_heads(folder: Path, keys_in_codes: bool) -> np.ndarray:
    """A model of latent attention as MLX has it; returns what the matrix of the second layer means."""
    random_model(Case("deepseek_v3", LATENT), folder)
    meant, tensors = switched(folder), load_file(folder / "model.safetensors")
    for layer in range(2):
        before = f"model.layers.{layer}.self_attn."
        own = meant[f"{before}kv_b_proj.weight"].reshape(4, 32 + 24, 64)
        for ending in ("weight", "scales", "biases"):
            del tensors[f"{before}kv_b_proj.{ending}"]
        keys, values = own[:, :32].transpose(0, 2, 1).reshape(4 * 64, 32), own[:, 32:].reshape(4 * 24, 64)
        for name, part, codes in (("embed_q", keys, keys_in_codes), ("unembed_out", values, True)):
            parts, meaning = affine(part, 4, 32) if codes else ({"weight": torch.from_numpy(part.copy())}, part)
            tensors |= {f"{before}{name}.{ending}": each.reshape(4, -1, each.shape[-1]) for ending, each in parts.items()}
            if name == "embed_q":
                own[:, :32] = meaning.reshape(4, 64, 32).transpose(0, 2, 1)
            else:
                own[:, 32:] = meaning.reshape(4, 24, 64)
    save_file(tensors, folder / "model.safetensors")
    return own.reshape(-1, 64)


@pytest.mark.parametrize("keys_in_codes", [True, False])
def test_what_lies_by_heads_is_one_matrix_again(tmp_path: Path, keys_in_codes: bool) -> None:
    meant = by_heads(tmp_path, keys_in_codes)
    with open_store(tmp_path, dequant_dtype="f32") as store:
        info = store.tensors[KV_B]
        assert not any("embed_q" in name or "unembed_out" in name for name in store.tensors)
        np.testing.assert_array_equal(store.read(info).view(np.float32).reshape(info.shape), meant)
        for begin, end in ((0, 1), (31, 33), (55, 57), (100, 224)):
            np.testing.assert_array_equal(store.read(info, begin, end).view(np.float32).reshape(-1, 64), meant[begin:end])
    store, container = open_weights(tmp_path)
    with store:
        assert KV_B not in container.tensors and store.tensors[KV_B].dtype == "F16"


def test_heads_of_another_shape_are_named(tmp_path: Path) -> None:
    by_heads(tmp_path, True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: part[:, :16].clone() if "unembed_out" in name else part for name, part in tensors.items()},
              tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unembed_out.weight has shape \[64, 64\], the config says \[96, 64\]"):
        open_weights(tmp_path)


@pytest.mark.parametrize(("family", "theirs", "own"), [
    ("lfm2_moe", "model.layers.0.feed_forward.up_proj.scales", "model.layers.0.feed_forward.w3.scales"),
    ("granitemoe", "model.layers.0.block_sparse_moe.router.layer.biases", "model.layers.0.block_sparse_moe.gate.biases"),
    ("granitemoehybrid", "model.layers.0.mlp.down_proj.weight", "model.layers.0.shared_mlp.output_linear.weight"),
    ("nemotron_h", "model.layers.1.mixer.switch_mlp.fc2.weight", "model.layers.1.mixer.experts.1.down_proj.weight"),
    ("minimax_m2", "model.layers.1.block_sparse_moe.switch_mlp.up_proj.weight", "model.layers.1.block_sparse_moe.experts.1.w3.weight"),
    ("gpt_oss", "model.layers.1.mlp.experts.gate_proj.bias", "model.layers.1.mlp.experts.1.gate_proj.bias")])
def test_names_are_those_of_the_publisher(tmp_path: Path, family: str, theirs: str, own: str) -> None:
    shape = (2, 8) if theirs.endswith("bias") else (2, 8, 4) if ".experts." in own else (16, 4)
    save_file({theirs: torch.arange(16 * (1 if len(shape) == 2 and shape[0] == 2 else 4)).reshape(shape).float()},
              tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as store:
        whole = store.read(store.tensors[theirs]).view(np.float32).reshape(shape)
        canonicalize_mlx_names(store, family)
        values = store.read(store.tensors[own]).view(np.float32)
        np.testing.assert_array_equal(values, whole[1].reshape(-1) if ".experts." in own else whole.reshape(-1))


def test_multipliers_that_are_in_the_weights_are_not_multiplied_again() -> None:
    raw = {"model_type": "falcon_h1", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
           "vocab_size": 300, "mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_norm_before_gate": False,
           "embedding_multiplier": 5.7, "key_multiplier": 0.4, "mlp_multipliers": [0.9, 0.6]}
    config = parse_config(raw | {"quantization": {"bits": 4, "group_size": 64}})
    assert config.embedding_multiplier == 1.0 and config.multipliers == () and parse_config(raw).multipliers
    assert config.attn_scale == parse_config({key: value for key, value in raw.items() if "multiplier" not in key}).attn_scale


def test_gpt_oss_says_twice_how_it_was_quantized() -> None:
    section = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    raw = {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 300, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    assert parse_config(raw | {"quantization": section, "quantization_config": section}).expert_format is None
    with pytest.raises(ConfigError, match="quant_method"):
        parse_config(raw | {"quantization_config": section})


def refused(tmp_path: Path, change: dict[str, torch.Tensor | None]) -> str:
    """What is said of a folder some of whose tensors are others, or absent."""
    written(tmp_path / "m", "affine 4")
    tensors = load_file(tmp_path / "m" / "model.safetensors") | change
    save_file({name: part for name, part in tensors.items() if part is not None}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        store, _ = open_weights(tmp_path / "m")
        with store:
            store.read(store.tensors[f"{UP}.weight"])
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize(("ending", "part", "said"), [
    ("weight", torch.zeros(768, 33, dtype=torch.uint32), "weight U32 [768, 33]"),
    ("weight", torch.zeros(768, 32, dtype=torch.int32), "I32"),
    ("scales", torch.zeros(768, 3, dtype=torch.bfloat16), "scales BF16 [768, 3]"), ("scales", torch.zeros(767, 4), "scales F32 [767, 4]"),
    ("biases", None, "for 256 inputs"), ("biases", torch.zeros(768, 4, dtype=torch.int32), "biases I32"),
    ("scales", torch.full((768, 4), float("nan"), dtype=torch.bfloat16), "a scale or bias is NaN")])
def test_parts_that_do_not_fit_are_named(tmp_path: Path, ending: str, part: torch.Tensor | None, said: str) -> None:
    message = refused(tmp_path, {f"{UP}.{ending}": part})
    assert UP in message and said in message


@pytest.mark.parametrize(("change", "said"), [
    ({"bits": 7}, "bits 7"), ({"bits": "4"}, "bits '4'"), ({"group_size": 48}, "group_size 48"), ({"mode": "mxfp4"}, "mode 'mxfp4'"),
    ({"mode": "other"}, "mode 'other'"), ({"group_size": None}, "group_size None")])
def test_a_section_that_says_something_else_is_refused(change: dict[str, object], said: str) -> None:
    raw = json.loads((FABLE / "config.json").read_text())
    with pytest.raises(ConfigError) as caught:
        parse_config(raw | {"quantization": {"bits": 4, "group_size": 64} | change})
    assert said in caught.value.message and "of MLX: affine" in caught.value.hint


def test_a_family_that_was_not_compared_is_refused() -> None:
    raw = json.loads((FABLE / "config.json").read_text()) | {"quantization": {"bits": 4, "group_size": 64}}
    parse_config(raw)
    with pytest.raises(ConfigError, match="MLX-quantized weights are not supported for arcee models"):
        parse_config(raw | {"model_type": "arcee", "architectures": ["ArceeForCausalLM"], "hidden_act": "relu2"})
