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
    """`at`: what it is doing, in words; `ended`: done when the process has ended."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, starter: WorkerLauncher) -> None:
        self.name, self.at, self.port = name, "starting", 0
        self._process, self._starter = process, starter
        self._said: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._heard = 0.0  # when any output came last, progress and stderr included (monotonic)
        self.ended = asyncio.ensure_future(self._live())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self.ended.done() and self._process.returncode is None

    async def planned(self, ram: int) -> int:
        """Bytes of memory that the model needs within `ram`. Raises ModelLoadError."""
        self._tell({RAM: ram})
        return (await self._next(PLANNED))["nbytes"]

    async def loaded(self) -> dict[str, Any]:
        """Load the model and wait until it listens; the message has `port`, `context`, `parallel`, `nbytes`. Raises ModelLoadError."""
        self._tell({GO: True})
        said = await self._next(LISTENING)
        self.port = said["port"]
        return said

    async def end(self) -> None:
        """SIGTERM, and SIGKILL if that does not end it in time."""
        self.terminate()
        _, late = await asyncio.wait((self.ended,), timeout=END_S)
        if late:
            self._kill()
            await asyncio.wait(late)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def how_it_ended(self) -> str:
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

    def _tell(self, what: dict[str, object]) -> None:
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def _next(self, kind: str) -> dict[str, Any]:
        said = await self._unless_it_hangs()
        if said is None:
            await asyncio.wait((self.ended,))
            raise ModelLoadError(f"its process ended {self.how_it_ended()} before it was loaded", "the next request starts it again")
        if FAILED in said:
            raise ModelLoadError(**{"exit_code" if key == "code" else key: value for key, value in said[FAILED].items()})
        return said[kind]

    async def _unless_it_hangs(self) -> dict[str, Any] | None:
        """Its next message; None if the process ends. Raises ModelLoadError, and kills it, after too long a silence."""
        self._heard, silence_s = time.monotonic(), self._starter.silence_s
        while (left_s := self._heard + silence_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if left_s == NEVER else left_s):
                    return await self._said.get()
        self._kill()  # a hung process does not handle SIGTERM
        raise ModelLoadError(f"no progress for {time_in_words(silence_s)} ({self.at})",
                             "the next request tries again; --load-timeout gives it longer")

    async def _live(self) -> None:
        """Follow the process until it ends. Whatever goes wrong here, it is killed, and whoever waits for a message is woken."""
        reading = [asyncio.ensure_future(each) for each in (self._read_said(), self._read_remarks())]
        try:
            await asyncio.gather(*reading)
        except ValueError as error:  # no JSON, or too long a line
            self._starter.note(self.name, f"killed: its output cannot be parsed: {error}")
            self._kill()
        try:
            await self._process.wait()
        finally:
            self._kill()
            for each in reading:
                each.cancel()
            self._process.stdin.close()
            self._said.put_nowait(None)

    async def _read_said(self) -> None:
        async for line in self._process.stdout:
            said, self._heard = json.loads(line), time.monotonic()
            if PROGRESS in said:
                event = Progress(**said[PROGRESS])
                self.at = in_words(event)
                self._starter.progress(self.name, event)
            else:
                self._said.put_nowait(said)

    async def _read_remarks(self) -> None:
        async for line in self._process.stderr:
            self._heard = time.monotonic()
            self._starter.note(self.name, line.decode("utf-8", "replace").rstrip("\n"))


def in_words(event: Progress) -> str:
    """`loading: 1.20 GiB of 4.00 GiB`"""
    if event.unit == "bytes":
        return f"{event.phase}: {format_size(event.done)} of {format_size(event.total)}"
    return f"{event.phase}: {event.done} of {event.total} {event.unit}"
