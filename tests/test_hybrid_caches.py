"""Caches of hybrid models, with pages in some layers and states in others: policies, spilled pages, profiles, sessions."""

# Fixtures come from a module, and tests take them as arguments of their names.
# ruff: noqa: F811

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bit_exactness import assert_restored_text_continues, save
from hybrid_models import CTX, IDS, engine, folder, opened, paged, read, read_afresh, small  # noqa: F401

from effllm import EffllmError
from effllm.runtime.engine import Engine
from effllm.runtime.events import Notice, Progress
from effllm.runtime.kv.kv_profile_file import identity_of, load_profile, save_profile
from effllm.runtime.kv.kv_recording import record
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sessions.prompt_cache import PromptCache
from effllm.runtime.sessions.saved_cache import identity, restore_cache
from effllm.runtime.sessions.saved_sessions import SavedSessions
from effllm.runtime.sessions.session_prefix import restore_prefix
from effllm.runtime.sessions.session_store import SessionStore


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


def test_a_session_continues_with_the_same_bits(engine: Engine, store: SessionStore) -> None:
    read_afresh(engine, IDS[:450])
    for token in IDS[450:455]:
        engine.forward_logits([token])
    assert_restored_text_continues(engine, store, 470)
    read(engine, IDS[:200])
    assert engine.num_cached_tokens == 0, "there is no way back behind what was saved"


@pytest.mark.slow
def test_prompts_that_take_turns_are_kept_with_their_state(engine: Engine, tmp_path: Path) -> None:
    kept = PromptCache(engine, SavedSessions(SessionStore(tmp_path / "sessions"), "hybrid", 1 << 30))
    other, without_text = IDS[:300][::-1], SimpleNamespace(cached=("", []))
    engine.reset()

    def read_next(ids: list[int]) -> int:
        assert all(isinstance(event, Progress | Notice) for event in kept.switch_to(None, ids, without_text))
        read(engine, ids)
        return engine.num_cached_tokens

    assert [read_next(ids) for ids in (IDS[:300], other, IDS[:350], other + IDS[:5])] == [0, 0, 300, 300]
    expected = engine.forward_logits([7]).copy()
    read_afresh(engine, other)
    read(engine, other + IDS[:5])
    assert np.array_equal(engine.forward_logits([7]), expected)
    assert read_next(IDS[:290]) == 0, "what is kept goes back to no token but its last"
    engine.reset()
    one, two = IDS[50:450] + IDS[500:560], IDS[50:450] + IDS[560:620]
    held = [0, 320, 320, 320] if engine.cache.is_packed else [0, 0, 460, 460]  # packed, there is a way back into what both share
    assert [read_next(ids) for ids in (one, two, one + IDS[:5], two + IDS[:5])] == held


def test_a_session_whose_state_is_gone_or_altered_is_damaged(engine: Engine, store: SessionStore) -> None:
    read_afresh(engine, IDS[:200])
    save(engine, store)
    session = store.read("tale")
    with pytest.raises(EffllmError, match="is damaged: it lacks the state of linear attention"), store.reading():
        list(restore_cache(engine, store, replace(session, cache=replace(session.cache, state=None))))
    with pytest.raises(EffllmError, match="is damaged: pages of other tokens"), store.reading():
        other = replace(session.cache.state, key=session.cache.tail.key)
        list(restore_cache(engine, store, replace(session, cache=replace(session.cache, state=other))))
    assert engine.tokens == []


def test_other_sessions_lend_nothing(engine: Engine, store: SessionStore) -> None:
    read_afresh(engine, IDS[:450])
    save(engine, store)
    engine.reset()
    assert restore_prefix(engine, store, identity(engine), IDS[:500], 0) == (0, [])


@pytest.mark.parametrize("policy", ["mikv", "zipcache"])
def test_policies_see_the_layers_that_have_pages(paged: Path, policy: str) -> None:
    """Their bits go to pages of those layers by the attention there; what is read again comes to the same."""
    engine = opened(paged, kv=f"4bit+{policy}", kv_window=32)
    try:
        first = read_afresh(engine, IDS[:600])
        assert 2 in engine.cache._kinds and len(engine.cache.codecs) == len(engine.config.attention_layers)
        assert np.array_equal(read_afresh(engine, IDS[:600]), first)
        planned = engine.placement.kv_bytes
        assert engine.cache.allocated_nbytes <= planned
    finally:
        engine.close()


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_pages_on_the_disk_give_the_same_bits(paged: Path, kv: str) -> None:
    """States stay in memory."""
    asked = {"kv": kv, "kv_window": 0, "kv_sink": 0} if kv == "4bit" else {"kv": kv}
    memory, prepared = opened(paged, **asked), prepare(paged, EngineOptions(device="cpu", ctx=CTX, chunk=128, **asked))
    disk = Engine(replace(prepared, placement=replace(prepared.placement, kv_pages=1)))
    list(disk.model.load())
    try:
        assert disk.cache.pool.stream is not None
        for engine in (memory, disk):
            read(engine, IDS[:600])
        assert disk.cache.sealed > 2 and np.array_equal(memory._logits, disk._logits)
        for token in IDS[600:605]:
            assert np.array_equal(memory.forward_logits([token]), disk.forward_logits([token]))
    finally:
        memory.close()
        disk.close()


@pytest.mark.slow
def test_a_profile_is_of_the_layers_that_have_pages(paged: Path, tmp_path: Path) -> None:
    """Recorded, kept and used: with as many layers as have keys and values."""
    engine = opened(paged, kv="32bit", chunk=CTX)
    try:
        *_, profile = record(engine, Numbers(), "x" * 3000, "some weights", seconds=1e6)
    finally:
        engine.close()
    assert len(profile.layers) == len(profile.costs) == len(engine.config.attention_layers) and profile.costs[0] is not None
    copy = shutil.copytree(paged, tmp_path / "model")
    save_profile(replace(profile, weights=identity_of(copy), auto=4), copy)
    engine = opened(copy, kv="auto", kv_window=32)
    try:
        assert engine.options.kv == "4bit" and engine.cache.codecs[0].basis.profile == load_profile(copy, engine.config).hash
        assert np.isfinite(read(engine, IDS[:400])).all()
    finally:
        engine.close()


class Numbers:
    """A tokenizer of text that nobody reads."""

    bos_id = None

    def encode(self, text: str, **_: object) -> list[int]:
        return np.random.default_rng(len(text)).integers(0, 300, len(text)).tolist()
