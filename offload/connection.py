"""HTTP client for large files: keep-alive connections, proxies from the environment, bodies read straight into caller memory.

It follows no redirects, retries nothing and judges no status: redirects and errors are returned like any response. A request that got no
response at all raises `ConnectionFailed`, which says whether a retry could help.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass_environment

TIMEOUT_S = 30.0  # of silence
CONNECT_TIMEOUT_S = 10.0
Key = tuple[str, str, int]
TUNNEL = "Tunnel connection failed: "  # http.client's prefix for a proxy's error response to CONNECT
CREDENTIAL = "put them into HTTPS_PROXY: http://name:password@host:port"
PROXIES = "set HTTPS_PROXY to http://host:port, or http://name:password@host:port if it asks for credentials"
TRUST = "behind a TLS-inspecting proxy, set SSL_CERT_FILE to a file with its certificate"


class ConnectionFailed(Exception):
    """No response, or one that broke off. `reason` and, where a remedy is known, `step` are shown to the user."""

    def __init__(self, reason: str, again: bool = True, step: str = "") -> None:
        super().__init__(reason)
        self.reason, self.again, self.step = reason, again, step


@dataclass(frozen=True)
class Url:
    """A parsed absolute URL. `target` goes into the request line."""

    scheme: str
    host: str
    port: int
    target: str

    @classmethod
    def parse(cls, text: str) -> Url:
        """Raises ConnectionFailed for schemes other than http and https, and for characters that a request line cannot carry."""
        try:
            parts = urlsplit(text)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            raise ConnectionFailed("the URL is not http or https", again=False) from None
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not target.isascii() or not is_resolvable(parts.hostname) or any(ord(c) <= 32 or ord(c) == 127 for c in text):
            raise ConnectionFailed("the URL is malformed", again=False)
        return cls(parts.scheme, parts.hostname, port, target)

    @property
    def origin(self) -> Key:
        """The origin that a credential may be sent to."""
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"


def is_resolvable(host: str | None) -> bool:
    """Whether a resolver can look this name up. Sockets reject any other with an error that is not a network error."""
    try:
        return bool(host and host.encode("idna"))
    except UnicodeError:
        return False


@dataclass(frozen=True)
class Proxy:
    """The proxy for a request, with its credential."""

    host: str
    port: int
    authorization: str | None


def proxy_for(url: Url, env: Mapping[str, str]) -> Proxy | None:
    """The proxy from HTTP(S)_PROXY and ALL_PROXY (lower case first), unless NO_PROXY names the host. Raises ConnectionFailed for an
    unsupported scheme or an invalid address."""
    names = (f"{url.scheme}_proxy", f"{url.scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    text = next((env[name] for name in names if env.get(name)), "")
    excepted = env.get("no_proxy") or env.get("NO_PROXY") or ""
    if not text or proxy_bypass_environment(url.authority, {"no": excepted}):
        return None
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port or 80
    except ValueError:
        raise ConnectionFailed("the proxy's URL is malformed", False, PROXIES) from None
    if parts.scheme != "http":
        raise ConnectionFailed(f"a proxy of kind {parts.scheme!r} is not supported, http is", again=False)
    if not is_resolvable(parts.hostname):
        raise ConnectionFailed("the proxy's URL is malformed", False, PROXIES)
    credential = None
    if parts.username is not None:
        plain = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        credential = "Basic " + base64.b64encode(plain.encode()).decode()
    return Proxy(parts.hostname, port, credential)


class Response:
    """A response whose body is still to be read. `remaining` is None where the server did not send a length."""

    def __init__(self, network: Network, key: Key, connection: http.client.HTTPConnection, raw: http.client.HTTPResponse) -> None:
        self.status, self.headers = raw.status, raw.headers
        self._network, self._key, self._connection, self._raw = network, key, connection, raw
        self._received = 0

    @property
    def remaining(self) -> int | None:
        return self._raw.length

    def readinto(self, view: memoryview) -> int:
        """One read of the socket into `view`; 0 at the end. Raises ConnectionFailed if the body breaks off."""
        count = self._readinto(view)
        self._received += count
        return count

    def _readinto(self, view: memoryview) -> int:
        raw = self._raw
        try:
            if raw.fp is None:
                return 0
            if raw.chunked or raw.length is None:
                return raw.readinto(view)
            if raw.length == 0:
                return 0
            count = raw.fp.readinto1(view[: raw.length])
            if not count:
                raise ConnectionFailed(f"the connection was closed {raw.length} bytes before the end")
            raw.length -= count
            return count
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ConnectionFailed(describe_error(error)) from error

    def read(self, limit: int) -> bytes:
        """The body, up to `limit` bytes."""
        out = memoryview(bytearray(limit))
        done = 0
        while done < limit and (count := self.readinto(out[done:])):
            done += count
        return bytes(out[:done])

    def header(self, name: str) -> str | None:
        return self.headers.get(name)

    def close(self) -> None:
        """Return the connection to the pool if the body was read to its end, else close it."""
        raw = self._raw
        spent = raw.fp is None or raw.length == 0 and not raw.chunked
        self._network._release(self._key, self._connection, reuse=spent and not raw.will_close, received=self._received)
        self._received = 0
        raw.close()


class Network:
    """A thread-safe pool of connections to any number of hosts; each serves one request at a time."""

    def __init__(self, env: Mapping[str, str], agent: str, timeout_s: float = TIMEOUT_S) -> None:
        self._env, self._agent, self._timeout_s = env, agent, timeout_s
        self._idle: dict[Key, list[http.client.HTTPConnection]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        self.received = 0  # body bytes received so far, counted when a body ends or is dropped

    def request(self, method: str, url: Url, headers: Mapping[str, str], body: bytes | None = None) -> Response:
        """Send a request and wait for the response headers. Raises ConnectionFailed."""
        proxy = proxy_for(url, self._env)
        target, own = url.target, {"Host": url.authority, "User-Agent": self._agent, "Accept-Encoding": "identity", **headers}
        if proxy and url.scheme == "http":
            target = f"http://{url.authority}{url.target}"
            if proxy.authorization:
                own["Proxy-Authorization"] = proxy.authorization
        kept = True
        while kept:
            connection, kept = self._take(url, proxy)
            try:
                connection.request(method, target, body, own)
                return Response(self, url.origin, connection, connection.getresponse())
            except (OSError, http.client.HTTPException) as error:
                self._release(url.origin, connection, reuse=False)
                # A pooled connection may have been closed by the peer long ago: that says nothing about the host.
                if not kept or isinstance(error, TimeoutError):
                    again = not isinstance(error, ssl.SSLCertVerificationError)
                    via = f" through the proxy {proxy.host}:{proxy.port}" if proxy else ""
                    raise ConnectionFailed(f"{url.authority}{via}: {describe_error(error)}", again) from error
            except BaseException:
                self._release(url.origin, connection, reuse=False)
                raise
        raise AssertionError("a fresh connection either answers or fails")

    def __del__(self) -> None:
        """Pooled connections are closed with the pool."""
        for kept in self._idle.values():
            for connection in kept:
                connection.close()

    def cut(self) -> None:
        """Abort every request and response in flight. The pool stays usable."""
        with self._lock:
            busy = list(self._busy)
        for connection in busy:
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # already closed

    def _take(self, url: Url, proxy: Proxy | None) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it has been used before."""
        with self._lock:
            kept = self._idle.get(url.origin)
            connection = kept.pop() if kept else None
            used = connection is not None
            if connection is None:
                connection = self._new(url, proxy)
            self._busy.add(connection)
        if not used:
            try:
                connection.connect()
                connection.sock.settimeout(self._timeout_s)
            except (OSError, http.client.HTTPException) as error:
                self._release(url.origin, connection, reuse=False)
                if proxy and str(error).startswith(f"{TUNNEL}407"):
                    wants = f"the proxy {proxy.host}:{proxy.port} asks for a name and password"
                    raise ConnectionFailed(wants, False, CREDENTIAL) from error
                trusted = not isinstance(error, ssl.SSLCertVerificationError)
                via = f" through the proxy {proxy.host}:{proxy.port}" if proxy else ""
                raise ConnectionFailed(f"{url.authority}{via}: {describe_error(error)}", trusted, "" if trusted else TRUST) from error
        return connection, used

    def _new(self, url: Url, proxy: Proxy | None) -> http.client.HTTPConnection:
        host, port = (proxy.host, proxy.port) if proxy else (url.host, url.port)
        if url.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=self._tls)
        if proxy:
            tunnel = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
            connection.set_tunnel(url.host, url.port, tunnel)
        return connection

    def _release(self, key: Key, connection: http.client.HTTPConnection, reuse: bool, received: int = 0) -> None:
        with self._lock:
            self.received += received
            self._busy.discard(connection)
            if reuse:
                self._idle.setdefault(key, []).append(connection)
                return
        connection.close()


def describe_error(error: Exception) -> str:
    """A network error in a few words."""
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved (no network?)"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected):
        return "the connection was closed"
    if str(error).startswith(TUNNEL):
        return f"it answered {str(error).removeprefix(TUNNEL)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
