"""Drafts by a model's own multi-token prediction (MTP) layer: what it computes, that guesses are right where it was trained to, and that
answers are the same whatever they are."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conversions import options, run
from family_models import CASES, Case
from hybrid_models import CALM, CTX, IDS, opened
from low_bit_samples import FORMATS, low_bit, random_codes
from mtp_models import MtpReference, mtp_logits, save_mtp_model
from speculative_runs import answer
from test_speculation import GREEDY, PENALISED, SEEDED, Silent, Ticks

from effllm.offload.placement import Residency
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Weight, first_rows, from_f32
from effllm.runtime import prepare
from effllm.runtime.engine import Engine
from effllm.runtime.planning.forecast import work
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation import frequent_head, state_drafts
from effllm.runtime.speculation.mtp import MtpDrafts, mtp_cache_nbytes
from effllm.runtime.speculation.state_drafts import cache_shape
from effllm.runtime.tensors import check_tensors
from effllm.runtime.weights import stream_layout
from effllm.runtime.weights.streamed_weights import StreamingPlan
from effllm.runtime.weights.weight_tiers import weight_tiers

FEW = {"initializer_range": 0.08, "max_position_embeddings": CTX, "vocab_size": 300}
MODELS = {"qwen3_5_text": Case("qwen3_5_text", {**CASES["qwen3_5_text"].changes, **CALM, "attention_bias": False}),
          "qwen3_5, images": Case("qwen3_5_text", {**CASES["qwen3_5_text"].changes, **CALM}, images=True),
          "qwen3_5_moe_text": Case("qwen3_5_moe_text", {**CASES["qwen3_5_moe_text"].changes, **CALM}),
          "qwen3_next": Case("qwen3_next", {**CASES["qwen3_next"].changes, **CALM}),
          "deepseek_v32": Case("deepseek_v32", {**CASES["deepseek_v32"].changes, **FEW, "index_topk": 70}),
          "glm_moe_dsa": Case("glm_moe_dsa", {**CASES["glm_moe_dsa"].changes, **FEW, "index_topk": 70}),
          **{name: Case(name, {**CASES[name].changes, **FEW}) for name in (
              "ernie4_5_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "bailing_moe_v2", "hy_v3", "mimo")}}
MIXTURES = [name for name, case in MODELS.items() if "moe" in case.family or case.family.startswith(("deepseek", "qwen3_next", "hy"))]
FIRST = next(iter(MODELS))


class Made(dict[str, tuple[Path, MtpReference]]):
    """Models by name, each made when it is first asked for."""

    def __init__(self, folders: Callable[[str], Path]) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, name: str) -> tuple[Path, MtpReference]:
        folder = self._folders("mtp") / "model"
        return self.setdefault(name, (folder, save_mtp_model(MODELS[name], folder)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def folder(made: Made) -> Path:
    return made[FIRST][0]


@pytest.fixture(scope="module")
def small(made: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same at 4 bits."""
    found = {name: tmp_path_factory.mktemp("small") / "4bit" for name in (FIRST, "glm4_moe_lite")}
    for name, out in found.items():
        run(made[name][0], out, options("4bit"))
    return found


@pytest.fixture(scope="module", params=("raw", "4 bits, packed cache", pytest.param("mixture", marks=pytest.mark.slow), "latent, 4 bits"))
def engine(request: pytest.FixtureRequest, made: Made, small: dict[str, Path]) -> Iterator[Engine]:
    asked = {"raw": (made[FIRST][0], {}), "4 bits, packed cache": (small[FIRST], {"kv": "4bit", "kv_window": 32}),
             "mixture": (made["qwen3_5_moe_text"][0], {}), "latent, 4 bits": (small["glm4_moe_lite"], {})}
    path, more = asked[request.param]
    engine = opened(path, spec="mtp", **more)
    yield engine
    engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_computes_what_its_parts_say(made: Made, name: str) -> None:
    """Its cache has 16 bits whatever the model's has, so its output is off by as much."""
    path, own = made[name]
    engine = opened(path, spec="mtp", kv="32bit")
    for tokens in (2, 20, 130, 400):  # one row, a few, and those of several passes
        wanted = own.logits(IDS[:tokens])[-1].numpy()
        assert np.abs(mtp_logits(engine, IDS[:tokens]) - wanted).max() < 1e-3 * np.abs(wanted).max()
    engine.close()


@pytest.mark.parametrize("kind", ("raw", "4bit"))
def test_where_it_knows_what_comes_passes_are_few(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "counts"
    save_mtp_model(MODELS[FIRST], path, counts=True)
    if kind != "raw":
        run(path, path := tmp_path / "small", options(kind))
    engine = opened(path, spec="mtp")
    engine.speculation = Speculation((), engine.speculation._model, clock=Ticks())
    found = answer(engine, list(range(20)), 200)
    assert found == [(20 + i) % 300 for i in range(200)]
    counts = engine.speculation.counts
    assert counts.accepted > 0.9 * counts.drafted and counts.passes < 100, counts
    engine.speculation = None
    assert answer(engine, list(range(20)), 200) == found
    engine.close()


def drafting(engine: Engine) -> Speculation:
    """One that the layer alone drafts for, as often as may be."""
    own = engine.speculation._model if isinstance(engine.speculation, Speculation) and engine.speculation._model else MtpDrafts(
        engine.model, engine.n_ctx, engine.prepared.shape.chunk)
    return Speculation((Silent(),), own, clock=Ticks())


SAMPLERS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}
# Every prompt and every sampler, and not all of one with all of the other.
SOONER = {("greedy", 1), ("seeded", 300), ("penalised", 70)}


@pytest.mark.parametrize("name, prompt", [pytest.param(name, prompt, marks=() if (name, prompt) in SOONER else pytest.mark.slow)
                                          for prompt in (1, 70, 300) for name in SAMPLERS])
def test_an_answer_is_what_it_is_without(engine: Engine, name: str, prompt: int) -> None:
    settings = SAMPLERS[name]
    with_drafts = drafting(engine)
    found = []
    for each in (None, with_drafts):
        engine.speculation = each
        engine.cache.truncate(0)
        engine.reset()
        one = answer(engine, IDS[:prompt], 90, settings)
        # another turn behind it, and one that shares only the beginning
        two = answer(engine, [*IDS[:prompt], *one, *IDS[300:330]], 40, settings)
        found.append((one, two, answer(engine, [*IDS[: prompt // 2], *IDS[400:420]], 40, settings), engine.forward_logits([5]).copy()))
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert with_drafts.counts.drafted > 10, "wrong guesses were run and refused"


def test_what_it_knows_is_what_a_new_one_would(engine: Engine) -> None:
    """After an answer with refused guesses, and a prompt that goes on from it, the layer says what it says of the text in one prompt."""
    engine.speculation = drafting(engine)
    engine.cache.truncate(0)
    engine.reset()
    text = [*IDS[:90], *answer(engine, IDS[:90], 60)]
    text += IDS[100 : 100 + 30]
    here = mtp_logits(engine, text)
    engine.cache.truncate(0)
    engine.reset()
    there = mtp_logits(engine, text)
    # Activations are rounded in other groups, and what of the model's states a packed cache decides depends on when it was packed.
    near = 0.2 if engine.cache.is_packed else 1e-3 if engine.prepared.container is None else 0.05
    assert np.abs(here - there).max() < near * np.abs(there).max()


def test_it_begins_again_after_what_it_did_not_see(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.speculation = drafting(engine)
    own = engine.speculation._model
    engine.cache.truncate(0)
    engine.reset()
    plain = answer(engine, IDS[:50], 20)
    engine.speculation = None
    held = answer(engine, IDS[:200], 30)  # passes that nobody showed it
    engine.speculation = Speculation((Silent(),), own, clock=Ticks())
    text = [*IDS[:200], *held]
    answer(engine, [*text, *IDS[230:250]], 20)
    assert own._num_unseen >= len(text) - 1 and own._cache.n + own._num_unseen + own._num_pending == len(own._ids)
    monkeypatch.setattr(state_drafts, "MAX_TOKENS", 128)
    short = MtpDrafts(engine.model, engine.n_ctx, engine.prepared.shape.chunk)
    assert mtp_cache_nbytes(engine.config, CTX) == mtp_cache_nbytes(engine.config, 128)
    engine.speculation = Speculation((Silent(),), short, clock=Ticks())
    engine.cache.truncate(0)
    engine.reset()
    long = answer(engine, IDS[:400], 90)
    assert 0 < short._cache.n <= 128 and short._num_unseen > 300
    engine.speculation = None
    engine.cache.truncate(0)
    engine.reset()
    assert answer(engine, IDS[:400], 90) == long
    engine.cache.truncate(0)
    engine.reset()
    assert answer(engine, IDS[:50], 20) == plain


def test_a_context_that_shifts_and_a_cache_on_the_disk(folder: Path, tmp_path: Path) -> None:
    for asked in ({"ctx": 256, "overflow": "shift"}, {"kv_ram": "740Ki", "spill_dir": str(tmp_path)}):
        engine = opened(folder, spec="mtp", **asked)
        assert engine.prepared.speculation.mtp and (engine.placement.kv_pages is not None) == ("kv_ram" in asked)
        with_drafts = drafting(engine)
        found = []
        for each in (None, with_drafts):
            engine.speculation = each
            engine.cache.truncate(0)
            engine.reset()
            found.append(answer(engine, IDS[:200], 300))
        assert found[0] == found[1] and with_drafts.counts.drafted > 100
        engine.speculation = with_drafts
        engine.close()


@pytest.mark.parametrize("kind", (pytest.param("raw", marks=pytest.mark.slow), "tied", "4bit"))
def test_weights_from_the_disk(folder: Path, small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The head stays in memory, and the layer; the rest comes as it does for any."""
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 1 << 10)
    path = folder if kind == "raw" else small[FIRST]
    if kind == "tied":
        path = tmp_path / "tied"
        save_mtp_model(replace(MODELS[FIRST], changes={**MODELS[FIRST].changes, "tie_word_embeddings": True}), path)
    asked = {"ctx": CTX, "chunk": 128, "threads": 2, "device": "cpu", "spec": "mtp"}
    prepared = prepare.prepare(path, EngineOptions(**asked))
    found = stream_layout.plan_layout(check_tensors(prepared.config, prepared.store, prepared.container, mtp=True), prepared.store)
    head = "model.embed_tokens.weight" if kind == "tied" else "lm_head.weight"
    assert head not in found.slices and (kind == "tied") == ("model.embed_tokens.weight" not in found.tables)
    assert not any(name.startswith("mtp.") for name in found.slices) and len(found.slices) > 10
    streamed = tuple(range(len(found.parts)))
    residency = Residency((), streamed, 0, sum(found.sizes), 2 * max(found.sizes))
    engine = Engine(replace(prepared, streaming=StreamingPlan(found, residency)))
    for _ in engine.model.load():
        continue
    resident = opened(path, spec="off")
    wanted = answer(resident, IDS[:150], 60, SEEDED)
    with_drafts = drafting(engine)
    for each in (None, with_drafts):
        engine.speculation = each
        engine.cache.truncate(0)
        engine.reset()
        assert answer(engine, IDS[:150], 60, SEEDED) == wanted
    assert with_drafts.counts.drafted > 10
    for each in (engine, resident):
        each.close()


@pytest.mark.parametrize("name", (FIRST, "deepseek_v32"))
def test_memory_is_what_was_planned(made: Made, name: str) -> None:
    folder = made[name][0]
    engine = opened(folder, spec="mtp")
    own, planned = engine.speculation._model, engine.prepared
    cache = own._cache
    chosen_by = sum(index.memory.nbytes for index in cache.indexes)
    assert sum(array.nbytes for array in cache.slots.memory) + cache.pool.nbytes + chosen_by == mtp_cache_nbytes(engine.config, CTX)
    assert cache.shape.ctx == cache_shape(CTX).ctx > CTX
    layer = sum(tensor.nbytes for role, tensor in engine.model.tensors["outer"].items() if role.startswith("mtp."))
    assert planned.speculation.mtp_nbytes == layer + mtp_cache_nbytes(engine.config, CTX)
    assert planned.placement.weights_bytes == engine.model.nbytes == weight_tiers(planned).memory
    assert planned.placement.workspace_bytes == engine.backends["cpu"].workspace.nbytes
    without = prepare.prepare(folder, EngineOptions(device="cpu", ctx=CTX, chunk=128, threads=2, spec="off"))
    assert planned.placement.weights_bytes - without.placement.weights_bytes == layer
    assert planned.placement.workspace_bytes > without.placement.workspace_bytes, "states wait there"
    alone = opened(folder, spec="off")
    assert engine.model.bytes_per_pass == alone.model.bytes_per_pass
    assert work(planned, engine.model.tensors).bytes_per_token == work(without, alone.model.tensors).bytes_per_token
    for each in (engine, alone):
        each.close()


@pytest.mark.parametrize("kind", (*FORMATS, "bf16", "f16", "f32"))
def test_first_rows_of_a_matrix_are_those_of_the_matrix(kind: str) -> None:
    spec, rng = QuantSpec.parse(kind), np.random.default_rng(2)
    if spec.is_raw:
        values = rng.standard_normal((70, 256), np.float32)
        weight = Weight.raw(kind, values.shape, from_f32(values, kind))
    else:
        weight = low_bit(random_codes(rng, spec, (70, 256)), spec)
    for rows in (16, 64):
        np.testing.assert_array_equal(first_rows(weight, rows).to_f32(), weight.to_f32()[:rows])
        assert first_rows(weight, rows).shape == (rows, 256)
    assert first_rows(weight, 70) is weight


@pytest.mark.parametrize("settings", (GREEDY, PENALISED), ids=("greedy", "penalised"))
def test_guesses_are_looked_for_among_frequent_tokens(engine: Engine, settings: SamplerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the text has hardly others; an answer is the same."""
    engine.speculation = None
    engine.cache.truncate(0)
    engine.reset()
    expected = answer(engine, [token % 32 for token in IDS[:300]], 60, settings)
    monkeypatch.setattr(frequent_head, "MIN_ROWS", 16)
    engine.speculation = drafting(engine)
    engine.cache.truncate(0)
    engine.reset()
    engine.speculation.set_sampling(settings)
    own = engine.speculation._model
    whole = mtp_logits(engine, [token % 32 for token in IDS[:300]])
    engine.cache.truncate(0)
    engine.reset()
    for _ in engine.prefill([token % 32 for token in IDS[:299]]):
        continue
    own.follow([token % 32 for token in IDS[:300]])
    guess = own.propose(1)
    rows = own._head.rows
    assert rows == 300 // 8 // 16 * 16 == 32 and guess.tokens[0] < 32
    if settings is GREEDY:
        assert guess.tokens[0] == int(whole[:rows].argmax())
    own.follow(IDS[:300])
    with engine.model.outer() as outer:
        assert own._head.select(outer.head, IDS[:300]).weight.shape[0] == 300, "half of these are others"
    engine.cache.truncate(0)
    engine.reset()
    assert answer(engine, [token % 32 for token in IDS[:300]], 60, settings) == expected
