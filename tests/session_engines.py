"""Engines of the packaged model, random prompts, and saved sessions: for tests of saving and restoring."""

from dataclasses import replace
from pathlib import Path

import numpy as np

import effllm
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sessions.saved_cache import identity, refuse_other, restore_cache, save_cache
from effllm.runtime.sessions.session_format import SavedCache, SavedSession
from effllm.runtime.sessions.session_store import SessionStore

FABLE = Path(effllm.__path__[0]) / "models" / "fable"


def opened(**options) -> Engine:
    return list(open_engine(FABLE, EngineOptions(**{"device": "cpu", "ctx": 1024, **options})))[-1]


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, 2000, count).tolist()


def read(engine: Engine, ids: list[int]) -> list[str]:
    """Prefill a prompt; returns the messages to the user."""
    return [event.text for event in engine.prefill(ids) if isinstance(event, Notice)]


def save(engine: Engine, store: SessionStore, name: str, **changes) -> SavedSession:
    """Save the engine's state as a session; `changes` override what is recorded about the cache."""
    with store.writing(name):
        *_, cache = save_cache(engine, store, identity(engine), None)
        assert isinstance(cache, SavedCache)
        session = SavedSession(name, "fable", 0.0, {}, replace(cache, **changes))
        store.write(session)
    return session


def restore(engine: Engine, store: SessionStore, name: str = "tale") -> None:
    session = store.read(name)
    refuse_other(session, identity(engine))
    with store.reading():
        for _ in restore_cache(engine, store, session):
            continue
