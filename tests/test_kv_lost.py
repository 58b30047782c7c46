"""A cache on the disk that is lost in the middle of a conversation: one answer ends, and the next one reads again what is not held."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from effllm.kernels.layout import PAGE
from effllm.offload.page_stream import PagesLost
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.engine import Engine
from effllm.runtime.events import Notice
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.saved import SavedSessions
from effllm.runtime.saved_format import SavedSession
from effllm.runtime.session import Session
from effllm.runtime.session_store import SessionStore
from effllm.runtime.text import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from saves import FABLE, opened, read, tokens
from test_cli_chat import CTRL_D, Chat

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


@pytest.mark.parametrize("kv_read", ("exact", "sparse"))
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
        assert engine.reused == held
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


@pytest.mark.parametrize("spec", ("off", "lookup"))
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


def test_a_session_that_finds_its_cache_lost_keeps_the_text(tmp_path):
    """The pages are read for the first time again when they are saved."""
    engine = tiered(tmp_path / "spill", ctx=2048)
    sessions = SavedSessions(SessionStore(tmp_path / "sessions"), "fable", 1 << 30)
    try:
        session = Session(engine, Tokenizer.load(FABLE, engine.config), SamplerSettings(temperature=0), max_tokens=4)
        for _ in session.ask(built_in_text()[:3600]):
            continue
        assert engine.cache.sealed > engine.cache.pool.first
        altered(descriptor(engine))
        *said, saved = sessions.save(session, "tale")
        assert isinstance(saved, SavedSession) and saved.cache is None
        notices = [event.text for event in said if isinstance(event, Notice)]
        assert len(notices) == 1
        assert notices[0].startswith("session tale: the text alone is kept, and is read again: the KV cache's file was")
        assert sessions.store.read("tale").conversation["messages"] == session.messages
        for _ in session.ask("Go on."):
            continue
        *_, saved = sessions.save(session, "tale")
        assert saved.cache is not None and len(saved.cache.tokens) == len(engine.tokens)
    finally:
        engine.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the file has no name: it is opened as a descriptor of the chat's")
def test_a_chat_says_what_comes_next_and_goes_on(tmp_path):
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
    assert "the KV cache's file was altered" in said and "hint: your next message reads that part of the conversation again" in said
    assert chat.used() == used, "the question that found it is in no history"
    assert "stopped after 16 tokens" in chat.say("And then?")
    assert "stopped after 16 tokens" in chat.say("And then?")
    assert chat.leave(CTRL_D) == 0
