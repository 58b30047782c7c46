"""Trained drafters: what they compute, answers that do not depend on their guesses, few passes where guesses are right, plans that count
them, and the message about one for another model."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_models import VOCABULARY, Head, guessed_by, guessed_from, with_assistant, with_head
from safetensors.torch import load_file, save_file
from speculative_runs import answer
from streamed_models import streaming
from test_speculation import GREEDY, PENALISED, SEEDED, Silent, Ticks

from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.kv import kv_spill
from effllm.runtime.prepare import EngineOptions, Prepared, prepare
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation.assistant import TargetKV
from effllm.runtime.weights import stream_layout

CTX = 640
IDS = np.random.default_rng(4).integers(0, VOCABULARY, 700).tolist()
SAMPLERS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[list[int], int], list[np.ndarray]]]:
    base = tmp_path_factory.mktemp("assistant")
    target, draft = with_assistant(base, window=30)
    return base, lambda ids, tokens: [each.numpy() for each in guessed_by(target, draft, ids, tokens, 30)]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Head]:
    base = tmp_path_factory.mktemp("head")
    return base, with_head(base)


def opened(base: Path, **asked: object) -> Engine:
    chosen = {"device": "cpu", "ctx": CTX, "threads": 2, "chunk": 128, "kv": "16bit", "draft": str(base / "draft"), **asked}
    return list(open_engine(base / "model", EngineOptions(**chosen)))[-1]


def planned(base: Path, **asked: object) -> Prepared:
    made = prepare(base / "model", EngineOptions(**{"device": "cpu", "ctx": CTX, "threads": 2, "draft": str(base / "draft"), **asked}))
    made.store.close()
    if made.speculation.draft is not None:
        made.speculation.draft.store.close()
    return made


def scores(engine: Engine, ids: list[int], tokens: int) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """What the draft scores of each of so many guesses behind a text, by place of its own, and the guesses."""
    drafts, found = engine.speculation._model, []
    for _ in engine.prefill(ids[:-1]):
        continue
    drafts.follow(ids)
    choose = drafts._greedy.token

    def token(logits: np.ndarray, history: list[int], drafted: list[int], numbers: np.ndarray | None = None) -> int:
        found.append((logits.copy(), numbers))
        return choose(logits, history, drafted, numbers)

    drafts._greedy.token = token
    try:
        guess = drafts.propose(tokens)
    finally:
        del drafts._greedy.token
    return found, guess.tokens


def judge_assistant(engine: Engine, wanted: Callable[[list[int], int], list[np.ndarray]], tokens: int, near: float) -> None:
    expected = wanted(IDS[:tokens], 4)
    found, guess = scores(engine, IDS[:tokens], 4)
    for token, (logits, numbers), every in zip(guess, found, expected, strict=True):
        theirs = every if numbers is None else every[numbers]
        assert np.abs(logits - theirs).max() < near * np.abs(theirs).max()
        assert numbers is None or len(numbers) == 3 * VOCABULARY // 20, "of the groups that are chosen"
        assert token == every.argmax()


def test_an_assistant_computes_what_transformers_does(assistant: tuple[Path, Callable]) -> None:
    engine = opened(assistant[0], kv="32bit")
    for tokens in (2, 20, 150, 400):
        judge_assistant(engine, assistant[1], tokens, 1e-4)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kv", ("16bit", "8bit", "4bit", "4bit+mikv"))
@pytest.mark.parametrize("kind, groups, dtype", (("shared", 20, "float32"), ("own", 0, "float32"), ("own", 20, "bfloat16"),
                                                 ("unified", 20, "float32")))
def test_assistants_of_every_kind_over_caches_of_every_kind(tmp_path: Path, kv: str, kind: str, groups: int, dtype: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attends to what the cache holds, and by that, where it is not packed, they say what transformers does."""
    target, draft = with_assistant(tmp_path, kind, groups, dtype)
    engine = opened(tmp_path, kv=kv, kv_window=32 if kv[0] != "1" else None)
    drafts = engine.speculation._model
    attend, judged = TargetKV.attend, []

    def attended(self: TargetKV, q: np.ndarray, *more: object) -> np.ndarray:
        out = attend(self, q, *more)
        self.pages.ops.flush()
        self.pages.reference(q, self.position, self.blocks, None, plain := np.empty_like(out))
        judged.append(np.abs(out - plain).max() / np.abs(plain).max())
        return out

    def wanted(ids: list[int], count: int) -> list[np.ndarray]:
        """By the keys, values and states that the engine has."""
        shared, blocks = {}, engine.cache.held_blocks()
        for source in drafts._plan.sources:
            pages = engine.cache.layer(source).pages
            keys, values, at = pages.gathered(blocks)
            seen = at > len(ids) - 1 - (pages.window or CTX)
            both = (torch.from_numpy(each[seen].astype(np.float32)).permute(1, 0, 2)[None] for each in (keys, values))
            shared["sliding_attention" if pages.window else "full_attention"] = tuple(both)
        state = torch.from_numpy(drafts._states[len(ids) - 2 - drafts._first].copy())[None, None]
        return [each.numpy() for each in guessed_from(target, draft, shared, state, ids, count)]

    monkeypatch.setattr(TargetKV, "attend", attended)
    for tokens in (20, 150, 400):
        scores(engine, IDS[:tokens], 4)
        if not engine.cache.sealed or kv == "16bit":
            judge_assistant(engine, wanted, tokens, 1e-3)
    assert engine.cache.is_packed is (kv != "16bit") and engine.cache.sealed > 0
    assert len(judged) > 36 and max(judged) < (1e-3 if kv == "16bit" else 0.06), "kernels of packed pages round queries"
    engine.close()


HEADS = {"llama": {}, "qwen3": {"family": "qwen3"}, "narrow": {"hidden": 48}, "as speculators writes it": {"newer": True, "normed": True},
         "all tokens": {"scored": VOCABULARY}, "layers stated": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
         "three layers": {"layers": 3}, "a norm before its matrix": {"norms": "one"}, "goes on from what is normed": {"fed_normed": True},
         "norms before its matrix": {"norms": "each", "fed_normed": True, "newer": True},
         "without a matrix": {"joins": False}, "Qwen 3's layer": {"kind": "qwen3", "layers": 2}, "by torch.save": {"pickled": True},
         "a window": {"layer_types": ["sliding_attention"], "sliding_window": 4096},
         "layers behind which": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}}}


def judge_head(engine: Engine, own: Head, tokens: int, ties: bool = False) -> None:
    """Four guesses have the scores and are the tokens that the parts say. `ties`: up to one that is as likely as another, behind which
    both go on otherwise."""
    expected = own.scores(IDS[:tokens], 4)
    found, guess = scores(engine, IDS[:tokens], 4)
    places = [int(each.argmax()) for each in expected]
    for token, (logits, _), theirs, place in zip(guess, found, expected, places, strict=True):
        near = 1e-2 * np.abs(theirs.numpy()).max()
        assert np.abs(logits - theirs.numpy()).max() < near, "its cache has 16 bits"
        if ties and token != place + int(own.offsets[place]):
            assert theirs[place] - theirs[logits.argmax()] < near
            return
    assert guess[0] == places[0] + int(own.offsets[places[0]])


def test_a_head_computes_what_its_parts_say(head: tuple[Path, Head]) -> None:
    engine = opened(head[0], kv="32bit")
    for tokens in (2, 20, 150, 400):
        judge_head(engine, head[1], tokens)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_every_kind(tmp_path: Path, name: str) -> None:
    own = with_head(tmp_path, **HEADS[name])
    if name.startswith("layers"):
        own.reads = (1, 3, 5)
    engine = opened(tmp_path, kv="32bit", chunk=512)
    for tokens in (2, 20, 150, 620):
        judge_head(engine, own, tokens, ties=name == "a norm before its matrix")
    engine.close()


def drafting(engine: Engine) -> Speculation:
    """One that the draft alone guesses for, as often as may be."""
    return Speculation((Silent(),), engine.speculation._model, clock=Ticks())


@pytest.fixture(scope="module", params=("assistant", "head"))
def engine(request: pytest.FixtureRequest, assistant: tuple[Path, object], head: tuple[Path, Head]) -> Iterator[Engine]:
    engine = opened({"assistant": assistant, "head": head}[request.param][0])
    yield engine
    engine.close()


def held_to_be_alike(engine: Engine, settings: SamplerSettings, prompt: int) -> None:
    """Answers, a turn behind one, and one that shares only the beginning."""
    with_drafts, found, before = drafting(engine), [], engine.speculation
    for each in (None, with_drafts):
        engine.speculation = each
        engine.cache.truncate(0)
        engine.reset()
        one = answer(engine, IDS[:prompt], 90, settings)
        two = answer(engine, [*IDS[:prompt], *one, *IDS[300:330]], 40, settings)
        found.append((one, two, answer(engine, [*IDS[: prompt // 2], *IDS[400:420]], 40, settings), engine.forward_logits([5]).copy()))
    engine.speculation = before
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert with_drafts.counts.drafted > 10, "wrong guesses were run and refused"


@pytest.mark.parametrize("name, prompt", (("greedy", 70), ("seeded", 300), ("penalised", 5)))
def test_an_answer_is_what_it_is_without(engine: Engine, name: str, prompt: int) -> None:
    held_to_be_alike(engine, SAMPLERS[name], prompt)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ({"kv": "4bit", "kv_window": 32}, {"kv": "8bit", "kv_sink": 0, "kv_window": 0}, {"kv": "4bit+mikv"},
                                   {"ctx": 400, "overflow": "shift"}), ids=str)
@pytest.mark.parametrize("kind", ("assistant", "head"))
def test_answers_over_other_caches(kind: str, asked: dict[str, object], assistant: tuple[Path, object], head: tuple[Path, Head]) -> None:
    engine = opened({"assistant": assistant, "head": head}[kind][0], **asked)
    for name in SAMPLERS:
        held_to_be_alike(engine, SAMPLERS[name], 150)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("assistant", "head"))
def test_weights_of_the_model_from_the_disk(kind: str, assistant: tuple[Path, object], head: tuple[Path, Head],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 1 << 10)
    base = {"assistant": assistant, "head": head}[kind][0]
    resident = opened(base)
    wanted = answer(resident, IDS[:150], 60, SEEDED)
    resident.close()
    engine = streaming(base / "model", ctx=CTX, threads=2, chunk=128, draft=str(base / "draft"))
    for _ in engine.speculation.load():
        continue
    engine.speculation = drafting(engine)
    assert answer(engine, IDS[:150], 60, SEEDED) == wanted and engine.speculation.counts.drafted > 10
    engine.close()


def test_what_it_knows_is_what_a_new_one_would(engine: Engine) -> None:
    """After an answer with refused guesses, and a prompt that goes on from it, a draft says what it says of the text in one prompt."""
    before, engine.speculation = engine.speculation, drafting(engine)
    text = [*IDS[:90], *answer(engine, IDS[:90], 60), *IDS[100:130]]
    here, _ = scores(engine, text, 3)
    engine.cache.truncate(0)
    engine.reset()
    there, _ = scores(engine, text, 3)
    assert np.abs(here[0][0] - there[0][0]).max() < 1e-3 * np.abs(there[0][0]).max()
    engine.speculation = before


def says_again(base: Path) -> None:
    """Of a Gemma 4 with its assistant: both say the last token again and again, since blocks add nothing and embeddings are alike."""
    model, draft = (load_file(base / name / "model.safetensors") for name in ("model", "draft"))
    for tensors in (model, draft):
        for name, tensor in tensors.items():
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight", "per_layer_input_norm.weight")):
                tensor.zero_()
            elif name.endswith(("layer_scalar", "norm.weight")):
                tensor.fill_(1.0)
    table = next(tensor for name, tensor in model.items() if name.endswith("embed_tokens.weight"))
    table /= table.norm(dim=1, keepdim=True)
    narrow = draft["model.embed_tokens.weight"].shape[1]
    draft["model.embed_tokens.weight"].copy_(table[:, :narrow])
    enter = draft["pre_projection.weight"]
    enter.zero_()
    enter[:, :narrow].fill_diagonal_(1.0)
    for name, tensors in (("model", model), ("draft", draft)):
        save_file(tensors, base / name / "model.safetensors", {"format": "pt"})


def test_where_it_knows_what_comes_passes_are_few(tmp_path: Path) -> None:
    with_assistant(tmp_path, groups=0)
    says_again(tmp_path)
    engine = opened(tmp_path)
    engine.speculation = drafting(engine)
    found = answer(engine, IDS[:20], 200)
    counts = engine.speculation.counts
    assert found == [IDS[19]] * 200 and counts.accepted == counts.drafted > 150 and counts.passes < 50, counts
    engine.close()


@pytest.mark.parametrize("kind", ("assistant", "head"))
def test_memory_is_what_was_planned(kind: str, assistant: tuple[Path, object], head: tuple[Path, Head]) -> None:
    base = {"assistant": assistant, "head": head}[kind][0]
    engine = opened(base)
    trained, own, made = engine.prepared.speculation.draft, engine.speculation._model, engine.prepared
    cache = getattr(own, "_cache", None) if kind == "head" else None
    kept = 0 if cache is None else sum(array.nbytes for array in cache.slots.memory) + cache.pool.nbytes + own._token_ids.nbytes
    kept += own._states.nbytes if kind == "assistant" else 0
    assert trained.nbytes == own._weights._pager.nbytes + own._host.workspace.nbytes + kept == made.speculation.draft_nbytes
    assert made.placement.workspace_bytes == engine.backends["cpu"].workspace.nbytes
    without = planned(base, draft=None, chunk=128)
    kept_between = 4 * 128 * 2 * engine.config.hidden_size if kind == "head" else 0
    assert made.placement.workspace_bytes - without.placement.workspace_bytes == kept_between
    assert (engine.model.between == (2, 3)) is (kind == "head")
    engine.close()


def test_one_whose_scores_are_not_finite_drafts_no_longer(assistant: tuple[Path, object], head: tuple[Path, Head], tmp_path: Path) -> None:
    """A line says so, and the answer goes on."""
    for base, name in ((assistant[0], "pre_projection.weight"), (head[0], "fc.weight")):
        to = tmp_path / base.name
        shutil.copytree(base, to)
        tensors = load_file(to / "draft" / "model.safetensors")
        tensors[name][0, 0] = torch.nan
        save_file(tensors, to / "draft" / "model.safetensors")
        engine = opened(to)
        engine.speculation = drafting(engine)
        found = answer(engine, IDS[:20], 20)
        assert engine.speculation.counts.drafted == 0
        assert [str(each) for each in engine.announcements()] == [f"the draft model {to / 'draft'}: its scores are NaN: "
                                                                  "drafting is disabled"]
        engine.speculation = None
        engine.reset()
        assert answer(engine, IDS[:20], 20) == found
        engine.close()


def test_what_an_assistant_reads_stays_in_memory(assistant: tuple[Path, object], head: tuple[Path, Head],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with it has no pages on the disk to fall back on; one with a head, which reads no keys, may have some."""
    asked, spill_request = [], kv_spill.spill_request
    monkeypatch.setattr(kv_spill, "spill_request", lambda *given: asked.append(given) or spill_request(*given))
    assert planned(assistant[0]).speculation.inputs.kv_cache and not asked
    assert not planned(head[0]).speculation.inputs.kv_cache and asked
    left = planned(assistant[0], kv_ram="2M", from_settings=frozenset({"draft"}))
    assert left.speculation.draft is None and any("ignored, since it is a setting for all models" in each for each in left.notices)
