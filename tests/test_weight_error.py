"""The error of quantized rows against the definition of what codes mean, in every format."""

import numpy as np
import pytest

from effllm.quant.codes import Codes, Sparse, bf16, dequantize
from effllm.quant.error import error_db, squared_error
from effllm.quant.spec import QuantSpec

SPECS = ["codebook4:16", "codebook3:16", "codebook2:16", "affine4:32", "affine3:64", "affine8:128", "symmetric8:16", "symmetric5:32",
         "ternary:64"]


def random_codes(spec: QuantSpec, n: int, k: int, rng: np.random.Generator) -> Codes:
    groups, book = -(-k // spec.group), spec.scheme == "codebook"
    count = 3 if spec.scheme == "ternary" else 1 << spec.bits
    return Codes(
        rng.integers(0, count, (n, k), dtype=np.uint8), rng.integers(0, 16, (n, groups), dtype=np.uint8),
        rng.integers(0, count, (n, groups), dtype=np.uint8) if spec.scheme == "affine" else None,
        bf16(rng.uniform(0.001, 0.01, n).astype(np.float32)),
        np.sort(rng.choice(np.arange(-64, 64), count, replace=False)).astype(np.int8) if book else None,
        np.sort(rng.choice(np.arange(1, 128), 16, replace=False)).astype(np.uint8) if book else None)


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("n, k", [(1, 1), (16, 128), (5, 200), (33, 1000)])
@pytest.mark.parametrize("share", [0.0, 0.02])
def test_sums_are_those_of_the_definition(text: str, n: int, k: int, share: float) -> None:
    rng = np.random.default_rng(n * k)
    spec = QuantSpec.parse(text)
    codes = random_codes(spec, n, k, rng)
    if share:
        places = np.sort(rng.choice(n * k, max(1, round(n * k * share)), replace=False))
        values = bf16(rng.standard_normal(len(places)).astype(np.float32))
        found = Sparse((places // k).astype(np.uint32), (places % k).astype(np.uint32), values)
        codes = Codes(codes.codes, codes.scales, codes.zeros, codes.rows, codes.levels, codes.steps, found)
    rows = (dequantize(codes, spec) + 0.05 * rng.standard_normal((n, k))).astype(np.float32)
    error, squares = squared_error(rows, codes, spec)
    exact = np.square(dequantize(codes, spec).astype(np.float64) - rows).sum()
    assert error == pytest.approx(exact, rel=1e-4, abs=1e-6)
    assert squares == pytest.approx(np.square(rows, dtype=np.float64).sum(), rel=1e-5)


def test_decibels() -> None:
    assert error_db(1.0, 100.0) == pytest.approx(-20)
    assert error_db(0.0, 100.0) is None and error_db(1.0, 0.0) is None
