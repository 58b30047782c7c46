"""Sends answers to a client: whole, as server-sent events, or as JSON lines. A client that disconnects is noticed, and its answer is
cancelled.

A stream's status goes out with its first bytes, which therefore wait for the engine's first event: an invalid request gets an HTTP status
of its own. Only a long wait begins with a comment, which keeps proxies from timing out; a later error is an event. APIs without comments
get an empty chunk."""

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

KEEP_ALIVE_S = 5.0  # without a byte
PROGRESS_S = 1.0
EVENTS, LINES, LIST = "text/event-stream; charset=utf-8", "application/x-ndjson", "application/json"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
LEFT = "the client left"
Made = TypeVar("Made")
GONE = 499  # as web servers log a client that went away


@dataclass
class RequestRecord:
    """What the request log says of one request."""

    stats: Stats | None = None
    outcome: str = ""  # what a request other than for an answer came to, in words
    ending: str = ""  # why it ended before its end
    problem: str = ""  # what a person at the terminal is told of it
    passed_on: bool = False  # to a server of its own, which says it
    is_minor: bool = False  # a part of the page that browsers are shown
    seconds: float = 0.0  # from its first line to the end of its answer
    behind: asyncio.Task[None] | None = None  # what goes on behind its answer, and holds what it sent


class EventReader:
    """Reads the events of one job. `note` gets the engine's notices, `record` the statistics, and so does `count`."""

    def __init__(self, job: Job, note: Callable[[str], None], record: RequestRecord, count: Callable[[Stats], None] | None = None) -> None:
        self.job, self._note, self._record, self._count = job, note, record, count
        self.at, self._ended = "", []  # what the engine is at, in words; what answers cost that have ended

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next text, progress or end; None on a timeout. Raises Problem."""
        while True:
            try:
                event = await self.job.next(seconds)
            except StopAsyncIteration:
                raise RuntimeError("the answer ended unexpectedly") from None
            except Exception as error:
                raise self.told(error) from error
            if isinstance(event, Notice):
                self._note(event.text)
                continue
            if isinstance(event, Progress):
                self.at = f"{event.phase}: {event.done} of {event.total} {event.unit}"
            if isinstance(event, Done | AnswerEnded):
                self._ended.append(event.stats)
                self._record.stats = total_stats(self._ended)
                if self._count is not None:
                    self._count(event.stats)
            return event

    def told(self, error: Exception) -> Problem:
        """The problem for the client; the full error is logged at the terminal."""
        problem = problem_of(error)
        if problem.status == 500:
            self._record.problem = str(error) or type(error).__name__
        else:
            self._record.ending = problem.message
        return problem

    def left(self) -> None:
        """The client has disconnected."""
        self._record.ending = LEFT
        self.job.abandon()

    @property
    def comment(self) -> str:
        before = self.job.ahead
        return self.at or (f"{before} answer{'' if before == 1 else 's'} before this one" if before else "reading the prompt")


async def whole_response(request: Request, reader: EventReader, serializer: AnswerSerializer) -> Response:
    """The answer as one object. Raises Problem; an empty response if the client has disconnected."""

    async def collected() -> Response:
        while not isinstance(event := await reader.next(), Done):
            if isinstance(event, PromptRead | TextDelta | Call | AnswerEnded):
                serializer.add(event)
        return json_response(serializer.whole(event.stats))

    try:
        return await unless_disconnected(request.receive, collected(), reader.left) or Response(status_code=GONE)
    finally:
        reader.job.abandon()


async def result_of(request: Request, reader: EventReader, kind: type[Made]) -> Made | None:
    """The result of a job that is no answer; None if the client has disconnected. Raises Problem."""

    async def last() -> Made:
        while not isinstance(event := await reader.next(), kind):
            continue
        return event

    try:
        return await unless_disconnected(request.receive, last(), reader.left)
    finally:
        reader.job.abandon()


class EventStream(Response):
    """The answer as server-sent events."""

    kind = EVENTS

    def __init__(self, reader: EventReader, serializer: AnswerSerializer) -> None:
        self._reader, self._serializer, self._began, self._wrote = reader, serializer, False, 0.0
        self._since = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._scope, self._receive = send, scope, receive
        try:
            await unless_disconnected(receive, self._written(), self._reader.left)
        finally:
            self._reader.job.abandon()

    async def _written(self) -> None:
        reader, serializer = self._reader, self._serializer
        try:
            while not isinstance(event := await reader.next(KEEP_ALIVE_S), Done):
                if isinstance(event, PromptRead):
                    serializer.add(event)
                elif isinstance(event, TextDelta | Call | AnswerEnded):
                    await self._begin()
                    await self._data(serializer.add(event))
                else:
                    await self._wait()
            await self._begin()
            await self._data(serializer.last(event.stats))
            await self._body(serializer.ending, more=False)
        except Problem as problem:
            if self._wrote or serializer.tells(problem):
                await self._data(serializer.failed(problem))
                await self._body(serializer.ending, more=False)
            else:
                response = problem_response(problem, self._scope.get("path", ""))
                await response(self._scope, self._receive, self._send)

    async def _begin(self) -> None:
        """Send what comes before the first text, once."""
        if not self._began:
            self._began = True
            await self._data(self._serializer.first())

    async def _wait(self) -> None:
        """Send a keep-alive: a comment at most once per PROGRESS_S, or, where there are no comments, a chunk per KEEP_ALIVE_S."""
        now = time.monotonic()
        if not self._serializer.has_comments:
            if now - max(self._since, self._wrote) >= KEEP_ALIVE_S:
                await self._data(self._serializer.waiting())
        elif now - self._wrote >= PROGRESS_S:
            await self._body(f": {self._reader.comment}\n\n".encode())
            if self._serializer.early:
                await self._begin()
            if self._began:
                await self._data(self._serializer.waiting())

    async def _data(self, chunks: Iterable[Mapping[str, object]]) -> None:
        if lines := encode_chunks(self._serializer, chunks):
            await self._body(lines)

    async def _body(self, body: bytes, more: bool = True) -> None:
        if not self._wrote:
            headers = [(name.encode(), value.encode()) for name, value in (("content-type", self.kind), *HEADERS.items())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._wrote = time.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class LineStream(EventStream):
    """The answer as JSON lines."""

    kind = LINES


class ListStream(EventStream):
    """The answer as one JSON list, with an element per chunk: lines between them begin with a comma, so that clients can split them before
    the list is complete."""

    kind = LIST
    _has_one = False

    async def _data(self, chunks: Iterable[Mapping[str, object]]) -> None:
        for chunk in chunks:
            await self._body((b",\n" if self._has_one else b"[") + encoded(chunk) + b"\n")
            self._has_one = True


def encode_chunks(serializer: AnswerSerializer, chunks: Iterable[Mapping[str, object]]) -> bytes:
    """Chunks as they are sent."""
    if serializer.by_line:
        return b"".join(encoded(chunk) + b"\n" for chunk in chunks)

    def name(chunk: Mapping[str, object]) -> bytes:
        return f"event: {chunk['type']}\n".encode() if serializer.named else b""

    return b"".join(name(chunk) + b"data: " + encoded(chunk) + b"\n\n" for chunk in chunks)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Any], left: Callable[[], None]) -> Any:
    """The result of `work`; None if the client disconnects first, in which case `left` is called."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        left()
        return None
    finally:
        for each in (working, watching):
            each.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def encoded(value: object) -> bytes:
    """JSON in UTF-8; half a surrogate pair becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, "application/json")


def problem_response(problem: Problem, path: str) -> Response:
    """The problem in the format of the API at a path."""
    return json_response(problem.at(path), problem.status, problem.headers)
