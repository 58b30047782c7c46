"""Dot products or table lookup: measured, cached, decided, forced, reported; the choice never changes what a model generates."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from effllm import UsageError
from effllm.kernels import autotune
from effllm.kernels.autotune import MARGIN, Case, KernelBenchmark, Timing
from effllm.kernels.cpu import linear
from effllm.kernels.threads import ThreadPool
from effllm.runtime.engine import Engine, open_prepared
from effllm.runtime.events import Notice, Progress
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.planning.needed_kernels import Needs, kernel_kinds
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.weights import lookup_layout

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "torch_dtype": "bfloat16", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256, "tie_word_embeddings": True}
CASES = [Case(3, 64, 128, 1), Case(3, 64, 352, 1)]
FASTER, EQUAL, SLOWER = Timing(1e9, 1.5e9), Timing(1e9, 1.02e9), Timing(1e9, 0.8e9)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A memory of this test's own; the machine code still comes from the usual place."""
    (tmp_path / "choices").mkdir()
    for module in (autotune, lookup_layout):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "choices")
    return tmp_path / "choices"


@pytest.fixture
def shape(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


def opened(shape: str, kernel: str, spec: str = "affine3:64", load: str = "ram") -> tuple[Engine, list[str], list[Progress]]:
    """An engine with what it said and did on the way."""
    options = EngineOptions(device="cpu", threads=1, ctx=128, kernel=kernel, load=load)
    items = list(open_prepared(lambda: prepare_synthetic(shape, options, spec), kernel_kinds(Needs(True), options)))
    return items[-1], [item.text for item in items if isinstance(item, Notice)], [item for item in items if isinstance(item, Progress)]


def looked_up(engine: Engine) -> int:
    return len(engine.model.lut_tensors)


# -- measuring and remembering ----------------------------------------------------------------------------------------------------------


def test_a_choice_needs_more_than_noise():
    assert FASTER.kernel == "lut" and "1.50 times" in FASTER.reason
    assert EQUAL.kernel == "dot" and "too little" in EQUAL.reason
    assert SLOWER.kernel == "dot" and SLOWER.reason.endswith("here")
    assert Timing(1.0, MARGIN).kernel == "lut"


def test_what_was_measured_is_remembered_and_added_to(folder):
    assert autotune.load_timings() == {}
    autotune.save_timings({CASES[0]: FASTER})
    autotune.save_timings({CASES[1]: SLOWER})
    assert autotune.load_timings() == {CASES[0]: FASTER, CASES[1]: SLOWER}
    autotune.save_timings({CASES[0]: EQUAL})
    assert autotune.load_timings()[CASES[0]] == EQUAL
    assert [path.name for path in folder.iterdir()] == [autotune.FILE]


@pytest.mark.parametrize(("whole", "damaged"), [('"measured"', ""), ('"lut"', '"lot"'), ('"version": 1', '"version": 2'), ("{", "["),
                                                ("1000000000.0", "0"), ("1000000000.0", '"fast"'), (autotune.FORMAT, "other")])
def test_a_damaged_memory_is_no_memory(folder, whole, damaged):
    autotune.save_timings({CASES[0]: FASTER})
    path = folder / autotune.FILE
    assert whole in path.read_text()
    path.write_text(path.read_text().replace(whole, damaged), encoding="utf-8")
    assert autotune.load_timings() == {}
    autotune.save_timings({CASES[1]: SLOWER})
    assert autotune.load_timings() == {CASES[1]: SLOWER}


def test_without_a_folder_nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(autotune, "cache_folder", lambda: None)
    autotune.save_timings({CASES[0]: FASTER})
    assert autotune.load_timings() == {}


def test_a_trial_runs_both_kernels_on_weights_that_no_cache_holds():
    pool = ThreadPool(1)
    trial = KernelBenchmark(pool, 3, 64, 96, 128, nbytes=1 << 20)
    assert trial.blobs.nbytes >= 1 << 20 and len(set(trial.blocks[:, linear.FIRST].tolist())) == len(trial.blobs)
    rates = trial.rates(("dot", "lut"), rounds=2, parts=3)
    pool.close()
    assert {kernel: len(found) for kernel, found in rates.items()} == {"dot": 6, "lut": 6}
    assert min(min(found) for found in rates.values()) > 0
    assert np.isfinite(trial.out).all() and trial.out.any()


def test_a_child_measures_and_the_parent_remembers():
    assert list(autotune.measure([(CASES[0], 96), (CASES[1], 128)])) == [(1, 2), (2, 2)]
    found = autotune.load_timings()
    assert set(found) == set(CASES) and all(min(timing.dot, timing.lut) > 0 for timing in found.values())


def test_a_child_that_fails_leaves_the_case_unknown():
    assert list(autotune.measure([(Case(3, 64, 128, 1), 96), (Case(3, 0, 128, 1), 96)])) == [(1, 2)]
    assert set(autotune.load_timings()) == {CASES[0]}


# -- a model ------------------------------------------------------------------------------------------------------------------------------


def test_every_kernel_writes_the_same(shape):
    answers = []
    for kernel in ("dot", "lut"):
        engine, _, _ = opened(shape, kernel)
        assert looked_up(engine) == (12 if kernel == "lut" else 0)  # all but values, which have more bits
        ids = list(range(40))
        logits = [next(rows.copy() for _, rows in engine.score(ids))]  # many columns
        for count in (1, 1, 5, 1):
            logits.append(engine.forward_logits(ids[:count]).copy())
        answers.append(logits)
        engine.close()
    assert all(np.array_equal(a, b) for a, b in zip(*answers, strict=True))


def test_lookup_that_was_asked_for_is_reported_with_what_cannot_have_it(shape):
    engine, said, _ = opened(shape, "lut")
    engine.close()
    assert any("10 weights of 3 bits and 128 inputs are in lookup order: --kernel lut" in text for text in said)
    engine, said, _ = opened(shape, "lut", "codebook4:16")
    assert looked_up(engine) == 0
    engine.close()
    assert any(text.startswith("--kernel lut: 12 weights run by dot products: ") for text in said)


def test_mapped_weights_stay_as_they_are(shape):
    options = EngineOptions(device="cpu", threads=1, ctx=128, kernel="lut", load="mmap")
    prepared = prepare_synthetic(shape, options, "affine3:64")
    tensors = lookup_tensors(prepared)
    assert {decision.kernel for decision in lookup_layout.decide(prepared, tensors)} == {"dot"}
    assert list(lookup_layout.measure(replace(prepared, options=replace(options, kernel="auto")), tensors)) == []


def lookup_tensors(prepared):
    from effllm.runtime.tensors import check_tensors

    return check_tensors(prepared.config, prepared.store, prepared.container)


def test_a_small_model_is_not_measured(shape):
    engine, said, progress = opened(shape, "auto")
    assert looked_up(engine) == 0 and not said
    engine.close()
    assert not [item for item in progress if "measuring" in item.phase]


def test_a_model_that_brings_something_new_is_measured_once_and_says_so(shape, monkeypatch):
    asked = []

    def measured(cases):
        asked.append(cases)
        autotune.save_timings({case: FASTER if case.depth == 128 else SLOWER for case, _ in cases})
        yield from ((done, len(cases)) for done in range(1, len(cases) + 1))

    monkeypatch.setattr(autotune, "measure", measured)
    monkeypatch.setattr(lookup_layout, "LEAST_NBYTES", 0)
    engine, said, progress = opened(shape, "auto")
    assert [(item.done, item.total) for item in progress if "measuring" in item.phase] == [(0, 2), (1, 2), (2, 2)]
    assert asked == [[(CASES[0], 352), (CASES[1], 128)]]
    assert looked_up(engine) == 10  # all but values and the down projections, whose inputs were slower
    assert said == ["10 weights of 3 bits and 128 inputs are in lookup order: " + FASTER.reason]
    engine.close()
    engine, said, progress = opened(shape, "auto")
    assert len(asked) == 1 and looked_up(engine) == 10
    assert not [item for item in progress if "measuring" in item.phase]
    engine.close()


def test_what_could_not_be_measured_runs_by_dot_products(shape, monkeypatch):
    monkeypatch.setattr(autotune, "measure", lambda cases: iter(()))
    monkeypatch.setattr(lookup_layout, "LEAST_NBYTES", 0)
    engine, said, _ = opened(shape, "auto")
    assert looked_up(engine) == 0 and not said
    engine.close()


def test_an_unknown_kernel_is_refused():
    with pytest.raises(UsageError, match="--kernel"):
        EngineOptions(kernel="fast")


# -- doctor -------------------------------------------------------------------------------------------------------------------------------


def test_doctor_knows_kernel_and_reason_of_low_bit_weights():
    from effllm.cli.doctor import reason
    from effllm.runtime.planning.diagnose import kernel_choices, measurements

    chosen = {(each.stored, each.columns): each for each in kernel_choices() if each.op == "low-bit matrix"}
    assert "not sums of bit planes" in reason(chosen["codebook4:16", 1]) and "8 bits" in reason(chosen["symmetric8:32", 1])
    assert chosen["codebook4:16", 1].chosen.startswith("dot products") and chosen["codebook4:16", 512].chosen.startswith("int8 tiles")
    for either in ("ternary:64", "affine3:64"):  # what the table of measurements decides is not said to be decided already
        assert chosen[either, 1].chosen.startswith("dot products or table lookup") and "measured" in reason(chosen[either, 1])
        assert chosen[either, 512].chosen.startswith("int8 tiles")
    assert measurements() == ()
    autotune.save_timings({CASES[1]: SLOWER, CASES[0]: FASTER})
    assert [(each.case, each.kernel) for each in measurements()] == [(CASES[0], "lut"), (CASES[1], "dot")]
