"""OpenAI's background responses: the client gets the response's id at once, and polls the response, streams its events from any number on,
or cancels it. The answer waits in the queue like any other."""

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
from .responses_serializer import IN_PROGRESS, QUEUED, ResponseSerializer
from .streams import EVENTS, HEADERS, KEEP_ALIVE_S, EventReader, encode_chunks, unless_disconnected

BACKGROUND_HEADER = "x-effllm-held"  # header: id of a background response, which tells the router to keep the model loaded
NEEDS_STORE = "a background response is retrieved later, so it has to be stored"
NOT_STREAMED = "this response was not created with stream and background: retrieve it without stream"


class BackgroundResponse:
    """A response that has not ended.

    logs: the budget of its event log, None if the client did not request a stream.
    store: called with the final response and its events.
    events: its events so far, None without `logs`.
    """

    def __init__(self, serializer: ResponseSerializer, reader: EventReader, logs: EventLogs | None,
                 store: Callable[[dict[str, Any], EventLog | None], None],
                 note: Callable[[str], None]) -> None:
        self._serializer, self._reader, self._logs, self._keep, self._note = serializer, reader, logs, store, note
        self.events = None if logs is None else logs.begin()
        self._state, self._ended, self._changed = QUEUED, None, asyncio.Event()
        self._publish(serializer.first_chunks())
        self.task = asyncio.ensure_future(self._run())

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._ended or self._serializer.response(self._state)

    def cancel(self) -> None:
        """Stop the answer after its current token, and store it as it is."""
        if not self.has_ended:
            self.task.cancel()
            self._end(self._serializer.cancelled_response())

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait for further events or the end; False on a timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
                return True
        return False

    async def _run(self) -> None:
        reader, serializer = self._reader, self._serializer
        try:
            while not isinstance(event := await reader.next(), Done):
                if self._state == QUEUED:
                    self._state = IN_PROGRESS
                    self._publish(serializer.in_progress_chunks())
                if isinstance(event, PromptRead | TextDelta | Call | AnswerEnded):
                    self._publish(serializer.add(event))
            chunks, outcome = serializer.last_chunks(event.stats), cost(event.stats)
        except Exception as error:  # any error: it becomes the result, as no client is connected
            problem = problem_of(error)
            chunks, outcome = serializer.error_chunks(problem), problem.message
        self._publish(chunks)
        self._note(f"{serializer.id} has ended: {outcome}")
        self._end(chunks[-1]["response"])

    def _end(self, response: dict[str, Any]) -> None:
        self._reader.job.abandon()
        self._ended = response
        if self._logs is not None:
            self._logs.end(self.events)
        try:
            self._keep(response, self.events)
        finally:
            self._changed.set()

    def _publish(self, chunks: Sequence[dict[str, Any]]) -> None:
        if self._logs is not None:
            self._logs.add(self.events, [encode_chunks(self._serializer, [chunk]) for chunk in chunks])
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundResponses:
    """The background responses that have not ended, by id."""

    def __init__(self) -> None:
        self._running: dict[str, BackgroundResponse] = {}
        self._logs = EventLogs()

    def begin(self, serializer: ResponseSerializer, reader: EventReader, store: Callable[[dict[str, Any], EventLog | None], None],
              note: Callable[[str], None]) -> BackgroundResponse:
        def on_end(response: dict[str, Any], events: EventLog | None) -> None:
            del self._running[serializer.id]
            store(response, events)

        running = self._running[serializer.id] = BackgroundResponse(serializer, reader,
                                                                    self._logs if serializer.payload.stream is True else None, on_end, note)
        return running

    def find(self, name: str) -> BackgroundResponse | None:
        return self._running.get(name)

    def check_finished(self, name: str | None) -> None:
        """Raises Problem for a response that has not ended, which cannot be continued yet."""
        if name in self._running:
            raise Problem(400, f"previous_response_id: {name:.60} is still in progress: retry when it has finished",
                          param="previous_response_id", code="response_in_progress")


class EventReplay(Response):
    """Streams the events of a response from number `at` on, and further ones while it is `running`. Raises Problem if some of them were
    dropped."""

    def __init__(self, events: EventLog, name: str, running: BackgroundResponse | None = None, at: int = 0) -> None:
        events.since(at, name)
        self._events, self._name, self._running, self._at = events, name, running, at
        self._headers = {"content-type": EVENTS, **HEADERS, **({} if running is None else {BACKGROUND_HEADER: name})}

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
                events = self._events.since(self._at, self._name)
            except Problem as problem:  # the client reads more slowly than events come
                yield event_gone(problem, self._at)
                return
            self._at = max(self._at, len(self._events))
            if events:
                yield events
            elif has_ended:
                return
            elif not await running.changed(KEEP_ALIVE_S):
                yield b": in the background\n\n"


def cost(stats: Stats) -> str:
    return f"{stats.prompt_tokens} tokens in, {len(stats.token_ids)} tokens out"
