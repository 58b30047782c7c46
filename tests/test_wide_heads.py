"""Packed caches with heads wider than 256: Gemma 4's layers without a window (512, next to 256), and latents of 576. What holds of any
packed cache holds of them."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bit_exactness import save
from family_models import GEMMA_4, KEYS_AS_VALUES, Case
from hybrid_models import CTX, IDS, opened, read, read_afresh
from latent_models import LATENT_CASES
from saved_models import saved
from session_engines import restore
from test_hybrid_caches import Numbers

from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.threads import ThreadPool
from effllm.runtime.engine import Engine
from effllm.runtime.kv.kv_profile_file import identity_of, load_profile, save_profile
from effllm.runtime.kv.kv_recording import record
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.workspace_dims import dims

HEADS = {"head_dim": 256, "global_head_dim": 512, "hidden_size": 128, "max_position_embeddings": CTX, "sliding_window": 150}
GEMMA = {**GEMMA_4, **HEADS}
CASES = {"small": Case("gemma4_text", GEMMA), "large": Case("gemma4_text", {**GEMMA, **KEYS_AS_VALUES}),
         "latents": Case("glm4_moe_lite", {**LATENT_CASES["glm4_moe_lite"].changes, "kv_lora_rank": 512, "qk_rope_head_dim": 64})}
PACKED = {"kv": "4bit", "kv_window": 32}


@pytest.fixture(scope="module", params=[pytest.param("small", marks=pytest.mark.slow), "large", "latents"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wide") / request.param
    saved(CASES[request.param], made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = opened(folder, **PACKED)
    yield made
    made.close()


def rows_of(engine: Engine, ids: list[int], prompt: int) -> np.ndarray:
    """Logits behind a prompt and behind every token after it."""
    return np.stack([read_afresh(engine, ids[:prompt]), *[engine.forward_logits([token])[0].copy() for token in ids[prompt:]]])


def test_threads_change_no_bit(folder: Path, engine: Engine) -> None:
    assert max(size for _, size in engine.config.cache_kv_heads) in (512, 576)
    found = rows_of(engine, IDS[:460], 450)
    assert engine.cache.sealed > 1
    for threads in (1, 3):
        other = opened(folder, **PACKED, threads=threads)
        assert np.array_equal(rows_of(other, IDS[:460], 450), found)
        other.close()


@pytest.mark.slow
def test_what_it_costs(folder: Path) -> None:
    """Scores of random weights are far apart, so what is rounded shows; less of it with more bits."""
    found = {}
    for kv in ("32bit", "8bit", "6bit", "4bit"):
        engine = opened(folder, kv=kv, kv_window=32)
        found[kv] = rows_of(engine, IDS[:460], 450)
        engine.close()
    off = [float(np.sqrt(np.square(found[kv] - found["32bit"]).mean())) for kv in ("8bit", "6bit", "4bit")]
    assert 0 < off[0] < off[1] < off[2] and off[0] < 0.1 * np.sqrt(np.square(found["32bit"]).mean())


def test_the_plan_counts_the_cache_to_the_byte(engine: Engine) -> None:
    cache = engine.cache
    assert engine.placement.kv_bytes == sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes
    read(engine, IDS[:500])
    assert cache.allocated_nbytes <= engine.placement.kv_bytes


def test_pages_on_the_disk_give_the_same_bits(folder: Path, engine: Engine) -> None:
    prepared = prepare(folder, EngineOptions(device="cpu", ctx=CTX, chunk=128, **PACKED))
    disk = Engine(replace(prepared, placement=replace(prepared.placement, kv_pages=1)))
    list(disk.model.load())
    try:
        found = rows_of(disk, IDS[:455], 450)
        assert disk.cache.pool.stream is not None and np.array_equal(found, rows_of(engine, IDS[:455], 450))
    finally:
        disk.close()


def test_a_session_continues_with_the_same_bits(engine: Engine, tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "sessions")
    read_afresh(engine, IDS[:455])
    save(engine, store)
    expected = [engine.forward_logits([token]).copy() for token in IDS[455:465]]
    engine.cache.truncate(0)
    engine.reset()
    restore(engine, store)
    assert engine.tokens == IDS[:455] and engine.cache.sealed > 1
    for token, row in zip(IDS[455:465], expected, strict=True):
        assert np.array_equal(engine.forward_logits([token]), row)


@pytest.mark.slow
def test_policies_choose_among_pages(folder: Path) -> None:
    engine = opened(folder, kv="4bit+mikv", kv_window=32)
    try:
        first = read_afresh(engine, IDS[:600])
        assert 2 in engine.cache._kinds and np.array_equal(read_afresh(engine, IDS[:600]), first)
        assert engine.cache.allocated_nbytes <= engine.placement.kv_bytes
    finally:
        engine.close()


@pytest.mark.slow
def test_a_profile_is_recorded_kept_and_used(folder: Path, tmp_path: Path) -> None:
    engine = opened(folder, kv="32bit", chunk=CTX)
    try:
        *_, profile = record(engine, Numbers(), "x" * 3000, "some weights", seconds=1e6)
    finally:
        engine.close()
    copy = shutil.copytree(folder, tmp_path / "model")
    save_profile(replace(profile, weights=identity_of(copy), auto=4), copy)
    engine = opened(copy, kv="auto", kv_window=32)
    try:
        assert engine.options.kv == "4bit" and engine.cache.codecs[0].basis.profile == load_profile(copy, engine.config).hash
        widths = [np.unique(codec.basis.widths(4, 4)[0]) for codec in engine.cache.codecs]
        assert any(len(each) > 1 for each in widths)
        assert np.isfinite(read(engine, IDS[:400])).all() and engine.cache.sealed > 1
    finally:
        engine.close()


def test_a_gpu_reads_the_same_records(folder: Path, engine: Engine) -> None:
    prepared = prepare(folder, EngineOptions(device="cpu", ctx=CTX, chunk=128, **PACKED))
    config = prepared.config
    host = CpuOps(ThreadPool(1), dims(config, CTX, prepared.shape.chunk, LOGIT_ROWS, True))
    layers = config.num_hidden_layers
    placement = replace(prepared.placement, devices=("cpu",) * (layers // 2) + ("cuda",) * (layers - layers // 2))
    card = Engine(replace(prepared, placement=placement), {"cpu": host, "cuda": TorchOps("cpu")})
    list(card.model.load())
    try:
        found, wanted = rows_of(card, IDS[:452], 450), rows_of(engine, IDS[:452], 450)
        assert np.abs(found - wanted).max() < 0.2 * np.abs(wanted).max()
    finally:
        card.close()
