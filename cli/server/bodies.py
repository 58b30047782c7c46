"""Reads request bodies, with limits on size, time and number of JSON values: a small body can take a hundred times its bytes of memory, and
seconds of parsing in which no other request is answered."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request

from .openai_requests import Kind, parse
from .problems import Problem

MAX_BODY_NBYTES, MAX_READ_NBYTES = 32 << 20, 256 << 20  # accepted; read to the end before being refused
BODY_TIMEOUT_S = 60.0  # for a whole body to arrive
MAX_VALUES = 1 << 20  # in lists and objects: as many as the token ids of the longest contexts
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # an unterminated one too, or the search would restart at each quote in it


async def read_request(request: Request, kind: type[Kind]) -> Kind:
    """The body of a request as an object of `kind`. Raises Problem."""
    return await asyncio.to_thread(parse, kind, await read_body(request))


async def read_body(request: Request) -> bytes:
    """The whole body of a request. Raises Problem."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise Problem(415, f"Content-Encoding {coding:.40} is not supported: send the body uncompressed", code="unsupported_encoding")
    too_large = Problem(413, f"the body is larger than {MAX_BODY_NBYTES >> 20} MiB", code="body_too_large",
                        headers={"connection": "close"}, hint="send it in parts")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_READ_NBYTES:
        raise too_large
    body, received = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                received += len(part)
                if received <= MAX_BODY_NBYTES:
                    body += part
                elif received > MAX_READ_NBYTES:
                    raise too_large
                else:  # read to the end: a client that is disconnected while sending never sees the error
                    body.clear()
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
        raise Problem(408, message, headers={"connection": "close"}, hint="send it again in full") from None
    if received > MAX_BODY_NBYTES:
        raise too_large
    if received > MAX_VALUES:  # a value takes at least a byte
        await asyncio.to_thread(check_value_count, body)
    return bytes(body)


def check_value_count(body: bytes | bytearray) -> None:
    """Raises Problem for too many JSON values. Separators are counted outside of strings, which are removed only if counting everything
    exceeds the limit. A body with too many strings is recognized by its quotes, as removing them would take as long as parsing."""
    if _marks(body) <= MAX_VALUES:
        return
    texts = (body.count(b'"') - body.count(b'\\"')) // 2
    if texts > MAX_VALUES or _marks(STRING.sub(b"", body)) > MAX_VALUES:
        raise Problem(413, f"the body has more than {MAX_VALUES:,} values", code="body_too_large", hint="send it in parts")


def _marks(body: bytes | bytearray) -> int:
    """An upper bound on the number of values in a JSON text."""
    return sum(map(body.count, (b",", b"[", b"{")))
