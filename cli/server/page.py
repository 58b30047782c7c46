"""The chat page for browsers at `/`: the files of `browser/`, which use the same endpoints as any client. They contain nothing of this
machine, so they need no key, and a content security policy restricts the page to this server."""

from __future__ import annotations

from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePath

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ... import __version__
from .guard import RECORD
from .streams import json_response

FOLDER, FRONT = "browser", "index.html"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
         ".svg": "image/svg+xml"}
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src blob: data:; connect-src 'self'; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
           "cache-control": "no-cache"}  # asked for anew each time, and answered by a 304: another version may serve there tomorrow


def is_page(path: str, headers: Headers) -> bool:
    """Whether a request is for the page or one of its files. At `/` other clients get a line of text, by which Ollama's recognize a
    server."""
    return path.startswith(f"/{FOLDER}/") or path == "/" and "text/html" in headers.get("accept", "")


def wants_json(headers: Headers) -> bool:
    """Whether a client takes JSON and no text. Those that take both look for words in the text, as Ollama's do."""
    accepted = headers.get("accept", "").lower()
    return "application/json" in accepted and "text/" not in accepted and "*/*" not in accepted


def routes(greeting: str, shows_page: bool) -> list[Route]:
    """`greeting`: what clients get at `/`, and browsers too without `shows_page`."""
    front = Route("/", partial(_front, greeting, shows_page), methods=["GET"])
    return [front, Route(f"/{FOLDER}/{{name}}", _part, methods=["GET"])] if shows_page else [front]


async def _front(greeting: str, shows_page: bool, request: Request) -> Response:
    if shows_page and is_page("/", request.headers):
        answer = _file(FRONT, request)
    elif wants_json(request.headers):
        answer = json_response({"status": "ok", "message": greeting.strip(), "version": __version__})
    else:
        answer = PlainTextResponse(greeting)
    answer.headers["vary"] = "accept"
    return answer


async def _part(request: Request) -> Response:
    return _file(request.path_params["name"], request)


def _file(name: str, request: Request) -> Response:
    found = _files().get(name)
    if found is None:
        raise HTTPException(404)
    body, tag = found
    request.scope[RECORD].is_unlogged = True
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={**HEADERS, "etag": tag})
    return Response(body, media_type=TYPES[PurePath(name).suffix], headers={**HEADERS, "etag": tag})


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """File name -> content and ETag."""
    read = {each.name: each.read_bytes() for each in (files(__package__) / FOLDER).iterdir() if PurePath(each.name).suffix in TYPES}
    return {name: (body, f'"{sha256(body).hexdigest()[:16]}"') for name, body in read.items()}
