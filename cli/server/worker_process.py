"""A worker process as its router sees it: started, planned, loaded, ended, with its messages parsed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import EffllmError
from ...offload.size import format_size
from ...runtime.events import Progress
from .keep_alive import NEVER
from .keep_alive import format_duration as time_in_words
from .worker import FAILED, GO, LISTENING, PLANNED, PROGRESS, RAM

LONGEST_LINE = 1 << 20  # bytes
END_S = 10.0  # for a worker to end after SIGTERM: its answers have been cancelled before


class ModelLoadError(EffllmError):
    """A worker could not plan or load its model. `exit_code` is the one that the command would have ended with."""

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


@dataclass(frozen=True)
class WorkerLauncher:
    """How workers are started: with the arguments after `serve` and these environment variables. `progress` and `note` are called with the
    model's name and its progress, or a line of its stderr. A worker that is silent for `silence_s` seconds while it plans or loads is
    considered hung."""

    flags: Sequence[str]
    variables: Mapping[str, str]
    progress: Callable[[str, Progress], None]
    note: Callable[[str, str], None]
    silence_s: float = NEVER

    async def start(self, name: str, typed: str) -> WorkerProcess:
        """The process of the model that is `typed` on its command line, and called `name`. Raises ModelLoadError."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", f"{__package__}.worker", "serve", *self.flags, f"--name={name}", "--", typed,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=LONGEST_LINE,
                env=self.variables, start_new_session=True)  # else Ctrl-C would reach it before the router has told its clients
        except OSError as error:
            raise ModelLoadError(f"its process cannot be started: {error.strerror}", "the next request tries again") from error
        return WorkerProcess(name, process, self)


class WorkerProcess:
    """`status`: what it is doing, in words; `ended`: done when the process has ended."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, launcher: WorkerLauncher) -> None:
        self.name, self.status, self.port = name, "starting", 0
        self._process, self._launcher = process, launcher
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._last_output = 0.0  # when any output came last, progress and stderr included (monotonic)
        self.ended = asyncio.ensure_future(self._run())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self.ended.done() and self._process.returncode is None

    async def planned(self, ram: int) -> int:
        """Bytes of memory that the model needs within `ram`. Raises ModelLoadError."""
        self._send({RAM: ram})
        return (await self._next(PLANNED))["nbytes"]

    async def loaded(self) -> dict[str, Any]:
        """Load the model and wait until it listens; the message has `port`, `context`, `parallel`, `nbytes`. Raises ModelLoadError."""
        self._send({GO: True})
        message = await self._next(LISTENING)
        self.port = message["port"]
        return message

    async def end(self) -> None:
        """SIGTERM, and SIGKILL if that does not end it in time."""
        self.terminate()
        _, still_running = await asyncio.wait((self.ended,), timeout=END_S)
        if still_running:
            self._kill()
            await asyncio.wait(still_running)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def exit_description(self) -> str:
        code = self._process.returncode
        if code is None or code >= 0:
            return f"with code {code}"
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
        return f"by signal {-code}"

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _send(self, message: dict[str, object]) -> None:
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _next(self, kind: str) -> dict[str, Any]:
        message = await self._next_or_timeout()
        if message is None:
            await asyncio.wait((self.ended,))
            raise ModelLoadError(f"its process ended {self.exit_description()} before it was loaded", "the next request starts it again")
        if FAILED in message:
            raise ModelLoadError(**{"exit_code" if key == "code" else key: value for key, value in message[FAILED].items()})
        return message[kind]

    async def _next_or_timeout(self) -> dict[str, Any] | None:
        """Its next message; None if the process ends. Raises ModelLoadError, and kills it, after too long a silence."""
        self._last_output, silence_s = time.monotonic(), self._launcher.silence_s
        while (left_s := self._last_output + silence_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if left_s == NEVER else left_s):
                    return await self._messages.get()
        self._kill()  # a hung process does not handle SIGTERM
        raise ModelLoadError(f"no progress for {time_in_words(silence_s)} ({self.status})",
                             "the next request tries again; --load-timeout gives it longer")

    async def _run(self) -> None:
        """Follow the process until it ends. Whatever goes wrong here, it is killed, and whoever waits for a message is woken."""
        readers = [asyncio.ensure_future(each) for each in (self._read_messages(), self._read_stderr())]
        try:
            await asyncio.gather(*readers)
        except ValueError as error:  # no JSON, or too long a line
            self._launcher.note(self.name, f"killed: its output cannot be parsed: {error}")
            self._kill()
        try:
            await self._process.wait()
        finally:
            self._kill()
            for each in readers:
                each.cancel()
            self._process.stdin.close()
            self._messages.put_nowait(None)

    async def _read_messages(self) -> None:
        async for line in self._process.stdout:
            message, self._last_output = json.loads(line), time.monotonic()
            if PROGRESS in message:
                event = Progress(**message[PROGRESS])
                self.status = in_words(event)
                self._launcher.progress(self.name, event)
            else:
                self._messages.put_nowait(message)

    async def _read_stderr(self) -> None:
        async for line in self._process.stderr:
            self._last_output = time.monotonic()
            self._launcher.note(self.name, line.decode("utf-8", "replace").rstrip("\n"))


def in_words(event: Progress) -> str:
    """`loading: 1.20 GiB of 4.00 GiB`"""
    if event.unit == "bytes":
        return f"{event.phase}: {format_size(event.done)} of {format_size(event.total)}"
    return f"{event.phase}: {event.done} of {event.total} {event.unit}"
