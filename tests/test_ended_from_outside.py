"""SIGTERM and a terminal that is closed while an answer is written: what was said is kept, and the program dies of the signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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


def started(state: Path, *argv: str, **more: object) -> subprocess.Popen:
    return subprocess.Popen([*EFFLLM, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
                            env={**os.environ, "XDG_STATE_HOME": str(state)}, **more)


@pytest.mark.parametrize("number", interrupt.FROM_OUTSIDE)
def test_a_run_that_is_ended_keeps_its_session(number: signal.Signals, tmp_path: Path) -> None:
    process = started(tmp_path, "run", "fable", STORY, "--session", "tale", *ENDLESS)
    first = process.stdout.read(20)
    process.send_signal(number)
    rest, err = process.stdout.read(), process.stderr.read()
    assert process.wait(MINUTE) == -number and f"stopped by {number.name} after " in err and "Traceback" not in err
    asked, told = messages(tmp_path)
    assert asked["content"] == STORY and told["content"] == (first + rest).removesuffix("\n")


def test_an_end_that_is_ignored_ends_nothing(tmp_path: Path) -> None:
    process = started(tmp_path, "run", "fable", STORY, "--temp", "0", "-n", "200",
                      preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    first = process.stdout.read(20)
    process.send_signal(signal.SIGHUP)
    rest, err = process.stdout.read(), process.stderr.read()
    assert process.wait(MINUTE) == 0 and "stopped by SIG" not in err and len(first + rest) > 100


def test_a_chat_whose_terminal_is_closed_keeps_the_answer_that_was_being_written(tmp_path: Path) -> None:
    terminal = pexpect.spawn(EFFLLM[0], [*EFFLLM[1:], "chat", "fable", "--session", "tale", "--temp", "100", "--seed", "5", "-n", "100000",
                                         "--overflow", "shift"], env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"},
                             encoding="utf-8", timeout=MINUTE, dimensions=(30, 100))
    terminal.expect_exact("\x1b[?2004h")
    terminal.send(f"{STORY}\r")
    terminal.expect_exact("\x1b[?2004l")  # the line is sent
    terminal.expect(r"\w+ \w+ \w+")
    os.close(terminal.child_fd)  # what a terminal's window does
    _, status = os.waitpid(terminal.pid, 0)
    assert os.WTERMSIG(status) == signal.SIGHUP
    asked, told = messages(tmp_path)
    assert asked["content"] == STORY and told["content"]
