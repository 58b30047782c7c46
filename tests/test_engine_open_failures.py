"""Engines that fail to open: everything opened so far is closed, so that a long-lived program leaks nothing."""

import os
import threading
from pathlib import Path

import pytest
from session_engines import opened

from effllm import EffllmError


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
@pytest.mark.parametrize("late", (False, True))
def test_no_file_and_no_thread_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    tier = {"ctx": 2048, "kv_ram": "7M", "spill_dir": str(tmp_path / "file")}
    if late:  # the last thing that can fail, with the cache's file open
        monkeypatch.setattr("effllm.runtime.engine.speculation", lambda prepared, *_: prepared.nothing)
    else:
        (tmp_path / "file").touch()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises(AttributeError if late else EffllmError, match="nothing" if late else "no file for the KV cache"):
        opened(threads=3, **tier)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
