"""The body of a request, read within bounds of size, of time, and of how many values it has: a small one of JSON takes a hundred times its
bytes of memory, and seconds in which nobody else is answered."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request

from .openai_requests import Kind, parse
from .problems import Problem

MAX_BODY_NBYTES, MAX_READ_NBYTES = 32 << 20, 256 << 20  # bytes of a body that is taken, and of one that is read to its end
BODY_TIMEOUT_S = 60.0  # for a body to come
MAX_VALUES = 1 << 20  # of lists and objects: token ids of the longest contexts
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # also one without an end, or the search would begin anew at each mark in it


async def read_request(request: Request, kind: type[Kind]) -> Kind:
    """The body of a request as an object. Raises Problem."""
    return await asyncio.to_thread(parse, kind, await read_body(request))


async def read_body(request: Request) -> bytes:
    """The body of a request, whole. Raises Problem."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise Problem(415, f"a body with Content-Encoding {coding:.40} is not read: send it as it is", code="unsupported_encoding")
    too_large = Problem(413, f"the body is larger than {MAX_BODY_NBYTES >> 20} MiB", code="body_too_large",
                        headers={"connection": "close"}, hint="send it in parts")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_READ_NBYTES:
        raise too_large
    body, came = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                came += len(part)
                if came <= MAX_BODY_NBYTES:
                    body += part
                elif came > MAX_READ_NBYTES:
                    raise too_large
                else:  # read and dropped: who is cut off while sending never sees why
                    body.clear()
    except TimeoutError:
        late = f"the body did not come in {BODY_TIMEOUT_S:.0f} s"
        raise Problem(408, late, headers={"connection": "close"}, hint="send it again, whole") from None
    if came > MAX_BODY_NBYTES:
        raise too_large
    if came > MAX_VALUES:  # a value has a byte at least
        await asyncio.to_thread(check_value_count, body)
    return bytes(body)


def check_value_count(body: bytes | bytearray) -> None:
    """Raises Problem. What stands in texts counts only where there could be too many; of very many texts, which would take as long to
    leave out as to read, their quotes tell."""
    if _marks(body) <= MAX_VALUES:
        return
    texts = (body.count(b'"') - body.count(b'\\"')) // 2
    if texts > MAX_VALUES or _marks(STRING.sub(b"", body)) > MAX_VALUES:
        raise Problem(413, f"the body has more than {MAX_VALUES:,} values", code="body_too_large", hint="send it in parts")


def _marks(body: bytes | bytearray) -> int:
    """A bound for how many values a text of JSON has."""
    return sum(map(body.count, (b",", b"[", b"{")))
