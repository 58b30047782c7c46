"""Ctrl-C pressed twice: the program ends, and the conversation so far is intact. In a session, and in a real terminal with a slow model."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

import effllm
from effllm.cli.interrupt import SecondInterrupt, interruptible
from effllm.runtime.engine import open_engine
from effllm.runtime.events import TextDelta
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
STORY, MORE = "Tell me a story about the fox and the king.", "And then?"
CTRL_C, WAITS, HAS_LINE = "\x03", "\x1b[?2004h", "\x1b[?2004l"
MINUTE = 60
# A program whose passes stand still while a file is there, as those of a model that is far too large do; the file says behind how many.
SLOW = """
import sys, time
from pathlib import Path
from effllm.cli.app import main
from effllm.runtime.model import Model
from effllm.runtime.session import Session
usual, cancel, gate, passed = Model.forward, Session.cancel, Path(sys.argv[1]), 0
def cancelled(self):
    cancel(self)
    gate.with_suffix(".pressed").touch()
Session.cancel = cancelled
def forward(self, *given, **more):
    global passed
    if gate.exists():
        passed += 1
        if passed <= int(gate.read_text() or 0):
            return usual(self, *given, **more)
        gate.with_suffix(".reached").touch()
    until = time.monotonic() + 60
    while gate.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return usual(self, *given, **more)
Model.forward = forward
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", ctx=512)))[-1]
    yield engine
    engine.close()


@pytest.fixture
def session(engine) -> Session:
    engine.reset()
    return Session(engine, Tokenizer.load(FABLE, engine.config), SamplerSettings(temperature=0.0, repetition_penalty=1.2), max_tokens=12)


class Stopped:
    """A `Model.forward` that Ctrl-C ends at the given pass."""

    def __init__(self, usual, at: int) -> None:
        self.usual, self.left = usual, at

    def __call__(self, *given, **more):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.usual(*given, **more)


# A program whose prompts Ctrl-C ends where a job is open: workers have been woken, and this thread's share is still to do.
OPEN_JOBS = """
import sys, time
from pathlib import Path
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions
engine = list(open_engine(Path(sys.argv[1]), EngineOptions(device="cpu", ctx=700, threads=2, spec="off")))[-1]
pool, interrupted = engine.backends["cpu"].pool, 0
usual, armed = pool._wake, False
def wake(sleeping):
    global armed
    usual(sleeping)
    if sleeping and armed:
        armed = False
        raise KeyboardInterrupt
pool._wake = wake
for turn in range(12):
    time.sleep(0.02)  # workers go to sleep, as between a person's messages
    armed = True
    try:
        for _ in engine.prefill([5 + (turn + i) % 4000 for i in range(600)]):
            pass
    except KeyboardInterrupt:
        interrupted += 1
        engine.reset()
armed = False
engine.close()
print(interrupted)
"""


def test_an_interrupt_in_an_open_job_frees_nothing_that_threads_still_read() -> None:
    """They would find other numbers there, and some never come to an end of."""
    done = subprocess.run([sys.executable, "-P", "-c", OPEN_JOBS, str(FABLE)], capture_output=True, text=True, timeout=MINUTE)
    assert done.returncode == 0 and int(done.stdout) > 6, done.stderr[-1000:]


@pytest.mark.parametrize("turn", ["ask", "regenerate", "continue_", "compact"])
def test_an_interrupt_in_the_prompt_leaves_the_conversation_as_it_was(session, monkeypatch, turn) -> None:
    list(session.ask(STORY))
    before = list(session.messages)
    with monkeypatch.context() as patch:
        patch.setattr(session.engine.model, "forward", Stopped(session.engine.model.forward, 1))
        with pytest.raises(KeyboardInterrupt):
            list(session.ask(MORE) if turn == "ask" else getattr(session, turn)())
    assert session.messages == before
    assert session.engine.tokens == [] and session.engine.cache.n == 0, "nobody knows what a pass that was left has written"
    kept = [event.text for event in session.ask(MORE) if isinstance(event, TextDelta)]
    session.undo()
    session.engine.reset()
    assert kept == [event.text for event in session.ask(MORE) if isinstance(event, TextDelta)]


def test_an_interrupt_in_the_answer_keeps_what_was_written(session, monkeypatch) -> None:
    whole = "".join(event.text for event in session.ask(STORY) if isinstance(event, TextDelta))
    session.undo()
    session.engine.reset()
    with monkeypatch.context() as patch:
        patch.setattr(session.engine.model, "forward", Stopped(session.engine.model.forward, 6))
        with pytest.raises(KeyboardInterrupt):
            list(session.ask(STORY))
    said = session.messages[-1]
    assert said["role"] == "assistant" and said["content"] and whole.startswith(said["content"]) and said["content"] != whole
    assert session.engine.tokens == []


def test_stopped_in_the_prompt_a_second_answer_does_not_cost_the_first(session, monkeypatch) -> None:
    list(session.ask(STORY))
    before, usual = list(session.messages), session.engine.prefill

    def cancelled(ids):
        session.cancel()
        return usual(ids)

    monkeypatch.setattr(session.engine, "prefill", cancelled)
    assert list(session.regenerate())[-1].stats.finish_reason == "cancelled"
    assert session.messages == before


def test_the_second_press_ends_and_the_handler_of_before_comes_back() -> None:
    asked, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(SecondInterrupt), interruptible(lambda: asked.append(1)):
        os.kill(os.getpid(), signal.SIGINT)
        assert asked == [1]
        os.kill(os.getpid(), signal.SIGINT)
    assert asked == [1] and signal.getsignal(signal.SIGINT) is before


def test_two_presses_during_one_long_call_are_two() -> None:
    """Python tells the handler once, when the call has ended."""
    asked = []
    presses = f"for each in 1 2; do sleep 0.15; kill -INT {os.getpid()}; done"
    with pytest.raises(SecondInterrupt), interruptible(lambda: asked.append(1)), subprocess.Popen(["sh", "-c", presses]) as pressing:
        until = time.monotonic() + MINUTE
        while time.monotonic() < until and not asked:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # a second, about
    assert asked == [1] and pressing.wait() == 0
    assert signal.set_wakeup_fd(-1) == -1, "nothing is left behind"


# ---- in a terminal


class Chat:
    def __init__(self, home: Path, *argv: str) -> None:
        self.gate = home / "gate"
        self.terminal = pexpect.spawn(sys.executable, ["-P", "-c", SLOW, str(self.gate), *argv], encoding="utf-8", timeout=MINUTE,
                                      dimensions=(40, 160), env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1",
                                                                 "XDG_STATE_HOME": str(home)})
        self.terminal.expect_exact(WAITS)

    def type(self, line: str) -> None:
        self.terminal.send(line + "\r")
        self.terminal.expect_exact(HAS_LINE)

    def say(self, line: str) -> None:
        self.type(line)
        self.terminal.expect_exact(WAITS)

    def ends_at_the_second_press(self) -> str:
        """What is shown from now on, while the model stands still."""
        self.gate.touch()
        self.press()
        time.sleep(0.2)
        assert self.terminal.isalive(), "the first press alone ended it"
        self.terminal.send(CTRL_C)
        self.terminal.expect(pexpect.EOF)
        self.terminal.wait()  # else `close` ends a program that is slow to go, by a signal
        self.terminal.close()
        assert self.terminal.exitstatus == 130
        assert "Traceback" not in self.terminal.before
        return self.terminal.before

    def press(self) -> None:
        """Ctrl-C while a pass waits at the gate, until it has been handled: two at once would be one signal."""
        self._comes(".reached")
        self.terminal.send(CTRL_C)
        self._comes(".pressed")

    def _comes(self, mark: str) -> None:
        deadline = time.monotonic() + MINUTE
        while not self.gate.with_suffix(mark).exists():
            assert time.monotonic() < deadline, f"it never came to {mark}"
            time.sleep(0.01)


def messages(home: Path) -> list[dict[str, str]]:
    return json.loads((home / "effllm" / "sessions" / "tale.json").read_text())["conversation"]["messages"]


@pytest.mark.parametrize("line", [pytest.param("/regen", marks=pytest.mark.slow), MORE])
def test_two_presses_in_a_prompt_end_a_chat_and_keep_its_history(tmp_path: Path, line: str) -> None:
    chat = Chat(tmp_path, "chat", "fable", "--session", "tale", "--temp", "0", "-n", "24", "-c", "512")
    chat.say(STORY)
    before = messages(tmp_path)
    assert [each["role"] for each in before] == ["user", "assistant"]
    chat.gate.touch()
    chat.type(line)
    chat.ends_at_the_second_press()
    assert messages(tmp_path) == before


def test_one_press_in_a_prompt_keeps_the_file_that_was_to_go_with_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("The fox is red.")
    chat = Chat(tmp_path, "chat", "fable", "--temp", "0", "-n", "8")
    chat.say(f"/file {tmp_path}/notes.txt")
    chat.gate.touch()
    chat.type(STORY)
    chat.press()
    chat.gate.unlink()
    chat.terminal.expect_exact("stopped by Ctrl-C after 0 tokens")
    chat.terminal.expect_exact(WAITS)
    chat.type("/file")
    chat.terminal.expect(r"notes.txt: \d+ tokens attached to the next message")


def test_two_presses_in_an_answer_end_a_chat_with_what_was_written(tmp_path: Path) -> None:
    chat = Chat(tmp_path, "chat", "fable", "--session", "tale", "--temp", "0", "--spec", "off", "-n", "100")
    chat.gate.write_text("20")  # before it answers: a small model may have ended when whoever waits for its words is woken
    chat.type(STORY)
    chat.terminal.expect(r"\w+ \w+")
    rest = chat.ends_at_the_second_press()
    said = messages(tmp_path)
    assert [each["role"] for each in said] == ["user", "assistant"] and len(said[1]["content"]) > 3
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", rest).endswith("\n"), "the shell's prompt begins at the left edge"
