"""Methods without calibration text: the loss by format, unusual weights, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from effllm import EffllmError, UsageError
from effllm.quant import codebooks, methods
from effllm.quant.codes import dequantize
from effllm.quant.methods import hqq, rtn
from effllm.quant.pack import pack, unpack
from effllm.quant.spec import BITS, FOREIGN, GROUPS, QuantSpec

FORMATS = tuple(str(QuantSpec(bits, group, scheme)) for scheme in BITS for bits in BITS[scheme]
                for group in GROUPS[scheme] if scheme not in FOREIGN)
# How far below Gaussian weights the error has to stay, in dB.
FLOORS = {"codebook4:16": 22.7, "codebook3:16": 16.5, "codebook2:16": 10.0, "symmetric8:32": 45.9, "symmetric6:32": 33.6,
          "symmetric5:32": 27.4, "symmetric4:32": 21.1, "affine4:32": 22.0, "affine4:64": 21.0, "affine3:32": 15.7, "affine2:32": 9.4,
          "ternary:64": 7.0}


def gaussian(seed: int = 0, shape: tuple[int, int] = (32, 512)) -> np.ndarray:
    return 0.02 * np.random.default_rng(seed).standard_normal(shape, np.float32)


def decibels(rows: np.ndarray, spec: QuantSpec, made=None) -> float:
    made = rtn.quantize(rows, spec) if made is None else made
    error = rows.astype(np.float64) - dequantize(made, spec)
    return float(10 * np.log10(np.square(rows, dtype=np.float64).sum() / np.square(error).sum()))


@pytest.mark.parametrize("text", FLOORS)
def test_gaussian_weights_keep_what_their_bits_allow(text):
    assert decibels(gaussian(), QuantSpec.parse(text)) > FLOORS[text]


@pytest.mark.parametrize("scheme", ("symmetric", "affine", "codebook"))
def test_more_bits_lose_less(scheme):
    lost = [decibels(gaussian(), QuantSpec(bits, GROUPS[scheme][0], scheme)) for bits in sorted(BITS[scheme])]
    assert lost == sorted(lost) and len(set(lost)) == len(lost)


@pytest.mark.parametrize("text", FORMATS)
def test_every_format_survives_packing_and_odd_shapes(text):
    spec = QuantSpec.parse(text)
    for shape in ((1, 1), (3, 31), (17, 129), (2, 256)):
        made = rtn.quantize(gaussian(1, shape), spec)
        back = unpack(pack(made, spec), spec, shape)
        np.testing.assert_array_equal(dequantize(back, spec), dequantize(made, spec))


@pytest.mark.parametrize(("name", "text"), [("rtn", text) for text in FORMATS] + [("hqq", text) for text in FORMATS if "affine" in text])
def test_rows_and_groups_of_zeros_are_exact(name, text):
    method, spec = methods.get(name), QuantSpec.parse(text)
    rows = gaussian(2, (6, 4 * spec.group))
    rows[1] = 0
    rows[2:, spec.group : 2 * spec.group] = 0
    restored = dequantize(method.quantize(rows, spec), spec)
    assert not restored[1].any() and not restored[2:, spec.group : 2 * spec.group].any()
    assert restored[0].any() and restored[3].any()


@pytest.mark.parametrize("text", ("codebook4:16", "symmetric8:32", "affine4:32", "ternary:64"))
def test_a_column_of_zeros_is_exact(text):
    rows = gaussian(3)
    rows[:, 77] = 0
    assert not dequantize(rtn.quantize(rows, QuantSpec.parse(text)), QuantSpec.parse(text))[:, 77].any()


@pytest.mark.parametrize("text", ("codebook4:16", "codebook2:16", "symmetric8:32", "affine4:64", "ternary:32"))
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("place", (0, 300, 511))
def test_weights_that_are_not_finite_are_refused(text, bad, place):
    rows = gaussian()
    rows[31, place] = bad
    with pytest.raises(EffllmError, match="NaN or infinity"):
        rtn.quantize(rows, QuantSpec.parse(text))


@pytest.mark.parametrize("text", FLOORS)
@pytest.mark.parametrize("size", (1e-25, 1e-6, 1e6, 1e30))
def test_the_size_of_weights_does_not_matter(text, size):
    spec, rows = QuantSpec.parse(text), gaussian()
    assert abs(decibels(rows * np.float32(size), spec) - decibels(rows, spec)) < 0.2


@pytest.mark.parametrize("text", FORMATS)
def test_weights_too_small_for_a_scale_become_zeros(text):
    rows = np.full((2, 64), 1e-42, np.float32)
    restored = dequantize(rtn.quantize(rows, QuantSpec.parse(text)), QuantSpec.parse(text))
    assert np.isfinite(restored).all() and np.abs(restored).max() <= 1e-40


def test_a_scale_is_chosen_for_the_sum_of_errors_and_not_for_the_largest_weight():
    rows = gaussian(4)
    groups = rows.reshape(len(rows), -1, 64)
    held = np.abs(groups).max(-1, keepdims=True) / 1.5
    plain = np.clip(np.rint(groups / held), -2, 1) * held
    assert decibels(rows, QuantSpec.parse("symmetric2:64")) > 1 + 10 * np.log10(np.square(groups).sum() / np.square(groups - plain).sum())


@pytest.mark.parametrize("bits", (4, 3, 2))
def test_hqq_loses_less_by_its_own_norm(bits):
    spec = QuantSpec.parse(f"affine{bits}:64")
    rows = 0.02 * np.random.default_rng(5).standard_t(3, (32, 512)).astype(np.float32)

    def norm(made):
        return (np.abs(rows - dequantize(made, spec)) ** hqq.EXPONENT).sum()

    assert norm(hqq.quantize(rows, spec)) < 0.995 * norm(rtn.quantize(rows, spec))


def test_hqq_does_not_see_how_rows_are_cut():
    spec, rows = QuantSpec.parse("affine3:32"), gaussian(6, (96, 96))
    whole, parts = hqq.quantize(rows, spec), [hqq.quantize(rows[begin : begin + 48], spec) for begin in (0, 48)]
    for name in ("codes", "scales", "zeros", "rows"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize("text", ("codebook4:16", "symmetric4:32", "ternary:64"))
def test_hqq_refuses_formats_without_zeros(text):
    with pytest.raises(UsageError, match="zero points") as refused:
        hqq.quantize(gaussian(), QuantSpec.parse(text))
    assert "affine" in refused.value.hint


def test_outliers_and_unknown_methods_are_refused():
    with pytest.raises(UsageError, match="outliers"):
        rtn.quantize(gaussian(), QuantSpec.parse("affine4:32+1%"))
    with pytest.raises(UsageError, match="no quantization method 'awq'") as refused:
        methods.get("awq")
    assert "rtn" in refused.value.hint


def test_every_method_is_a_module_with_the_interface():
    files = {path.stem for path in Path(methods.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {*methods.METHODS}, "each file of quant/methods/ has its name in METHODS of quant/method_names.py"
    for name in methods.METHODS:
        module = methods.get(name)
        assert isinstance(module.NEEDS, frozenset) and callable(module.quantize) and callable(module.check)


@pytest.mark.parametrize("bits", (4, 3, 2))
def test_tables_are_what_kernels_can_read(bits):
    table, steps = codebooks.levels(bits), codebooks.steps()
    assert len(table) == 1 << bits and table.min() >= -64 and table.max() <= 63 and (np.diff(table.astype(int)) > 0).all()
    assert len(steps) == 16 and steps[0] == 0 and steps.max() <= 127 and (np.diff(steps.astype(int)) > 0).all()
