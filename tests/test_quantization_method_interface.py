"""A quantization method is one module: its required functions suffice for a whole conversion, its optional ones are used."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from conversions import check_whole, run, short_fable

from effllm import UsageError
from effllm.quant import methods
from effllm.quant.methods import rtn
from effllm.quant.spec import DEFAULTS, QuantSpec
from effllm.quant.stats import Stats
from effllm.runtime.conversion import convert_estimate
from effllm.runtime.convert import ConvertOptions, convert, recipe_of
from effllm.runtime.events import Notice

TEXT = "Once upon a time a fox met a king at the river, and they talked about the weather, the harvest and the price of bread. " * 25
NAME = "mine"


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The least that is a method: `rtn` under a name of its own. `asked` are the statistics that it was given."""
    module = ModuleType(f"{methods.__name__}.{NAME}")

    def quantize(rows: object, spec: QuantSpec, stats: Stats | None = None, pool: object = None) -> object:
        module.asked.append(stats)
        return rtn.quantize(rows, spec, None, pool)

    module.asked, module.NEEDS, module.check, module.quantize = [], frozenset(), rtn.check, quantize
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(methods, "METHODS", (*methods.METHODS, NAME))
    return module


def asked_for(spec: str = "4bit", **more: object) -> ConvertOptions:
    return ConvertOptions(recipe_of(spec, (), NAME), spec, method=NAME, **more)


@pytest.mark.parametrize("needs", ["mean_square", "hessian", None])
def test_what_a_method_must_have_is_enough_to_estimate_and_to_quantize(tmp_path: Path, mine: ModuleType, needs: str | None) -> None:
    mine.NEEDS = frozenset([needs] if needs else [])
    source = short_fable(tmp_path / "short")
    given = {"calibration_text": TEXT, "calibration_tokens": 512} if needs else {}
    _, said = run(source, tmp_path / "out", asked_for(**given))
    assert any(line.startswith(f"4bit with {NAME}") and "M weights take about" in line for line in said), said
    assert check_whole(tmp_path / "out", source).method == {"name": NAME}
    assert {stats is not None for stats in mine.asked} == {needs is not None}
    assert needs is None or all(getattr(stats, needs) is not None for stats in mine.asked)


def test_an_estimate_is_what_rows_take_and_what_the_method_adds(tmp_path: Path, mine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(measured: float = 1.0) -> float:
        monkeypatch.setattr(convert_estimate, "_seconds", lambda plan, job, rows, quantize, stats: measured * rows)
        monkeypatch.setattr(convert_estimate, "_text_s", lambda *given: 0.0)
        monkeypatch.setattr(convert_estimate, "_multiplications", lambda depth: 1e6)
        return next(item.text for item in convert(source, tmp_path / "out", asked_for(calibration_text=TEXT, calibration_tokens=512))
                    if isinstance(item, Notice) and "take about" in item.text).split("take about ")[1]

    mine.NEEDS, source = frozenset({"hessian"}), short_fable(tmp_path / "short")
    weights = 2 * 786_432 + 4096 * 256  # two layers' and the embedding's, 256 inputs a row that takes a second
    plain = convert_estimate.human_time(weights / 256)
    assert said().startswith(plain)
    mine.equalise_s = lambda shape, weight_s, rate: shape[0] * shape[1] * weight_s
    assert said().startswith(convert_estimate.human_time((weights + 2 * 786_432) / 256)), "of layers alone"
    mine.PRODUCTS = 10.0  # down's rows are 512 inputs longer than those that were measured
    assert said(0.0).startswith(convert_estimate.human_time(2 * 256 * 768 * 2 * 10 * 512 / 0.5e6))


def test_what_a_width_alone_means_is_the_methods_own_to_say(mine: ModuleType) -> None:
    assert {name: str(recipe_of(name, (), NAME).base) for name in DEFAULTS} == DEFAULTS
    mine.SHORT = {"4bit": "affine4:64"}
    made = recipe_of("4bit", ("down=3bit",), NAME)
    assert str(made.base) == "affine4:64" and str(made.rules[0][1]) == DEFAULTS["3bit"]
    mine.OUTLIERS = 0.01
    made = recipe_of("4bit", ("down=3bit", "up=3bit+2%", "o_proj=bf16"), NAME)
    assert made.base.outliers == 0.01 and [spec.outliers for _, spec in made.rules] == [0.01, 0.02, 0.0]
    assert str(recipe_of("4bit", ()).base) == DEFAULTS["4bit"], "without a method: the usual ones"


def test_a_method_that_changes_layers_is_asked_for_each(tmp_path: Path, mine: ModuleType) -> None:
    seen = []

    def equalise(tensors: dict, stats: object, specs: object, layout: methods.Layout, pool: object) -> dict:
        seen.append((layout.heads * layout.head_dim, {*specs}, tensors["q"].shape))
        return {"q": 2 * tensors["q"]}

    mine.NEEDS, mine.equalise = frozenset({"mean_square"}), equalise
    source = short_fable(tmp_path / "short")
    run(source, tmp_path / "out", asked_for("8bit", calibration_text=TEXT, calibration_tokens=512))
    assert seen == [(256, {"q", "k", "v", "o", "gate", "up", "down"}, (256, 256))] * 2
    with pytest.raises(AssertionError, match="q_proj"):  # it is another tensor than the source's
        check_whole(tmp_path / "out", source)


def test_what_a_module_lacks_is_named(mine: ModuleType) -> None:
    del mine.check
    with pytest.raises(TypeError, match="check"):
        methods.get(NAME)
    with pytest.raises(UsageError, match="no quantization method"):
        recipe_of("4bit", (), "")
