"""Hub client: URLs, the token and where it may be sent, redirects, and errors translated for the user.

The protocol is four kinds of request, so it is implemented on our own connections instead of with the official library: importing that
costs a third of a second, and its single-stream downloads cannot be resumed by a later process. tests/hub_server.py is checked against
the library.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

from ... import DownloadFailed, EffllmError, ModelNotFound, __version__
from ...offload.backoff import Backoff, moment, retry_after
from ...offload.connection import CREDENTIAL, ConnectionFailed, Network, Response, Url
from ...offload.partial_file import Digest
from ...offload.running_hash import new_hash
from ...offload.transfer_types import RestartFile, RetryLater
from .. import hub
from ..config_reader import show

HUB = "https://huggingface.co"
BUSY = (408, 425, 429, 500, 502, 503, 504)
REDIRECTS = (301, 302, 303, 307, 308)
MAX_REDIRECTS = 8
MAX_INFO_NBYTES, MAX_ERROR_NBYTES = 16 << 20, 16 << 10  # of a response of the API, and of the body of a redirect
RESUME_HINT = "run the same command again; the partial download is kept"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at a commit."""

    name: str
    size: int
    etag: str  # names its blob in the cache
    is_lfs: bool  # the etag is the sha256 of its bytes, else git's sha1

    @property
    def digest(self) -> Digest:
        return Digest("sha256" if self.is_lfs else "git-sha1", self.etag)


class NoSuchFile(ModelNotFound):
    """The repository has no file of that name."""


class NoSuchRepository(ModelNotFound):
    """The hub shows no repository of that name: it does not exist or is private, which hubs do not tell apart."""


class Gated(ModelNotFound):
    """The repository asks for consent first."""


def is_true(text: str | None) -> bool:
    return (text or "").strip().upper() in ("1", "ON", "YES", "TRUE")


def is_offline(env: Mapping[str, str]) -> bool:
    return is_true(env.get("HF_HUB_OFFLINE") or env.get("TRANSFORMERS_OFFLINE"))


def find_token(env: Mapping[str, str]) -> str | None:
    """The user's token: of the environment, else of the file that `hf auth login` writes."""
    if is_true(env.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")):
        return None
    text = env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN")
    if not text:
        path = hub.expand(env["HF_TOKEN_PATH"], env) if env.get("HF_TOKEN_PATH") else hub.hf_home(env) / "token"
        try:
            text = Path(path).read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
    text = text.strip()
    return text if text and text.isascii() and text.isprintable() and " " not in text else None


class Client:
    """Requests to one hub. Usable from many threads. Raises ModelNotFound, DownloadFailed and EffllmError, each with a next step."""

    def __init__(self, env: Mapping[str, str], offline: bool = False, backoff: Backoff | None = None) -> None:
        self.endpoint = (env.get("HF_ENDPOINT") or HUB).rstrip("/")
        self.offline = offline or is_offline(env)
        self.network = Network(env, f"effllm/{__version__}")
        self.backoff = backoff or Backoff()
        self._token = find_token(env)
        self._lock = threading.Lock()
        self._locations: dict[str, str] = {}  # by file, the URL of its bytes behind the redirects
        self._etags: dict[str, list[str]] = {}  # by file, the ETags of its responses in order
        self._xet: dict[str, str] = {}  # by file, its Xet hash, if the hub stores it in Xet
        self._without_xet = is_true(env.get("HF_HUB_DISABLE_XET"))
        try:
            self._home = Url.parse(self.endpoint)
        except ConnectionFailed as error:
            raise EffllmError(f"HF_ENDPOINT is {show(self.endpoint)}: {error.reason}", "unset it, or give https://...") from None

    @property
    def has_token(self) -> bool:
        return self._token is not None

    @property
    def host(self) -> str:
        return self._home.authority

    def page(self, repo: str) -> str:
        return f"{self.endpoint}/{repo}"

    # -- small responses ---------------------------------------------------------------------------------------------------------

    def json(self, path: str, repo: str) -> tuple[dict[str, object], int]:
        """(JSON object of the API, bytes downloaded). `repo` is for errors."""
        return self._fetch_json(path, repo, dict)

    def objects(self, path: str, what: str) -> list[dict[str, object]]:
        """A list of objects of the API. `what` is for errors."""
        return [item for item in self._fetch_json(path, what, list)[0] if isinstance(item, dict)]

    def _fetch_json(self, path: str, what: str, kind: type) -> tuple[Any, int]:
        text = self._fetch(f"{self.endpoint}{path}", what, MAX_INFO_NBYTES + 1)
        if len(text) > MAX_INFO_NBYTES:
            raise DownloadFailed(f"what the hub lists of {what} is longer than {MAX_INFO_NBYTES >> 20} MiB, and is not read to its end",
                                 f"fetch the files that you want from {self.page(what)} into a folder, then effllm run ./FOLDER")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, kind):
            raise self._not_the_hub(text)
        return value, len(text)

    def small_file(self, repo: str, commit: str, file: RemoteFile, limit: int) -> bytes:
        """A whole file of at most `limit` bytes, its checksum verified."""
        if file.size > limit:
            raise DownloadFailed(f"{file.name} of {repo} is larger than {limit >> 10} KiB", "this does not look like a model")
        text = self._fetch(self.address(repo, commit, file.name), repo, limit + 1)
        checksum = new_hash(file.digest, len(text))
        checksum.update(text)
        if checksum.hexdigest() != file.etag:
            raise DownloadFailed(f"{file.name}: wrong checksum", "the hub or a proxy alters it; try another network")
        return text

    def address(self, repo: str, commit: str, name: str) -> str:
        return f"{self.endpoint}/{repo}/resolve/{quote(commit, safe='')}/{quote(name)}"

    def read_range(self, repo: str, commit: str, file: RemoteFile, begin: int, end: int) -> bytes:
        """A small part of a large file."""

        def attempt() -> bytes:
            try:
                response = self.open_range(repo, commit, file, begin, end)
            except RestartFile as error:
                raise DownloadFailed(f"{file.name}: {error.reason}", RESUME_HINT) from error
            try:
                text = response.read(end - begin)
            finally:
                response.close()
            if len(text) < end - begin:
                raise ConnectionFailed("the response ended early")
            return text

        return self._with_retries(attempt)

    def _fetch(self, address: str, repo: str, limit: int) -> bytes:
        def attempt() -> bytes:
            response, _ = self._follow_redirects(address)
            try:
                self._raise_for_status(response, repo)
                text = response.read(limit)
                if response.remaining and len(text) < limit:
                    raise ConnectionFailed("the response ended early")
                if "html" in (response.header("Content-Type") or ""):
                    raise self._not_the_hub(text)
                return text
            finally:
                response.close()

        return self._with_retries(attempt)

    def _with_retries(self, attempt: Callable[[], bytes]) -> bytes:
        failures = 0
        while True:
            try:
                return attempt()
            except (ConnectionFailed, RetryLater) as error:
                failures += 1
                retry_after_s = error.after if isinstance(error, RetryLater) else None
                can_retry = not isinstance(error, ConnectionFailed) or error.again
                if not can_retry or failures >= min(3, self.backoff.attempts) or (retry_after_s or 0) > self.backoff.patience:
                    raise (self._busy(error) if isinstance(error, RetryLater) else self._unreachable(error)) from error
                time.sleep(self.backoff.delay(failures, retry_after_s))

    def _busy(self, error: RetryLater) -> DownloadFailed:
        more = "" if self.has_token else "; requests with a token (hf auth login) have a higher limit"
        if error.after is None:
            return DownloadFailed(f"the hub is unavailable ({error.reason})", f"run the same command again in a few minutes{more}")
        return DownloadFailed(f"the hub is busy ({error.reason}) and asks to wait {error.after:.0f} s",
                              f"then run the same command again{more}")

    def _unreachable(self, error: ConnectionFailed) -> DownloadFailed:
        return DownloadFailed(f"{self.endpoint} cannot be reached: {error.reason}",
                              error.step or "check the network, HTTPS_PROXY and HF_ENDPOINT; effllm list shows what is here")

    def xet_hash(self, file: RemoteFile) -> str | None:
        """A file's Xet hash, which the hub names in responses for it; None if there is none, or if the environment disables Xet."""
        with self._lock:
            return None if self._without_xet else self._xet.get(file.name)

    # -- ranges of large files -----------------------------------------------------------------------------------------------------

    def open_range(self, repo: str, commit: str, file: RemoteFile, begin: int, end: int) -> Response:
        """The bytes [begin, end) of a file, for `transfer`. The response is checked to be that range of that version of the file."""
        whole = begin == 0 and end == file.size
        byte_range = None if whole else f"bytes={begin}-{end - 1}"
        with self._lock:
            known = self._locations.get(file.name)
        address = known or self.address(repo, commit, file.name)
        if known is None and not whole:
            address = self._locate(address, file, commit)
        response, location = self._follow_redirects(address, file, commit, byte_range)
        try:
            if response.status in (400, 401, 403, 404, 410) and Url.parse(location).origin != self._home.origin:
                with self._lock:
                    self._locations.pop(file.name, None)  # URLs of the storage behind the hub expire
                raise RetryLater(f"the storage behind the hub answered {response.status}")
            if response.status == 416:
                raise RestartFile("it has another length on the server than the hub says")
            self._raise_for_status(response, repo, file.name)
            self._check_range(response, file, begin, end, whole)
        except BaseException:
            response.close()
            raise
        with self._lock:
            self._locations[file.name] = location
        return response

    def _check_range(self, response: Response, file: RemoteFile, begin: int, end: int, whole: bool) -> None:
        if response.status == 200 and "html" in (response.header("Content-Type") or "") and response.remaining != file.size:
            raise self._not_the_hub(b"")
        if response.status == 200 and not whole:
            raise RestartFile("the server sends no ranges", whole=True)
        if response.status == 206:
            content_range = (response.header("Content-Range") or "").removeprefix("bytes ").strip()
            if content_range != f"{begin}-{end - 1}/{file.size}":
                raise RestartFile(f"the server sent {show(content_range)} instead of {begin}-{end - 1}/{file.size}")
        elif response.remaining not in (None, file.size):
            raise RestartFile(f"the server sends {response.remaining} bytes, the hub says {file.size}")
        etag = normal_etag(response.header("ETag"))
        if etag is not None:
            with self._lock:
                etags = self._etags.setdefault(file.name, [etag])
                is_new, is_old = etag not in etags, etag in etags[:-1]
                if is_new:
                    etags.append(etag)
            if is_old:  # sent before the file changed, or by a mirror that does not have the change yet
                raise RetryLater("the server sent the version of before")
            if is_new:
                raise RestartFile("it changed on the server")

    def _locate(self, address: str, file: RemoteFile, commit: str) -> str:
        """The URL of a file's bytes, requested without a range: a URL that is signed for one range may be valid for that range only."""
        for _ in range(MAX_REDIRECTS):
            response, target = self._request("HEAD", address, file, commit, None)
            response.close()
            if target is None or Url.parse(target).origin != self._home.origin:
                return target or address
            address = target
        raise ConnectionFailed("too many redirects", again=False)

    def _follow_redirects(self, address: str, file: RemoteFile | None = None, commit: str = "",
                          byte_range: str | None = None) -> tuple[Response, str]:
        """The final response, and its URL."""
        for _ in range(MAX_REDIRECTS):
            response, target = self._request("GET", address, file, commit, byte_range)
            if target is None:
                return response, address
            response.close()
            address = target
        raise ConnectionFailed("too many redirects", again=False)

    def _request(self, method: str, address: str, file: RemoteFile | None, commit: str,
                 byte_range: str | None) -> tuple[Response, str | None]:
        """One request: (response, target of its redirect or None). The token is sent only to the hub's own origin."""
        url = Url.parse(address)
        at_home = url.origin == self._home.origin
        headers = {"Range": byte_range} if byte_range else {}
        if self._token and at_home:
            headers["Authorization"] = f"Bearer {self._token}"
        response = self.network.request(method, url, headers)
        try:
            if file is not None and at_home and response.status < 400:
                check_version(response, file, commit)
                if (value := response.header("X-Xet-Hash")) is not None:
                    with self._lock:
                        self._xet[file.name] = value.strip().lower()
            location = response.header("Location")
            if response.status not in REDIRECTS or not location:
                return response, None
            if response.remaining:
                response.read(MAX_ERROR_NBYTES)
            target = redirected(url, address, location)
            if url.scheme == "https" and not target.startswith("https:"):
                raise ConnectionFailed(f"{url.authority} redirects to an unencrypted URL", again=False)
            return response, target
        except BaseException:
            response.close()
            raise

    # -- errors --------------------------------------------------------------------------------------------------------------------

    def _raise_for_status(self, response: Response, repo: str, name: str = "") -> None:
        """Raises the error that the hub's headers and status mean, unless the response is a success."""
        status, code = response.status, response.header("X-Error-Code") or ""
        if status in (200, 206):
            return
        message = response.header("X-Error-Message") or ""
        if status in BUSY:
            raise RetryLater("too many requests" if status == 429 else f"the server answered {status}",
                           retry_after(response.header("Retry-After"), moment(response.header("Date")) or time.time()))
        if code == "GatedRepo":
            raise self.gated(repo)
        if code == "RevisionNotFound":
            raise ModelNotFound(f"{repo} has no such revision", f"its branches and tags are at {self.page(repo)}/tree/main")
        if code == "EntryNotFound" or status == 404 and not code and name:
            raise NoSuchFile(f"{repo} has no file {name or 'of that name'}", f"its files are at {self.page(repo)}/tree/main")
        if "Invalid credentials" in message or status == 401 and self.has_token and code != "RepoNotFound":
            raise ModelNotFound(f"the hub rejected the configured token (for {repo})", "hf auth login, or unset HF_TOKEN")
        if "disabled" in message.lower():
            raise ModelNotFound(f"{repo} was disabled by the hub", "choose another model: effllm list --all")
        if code == "RepoNotFound" or status in (401, 404):
            private = "the token may not see it" if self.has_token else "a private one needs hf auth login"
            raise NoSuchRepository(f"{self._home.authority} shows no repository {show(repo)}: it does not exist, or it is private",
                                   f"check the spelling; {private}")
        if status == 403:
            raise ModelNotFound(f"this token has no access to {repo}", f"see {self.page(repo)}, then hf auth login")
        if status == 407:
            raise DownloadFailed("the proxy asks for a name and password", CREDENTIAL)
        raise DownloadFailed(f"the hub answered {status} for {name or repo}{': ' + show(message) if message else ''}", RESUME_HINT)

    def gated(self, repo: str) -> Gated:
        hint = f"ask for access at {self.page(repo)}"
        return Gated(f"{repo} is gated: its authors ask for consent" + (", and this token has none yet" if self.has_token else ""),
                     hint if self.has_token else f"{hint}, then hf auth login")

    def _not_the_hub(self, text: bytes) -> DownloadFailed:
        received = "a web page" if b"<" in text[:200] or not text else "something else"
        return DownloadFailed(f"{self._home.authority} answered with {received} instead of a model: "
                              "a sign-in page of the network, or a proxy",
                              "open a page in a browser to sign in to the network, or check HTTPS_PROXY and HF_ENDPOINT")


def redirected(url: Url, address: str, location: str) -> str:
    """The absolute URL of a redirect to `location`. Raises ConnectionFailed if it is not a valid http or https URL."""
    try:
        target = urljoin(address, location)
        Url.parse(target)
    except (ValueError, ConnectionFailed):  # urljoin raises ValueError for unclosed brackets
        raise ConnectionFailed(f"{url.authority} redirects to something other than an http or https URL", again=False) from None
    return target


def check_version(response: Response, file: RemoteFile, commit: str) -> None:
    """Raises RestartFile or DownloadFailed if the hub's headers announce another version than the planned one."""
    sent = response.header("X-Repo-Commit")
    if sent is not None and sent != commit:
        raise DownloadFailed(f"the hub sent {file.name} of another version ({show(sent[:12])})", "run the same command again")
    linked = normal_etag(response.header("X-Linked-Etag"))
    if file.is_lfs and linked not in (None, file.etag):
        raise RestartFile("it changed on the hub")


def normal_etag(text: str | None) -> str | None:
    return text.removeprefix("W/").strip('"') if text else None
