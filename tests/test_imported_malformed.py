"""Malformed quantized checkpoints of other tools: each is refused in one line, whatever it claims."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_imported import CASES

from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.offload.safetensors_header import TensorInfo
from effllm.quant.codebooks import MXFP
from effllm.quant.codes import Codes
from effllm.quant.imports import bitsandbytes, fp8, groups, mxfp4, nvfp4
from effllm.quant.pack import pack
from effllm.quant.weight import from_f32
from effllm.runtime.stores.imported import ImportedStore

BASE = "model.layers.0.mlp.up_proj."
SHAPE = (192, 256)
DEPTHS = {f"{BASE}weight": SHAPE[1]}  # as a model says them


def parts_of(name: str) -> dict[str, torch.Tensor]:
    values = np.random.default_rng(4).standard_normal(SHAPE).astype(np.float32) / 50
    parts, _ = CASES[name][1](values)
    return {key: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value)).contiguous()
            for key, value in parts.items()}


def read(folder: Path, name: str, parts: dict[str, torch.Tensor], low_bit: bool) -> np.ndarray:
    """The bytes of the weight."""
    save_file({BASE + key: value.contiguous() for key, value in parts.items()}, folder / "model.safetensors")
    with TensorStore.open(folder) as files, ImportedStore(files, CASES[name][0], "f32", low_bit, input_widths=DEPTHS) as store:
        return store.read(store.tensors[f"{BASE}weight"])


def lies(part: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The part in other ranks, sizes and types."""
    flat = part.reshape(-1)
    yield "flat", flat
    yield "in a row", part.reshape(1, *part.shape)
    yield "of columns", part.reshape(*part.shape, 1)
    yield "one", flat[0]
    for short in (part[:0], part[:-1], part[..., :-1], part[..., :0], part[..., :1]) if part.ndim else ():
        yield f"of {list(short.shape)}", short
    if part.ndim == 2:
        yield "turned", part.T
    wide = part.float()
    for kind in (torch.float32, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool):
        if kind != part.dtype:
            yield f"as {kind}", wide.to(kind)
    if not part.is_floating_point():
        yield "all of the largest", torch.full_like(part, torch.iinfo(part.dtype).max)
        yield "all of the smallest", torch.full_like(part, torch.iinfo(part.dtype).min)


@pytest.mark.parametrize("low_bit", (False, True), ids=("wide", "codes"))
@pytest.mark.parametrize("name", CASES)
def test_whatever_a_part_is_there_is_a_weight_or_one_line(tmp_path: Path, name: str, low_bit: bool) -> None:
    """Never a weight of another size, and no error of another kind."""
    whole = parts_of(name)
    expected = read(tmp_path, name, whole, low_bit)
    refused = 0
    for key, part in whole.items():
        for what, changed in lies(part):
            try:
                found = read(tmp_path, name, whole | {key: changed}, low_bit)
            except CheckpointError as error:
                refused += 1
                assert error.hint and "up_proj" in error.message, (key, what)
                continue
            assert found.nbytes == expected.nbytes or low_bit or key == "weight", (key, what)  # which has the shape that it says
    assert refused > 4 * len(whole)


@pytest.mark.parametrize("name", CASES)
def test_what_is_loaded_or_arrives_is_what_numpy_makes(tmp_path: Path, name: str) -> None:
    """Or refused where that is. Codes go straight into their places, by functions that look at no bounds."""
    whole = parts_of(name)
    for key, part in whole.items():
        for what, changed in (("as it is", part), *lies(part)):
            save_file({BASE + each: value.contiguous() for each, value in (whole | {key: changed}).items()}, tmp_path / "model.safetensors")
            found = [outcome(tmp_path, name, way) for way in (by_numpy, loaded, arrived)]
            assert len({each is None for each in found}) == 1, (key, what)
            assert found[0] is None or (np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])), (key, what)


def outcome(folder: Path, name: str, way: Callable[[ImportedStore, TensorInfo], np.ndarray]) -> np.ndarray | None:
    """The bytes of the weight; None where it is refused, by itself or by whoever waits for what arrives."""
    try:
        with TensorStore.open(folder) as files, ImportedStore(files, CASES[name][0], "f16", True, input_widths=DEPTHS) as store:
            return way(store, store.tensors[f"{BASE}weight"])
    except (CheckpointError, ValueError):
        return None


def loaded(store: ImportedStore, info: TensorInfo) -> np.ndarray:
    return store.read(info)


def by_numpy(store: ImportedStore, info: TensorInfo) -> np.ndarray:
    """As the decoders define it."""
    if info.name not in store._parts:  # a plain weight, as a lie about the type makes it
        return store.read(info)
    spec, array, decoder = store._specs.get(info.name), store._part_reader(info), store._decoder(info)
    if spec is None:
        values = store._checked(info, info.shape, decoder.dequantize, array)
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(from_f32(values, info.dtype.lower())).reshape(-1).view(np.uint8)
    if spec.scheme == "table":
        return pack(bitsandbytes.packable(*decoder.bnb_4bit_parts(array), store._shapes[info.name]), spec)
    if spec.scheme == "nvfp":
        return pack(nvfp4.packable(*decoder.nvfp4_parts(array)), spec)
    if spec.scheme == "mxfp":
        codes, scales = decoder.mxfp4_parts(array)
        mxfp4.dequantize(codes, scales)  # which fit one another, or it raises
        return pack(Codes(codes, scales, None, np.full(len(codes), 0.5, np.float32), MXFP), spec)
    if spec.scheme == "float":
        scales = array("weight_scale") if array("weight_scale_inv") is None else array("weight_scale_inv")
        return pack(fp8.packable(array("weight"), scales, spec, store._decoder(info).block), spec)
    decode = lambda *held: groups.packable(decoder.decode_integers(*held), spec)  # noqa: E731
    return pack(store._checked(info, store._shapes[info.name], decode, array), spec)


def arrived(store: ImportedStore, info: TensorInfo) -> np.ndarray:
    """By way of the repacking stage."""
    if (found := store.repack_plan([info])) is None:
        assert store.place(info) is not None
        return store.read(info)
    (piece,), out = found.pieces(), np.zeros(info.nbytes, np.uint8)
    raws = [np.empty(own.nbytes, np.uint8) for own in piece.ranges]
    for own, raw in zip(piece.ranges, raws, strict=True):
        store.read_at(own.file, own.offset, memoryview(raw))
    piece.put(raws, [out])
    return out


@pytest.mark.parametrize(("name", "key", "changed"), [
    ("awq", "qzeros", torch.zeros(96, dtype=torch.int32)), ("awq", "scales", torch.ones(4, 192, dtype=torch.int32)),
    ("gptq 4", "scales", torch.ones(4, 192, dtype=torch.int32)), ("gptq 4", "qzeros", torch.zeros(4, 24)),
    ("gptq 4", "g_idx", torch.zeros(256)), ("int4", "weight_scale", torch.ones(192)),
    ("int4", "weight_shape", torch.tensor([192.0, 256.0])),
    ("int4, zero points", "weight_zero_point", torch.zeros(24 * 4, dtype=torch.int32)), ("fp8 rows", "weight_scale", torch.ones(192, 1, 1)),
    ("bytes, zero points", "weight_zero_point", torch.zeros(192, 4, dtype=torch.int32))])
def test_ranks_and_types_are_named(tmp_path: Path, name: str, key: str, changed: torch.Tensor) -> None:
    kind = {torch.int32: "I32", torch.float32: "F32"}[changed.dtype]
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, name, parts_of(name) | {key: changed}, True)
    assert f"{BASE}weight" in caught.value.message and f"{key} is {kind} {list(changed.shape)}" in caught.value.message


@pytest.mark.parametrize("depth", (16384, 16300))
def test_blocks_of_a_wide_weight_are_no_rows(depth: int) -> None:
    """As many blocks along the inputs as there are rows."""
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 120, (128, depth)).astype(np.uint8), rng.random((1, 128), np.float32)
    expected = fp8.VALUES[codes] * np.repeat(scales, 128, axis=1)[:, :depth]
    for block in ((128, 128), (0, 0)):
        np.testing.assert_array_equal(fp8.dequantize(codes, scales, block), expected)


def test_blocks_are_of_the_size_that_is_stated() -> None:
    """Of 96 inputs, where their number would say 128."""
    codes, scales = np.full((96, 192), 56, np.uint8), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    found = fp8.dequantize(codes, scales, (64, 96))
    assert np.array_equal(found, np.repeat(np.repeat(scales, 64, 0)[:96], 96, 1))
    with pytest.raises(ValueError, match="in blocks of 128 x 128"):
        fp8.dequantize(codes, scales, (128, 128))


def test_the_config_states_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"weight": torch.ones(96, 192).to(torch.float8_e4m3fn), "weight_scale_inv": torch.tensor([[1.0, 2.0]])}
    monkeypatch.setitem(CASES, "wide blocks", ({"quant_method": "fp8", "weight_block_size": [96, 96]}, None))
    values = read(tmp_path, "wide blocks", parts, False).view(np.float32).reshape(96, 192)
    assert (values[:, :96] == 1).all() and (values[:, 96:] == 2).all()


def test_a_power_of_two_that_is_not_finite_is_named(tmp_path: Path) -> None:
    name = "fp8 blocks, powers of two"
    parts = parts_of(name)
    scales = parts["weight_scale_inv"].view(torch.uint8)
    assert len(set(scales.flatten().tolist())) > 1 and read(tmp_path, name, parts, False).any()
    scales[0, 0] = 255
    with pytest.raises(CheckpointError, match="scale of NaN"):
        read(tmp_path, name, parts, False)


@pytest.mark.parametrize(("name", "key", "changed"), [("int4", "weight_scale", torch.ones(1)),
                                                      ("gptq 4", "qweight", torch.zeros(64, 192, dtype=torch.int16))])
def test_a_form_that_is_not_read_is_no_broken_download(tmp_path: Path, name: str, key: str, changed: torch.Tensor) -> None:
    """One scale for a weight, words of 16 bits: other tools write those."""
    with pytest.raises(CheckpointError, match=f"{key} is ") as caught:
        read(tmp_path, name, parts_of(name) | {key: changed}, True)
    assert caught.value.hint.startswith("if it is as published") and "16-bit checkpoint" in caught.value.hint
