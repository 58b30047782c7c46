"""Saved sessions without a model: pages of made-up bytes, for tests of the folder and the children that they start.

    python session_samples.py FOLDER NAME SEED PAGES TIMES [STEP]     saves TIMES times; dies by SIGKILL at the STEP-th change to the disk
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from effllm.runtime.sessions.session_format import SavedCache, SavedSession
from effllm.runtime.sessions.session_store import SessionStore

PAGE_NBYTES = 40_000
SHARED = 3  # pages that sessions of all seeds begin with


def save(store: SessionStore, name: str, seed: int, pages: int = 6, shared: int = SHARED, saved: float | None = None) -> SavedSession:
    """A session of so many pages whose first ones do not depend on the seed."""
    with store.writing(name):
        files = []
        for page in range(pages):
            source = random.Random(f"{0 if page < shared else seed} {page}")
            files.append(store.keep_page(f"{source.getrandbits(128):032x}", [source.randbytes(PAGE_NBYTES)]))
        tail = store.keep_page(f"{seed:032x}", [random.Random(seed).randbytes(1000)])
        cache = SavedCache({"kv": "4bit"}, tuple(range(pages * 128)), tuple(files), None, tail, None)
        messages = [{"role": "user", "content": f"{seed}"}, {"role": "assistant", "content": f"{seed} pages {pages}"}]
        content = {"messages": messages, "system": None}
        session = SavedSession(name, "made-up", time.time() if saved is None else saved, content, cache)
        store.write(session)
    return session


def check(store: SessionStore, name: str) -> int:
    """The seed of a session that is whole: its conversation and every page are of one and the same saving."""
    with store.reading():
        session = store.read(name)
        seed = int(session.messages[0]["content"])
        assert session.messages[1]["content"] == f"{seed} pages {len(session.cache.pages)}"
        for page, file in enumerate(session.cache.pages):
            source = random.Random(f"{0 if page < SHARED else seed} {page}")
            assert file.key == f"{source.getrandbits(128):032x}"
            assert bytes(store.read_page(file)) == source.randbytes(PAGE_NBYTES)
        assert bytes(store.read_page(session.cache.tail)) == random.Random(seed).randbytes(1000)
    return seed


def die_at(step: int) -> None:
    """Let the process be killed when it syncs, renames or removes something for the `step`-th time."""
    calls = 0

    def counted(real):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    os.fsync, os.replace, os.unlink = counted(os.fsync), counted(os.replace), counted(os.unlink)


if __name__ == "__main__":
    folder, name, seed, pages, times = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    if len(sys.argv) > 6:
        die_at(int(sys.argv[6]))
    own = SessionStore(Path(folder))
    for turn in range(times):
        save(own, name, seed + turn, pages)
        own.make_room(1 << 30, name)
