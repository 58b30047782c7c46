"""A KV cache on disk that fails in the middle of a conversation: one answer ends, and the next one recomputes what was lost."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from session_engines import FABLE, opened, read, tokens
from test_cli_chat import CTRL_D, Chat

from effllm import DiskFull
from effllm.kernels.layout import PAGE
from effllm.offload.page_stream import PagesLost
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.engine import Engine
from effllm.runtime.events import Notice
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.sessions.saved_sessions import SavedSessions
from effllm.runtime.sessions.session_format import SavedSession
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.tokenizer import Tokenizer

PREADV = os.preadv
TIER = ("-c", "2048", "--kv", "16bit", "--kv-ram", "6M", "--device", "cpu")


def altered(descriptor: int) -> None:
    """A stretch in the middle is another's: all layers but the first and the last have a page there that changed."""
    size = os.fstat(descriptor).st_size
    os.pwrite(descriptor, os.urandom(size // 3), size // 3)
    os.fsync(descriptor)


def cut(descriptor: int) -> None:
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 3)


def ended(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)


FAULTS = {"altered": (altered, "the KV cache's file was altered: the checksum of page"), "cut": (cut, "the KV cache's file "),
          "ended": (ended, "the KV cache's file became shorter while it was being read")}


def tiered(folder: Path, **options: object) -> Engine:
    return opened(**{"ctx": 2048, "kv": "16bit", "kv_ram": "6M", "spill_dir": str(folder), **options})


def descriptor(engine: Engine) -> int:
    return engine.cache.pool.stream.spill.descriptor


def more(engine: Engine, count: int = 20) -> None:
    """Tokens one by one; what was read ahead is there at first."""
    for token in tokens(count, seed=2):
        engine.forward_logits([token])


def spoiled(engine: Engine, spoil: Callable[[int], None], match: str, **run: Callable[[Engine], None]) -> None:
    """What memory has is held afterwards, and nothing else."""
    before, first = list(engine.tokens), engine.cache.pool.first
    spoil(descriptor(engine))
    with pytest.raises(PagesLost, match=match) as caught:
        run.get("run", more)(engine)
    assert "--spill-dir" in caught.value.hint
    assert engine.cache.n == len(engine.tokens) and engine.tokens == before[: engine.cache.n]
    assert PAGE * (first - 3) < engine.cache.n <= engine.cache.shape.sinks + PAGE * first


@pytest.mark.parametrize("kv_read", (pytest.param("exact", marks=pytest.mark.slow), "sparse"))
@pytest.mark.parametrize("fault", FAULTS)
def test_what_memory_has_is_kept_and_the_rest_is_read_again(tmp_path, fault, kv_read):
    engine, whole = tiered(tmp_path, kv_read=kv_read, kv_ram="7M"), opened(ctx=2048, kv="16bit")
    ids = tokens(1500)
    try:
        read(engine, ids)
        assert engine.cache.sealed > engine.cache.pool.first + 3
        spoiled(engine, *FAULTS[fault])
        held = engine.cache.n
        read(engine, ids)
        assert engine.num_cached_tokens == held
        read(whole, ids)
        read(whole, [*ids[:held], 1])
        read(whole, ids)
        np.testing.assert_array_equal(engine._logits, whole._logits)
        more(engine)
        assert len(engine.tokens) == 1520
    finally:
        engine.close()
        whole.close()


def test_a_disk_that_cannot_be_read_for_a_while(tmp_path, monkeypatch):
    failing = []

    def preadv(fd: int, buffers: list, offset: int) -> int:
        if failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return PREADV(fd, buffers, offset)

    engine = tiered(tmp_path)
    try:
        read(engine, tokens(1500))
        monkeypatch.setattr(os, "preadv", preadv)
        spoiled(engine, failing.append, "the KV cache's file cannot be read: Input/output error")
        failing.clear()
        read(engine, tokens(1500))
        more(engine)
    finally:
        engine.close()


@pytest.mark.parametrize("kv", (pytest.param("16bit", marks=pytest.mark.slow), "4bit"))
def test_a_disk_that_fills_within_a_chunk(tmp_path, monkeypatch, kv):
    """A chunk of a prompt seals several pages. Some are on the disk when there is no room for the next one: a packed cache then goes back
    to where the first of them begins, and the engine holds as much."""
    writes, pwrite = [], os.pwrite

    def filling(*where: object) -> int:
        writes.append(where)
        if len(writes) == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*where)

    engine, whole = tiered(tmp_path, kv=kv, kv_ram="3500K" if kv == "4bit" else "6M"), opened(ctx=2048, kv=kv)
    try:
        full, ids = engine.config.num_hidden_layers + 1, tokens(1500)
        read(engine, ids[:960])  # where a chunk ends
        before = engine.cache.sealed
        assert before >= engine.cache.pool.first
        monkeypatch.setattr(os, "pwrite", filling)
        with pytest.raises(DiskFull):
            read(engine, ids)
        assert len(writes) == full and engine.cache.sealed == before
        assert 0 < engine.cache.n == len(engine.tokens) and engine.tokens == ids[: engine.cache.n]
        read(engine, ids)
        read(whole, ids)
        assert np.abs(engine._logits - whole._logits).max() < (1e-3 if kv == "16bit" else 0.5)
        more(engine)
    finally:
        engine.close()
        whole.close()


@pytest.mark.parametrize("spec", (pytest.param("off", marks=pytest.mark.slow), "lookup"))
def test_an_answer_that_loses_its_cache_is_followed_by_one_that_does_not(tmp_path, spec):
    """Drafts run ahead of what is held: a pass of several tokens."""
    engine = tiered(tmp_path, spec=spec)
    sampler = Sampler(SamplerSettings(temperature=0), engine.config.vocab_size)

    def answer(engine: Engine) -> list[int]:
        return [step.token for step in engine.generate(sampler, 40, frozenset())]

    try:
        ids = tokens(50) * 30  # what repeats is drafted
        read(engine, ids)
        expected = answer(engine)
        read(engine, ids)
        spoiled(engine, *FAULTS["altered"], run=answer)
        read(engine, ids)
        assert answer(engine) == expected
    finally:
        engine.close()


@pytest.fixture
def talked(tmp_path: Path) -> Iterator[tuple[Session, SavedSessions]]:
    """A conversation whose cache lies on the disk for the most part, and where it is saved."""
    engine = tiered(tmp_path / "spill")
    try:
        session = Session(engine, Tokenizer.load(FABLE, engine.config), SamplerSettings(temperature=0), max_tokens=4)
        for _ in session.ask(built_in_text()[:3600]):
            continue
        assert engine.cache.sealed > engine.cache.pool.first + 3
        yield session, SavedSessions(SessionStore(tmp_path / "sessions"), "fable", 1 << 30)
    finally:
        engine.close()


def saved(session: Session, sessions: SavedSessions) -> tuple[SavedSession, list[str]]:
    *said, made = sessions.save(session, "tale")
    assert isinstance(made, SavedSession) and sessions.store.read("tale") == made
    assert made.conversation["messages"] == session.messages
    return made, [event.text for event in said if isinstance(event, Notice)]


def taken_up(session: Session, sessions: SavedSessions) -> list[int]:
    """What another process holds of it; the next answer is the one that a cache read anew gives."""
    again, anew = opened(ctx=2048, kv="16bit"), opened(ctx=2048, kv="16bit")
    held, answers = [], []
    try:
        for engine in (again, anew):
            other = Session(engine, session.tokenizer, session.settings, max_tokens=4)
            for _ in sessions.load(other, "tale"):
                continue
            held.append(list(engine.tokens))
            if engine is anew:
                engine.reset()
            for _ in other.ask("Go on."):
                continue
            answers.append(other.messages[-1])
        assert answers[0] == answers[1]
        return held[0]
    finally:
        again.close()
        anew.close()


def test_a_session_that_finds_its_cache_lost_keeps_what_lies_before(talked):
    """The pages are read for the first time again when they are saved. The text alone was kept."""
    session, sessions = talked
    engine = session.engine
    whole, first, sinks = list(engine.tokens), engine.cache.pool.first, engine.cache.shape.sinks
    altered(descriptor(engine))
    made, said = saved(session, sessions)
    kept = made.cache.tokens
    assert made.cache.sealed >= first and len(kept) == sinks + PAGE * made.cache.sealed and list(kept) == whole[: len(kept)]
    assert len(said) == 1
    begins = f"session tale: {len(kept)} of {len(whole)} tokens are saved, the rest is recomputed: the KV cache's file was"
    assert said[0].startswith(begins)
    assert taken_up(session, sessions) == list(kept)
    for _ in session.ask("Go on."):
        continue
    made, said = saved(session, sessions)
    assert len(made.cache.tokens) == len(engine.tokens) and not said


@pytest.mark.parametrize("follows", (True, False))
def test_a_session_keeps_the_cache_that_was_saved_before_where_it_continues_from_it(talked, follows):
    """Its pages were whole, and removed."""
    session, sessions = talked
    engine = session.engine
    before, _ = saved(session, sessions)
    if not follows:
        other = replace(before.cache, tokens=(*before.cache.tokens[:-1], before.cache.tokens[-1] ^ 1))
        with sessions.store.writing("tale"):
            sessions.store.write(replace(before, cache=other))
    for _ in session.ask("Go on."):
        continue
    altered(descriptor(engine))
    made, (said,) = saved(session, sessions)
    assert (made.cache.tokens == before.cache.tokens) == follows and made.cache.tokenized_text == session.tokenized_text
    assert said.startswith(f"session tale: {len(made.cache.tokens)} of ")
    if follows:
        assert taken_up(session, sessions) == list(before.cache.tokens)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the file has no name: it is opened as a descriptor of the chat's")
def test_a_chat_says_what_comes_next_and_continues(tmp_path):
    chat = Chat(tmp_path / "state", "chat", "fable", "--temp", "0", "-n", "16", *TIER, "--spill-dir", str(tmp_path / "spill"))
    assert "fable, context 2048 tokens" in chat.wait()
    (tmp_path / "text").write_text(built_in_text()[:3600])
    chat.say(f"/file {tmp_path / 'text'}")
    assert "stopped after 16 tokens" in chat.say("What is this?")
    used = chat.used()
    own = next(path for path in Path(f"/proc/{chat.terminal.pid}/fd").iterdir() if str(tmp_path / "spill") in os.readlink(path))
    file = os.open(own, os.O_RDWR)
    altered(file)
    os.close(file)
    said = " ".join(chat.say("And then?").split())
    assert "the KV cache's file was altered" in said and "hint: your next message reprocesses that part of the conversation" in said
    assert chat.used() == used, "the question that found it is in no history"
    assert "stopped after 16 tokens" in chat.say("And then?")
    assert "stopped after 16 tokens" in chat.say("And then?")
    assert chat.leave(CTRL_D) == 0


@pytest.mark.parametrize("lost", (False, True), ids=("whole", "lost"))
def test_a_raw_cache_is_cut_back_as_far_as_its_disk_gives_pages_back(tmp_path, lost):
    engine, whole = tiered(tmp_path), opened(ctx=2048, kv="16bit")
    for each in (engine, whole):
        read(each, tokens(1500))
    page = engine.cache.shape.page(1380)
    if lost:
        ended(descriptor(engine))
    assert whole.cache.truncate(1380) == 1380
    held = engine.cache.truncate(1380)
    assert held == engine.cache.n == (engine.cache.shape.start(page - 1) if lost else 1380) and engine.cache.sealed == whole.cache.sealed
    if not lost:
        assert engine.cache.exact_blocks() == whole.cache.exact_blocks()
        for each in (engine, whole):
            each.set_tokens(tokens(1500)[:held], held)
        assert np.array_equal(engine.forward_logits([5]), whole.forward_logits([5]))
    engine.close()
    whole.close()
