"""Models with a sparse-attention indexer, against transformers and in the rest of the program; kernels are in `test_sparse_indexer.py`.

A choice among many is one of numbers of which two may be nearly the same. So the oracle checks that what ours chose is as good as what it
would have, and then attends to that.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bit_exactness import (
    assert_batching_changes_nothing,
    assert_chunks_equal_single_tokens,
    assert_drafts_change_nothing,
    assert_last_layers_narrow_exactly,
    assert_restored_text_continues,
    assert_threads_and_chunks_change_nothing,
    engine,
    folder,
    logits_after,
    save,
)
from conversions import options, run
from family_models import assert_close, oracle, share_angles, written
from hybrid_models import CTX, IDS, one_by_one, opened, opened_as, read, read_afresh
from indexer_models import MODELS, SLOW_MODELS, oracle_with_selections, recorded_selections
from streamed_models import streaming
from transformers import PreTrainedModel

from effllm import UsageError
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.engine import Engine
from effllm.runtime.generation.batching import open_sequences
from effllm.runtime.planning import forecast, settings_fit
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sessions.saved_cache import identity, refuse_other, restore_cache
from effllm.runtime.sessions.session_prefix import restore_prefix
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.sessions.shared_prefix import copy_prefix as copied
from effllm.runtime.stores.container import read_container
from effllm.runtime.weights import stream_layout

__all__ = ["engine", "folder"]  # fixtures


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name in SLOW_MODELS else name for name in MODELS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("choosing") / "model"
    return folder, written(MODELS[request.param], folder)


def test_what_is_chosen_of_many_is_as_good_as_the_oracles(model: tuple[Path, PreTrainedModel]) -> None:
    """Of a prompt and of single tokens behind it; without the choice logits are clearly others."""
    folder, theirs = model
    engine, tokens, steps = opened(folder, kv="32bit"), 330, 40
    share_angles(engine, theirs)
    whole, layers = engine.config.indexer.shape.dense_tokens, len(engine.cache.indexes)
    with recorded_selections(engine) as chosen:
        scored = np.concatenate([logits.copy() for _, logits in engine.score(IDS[:tokens])])
        expected, held = oracle_with_selections(theirs, IDS[:tokens], chosen)
        assert held == layers * (tokens - whole)
        assert_close(scored, expected, partial(oracle, theirs, IDS[:tokens]))
        for found in chosen:
            found.clear()
        read_afresh(engine, IDS[:tokens])
        rows = one_by_one(engine, IDS[tokens : tokens + steps])
        expected, held = oracle_with_selections(theirs, IDS[: tokens + steps], chosen)
        assert held == layers * (tokens + steps - whole)
    assert_close(rows, expected[tokens:])
    config, own, shape = engine.config, engine.config.indexer, engine.config.indexer.shape
    engine.close()
    for taken in (replace(own, shape=replace(shape, top_k=CTX)), replace(own, shape=replace(shape, top_k=shape.top_k - 1)),
                  replace(own, interleaved_rope=not own.interleaved_rope), replace(own, norm=("rms", own.norm[1])),
                  *([replace(own, shape=replace(shape, local_blocks=0))] if shape.local_blocks else [])):
        other = opened_as(folder, replace(config, indexer=taken))
        found = np.concatenate([logits.copy() for _, logits in other.score(IDS[:tokens])])
        other.close()
        off = np.abs(found - expected[:tokens]).max(1) / np.abs(expected).max()
        assert off[: min(whole, taken.shape.dense_tokens) - 1].max() < 1e-3 < off[whole + 1 :].max(), taken


def test_threads_and_chunks_change_no_bit(folder: Path) -> None:
    assert_threads_and_chunks_change_nothing(folder)


@pytest.mark.parametrize("held", [200, 60, 140])
def test_tokens_at_once_are_tokens_one_by_one(engine: Engine, held: int) -> None:
    """Where some of them see all before them too, and passes come again."""
    assert_chunks_equal_single_tokens(engine, held)


@pytest.mark.parametrize("length", [330, 80])
def test_a_prompt_ends_as_if_all_of_it_went_through_every_layer(engine: Engine, length: int) -> None:
    assert_last_layers_narrow_exactly(engine, IDS[: length + 3])


def test_a_cache_that_is_cut_holds_what_it_says(engine: Engine) -> None:
    expected = {back: read_afresh(engine, IDS[: back + 40]) for back in (40, 200, 330)}
    for back, logits in expected.items():
        read_afresh(engine, IDS[:400])
        assert engine.cache.truncate(back) == back
        engine.set_tokens(IDS[:back])
        here = read(engine, IDS[: back + 40])
        assert engine.num_cached_tokens == back and np.abs(here - logits).max() < 0.02 * np.abs(logits).max()


@pytest.mark.parametrize("right", [0.6, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0))])
def test_drafts_change_no_answer(engine: Engine, right: float) -> None:
    assert_drafts_change_nothing(engine, 190, right)


def test_answers_at_once_are_what_each_is_alone(folder: Path) -> None:
    """Rows of one pass are of texts of which some choose and some see all."""
    assert_batching_changes_nothing(folder, (IDS[:300], IDS[100:160], IDS[200:420]))


def test_what_another_sequence_has_read_is_copied(folder: Path) -> None:
    engine = opened(folder, parallel=2)
    engines, _ = open_sequences(engine, 2)
    expected = read_afresh(engines[0], IDS[:460])
    held, _ = copied(engines[1], engines[:1], IDS[:460], 0)
    assert held > 300 and np.array_equal(read(engines[1], IDS[:460]), expected) and engines[1].num_cached_tokens == held
    engines[1].cache.close()
    engine.close()


def test_a_session_continues_with_the_same_bits_and_lends_its_beginning(engine: Engine, folder: Path, tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "sessions")
    read_afresh(engine, IDS[:455])
    assert_restored_text_continues(engine, store, 470)
    prompt = [*IDS[:400], *IDS[500:550]]
    whole = read_afresh(engine, prompt)
    engine.reset()
    held, said = restore_prefix(engine, store, identity(engine), prompt, 0)
    assert held > 250 and "restored" in said[0]
    engine.set_tokens(prompt[:held], num_fresh_tokens=held)
    assert np.array_equal(read(engine, prompt), whole) and engine.num_cached_tokens == held
    short = opened(folder, ctx=engine.config.indexer.shape.dense_tokens)
    with pytest.raises(UsageError, match="in which tokens see chosen ones, this run has one in which they see all") as caught:
        refuse_other(store.read("tale"), identity(short))
    assert "the -c of then" in caught.value.hint
    short.close()


def test_keys_of_a_session_that_are_damaged_are_found(engine: Engine, tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "sessions")
    read_afresh(engine, IDS[:300])
    index = engine.cache.indexes[-1]
    index.write(290, np.full(index.shape.token_nbytes(index.stored), 255, np.uint8))  # no number
    save(engine, store)
    session = store.read("tale")
    with store.reading(), pytest.raises(Exception, match="damaged: the file of .* exact tokens is not what it says: NaN or infinity"):
        list(restore_cache(engine, store, session))
    assert not engine.tokens


def test_weights_from_the_disk_give_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 4096)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 1024)
    engines = opened(folder), streaming(folder, keep=3, ctx=CTX, chunk=128)
    found = [logits_after(each, 300, 320) for each in engines]
    names = engines[1].model.streamed.parts.slices
    assert any("o_proj" in name for name in names) and not any("index" in name for name in names)  # what chooses stays in memory
    for each in engines:
        each.close()
    assert np.array_equal(*found)


def test_the_plan_counts_what_is_allocated(folder: Path) -> None:
    engine = opened(folder)
    try:
        cache, workspace = engine.cache, engine.backends["cpu"].workspace
        held = sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes + sum(len(each.memory) for each in cache.indexes)
        assert cache.indexes and held <= engine.placement.kv_bytes <= held + 128 * sum(cache.index_sizes)
        read(engine, IDS[:500])
        engine.forward_logits([1])
        assert cache.index_nbytes == 512 * sum(cache.index_sizes) and cache.allocated_nbytes <= engine.placement.kv_bytes
        assert cache.seen_nbytes < cache.read_nbytes
        wanted, own = forecast.work(engine.prepared, engine.model.tensors), engine.config.indexer
        seeing, whole = sum(source is not None for source in own.source_layers), own.shape.dense_tokens
        token, keys = cache.sealed_nbytes // (128 * len(own.source_layers)), sum(cache.index_sizes)
        assert wanted.kv_at(500) == token * (seeing * whole + (len(own.source_layers) - seeing) * 500) + 500 * keys
        assert wanted.kv_at(10) == 10 * (token * len(own.source_layers) + keys)
        assert all(len(buffer) == workspace.floats[name] for name, buffer in workspace._buffers.items())
    finally:
        engine.close()


def test_what_chooses_stays_as_it_is_in_a_converted_folder(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "4bit", options("4bit"))
    made, plan = read_container(tmp_path / "4bit"), plan_conversion(folder, options("4bit").recipe)
    plan.store.close()
    kept = {job.role for job in plan.jobs if made.tensors[job.name].spec.is_raw and len(job.shape) == 2}
    assert kept == ({"router", "index_q", "index_k"} if plan.config.mla is None else
                    {"router", "index_q", "index_k", "index_weights", "kv_b", *(
                        f"{norm}_{end}" for norm in ("input_norm", "post_norm") for end in ("in", "out") if plan.config.gated_norm_rank),
                     *(("attn_mix", "mlp_mix", "leave_mix") if plan.config.unmixed_streams else ())})
    engine = opened(tmp_path / "4bit")
    read(engine, IDS[:300])
    assert np.isfinite(engine.forward_logits([3])).all() and engine.cache.chosen is not None
    engine.close()


@pytest.mark.parametrize(("asked", "flag"), [({"kv": "4bit"}, "--kv 4bit"), ({"kv_ram": "1M"}, "--kv-ram"), ({"kv_read": "sparse"},
                                             "--kv-read sparse"), ({"device": "cuda"}, "--device cuda"), ({"gpu_layers": 2}, "-ngl 2")])
def test_what_a_choice_cannot_have_is_refused_beyond_what_all_see(folder: Path, asked: dict[str, object], flag: str) -> None:
    most = prepare(folder, EngineOptions(device="cpu")).config.indexer.shape.dense_tokens
    with pytest.raises(UsageError, match=f"beyond {most} tokens") as caught:
        prepare(folder, EngineOptions(ctx=most + 1, **{"device": "cpu", **asked}))
    assert caught.value.message.startswith(flag) and f"-c {most}" in caught.value.hint
    placed = prepare(folder, EngineOptions(ctx=most + 1, **{"device": "cpu", **asked}, from_settings=frozenset(asked)))
    assert any(flag in said and "ignored" in said for said in placed.notices)


def test_what_gives_way_to_a_choice_is_reported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "driver"
    driver.touch()
    monkeypatch.setattr(settings_fit, "DRIVER", driver)
    placed = prepare(folder, EngineOptions(ctx=400, kv="auto"))
    assert placed.options.kv == "16bit" and {*placed.placement.devices} == {"cpu"}
    assert any(said.startswith("--kv auto: attention is sparse beyond") for said in placed.notices)
    assert any(said.startswith("the GPU is not used: attention is sparse beyond") for said in placed.notices)
    assert not any("sparse" in said for said in prepare(folder, EngineOptions(ctx=400, device="cpu")).notices)


def test_in_a_context_that_all_see_the_model_runs_as_one_without_a_choice(folder: Path) -> None:
    whole = opened(folder).config.indexer.shape.dense_tokens
    one, other = opened(folder), opened(folder, ctx=whole, strict=True, kv="16bit")
    assert other.config.indexer is None and other.config.context_length == whole and not other.cache.indexes
    assert np.array_equal(read(one, IDS[: whole - 10]), read(other, IDS[: whole - 10]))
    one.close()
    other.close()
