"""Estimated conversion time: the arithmetic, against numbers worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from conversions import FABLE

from effllm.quant.methods import smooth
from effllm.quant.recipe import Recipe
from effllm.quant.spec import QuantSpec
from effllm.runtime import calibrate
from effllm.runtime.calibrate import Calibration, TextCosts, text_costs
from effllm.runtime.config import read_config
from effllm.runtime.conversion import convert_estimate
from effllm.runtime.conversion.convert_estimate import Costs, text_operations, total, visit_operations
from effllm.runtime.conversion.convert_plan import ConversionPlan, plan_conversion
from effllm.runtime.families import expert_role
from effllm.runtime.moe_config import MoEConfig
from effllm.runtime.planning.timing import median_times

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
    text_s = 1000 * text_operations(plan) / 1e11
    assert total(plan, low(plan), "gptq", COSTS, text_s) == pytest.approx(wanted) == pytest.approx(4.114, abs=1e-3)
    assert total(plan, low(plan), "spqr", COSTS, text_s) == pytest.approx(wanted)


def test_tensors_that_read_the_same_inputs_are_factored_once(plan: ConversionPlan) -> None:
    free = replace(COSTS, input_s=0.0, weight_s=0.0, rate=1e30)
    for roles, once in ((("q",), 1), (("q", "k", "v"), 1), (("q", "o"), 2), (("gate", "up"), 1), (("down",), 27), (("embed",), 1)):
        some = [job for job in low(plan) if job.role in roles and job.key in (0, "outer")]
        assert total(plan, some, "gptq", free, 0.0) == pytest.approx(1e-3 * once), roles


def test_a_tensor_takes_as_many_blocks_as_it_is_cut_into() -> None:
    seconds = COSTS.searched((20_000, 4096), 2.5)
    assert seconds == pytest.approx(20 * 4096 * 1e-4 + 20_000 * 4096 * (4e-7 + 2 * 2.5 * 3840 / 5e10))
    assert COSTS.searched((100, 64), 2.5) == pytest.approx(64 * 1e-4 + 6400 * 4e-7), "shorter rows than those measured take no less"


def test_an_embedding_that_is_not_the_head_is_rounded_alone(plan: ConversionPlan) -> None:
    embed = next(job for job in plan.jobs if job.role == "embed")
    apart = replace(plan, jobs=(*plan.jobs, replace(embed, role="head", name="head")))
    assert total(apart, [embed], "gptq", COSTS, 0.5) == pytest.approx(4096 * 256 * 1e-8 + 0.5)
    assert total(plan, [embed], "gptq", COSTS, 0.5) == pytest.approx(256 * 1e-4 + 4096 * 256 * 4e-7 + 1e-3 + 0.5)


def test_equalising_judges_ten_exponents_by_the_first_rows(plan: ConversionPlan) -> None:
    layers, down = WEIGHTS - 4096 * 256, 6 * 256 * 768
    products = 10 * 2 * ((layers - down) * 256 + down * 768) / 1e11
    wanted = INPUTS * 1e-4 + WEIGHTS * 4e-7 + 10 * layers * 4e-7 + products + 0.5
    assert total(plan, low(plan), "smooth", replace(COSTS, factor_s=0.0), 0.5) == pytest.approx(wanted)
    for rows in (4096, 1024):
        assert smooth.equalise_s((rows, 256), 4e-7, 1e11) == pytest.approx(10 * 1024 * 256 * (4e-7 + 512 / 1e11))


def test_what_a_text_showed_is_factored_for_those_who_ask_for_the_factor() -> None:
    stats = convert_estimate.synthetic_stats(64)
    assert convert_estimate._factored_s(stats) == 0
    assert stats.feedback.shape == (64, 64) and convert_estimate._factored_s(stats) > 0


def test_what_rows_take_is_told_from_what_a_block_takes(plan: ConversionPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def seconds(plan: object, job: object, rows: int, quantize: object, stats: object) -> float:
        asked.append((rows, stats is not None))
        return 0.1 + rows / 1000 if stats is not None else rows / 1000

    monkeypatch.setattr(convert_estimate, "_seconds", seconds)
    monkeypatch.setattr(convert_estimate, "_factored_s", lambda stats: 0.25)
    monkeypatch.setattr(convert_estimate, "_multiplications", lambda depth: 7.0)
    gate = next(job for job in plan.jobs if job.role == "gate")
    found = convert_estimate._measured(plan, gate, None, True)
    assert asked == [(96, True), (96, True), (768, True), (768, False)]
    assert found == Costs(256, pytest.approx(0.1 / 256), pytest.approx(0.001 / 256), 0.25, pytest.approx(0.001 / 256), 7.0)


def test_what_is_short_is_measured_in_turns_and_the_median_counts() -> None:
    """One turn in which the machine did something else changes nothing; what takes long is measured once."""
    left = iter([(0.01, 0.03), (0.01, 0.09), (0.05, 0.03), (0.01, 0.04), (0.02, 0.03), (0.01, 0.2)])
    assert median_times(lambda: next(left)) == [0.01, pytest.approx(0.035)] and next(left, None) is None
    assert median_times(lambda: (0.3, 0.2)) == [0.3, 0.2]
    count = iter(range(100))
    assert median_times(lambda: (next(count) * 1e-6,)) == [4e-6] and next(count) == 9


def test_a_moment_in_which_the_machine_did_something_else_is_not_multiplied(plan: ConversionPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def seconds(plan: object, job: object, rows: int, quantize: object, stats: object) -> float:
        return 0.003 + rows / 50_000 + (0.05 if next(calls) == 2 else 0.0)  # the first turn's sample of all rows

    monkeypatch.setattr(convert_estimate, "_seconds", seconds)
    gate = next(job for job in plan.jobs if job.role == "gate")
    found = convert_estimate._measured(plan, gate, None, False)
    assert found.weight_s == pytest.approx(1 / 50_000 / 256) and found.input_s == pytest.approx(0.003 / 256)


# -- the text --------------------------------------------------------------------------------------------------------------------

IDS = list(range(5, 1505))  # windows of 512, 512 and 476 tokens


def test_a_text_takes_its_layers_its_windows_and_the_head() -> None:
    assert TextCosts(512, 0.2, 0.03, 0.001).seconds(6, 1024) == pytest.approx(6 * 0.2 + 6 * 2 * 0.03 + 2 * 0.001)
    assert TextCosts(512, 0.0, 0.03, 0.0).seconds(1, 768) == pytest.approx(1.5 * 0.03), "a last window is shorter"


@pytest.mark.parametrize("most, asked, window_s", [
    (4096, [128, 512], 0.1 + 512e-3),  # all of a window, after one that loads the kernels
    (512, [128, 512], 0.1 + 512e-3),
    (100, [25, 25, 100, 25, 100], 0.1 + 512e-3)])  # too much: a token from the difference, what every window takes from the rest
def test_a_window_goes_through_the_last_layer(monkeypatch: pytest.MonkeyPatch, most: int, asked: list[int], window_s: float) -> None:
    seen: list[int] = []

    def timed(self: Calibration, layer: int, weights: object) -> object:
        assert layer == 5 and len(weights.input_norm.weight) == 256 and self.states.shape == (512, 256)
        return lambda tokens: seen.append(tokens) or 0.1 + tokens * 1e-3

    monkeypatch.setattr(Calibration, "timed", timed)
    found = text_costs(FABLE, read_config(FABLE), IDS, 1, most)
    assert seen == asked
    assert (found.width, found.window_s) == (512, pytest.approx(window_s))
    assert found.layer_s > 0 and found.head_s > 0


def test_the_window_is_that_of_the_pass_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, matrices and the sums of their inputs, on the threads of the conversion: not a product that stands for them."""
    sums: list[tuple[int, int]] = []
    add = calibrate.StatsAccumulator.add
    monkeypatch.setattr(calibrate.StatsAccumulator, "add", lambda self, inputs: sums.append(inputs.shape) or add(self, inputs))
    text_costs(FABLE, read_config(FABLE), IDS, 1, 64)
    taps = [(256,), (256,), (256,), (768,)]
    first, turn = ([(tokens, *width) for tokens in each for width in taps] for each in ((16,), (16, 64)))
    assert sums == first + turn * (len(sums) // len(turn)) + [(512, 256)]  # the head's last of all


def test_a_text_of_a_large_model_is_sampled_by_fewer_tokens(plan: ConversionPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def costs(folder: Path, config: object, ids: list[int], threads: int, most: int) -> TextCosts:
        asked.append((folder, len(ids), threads, most))
        return TextCosts(500, 0.25, 0.5, 0.125)

    monkeypatch.setattr(convert_estimate, "text_costs", costs)
    for rate, most in ((1e12, int(0.5e12 * 6 / TEXT)), (1e8, 64)):
        assert convert_estimate._text_s(plan, IDS, 2, rate) == pytest.approx(6 * 0.25 + 6 * 3 * 0.5 + 3 * 0.125)
        assert asked.pop() == (FABLE, 1500, 2, most)
    assert text_operations(plan) == TEXT


def test_what_experts_read_is_summed_later(plan: ConversionPlan) -> None:
    """Two experts, of which a token visits one: gate and up read the same, down its own."""
    of = {job.role: job for job in plan.jobs if job.key == 0}
    experts = [replace(of[role], role=expert_role(expert, role)) for expert in (0, 1) for role in ("gate", "up", "down")]
    mixed = replace(plan, jobs=tuple(experts), config=replace(plan.config, moe=MoEConfig(2, 1, 768, True, frozenset({0}))))
    assert visit_operations(mixed) == 256**2 + 768**2
    assert visit_operations(plan) == 0
