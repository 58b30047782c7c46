"""OpenAI's background responses: the client gets the response's id at once, and polls it, streams its events from any number on, or cancels
it. The answer waits in the queue as any other; only its client does not wait with it."""

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

HELD = "x-effllm-held"  # header: id of a background response, which tells the router to keep the model loaded
NEEDS_STORE = "a background response is retrieved later, so it has to be stored"
NOT_STREAMED = "this response was not created with stream and background: retrieve it without stream"


class BackgroundResponse:
    """A response that has not ended. `events`: its events so far, within the budget of `pot`, if the client asked for a stream. `keep` is
    called with the final response and its events."""

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
        """Stop the answer after its current token, and keep what there is of it."""
        if not self.has_ended:
            self.task.cancel()
            self._end(self._serializer.cancelled())

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait until there is more, or the end; False on a timeout."""
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
        except Exception as error:  # any error: no client waits who could be told otherwise
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
    """Those that have not ended, by id."""

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
        """Raises Problem for a response that has not ended: nothing can follow it yet."""
        if name in self._running:
            raise Problem(400, f"previous_response_id: {name:.60} is still in progress: retry when it has finished",
                          param="previous_response_id", code="response_in_progress")


class EventReplay(Response):
    """The events of a response from a number on, and further ones while it is `running`. Raises Problem if some of them were dropped."""

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
            except Problem as problem:  # the client reads more slowly than events come
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
