"""Estimates for pages that are not read: exact sign sums, masses and outputs as defined, on every instruction set."""

from pathlib import Path

import numpy as np
import pytest
from estimate_samples import LEAD, SHAPES, Pages, bits, check_pages, check_sums
from test_instruction_sets import X86, child, runs_here

from effllm.kernels.compile import cpu_features
from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool


def test_sums_of_signs_are_exact() -> None:
    check_sums()


@pytest.mark.parametrize("depth,group", SHAPES)
def test_masses_and_outputs_are_those_of_the_definition(pool: ThreadPool, depth: int, group: int) -> None:
    check_pages(pool, depth, group)


def test_scores_are_capped(pool: ThreadPool) -> None:
    check_pages(pool, 64, 2, softcap=2.0)


def test_who_computed_what_makes_no_difference() -> None:
    assert bits(1) == bits(3)


def test_a_query_that_is_not_finite_shows_in_its_row_alone(pool: ThreadPool) -> None:
    own, clean = Pages(64, 4), Pages(64, 4)
    own.q[1, 2, 7] = np.nan
    for each in (own, clean):
        each.run(pool)
    kept = np.array([[True] * 4, [True, True, False, True]])
    assert np.isnan(own.partials[1, LEAD, 2, -1]) and np.isnan(own.promised[1, :, 2, -1]).all()
    assert np.array_equal(own.promised.swapaxes(1, 2)[kept][..., -2:], clean.promised.swapaxes(1, 2)[kept][..., -2:])


def test_scores_far_below_the_largest_weigh_nothing(pool: ThreadPool) -> None:
    """The largest sizes that codes and steps can stand for."""
    own = Pages(64, 1, pages=2)
    own.q *= 1000
    own.far[:], own.steps[:] = 255, 1.0
    own.run(pool)
    assert np.isfinite(own.promised[..., -2:]).all() and (own.promised[..., -1] >= 0.999).all() and (own.promised[..., -1] < PAGE).all()


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="the sets that can be forced are those of x86")
@pytest.mark.parametrize("name", [name for name in ("avx2", "portable") if name != INSTRUCTION_SET and runs_here(name)])
def test_with_fewer_instructions(name: str, tmp_path: Path) -> None:
    child("import estimate_samples; estimate_samples.check_all()", tmp_path, forced=name)


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpu_features(), reason="the emulation is written in AVX2")
@pytest.mark.parametrize("name", [name for name in ("avx512", "avx2vnni", "neondot", "neon") if not runs_here(name)])
def test_with_emulated_instructions(name: str, tmp_path: Path) -> None:
    child("import estimate_samples; estimate_samples.check_all()", tmp_path, emulated=name)


