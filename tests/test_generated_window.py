"""Unlimited OCR's attention: generated tokens see the whole prompt and a sliding window of the answer. Logits of prompts, of generated
tokens, and of continued answers are those of transformers' cache for such models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from family_models import CASES, CONTEXT, Case, assert_close, oracle, text, written
from hypothesis import example, given
from hypothesis import strategies as st
from session_engines import save
from transformers import DynamicCache

from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.kv import codec
from effllm.runtime.config import parse_config
from effllm.runtime.config_reader import read_json
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.sessions.saved_cache import restore_cache
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.workspace_dims import dims

WINDOW, STEPS = 20, 50
# Among them such that the window lies over the sinks' end, over that of a page, and in one page.
PROMPTS = (3, 60, *(pytest.param(length, marks=pytest.mark.slow) for length in (64, 150)), 185)


@pytest.fixture(scope="module", params=[WINDOW, pytest.param(150, marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    case = CASES["unlimited_ocr_text"]
    made = written(Case(case.family, {**case.changes, "sliding_window": request.param}, inside=case.inside), folder)
    return folder, made, request.param


@pytest.fixture(scope="module")
def engine(model):
    *_, engine = open_engine(model[0], EngineOptions(kv="32bit", device="cpu", ctx=CONTEXT, chunk=128))
    yield engine
    engine.close()


def stepped(model, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Logits behind a prompt and behind each token of an answer but the last, by transformers' own cache."""
    cache, found = DynamicCache(config=model.config.get_text_config()), []
    with torch.inference_mode():
        for ids in (prompt, *([token] for token in answer[:-1])):
            found.append(model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1].numpy())
    return np.stack(found)


@pytest.mark.parametrize("length", PROMPTS)
def test_an_answer_sees_the_prompt_and_its_own_last_tokens(model, engine, length):
    _, theirs, window = model
    ids = text(theirs, length + window + STEPS)
    prompt, answer = ids[:length], ids[length:]
    wanted = stepped(theirs, prompt, answer)
    engine.reset()
    list(engine.prefill(prompt))
    ours = [engine._logits.copy(), *(engine.forward_logits([token])[0].copy() for token in answer[:-1])]
    assert_close(np.stack(ours), wanted)
    everything = oracle(theirs, ids)[length - 1 : -1]
    apart = np.abs(everything - wanted).max(-1) > 1e-3 * np.abs(everything).max()
    assert not apart[: window + 1].any() and apart[window + 2 :].any()  # a window that is not there shows
    assert engine.cache.n == len(ids) - 1 and engine.cache.resumable == length


def test_greedy_tokens_and_what_continues_from_them(model, engine):
    """The answer is no more than its window when the next prompt comes: it is read again, and sees all of itself."""
    _, theirs, window = model
    prompt = text(theirs, 90)
    engine.reset()
    list(engine.prefill(prompt))
    steps = list(engine.generate(Sampler(SamplerSettings(temperature=0), engine.config.vocab_size), window + 30, frozenset()))
    answer = [step.token for step in steps]
    assert stepped(theirs, prompt, answer).argmax(-1).tolist() == answer
    on = prompt + answer + text(theirs, 25)
    list(engine.prefill(on))
    assert engine.num_cached_tokens == len(prompt) and engine.cache.resumable == len(on)
    assert_close(engine._logits[None], oracle(theirs, on)[-1:])
    few = on + answer[: window - 1]
    list(engine.prefill(on))
    for token in answer[: window - 1]:
        engine.forward_logits([token])
    list(engine.prefill([*few, 7]))  # an answer shorter than the window is held whole
    assert engine.num_cached_tokens >= len(few) - 8
    assert_close(engine._logits[None], oracle(theirs, [*few, 7])[-1:])


def test_two_sequences_side_by_side(model, engine):
    """In one pass, each with its own prompt's end."""
    from effllm.runtime.kv.batched_cache import BatchedCache

    _, theirs, window = model
    prompts, answer = [text(theirs, 40), text(theirs, 130)], text(theirs, window + 30)
    wanted = [stepped(theirs, prompt, answer)[1:] for prompt in prompts]
    other = engine.new_sequence()
    try:
        for each, prompt in zip((engine, other), prompts, strict=True):
            each.reset()
            list(each.prefill(prompt))
        joint = BatchedCache([engine.cache, other.cache], engine.backends["cpu"], {})
        found = []
        for token in answer[:-1]:
            x = engine.model.forward(np.array([token, token], np.int64), joint)
            found.append(engine.model.logits(x).copy())
        for place in range(2):
            assert_close(np.stack(found)[:, place], wanted[place])
    finally:
        other.cache.close()


def test_packed_pages_are_the_prompts_alone(model, engine):
    folder, theirs, window = model
    ids = text(theirs, 470)
    *_, packed = open_engine(folder, EngineOptions(kv="8bit", device="cpu", ctx=CONTEXT, chunk=128, force=True))
    try:
        found = []
        for each in (engine, packed):
            each.reset()
            list(each.prefill(ids[:400]))
            found.append(np.stack([each.forward_logits([token])[0].copy() for token in ids[400:]]))
        assert packed.cache.sealed == packed.cache.shape.sealed_at(400) >= 1
        list(packed.prefill([*ids, 7]))
        assert packed.num_cached_tokens == (400 if window < 70 else 470)
        assert np.abs(found[0] - found[1]).mean() < 0.01 * np.abs(found[0]).max()
    finally:
        packed.close()


def test_drafts_are_not_verified_over_places_that_are_taken(model, engine):
    engine.reset()
    list(engine.prefill(text(model[1], 30)))
    assert engine.cache.max_speculative_tokens == 1


def test_a_prompt_cannot_continue_from_what_is_gone(model, engine):
    _, theirs, window = model
    engine.reset()
    list(engine.prefill(text(theirs, 30)))
    for token in text(theirs, window + 5):
        engine.forward_logits([token])
    with pytest.raises(ValueError, match="of which 30 last"):
        engine.cache.begin(4, prompt=True)
    assert engine.cache.truncate(40) == 30


def test_the_exact_window_holds_what_is_written(model):
    raw = read_json(model[0] / "config.json")
    assert parse_config(raw).answer_window == model[2]
    assert parse_config({**raw, "text_config": {**raw["text_config"], "layer_types": ["full_attention"] * 3}}).answer_window is None
    assert CacheShape(512).written is None


def test_a_session_is_saved_as_far_as_its_last_prompt(model, engine, tmp_path):
    """Whose answer was longer than its window; another process goes on from there as this one does."""
    folder, theirs, window = model
    store, ids = SessionStore(tmp_path / "sessions"), text(theirs, 200 + window + 30)
    engine.reset()
    list(engine.prefill(ids[:200]))
    for token in ids[200:]:
        engine.forward_logits([token])
    save(engine, store, "one")
    assert len(engine.tokens) == engine.cache.n == 200
    *_, other = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=CONTEXT, chunk=128))
    try:
        with store.reading():
            list(restore_cache(other, store, store.read("one")))
        assert other.tokens == ids[:200] and other.cache.resumable == 200
        found = []
        for each in (engine, other):
            list(each.prefill([*ids, 7]))
            assert each.num_cached_tokens >= 180
            found.append(each._logits.copy())
        assert np.array_equal(*found)
        assert_close(found[0][None], oracle(theirs, [*ids, 7])[-1:])
    finally:
        other.close()


def test_layers_on_torch_agree(model):
    folder, theirs, window = model
    prepared = prepare(folder, EngineOptions(device="cpu", kv="32bit", ctx=CONTEXT))
    placement = replace(prepared.placement, devices=("cpu", "cuda", "cuda"))
    host = CpuOps(ThreadPool(1), dims(prepared.config, CONTEXT, prepared.shape.chunk, LOGIT_ROWS))
    engine = Engine(replace(prepared, placement=placement), {"cpu": host, "cuda": TorchOps("cpu")})
    try:
        list(engine.model.load())
        ids = text(theirs, 60 + window + 30)
        list(engine.prefill(ids[:60]))
        ours = [engine.forward_logits([token])[0].copy() for token in ids[60:-1]]
        assert_close(np.stack(ours), stepped(theirs, ids[:60], ids[60:])[1:])
    finally:
        engine.close()


@pytest.fixture(scope="module")
def ops():
    pool = ThreadPool(1)
    yield CpuOps(pool, Dims(8, 2, 1, 16, 8, 8, chunk=128, ctx=CONTEXT, logit_rows=1), default_registry())
    pool.close()


STEP = st.one_of(st.tuples(st.just("prompt"), st.integers(1, 160)), st.tuples(st.just("answer"), st.integers(1, 90)),
                 st.tuples(st.just("back"), st.integers(0, 400)))


@given(steps=st.lists(STEP, min_size=3, max_size=8), window=st.sampled_from([1, 7, 20, 60, 140]), seed=st.integers(0, 99))
@example(steps=[("prompt", 100), ("back", 50), ("answer", 45)], window=20, seed=0)  # a prompt that is shorter then
def test_whatever_comes_the_last_token_sees_the_prompt_and_the_window(ops, steps, window, seed):
    """Prompts, answers and ways back in any order, against a softmax over the tokens that are to be seen."""
    rng = np.random.default_rng(seed)
    cache = build_cache([ops], [AttnSpec(2, 1, 16, 0.25)], codec("32bit"), CacheShape(CONTEXT, chunk=128, written=window))
    keys, values, read = np.zeros((0, 16), np.float32), np.zeros((0, 16), np.float32), 0

    def run(count: int, prompt: bool) -> None:
        nonlocal keys, values
        own = [rng.standard_normal((count, width), np.float32) for width in (32, 16, 16)]
        cache.begin(count, prompt)
        out = cache.layer(0).attend(*own)[-1]
        cache.commit()
        keys, values = np.concatenate([keys, own[1]]), np.concatenate([values, own[2]])
        seen = np.arange(len(keys))
        seen = seen[(seen < read) | (seen > len(keys) - 1 - window)]
        scores = own[0][-1].reshape(2, 16) @ keys[seen].T * 0.25
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        assert np.allclose(out, (shares / shares.sum(-1, keepdims=True) @ values[seen]).reshape(-1), atol=2e-5)

    for kind, count in (("prompt", 1), *steps):
        assert cache.resumable == (len(keys) if len(keys) - read <= window else read)
        if kind == "back" or kind == "prompt":
            held = cache.truncate(min(count if kind == "back" else len(keys), cache.resumable))
            assert held == min(count if kind == "back" else len(keys), len(keys) if len(keys) - read <= window else read)
            keys, values, read = keys[:held], values[:held], min(read, held)
        if kind != "back" and len(keys) + count <= CONTEXT:
            for piece in cache.pieces(count) if kind == "prompt" else [1] * count:
                read = len(keys) + piece if kind == "prompt" else read
                run(piece, kind == "prompt")
    cache.close()
