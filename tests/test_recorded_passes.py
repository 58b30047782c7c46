"""Recorded passes that read from disk midway: their cost in Python per token, and bits equal to those from memory."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conversions import options, run
from streamed_models import FABLE, paging
from test_moe_models import mixture_model

from effllm.kernels.cpu.jobs import Jobs
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cpu.rotary_angles import AngleUpdater, write_angles
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.offload.page_stream import PagesLost
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.rope import RopeTable

CACHE = {"ctx": 1024, "kv": "4bit", "kv_sink": 0, "kv_window": 0}


def opened(folder: Path, kv_pages: int | None, **asked: object) -> Engine:
    """With pages on the disk that no budget would put there, as the cache is so small."""
    prepared = prepare(folder, EngineOptions(device="cpu", **CACHE, **asked, from_settings=frozenset({"kv_read"})))
    options = replace(prepared.options, **asked)
    engine = Engine(replace(prepared, placement=replace(prepared.placement, kv_pages=kv_pages), options=options))
    for _ in engine.model.load():
        continue
    return engine


class Counted:
    """How often a model's blocks are gone through in Python."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.count, block = 0, engine.model.block

        def counting(*more: object) -> object:
            self.count += 1
            return block(*more)

        patch.setattr(engine.model, "block", counting)


def answer(engine: Engine, ids: list[int]) -> np.ndarray:
    return np.concatenate([engine.forward_logits([token]).copy() for token in ids])


def tokens(engine: Engine, count: int) -> list[int]:
    return np.random.default_rng(3).integers(0, engine.config.vocab_size, count).tolist()


@pytest.mark.slow
def test_pages_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = opened(FABLE, None), opened(FABLE, 1, spill_dir=str(tmp_path))
    ids = tokens(disk, 700)
    for engine in (memory, disk):
        for _ in engine.prefill(ids[:400]):
            continue
    counted = Counted(disk, monkeypatch)
    assert np.array_equal(answer(disk, ids[400:]), answer(memory, ids[400:]))
    layers = disk.config.num_hidden_layers
    assert disk.cache.sealed == 5 and disk.cache.pool.traffic.nbytes > 0
    assert counted.count <= 4 * layers, "once for every page that was begun, of 300 tokens"
    for engine in (memory, disk):
        engine.close()


@pytest.mark.slow
def test_pages_that_are_picked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"spill_dir": str(tmp_path), "kv_read": "sparse"}
    recorded, anew = (opened(FABLE, 0, **asked) for _ in range(2))
    ids = tokens(recorded, 700)
    for engine in (recorded, anew):
        for _ in engine.prefill(ids[:400]):
            continue
    monkeypatch.setattr(anew.model.backends["cpu"], "replay", lambda *more: False)
    counted = Counted(recorded, monkeypatch)
    assert np.array_equal(answer(recorded, ids[400:]), answer(anew, ids[400:]))
    slots, layers = recorded.cache.pool.stream.slots, recorded.config.num_hidden_layers
    assert sum(each.num_requested for each in slots) > 0
    assert counted.count <= 4 * layers, "once for every page that was begun, of 300 tokens"
    for engine in (recorded, anew):
        engine.close()


def test_a_disk_that_fails_while_a_pass_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = opened(FABLE, None), opened(FABLE, 0, spill_dir=str(tmp_path))
    ids = tokens(disk, 430)

    def begin(engine: Engine) -> None:
        for _ in engine.prefill(ids[:400]):
            continue
        answer(engine, ids[400:410])

    begin(memory)
    begin(disk)

    def failing(*more: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(PagesLost, match="Input/output error"):
            for _ in range(9):  # what was read ahead comes first
                disk.forward_logits(ids[410:411])
                disk.cache.truncate(410)
                del disk.tokens[410:]
    assert disk.cache.n == len(disk.tokens) == 0, "no page is in memory"
    begin(disk)
    assert np.array_equal(answer(disk, ids[410:]), answer(memory, ids[410:]))
    for engine in (memory, disk):
        engine.close()


def test_experts_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(mixture_model(tmp_path / "bf16"), tmp_path / "4bit", options("4bit"))
    memory = list(open_engine(tmp_path / "4bit", EngineOptions(device="cpu", ctx=256)))[-1]
    disk = paging(tmp_path / "4bit", 8, ctx=256)
    ids = tokens(disk, 150)
    counted = Counted(disk, monkeypatch)
    assert np.array_equal(answer(disk, ids), answer(memory, ids))
    tally, layers = disk.model.pager.stats, disk.config.num_hidden_layers
    assert 0 < tally.hits < tally.uses == 150 * 2 * disk.model.pager.layers
    assert counted.count <= 4 * layers
    for engine in (memory, disk):
        engine.close()


def test_what_stands_between_is_done_again() -> None:
    pool = ThreadPool(2)
    ops, seen = CpuOps(pool, Dims(8, 2, 1, 8, 8, 8, chunk=4, ctx=64, logit_rows=1)), []
    assert isinstance(ops, Jobs)
    key, again = object(), [False]
    for turn in range(3):
        with ops.collecting():
            again[0] = ops.replay(key, 1, turn)
            if not again[0]:
                with ops.recording(key, 1):
                    ops.refresh(lambda position: seen.append(("at", position)))
                    ops.host_step(lambda: seen.append("first"))
                    ops.host_step(lambda: seen.append("second"))
        assert again[0] == (turn > 0)
    assert seen == ["first", "second", ("at", 1), "first", "second", ("at", 2), "first", "second"]
    with ops.collecting(), ops.recording(key, 1):
        ops.flush()  # a pass that needs to be told apart is none to repeat
        ops.host_step(lambda: seen.append("third"))
    with ops.collecting():
        assert not ops.replay(key, 1, 3)
    pool.close()


def test_the_embeddings_of_a_low_bit_model_are_looked_up_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token its own, though the job is the one of the token before; a tap makes every pass a fresh one."""
    run(FABLE, tmp_path / "4bit", options("4bit"))
    *_, engine = open_engine(tmp_path / "4bit", EngineOptions(device="cpu", ctx=1024))
    ids = tokens(engine, 300)
    fresh = [engine.model.forward(np.array([token]), engine.cache, lambda name, layer, value: None).copy() for token in ids]
    engine.reset()
    calls, embed = [], CpuOps.embed
    monkeypatch.setattr(CpuOps, "embed", lambda *more: calls.append(1) or embed(*more))
    recorded = [engine.model.forward(np.array([token]), engine.cache).copy() for token in ids]
    assert np.array_equal(recorded, fresh)
    assert 0 < len(calls) < 10, "in Python only where the list of blocks changed"
    engine.close()


@pytest.mark.parametrize("channels", [8, 20, 32, 64])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_angles_of_the_next_tokens_are_made_together(channels: int, count: int) -> None:
    table = RopeTable((1e4 ** -(np.arange(channels) / channels)).astype(np.float32), 1.19, 2 * channels)
    kept, alone = np.zeros((2, 2, count, channels), np.float32)
    turner = AngleUpdater(table, *kept)
    for position in [0, 1, 62, 63, 64, 65, 5000, 4999, 130_000, *range(2000, 2200)]:
        turner(position)
        write_angles(table, *alone, np.arange(position, position + count))
        assert np.array_equal(kept, alone)
