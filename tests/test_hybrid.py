"""Hybrid models (some layers recurrent) in runs: everything works as with any model, bit for bit where that is guaranteed.

That they compute what transformers does is in `test_families.py`, what a state goes through in `test_recurrent_states.py` and
`test_state_kernels.py`, what becomes of their caches outside a run in `test_hybrid_caches.py`.
"""

# Fixtures come from a module, and tests take them as arguments of their names.
# ruff: noqa: F811

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bit_exactness import (
    assert_chunks_equal_single_tokens,
    assert_drafts_change_nothing,
    assert_threads_and_chunks_change_nothing,
    logits_after,
)
from gguf_samples import FABLE
from gpu_runs import logits, simulated
from gpu_runs import opened as with_card
from hybrid_models import CTX, IDS, answer, engine, folder, opened, read, read_afresh, small  # noqa: F401
from safetensors.numpy import save_file
from streamed_models import streaming
from test_speculation import Ticks

from effllm import EffllmError
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import MAX_DECODE_TOKENS, PAGE
from effllm.kernels.threads import ThreadPool
from effllm.offload.checkpoint import TensorStore
from effllm.offload.predict import KindRate, Rates, decode, prompt
from effllm.runtime.config import read_config
from effllm.runtime.conversion.compressed_tensors import export_compressed
from effllm.runtime.engine import Engine
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.kv.states import TAIL
from effllm.runtime.planning.forecast import work
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation.draft_model import DraftModel
from effllm.runtime.stores.unused_tensors import unused_tensors
from effllm.runtime.tensors import check_tensors
from effllm.runtime.weights import stream_layout
from effllm.runtime.workspace_dims import dims


def test_threads_and_chunks_change_no_bit(folder: Path, small: Path) -> None:
    for path in (folder, small):
        assert_threads_and_chunks_change_nothing(path)


def test_tokens_at_once_are_tokens_one_by_one(engine: Engine) -> None:
    assert_chunks_equal_single_tokens(engine, 200, 7)


def test_a_chat_that_continues_is_one_text(engine: Engine) -> None:
    """Turn by turn, with answers between: what comes out is what reading everything in one prompt gives, as near as kernels are."""
    read_afresh(engine, IDS[:150])
    text = IDS[:150]
    for more in (30, 100, 200):
        text = text + answer(engine, 20)[:19]
        text = text + IDS[len(text) : len(text) + more]
        here = read(engine, text)
        assert engine.num_cached_tokens >= len(text) - more, "the turn before is held"
        if not engine.cache.is_packed:
            there = read_afresh(engine, text)
            near = 1e-3 if engine.model.tensors[0]["state_out"].spec.is_raw else 0.05  # activations are rounded in other groups
            assert np.abs(here - there).max() < near * np.abs(there).max()
            read(engine, text[:-more])
            here = read(engine, text)


def test_turns_at_4_bits_differ_by_what_products_of_bytes_round(small: Path) -> None:
    """With products of float32 they agree as those of whole weights do."""
    engine, text = opened(small, exact=True), IDS[:150]
    read(engine, text)
    for more in (30, 100):
        text = text + answer(engine, 20)[:19]
        text = text + IDS[len(text) : len(text) + more]
        here = read(engine, text)
        assert engine.num_cached_tokens >= len(text) - more
        there = read_afresh(engine, text)
        assert np.abs(here - there).max() < 1e-4 * np.abs(there).max()
    engine.close()


def test_what_is_asked_again_reads_the_end_of_the_prompt_alone(engine: Engine) -> None:
    first = read_afresh(engine, IDS[:400])
    tokens = answer(engine, 12)
    again = read(engine, IDS[:400])
    least = 400 - TAIL if not engine.cache.is_packed else 400 - TAIL - PAGE - engine.cache.shape.window
    assert least <= engine.num_cached_tokens < 400 and engine.cache.n == 400
    if not engine.cache.is_packed:
        assert np.array_equal(again, first) and answer(engine, 12) == tokens
    other = IDS[:300] + IDS[310:400]
    read(engine, other)
    assert engine.num_cached_tokens < 310
    if not engine.cache.is_packed:
        assert np.array_equal(engine._logits, read_afresh(engine, other))


@pytest.mark.slow
def test_a_cache_that_is_cut_holds_what_it_says(engine: Engine) -> None:
    """After truncation to anywhere the next tokens have the bits of a run that never went further, where the cache loses nothing."""
    for back in (0, 40, 64, 200, 330, 399, 403, 404, 405):
        read_afresh(engine, IDS[:400])
        for token in IDS[400:405]:
            engine.forward_logits([token])
        kept = engine.cache.truncate(back)
        assert kept == engine.cache.n <= back and (back < 404 or kept == back)
        engine.set_tokens(IDS[:kept])
        here = read(engine, IDS[: kept + 40])
        if not engine.cache.is_packed:
            read_afresh(engine, IDS[: min(kept, 400)] or IDS[:40])
            for token in IDS[400:kept]:
                engine.forward_logits([token])
            assert np.array_equal(here, read(engine, IDS[: kept + 40])), back


def test_what_is_interrupted_leaves_no_trace(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that ends in the middle, after some layers' states have gone on."""
    expected = read_afresh(engine, IDS[:300])
    read_afresh(engine, IDS[:210])
    block, seen = engine.model.block, []

    def breaks(*given: object) -> object:
        seen.append(given)
        if len(seen) == 3:
            given[1].ops.flush()
            raise KeyboardInterrupt
        return block(*given)

    monkeypatch.setattr(engine.model, "block", breaks)
    with pytest.raises(KeyboardInterrupt):
        read(engine, IDS[:300])
    monkeypatch.undo()
    assert engine.cache.n == 210
    assert np.array_equal(read(engine, IDS[:300]), expected) or engine.cache.is_packed


@pytest.mark.parametrize("right", [0.6, *(pytest.param(right, marks=pytest.mark.slow) for right in (0.0, 1.0))])
def test_drafts_change_no_answer(engine: Engine, right: float) -> None:
    assert_drafts_change_nothing(engine, 120, right)


@pytest.mark.slow
def test_weights_from_the_disk_give_the_same_bits(folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 4096)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 1024)
    for path in (folder, small):
        engines = opened(path), streaming(path, keep=3, ctx=CTX, chunk=128)
        found = [logits_after(each, 300, 320) for each in engines]
        names, model = engines[1].model.streamed.parts.slices, engines[1].model
        held = [model.tensors[0][role] for role in ("state_in", "state_r", "state_v", "state_out") if role in model.tensors[0]]
        assert {each.name for each in held if model.store.place(each.info) is not None} <= names.keys()  # but what is joined on the way in
        assert held[-1].name in names
        for each in engines:
            each.close()
        assert np.array_equal(*found)


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_the_plan_counts_what_is_allocated(folder: Path, kv: str) -> None:
    engine = opened(folder, kv=kv)
    try:
        cache, config, placement = engine.cache, engine.config, engine.placement
        paged = len(config.attention_layers)
        stateful = len(config.recurrent_layers)
        others = {"lfm3": (2, 2), "mamba": (0, 4), "mamba2": (0, 4), "rwkv7": (0, 4)}
        assert (paged, stateful) == others.get(folder.name, (4, 4) if config.parallel_hybrid else (1, 3))
        states = sum(layer._slots.nbytes + layer.rollback_log.nbytes for layer in cache.states.layers)
        assert cache.states.nbytes == states == stateful * config.recurrent.nbytes
        log_nbytes = 4 * MAX_DECODE_TOKENS * config.recurrent.log_floats_per_token
        assert all(0 <= layer.rollback_log.nbytes - log_nbytes < 64 for layer in cache.states.layers)
        exact, sealed = sum(map(len, cache.slots.memory)), cache.shape.pages * cache.sealed_nbytes
        assert placement.kv_bytes == exact + sealed + cache.states.nbytes
        assert placement.kv_bytes_per_token == -(-cache.sealed_nbytes // PAGE)
        read(engine, IDS[:500])
        assert (cache.states.nbytes < cache.allocated_nbytes) == (paged > 0) and cache.allocated_nbytes <= placement.kv_bytes
        values = 2 * config.num_key_value_heads * config.head_dim * paged * cache.n
        assert cache.bits_per_value * values == pytest.approx(8 * (cache.allocated_nbytes - cache.states.nbytes))
    finally:
        engine.close()


@pytest.mark.slow
def test_layers_of_both_kinds_on_a_gpu(folder: Path, small: Path) -> None:
    """As many as fit, each with the bytes of its own cache or state; the answer is the CPU's but for rounding."""
    for path in (folder, small):
        expected = logits(opened(path, chunk=512, threads=1, kv="32bit", exact=True))
        for layers in (1, 2, 4):
            engine, said = with_card(path, simulated(512 << 20), gpu_layers=layers, kv="32bit", ctx=CTX, exact=True)
            placement, config = engine.placement, engine.config
            on_card = [layer for layer in range(config.num_hidden_layers) if placement.devices[layer] == "cuda"]
            states = sum(layer in config.recurrent_layers for layer in on_card) * config.recurrent.nbytes
            pages = placement.kv_bytes - len(config.recurrent_layers) * config.recurrent.nbytes
            pages = pages * sum(layer in config.attention_layers for layer in on_card) // max(1, len(config.attention_layers))
            assert len(on_card) == layers and placement.gpu.kv_bytes == states + pages
            found = logits(engine)
            assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def test_a_draft_model_may_have_states(folder: Path) -> None:
    """Its guesses are forgotten as those of any are."""
    engine = opened(folder)
    answers = [read_afresh(engine, IDS[:100]), answer(engine, 40)][1]
    engine.close()
    large = opened(folder)
    read(large, IDS[:100])
    model = DraftModel(prepare(folder, EngineOptions(device="cpu", ctx=CTX)), 300)
    list(model.load())
    large.speculation = Speculation((), model, clock=Ticks())
    try:
        assert answer(large, 40) == answers and large.speculation.counts.accepted
    finally:
        large.close()


@pytest.mark.parametrize("lengths, most", [([4] * 8, 1), ([1] * 20 + [4] * 4, 2), ([1, 4] * 8, 2)], ids=("four", "one, then four", "both"))
def test_a_guess_that_fails_is_read_over_from_where_it_began(folder: Path, lengths: list[int], most: int) -> None:
    """As a draft model asks for guesses, of which the first token is wrong each time."""
    model = DraftModel(prepare(folder, EngineOptions(device="cpu", ctx=CTX)), 300)
    list(model.load())
    engine, history, counts = model._engine, IDS[:300], []
    try:
        for length in lengths:
            read(engine, history)
            counts.append(engine.num_prefilled_tokens)
            history = [*history, (answer(engine, length)[0] + 1) % 300]
        assert counts[0] == 300 and max(counts[1:]) <= most
        logits = read(engine, history)
        assert np.array_equal(logits,
                              read_afresh(engine, history)) or np.abs(logits - read_afresh(engine,
                                                                                           history)).max() < 1e-4 * np.abs(logits).max()
    finally:
        model.close()


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_prompt_after_a_short_answer_is_a_way_back(folder: Path, tokens: int) -> None:
    engine = opened(folder)
    try:
        read(engine, IDS[:300])
        spoken = IDS[:300] + answer(engine, tokens)
        read(engine, spoken + IDS[300:320])
        answer(engine, 8)
        read(engine, spoken + IDS[330:350])
        assert engine.num_cached_tokens >= len(spoken) - 1
    finally:
        engine.close()


def test_show_says_how_a_model_knows_where_a_token_stands(folder: Path, tmp_path: Path, user) -> None:
    model = shutil.copytree(folder, tmp_path / "shown")
    (model / "tokenizer.json").write_bytes((FABLE / "tokenizer.json").read_bytes())
    (said,) = [line for line in user.run("show", model).out.splitlines() if line.startswith("context")]
    silent = dict.fromkeys(("jamba", "kimi_linear", "mamba", "mamba2", "nemotron_h", "nemotron_h, experts",
                            "nemotron_h, experts of fewer numbers", "rwkv7"), "no positions")
    others = {**silent, "lfm3": "RoPE, proportional"}
    assert said.endswith(others.get(folder.name, "RoPE, unscaled"))


@pytest.mark.parametrize("folder", ["qwen3_5_text"], indirect=True)
def test_layers_that_predict_ahead_and_images_are_ignored(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    zeros = np.zeros((2, 2), np.float32)
    save_file({name: zeros for name in ("mtp.fc.weight", "model.visual.blocks.0.attn.proj.weight", "model.layers.9.mlp.up_proj.weight")},
              tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as opened_store:
        assert unused_tensors(read_config(tmp_path), opened_store, ()) == ("model.layers.9.mlp.up_proj.weight",)


def test_the_last_candidates_run_a_model(folder: Path) -> None:
    """NumPy's meaning of every op, whatever no kernel takes."""
    expected = logits(opened(folder, chunk=512, kv="32bit"), 40, 30)
    prepared = prepare(folder, EngineOptions(device="cpu", kv="32bit", ctx=CTX))
    slow = CpuOps(ThreadPool(1), dims(prepared.config, CTX, prepared.shape.chunk, LOGIT_ROWS), default_registry("reference"))
    engine = Engine(prepared, {"cpu": slow})
    list(engine.model.load())
    found = logits(engine, 40, 30)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_rollback_slots_are_bounded(engine: Engine) -> None:
    for length in range(100, 600, 90):
        read(engine, IDS[:length])
        answer(engine, 3)
    assert len(engine.cache.states._checkpoints) <= engine.config.recurrent.rollback_slots


def test_a_state_does_not_become_compressed_tensors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EffllmError, match="models cannot be exported as compressed-tensors: no other tool is known"):
        list(export_compressed(folder, tmp_path / "out", "INT4"))


@pytest.mark.parametrize("folder", ["qwen3_5_text"], indirect=True)
def test_exports_that_cannot_hold_it_say_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EffllmError, match="qwen3_5_text models cannot be"):
        list(export_compressed(folder, tmp_path / "out", "INT4"))
    with pytest.raises(EffllmError, match="heads of values of 20 beside heads of keys of 24"):
        list(export_gguf(folder, tmp_path / "out.gguf", "Q8_0", "hybrid"))


def test_a_forecast_counts_states_beside_attention(folder: Path) -> None:
    """What a token reads of a context is read by the layers that have one; states take the same at any depth."""
    prepared = prepare(folder, EngineOptions(device="cpu", ctx=CTX))
    asked = work(prepared, check_tensors(prepared.config, prepared.store))
    prepared.store.close()
    config = prepared.config
    assert asked.windows == tuple(config.windows[layer] for layer in config.attention_layers) and asked.layers == 4
    assert asked.state_bytes == len(config.recurrent_layers) * 12 * config.recurrent.state_floats
    assert asked.bytes_per_token == sum(part.nbytes for part in asked.parts)
    rates = Rates(1e6, 0.0, 0.0, {part.kind: KindRate(1e6, 1e12) for part in asked.parts}, {asked.kv: KindRate(1e12, 1e12)})
    without = replace(asked, state_bytes=0)
    assert decode(asked, rates, 100).seconds - decode(without, rates, 100).seconds == pytest.approx(asked.state_bytes / 1e6)
    one, many = (prompt(asked, rates, tokens).seconds - prompt(without, rates, tokens).seconds
                 for tokens in (asked.chunk, 2 * asked.chunk))
    assert many == pytest.approx(2 * one) and one <= 1.1 * asked.state_bytes / 1e6, "once a pass, not for every token of it"
    grown = 100 * asked.windows.count(None) / max(1, len(asked.windows))  # a layer with a window of 100 reads no more
    assert decode(asked, rates, 200).seconds - decode(asked, rates, 100).seconds == pytest.approx(grown * asked.kv_bytes / 1e6)
