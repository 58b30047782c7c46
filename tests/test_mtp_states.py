"""Recurrent states of the multi-token prediction layer: updated only when it is used, and in wide passes."""

import tracemalloc
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from family_models import CASES, Case
from hybrid_models import CALM, CTX, IDS, opened
from mtp_models import mtp_logits, save_mtp_model
from safetensors.numpy import load_file, save_file
from speculative_runs import answer
from test_speculation import GREEDY, SEEDED, Silent, Ticks

from effllm.kernels.cpu.ops import FEW_TOKENS
from effllm.kernels.layout import PAGE
from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.engine import Engine
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation import state_drafts
from effllm.runtime.speculation.mtp import MtpDrafts

SMALL = {"initializer_range": 0.08, "max_position_embeddings": CTX, "vocab_size": 300}


@pytest.fixture(scope="module", params=("qwen3_5_text", "glm4_moe"))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("mtp") / "model"
    save_mtp_model(Case(case.family, {**case.changes, **(CALM if request.param.startswith("qwen") else SMALL)}), folder)
    engine = opened(folder, spec="mtp")
    yield engine
    engine.close()


def begun(engine: Engine, speculation: Speculation | None) -> None:
    engine.speculation = speculation
    engine.cache.truncate(0)
    engine.reset()


def unasked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Speculation:
    """Drafts of the layer that are never thought to pay."""
    made = Speculation((Silent(),), MtpDrafts(engine.model, engine.n_ctx, engine.prepared.shape.chunk), clock=Ticks())
    monkeypatch.setattr(made, "_model_draft", lambda *asked: None)
    return made


@pytest.mark.parametrize("settings", (GREEDY, SEEDED), ids=("greedy", "seeded"))
def test_an_answer_through_which_nobody_asks_is_what_it_is_without(engine: Engine, settings: SamplerSettings,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """More states come than there is room for; and what it says behind a chunk beside all that waited is what a new one would."""
    begun(engine, None)
    wanted = answer(engine, IDS[:37], 400, settings)
    speculation = unasked(engine, monkeypatch)
    begun(engine, speculation)
    assert answer(engine, IDS[:37], 400, settings) == wanted
    own = speculation._model
    assert own._cache.n >= 37 + PAGE and own._num_pending < PAGE + FEW_TOKENS
    text = [*IDS[:37], *wanted, *IDS[300:450]]
    assert own._num_pending + engine.prepared.shape.chunk > len(own._states)
    here = mtp_logits(engine, text)
    assert own._num_unseen == 0 and own._cache.n + own._num_pending == len(own._ids)
    begun(engine, speculation)
    there = mtp_logits(engine, text)
    assert np.abs(here - there).max() < 1e-3 * np.abs(there).max()


def test_of_more_than_it_attends_to_the_newest_are_taken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_drafts, "MAX_TOKENS", 64)
    speculation = unasked(engine, monkeypatch)
    begun(engine, speculation)
    own = speculation._model
    for _ in engine.prefill(IDS[:300]):
        continue
    assert 0 < own._cache.n <= 64 and own._num_unseen + own._cache.n + own._num_pending == len(own._ids) == 300


def test_what_it_is_shown_is_normed_in_little_memory(engine: Engine) -> None:
    own = MtpDrafts(engine.model, engine.n_ctx, engine.prepared.shape.chunk)
    chunk = engine.prepared.shape.chunk
    x = np.random.default_rng(3).standard_normal((chunk, engine.config.hidden_size)).astype(np.float32)
    own.add_hidden_states(IDS, 0, IDS[:chunk], x, verified=False)
    own.reset()
    tracemalloc.start()
    own.add_hidden_states(IDS, 0, IDS[:chunk], x, verified=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    own.close()
    assert peak < x.nbytes


def test_a_layer_that_is_stored_as_nothing_reads_it(tmp_path: Path) -> None:
    """Said with the tensor's name where it was asked for; a run that asks for nothing does without, as one whose settings ask does."""
    save_mtp_model(Case("qwen3_5_text", {**CASES["qwen3_5_text"].changes, **CALM}), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "mtp.norm.weight": np.tile(tensors["mtp.norm.weight"], 2)}, path)
    with pytest.raises(CheckpointError, match=r"mtp\.norm\.weight has shape \[128\], the config says \[64\]"):
        prepare(path.parent, EngineOptions(device="cpu", ctx=CTX, spec="mtp"))
    for asked in ({}, {"spec": "mtp", "from_settings": frozenset({"spec"})}):
        made = prepare(path.parent, EngineOptions(device="cpu", ctx=CTX, **asked))
        made.store.close()
        assert not made.speculation.mtp and any("mtp.norm.weight" in each for each in made.notices) == bool(asked)


@pytest.mark.parametrize("ctx", (5, 100, 300))
def test_contexts_of_every_length(engine: Engine, ctx: int) -> None:
    """Pages round a chunk up, a context ends in the middle of one."""
    folder, found = engine.prepared.folder, []
    for spec in ("off", "mtp"):
        for overflow in ("error", "shift"):
            other = opened(folder, ctx=ctx, spec=spec, overflow=overflow, chunk=512)
            assert other.prepared.speculation.mtp is (spec == "mtp")
            found.append(answer(other, IDS[: ctx - 2], 1 if overflow == "error" else ctx, GREEDY))
            other.close()
    assert found[:2] == found[2:]


def test_wrong_guesses_are_never_a_gain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the clock says that passes of several tokens took less than those of one."""
    calls = count(1)  # three a pass: guesses take no time
    made = Speculation((Silent(),), MtpDrafts(engine.model, engine.n_ctx, engine.prepared.shape.chunk), clock=lambda: next(calls) // 3)
    monkeypatch.setattr(made._costs, "ratio", lambda tokens: 1.0 if tokens == 1 else 0.4)
    begun(engine, made)
    answer(engine, IDS[:37], 60, GREEDY)
    assert made.counts.drafted and made.counts.gain <= made.counts.tokens_per_pass


@pytest.mark.parametrize("settings", (GREEDY, SEEDED), ids=("greedy", "seeded"))
def test_a_model_whose_tokens_choose_what_they_see(choosing: Engine, settings: SamplerSettings) -> None:
    """Its layer chooses too, by keys of its own, and an answer is what it is without."""
    found = []
    own = MtpDrafts(choosing.model, choosing.n_ctx, choosing.prepared.shape.chunk)
    with_drafts = Speculation((Silent(),), own, clock=Ticks())
    for each in (None, with_drafts):
        begun(choosing, each)
        one = answer(choosing, IDS[:200], 60, settings)
        found.append((one, answer(choosing, [*IDS[:100], *IDS[300:330]], 40, settings)))
    assert found[0] == found[1] and with_drafts.counts.drafted > 10
    (index,) = own._cache.indexes
    assert own._cache.n > 70 == choosing.config.indexer.shape.dense_tokens
    scored = len(index.memory) // index.shape.block_nbytes(index.stored) * PAGE  # by each of a few tokens, with room for guesses
    assert FEW_TOKENS * scored <= choosing.backends["cpu"].workspace.floats["index scores"]


@pytest.fixture(scope="module")
def choosing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """DeepSeek V3.2's tokens see 70 others."""
    folder = tmp_path_factory.mktemp("choosing") / "model"
    save_mtp_model(Case("deepseek_v32", {**CASES["deepseek_v32"].changes, **SMALL, "index_topk": 70}), folder)
    engine = opened(folder, spec="mtp")
    yield engine
    engine.close()
