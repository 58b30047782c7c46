"""Responses of OpenAI's API that go on in the background: a program is told at once that one waits for its turn, asks for it later, follows
its events from any of them on, or cancels it. It takes a place in the line as every answer does, and only its client is not waited with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...runtime.events import Call, Done, PromptRead, Stats, TextDelta
from .event_log import EventLog, EventLogs, event_gone
from .multiple_answers import AnswerEnded
from .problems import Problem, problem_of
from .responses_serializer import GOES_ON, QUEUED, ResponseSerializer
from .streams import EVENTS, HEADERS, KEEP_ALIVE_S, EventReader, encode_chunks, unless_disconnected

HELD = "x-effllm-held"  # header: what goes on behind an answer, by which the server in front knows that its model has to stay
NEEDS_STORE = "a response in the background is asked for later, so it has to be kept"
NOT_STREAMED = "this response was not asked for with stream and background: ask without stream"


class BackgroundResponse:
    """One that has not ended. `events` are those so far, of what `pot` has room for, where its program wants to follow them. `keep` is told
    the response as it ended, with its events."""

    def __init__(self, serializer: ResponseSerializer, reader: EventReader, pot: EventLogs | None,
                 keep: Callable[[dict[str, Any], EventLog | None], None],
                 note: Callable[[str], None]) -> None:
        self._serializer, self._reader, self._pot, self._keep, self._note = serializer, reader, pot, keep, note
        self.events = None if pot is None else pot.begin()
        self._state, self._ended, self._changed = QUEUED, None, asyncio.Event()
        self._tell(serializer.first())
        self.task = asyncio.ensure_future(self._written())

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._ended or self._serializer.response(self._state)

    def cancel(self) -> None:
        """The answer ends behind its current token, and is what there is of it."""
        if not self.has_ended:
            self.task.cancel()
            self._end(self._serializer.cancelled())

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait until there is more, or its end; False if there was nothing in so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
                return True
        return False

    async def _written(self) -> None:
        reader, serializer = self._reader, self._serializer
        try:
            while not isinstance(event := await reader.next(), Done):
                if self._state == QUEUED:
                    self._state = GOES_ON
                    self._tell(serializer.begun())
                if isinstance(event, PromptRead | TextDelta | Call | AnswerEnded):
                    self._tell(serializer.add(event))
            last, said = serializer.last(event.stats), cost(event.stats)
        except Exception as error:  # whatever it is: nobody waits who could be told otherwise
            problem = problem_of(error)
            last, said = serializer.failed(problem), problem.message
        self._tell(last)
        self._note(f"{serializer.id} has ended: {said}")
        self._end(last[-1]["response"])

    def _end(self, response: dict[str, Any]) -> None:
        self._reader.job.abandon()
        self._ended = response
        if self._pot is not None:
            self._pot.end(self.events)
        try:
            self._keep(response, self.events)
        finally:
            self._changed.set()

    def _tell(self, chunks: Sequence[dict[str, Any]]) -> None:
        if self._pot is not None:
            self._pot.add(self.events, [encode_chunks(self._serializer, [chunk]) for chunk in chunks])
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundResponses:
    """The responses that have not ended, by their names."""

    def __init__(self) -> None:
        self._running: dict[str, BackgroundResponse] = {}
        self._pot = EventLogs()

    def begin(self, serializer: ResponseSerializer, reader: EventReader, keep: Callable[[dict[str, Any], EventLog | None], None],
              note: Callable[[str], None]) -> BackgroundResponse:
        def ended(response: dict[str, Any], events: EventLog | None) -> None:
            del self._running[serializer.id]
            keep(response, events)

        running = self._running[serializer.id] = BackgroundResponse(serializer, reader,
                                                                    self._pot if serializer.payload.stream is True else None, ended, note)
        return running

    def find(self, name: str) -> BackgroundResponse | None:
        return self._running.get(name)

    def demand_ended(self, name: str | None) -> None:
        """Raises Problem for one that nothing can be behind yet."""
        if name in self._running:
            raise Problem(400, f"previous_response_id: {name:.60} goes on in the background: ask again when it has ended",
                          param="previous_response_id", code="response_in_progress")


class EventReplay(Response):
    """The events of a response from a number on, and those to come while it is `running`. Raises Problem where some of them have gone."""

    def __init__(self, events: EventLog, name: str, running: BackgroundResponse | None = None, at: int = 0) -> None:
        events.behind(at, name)
        self._events, self._name, self._running, self._at = events, name, running, at
        self._headers = {"content-type": EVENTS, **HEADERS, **({} if running is None else {HELD: name})}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._sent(send), lambda: None)

    async def _sent(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for body in self._bodies():
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _bodies(self) -> AsyncIterator[bytes]:
        running = self._running
        while True:
            has_ended = running is None or running.has_ended
            try:
                more = self._events.behind(self._at, self._name)
            except Problem as problem:  # its client reads more slowly than they come
                yield event_gone(problem, self._at)
                return
            self._at = max(self._at, len(self._events))
            if more:
                yield more
            elif has_ended:
                return
            elif not await running.changed(KEEP_ALIVE_S):
                yield b": in the background\n\n"


def cost(stats: Stats) -> str:
    return f"{stats.prompt_tokens} tokens in, {len(stats.token_ids)} tokens out"
