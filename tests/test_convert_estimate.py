"""How long a conversion is said to take: the arithmetic, with numbers that were worked out by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from effllm.quant.recipe import Recipe
from effllm.quant.spec import QuantSpec
from effllm.runtime import convert_estimate
from effllm.runtime.convert_estimate import Costs, total
from effllm.runtime.convert_plan import ConversionPlan, plan_conversion

sys.path.insert(0, str(Path(__file__).parent))
from conversions import FABLE

COSTS = Costs(depth=256, input_s=1e-4, weight_s=4e-7, factor_s=1e-3, plain_s=1e-8, rate=1e11)
WEIGHTS, INPUTS = 5_767_168, 6 * (6 * 256 + 768) + 256  # of fable's matrices; each of them is one block
# A token's: matrices twice, their inputs with themselves (three of 256 and one of 768 a layer), 512 tokens of attention, the head's inputs.
TEXT = 2 * 6 * 786_432 + 6 * (3 * 256**2 + 768**2) + 2 * 6 * 256 * 512 + 256**2


@pytest.fixture
def plan() -> ConversionPlan:
    made = plan_conversion(FABLE, Recipe(QuantSpec.parse("4bit")))
    with made.store:
        yield made


def low(plan: ConversionPlan) -> list[object]:
    return [job for job in plan.jobs if job.quantized]


def test_a_block_a_weight_a_product_and_what_the_text_showed(plan: ConversionPlan) -> None:
    further = 6 * 256 * 768 * 2 * 2.5 * 512 / 5e10  # down's rows are 512 inputs longer than those that were measured
    wanted = INPUTS * 1e-4 + WEIGHTS * 4e-7 + further + 1e-3 * (6 * (3 + 27) + 1) + 1000 * TEXT / 1e11
    assert total(plan, low(plan), "gptq", COSTS, 1000) == pytest.approx(wanted) == pytest.approx(4.114, abs=1e-3)
    assert total(plan, low(plan), "spqr", COSTS, 1000) == pytest.approx(wanted)


def test_tensors_that_read_the_same_inputs_are_factored_once(plan: ConversionPlan) -> None:
    free = replace(COSTS, input_s=0.0, weight_s=0.0, rate=1e30)
    for roles, once in ((("q",), 1), (("q", "k", "v"), 1), (("q", "o"), 2), (("gate", "up"), 1), (("down",), 27), (("embed",), 1)):
        some = [job for job in low(plan) if job.role in roles and job.key in (0, "outer")]
        assert total(plan, some, "gptq", free, 1) == pytest.approx(1e-3 * once), roles


def test_a_tensor_takes_as_many_blocks_as_it_is_cut_into() -> None:
    seconds = COSTS.searched((20_000, 4096), 2.5)
    assert seconds == pytest.approx(20 * 4096 * 1e-4 + 20_000 * 4096 * (4e-7 + 2 * 2.5 * 3840 / 5e10))
    assert COSTS.searched((100, 64), 2.5) == pytest.approx(64 * 1e-4 + 6400 * 4e-7), "shorter rows than those measured take no less"


def test_an_embedding_that_is_not_the_head_is_rounded_alone(plan: ConversionPlan) -> None:
    embed = next(job for job in plan.jobs if job.role == "embed")
    apart = replace(plan, jobs=(*plan.jobs, replace(embed, role="head", name="head")))
    assert total(apart, [embed], "gptq", COSTS, 1) == pytest.approx(4096 * 256 * 1e-8 + TEXT / 1e11)
    assert total(plan, [embed], "gptq", COSTS, 1) == pytest.approx(256 * 1e-4 + 4096 * 256 * 4e-7 + 1e-3 + TEXT / 1e11)


def test_equalising_judges_ten_exponents_by_the_first_rows(plan: ConversionPlan) -> None:
    layers, down = WEIGHTS - 4096 * 256, 6 * 256 * 768
    products = 10 * 2 * ((layers - down) * 256 + down * 768) / 1e11
    wanted = INPUTS * 1e-4 + WEIGHTS * 4e-7 + 10 * layers * 4e-7 + products + TEXT / 1e11
    assert total(plan, low(plan), "smooth", COSTS, 1) == pytest.approx(wanted)
    assert COSTS.tried((4096, 256), 10, 1024) == COSTS.tried((1024, 256), 10, 1024) == pytest.approx(10 * 1024 * 256 * (4e-7 + 512 / 1e11))


def test_what_rows_take_is_told_from_what_a_block_takes(plan: ConversionPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def seconds(plan: object, job: object, rows: int, quantize: object, stats: object) -> float:
        asked.append((rows, stats is not None))
        return 0.1 + rows / 1000 if stats is not None else rows / 2000

    monkeypatch.setattr(convert_estimate, "_seconds", seconds)
    monkeypatch.setattr(convert_estimate, "_factored_s", lambda stats: 0.25)
    monkeypatch.setattr(convert_estimate, "_multiplications", lambda depth: 7.0)
    gate = next(job for job in plan.jobs if job.role == "gate")
    found = convert_estimate._measured(plan, gate, None, True)
    assert asked == [(96, True), (96, True), (768, True), (768, False)]
    assert found == Costs(256, pytest.approx(0.1 / 256), pytest.approx(0.001 / 256), 0.25, pytest.approx(0.0005 / 256), 7.0)
