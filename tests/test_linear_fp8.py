"""The matrix product of fp8 weights with activations rounded to bfloat16 (AVX-512 BF16), against float64."""

from __future__ import annotations

import numpy as np
import pytest
from low_bit_samples import NO_NORM, dims_for, low_bit, random_codes
from panel_product_checks import near

from effllm.kernels.cpu import bf16_pairs, linear_bf16, linear_fp8, packed
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.low_bit import declines_floats
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.registry import Call
from effllm.quant.codes import bf16, dequantize
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear

pytestmark = pytest.mark.skipif(not bf16_pairs.HAS_PAIRS, reason="no products of bfloat16 pairs here")
FEW = packed.MAX_COLUMNS
SHAPES = ((FEW + 1, 33, 1), (32, 300, 50), (33, 128, 64), (49, 97, 200), (70, 2 * linear_fp8.SPAN + 40, 3 * linear_fp8.BLOCK_ROWS + 5))


@pytest.mark.parametrize("group", (32, 64, 128))
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_rounded_activations(pools, shape, group):
    tokens, depth, rows = shape
    rng, spec = np.random.default_rng(depth), QuantSpec.parse(f"float8:{group}")
    codes = random_codes(rng, spec, (rows, depth))
    matrix = Linear(low_bit(codes, spec), rng.standard_normal(rows, np.float32))
    x, weight = rng.standard_normal((tokens, depth), np.float32), dequantize(codes, spec).astype(np.float64)
    want = bf16(x).astype(np.float64) @ weight.T + matrix.bias
    outs, sums = [], []
    for pool in pools.values():
        ops = CpuOps(pool, dims_for(depth, rows, 96))
        outs.append(ops.norm_linear(x, NO_NORM, [matrix])[0].copy())
        assert np.array_equal(ops.norm_linear(x[: FEW + 1], NO_NORM, [matrix])[0], outs[0][: FEW + 1]), "other tokens change nothing"
        sums.append(ops.linear_add(x, matrix, np.ones((tokens, rows), np.float32)).copy())
    assert near(outs[0], want) and np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])
    assert near(sums[0], want + 1) and np.array_equal(sums[0], sums[1])


def test_every_code_is_its_value(pools):
    """Each of the 254 codes that are numbers, in a row of its own, times one."""
    numbers = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    spec = QuantSpec.parse("float8:32")
    codes = random_codes(np.random.default_rng(2), spec, (len(numbers), 32))
    codes.codes[:], codes.codes[:, 3], codes.scales[:], codes.rows[:] = 0, numbers, 1.0, 1.0
    x = np.zeros((FEW + 1, 32), np.float32)
    x[:, 3] = 1.0
    got = CpuOps(pools[1], dims_for(32, len(numbers))).norm_linear(x, NO_NORM, [Linear(low_bit(codes, spec))])[0]
    assert np.array_equal(got, np.broadcast_to(dequantize(codes, spec)[:, 3], got.shape))


def test_heads_and_exact_runs_keep_their_activations(pools):
    rng, spec = np.random.default_rng(7), QuantSpec.parse("float8:128")
    codes = random_codes(rng, spec, (50, 256))
    x, matrix, weight = rng.standard_normal((40, 256), np.float32), Linear(low_bit(codes, spec)), dequantize(codes, spec).astype(np.float64)
    want = x.astype(np.float64) @ weight.T
    ops, exact = (CpuOps(pools[2], dims_for(256, 50, 64), default_registry(exact=flag)) for flag in (False, True))
    assert near(ops.logits(x, NO_NORM, matrix), want) and near(exact.norm_linear(x, NO_NORM, [matrix])[0], want)
    assert not near(ops.norm_linear(x, NO_NORM, [matrix])[0], want)
    call = Call("low-bit matrix", "float", FEW + 1, bits=8)
    assert not declines_floats(call) and default_registry().select(call).candidate.run is linear_fp8.run_many


def test_fp8_and_bf16_matrices_share_packed_inputs(pools):
    """Both kinds of products read one packing: whichever comes first, the results are the same."""
    rng, spec = np.random.default_rng(8), QuantSpec.parse("float8:128")
    matrix = Linear(low_bit(random_codes(rng, spec, (64, 256)), spec))
    x, ops = rng.standard_normal((40, 256), np.float32), CpuOps(pools[2], dims_for(256, 64, 64))
    alone = ops.norm_linear(x, NO_NORM, [matrix])[0].copy()
    with ops.shared_input():
        first = ops.norm_linear(x, NO_NORM, [matrix])[0].copy()
        assert not ops.must_pack("panels", linear_bf16.pack_columns)
        assert np.array_equal(ops.norm_linear(x, NO_NORM, [matrix])[0], first) and np.array_equal(first, alone)
