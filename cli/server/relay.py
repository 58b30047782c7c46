"""Responses of the router that relay those of a worker, as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .background import BACKGROUND_HEADER
from .guard import RECORD
from .model_pool import LoadedModel
from .model_registry import RegisteredModel
from .problems import FAILED, Problem
from .proxy import UpstreamLost, UpstreamResponse, proxied
from .serializers import AnswerSerializer
from .streams import CLIENT_LEFT, EVENTS, HEADERS, KEEP_ALIVE_S, LINES, encode_chunks, unless_disconnected

if TYPE_CHECKING:
    from .router import Router

EXIT_GRACE_S = 1.0  # a dead process is noticed some milliseconds after its connections have ended


class Relay(Response):
    """The response of a model's worker to a request; the model is loaded first."""

    def __init__(self, router: Router, model: RegisteredModel, serializer: AnswerSerializer | None, body: bytes,
                 keep_s: float | None) -> None:
        self._router, self._model, self._serializer, self._body, self._keep_s = router, model, serializer, body, keep_s
        self._kind = LINES if serializer is not None and serializer.json_lines else EVENTS
        self._began = self._is_relaying = False  # bytes were sent; they are the worker's
        self._background_id: str | None = None  # id of a background response that continues after this one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send = scope, send
        await unless_disconnected(receive, self._respond(), self._on_disconnect)

    def _on_disconnect(self) -> None:
        if not self._is_relaying:
            self._scope[RECORD].end_reason = CLIENT_LEFT

    async def _respond(self) -> None:
        record = self._scope[RECORD]
        try:
            await self._relay()
        except Problem as problem:
            record.is_proxied = False
            if not self._began:
                raise
            record.end_reason = problem.message
            if self._serializer is None:  # the client only sees the connection end early
                return
            chunks = self._serializer.worker_lost_chunks(problem) if self._is_relaying else self._serializer.error_chunks(problem)
            await self._chunk(encode_chunks(self._serializer, chunks) + self._serializer.terminator, more=False)

    async def _relay(self) -> None:
        """Raises Problem."""
        pool, began = self._router.pool, time.monotonic_ns()
        taking = asyncio.ensure_future(pool.acquire(self._model))
        try:
            while not (await asyncio.wait((taking,), timeout=KEEP_ALIVE_S))[0]:
                await self._comment(pool.status(self._model))
            await self._relay_from(await taking, began)
        finally:
            if not taking.cancel() and not taking.cancelled() and taking.exception() is None:
                self._router.release(taking.result(), self._keep_s, self._background_id)

    async def _relay_from(self, loaded: LoadedModel, started_ns: int) -> None:
        scope, record = self._scope, self._scope[RECORD]
        target = scope["raw_path"] + query_of(scope)
        try:
            async with proxied(loaded.worker.port, self._router.key, scope["method"], target, scope["headers"], self._body,
                               time.monotonic_ns() - started_ns) as answer:
                record.is_proxied = True
                self._background_id = next((value.decode("latin-1") for name, value in answer.headers
                                            if name == BACKGROUND_HEADER.encode()), None)
                if self._began:
                    await self._check_event_stream(answer)
                else:
                    self._began = True
                    await self._send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
                self._is_relaying = True
                async for chunk in answer.chunks:
                    await self._chunk(chunk)
                await self._chunk(b"", more=False)
        except UpstreamLost as error:
            await asyncio.wait((loaded.worker.ended,), timeout=EXIT_GRACE_S)  # an immediate retry should not meet it again
            raise Problem(500, f"{loaded.model.name} ended before its answer did: the next request loads it again", FAILED,
                          code="model_ended") from error

    async def _check_event_stream(self, answer: UpstreamResponse) -> None:
        """A stream has begun, so a response that is none is an error, sent as the last event. Raises Problem."""
        if any(name == b"content-type" and value.decode("latin-1") == self._kind for name, value in answer.headers):
            return
        raise parse_problem(answer.status, b"".join([chunk async for chunk in answer.chunks]))

    async def _comment(self, text: str) -> None:
        """A keep-alive comment, or where the API has no comments a chunk without text."""
        if self._serializer is None:
            return
        if not self._began:
            self._began = True
            headers = encode_headers((("content-type", self._kind), *HEADERS.items()))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        comment = f": {text}\n\n".encode("utf-8", "replace")
        has_comments = self._serializer.has_comments
        await self._chunk(comment if has_comments else encode_chunks(self._serializer, self._serializer.keep_alive_chunks()))

    async def _chunk(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class RelayIfLoaded(Relay):
    """The response of a worker if its model is loaded already; loads nothing."""

    async def _relay(self) -> None:
        loaded = self._router.pool.find(self._model)
        if loaded is None:
            raise Problem(400, f"{self._model.name} is not loaded", param="model", hint="POST /models/load loads it, and so does a prompt")
        await self._relay_from(loaded, time.monotonic_ns())


class RelayToHolder(Response):
    """The response of the first worker that does not answer 404: for stored objects, whose names do not tell which worker has them."""

    def __init__(self, router: Router, body: bytes) -> None:
        self._router, self._body = router, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send, self._began = scope, send, False
        await unless_disconnected(receive, self._respond(), lambda: None)

    async def _respond(self) -> None:
        scope, not_found = self._scope, None
        for loaded in self._router.pool.loaded():
            with contextlib.suppress(UpstreamLost):  # it is ending, and what it stored is gone
                async with proxied(loaded.worker.port, self._router.key, scope["method"], scope["raw_path"] + query_of(scope),
                                   scope["headers"], self._body, 0) as answer:
                    if answer.status != 404:
                        return await self._relay_chunks(answer)
                    not_found = answer, [chunk async for chunk in answer.chunks]
            if self._began:  # the client only sees the connection end early
                return
        if not_found is None:
            raise Problem(404, "no model is loaded: stored responses are lost when their model is unloaded", code="not_kept")
        await self._begin(not_found[0])
        await self._send({"type": "http.response.body", "body": b"".join(not_found[1])})

    async def _relay_chunks(self, answer: UpstreamResponse) -> None:
        """Chunk by chunk: it may be the event stream of a background response."""
        await self._begin(answer)
        async for chunk in answer.chunks:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, answer: UpstreamResponse) -> None:
        self._scope[RECORD].is_proxied = self._began = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})


def query_of(scope: Scope) -> bytes:
    """The query string with its question mark, or nothing."""
    return b"?" + scope["query_string"] if scope["query_string"] else b""


def encode_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]


def parse_problem(status: int, body: bytes) -> Problem:
    """The problem that a worker's response states, in the format of any API, or as plain text."""
    try:
        error = json.loads(body).get("error")
    except ValueError:
        error = body.decode("utf-8", "replace")
    if not isinstance(error, dict):
        error = {"message": error}
    return Problem(status, str(error.get("message")), error.get("type") or FAILED, error.get("param"), error.get("code"))
