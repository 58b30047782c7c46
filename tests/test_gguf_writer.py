"""Writing a GGUF file: two writers of the same file, kills, and disks that fill up at any step, the last included."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from effllm import DoesNotFit, EffllmError, UsageError
from effllm.offload.gguf_writer import NewFile
from effllm.offload.size import format_size
from effllm.runtime.events import Notice
from effllm.runtime.gguf.export import export_gguf

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
MINUTE = 60


def written(path: Path, content: bytes = b"content") -> bytes:
    with NewFile(path) as file:
        file.write(content)
        file.commit()
    return path.read_bytes()


def test_two_exports_to_one_place(tmp_path: Path) -> None:
    """The second is refused, and the first is what it is alone."""
    out = tmp_path / "m.gguf"
    running = export_gguf(FABLE, out, "Q8_0", "one")
    for _ in range(6):
        next(running)
    with pytest.raises(UsageError, match=r"another effllm is writing .*m\.gguf") as caught:
        list(export_gguf(FABLE, out, "Q4_0", "two"))
    assert "-o" in caught.value.hint and not out.exists()
    list(running)
    list(export_gguf(FABLE, tmp_path / "alone.gguf", "Q8_0", "one"))
    assert out.read_bytes() == (tmp_path / "alone.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.gguf", "m.gguf"]


def test_one_that_ends_while_another_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking the hidden file it gets its final name: nothing may be written into it any more."""
    out, flock = tmp_path / "m.gguf", fcntl.flock
    with NewFile(out) as first:
        first.write(b"first")

        def ends(fd: int, how: int) -> None:
            first.commit()
            flock(fd, how)

        monkeypatch.setattr(fcntl, "flock", ends)
        with pytest.raises(UsageError, match="another effllm"):
            NewFile(out)
    monkeypatch.undo()
    assert out.read_bytes() == b"first" and list(tmp_path.iterdir()) == [out]
    assert written(out, b"second") == b"second"


def test_what_a_kill_leaves_is_taken_up(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    code = ("import os, signal, sys\nfrom pathlib import Path\nfrom effllm.offload.gguf_writer import NewFile\n"
            "with NewFile(Path(sys.argv[1])) as file:\n    file.write(b'x' * 100_000)\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    assert subprocess.run([sys.executable, "-P", "-c", code, str(out)], timeout=MINUTE, check=False).returncode < 0
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [100_000]
    assert written(out) == b"content" and list(tmp_path.iterdir()) == [out]


def test_an_export_that_was_killed_leaves_one_hidden_file_and_the_next_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its room counts as free: on a full disk the next one would be refused for it."""
    out = tmp_path / "m.gguf"
    code = ("import os, signal, sys\nfrom pathlib import Path\nfrom effllm.runtime.gguf.export import export_gguf\n"
            "for event in export_gguf(Path(sys.argv[1]), Path(sys.argv[2]), 'Q8_0', 'one'):\n"
            "    if getattr(event, 'done', 0) > 4_000_000:\n        os.kill(os.getpid(), signal.SIGKILL)\n")
    assert subprocess.run([sys.executable, "-P", "-c", code, str(FABLE), str(out)], timeout=MINUTE, check=False).returncode < 0
    (part,) = tmp_path.iterdir()
    left = part.stat().st_blocks * 512
    assert part.name == ".m.gguf.part" and left >= 4_000_000
    free = [0]
    truncate, usage = os.ftruncate, shutil.disk_usage(tmp_path)

    def ftruncate(fd: int, length: int) -> None:
        free[0] += os.fstat(fd).st_blocks * 512
        truncate(fd, length)

    monkeypatch.setattr(os, "ftruncate", ftruncate)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free[0] + 3_000_000))
    said = [event.text for event in export_gguf(FABLE, out, "Q8_0", "one") if isinstance(event, Notice)]
    assert said.count(f"an export to m.gguf that was ended had left {format_size(left)}: removed, starting over") == 1
    assert list(tmp_path.iterdir()) == [out] and out.stat().st_size < left + 3_000_000
    said = [event.text for event in export_gguf(FABLE, out, "Q8_0", "one", replace=True) if isinstance(event, Notice)]
    assert not any("had left" in text for text in said)


@pytest.mark.parametrize("step", ("write", "fsync", "replace"))
@pytest.mark.parametrize("code", (errno.ENOSPC, errno.EIO))
def test_a_disk_that_refuses_leaves_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str,
                                                                    code: int) -> None:
    out = tmp_path / "m.gguf"
    written(out, b"before")

    def refuses(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, step, refuses)
    full = code == errno.ENOSPC
    reason = f"the disk of {tmp_path} is full" if full else f"{out} cannot be written: {os.strerror(code)}"
    with pytest.raises(DoesNotFit if full else EffllmError, match=reason) as caught:
        written(out)
    monkeypatch.undo()
    assert caught.value.hint.startswith("free some space") and caught.value.hint.endswith("with -o")
    assert list(tmp_path.iterdir()) == [out] and out.read_bytes() == b"before"


@pytest.mark.parametrize("room", (0, 100_000, 3_000_000))
def test_a_disk_that_fills_while_a_model_is_exported_says_how_much_is_missing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    left, real = [room], os.write

    def write(fd: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = memoryview(data)[: left[0]]
        left[0] -= len(part)
        return real(fd, part)

    out = tmp_path / "m.gguf"
    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        with pytest.raises(DoesNotFit) as caught:
            list(export_gguf(FABLE, out, "Q8_0", "one"))
    assert not list(tmp_path.iterdir())
    list(export_gguf(FABLE, out, "Q8_0", "one"))
    assert caught.value.message == f"the disk of {tmp_path} is full: m.gguf needs {format_size(out.stat().st_size - room)} more"


def test_writes_that_take_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, content = os.write, os.urandom(1000)
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:77]))
    assert written(tmp_path / "m.gguf", content) == content


def test_a_place_that_nobody_may_write(tmp_path: Path) -> None:
    with pytest.raises(EffllmError, match="cannot be written: No such file") as caught:
        NewFile(tmp_path / "absent" / "m.gguf")
    assert caught.value.hint == "choose another path with -o"


def test_what_lies_under_the_hidden_name_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    """A link's file was emptied and written, and the link became the result; a pipe was waited for without end."""
    part, mine = tmp_path / ".m.gguf.part", tmp_path / "mine"
    mine.write_text("mine")
    for make in (lambda: part.symlink_to(mine), lambda: os.mkfifo(part)):
        make()
        with pytest.raises(EffllmError, match="m.gguf cannot be written") as caught:
            NewFile(tmp_path / "m.gguf")
        assert caught.value.hint == "choose another path with -o"
        part.unlink()
    assert mine.read_text() == "mine" and [*tmp_path.iterdir()] == [mine]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert written(tmp_path / "m.gguf") == b"content"
