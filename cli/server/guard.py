"""Access control and the request log: host, origin and API key.

A server on the loopback is within reach of every page open in a browser on this machine, one on the local network of those on every
machine there. Requests from another site's page are known by their Origin; DNS rebinding, a site's name that resolves to this machine, by
the Host that they ask for: a site has a public name, never an address or a name of the local network."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .bodies import MAX_BODY_NBYTES
from .problems import BUSY, GOOGLE, REFUSED, RETRY, Problem, internal
from .streams import CLIENT_CLOSED_REQUEST, RequestRecord, problem_response

PUBLIC_PATHS = ("/health", "/v1/health")  # need no key, which health checks do not have
ANY_ORIGIN = "*"
# Schemes of desktop apps on this machine, which no website can have as its origin.
APP_SCHEMES = ("app", "tauri", "vscode-file", "vscode-webview")
# Ends of names that no site on the internet can have: mDNS (RFC 6762), home networks (RFC 8375), private use; lan and home, which routers
# give out, have never been delegated.
LOCAL_SUFFIXES = (".local", ".home.arpa", ".internal", ".lan", ".home")
HOST_OF_CONTAINERS = re.compile(r"host\.[a-z]+\.internal\.?", re.IGNORECASE)
RECORD = "effllm.record"
VERSIONS, HEADERS = ("v1", "v1alpha"), ("x-goog-api-key", "x-goog-api-client")  # other versions of Google's API; headers of its clients
METHODS = ("generateContent", "streamGenerateContent", "countTokens", "embedContent", "batchEmbedContents")
MAX_BODIES_NBYTES = 16 * MAX_BODY_NBYTES
MAX_SHOWN = 270  # characters of a refused address in a message: a host name has at most 253


@dataclass(frozen=True)
class AccessRules:
    """`on_loopback`: the server listens there, so Host has to name it, or one of the `origins`, whose pages may send requests. Elsewhere,
    without a key, Host has to be an address, a local name, or one of `names`, the machine's own. `open`: predicates on path and headers for
    requests that need no key, in addition to PUBLIC_PATHS."""

    on_loopback: bool
    key: str | None = None
    origins: tuple[str, ...] = ()
    open: tuple[Callable[[str, Headers], bool], ...] = ()
    names: tuple[str, ...] = ()

    def refused(self, path: str, headers: Headers, query: bytes = b"") -> Problem | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.on_loopback and host and not self._is_ours(name_of(host)):
            return Problem(403, f"this server accepts the hosts localhost and 127.0.0.1, not {host[:MAX_SHOWN]}", REFUSED,
                           code="host_not_allowed", hint="use one of these; behind a proxy serve with --cors and the origin that it has "
                                                         "for others, such as https://chat.example, else with --host ADDRESS")
        if not self.on_loopback and self.key is None and ANY_ORIGIN not in self.origins and host and not self._is_local(name_of(host)):
            return Problem(403, f"without a key this server accepts its addresses and local names as hosts, not {host[:MAX_SHOWN]}",
                           REFUSED, code="host_not_allowed",
                           hint=f"use its address, or serve with --cors http://{host[:MAX_SHOWN]} or an --api-key")
        if origin is not None and not self.allows(origin, host):
            shown_origin = origin[:MAX_SHOWN]
            return Problem(403, f"pages of {shown_origin} may not send requests: --cors {shown_origin} allows them", REFUSED,
                           code="origin_not_allowed")
        if origin is None and ANY_ORIGIN not in self.origins and path not in ("/", *PUBLIC_PATHS) and is_part_of_another_page(headers):
            return Problem(403, "pages of other sites may not send requests, nor load images, scripts or frames from here", REFUSED,
                           code="origin_not_allowed", hint="open its URL in a tab of its own")
        is_open = path in PUBLIC_PATHS or any(each(path, headers) for each in self.open)
        if self.key is not None and not is_open and not self._has_key(path, headers, query):
            return Problem(401, "the key is missing or wrong: Authorization: Bearer KEY, or x-api-key: KEY", REFUSED,
                           code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return None

    def _is_ours(self, name: str) -> bool:
        """Whether a server on the loopback answers to this host name: a proxy may pass on its own, whose pages are allowed anyway."""
        return is_loopback(name) or is_host_of_containers(name) or self._is_of_an_origin(name)

    def _is_local(self, name: str) -> bool:
        """Whether a server on the network answers to this host name without a key."""
        return is_local_name(name) or name.lower().rstrip(".") in self.names or self._is_of_an_origin(name)

    def _is_of_an_origin(self, name: str) -> bool:
        return name.lower().rstrip(".") in (urlsplit(each).hostname for each in self.origins)

    def allows(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        if ANY_ORIGIN in self.origins or origin.rstrip("/") in self.origins or parts.netloc.lower() == host.lower() != "":
            return True
        return self.on_loopback and (parts.scheme in APP_SCHEMES or parts.scheme in ("http", "https") and is_loopback(name))

    def _has_key(self, path: str, headers: Headers, query: bytes) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        header_keys = [key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""), headers.get("x-goog-api-key", "")]
        query_keys = parse_qs(query.decode("latin-1")).get("key", []) if path.startswith(GOOGLE) else []  # where its clients put the key
        keys = [*(each.encode("latin-1") for each in header_keys), *(each.encode("utf-8", "replace") for each in query_keys)]
        return any([hmac.compare_digest(each, self.key.encode()) for each in keys])


def name_of(host: str) -> str:
    """A Host header without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def is_loopback(name: str) -> bool:
    """Whether a name means this machine to everyone."""
    name = name.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def is_local_name(name: str) -> bool:
    """Whether a host is an address, or a name that only a machine of the local network can have: without a dot, or with a local suffix."""
    name = name.lower().rstrip(".")
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return bool(name) and ("." not in name or name.endswith((".localhost", *LOCAL_SUFFIXES)))
    return True


def is_part_of_another_page(headers: Headers) -> bool:
    """Whether a browser makes this request for another site's page (an image, a script, a frame, a link), without an Origin. That page does
    not see the response, but the request could load a model."""
    return headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") in ("no-cors", "navigate")


def is_host_of_containers(name: str) -> bool:
    """Whether a name is a container's for its host, such as host.docker.internal: where containers run in a virtual machine (Docker
    Desktop, Podman, OrbStack, Lima), it leads to the host's loopback. .internal is reserved, so no site can have such a name."""
    return bool(HOST_OF_CONTAINERS.fullmatch(name))


class Guard:
    """The outermost ASGI application. `say` is called for every request with method, path, status and record."""

    def __init__(self, app: ASGIApp, rules: AccessRules, say: Callable[[str, str, int, RequestRecord], None]) -> None:
        self._app, self._rules, self._log = app, rules, say
        self._body_nbytes = 0  # bytes of the bodies of all requests in progress, background responses included

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers, record, status, body_nbytes, path = Headers(scope=scope), RequestRecord(), CLIENT_CLOSED_REQUEST, 0, scope["path"]
        scope, began = route_google(scope, headers), time.monotonic()
        origin = headers.get("origin")
        scope[RECORD] = record

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if origin is not None and self._rules.allows(origin, headers.get("host", "")):
                    allowed = MutableHeaders(raw=message.setdefault("headers", []))
                    allowed["access-control-allow-origin"] = origin
                    allowed.add_vary_header("origin")
            await send(message)

        async def receiving() -> Message:
            nonlocal body_nbytes
            message = await receive()
            received = min(len(message.get("body", b"")), MAX_BODY_NBYTES - body_nbytes)  # the rest of a larger one is dropped
            body_nbytes, self._body_nbytes = body_nbytes + received, self._body_nbytes + received
            if received and self._body_nbytes > MAX_BODIES_NBYTES:
                raise Problem(503, f"request bodies of {MAX_BODIES_NBYTES >> 20} MiB are in progress, and no more are accepted", BUSY,
                              code="bodies_full",
                              headers={"retry-after": "1", "connection": "close"}, hint=RETRY)
            return message

        try:
            is_preflight = scope["method"] == "OPTIONS" and origin is not None and "access-control-request-method" in headers
            refused = self._rules.refused(PUBLIC_PATHS[0] if is_preflight else scope["path"], headers, scope.get("query_string", b""))
            if refused is not None:
                record.end_reason = refused.message
                await problem_response(refused, scope["path"])(scope, receive, sending)
            elif is_preflight:
                await preflight(headers)(scope, receive, sending)
            else:
                await self._app(scope, receiving, sending)
        except Exception as error:  # a bug: the server goes on
            record.problem = f"{type(error).__name__}: {error}"
            if status == CLIENT_CLOSED_REQUEST:
                await problem_response(internal(error), scope["path"])(scope, receive, sending)
        finally:
            if record.background_task is None:
                self._body_nbytes -= body_nbytes
            else:
                record.background_task.add_done_callback(lambda _: self._release(body_nbytes))
            record.seconds = time.monotonic() - began
            self._log(scope["method"], path, status, record)

    def _release(self, nbytes: int) -> None:
        self._body_nbytes -= nbytes


def route_google(scope: Scope, headers: Headers) -> Scope:
    """Requests of other versions of Google's API are routed to the one here. Its v1 shares paths with OpenAI's models: there its clients
    are recognized by the method in the path, or by their headers."""
    version, _, rest = scope["path"].removeprefix("/").partition("/")
    is_googles = rest.partition("/")[0] == "models" and (rest.rpartition(":")[2] in METHODS or any(name in headers for name in HEADERS))
    if version not in VERSIONS or not is_googles:
        return scope
    changed = {"path": GOOGLE + rest}
    if raw := scope.get("raw_path"):
        changed["raw_path"] = GOOGLE.encode() + raw[len(version) + 2 :]
    return {**scope, **changed}


def preflight(headers: Headers) -> Response:
    """The response to a CORS preflight request."""
    allowed = {"access-control-allow-methods": "GET, POST, DELETE, OPTIONS", "access-control-max-age": "600",
               "access-control-allow-headers": headers.get("access-control-request-headers", "authorization, content-type")}
    if "access-control-request-private-network" in headers:
        allowed["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=allowed)
