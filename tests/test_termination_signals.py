"""SIGTERM and a closed terminal during generation: what was generated is saved, and the program dies of the signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest

from effllm.cli import interrupt

EFFLLM = (sys.executable, "-P", "-m", "effllm")
STORY = "Tell me a story about the fox and the king."
ENDLESS = ("--ignore-eos", "--overflow", "shift", "--temp", "1", "--seed", "1")
MINUTE = 60


def messages(state: Path) -> list[dict[str, str]]:
    return json.loads((state / "effllm" / "sessions" / "tale.json").read_text())["conversation"]["messages"]


@contextmanager
def answering(state: Path, *argv: str, command: tuple[str, ...] = EFFLLM, **more: object) -> Iterator[tuple[subprocess.Popen, bytes]]:
    """A program that has begun an answer, and what it wrote. Nothing of it is left."""
    process = subprocess.Popen([*command, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, bufsize=0,
                               env={**os.environ, "XDG_STATE_HOME": str(state)}, start_new_session=True, **more)
    try:
        yield process, process.stdout.read(20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("times", (1, pytest.param(2, marks=pytest.mark.slow)), ids=("once", "twice at once"))
@pytest.mark.parametrize("number", interrupt.TERMINATION_SIGNALS)
def test_a_run_that_is_ended_keeps_its_session(number: signal.Signals, times: int, tmp_path: Path) -> None:
    with answering(tmp_path, "run", "fable", STORY, "--session", "tale", *ENDLESS) as (process, first):
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.05)
        rest, err = process.communicate(timeout=MINUTE)
    assert process.returncode == -number and f"stopped by {number.name} after ".encode() in err and b"Traceback" not in err
    asked, told = messages(tmp_path)
    closed = "" if told["content"].endswith("\n") else "\n"  # of the last line, where the answer was left in its middle
    assert asked["content"] == STORY and told["content"] + closed == (first + rest).decode()


def test_what_reads_the_answer_may_be_gone_by_then(tmp_path: Path) -> None:
    with answering(tmp_path, "run", "fable", STORY, "--session", "tale", *ENDLESS) as (process, _):
        process.send_signal(signal.SIGTERM)
        process.stdout.close()
        assert process.wait(MINUTE) == -signal.SIGTERM
    asked, told = messages(tmp_path)
    assert asked["content"] == STORY and told["content"]


def test_an_end_that_is_ignored_ends_nothing(tmp_path: Path) -> None:
    with answering(tmp_path, "run", "fable", STORY, *ENDLESS,
                   preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as (process, _):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        seen = sum(len(process.stdout.read(100)) for _ in range(50))
        assert seen > 0 and process.poll() is None


def test_a_later_signal_ends_at_once_also_what_is_saved() -> None:
    code = f"""
import os, signal, time
from effllm.cli.interrupt import ONE_SIGNAL_S, interruptible
asked = []
with interruptible(lambda: asked.append(1)):
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked
time.sleep(ONE_SIGNAL_S + 0.1)
print("saving", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep({MINUTE})
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=MINUTE)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "saving\n", "")


def test_a_chat_whose_terminal_is_closed_keeps_the_answer_that_was_being_written(tmp_path: Path) -> None:
    terminal = pexpect.spawn(EFFLLM[0], [*EFFLLM[1:], "chat", "fable", "--session", "tale", "--temp", "100", "--seed", "5", "-n", "100000",
                                         "--overflow", "shift"], env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"},
                             encoding="utf-8", timeout=MINUTE, dimensions=(30, 100))
    try:
        terminal.expect_exact("\x1b[?2004h")
        terminal.send(f"{STORY}\r")
        terminal.expect_exact("\x1b[?2004l")  # the line is sent
        terminal.expect(r"\w+ \w+ \w+")
        terminal.ptyproc.fileobj.close()  # what a terminal's window does
        deadline = time.monotonic() + MINUTE
        while not (ended := os.waitpid(terminal.pid, os.WNOHANG))[0]:
            assert time.monotonic() < deadline, "it did not end"
            time.sleep(0.02)
    except BaseException:
        os.kill(terminal.pid, signal.SIGKILL)
        raise
    assert os.WTERMSIG(ended[1]) == signal.SIGHUP
    asked, told = messages(tmp_path)
    assert asked["content"] == STORY and told["content"]


def test_what_cannot_be_shown_is_kept_before_the_next_line_is_asked_for(tmp_path: Path) -> None:
    """As where a terminal is closed, which fails to show more before its signal comes; a disk that is full stands for it."""
    command = f"exec '{sys.executable}' -P -m effllm chat fable --session tale -n 8 --temp 0 > /dev/full"
    terminal = pexpect.spawn("/bin/sh", ["-c", command], env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"},
                             encoding="utf-8", timeout=MINUTE)
    terminal.expect_exact("> ")
    terminal.send(f"{STORY}\r")
    terminal.expect_exact("the output cannot be written: No space left on device")
    terminal.expect_exact("> ")
    terminal.kill(signal.SIGKILL)
    terminal.expect(pexpect.EOF)
    terminal.close()
    asked, told = messages(tmp_path)
    assert asked["content"] == STORY and told["content"]
