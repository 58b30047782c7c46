"""When a run speculates and with which drafter, decided in the plan: weights in memory and on disk, mixtures, neuron bundles, draft
models."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from streamed_models import larger_than_memory

import effllm
from effllm import DoesNotFit, EffllmError, ModelNotFound, UsageError
from effllm.offload.notes import Fallback
from effllm.offload.placement import Residency
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, Step, open_engine
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.prepare import EngineOptions, Prepared, prepare
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation.draft_model import prepare_draft
from effllm.runtime.speculation.drafts import Draft
from effllm.runtime.speculation.speculation_plan import MIXTURE, NEURONS, NO_DRAFT, decide

FABLE = Path(effllm.__path__[0]) / "models" / "fable"


def opened(**asked: object) -> Engine:
    return list(open_engine(FABLE, EngineOptions(device="cpu", **asked)))[-1]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return larger_than_memory(tmp_path_factory.mktemp("models") / "large")


@cache
def resident_budget(folder: Path) -> int:
    return prepare(folder, EngineOptions(device="cpu", ctx=256)).placement.total_bytes


def test_the_planner_turns_it_on_where_a_dense_model_comes_from_the_disk(large: Path) -> None:
    short = {"device": "cpu", "ctx": 256, "ram": f"{resident_budget(large) - (64 << 20)}"}
    streams = prepare(large, EngineOptions(**short))
    assert streams.placement.streamed_bytes and "verifies several" in streams.notices[-1]
    assert streams.speculation.lookup and streams.speculation.recycles and streams.speculation.waits
    off = prepare(large, EngineOptions(**short, spec="off"))
    assert off.placement.streamed_bytes and not off.speculation and "verifies" not in " ".join(off.notices)
    for folder, asked, wanted in ((large, "auto", (True, False)), (FABLE, "auto", (True, False)), (FABLE, "lookup", (True, True)),
                                  (FABLE, "off", (False, False))):
        found = prepare(folder, EngineOptions(device="cpu", ctx=256, spec=asked))
        assert (found.speculation.lookup, found.speculation.recycles) == wanted and not found.speculation.waits
        assert bool(found.speculation) is wanted[0] and "draft" not in " ".join(found.notices), "in memory it goes without saying"
    for asked in ("auto", "lookup"):
        engine = opened(ctx=256, spec=asked)
        assert isinstance(engine.speculation, Speculation)
        engine.close()


def test_a_mixture_from_the_disk_never_drafts() -> None:
    prepared = prepare_synthetic("olmoe-1b-7b", EngineOptions(device="cpu", ctx=128, ram="40G"))
    assert decide(EngineOptions(spec="lookup"), prepared.config, prepared.placement, None)[0].lookup, "in memory it may"
    paged = replace(prepared.placement, residency=Residency((), (0,), 0, 1 << 30, 1 << 20))
    assert decide(EngineOptions(spec="lookup"), prepared.config, paged, None)[1] == (MIXTURE,)
    for spec in ("auto", "lookup", "off"):
        assert not decide(EngineOptions(spec=spec), prepared.config, paged, None)[0]
    slots = replace(prepared.placement, residency=None, expert_slots=40)
    assert decide(EngineOptions(draft="small"), prepared.config, slots, None)[1] == (MIXTURE,)
    neurons = replace(prepared.placement, slots=(4,))
    assert decide(EngineOptions(spec="lookup"), replace(prepared.config, moe=None), neurons, None)[1] == (NEURONS,)
    assert decide(EngineOptions(draft="small"), prepared.config, prepared.placement, None)[1] == (NO_DRAFT,), "a GPU that takes no layer"
    on_card = replace(prepared.placement, devices=("cpu", "cuda"))
    assert not decide(EngineOptions(spec="lookup"), prepared.config, on_card, None)[0]


def test_the_memory_of_a_draft_model_counts() -> None:
    prepare(FABLE, EngineOptions(device="cpu", ctx=256, ram="8G", draft=str(FABLE)))  # what it loads first is a part of the process then
    alone = prepare(FABLE, EngineOptions(device="cpu", ctx=256, ram="8G"))
    both = prepare(FABLE, EngineOptions(device="cpu", ctx=256, ram="8G", draft=str(FABLE)))
    taken = both.speculation.draft_nbytes
    assert taken > 11_540_992 and alone.placement.budget.ram == both.placement.budget.ram == 8 * 10**9
    more = both.placement.total_bytes - alone.placement.total_bytes
    assert taken <= more < 1.05 * taken + (4 << 20), "what it takes is part of what is planned, with the margin of everything planned"
    assert both.speculation.lookup and both.speculation.draft.placement.ctx == 256
    with pytest.raises(DoesNotFit, match="the draft model"):
        prepare(FABLE, EngineOptions(device="cpu", ctx=256, ram="64M", draft=str(FABLE)))
    with pytest.raises(UsageError, match="--spec off forbids it"):
        EngineOptions(draft=str(FABLE), spec="off")


def test_the_memory_that_a_refusal_names_does_with_a_draft_model_too() -> None:
    def planned(ram: str) -> Prepared:
        return prepare(FABLE, EngineOptions(device="cpu", ctx=256, ram=ram, draft=str(FABLE)))

    planned("8G")  # what it loads first is a part of the process then
    small = prepare(FABLE, EngineOptions(device="cpu", ctx=256, ram="8G")).placement.total_bytes + (1 << 20)  # enough for one of them
    with pytest.raises(DoesNotFit) as caught:
        planned(str(small))
    assert not caught.value.message.startswith("the draft model")
    named = re.search(r"it takes --ram (\d+Mi)", caught.value.hint)
    assert named is not None, caught.value.hint
    assert planned(named[1]).speculation.draft is not None


def test_a_draft_model_of_the_settings_is_left_out_where_memory_is_short() -> None:
    preset = {"device": "cpu", "ctx": 256, "draft": str(FABLE), "from_settings": frozenset({"draft"})}
    both = prepare(FABLE, EngineOptions(**preset, ram="8G"))  # what it loads first is a part of the process then
    assert both.speculation.draft is not None
    alone = prepare(FABLE, EngineOptions(device="cpu", ctx=256, ram="8G")).placement.total_bytes
    ram = str(alone + (1 << 20))
    found = prepare(FABLE, EngineOptions(**preset, ram=ram))
    assert found.speculation.draft is None and found.options.draft is None and found.speculation.lookup
    said = f"the draft model {FABLE} leaves too little memory: ignored, since it is a setting for all models"
    assert [line for line in found.notices if line == said and isinstance(line, Fallback)], found.notices
    with pytest.raises(UsageError, match="leaves too little memory"):
        prepare(FABLE, EngineOptions(**preset, ram=ram, strict=True))
    with pytest.raises(DoesNotFit) as caught:
        prepare(FABLE, EngineOptions(**preset, ram="64M"))
    assert "draft" not in caught.value.message + caught.value.hint, "without one it does not fit either"
    with pytest.raises(DoesNotFit):
        prepare(FABLE, EngineOptions(**{**preset, "from_settings": frozenset()}, ram=ram))


def test_a_draft_model_that_cannot_be_read_is_named_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    damaged = shutil.copytree(FABLE, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"no header")
    for place, kind, said in ((tmp_path / "empty", ModelNotFound, "has no config.json"), (damaged, EffllmError, "model.safetensors")):
        with pytest.raises(kind, match="^the draft model: .*" + said):
            prepare(FABLE, EngineOptions(device="cpu", ctx=256, draft=str(place)))
        found = prepare(FABLE, EngineOptions(device="cpu", ctx=256, draft=str(place), from_settings=frozenset({"draft"})))
        assert found.speculation.draft is None and found.speculation.lookup
        assert [line for line in found.notices if said in line and line.startswith("the draft model: ") and "ignored" in line]


def test_what_is_asked_of_neurons_and_kernels_is_not_asked_of_the_draft() -> None:
    """Its activation is never zero, and it has no low-bit weights: no reason to refuse the flags that the large one has."""
    given = EngineOptions(device="cpu", ctx=128, draft=str(FABLE), predict_neurons=True, kernel="lut", strict=True)
    made = prepare_draft(FABLE, read_config(FABLE), None, given)
    made.store.close()
    assert not made.options.predict_neurons and made.options.kernel == "auto"


def test_a_draft_model_is_opened_with_its_target() -> None:
    engine, prompt = opened(ctx=256, draft=str(FABLE)), [*range(300, 330)]

    def answer() -> list[Step]:
        engine.reset()
        for _ in engine.prefill(prompt):
            continue
        return list(engine.generate(Sampler(SamplerSettings(temperature=0), 4096), 60, frozenset()))

    found, counts = answer(), engine.speculation.counts
    assert counts.passes + counts.accepted == 59 and counts.drafted > 0, "a first guess is always tried"
    engine.speculation = None
    assert found == answer()
    engine.close()


def test_a_draft_model_guesses_under_the_penalties_of_the_run() -> None:
    """A model that drafts for itself is right every time; without them one token of three was."""
    engine, prompt = opened(ctx=256, draft=str(FABLE)), [*range(300, 330)]
    guessed: list[tuple[int, tuple[int, ...]]] = []
    model = engine.speculation._model

    def guess(_: object, most: int, *more: object) -> Draft | None:
        model.follow(engine.speculation._history)
        draft = model.propose(min(3, most))
        guessed.append((len(engine.speculation._history), draft.tokens if draft else ()))
        return draft

    engine.speculation._model_draft = guess
    for settings in (SamplerSettings(temperature=0), SamplerSettings(temperature=0, repetition_penalty=1.3, presence_penalty=0.5),
                     SamplerSettings(temperature=0, dry_multiplier=2.0),
                     SamplerSettings(temperature=0, logit_bias=((264, -9.0), (18, 4.0)))):
        guessed.clear()
        engine.reset()
        for _ in engine.prefill(prompt):
            continue
        made = [*prompt, *(step.token for step in engine.generate(Sampler(settings, 4096), 60, frozenset()))]
        assert sum(len(tokens) for _, tokens in guessed) > 20
        assert all(tuple(made[at : at + len(tokens)]) == tokens[: len(made) - at] for at, tokens in guessed)
    engine.close()


def test_a_draft_model_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = shutil.copytree(FABLE, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    one, two = (token for token, number in vocabulary.items() if number in (300, 301))
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError) as refused:
        prepare(FABLE, EngineOptions(device="cpu", draft=str(other)))
    assert str(other) in refused.value.message and "token 300 is" in refused.value.message and repr(one) in refused.value.message
