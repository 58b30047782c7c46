"""The engine on the real model: prompts, the reused cache, limits, corrupt data, and blocks on two backends."""

import gc
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from speculative_runs import answer

import effllm
from effllm import ContextOverflow, DoesNotFit, EffllmError, UsageError
from effllm.offload.direct_io import Interrupted
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice, Progress
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import Sampler, SamplerSettings

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
GREEDY = SamplerSettings(temperature=0)


def opened(folder: Path = FABLE, **options) -> Engine:
    return list(open_engine(folder, EngineOptions(device="cpu", **options)))[-1]


@pytest.fixture(scope="module")
def engine():
    engine = opened()
    yield engine
    engine.close()


def test_opening_tells_what_happens():
    events = list(open_engine(FABLE, EngineOptions(device="cpu", ctx=512)))
    loads = [event for event in events if isinstance(event, Progress) and event.phase == "loading"]
    assert loads[-1].done == loads[-1].total == 11_540_992 and all(a.done <= b.done for a, b in zip(loads, loads[1:]))
    assert events[-1].n_ctx == 512 and events[-1].placement.devices == ("cpu",) * 6
    events[-1].close()


def test_same_seed_same_tokens(engine):
    settings = SamplerSettings(temperature=0.9, top_k=50, seed=7)
    prompt = list(range(300, 340))
    first = answer(engine, prompt, 40, settings)
    assert answer(engine, prompt, 40, settings) == first
    assert answer(engine, prompt, 40, SamplerSettings(temperature=0.9, top_k=50, seed=8)) != first


def test_threads_do_not_change_the_answer(engine):
    prompt = list(range(300, 500))
    expected = answer(engine, prompt, 30)
    for threads in (1, 3):
        other = opened(threads=threads)
        assert answer(other, prompt, 30) == expected
        other.close()


def test_a_prompt_that_continues_prefills_only_the_rest(engine):
    engine.reset()
    prompt = list(range(300, 700))
    said = answer(engine, prompt, 10)
    assert engine.tokens == prompt + said[:-1]
    events = list(engine.prefill(prompt + said + [50, 51]))
    assert [event.done for event in events] == [] or events[0].done > len(prompt)
    kept = engine._logits.copy()
    engine.reset()
    list(engine.prefill(prompt + said + [50, 51]))
    assert np.abs(kept - engine._logits).max() < 2e-2 * np.abs(kept).max()  # 16-bit cache: other roundings in the last bit of k and v
    assert kept.argmax() == engine._logits.argmax()


def test_an_empty_answer_and_limits(engine):
    assert answer(engine, [300, 301], 0) == []
    with pytest.raises(UsageError, match="the prompt is empty"):
        list(engine.prefill([]))
    with pytest.raises(UsageError, match="token id 4096 is outside the vocabulary of 4096"):
        list(engine.prefill([4096]))
    with pytest.raises(ContextOverflow, match="the prompt has 2048 tokens and the context holds 2048"):
        list(engine.prefill([300] * 2048))
    list(engine.prefill([300] * 2047))


def test_the_context_ends_an_answer_or_shifts():
    short = opened(ctx=200)
    list(short.prefill([300] * 190))
    steps = list(short.generate(Sampler(GREEDY, 4096), None, frozenset(), ignore_eos=True))
    assert steps[-1].finish == "context" and len(short.tokens) < 200 and not short.truncated
    short.close()
    shifting = opened(ctx=200, overflow="shift")
    list(shifting.prefill([300] * 150))
    steps = list(shifting.generate(Sampler(SamplerSettings(temperature=1.0, seed=1), 4096), 120, frozenset(), ignore_eos=True))
    assert len(steps) == 120 and steps[-1].finish == "length" and shifting.truncated and len(shifting.tokens) < 200
    list(shifting.prefill(list(range(300, 900))))
    assert shifting.tokens[:50] == list(range(300, 350)) and shifting.tokens[-1] == 899 and len(shifting.tokens) == 100
    shifting.close()


@pytest.mark.parametrize("spec", ["off", "lookup"])
def test_an_answer_knows_how_much_of_it_were_passes(spec):
    engine = opened(spec=spec)
    list(engine.prefill([300] * 20))
    assert engine.passes_s == 0
    list(engine.generate(Sampler(GREEDY, 4096), 40, frozenset(), ignore_eos=True))
    assert 0 < engine.passes_s < engine.decode_s
    engine.close()


@pytest.mark.parametrize("spec", ["off", "lookup"])
def test_holding_tokens_is_a_part_of_their_pass_and_so_is_what_ended_early(spec, monkeypatch):
    engine = opened(spec=spec)

    def took(slow: object, name: str, error: type[BaseException] | None = None) -> tuple[float, float]:
        """Seconds of an answer of 12 tokens and of its passes, while a step of them takes 10 ms or raises `error` after as much."""
        whole = getattr(slow, name)

        def slowly(*given: object, **more: object) -> object:
            time.sleep(0.01)
            if error is not None:
                raise error
            return whole(*given, **more)

        engine.reset()
        list(engine.prefill([300] * 20))
        before = engine.decode_s, engine.passes_s
        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(slow, name, slowly)
            list(engine.generate(Sampler(GREEDY, 4096), 12, frozenset(), ignore_eos=True))
        return engine.decode_s - before[0], engine.passes_s - before[1]

    took(engine.cache, "commit")  # kernels are loaded on their first use
    decode, passes = took(engine.cache, "commit")
    assert passes > 0.11 and decode - passes < 0.05
    for error in (Interrupted, KeyboardInterrupt):
        decode, passes = took(engine.model, "forward", error)
        assert 0.01 < passes <= decode
    engine.close()


def test_mmap_gives_the_same_answer(engine):
    mapped = opened(load="mmap")
    assert answer(mapped, list(range(300, 400)), 20) == answer(engine, list(range(300, 400)), 20)
    mapped.close()


def test_one_token_contexts_and_tiny_ones():
    with pytest.raises(ContextOverflow):
        list(opened(ctx=1).prefill([300]))
    tiny = opened(ctx=2)
    assert len(answer(tiny, [300], 5)) == 1
    tiny.close()


def test_a_budget_that_is_too_small_is_refused_with_the_numbers():
    with pytest.raises(DoesNotFit, match=r"weights .*KV cache .* the budget is") as caught:
        prepare(FABLE, EngineOptions(device="cpu", ram="20M"))
    assert caught.value.exit_code == 4 and caught.value.hint


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_a_plan_that_fails_leaves_no_file_open():
    gc.collect()  # what tests before this one left open may be closed at any time
    before = len(os.listdir("/proc/self/fd"))
    for options, error in (({"ram": "8Mi"}, DoesNotFit), ({"ctx": 4096}, UsageError), ({"strict": True, "kernel": "lut"}, UsageError),
                           ({"draft": str(FABLE), "strict": True, "kernel": "lut"}, UsageError)):
        with pytest.raises(error):
            prepare(FABLE, EngineOptions(device="cpu", **options))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_plan_is_held(engine):
    placement = engine.placement
    layout, shape = engine.cache.layouts[0], engine.cache.shape
    assert placement.kv_bytes >= 6 * (shape.slots + shape.pages) * layout.layer_page_nbytes
    assert placement.workspace_bytes == engine.backends["cpu"].workspace.nbytes
    assert placement.weights_bytes == engine.model.nbytes == 11_540_992


def test_beyond_the_trained_positions_needs_force():
    with pytest.raises(UsageError, match="a context of 4096 is more than the 2048 positions"):
        prepare(FABLE, EngineOptions(device="cpu", ctx=4096))
    assert prepare(FABLE, EngineOptions(device="cpu", ctx=4096, force=True)).placement.ctx == 4096


@pytest.mark.parametrize("bad", ({"device": "tpu"}, {"load": "tape"}, {"overflow": "wrap"}, {"threads": 0}, {"ctx": 0}, {"kv": "1bit"},
                                 {"kv_sink": -1}))
def test_options_are_checked(bad):
    with pytest.raises(UsageError):
        EngineOptions(**bad)


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(FABLE, tmp_path / "model"))


def edit(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def damage(folder: Path, name: str, change) -> None:
    """Rewrite one tensor of the checkpoint (bf16 as float32)."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key).float().numpy() for key in file.keys()}
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    assert name in load_file(folder / "model.safetensors")


def test_shapes_that_contradict_the_config_are_named(copy):
    edit(copy, intermediate_size=1024)
    with pytest.raises(EffllmError, match=r"tensor model.layers.0.mlp.gate_proj.weight has shape \[768, 256\], "
                                          r"the config says \[1024, 256\]"):
        prepare(copy, EngineOptions(device="cpu"))


def test_a_missing_tensor_is_named(copy):
    edit(copy, num_hidden_layers=7)
    with pytest.raises(EffllmError, match="tensor model.layers.6.input_layernorm.weight is missing"):
        prepare(copy, EngineOptions(device="cpu"))


def test_nan_in_weights_names_the_tensor(copy):
    def poke(values):
        values[3, 5] = np.nan
        return values

    damage(copy, "model.layers.2.mlp.down_proj.weight", poke)
    broken = opened(copy)
    list(broken.prefill([300, 301]))
    with pytest.raises(EffllmError, match="tensor model.layers.2.mlp.down_proj.weight holds NaN or infinity"):
        list(broken.generate(Sampler(GREEDY, 4096), 3, frozenset()))
    broken.close()


def test_integer_weights_are_refused_by_type(copy):
    from safetensors import safe_open

    with safe_open(copy / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key).float().numpy() for key in file.keys()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(EffllmError, match="tensor model.norm.weight is I8; this version reads F32, F16, BF16"):
        prepare(copy, EngineOptions(device="cpu"))


def test_unknown_config_keys_warn_once_and_strict_refuses(copy):
    edit(copy, flux_capacitor=True)
    prepared = prepare(copy, EngineOptions(device="cpu"))
    assert sum("flux_capacitor" in notice for notice in prepared.notices) == 1
    assert any(isinstance(event, Notice) and "flux_capacitor" in event.text for event in open_engine(copy, EngineOptions(device="cpu")))
    with pytest.raises(UsageError, match="flux_capacitor"):
        prepare(copy, EngineOptions(device="cpu", strict=True))


def test_taps_see_every_layer(engine):
    engine.reset()
    seen = {}
    engine.model.forward(np.arange(300, 310), engine.cache, lambda name, layer, value: seen.setdefault((name, layer), np.array(value)))
    assert {layer for _, layer in seen} == set(range(6))
    assert seen["q", 3].shape == (10, 256) and seen["k", 3].shape == (10, 128) and seen["mlp_in", 5].shape == (10, 256)
    engine.reset()


def test_a_window_larger_than_the_context_takes_no_more_than_the_context():
    cached = [prepare(FABLE, EngineOptions(device="cpu", kv="4bit", kv_window=window)).placement.kv_bytes for window in (100_000, 2048)]
    assert cached[0] == cached[1]


def test_more_threads_than_the_pool_takes_are_planned_as_what_runs():
    many = opened(threads=500)
    assert many.placement.workspace_bytes == many.backends["cpu"].workspace.nbytes
    many.close()


def test_a_context_too_small_to_shift_is_an_overflow():
    tiny = opened(ctx=1, overflow="shift")
    with pytest.raises(ContextOverflow):
        list(tiny.prefill([300, 301]))
    tiny.close()


def test_a_token_run_from_the_recorded_pass_has_the_same_bits(engine):
    """Decode runs the job list of the token before; a tap makes every pass a fresh one."""
    prompt = list(range(300, 360))
    tokens = answer(engine, prompt, 150)  # over a page's end and the sealing of one
    recorded, fresh = [], []
    for keep, tap in ((recorded, None), (fresh, lambda name, layer, value: None)):
        engine.reset()
        for _ in engine.prefill(prompt):
            continue
        for token in tokens:
            x = engine.model.forward(np.array([token]), engine.cache, *([tap] if tap else []))
            keep.append(x.copy())
    assert np.array_equal(recorded, fresh)


def test_what_lies_between_two_tokens_does_not_reach_the_second(engine):
    """Passes of several tokens and a cut back to before the page's end, between tokens that would otherwise be run again."""
    ids = list(range(300, 500))

    def hidden(cuts: list[int]) -> np.ndarray:
        engine.reset()
        outs, at = [], 0
        for cut in cuts:
            outs.append(engine.model.forward(np.array(ids[at : at + cut]), engine.cache).copy())
            at += cut
        return np.concatenate(outs)

    assert np.array_equal(hidden([1] * 12), hidden([1, 1, 3, 1, 1, 4, 1]))
    engine.reset()
    first = [engine.model.forward(np.array([token]), engine.cache).copy() for token in ids[:100]]
    engine.cache.truncate(90)
    again = [engine.model.forward(np.array([token]), engine.cache).copy() for token in ids[90:100]]
    assert np.array_equal(first[90:], again)


def test_a_packed_cache_answers_nearly_as_an_exact_one():
    """Teacher-forced over a text of several pages: packed at 8 bits the greedy tokens are the exact cache's, and every token is near."""
    ids = [1 + (31 * i + i * i // 7) % 4000 for i in range(700)]
    exact = opened(ctx=1024, chunk=128)
    wanted = [logits.copy() for _, logits in exact.score(ids)]
    exact.close()
    distances = {}
    for kv in ("8bit", "4bit"):
        engine = opened(ctx=1024, chunk=128, kv=kv)
        found = [logits.copy() for _, logits in engine.score(ids)]
        assert engine.cache.sealed == (700 - 64 - 128) // 128 and engine.cache.exact_tokens < 64 + 128 + 128
        assert engine.cache.packed_bits == {"8bit": 8.53125, "4bit": 4.53125}[kv]
        distances[kv] = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
        one = [engine.model.logits(engine._forward([token]))[0].copy() for token in ids[:3]]  # the recorded pass of single tokens
        assert np.isfinite(one).all()
        engine.close()
    assert 0 < distances["8bit"] < distances["4bit"] < 2


def test_a_recorded_token_over_packed_pages_has_the_same_bits():
    engine = opened(ctx=1024, kv="4bit")
    ids = [1 + (17 * i) % 4000 for i in range(430)]

    def hidden(cuts: list[int]) -> np.ndarray:
        engine.reset()
        engine._forward(ids[:400])
        outs, at = [], 400
        for cut in cuts:
            outs.append(engine.model.forward(np.array(ids[at : at + cut]), engine.cache).copy())
            at += cut
        return np.concatenate(outs)

    assert np.array_equal(hidden([1] * 12), hidden([1, 1, 3, 1, 1, 4, 1]))
    engine.close()


@pytest.mark.parametrize("ctx", [1, 100, 256, 320, 321])
def test_a_context_that_fills_no_page_says_so(ctx):
    items = list(open_engine(FABLE, EngineOptions(device="cpu", ctx=ctx, kv="4bit")))
    said = [item.text for item in items if isinstance(item, Notice) and "nothing will be packed" in item.text]
    counted = f"in a context of {ctx} token{'' if ctx == 1 else 's'}:"
    assert [counted in text and "(64 + 128 + 128)" in text for text in said] == [True] * (ctx < 321)
    items[-1].close()


def test_a_prompt_that_fits_is_one_pass_with_the_bits_of_its_chunks():
    """Where sealing a page changes nothing, chunks go together; packed pages keep the grid, and scores always do."""
    whole, ids = opened(ctx=768), [5 + token % 700 for token in range(512)]
    chunks = list(whole._passes(512, 4))
    assert chunks == [448, 64] and list(whole._passes(512)) == [512] and list(whole._passes(453)) == [448, 5]
    for piece in chunks:
        x = whole._forward(ids[len(whole.tokens) : len(whole.tokens) + piece])
    apart = whole.model.logits(x[-1:])[0].copy()
    whole.reset()
    assert np.array_equal(whole.model.logits(whole._forward(ids)[-1:])[0], apart)
    whole.close()
    packed = opened(ctx=768, kv="4bit", force=True)
    assert list(packed._passes(512)) == [448, 64]
    packed.close()
