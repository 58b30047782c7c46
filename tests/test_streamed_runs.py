"""Whole runs of a model larger than its budget, in processes of their own: memory within bounds, and failures midway."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from streamed_models import larger_than_memory

MIB = 1 << 20
MINUTES = 300  # seconds after which a process hangs, on however slow a machine
WORDS = "word " * 120
# Runs the command line, then says on stderr the most memory that the process has held.
CHILD = """
import os, sys, threading
from pathlib import Path
from effllm.cli.app import main
{before}
code = main({arguments!r})
peak = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")][0]
print("peak", int(peak.split()[1]) * 1024, file=sys.stderr, flush=True)
sys.exit(code)
"""
# From when a file is there, the disk answers no more.
HANGS = """
real = os.preadv
def preadv(fd, buffers, offset):
    if os.path.exists({file!r}):
        print("hangs", file=sys.stderr, flush=True)
        threading.Event().wait()
    return real(fd, buffers, offset)
os.preadv = preadv
"""
# No file system here takes direct reads.
BUFFERED = """
real = os.open
def without_direct(path, flags, *more, **named):
    if flags & os.O_DIRECT:
        raise OSError(22, "Invalid argument")
    return real(path, flags, *more, **named)
os.open = without_direct
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process holds is read from /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return larger_than_memory(tmp_path_factory.mktemp("models") / "large")


def start(*arguments: object, before: str = "", **more: object) -> subprocess.Popen:
    code = CHILD.format(arguments=[str(argument) for argument in arguments], before=before)
    return subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def finish(child: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    out, err = child.communicate(timeout=MINUTES)
    assert child.returncode == code, err
    assert "Traceback" not in err
    return out, err


def peak(err: str) -> int:
    return int(re.search(r"^peak (\d+)$", err, re.MULTILINE).group(1))


def answer(model: Path, *more: object, prompt: str = WORDS) -> tuple[object, ...]:
    return ("run", model, "--raw", prompt, "-n", 6, "--temp", 0, "--ignore-eos", "-c", 512, "--device", "cpu", "--json", *more)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict:
    """The answer with everything in memory."""
    out, _ = finish(start(*answer(model)))
    found = json.loads(out)
    assert found["io"] == {"disk_bytes_read": found["memory"]["weights_bytes"], "disk_wait_s": 0.0}
    return found


@pytest.fixture(scope="module")
def least(model: Path) -> int:
    """MiB of the smallest budget, as the refusal of a smaller one names it."""
    out, err = finish(start(*answer(model, "--ram", "64M")), 4)
    assert json.loads(out)["code"] == 4 and "even with weights read from the disk for every token" in err
    return int(re.search(r"it takes --ram (\d+)Mi", err).group(1))


@pytest.mark.parametrize("more", (pytest.param(8, marks=pytest.mark.slow), 90, pytest.param(200, marks=pytest.mark.slow)))
def test_a_run_keeps_to_its_budget_and_answers_the_same(model: Path, expected: dict, least: int, more: int) -> None:
    budget = least + more
    out, err = finish(start(*answer(model, "--ram", f"{budget}Mi")))
    found = json.loads(out)
    assert found["token_ids"] == expected["token_ids"] and found["text"] == expected["text"]
    assert peak(err) <= budget * MIB, f"{peak(err) / MIB:.0f} MiB of {budget} used"
    assert "read" in err and "disk" in err, "it is said that weights come from the disk"
    assert found["io"]["disk_bytes_read"] > expected["io"]["disk_bytes_read"] and found["io"]["disk_wait_s"] > 0


def test_the_plan_is_that_of_the_run(model: Path, least: int) -> None:
    out, _ = finish(start("plan", model, "-c", 512, "--ram", f"{least + 90}Mi", "--device", "cpu", "--json"))
    planned = json.loads(out)
    assert planned["total_bytes"] <= (least + 90) * MIB and planned["weights_bytes"] > 200 * MIB


def test_a_mapped_model_that_does_not_fit_is_told_what_would(model: Path, least: int) -> None:
    """Nothing of a mapped file is read by itself, so the advice is to map none, where that helps."""
    advice = "without --load mmap what does not fit is read from the disk"
    _, err = finish(start("run", model, "hi", "--ram", f"{least + 5}Mi", "--load", "mmap", "--device", "cpu"), 4)
    assert advice in err
    _, err = finish(start("run", model, "hi", "--ram", "10M", "--load", "mmap", "--device", "cpu"), 4)
    assert "it takes --ram" in err and advice not in err


def test_a_long_prompt_is_read_within_the_budget(model: Path, least: int) -> None:
    out, err = finish(start(*answer(model, "--ram", f"{least + 60}Mi", prompt="word " * 450)))
    found = json.loads(out)
    assert found["usage"]["prompt_tokens"] > 448 and peak(err) <= (least + 60) * MIB


@pytest.mark.slow
def test_measuring_keeps_to_the_budget(model: Path, least: int) -> None:
    out, err = finish(start("bench", model, "-p", 16, "-n", 2, "-r", 1, "-c", 512, "--device", "cpu", "--ram", f"{least + 60}Mi", "--json"))
    rows = json.loads(out)
    assert all(row["disk_bytes_read"] > 0 for row in rows) and peak(err) <= (least + 60) * MIB


@pytest.mark.slow
def test_two_runs_share_a_model(model: Path, expected: dict, least: int) -> None:
    children = [start(*answer(model, "--ram", f"{least + 40}Mi")) for _ in range(2)]
    assert [json.loads(finish(child)[0])["token_ids"] for child in children] == [expected["token_ids"]] * 2


@pytest.mark.slow
def test_a_model_that_nobody_may_write(model: Path, expected: dict, least: int) -> None:
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    modes = {path: path.stat().st_mode for path in (*before, model)}
    try:
        for path in before:
            path.chmod(0o444)
        model.chmod(0o555)
        out, _ = finish(start(*answer(model, "--ram", f"{least + 40}Mi")))
    finally:
        for path, mode in reversed(modes.items()):
            path.chmod(mode)
    assert json.loads(out)["token_ids"] == expected["token_ids"]
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before


@pytest.mark.slow
def test_a_file_system_without_direct_reads(model: Path, expected: dict, least: int) -> None:
    out, err = finish(start(*answer(model, "--ram", f"{least + 40}Mi"), before=BUFFERED))
    assert json.loads(out)["token_ids"] == expected["token_ids"]
    assert err.count("weights are read through the page cache") == 1 and peak(err) <= (least + 40) * MIB


def writing(model: Path, least: int, folder: Path, before: str = "") -> subprocess.Popen:
    """A run that writes an answer; it has begun when this returns."""
    folder.mkdir()
    child = start("run", model, "--raw", WORDS, "-n", 400, "--temp", 0, "--ignore-eos", "-c", 1024, "--device", "cpu", "--ram",
                  f"{least + 40}Mi", before=before, env={**os.environ, "TMPDIR": str(folder)})
    assert child.stdout.read(1)
    return child


@pytest.mark.slow
def test_a_killed_run_leaves_nothing(model: Path, least: int, tmp_path: Path) -> None:
    before = sorted(path.name for path in model.iterdir())
    child = writing(model, least, tmp_path / "temporary")
    child.kill()
    child.communicate(timeout=MINUTES)
    assert child.returncode == -signal.SIGKILL
    assert sorted(path.name for path in model.iterdir()) == before and not list((tmp_path / "temporary").iterdir())


def test_ctrl_c_while_the_disk_hangs_keeps_what_was_written(model: Path, least: int, tmp_path: Path) -> None:
    child = writing(model, least, tmp_path / "temporary", HANGS.format(file=str(tmp_path / "hang")))
    (tmp_path / "hang").touch()
    while "hangs" not in child.stderr.readline():
        continue
    child.send_signal(signal.SIGINT)
    out, err = finish(child, 130)
    assert out.endswith("\n") and re.search(r"stopped by Ctrl-C after \d+ token", err)


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    """A model whose weights may be spoilt."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in model.iterdir():
        if path.name == "model.safetensors":
            subprocess.run(["cp", "--reflink=auto", str(path), str(folder)], check=True)
        else:
            (folder / path.name).symlink_to(path)
    return folder


DAMAGE = {"cut": lambda path: os.truncate(path, 100 * MIB), "rewritten": lambda path: os.utime(path, ns=(0, 0))}


@pytest.mark.parametrize("damage, said", list(zip(DAMAGE.values(), ("became shorter|changed while", "changed while"))), ids=DAMAGE)
def test_weights_that_change_under_a_run_end_it_with_one_line(copied: Path, least: int, tmp_path: Path, damage: Callable[[Path], None],
                                                              said: str) -> None:
    child = writing(copied, least, tmp_path / "temporary")
    damage(copied / "model.safetensors")
    out, err = finish(child, 1)
    errors = [line for line in err.splitlines() if line.startswith("effllm: ")]
    assert re.search(said, errors[-1]) and "hint: " in err


@pytest.mark.slow
def test_weights_that_are_deleted_are_read_to_the_end(copied: Path, least: int, tmp_path: Path) -> None:
    """The file that was opened is there until it is closed."""
    child = writing(copied, least, tmp_path / "temporary")
    (copied / "model.safetensors").unlink()
    for _ in range(8):
        assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    finish(child, 130)
