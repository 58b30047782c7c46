"""Checkpoints with ternary weights: values are exact, and layers compute what transformers' do, with activations rounded the same way.

Rounding makes a step of what differs by a ten-millionth, and a text of many tokens meets such steps: what is compared token by token to the
last digits are texts of one token, of longer ones the mean.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bitnet_models import AUTO, LINEARS, ONLINE, PLAIN, logits, oracle, write
from conversions import options as conversion
from conversions import run as convert_run
from safetensors.torch import load_file, save_file

from effllm import EffllmError
from effllm.offload.checkpoint import CheckpointError
from effllm.quant.imports import ternary
from effllm.quant.weight import RAW_NUMPY, Weight, to_f32
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.engine import Engine, EngineOptions, open_engine
from effllm.runtime.planning.expected_store import ExpectedStore
from effllm.runtime.source import is_already_quantized, is_low_bit, open_store, open_weights, quantization_of
from effllm.runtime.stores.expected_formats import expected_formats

CASES = {
    "packed": ("bitnet", AUTO, {"tie_word_embeddings": True}),
    "floats of -1, 0 and 1": ("bitnet", AUTO, {"packed": False, "vocab_size": 300}),
    "masters": ("bitnet", ONLINE, {}),
    "masters in float32": ("bitnet", ONLINE, {"dtype": "float32"}),
    "Llama, packed": ("llama", PLAIN, {"hidden_size": 96, "dtype": "float16"}),
}
EXACT = ("packed", "floats of -1, 0 and 1", "masters")  # whose number bfloat16 holds


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("model")
    family, section, changes = CASES[request.param]
    write(folder, family, section, **changes)
    return request.param, folder


def opened(folder: Path, **options: object) -> Engine:
    *_, engine = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, chunk=128, **options))
    return engine


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, length).tolist()


def meant(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers multiplies by, by name."""
    found, section = {}, json.loads((folder / "config.json").read_text())["quantization_config"]
    for name, module in oracle(folder).named_modules():
        if name.rpartition(".")[2] in LINEARS:
            values = module.weight
            if values.dtype == torch.uint8:
                rows = torch.cat([values >> 2 * i & 3 for i in range(4)]).float() - 1
                values = rows / module.weight_scale
            elif section["linear_class"] == "autobitlinear":
                values = values * module.weight_scale
            found[f"{name}.weight"] = values.detach()
    return found


def test_values_are_those_of_the_model(case: tuple[str, Path]) -> None:
    name, folder = case
    want = meant(folder)
    assert len(want) == 21
    with open_store(folder, dequant_dtype="f32") as store:
        for own, values in want.items():
            info = store.tensors[own]
            got = to_f32(store.read(info).view(RAW_NUMPY["f32"]), "f32").reshape(info.shape)
            assert np.allclose(got, values, rtol=2e-7, atol=0) and np.array_equal(got != 0, values != 0)
            assert np.array_equal(store.read(info, 5, 17), store.read(info).reshape(info.shape[0], -1)[5:17].reshape(-1))
    store, container = open_weights(folder)
    with store:
        for own, values in want.items():
            stored = container.tensors[own]
            got = Weight.low_bit(stored.spec, stored.shape, store.read(store.tensors[own])).to_f32()
            assert stored.spec == ternary.spec_of(values.shape[1])
            assert np.allclose(got, values, rtol=0 if name in EXACT else 1 / 3_400, atol=0)
    assert is_low_bit(folder) and is_already_quantized(folder) and read_config(folder, strict=True).per_token_scale


def test_logits_are_those_of_transformers(case: tuple[str, Path]) -> None:
    name, folder = case
    model, engine = oracle(folder), opened(folder)
    try:
        same = []
        for token in range(40):
            want = logits(model, [token]).numpy()
            got = np.concatenate([found.copy() for _, found in engine.score([token])])
            same.append(float(np.abs(got - want).max() / np.abs(want).max()))
        if name in EXACT:
            assert np.mean(np.array(same) < 1e-5) > 0.7, sorted(same)
        assert np.median(same) < (1e-5 if name in EXACT else 0.01)
        ids = text(200)
        want = logits(model, ids).numpy()
        top = np.abs(want).max()
        got = np.concatenate([found.copy() for _, found in engine.score(ids)])
        assert np.abs(got - want).mean() < 0.01 * top and np.mean(got.argmax(-1) == want.argmax(-1)) > 0.9
        list(engine.prefill(ids[:190]))
        steps = np.stack([engine.forward_logits([token])[0].copy() for token in ids[190:]])
        assert np.abs(steps - want[190:]).mean() < 0.01 * top
    finally:
        engine.close()


def test_rounding_by_blocks_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison is worth: activations that are rounded as other models' are."""
    write(tmp_path, "bitnet", AUTO)
    model = oracle(tmp_path)
    monkeypatch.setattr("effllm.kernels.cpu.low_bit.ONE_SCALE", 0)
    engine = opened(tmp_path)
    want = [logits(model, [token]).numpy() for token in range(10)]
    got = [np.concatenate([found.copy() for _, found in engine.score([token])]) for token in range(10)]
    engine.close()
    assert min(np.abs(a - b).max() / np.abs(a).max() for a, b in zip(want, got)) > 1e-4


@pytest.mark.parametrize("spec", ["ternary", "4bit"])
@pytest.mark.parametrize("section", [AUTO, ONLINE], ids=["packed", "masters"])
def test_a_conversion_keeps_the_ternary_values(spec: str, section: dict[str, object], tmp_path: Path) -> None:
    write(tmp_path / "model", "bitnet", section)
    _, said = convert_run(tmp_path / "model", tmp_path / "made", conversion(spec))
    assert not any("were quantized before" in each for each in said)  # of the embedding that is no more true than of any model's
    assert any("21 tensors stay in ternary:32" in str(each) or "21 tensors stay in ternary:64" in str(each) for each in said), said
    (first, ours), (second, theirs) = (open_weights(tmp_path / name) for name in ("model", "made"))
    with first, second:
        for name, stored in ours.tensors.items():
            assert theirs.tensors[name].spec == stored.spec
            assert np.array_equal(first.read(first.tensors[name]), second.read(second.tensors[name]))
    assert read_config(tmp_path / "made").per_token_scale
    engine = opened(tmp_path / "made")
    assert np.isfinite(np.concatenate([found for _, found in engine.score(text(9))])).all()
    engine.close()


def test_a_rule_rounds_what_it_names_again(tmp_path: Path) -> None:
    write(tmp_path / "model", "bitnet", AUTO)
    _, said = convert_run(tmp_path / "model", tmp_path / "made", conversion("4bit", rules=("v_proj=8bit",)))
    assert any("were quantized before" in each for each in said)
    store, container = open_weights(tmp_path / "made")
    store.close()
    assert {str(each.spec) for name, each in container.tensors.items() if "v_proj" in name} == {"symmetric8:32"}
    assert {each.spec.scheme for name, each in container.tensors.items() if "q_proj" in name} == {"ternary"}


def test_what_is_planned_before_a_download_is_what_is_held(case: tuple[str, Path]) -> None:
    _, folder = case
    config, section = read_config(folder), quantization_of(folder)
    store, container = open_weights(folder)
    store.close()
    expected = ExpectedStore(config, formats=expected_formats(section)).container
    assert len(container.tensors) == 21
    assert all((expected.tensors[name].spec, expected.tensors[name].shape) == (each.spec, each.shape) for name, each in
               container.tensors.items())


def test_modules_that_are_left_out_are_no_masters(tmp_path: Path) -> None:
    write(tmp_path, "bitnet", {**ONLINE, "modules_to_not_convert": ["o_proj"]})
    store, container = open_weights(tmp_path)
    store.close()
    assert len(container.tensors) == 18 and not any("o_proj" in name for name in container.tensors)


@pytest.mark.parametrize("change, said", [
    ({"use_rms_norm": True}, "use_rms_norm True"), ({"linear_class": "other"}, "linear_class 'other'"),
    ({"quantization_mode": "later"}, "quantization_mode 'later'")])
def test_what_a_section_says_and_is_not_read_is_refused_by_name(change: dict[str, object], said: str) -> None:
    raw = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
           "vocab_size": 32, "quantization_config": {**AUTO, **change}}
    with pytest.raises(ConfigError, match=said) as found:
        parse_config(raw)
    assert "known" in found.value.hint or "BitNet" in found.value.hint


def _changed(folder: Path, change: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("change, said", [
    (lambda all: all.pop(f"{NAME}_scale"), "without"),
    (lambda all: all.update({f"{NAME}_scale": torch.ones(2)}), "a scale that is F32"),
    (lambda all: all.update({NAME.removesuffix("weight") + "bias": torch.ones(160)}), "a bias, which its scale multiplies"),
    (lambda all: all.update({f"{NAME}_scale": torch.tensor([float("nan")])}), "a scale of nan"),
    (lambda all: all[NAME].fill_(255), "neither -1, 0 nor 1"), (lambda all: all.update({NAME: torch.full((160, 64), 2.0)}), "other than")])
def test_damaged_parts_are_named(change: object, said: str, tmp_path: Path) -> None:
    write(tmp_path, "bitnet", AUTO)
    _changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=said) as found:
        store, _ = open_weights(tmp_path)
        with store:
            store.read(store.tensors[NAME])
    assert isinstance(found.value, EffllmError) and found.value.hint


def test_packing_is_that_of_transformers() -> None:
    from transformers.integrations.bitnet import pack_weights

    rng = np.random.default_rng(5)
    codes = rng.integers(0, 3, (40, 24)).astype(np.uint8)
    packed = pack_weights(torch.from_numpy(codes.astype(np.int8)) - 1).numpy()
    for begin, end in ((0, 40), (3, 8), (8, 12), (9, 31), (39, 40)):
        assert np.array_equal(ternary.unpack(packed, begin, end), codes[begin:end])


@pytest.mark.parametrize("number", [1.0, 0.734375, 2.5e-3, 1 / 3, 0.0123456789, 1e-5, 3e4])
def test_a_number_is_two_factors(number: float) -> None:
    row, scale = ternary.factors(number)
    assert abs(float(row) * scale - number) <= number / 3_400 and 1 <= scale <= 255
    assert (float(row), scale) == (number, 1) or number not in (1.0, 0.734375)
    with pytest.raises(ValueError):
        ternary.factors(float("nan"))


def test_the_rule_is_that_of_transformers() -> None:
    """Every one of many weights becomes what it becomes there."""
    from transformers.integrations.bitnet import WeightQuant

    weight = (0.02 * torch.randn(300, 200, generator=torch.Generator().manual_seed(3))).bfloat16()
    with torch.compiler.set_stance("force_eager"):
        want = WeightQuant.apply(weight)
    values = weight.float().numpy()
    mean = ternary.absmean([values[:100], values[100:]], values.size)
    assert np.array_equal(ternary.absmean_codes(values, mean).astype(int) - 1, np.sign(want.float().numpy()))
    assert ternary.absmean([np.zeros((2, 2), np.float32)], 4) == np.float32(1e-5)
    with pytest.raises(ValueError, match="NaN"):
        ternary.absmean_codes(np.full((1, 2), np.nan, np.float32), mean)
