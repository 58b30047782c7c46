"""Quantized checkpoints of other tools: encoded here from each format's description, value by value, and read with the same meaning."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bitsandbytes_checkpoints import as_bytes_by_row, as_levels
from fp8_fp4_checkpoints import as_fbgemm, as_fp8, as_mxfp4, as_mxfp4_packed, as_mxfp8, as_nvfp4, quark
from gguf_samples import FABLE, weights
from safetensors.torch import save_file
from saved_tokenizers import with_words_of_fable

from effllm import EffllmError
from effllm.offload.checkpoint import CheckpointError
from effllm.quant.codes import bf16
from effllm.quant.imports import awq, compressed_tensors, fp8, gptq
from effllm.quant.weight import Weight, from_f32, to_f32
from effllm.runtime.convert import ConvertOptions, convert, recipe_of
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.source import is_low_bit, open_store, open_weights

IDS = [0, 1, 17, 300, 2, 4000, 91, 1234]
GROUP = 64


def halves(values: np.ndarray) -> np.ndarray:
    return to_f32(from_f32(values, "f16"), "f16")


def parted(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], zero points [N, G] and half-precision scales [N, G] of some weight near `values`; the test needs no good one."""
    n, k = values.shape
    grouped = values.reshape(n, k // GROUP, GROUP)
    low, top = grouped.min(-1), (1 << bits) - 1
    scales = halves(np.maximum((grouped.max(-1) - low) / top, 1e-4).astype(np.float32))
    zeros = np.clip(np.rint(-low / scales), 1, top).astype(int)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], 0, top).astype(int)
    return codes.reshape(n, k), zeros, scales


def meaning(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return (scales[:, groups] * (codes - zeros[:, groups]).astype(np.float32)).astype(np.float32)


def stream(values: np.ndarray, bits: int) -> np.ndarray:
    """[M, L] -> int32 [M, L * bits / 32]: numbers one after the other, the lowest bit first."""
    out = []
    for row in values.tolist():
        number = sum(value << (bits * i) for i, value in enumerate(row))
        out.append([(number >> (32 * i)) & 0xFFFFFFFF for i in range(len(row) * bits // 32)])
    return np.array(out, np.uint32).view(np.int32)


def as_gptq(values: np.ndarray, bits: int, ordered: bool = False, plus_one: bool = True):
    codes, zeros, scales = parted(values, bits)
    groups = np.arange(values.shape[1]) // GROUP
    if ordered:
        groups = np.random.default_rng(0).permutation(groups)
    parts = {"qweight": stream(codes, bits).T, "qzeros": stream((zeros - plus_one).T, bits), "scales": scales.T.astype(np.float16),
             "g_idx": groups.astype(np.int32)}
    return parts, meaning(codes, zeros, scales, groups)


def as_awq(values: np.ndarray):
    codes, zeros, scales = parted(values, 4)

    def words(numbers: np.ndarray) -> np.ndarray:
        """[R, N] -> [R, N / 8]."""
        out = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
        for place, source in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out |= numbers[:, source::8].astype(np.uint32) << np.uint32(4 * place)
        return out.view(np.int32)

    parts = {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T.astype(np.float16)}
    return parts, meaning(codes, zeros, scales, np.arange(values.shape[1]) // GROUP)


def as_compressed(values: np.ndarray, bits: int, asymmetric: bool, scale: str = "f16"):
    codes, zeros, scales = parted(values, bits)
    if scale == "row":
        codes, scales = codes % 200, scales[:, :1]
        zeros = np.full(scales.shape, 128)
    if scale == "bf16":  # far beyond what half precision holds, also within a row
        scales = bf16(np.ldexp(scales, np.arange(scales.size).reshape(scales.shape) % 30 - 40)).astype(np.float32)
    if not asymmetric:
        zeros = np.full_like(zeros, 1 << (bits - 1))
    if scale == "f32":
        scales = (scales * np.float32(1.0003)).astype(np.float32)
    parts = {"weight_packed": stream(codes, bits), "weight_scale": torch.from_numpy(scales).to(
        {"bf16": torch.bfloat16, "f32": torch.float32}.get(scale, torch.float16)), "weight_shape": np.array(values.shape)}
    if asymmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(stream(zeros.T, bits).T)
    return parts, meaning(codes, zeros, scales, np.arange(values.shape[1]) // (values.shape[1] if scale == "row" else GROUP))


def as_bytes(values: np.ndarray, bits: int, kind: str, asymmetric: bool = False):
    """int-quantized: signed bytes, with scales per `kind`."""
    n, k = values.shape
    high, wide = {"rows": (1, k), "groups": (1, GROUP), "one": (n, k), "blocks": (128, 80), "whole blocks": (64, 128)}[kind]
    shape = (-(-n // high), -(-k // wide))
    rng = np.random.default_rng(2)
    scales = halves((rng.random(shape, np.float32) + 0.5) / 2**bits / 8)
    zeros = rng.integers(-3, 4, shape) if asymmetric else np.zeros(shape, int)
    spread = lambda each: np.repeat(np.repeat(each, high, 0)[:n], wide, 1)[:, :k]  # noqa: E731
    low = -(1 << (bits - 1))
    codes = np.clip(np.rint(values / spread(scales)) + spread(zeros), low, -1 - low).astype(np.int8)
    parts = {"weight": codes, "weight_scale": (scales.reshape(1) if kind == "one" else scales).astype(np.float16)}
    if asymmetric:
        parts["weight_zero_point"] = zeros.astype(np.int8).reshape(parts["weight_scale"].shape)
    return parts, (spread(scales) * (codes - spread(zeros)).astype(np.float32)).astype(np.float32)


def plain(written: str, **weights: object) -> dict[str, object]:
    return {"quant_method": "compressed-tensors", "format": written, "config_groups": {"group_0": {"weights": weights}}}


CASES = {
    "bytes, a scale per row": (plain("int-quantized", num_bits=8, type="int", strategy="channel"), lambda v: as_bytes(v, 8, "rows")),
    "bytes, zero points": (plain("int-quantized", num_bits=8, strategy="group", group_size=GROUP),
                           lambda v: as_bytes(v, 8, "groups", True)),
    "bytes, one scale": (plain("naive-quantized", num_bits=8, type="int", strategy="tensor"), lambda v: as_bytes(v, 8, "one", True)),
    "bytes of 4 bits": (plain("int-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
                        lambda v: as_bytes(v, 4, "groups", True)),
    "bytes, blocks": (plain("int-quantized", num_bits=8, type="int", block_structure=[128, 80]), lambda v: as_bytes(v, 8, "blocks")),
    "bytes, whole blocks": (plain("int-quantized", num_bits=8, block_structure=[64, 128]), lambda v: as_bytes(v, 8, "whole blocks")),
    "float-quantized": (plain("float-quantized", num_bits=8, type="float", strategy="channel"), lambda v: as_fp8(v, "rows")),
    "float-quantized blocks": (plain("float-quantized", num_bits=8, type="float", block_structure=[128, 128]),
                               lambda v: as_fp8(v, "blocks", "weight_scale")),
    "gptq 4": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, lambda v: as_gptq(v, 4)),
    "gptq 4, act order": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, lambda v: as_gptq(v, 4, True)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, lambda v: as_gptq(v, 8)),
    "gptq 3": ({"quant_method": "gptq", "bits": 3, "group_size": GROUP}, lambda v: as_gptq(v, 3)),
    "gptq 2, second version": ({"quant_method": "gptq", "bits": 2, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
                               lambda v: as_gptq(v, 2, plus_one=False)),
    "gptq 4, format gptq_v2": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "format": "gptq_v2",
                                "dynamic": {"-:.*gate": {}, "+:.*down.*": {"group_size": GROUP}}},
                               lambda v: as_gptq(v, 4, plus_one=False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, as_awq),
    "int4": (plain("pack-quantized", num_bits=4, group_size=GROUP), lambda v: as_compressed(v, 4, False)),
    "int4, zero points": (plain("pack-quantized", num_bits=4, group_size=GROUP), lambda v: as_compressed(v, 4, True)),
    "int4, bf16 scales": (plain("pack-quantized", num_bits=4, group_size=GROUP), lambda v: as_compressed(v, 4, False, "bf16")),
    "int4, f32 scales": (plain("pack-quantized", num_bits=4, group_size=GROUP), lambda v: as_compressed(v, 4, True, "f32")),
    "int8, a scale per row": (plain("pack-quantized", num_bits=8), lambda v: as_compressed(v, 8, False, "row")),
    "int8": (plain("pack-quantized", num_bits=8, group_size=GROUP), lambda v: as_compressed(v, 8, False)),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, lambda v: as_fp8(v, "blocks")),
    "fp8 blocks, powers of two": ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
                                  lambda v: as_fp8(v, "blocks", powers=True)),
    "mxfp4 beside fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, as_mxfp4),
    "mxfp4": (plain("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), as_mxfp4_packed),
    "mxfp8": (plain("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32), as_mxfp8),
    "fp8 rows": ({"quant_method": "fp8"}, lambda v: as_fp8(v, "rows")),
    "nvfp4": (plain("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
              lambda v: as_nvfp4(v, ("weight_packed", "weight_global_scale"), True)),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"},
                       lambda v: as_nvfp4(v, ("weight", "weight_scale_2"), False)),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda v: as_fp8(v, "one")),
    "fp8, one scale": ({"quant_method": "fp8"}, lambda v: as_fp8(v, "one")),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, as_fbgemm),
    "quark fp8": (quark({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}), lambda v: as_fp8(v, "rows", "weight_scale")),
    "quark mxfp4": (quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}),
                    lambda v: as_mxfp4_packed(v, "weight")),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, lambda v: as_levels(v, double=True)),
    "bytes by row": ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, as_bytes_by_row),
}


def written(folder: Path, name: str, layers: int = 6) -> dict[str, np.ndarray]:
    """fable, or its first layers, as such a checkpoint; returns what its weights mean."""
    section, quantize = CASES[name]
    folder.mkdir()
    tensors, meant = {}, {}
    for tensor, values in weights(FABLE).items():
        if tensor.startswith("model.layers.") and int(tensor.split(".")[2]) >= layers:
            continue
        meant[tensor] = values
        if "_proj" not in tensor:
            tensors[tensor] = torch.from_numpy(values)
            continue
        parts, meant[tensor] = quantize(values)
        base = tensor.removesuffix("weight")
        tensors |= {base + part: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value)).contiguous()
                    for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((FABLE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": layers, "quantization_config": section}))
    with_words_of_fable(folder)
    return meant


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, np.ndarray]]:
    """A case's name, its folder, for reading alone, and what its weights mean."""
    folder = tmp_path_factory.mktemp("imported") / "m"
    return request.param, folder, written(folder, request.param, layers=2)


def test_weights_mean_what_their_format_says(checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    """To the last bit, whole and by rows."""
    _, folder, meant = checkpoint
    with open_store(folder, dequant_dtype="f32") as store:
        assert set(store.tensors) == set(meant)
        for tensor, values in meant.items():
            info = store.tensors[tensor]
            if info.dtype == "F32":
                np.testing.assert_array_equal(store.read(info).view(np.float32).reshape(values.shape), values, err_msg=tensor)
                np.testing.assert_array_equal(store.read(info, 3, 40).view(np.float32), values[3:40].reshape(-1))


CODES = ("gptq 4", "gptq 4, format gptq_v2", "gptq 8", "awq", "int4", "int4, zero points", "int4, bf16 scales", "int8",
         "int8, a scale per row", "bytes, a scale per row", "bytes, zero points", "bytes, one scale", "bytes of 4 bits",
         "bytes, whole blocks", "float-quantized", "float-quantized blocks", "fp8 blocks", "fp8 blocks, powers of two", "fp8 rows",
         "mxfp4", "mxfp4 beside fp8", "fp8, one scale", "fbgemm", "quark fp8", "quark mxfp4", "nvfp4", "modelopt nvfp4", "modelopt fp8",
         "bytes by row")

# Levels and scales that become whole numbers (`test_imported_bitsandbytes.py` says how near), and scales that become halves.
ROUNDED = {"nf4": 2e-4, "int4, f32 scales": 2.0**-22}


def test_codes_of_the_kernels_lose_nothing(checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    """To the last bit; what has no such form stays wide."""
    name, folder, meant = checkpoint
    store, container = open_weights(folder)
    with store:
        found = {} if container is None else container.tensors
        assert len(found) == (14 if name in (*CODES, *ROUNDED) else 0)
        assert is_low_bit(folder) == (name in (*CODES, *ROUNDED, "gptq 4, act order", "bytes, blocks"))
        for tensor, stored in found.items():
            blob = store.read(store.tensors[tensor])
            assert blob.nbytes == stored.nbytes == store.tensors[tensor].nbytes
            values = Weight.low_bit(stored.spec, stored.shape, blob).to_f32()
            if name in ROUNDED:
                assert 0 < np.square(values - meant[tensor]).mean() < ROUNDED[name] * np.square(meant[tensor]).mean(), tensor
            else:
                np.testing.assert_array_equal(values, meant[tensor], err_msg=tensor)
        assert any("rounded to half" in notice for notice in store.notices) == (name == "int4, f32 scales")
        if name == "gptq 4":
            assert {str(stored.spec) for stored in found.values()} == {"offset4:64"}
            assert 4 < container.bits_per_weight < 16  # fable's embedding is in float32
        if name == "bytes of 4 bits":
            assert {str(stored.spec) for stored in found.values()} == {"offset4:64"}


@pytest.mark.parametrize("checkpoint", ["gptq 4", "gptq 4, act order", "awq", "int4, zero points", "bytes, a scale per row",
                                        "bytes, blocks", "float-quantized", "fp8 blocks"], indirect=True)
def test_they_run_and_are_announced(tmp_path: Path, checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    name, written_folder, meant = checkpoint
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({tensor: torch.from_numpy(values).to(torch.float16 if "_proj" in tensor and name not in CODES else torch.float32)
               for tensor, values in meant.items()}, plain / "model.safetensors")
    config = json.loads((FABLE / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    logits = []
    for folder in (written_folder, plain):
        items = list(open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=name in CODES)))
        engine, said = items[-1], [item.text for item in items if isinstance(item, Notice)]
        what = "repacked" if name in CODES else "widened to f16"
        assert isinstance(engine, Engine) and any("14 " in text and what in text for text in said) == (folder != plain)
        assert any("activation order" in text for text in said) == (folder != plain and "act order" in name)
        logits.append(engine.forward_logits(IDS).copy())
        engine.close()
    if name not in CODES:
        np.testing.assert_array_equal(*logits)
        return
    assert np.abs(logits[0] - logits[1]).max() < 2e-5 * np.abs(logits[1]).max()
    *_, engine = open_engine(written_folder, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1))
    most = 2e-5 if "fp8" in name or "float" in name else 0.05  # where activations are rounded
    assert np.abs(engine.forward_logits(IDS) - logits[1]).max() < most * np.abs(logits[1]).max()
    engine.close()


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    written(tmp_path / "m", "int4")
    whole = load_file(tmp_path / "m" / "model.safetensors")
    whole["model.layers.1.mlp.up_proj.weight_scale"][3, 1] = float("inf")
    save_file(whole, tmp_path / "m" / "model.safetensors")
    store, _ = open_weights(tmp_path / "m")
    with store, pytest.raises(CheckpointError, match="up_proj.*a scale is NaN"):
        store.read(store.tensors["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("family, codes", [("phi3", {"self_attn.o_proj", "mlp.down_proj"}),
                                           ("glm4", {f"self_attn.{each}_proj" for each in "qkvo"} | {"mlp.down_proj"})])
def test_weights_that_are_read_in_parts_stay_wide(family: str, codes: set[str], tmp_path: Path) -> None:
    """Phi 3 and GLM fuse gate and up: rows of a packed blob would be no blob."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        family, vocab_size=96, hidden_size=64, head_dim=16, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, max_position_embeddings=64))
    model.save_pretrained(tmp_path / "m")
    section, quantize = CASES["int4"]
    tensors = {}
    for name, values in weights(tmp_path / "m").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = torch.from_numpy(values)
            continue
        parts, _ = quantize(values)
        tensors |= {name.removesuffix("weight") + part: torch.as_tensor(np.array(value)).contiguous() for part, value in parts.items()}
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw | {"quantization_config": section}))
    store, container = open_weights(tmp_path / "m")
    with store:
        assert {name.rpartition("layers.0.")[2] for name in container.tensors} == {f"{each}.weight" for each in codes}
    *_, engine = open_engine(tmp_path / "m", EngineOptions(device="cpu", ctx=64, threads=1))
    assert np.isfinite(engine.forward_logits([1, 2, 3])).all()
    engine.close()


def test_they_are_quantized_again(tmp_path: Path) -> None:
    written(tmp_path / "m", "awq")
    *_, made = convert(tmp_path / "m", tmp_path / "out", ConvertOptions(recipe_of("8bit", (), "rtn"), "8bit", threads=1))
    *_, engine = open_engine(made.folder, EngineOptions(device="cpu", ctx=64, threads=1))
    assert np.isfinite(engine.forward_logits(IDS)).all()
    engine.close()


def test_parts_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    written(tmp_path / "m", "gptq 4")
    whole = load_file(tmp_path / "m" / "model.safetensors")
    base = "model.layers.1.mlp.up_proj."
    for change, named in (({"qzeros": None}, "qzeros"), ({"scales": torch.zeros(3, 5)}, "do not fit"), ({"g_idx": torch.full(
            (256,), 99, dtype=torch.int32)}, "do not fit"), ({"qweight": torch.zeros(32, 768)}, "qweight")):
        tensors = whole | {base + key: value for key, value in change.items()}
        save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / "m" / "model.safetensors")
        with pytest.raises((CheckpointError, EffllmError)) as caught, open_store(tmp_path / "m") as store:
            for info in store.tensors.values():
                store.read(info)
        assert named in caught.value.message and "up_proj" in caught.value.message


def test_bytes_beyond_their_config_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    written(tmp_path / "m", "bytes of 4 bits")
    whole = load_file(tmp_path / "m" / "model.safetensors")
    base = "model.layers.1.mlp.up_proj."
    assert whole[base + "weight"].shape == (768, 256)
    for change, named in (({"weight": torch.full((768, 256), 9, dtype=torch.int8)}, "beyond the 4 bits"),
                          ({"weight_scale": None}, "without"), ({"weight_scale": torch.ones(768, 3)}, "do not fit"),
                          ({"weight_scale": torch.ones(3, 4, 5)}, "do not fit"),
                          ({"weight_zero_point": torch.zeros(768, 1, dtype=torch.int8)}, "zero points")):
        tensors = whole | {base + key: value for key, value in change.items()}
        save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / "m" / "model.safetensors")
        for low_bit in (False, True):
            with pytest.raises(CheckpointError) as caught, open_store(tmp_path / "m", low_bit=low_bit) as store:
                store.read(store.tensors[base + "weight"])
            assert named in caught.value.message and "up_proj" in caught.value.message


def test_scales_of_activations_and_caches_are_no_weights(tmp_path: Path) -> None:
    """A checkpoint for servers that round activations and caches too: those stay as they are here."""
    from safetensors.torch import load_file

    meant = written(tmp_path / "m", "bytes, a scale per row")
    whole = load_file(tmp_path / "m" / "model.safetensors")
    for name in ("mlp.up_proj.input_scale", "mlp.up_proj.input_zero_point", "self_attn.k_scale", "self_attn.v_scale"):
        whole[f"model.layers.0.{name}"] = torch.ones(1)
    save_file(whole, tmp_path / "m" / "model.safetensors")
    with open_store(tmp_path / "m") as store:
        assert set(store.tensors) == set(meant)


def test_as_many_blocks_as_rows() -> None:
    """Blocks are not taken for a scale per row where there are as many."""
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32) & np.uint8(0x77)
    scales = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    meant = fp8.VALUES[codes] * np.repeat(np.repeat(scales, 4, 0), 8, 1)
    np.testing.assert_array_equal(fp8.dequantize(codes, scales), meant)


def test_codes_of_eight_bit_floats() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(fp8.VALUES, codes.view(torch.float8_e4m3fn).float().numpy())


def test_shapes_that_cannot_be_are_refused() -> None:
    one = np.zeros((8, 8), np.int32)
    scale = np.ones((3, 5), np.float32)
    for attempt in (lambda: gptq.decode(one, one, scale, np.zeros(64, int), 4, True), lambda: awq.decode(one, one, scale, 7),
                    lambda: compressed_tensors.decode(one, scale, None, None, 4, (8, 64)),
                    lambda: fp8.dequantize(np.zeros((8, 8), np.uint8), np.ones((3, 3), np.float32))):
        with pytest.raises(ValueError):
            attempt()
