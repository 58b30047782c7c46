"""Recipes, the allocation of a byte budget, and the search that measures what it spends on."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import effllm
from effllm import UsageError
from effllm.quant.recipe import Choice, Recipe, allocate, convex_hull, parse_rule, parse_target
from effllm.quant.spec import QuantSpec
from effllm.runtime.conversion import bit_search, bit_search_cache
from effllm.runtime.conversion.convert_plan import Job, plan_conversion
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Notice, Progress
from effllm.runtime.prepare import EngineOptions

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
SPEC = {bits: QuantSpec.parse(f"{bits}bit") for bits in (2, 3, 4, 5, 6, 8)}


def test_the_embedding_and_the_head_are_finer_than_the_base() -> None:
    for bits, outer in ((2, 6), (4, 6), (5, 8), (8, 8)):
        recipe = Recipe(SPEC[bits])
        assert recipe.spec_for("lm_head.weight", (9, 9), "head") == recipe.spec_for("x", (9, 9), "embed") == SPEC[outer]
        assert recipe.spec_for("model.layers.0.mlp.down_proj.weight", (9, 9), "down") == SPEC[bits]


def test_values_that_query_heads_share_are_finer_than_the_base() -> None:
    values = "model.layers.0.self_attn.v_proj.weight"
    for text, finer in (("4bit", SPEC[6]), ("5bit", SPEC[8]), ("codebook3:16", SPEC[6]), ("bf16", QuantSpec.parse("bf16")),
                        ("ternary", QuantSpec.parse("ternary"))):
        recipe = Recipe(QuantSpec.parse(text))
        assert recipe.spec_for(values, (16, 64), "v") == finer
        assert recipe.spec_for(values, (64, 64), "v") == recipe.spec_for("k", (16, 64), "k") == QuantSpec.parse(text)
    assert Recipe(SPEC[4], (("v_proj", SPEC[3]),)).spec_for(values, (16, 64), "v") == SPEC[3]


def test_the_last_rule_that_matches_wins() -> None:
    recipe = Recipe(SPEC[4], (parse_rule("proj=6bit"), parse_rule("down_proj=bf16"), parse_rule("embed=3bit")))
    assert recipe.spec_for("model.layers.0.mlp.down_proj.weight", (9, 9), "down") == QuantSpec.parse("bf16")
    assert recipe.spec_for("model.layers.0.mlp.up_proj.weight", (9, 9), "up") == SPEC[6]
    assert recipe.spec_for("model.embed_tokens.weight", (9, 9), "embed") == SPEC[3]
    assert recipe.ruled("model.norm.weight") is None


@pytest.mark.parametrize("text", ("down_proj", "=4bit", "(=4bit", "down=9bit"))
def test_a_broken_rule_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rule(text)


@pytest.mark.parametrize("pattern, said", (("(", "unterminated"), ("a{99999999999}", "repetition number is too large"),
                                           ("(" * 5000 + ")" * 5000, "too deeply")), ids=("open", "count", "depth"))
def test_a_pattern_that_python_does_not_compile_is_refused_in_one_line(pattern: str, said: str) -> None:
    with pytest.raises(UsageError, match="is not a regular expression") as refused:
        parse_rule(f"{pattern}=6bit")
    assert said in refused.value.message and len(refused.value.message) < 200


def test_outliers_go_where_none_are_named() -> None:
    recipe = Recipe(SPEC[4], (("a", QuantSpec.parse("3bit+2%")), ("b", QuantSpec.parse("bf16")), ("c", SPEC[2]))).with_outliers(0.005)
    assert str(recipe.base) == f"{SPEC[4]}+0.005"
    assert [str(spec) for _, spec in recipe.rules] == [f"{SPEC[3]}+0.02", "bf16", f"{SPEC[2]}+0.005"]


@pytest.mark.parametrize("text, bits", (("4.25bpw", 4.25), ("3", 3.0), (" 16bpw ", 16.0)))
def test_a_target_is_read(text: str, bits: float) -> None:
    assert parse_target(text) == bits


@pytest.mark.parametrize("text", ("", "4.25 bpw per weight", "1.5", "17", "-3", "nan", "4bit"))
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="target"):
        parse_target(text)


def options(*pairs: tuple[int, float]) -> list[Choice]:
    return [Choice(spec, *pair) for spec, pair in zip(SPEC.values(), pairs)]


def test_the_hull_leaves_out_what_pays_for_nobody() -> None:
    kept = convex_hull(options((10, 8.0), (20, 7.9), (30, 1.0), (40, 1.5), (50, 0.5)))
    assert [(each.nbytes, each.damage) for each in kept] == [(10, 8.0), (30, 1.0), (50, 0.5)]
    assert [each.damage for each in convex_hull(options((10, 8.0), (10, 3.0)))] == [3.0]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=6))
def test_a_hull_is_below_everything(pairs: list[tuple[int, int]]) -> None:
    kept = convex_hull(options(*pairs))
    steps = [(one.damage - two.damage) / (two.nbytes - one.nbytes) for one, two in itertools.pairwise(kept)]
    assert all(step > 0 for step in steps) and all(one > two for one, two in itertools.pairwise(steps))
    assert kept[0].nbytes == min(pairs)[0] and kept[0].damage == min(pairs)[1] and kept[-1].damage == min(damage for _, damage in pairs)
    for nbytes, damage in pairs:
        between = [(one, two) for one, two in itertools.pairwise(kept) if one.nbytes <= nbytes <= two.nbytes]
        for one, two in between:
            on_it = one.damage + (two.damage - one.damage) * (nbytes - one.nbytes) / (two.nbytes - one.nbytes)
            assert damage >= on_it - 1e-9


def test_bytes_go_where_they_mend_most() -> None:
    choices = {"quiet": options((10, 1.0), (20, 0.5)), "loud": options((10, 9.0), (20, 2.0), (30, 0.1))}
    assert allocate(choices, 30) == {"quiet": SPEC[2], "loud": SPEC[3]}
    assert allocate(choices, 40) == {"quiet": SPEC[2], "loud": SPEC[4]}
    assert allocate(choices, 1000) == {"quiet": SPEC[3], "loud": SPEC[4]}
    with pytest.raises(UsageError, match="19 bytes.*20"):
        allocate(choices, 19)


convex = st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 10)), min_size=1, max_size=4)


@given(st.lists(convex, min_size=1, max_size=4), st.integers(0, 200))
def test_an_allocation_fits_and_is_near_the_best(raw: list[list[tuple[int, float]]], extra: int) -> None:
    choices = {}
    for index, steps in enumerate(raw):
        sizes = np.cumsum([size for size, _ in steps])
        damages = np.cumsum([damage for _, damage in steps])[::-1]
        choices[str(index)] = [Choice(spec, int(size), float(damage)) for spec, size, damage in zip(SPEC.values(), sizes, damages)]
    least = sum(each[0].nbytes for each in choices.values())
    chosen = allocate(choices, least + extra)
    picked = [next(each for each in choices[name] if each.spec == spec) for name, spec in chosen.items()]
    spent, damage = sum(each.nbytes for each in picked), sum(each.damage for each in picked)
    assert spent <= least + extra and allocate(choices, least + extra) == chosen
    best = min(sum(each.damage for each in mix) for mix in itertools.product(*choices.values())
               if sum(each.nbytes for each in mix) <= least + extra)
    largest_step = max((a.damage - b.damage for each in choices.values() for a, b in itertools.pairwise(convex_hull(each))), default=0.0)
    assert damage <= best + largest_step + 1e-9


def test_rules_go_before_formats_by_whole_names() -> None:
    recipe = Recipe(SPEC[4], (parse_rule("q_proj=bf16"),), names={"a.q_proj": SPEC[2], "a.down": SPEC[3]})
    assert recipe.ruled("a.q_proj") == QuantSpec.parse("bf16") and recipe.ruled("a.down") == SPEC[3]
    assert recipe.ruled("a.downs") is recipe.ruled("xa.down") is recipe.ruled("down") is None
    assert recipe.spec_for("a.down", (9, 9), "embed") == SPEC[3] and recipe.spec_for("a.up", (9, 9), "up") == SPEC[4]
    assert str(recipe.with_outliers(0.005).ruled("a.down")) == f"{SPEC[3]}+0.005"


# -- the search --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched() -> list:
    own = Recipe(SPEC[4], (("layers.0.self_attn.q_proj", QuantSpec.parse("bf16")),))
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", kv="32bit", ctx=512)))[-1]
    before = {key: {name: data.copy() for name, data in raw.items()} for key, raw in engine.model.pager._leases.items()}
    plan = plan_conversion(FABLE, own)
    ids = np.random.default_rng(4).integers(5, 4000, 32).tolist()
    with plan.store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bit_search_cache, "load_measurements", lambda *more: {})  # every search measures
        found = [list(bit_search.search(plan, engine, ids, target, own))[-1] for target in (4.25, 4.25, 3.2)]
        with pytest.raises(UsageError, match="cannot be met"):
            list(bit_search.search(plan, engine, ids, 2.0, own))
        sizes = [plan.with_recipe(each.recipe).bits_per_weight for each in found]
    after = engine.model.pager._leases
    assert all(np.array_equal(data, after[key][name]) for key, raw in before.items() for name, data in raw.items())
    engine.close()
    return [found, sizes]


def test_a_search_meets_its_target_and_repeats(searched: list) -> None:
    found, sizes = searched
    assert 4.1 < sizes[0] <= 4.25 and 3.05 < sizes[2] <= 3.2
    assert [each.bits_per_weight for each in found] == pytest.approx(sizes, rel=1e-9)
    assert found[0] == found[1]


def test_a_search_keeps_a_users_rules_and_spends_on_what_hurts(searched: list) -> None:
    found, _ = searched
    assert found[0].recipe.spec_for("model.layers.0.self_attn.q_proj.weight", (256, 256), "q") == QuantSpec.parse("bf16")
    bits = [found[0].recipe.ruled(name).bits for name in found[0].damage]
    assert len(set(bits)) > 1
    assert sum(found[2].damage.values()) > sum(found[0].damage.values()) > 0


@pytest.mark.parametrize("window_s, clock_s, said", [(0.2, 0.8, "35 s"), (3.0, 3.0, "9 min")])
def test_a_search_says_how_long_it_takes_before_it_starts(monkeypatch: pytest.MonkeyPatch, window_s: float, clock_s: float,
                                                          said: str) -> None:
    """By all windows of the text, or by one where that takes long: 4 of them for each of 43 tensors and for the model as it is."""
    clock, plan = [0.0], plan_conversion(FABLE, Recipe(SPEC[4]))
    own = bit_search._log_probabilities

    def slow(*given: object) -> np.ndarray:
        clock[0] += window_s
        return own(*given)

    monkeypatch.setattr(bit_search, "_log_probabilities", slow)
    monkeypatch.setattr(bit_search.time, "monotonic", lambda: clock[0])
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", kv="32bit", ctx=512)))[-1]
    ids = np.random.default_rng(4).integers(5, 4000, 2048).tolist()
    with plan.store:
        running = bit_search.search(plan, engine, ids, 4.25, Recipe(SPEC[4]))
        first, told = next(running), next(running)
        running.close()
    engine.close()
    assert isinstance(first, Progress) and clock == [pytest.approx(clock_s)], "nothing is measured silently, and nothing but the model yet"
    assert isinstance(told, Notice) and f"43 runs of 2048 tokens take about {said}" in told.text


def test_many_tensors_are_not_compared_with_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture has some ten thousand of them."""
    plan = plan_conversion(FABLE, Recipe(SPEC[4]))
    plan.store.close()
    many = replace(plan, jobs=tuple(replace(job, name=f"{copy} {job.name}") for copy in range(20) for job in plan.jobs))
    compared = []
    monkeypatch.setattr(Job, "__eq__", lambda one, other: compared.append(1) or one is other)
    with pytest.raises(UsageError, match="cannot be met"):
        list(bit_search.search(many, None, [], 2.0, Recipe(SPEC[4])))
    assert not compared


@pytest.mark.slow
def test_the_formats_of_many_tensors_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern for each of them would be tried on every other, and compiled again for each that Python has forgotten."""
    own = Recipe(SPEC[4], (parse_rule("layers.0.self_attn.q_proj=bf16"),))
    plan = plan_conversion(FABLE, own)
    plan.store.close()
    many = replace(plan, jobs=tuple(replace(job, name=f"{copy}.{job.name}", key=job.key if job.key == "outer" else job.key + 6 * copy)
                                    for copy in range(480) for job in plan.jobs))

    def measure_units(plan: object, engine: object, ids: object, found: list, specs: dict) -> Iterator[tuple]:
        for place, unit in enumerate(found):
            errors = {job.name: {width: (1 + index % 7) / spec.bits for width, spec in specs.items()}
                      for index, job in enumerate(unit.jobs)}
            yield unit.name, 1.0 + place % 5, errors

    monkeypatch.setattr(bit_search, "measure_units", measure_units)
    tried, search, weighed = [], re.search, []

    def counted(pattern: str, name: str) -> re.Match | None:
        tried.append(pattern)
        assert len(tried) <= 4 * len(many.jobs), "patterns are tried on every name"
        return search(pattern, name)

    monkeypatch.setattr(re, "search", counted)
    monkeypatch.setattr(bit_search, "prod", lambda shape: weighed.append(shape) or prod(shape))
    *_, found = bit_search.search(many, None, [], 4.25, own)
    specs = {job.name: job.spec for job in many.with_recipe(found.recipe).jobs}
    assert len(found.damage) == 480 * 42 > 20_000
    assert set(tried) == {own.rules[0][0]} and len(weighed) == len(found.damage)
    assert specs["7.model.layers.0.self_attn.q_proj.weight"] == QuantSpec.parse("bf16")
    assert len({specs[name] for name in found.damage}) > 1
    patterns = Recipe(SPEC[4], tuple((f"^{re.escape(name)}$", specs[name]) for name in list(found.damage)[:200]) + own.rules)
    assert all(patterns.ruled(job.name) in (None, specs[job.name]) for job in many.jobs[:300])


def test_many_tensors_are_measured_in_bands() -> None:
    plan = plan_conversion(FABLE, Recipe(SPEC[4]))
    with plan.store:
        jobs = [job for job in plan.jobs if job.spec != job.source]
    assert len(bit_search.units(jobs)) == len(jobs) == 43
    deep = [replace(job, name=f"{copy} {job.name}", key=job.key + 6 * copy) for copy in range(8) for job in jobs if job.key != "outer"]
    bands = bit_search.units([*deep, *(job for job in jobs if job.key == "outer")])
    assert 40 < len(bands) <= bit_search.MAX_UNITS + 1
    assert sorted(job.name for band in bands for job in band.jobs) == sorted([*(job.name for job in deep), "model.embed_tokens.weight"])
