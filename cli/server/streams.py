"""Sends answers to a client: whole, as server-sent events, or as JSON lines. A client that disconnects is noticed, and its answer is
cancelled.

The HTTP status is sent with the first bytes of a stream, which therefore wait for the engine's first event, so that an invalid request gets
an HTTP error. If that takes long, a keep-alive comment is sent first (an empty chunk in APIs without comments), which keeps proxies from
timing out; later errors are events of the stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...runtime.events import Call, Done, Event, Notice, Progress, PromptRead, Stats, TextDelta
from .answer_queue import Job
from .multiple_answers import AnswerEnded, total_stats
from .problems import Problem, problem_of
from .serializers import AnswerSerializer

KEEP_ALIVE_S = 5.0  # longest time without a byte on a stream
COMMENT_INTERVAL_S = 1.0
EVENTS, LINES, LIST = "text/event-stream; charset=utf-8", "application/x-ndjson", "application/json"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
CLIENT_LEFT = "the client left"
Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected


@dataclass
class RequestRecord:
    """What the request log shows of one request."""

    stats: Stats | None = None
    summary: str = ""  # the result of a request that is not for an answer
    end_reason: str = ""  # why it was refused or ended early
    problem: str = ""  # an internal error, for the person at the terminal
    is_proxied: bool = False  # answered by a worker, which logs it
    is_unlogged: bool = False  # files of the chat page, polls of background responses
    seconds: float = 0.0  # from its first line to the end of its response
    background_task: asyncio.Task[None] | None = None  # continues after the response, and holds the request's body


class EventReader:
    """Reads the events of one job. `note` is called with the engine's notices, `count` with the statistics, which also go into
    `record`."""

    def __init__(self, job: Job, note: Callable[[str], None], record: RequestRecord, count: Callable[[Stats], None] | None = None) -> None:
        self.job, self._note, self._record, self._count = job, note, record, count
        self.progress, self._ended = "", []  # the engine's last progress as text; statistics of answers that have ended

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next text, progress or end; None on a timeout. Raises Problem."""
        while True:
            try:
                event = await self.job.next(seconds)
            except StopAsyncIteration:
                raise RuntimeError("the answer ended unexpectedly") from None
            except Exception as error:
                raise self.report(error) from error
            if isinstance(event, Notice):
                self._note(event.text)
                continue
            if isinstance(event, Progress):
                self.progress = f"{event.phase}: {event.done} of {event.total} {event.unit}"
            if isinstance(event, Done | AnswerEnded):
                self._ended.append(event.stats)
                self._record.stats = total_stats(self._ended)
                if self._count is not None:
                    self._count(event.stats)
            return event

    def report(self, error: Exception) -> Problem:
        """The problem to send for an error. It is recorded for the log, which shows internal errors in full."""
        problem = problem_of(error)
        if problem.status == 500:
            self._record.problem = str(error) or type(error).__name__
        else:
            self._record.end_reason = problem.message
        return problem

    def on_disconnect(self) -> None:
        """Cancel the answer, because the client has disconnected."""
        self._record.end_reason = CLIENT_LEFT
        self.job.abandon()

    @property
    def comment(self) -> str:
        """The text of a keep-alive comment: the progress, or the position in the queue."""
        num_ahead = self.job.ahead
        position = f"{num_ahead} answer{'' if num_ahead == 1 else 's'} before this one" if num_ahead else "reading the prompt"
        return self.progress or position


async def whole_response(request: Request, reader: EventReader, serializer: AnswerSerializer) -> Response:
    """A response with the whole answer; an empty one if the client has disconnected. Raises Problem."""

    async def collect() -> Response:
        while not isinstance(event := await reader.next(), Done):
            if isinstance(event, PromptRead | TextDelta | Call | AnswerEnded):
                serializer.add(event)
        return json_response(serializer.whole_answer(event.stats))

    try:
        return await unless_disconnected(request.receive, collect(), reader.on_disconnect) or Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        reader.job.abandon()


async def result_of(request: Request, reader: EventReader, kind: type[Result]) -> Result | None:
    """The event of type `kind` that ends a job other than an answer; None if the client has disconnected. Raises Problem."""

    async def result() -> Result:
        while not isinstance(event := await reader.next(), kind):
            continue
        return event

    try:
        return await unless_disconnected(request.receive, result(), reader.on_disconnect)
    finally:
        reader.job.abandon()


class EventStream(Response):
    """The answer as server-sent events."""

    kind = EVENTS

    def __init__(self, reader: EventReader, serializer: AnswerSerializer) -> None:
        self._reader, self._serializer, self._began, self._last_write_s = reader, serializer, False, 0.0
        self._created_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._scope, self._receive = send, scope, receive
        try:
            await unless_disconnected(receive, self._stream(), self._reader.on_disconnect)
        finally:
            self._reader.job.abandon()

    async def _stream(self) -> None:
        reader, serializer = self._reader, self._serializer
        try:
            while not isinstance(event := await reader.next(KEEP_ALIVE_S), Done):
                if isinstance(event, PromptRead):
                    serializer.add(event)
                elif isinstance(event, TextDelta | Call | AnswerEnded):
                    await self._send_first_chunks()
                    await self._send_chunks(serializer.add(event))
                else:
                    await self._send_keep_alive()
            await self._send_first_chunks()
            await self._send_chunks(serializer.last_chunks(event.stats))
            await self._send_body(serializer.terminator, more=False)
        except Problem as problem:
            if self._last_write_s or serializer.sends_error_event(problem):
                await self._send_chunks(serializer.error_chunks(problem))
                await self._send_body(serializer.terminator, more=False)
            else:
                response = problem_response(problem, self._scope.get("path", ""))
                await response(self._scope, self._receive, self._send)

    async def _send_first_chunks(self) -> None:
        """Send the chunks before the first text, once."""
        if not self._began:
            self._began = True
            await self._send_chunks(self._serializer.first_chunks())

    async def _send_keep_alive(self) -> None:
        """Send a keep-alive: a comment at most once per COMMENT_INTERVAL_S, or, where there are no comments, a chunk per KEEP_ALIVE_S."""
        now = time.monotonic()
        if not self._serializer.has_comments:
            if now - max(self._created_s, self._last_write_s) >= KEEP_ALIVE_S:
                await self._send_chunks(self._serializer.keep_alive_chunks())
        elif now - self._last_write_s >= COMMENT_INTERVAL_S:
            await self._send_body(f": {self._reader.comment}\n\n".encode())
            if self._serializer.starts_early:
                await self._send_first_chunks()
            if self._began:
                await self._send_chunks(self._serializer.keep_alive_chunks())

    async def _send_chunks(self, chunks: Iterable[Mapping[str, object]]) -> None:
        if lines := encode_chunks(self._serializer, chunks):
            await self._send_body(lines)

    async def _send_body(self, body: bytes, more: bool = True) -> None:
        if not self._last_write_s:
            headers = [(name.encode(), value.encode()) for name, value in (("content-type", self.kind), *HEADERS.items())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._last_write_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class LineStream(EventStream):
    """The answer as JSON lines."""

    kind = LINES


class ListStream(EventStream):
    """The answer as one JSON list, with an element per chunk: lines between them begin with a comma, so that clients can split them before
    the list is complete."""

    kind = LIST
    _has_elements = False

    async def _send_chunks(self, chunks: Iterable[Mapping[str, object]]) -> None:
        for chunk in chunks:
            await self._send_body((b",\n" if self._has_elements else b"[") + encode_json(chunk) + b"\n")
            self._has_elements = True


def encode_chunks(serializer: AnswerSerializer, chunks: Iterable[Mapping[str, object]]) -> bytes:
    """Chunks in the format of the stream: events or JSON lines."""
    if serializer.json_lines:
        return b"".join(encode_json(chunk) + b"\n" for chunk in chunks)

    def event_name(chunk: Mapping[str, object]) -> bytes:
        return f"event: {chunk['type']}\n".encode() if serializer.has_event_names else b""

    return b"".join(event_name(chunk) + b"data: " + encode_json(chunk) + b"\n\n" for chunk in chunks)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Any], on_disconnect: Callable[[], None]) -> Any:
    """The result of `work`; None if the client disconnects first, in which case `on_disconnect` is called."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        on_disconnect()
        return None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def encode_json(value: object) -> bytes:
    """A value as JSON in UTF-8; a lone surrogate becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, headers, "application/json")


def problem_response(problem: Problem, path: str) -> Response:
    """The problem in the format of the API at a path."""
    return json_response(problem.at(path), problem.status, problem.headers)
