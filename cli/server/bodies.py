"""The body of a request, read within bounds of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from .fields import Kind, parsed
from .problems import Problem

LARGEST_BODY, MOST_READ = 32 << 20, 256 << 20  # bytes of a body that is taken, and of one that is read to its end
BODY_S = 60.0  # for a body to come


async def read(request: Request, kind: type[Kind]) -> Kind:
    """The body of a request as an object. Raises Problem."""
    return await asyncio.to_thread(parsed, kind, await body_of(request))


async def body_of(request: Request) -> bytes:
    """The body of a request, whole. Raises Problem."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise Problem(415, f"a body with Content-Encoding {coding:.40} is not read: send it as it is", code="unsupported_encoding")
    too_large = Problem(413, f"the body is larger than {LARGEST_BODY >> 20} MiB", code="body_too_large",
                        headers={"connection": "close"}, hint="send it in parts")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_READ:
        raise too_large
    body, came = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                came += len(part)
                if came <= LARGEST_BODY:
                    body += part
                elif came > MOST_READ:
                    raise too_large
                else:  # read and dropped: who is cut off while sending never sees why
                    body.clear()
    except TimeoutError:
        late = f"the body did not come in {BODY_S:.0f} s"
        raise Problem(408, late, headers={"connection": "close"}, hint="send it again, whole") from None
    if came > LARGEST_BODY:
        raise too_large
    return bytes(body)
