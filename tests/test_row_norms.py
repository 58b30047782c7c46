"""Norms of a weight's rows with low-rank products on top, against the weight's definition, by formats, shapes and threads."""

from __future__ import annotations

import numpy as np
import pytest
from low_bit_samples import FORMATS, WITH_OUTLIERS, low_bit, random_codes
from test_instruction_sets import TARGETS, X86, child, runs_here

from effllm.kernels.cpu.row_norms import BLOCK, squared_row_norms
from effllm.kernels.threads import ThreadPool
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Weight, from_f32

SHAPES = [(7, 36, 4), (BLOCK + 5, 515, 16), (3 * BLOCK, 1100, 20)]  # rows, inputs, rank
RAW = ("bf16", "f16", "f32")


def made(name: str, rows: int, depth: int) -> Weight:
    rng = np.random.default_rng(rows)
    if name in RAW:
        return Weight.raw(name, (rows, depth), from_f32(rng.standard_normal((rows, depth), np.float32), name))
    spec = QuantSpec.parse(name)
    return low_bit(random_codes(rng, spec, (rows, depth)), spec)


def check(name: str, rows: int, depth: int, rank: int) -> None:
    weight, rng = made(name, rows, depth), np.random.default_rng(1)
    size = np.abs(weight.to_f32()).mean()
    pairs = {number: (rng.standard_normal((own, depth), np.float32), size * rng.standard_normal((rows, own), np.float32))
             for number, own in ((0, rank), (3, 4))}
    found = []
    for threads in (1, 2):
        pool = ThreadPool(threads)
        found += [squared_row_norms(pool, weight, pairs), squared_row_norms(pool, weight, {3: pairs[3]})]
        pool.close()
    for number, (a, b) in pairs.items():
        wanted = np.square(weight.to_f32().astype(np.float64) + b.astype(np.float64) @ a).sum(1)
        assert np.abs(found[0][number] / wanted - 1).max() < 2e-6
        assert np.array_equal(found[0][number], found[2][number])
    assert np.array_equal(found[1][3], found[0][3]) and np.array_equal(found[3][3], found[0][3])


@pytest.mark.parametrize("rows, depth, rank", SHAPES)
@pytest.mark.parametrize("name", [*RAW, *FORMATS, *WITH_OUTLIERS])
def test_lengths_are_those_of_what_a_weight_means(name: str, rows: int, depth: int, rank: int) -> None:
    """Whatever others are measured with it, and on any threads."""
    check(name, rows, depth, rank)


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="the sets that can be forced are those of x86")
@pytest.mark.parametrize("name", [each for each in TARGETS if runs_here(each)])
def test_every_instruction_set_finds_the_same(name: str, tmp_path) -> None:
    child("import test_row_norms as t\nfor shape in t.SHAPES:\n for name in ('bf16', 'codebook4:16'): t.check(name, *shape)", tmp_path,
          forced=name)
