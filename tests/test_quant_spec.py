"""Names of weight formats, and the exact size of a weight in each, on which the planner relies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from low_bit_samples import FORMATS, WITH_OUTLIERS, random_codes

from effllm import UsageError
from effllm.kernels.tiles import PLANES, sections
from effllm.quant.pack import pack
from effllm.quant.spec import BITS, DEFAULTS, GROUPS, RAW_BITS, QuantSpec

SHAPES = ((1, 1), (16, 32), (17, 33), (31, 128), (48, 129), (5, 640))


@pytest.mark.parametrize("text", FORMATS + WITH_OUTLIERS + tuple(RAW_BITS))
def test_the_text_of_a_format_names_it(text):
    spec = QuantSpec.parse(text)
    assert str(spec) == text and QuantSpec.parse(str(spec)) == spec
    assert spec.is_raw == (text in RAW_BITS)


def test_every_width_has_a_short_name_with_its_bits():
    for name, text in DEFAULTS.items():
        assert QuantSpec.parse(name) == QuantSpec.parse(text) and str(QuantSpec.parse(name)) == text
        assert QuantSpec.parse(name).bits == (2 if name == "ternary" else int(name.removesuffix("bit")))
    assert {QuantSpec.parse(name).bits for name in DEFAULTS} == set(PLANES) == {bits for known in BITS.values() for bits in known}


@pytest.mark.parametrize(("text", "share"), (("4bit+0.5%", 0.005), ("4bit+.005", 0.005), ("codebook4:16+5%", 0.05),
                                             ("affine4:64+0.01", 0.01), ("ternary+1%", 0.01), ("8bit+0%", 0.0)))
def test_outliers_are_a_share_or_a_percentage(text, share):
    spec = QuantSpec.parse(text)
    assert spec.outliers == pytest.approx(share)
    assert QuantSpec.parse(str(spec)) == spec


@given(st.floats(1e-9, 0.05))
def test_the_text_of_a_share_keeps_every_digit(share):
    """A digit less would be another number of outliers in a large weight, and a file of another size."""
    spec = QuantSpec(4, 16, "codebook", share)
    assert QuantSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("text", ("", "4", "7bit", "4bits", "4BIT", "codebook4", "codebook4:32", "codebook5:16", "codebook4:16:16",
                                  "affine4:16", "affine7:32",
                                  "super6:32", "super4:16", "signed6:32", "signed8:16", "offset4:16",
                                  "affine4:48", "symmetric4:256", "symmetric1:32", "ternary:16", "ternary2:64",
                                  "f64", "bf16+1%", "f32:32", "4bit+6%", "4bit+0.06", "4bit+1", "4bit+-1%", "4bit+", "+1%", "4bit+1%+1%",
                                  " 4bit", "4bit\n"))
def test_what_is_no_format_says_what_is(text):
    with pytest.raises(UsageError) as caught:
        QuantSpec.parse(text)
    assert "outliers" in str(caught.value) or "no weight format" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("fields", ((4, 16, "affine"), (4, 0, "codebook"), (5, 16, "codebook"), (16, 32, "bf16"), (32, 0, "bf16"),
                                    (3, 64, "ternary"), (0, 0, "int4"), (1, 32, "symmetric")))
def test_unknown_mixes_are_refused_however_they_are_made(fields):
    with pytest.raises(UsageError, match="no weight format"):
        QuantSpec(*fields)


@pytest.mark.parametrize("share", (-0.01, 0.051, 1.0, float("nan")))
def test_shares_of_outliers_beyond_the_limit_are_refused(share):
    with pytest.raises(UsageError, match="outliers"):
        QuantSpec(4, 16, "codebook", share)


def test_raw_formats_take_no_outliers():
    with pytest.raises(UsageError):
        QuantSpec(16, 0, "bf16", 0.01)
    with pytest.raises(UsageError):
        QuantSpec.raw("codebook")


@pytest.mark.parametrize("text", FORMATS + WITH_OUTLIERS)
def test_nbytes_is_the_size_of_what_is_packed(text):
    spec, rng = QuantSpec.parse(text), np.random.default_rng(0)
    for shape in SHAPES:
        assert len(pack(random_codes(rng, spec, shape), spec)) == spec.nbytes(shape)


@pytest.mark.parametrize("text", FORMATS)
def test_bits_per_weight_are_the_codes_and_a_share_of_the_group(text):
    """Counted from the description of the format, not from the layout: a shape that nothing pads, so large that alignment is nothing."""
    spec, shape = QuantSpec.parse(text), (4096, 8192)
    if spec.scheme == "float":  # one scale for 16 rows, and rows of 32 bits
        assert spec.nbytes(shape) == 4096 * 8192 + 4096 * 8192 // spec.group // 16 * 4 + 4 * 4096
        return
    per_group = {"codebook": 4, "affine": 16, "symmetric": 8, "ternary": 8, "block": 16, "offset": 24,
                 "super": 6 + 6 + 4, "nibble": 4 + 4 + 2, "signed": 8 + 1, "table": 8 + 1, "mxfp": 8, "nvfp": 8, "minimum": 32}[spec.scheme]
    tables = 64 if spec.scheme in ("codebook", "mxfp", "nvfp", "table") else 0
    rows = (4 if spec.scheme == "nvfp" else 2) * 4096
    assert spec.nbytes(shape) == 4096 * 8192 * spec.bits // 8 + 4096 * 8192 // spec.group * per_group // 8 + rows + tables


def test_raw_tensors_of_any_rank_have_the_bytes_of_their_type():
    assert [QuantSpec.raw(name).nbytes((3, 5, 7)) for name in ("f32", "f16", "bf16")] == [420, 210, 210]
    assert QuantSpec.raw("bf16").nbytes(()) == 2 and QuantSpec.raw("f32").nbytes((0, 4)) == 0


@pytest.mark.parametrize("text", FORMATS + WITH_OUTLIERS)
def test_sections_follow_one_another_on_cache_lines(text):
    spec = QuantSpec.parse(text)
    for shape in SHAPES:
        at = spec.sections(shape)
        starts = [start for start in (at.codes, at.scales, at.zeros, at.row_scales, at.tables, at.sparse) if start >= 0]
        assert starts == sorted(set(starts)) and all(start % 64 == 0 for start in [*starts, at.nbytes])
        assert at.rows % 16 == 0 and 0 <= at.rows - shape[0] < 16
        unit = 256 if spec.scheme in ("super", "nibble", "signed", "table") else max(32, spec.group)
        assert at.depth % unit == 0 and 0 <= at.depth - shape[1] < unit
        assert (at.zeros >= 0) == (spec.scheme in ("affine", "offset"))
        assert (at.tables >= 0) == (spec.scheme in ("codebook", "mxfp", "nvfp", "table"))
        assert at.sparse_count == round(shape[0] * shape[1] * spec.outliers)


def test_groups_and_widths_known_to_a_spec_are_those_of_the_layout():
    for scheme, widths in BITS.items():
        assert set(widths) <= set(PLANES)
        assert all(sections((16, 128), bits, scheme, group).nbytes > 0 for bits in widths for group in GROUPS[scheme])
