"""Models with latent attention in the whole program: everything works as with any model, bit for bit where that is guaranteed. Comparison
with transformers is in `test_families.py`, the products in `test_latent_attention.py`."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bit_exactness import (
    assert_chunks_equal_single_tokens,
    assert_drafts_change_nothing,
    assert_restored_text_continues,
    assert_threads_and_chunks_change_nothing,
    logits_after,
)
from conversions import options, run
from gguf_samples import FABLE
from hybrid_models import IDS, answer, opened, read, read_afresh
from imported_mixtures import imported_mixture
from latent_models import CTX, LATENT_CASES, latent_model
from streamed_models import paging, streaming
from test_hybrid_caches import Numbers
from test_speculation import Ticks

from effllm.kernels import reference_latent
from effllm.kernels.threads import ThreadPool
from effllm.offload.checkpoint import TensorStore
from effllm.quant.codes import dequantize
from effllm.quant.pack import unpack
from effllm.runtime.calibrate import LayerStats, calibrate
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.conversion.convert_tensors import Converter
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.kv.kv_profile_file import identity_of, load_profile, save_profile
from effllm.runtime.kv.kv_recording import _output_grams, record
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.source import open_store
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation.draft_model import DraftModel
from effllm.runtime.stores.container import read_container
from effllm.runtime.weights import stream_layout


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name == "glm4_moe_lite" else ())
                                        for name in LATENT_CASES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return latent_model(request.param, tmp_path_factory.mktemp("latent") / "model")


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same at 4 bits."""
    run(folder, out := tmp_path_factory.mktemp("latent") / "4bit", options("4bit"))
    return out


@pytest.fixture(scope="module", params=["raw", "4 bits"])
def engine(request: pytest.FixtureRequest, folder: Path, small: Path) -> Iterator[Engine]:
    made = opened(small if request.param == "4 bits" else folder)
    yield made
    made.close()


def test_threads_and_chunks_change_no_bit(folder: Path, small: Path) -> None:
    for path in (folder, small):
        assert_threads_and_chunks_change_nothing(path)


def test_tokens_at_once_are_tokens_one_by_one(engine: Engine) -> None:
    assert_chunks_equal_single_tokens(engine, 200, 7)


def test_a_cache_that_is_cut_holds_what_it_says(engine: Engine) -> None:
    read_afresh(engine, IDS[:400])
    expected = {}
    for back in (40, 200, 330):
        expected[back] = read_afresh(engine, IDS[: back + 40])
    for back, logits in expected.items():
        read_afresh(engine, IDS[:400])
        for token in IDS[400:405]:
            engine.forward_logits([token])
        assert engine.cache.truncate(back) == back
        engine.set_tokens(IDS[:back])
        here = read(engine, IDS[: back + 40])
        assert engine.num_cached_tokens == back and np.abs(here - logits).max() < 0.02 * np.abs(logits).max()


@pytest.mark.parametrize("right", [0.6, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0))])
def test_drafts_change_no_answer(engine: Engine, right: float) -> None:
    assert_drafts_change_nothing(engine, 120, right)


def test_a_draft_model_may_have_latents(folder: Path, small: Path) -> None:
    engine = opened(folder)
    answers = [read_afresh(engine, IDS[:100]), answer(engine, 40)][1]
    read_afresh(engine, IDS[:100])
    model = DraftModel(prepare(small, EngineOptions(device="cpu", ctx=CTX)), 300)
    list(model.load())
    engine.speculation = Speculation((), model, clock=Ticks())
    try:
        assert answer(engine, 40) == answers and engine.speculation.counts.accepted
    finally:
        engine.close()


@pytest.mark.slow
def test_weights_from_the_disk_give_the_same_bits(folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices in parts, of which the one that all heads share out stays; experts one by one."""
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 4096)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 1024)
    for path in (folder, small):
        engines = opened(path), streaming(path, keep=3, ctx=CTX, chunk=128)
        found = [logits_after(each, 300, 320) for each in engines]
        names = engines[1].model.streamed.parts.slices
        assert any("kv_a_proj" in name for name in names) and not any("kv_b_proj" in name for name in names)
        for each in engines:
            each.close()
        assert np.array_equal(*found)


def test_experts_from_the_disk_give_the_same_bits(folder: Path, small: Path) -> None:
    """Whoever has groups too."""
    for path in (folder, small):
        engines = opened(path), paging(path, 14, ctx=CTX, chunk=128)
        found = [logits_after(each, 300, 320) for each in engines]
        assert 0 < engines[1].model.pager.stats.hits < engines[1].model.pager.stats.uses
        for each in engines:
            each.close()
        assert np.array_equal(*found)


def test_a_session_continues_with_the_same_bits(engine: Engine, tmp_path: Path) -> None:
    read_afresh(engine, IDS[:455])
    assert_restored_text_continues(engine, SessionStore(tmp_path / "sessions"), 470)


def test_the_plan_counts_what_is_allocated(folder: Path) -> None:
    engine = opened(folder, kv="16bit")
    try:
        cache, workspace = engine.cache, engine.backends["cpu"].workspace
        assert engine.placement.kv_bytes == sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes
        read(engine, IDS[:500])
        engine.forward_logits([1])
        assert cache.allocated_nbytes <= engine.placement.kv_bytes
        assert all(len(buffer) == workspace.floats[name] for name, buffer in workspace._buffers.items())
    finally:
        engine.close()


def test_pages_on_the_disk_give_the_same_bits(folder: Path) -> None:
    """Attention takes turns while pages come: tiles of a prompt wait between two turns."""
    engines = opened(folder), paging(folder, 14, kv_pages=1, ctx=CTX, chunk=128)
    found = [logits_after(each, 450, 460) for each in engines]
    assert engines[1].cache.pool.stream is not None
    for each in engines:
        each.close()
    assert np.array_equal(*found)


def test_packed_pages_cost_little_and_threads_change_no_bit(folder: Path) -> None:
    """Heads as wide as a packed cache takes them."""
    engine = opened(folder, kv="32bit")
    exact = read_afresh(engine, IDS[:600])
    engine.close()
    for kv, most in (("8bit", 0.02), ("4bit", 0.3)):
        found = []
        for threads in (1, 3):
            engine = opened(folder, kv=kv, kv_window=32, threads=threads)
            rows = [read(engine, IDS[:600]), *[engine.forward_logits([token])[0].copy() for token in IDS[600:610]]]
            assert engine.cache.sealed > 2
            found.append(np.stack(rows))
            engine.close()
        assert np.array_equal(*found)
        assert np.abs(found[0][0] - exact).max() < most * np.abs(exact).max(), kv


@pytest.mark.slow
def test_a_profile_weighs_values_by_what_latents_go_through(folder: Path, tmp_path: Path) -> None:
    """Recorded, kept and used; what an error of a value does to the stream is what the recorder says."""
    engine = opened(folder, kv="32bit", chunk=CTX)
    try:
        *_, profile = record(engine, Numbers(), "x" * 3000, "some weights", seconds=1e6)
        own, heads = engine.config.mla, engine.config.num_attention_heads
        error = np.random.default_rng(1).standard_normal((3, own.key)).astype(np.float32)
        with engine.model.layer(1) as weights:
            grams = _output_grams(weights, None, engine.config, 1)
            values = reference_latent.values(np.tile(error, heads), heads, own, weights.mla.kv_b.to_f32()).reshape(3, heads, -1)
            o = weights.o.weight.to_f32().reshape(-1, heads, own.value)
            moved = np.square(np.einsum("thv,dhv->thd", values, o)).sum(-1)
        assert np.allclose(np.einsum("ti,hij,tj->th", error, grams, error), moved, rtol=1e-3)
    finally:
        engine.close()
    assert len(profile.layers) == engine.config.num_hidden_layers
    copy = shutil.copytree(folder, tmp_path / "model")
    save_profile(replace(profile, weights=identity_of(copy), auto=4), copy)
    engine = opened(copy, kv="auto", kv_window=32)
    try:
        assert engine.options.kv == "4bit" and engine.cache.codecs[0].basis.profile == load_profile(copy, engine.config).hash
        assert np.isfinite(read(engine, IDS[:400])).all()
    finally:
        engine.close()


def made_elsewhere(name: str, folder: Path) -> Path:
    """The model as quantized by another tool, one of `imported_mixture`'s."""
    shape = {**LATENT_CASES["deepseek_v3"].changes, "hidden_size": 256, "kv_lora_rank": 112 if name == "fp8 blocks" else 128,
             "q_lora_rank": 128, "moe_intermediate_size": 128, "v_head_dim": 64, "intermediate_size": 256}
    folder.mkdir(exist_ok=True)
    imported_mixture(folder, name, shape, "deepseek_v3")
    return folder


def test_what_heads_share_out_grows_to_16_bits_and_no_further(tmp_path: Path) -> None:
    """Codes are read in 32 bits for a conversion; what stays raw of them was stored so."""
    source = made_elsewhere("fp8 blocks", tmp_path / "in")
    run(source, tmp_path / "out", options("4bit"))
    made = read_container(tmp_path / "out").tensors
    assert {str(own.spec) for name, own in made.items() if "kv_b_proj" in name} == {"f16"}
    with open_store(source) as before, TensorStore.open(tmp_path / "out") as after:
        for store in (before, after):
            assert store.tensors["model.layers.1.self_attn.kv_b_proj.weight"].dtype == "F16"
        values = [store.read(store.tensors["model.layers.1.self_attn.kv_b_proj.weight"]) for store in (before, after)]
        assert np.array_equal(*values)


@pytest.mark.parametrize("name", ["gptq 4", "int4", "fp8 blocks"])
def test_what_other_tools_quantized_is_read(name: str, tmp_path: Path) -> None:
    """What heads share out is widened, whatever runs from its codes; scales of blocks that end in part."""
    made_elsewhere(name, tmp_path)
    found = []
    for exact in (False, True):
        engine = opened(tmp_path, exact=exact)
        specs = {role: tensor.spec for role, tensor in engine.model.tensors[1].items()}
        assert specs["kv_b"].is_raw and not specs["q_b"].is_raw
        found.append(read(engine, IDS[:200]))
        engine.close()
    assert np.isfinite(found).all() and np.abs(found[0] - found[1]).max() < 0.1 * np.abs(found[1]).max()


def test_a_converted_folder_answers_nearly_the_same(folder: Path, tmp_path: Path) -> None:
    engine, errors = opened(folder, kv="32bit"), []
    before = read_afresh(engine, IDS[:200])
    engine.close()
    for spec in ("8bit", "4bit"):
        made, _ = run(folder, tmp_path / spec, options(spec))
        quantized = opened(tmp_path / spec, kv="32bit")
        errors.append(np.square(read(quantized, IDS[:200]) - before).mean() / np.square(before - before.mean()).mean())
        assert quantized.model.nbytes == made.after
        quantized.close()
    assert errors[0] < 0.01 and errors[0] < errors[1] < 0.5


def test_what_is_stored_and_what_its_numbers_mean(folder: Path, tmp_path: Path) -> None:
    """In float32 the answers of a converted folder are those of the model with the rounded weights put back; what heads share out stays as
    it was."""
    run(folder, tmp_path / "out", options("3bit"))
    made, plan = read_container(tmp_path / "out"), plan_conversion(folder, options("3bit").recipe)
    kept = {job.role for job in plan.jobs if made.tensors[job.name].spec.is_raw and len(job.shape) == 2}
    assert kept == {"kv_b", "router"}
    exact = list(open_engine(tmp_path / "out", EngineOptions(kv="32bit", device="cpu", ctx=256, exact=True)))[-1]
    ours = read(exact, IDS[:200])
    exact.close()
    engine = opened(folder, kv="32bit")
    with plan.store, TensorStore.open(tmp_path / "out") as store:
        for job in plan.jobs:
            if not job.spec.is_raw:
                values = dequantize(unpack(store.read(store.tensors[job.name]), job.spec, job.shape), job.spec)
                with engine.model.pager.lease(job.key) as raw:
                    raw[job.name].view(np.float32)[:] = values.reshape(-1)
    theirs = read(engine, IDS[:200])
    engine.close()
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


def test_calibration_sees_every_matrix_and_smoothing_changes_nothing_but_rounding(folder: Path) -> None:
    engine, plan = opened(folder, kv="32bit"), plan_conversion(folder, options("4bit").recipe)
    before, pool = read(engine, IDS[:200]), ThreadPool(2)
    queries = {"q"} if plan.config.mla.query_rank is None else {"q_a", "q_b"}
    with plan.store:
        converter = Converter(plan, "smooth", SimpleNamespace(finished=set()), pool, IDS)
        for found in calibrate(folder, IDS[:200]):
            if not isinstance(found, LayerStats) or found.key == "outer":
                continue
            assert {"kv_a", "o", *queries} <= set(found.roles) and "kv_b" not in found.roles
            changed = converter._equalise(found)
            roles = {job.role for job in plan.jobs if job.name in changed}
            dense = set() if found.key in plan.config.moe.layers else {"post_norm", "gate", "up", "down"}
            assert roles == {"input_norm", "kv_a"} | queries | ({"q_a_norm"} if "q_a" in queries else set()) | dense
            with engine.model.pager.lease(found.key) as raw:
                for name, values in changed.items():
                    raw[name].view(np.float32)[:] = values.reshape(-1)
    pool.close()
    engine.model._wrapped.clear()
    after = read_afresh(engine, IDS[:200])
    engine.close()
    assert np.abs(after - before).max() < 1e-4 * np.abs(before).max()


def test_show_says_what_is_kept_of_a_token(folder: Path, tmp_path: Path, user) -> None:
    model = shutil.copytree(folder, tmp_path / "shown")
    (model / "tokenizer.json").write_bytes((FABLE / "tokenizer.json").read_bytes())
    (said,) = [line for line in user.run("show", model).out.splitlines() if line.startswith("attention")]
    config = prepare(folder, EngineOptions(ctx=1)).config
    assert said.endswith(f"from a latent of {config.mla.rank}; {config.mla.key} values cached per token")
    shown = json.loads(user.run("show", model, "--json").out)
    assert shown["latent_attention"]["cached"] == config.mla.key
