"""The worker process of a router: `python -m effllm.cli.server.worker serve MODEL ...` is the same command as `effllm serve MODEL`, which
in addition reports on stdout, one JSON object per line, and is told on stdin how much memory it may plan with and when to load.

Its stdin stays open as long as the router lives. When the router ends, however it does, the system closes the pipe, and the worker ends
too."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..app import program
from ..environment import Environment
from ..errors import describe_error, run_guarded
from ..screen import Screen

if TYPE_CHECKING:
    from ...runtime.encoders.encoder import EncoderOptions
    from ...runtime.engine import EngineOptions
    from ...runtime.events import Progress

Options = TypeVar("Options", "EngineOptions", "EncoderOptions")
PROGRESS_S = 0.2
RAM, GO = "ram", "go"  # messages of the router
PLANNED, PROGRESS, LISTENING, FAILED = "planned", "progress", "listening", "failed"  # messages of the worker


class RouterLink:
    """The worker's end of the pipes to its router."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(environment.stdin.fileno(),), daemon=True).start()

    def send(self, kind: str, **fields: object) -> None:
        self._environment.write(json.dumps({kind: fields}) + "\n")

    def screen(self) -> Screen:
        """A screen whose notes go to stderr, which the router reads, and whose progress goes to the router."""
        return WorkerScreen(self._environment, lambda event: self.send(PROGRESS, phase=event.phase, done=event.done, total=event.total,
                                                                       unit=event.unit))

    def negotiate(self, folder: Path, options: EngineOptions) -> EngineOptions:
        """The options to load with, once the router has made room for what they need. Raises what planning raises."""
        from ...runtime.prepare import prepare, refuse_beyond_machine

        def required_bytes(options: EngineOptions) -> int:
            prepared = prepare(folder, options)
            refuse_beyond_machine(prepared)
            for each in filter(None, (prepared, prepared.speculation.draft)):
                each.store.close()
            return prepared.placement.total_bytes

        return self.negotiate_memory(options, required_bytes)

    def negotiate_memory(self, options: Options, required_bytes: Callable[[Options], int]) -> Options:
        """`negotiate` for any kind of model: `required_bytes` returns the bytes that it takes. Raises what that raises."""
        while RAM in (message := self._messages.get()):
            options = replace(options, ram=f"{max(1, message[RAM] >> 20)}Mi")
            self.send(PLANNED, nbytes=required_bytes(options))
        return options

    def report_listening(self, port: int, context: int, nbytes: int, parallel: int) -> None:
        self.send(LISTENING, port=port, context=context, parallel=parallel, nbytes=nbytes)

    def _listen(self, descriptor: int) -> None:
        rest = b""
        while data := os.read(descriptor, 1 << 16):  # not the stream, whose lock is held while the interpreter shuts down
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._messages.put(json.loads(line))
        os.kill(os.getpid(), signal.SIGTERM)


class WorkerScreen(Screen):
    def __init__(self, environment: Environment, send: Callable[[Progress], None]) -> None:
        super().__init__(environment)
        self._tell_progress, self._last_progress_s = send, 0.0

    def progress(self, event: Progress) -> None:
        if (now := time.monotonic()) - self._last_progress_s >= PROGRESS_S:
            self._last_progress_s = now
            self._tell_progress(event)


def main() -> int:
    environment = Environment.of_process()
    router_link = environment.router_link = RouterLink(environment)

    def run() -> int:
        try:
            return program(sys.argv[1:], environment)
        except Exception as error:
            message, hint, code = describe_error(error)
            router_link.send(FAILED, message=message, hint=hint, code=code)
            if environment.debug:
                raise
            return code

    return run_guarded(run, environment)


if __name__ == "__main__":
    sys.exit(main())
