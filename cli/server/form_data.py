"""Parses multipart/form-data bodies, in which clients send audio files. Nested forms are not supported."""

from __future__ import annotations

from email.message import Message

from starlette.requests import Request

from .bodies import read_body
from .problems import Problem

MOST_PARTS, MOST_HEAD = 100, 4096
KIND = "multipart/form-data"


async def form_of(request: Request) -> dict[str, bytes]:
    """The parts of a form by name. Of parts with the same name the last counts; those of a list (`name[]`) are joined by commas. Raises
    Problem."""
    return parts_of(request.headers.get("content-type", ""), await read_body(request))


def parts_of(content_type: str, body: bytes) -> dict[str, bytes]:
    """Raises Problem for a body that is no form."""
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_boundary()
    if head.get_content_type() != KIND or not boundary:
        raise Problem(415, f"the body has to be a form ({KIND}), not {head.get_content_type():.60}", code="unsupported_encoding")
    line = b"\r\n--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(line, MOST_PARTS + 1)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise Problem(400, f"the body is not a complete form with at most {MOST_PARTS} parts: send it again")
    parts: dict[str, bytes] = {}
    for name, content in map(_part, pieces[1:-1]):
        parts[name] = b"%s,%s" % (parts[name], content) if name.endswith("[]") and name in parts else content
    return parts


def _part(piece: bytes) -> tuple[str, bytes]:
    """Name and content of one part. Raises Problem."""
    above, blank, content = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    said = Message()
    for line in above[:MOST_HEAD].decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            said["content-disposition"] = value.strip()
    name = said.get_param("name", header="content-disposition")
    if not blank or not isinstance(name, str):
        raise Problem(400, "a part of the form has no name: each needs Content-Disposition: form-data; name=...")
    return name, content
