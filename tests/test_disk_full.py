"""A full disk ends every command with the same exit code, whatever was being written; simulated by a file size limit."""

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest
from test_cli_run import shell
from test_kv_tiers import Feed, cache_of, full_after, proc_says

from effllm import DiskFull, DoesNotFit, EffllmError, lacks_room, not_written
from effllm.offload.page_pool import DiskTier
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.conversion.on_load import temporary_folder
from effllm.runtime.files.atomic_write import write_text_atomic
from effllm.runtime.planning.memory_pressure import MemoryMonitor
from effllm.runtime.sparse.sparsity import Trace

LIMIT = 'ulimit -f 64; trap "" XFSZ; '  # 64 KiB
COMMANDS = {
    "an answer": "EFFLLM run fable 'Tell me a story.' -n 1 > /dev/full",
    "a listing": "EFFLLM list > /dev/full",
    "a quantized model": LIMIT + "EFFLLM quantize fable -o {folder}/small --bits 4",
    "a model quantized on load": LIMIT + "EFFLLM run fable Hello -n 1 --bits 4",
    "a GGUF file": LIMIT + "EFFLLM export fable -o {folder}/small.gguf --type Q8_0",
    "a session": "ulimit -f 1; trap '' XFSZ; EFFLLM run fable -f {folder}/text -n 1 --session tale",
    "a session without its cache": "EFFLLM run fable -f {folder}/text -n 1 --session tale 2> /dev/null && "
                                   "ulimit -f 0; trap '' XFSZ; EFFLLM session rm tale --cache",
    "the cache on the disk": LIMIT + "EFFLLM run fable -f {folder}/text -n 1 -c 2048 --kv 16bit --kv-ram 6M --spill-dir {folder}/spill",
    "an alias": "ulimit -f 0; trap '' XFSZ; EFFLLM alias tale fable",
}


@pytest.mark.parametrize("what", COMMANDS)
def test_every_command_says_so_and_ends_with_the_same_code(tmp_path: Path, what: str) -> None:
    (tmp_path / "text").write_text(built_in_text()[:3600])
    homes = f"export XDG_STATE_HOME={tmp_path}/state XDG_CONFIG_HOME={tmp_path}/config TMPDIR={tmp_path}; mkdir {tmp_path}/state; "
    ran = shell(homes + COMMANDS[what].format(folder=tmp_path))
    *_, said, hint = ran.stderr.splitlines()
    assert ran.returncode == DoesNotFit.exit_code == 4, ran.stderr
    assert said.startswith("effllm: ") and hint.startswith("hint: ") and "Traceback" not in ran.stderr
    assert any(words in said for words in ("full", "File too large", "does not allow a file of that size", "No space")), said
    assert "make room" in hint or "free some space" in hint or "takes space" in hint, hint


@pytest.mark.parametrize("code", (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS))
def test_want_of_room_is_told_from_other_failures(code: int) -> None:
    error = OSError(code, os.strerror(code), "a.txt")
    full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    assert lacks_room(error) == full
    made = not_written(error, "a.txt cannot be written", "another folder")
    assert type(made) is (DiskFull if full else EffllmError) and made.exit_code == (4 if full else 1)
    assert made.message == f"a.txt cannot be written: {os.strerror(code)}"
    assert made.hint == ("make room on that disk, then run it again" if full else "another folder")


@pytest.mark.parametrize(("what", "step", "place"), (
    ("a conversation", "choose another place: /save FILE", "os.replace"),
    ("a temporary folder", "set TMPDIR to a folder with room", "tempfile.mkdtemp"),
    ("a trace", "another --trace FILE", "numpy.savez_compressed")))
def test_what_may_lie_elsewhere_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, step: str, place: str) -> None:
    """A chat, for one, is nothing to be run again."""
    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(place, full)
    with pytest.raises(DiskFull) as caught:
        if what == "a conversation":
            write_text_atomic(tmp_path / "chat.json", "{}", step)
        elif what == "a trace":
            Trace(8, (np.zeros((4, 1), np.uint8),)).save(tmp_path / "trace.npz")
        else:
            with temporary_folder():
                pass
    assert caught.value.hint == f"make room there, or {step}"


@pytest.mark.parametrize("number", (errno.ENOSPC, errno.EIO))
def test_pages_that_the_disk_does_not_take_stay_in_memory(pool, tmp_path, monkeypatch, number):
    """The answer goes on: memory is short, not gone."""
    memory, disk = Feed(cache_of(pool, None)), Feed(cache_of(pool, DiskTier(tmp_path / "spill", 6)))
    now, weights = [0.0], [0, 3 << 20]
    watch = MemoryMonitor(root=tmp_path, clock=lambda: now[0], shed=lambda: weights.pop())
    proc_says(tmp_path, 0, 0)
    for feed in (memory, disk):
        feed.run(1000)
    watch.look(disk.cache)
    room = full_after(monkeypatch, 0, number)
    for swapped, first in ((40_000, 6), (90_000, 3)):
        now[0] += 1.5
        proc_says(tmp_path, swapped, 0)
        watch.look(disk.cache)
        (said,) = watch.announcements()
        assert disk.cache.pool.first == first
        if not room[0]:
            assert re.search("and the KV cache cannot be moved: the .*(is full|written).*; 3.00 MiB of experts", said)
        room[0] = 1 << 30
        for feed in (memory, disk):
            feed.run(20)
    assert "of the KV cache were moved to disk" in said and np.array_equal(memory.out, disk.out, equal_nan=True)
    disk.cache.close()
