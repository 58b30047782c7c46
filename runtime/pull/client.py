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
MOST_REDIRECTS = 8
LARGEST_INFO, LARGEST_ERROR = 16 << 20, 16 << 10
GO_ON = "run the same command again; the partial download is kept"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at a commit. `etag` names its blob in the cache; `is_lfs`: the digest is sha256 of its bytes."""

    name: str
    size: int
    etag: str
    is_lfs: bool

    @property
    def digest(self) -> Digest:
        return Digest("sha256" if self.is_lfs else "git-sha1", self.etag)


class NoSuchFile(ModelNotFound):
    """The repository has no file of that name."""


class NoSuchRepository(ModelNotFound):
    """The hub shows none of that name: there is none, or it is private, which hubs do not tell apart."""


class Gated(ModelNotFound):
    """The repository asks for consent first."""


def is_true(text: str | None) -> bool:
    return (text or "").strip().upper() in ("1", "ON", "YES", "TRUE")


def is_offline(env: Mapping[str, str]) -> bool:
    return is_true(env.get("HF_HUB_OFFLINE") or env.get("TRANSFORMERS_OFFLINE"))


def find_token(env: Mapping[str, str]) -> str | None:
    """The person's token: of the environment, else of the file that `hf auth login` writes."""
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
        self._places: dict[str, str] = {}  # where a file's bytes are, once a redirect has told
        self._tags: dict[str, list[str]] = {}  # those that its bytes came with, one after another
        self._xet: dict[str, str] = {}  # its hash in Xet, where the hub keeps it so
        self._without_xet = is_true(env.get("HF_HUB_DISABLE_XET"))  # who sets it wants that library nowhere
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

    # -- small answers -----------------------------------------------------------------------------------------------------------

    def json(self, path: str, repo: str) -> tuple[dict[str, object], int]:
        """An object of the API, and the bytes that it took. `repo` is for errors."""
        return self._parsed(path, repo, dict)

    def objects(self, path: str, what: str) -> list[dict[str, object]]:
        """A list of objects of the API. `what` is for errors."""
        return [each for each in self._parsed(path, what, list)[0] if isinstance(each, dict)]

    def _parsed(self, path: str, what: str, kind: type) -> tuple[Any, int]:
        text = self._fetch(f"{self.endpoint}{path}", what, LARGEST_INFO + 1)
        if len(text) > LARGEST_INFO:
            raise DownloadFailed(f"what the hub lists of {what} is longer than {LARGEST_INFO >> 20} MiB, and is not read to its end",
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
        running = new_hash(file.digest, len(text))
        running.update(text)
        if running.hexdigest() != file.etag:
            raise DownloadFailed(f"{file.name}: wrong checksum", "the hub or a proxy alters it; try another network")
        return text

    def address(self, repo: str, commit: str, name: str) -> str:
        return f"{self.endpoint}/{repo}/resolve/{quote(commit, safe='')}/{quote(name)}"

    def read_range(self, repo: str, commit: str, file: RemoteFile, begin: int, end: int) -> bytes:
        """A small part of a large file."""

        def once() -> bytes:
            try:
                response = self.open_range(repo, commit, file, begin, end)
            except RestartFile as error:
                raise DownloadFailed(f"{file.name}: {error.reason}", GO_ON) from error
            try:
                text = response.read(end - begin)
            finally:
                response.close()
            if len(text) < end - begin:
                raise ConnectionFailed("the response ended early")
            return text

        return self._patiently(once)

    def _fetch(self, address: str, repo: str, limit: int) -> bytes:
        def once() -> bytes:
            response, _ = self._follow(address)
            try:
                self._judge(response, repo)
                text = response.read(limit)
                if response.remaining and len(text) < limit:
                    raise ConnectionFailed("the response ended early")
                if "html" in (response.header("Content-Type") or ""):
                    raise self._not_the_hub(text)
                return text
            finally:
                response.close()

        return self._patiently(once)

    def _patiently(self, once: Callable[[], bytes]) -> bytes:
        failures = 0
        while True:
            try:
                return once()
            except (ConnectionFailed, RetryLater) as error:
                failures += 1
                asked = error.after if isinstance(error, RetryLater) else None
                again = not isinstance(error, ConnectionFailed) or error.again
                if not again or failures >= min(3, self.backoff.attempts) or (asked or 0) > self.backoff.patience:
                    raise (self._busy(error) if isinstance(error, RetryLater) else self._unreachable(error)) from error
                time.sleep(self.backoff.delay(failures, asked))

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
        """What the hub has named beside a file's digest, in the answers to requests for it; None where a person does without."""
        with self._lock:
            return None if self._without_xet else self._xet.get(file.name)

    # -- ranges of large files -----------------------------------------------------------------------------------------------------

    def open_range(self, repo: str, commit: str, file: RemoteFile, begin: int, end: int) -> Response:
        """The bytes [begin, end) of a file, as `transfer` wants them: checked to be that range of that version of that file."""
        whole = begin == 0 and end == file.size
        span = None if whole else f"bytes={begin}-{end - 1}"
        with self._lock:
            known = self._places.get(file.name)
        address = known or self.address(repo, commit, file.name)
        if known is None and not whole:
            address = self._locate(address, file, commit)
        response, place = self._follow(address, file, commit, span)
        try:
            if response.status in (400, 401, 403, 404, 410) and Url.parse(place).origin != self._home.origin:
                with self._lock:
                    self._places.pop(file.name, None)  # addresses of the storage behind the hub expire
                raise RetryLater(f"the storage behind the hub answered {response.status}")
            if response.status == 416:
                raise RestartFile("it has another length on the server than the hub says")
            self._judge(response, repo, file.name)
            self._check_range(response, file, begin, end, whole)
        except BaseException:
            response.close()
            raise
        with self._lock:
            self._places[file.name] = place
        return response

    def _check_range(self, response: Response, file: RemoteFile, begin: int, end: int, whole: bool) -> None:
        if response.status == 200 and "html" in (response.header("Content-Type") or "") and response.remaining != file.size:
            raise self._not_the_hub(b"")
        if response.status == 200 and not whole:
            raise RestartFile("the server sends no ranges", whole=True)
        if response.status == 206:
            said = (response.header("Content-Range") or "").removeprefix("bytes ").strip()
            if said != f"{begin}-{end - 1}/{file.size}":
                raise RestartFile(f"the server sent {show(said)} instead of {begin}-{end - 1}/{file.size}")
        elif response.remaining not in (None, file.size):
            raise RestartFile(f"the server sends {response.remaining} bytes, the hub says {file.size}")
        tag = normal_etag(response.header("ETag"))
        if tag is not None:
            with self._lock:
                seen = self._tags.setdefault(file.name, [tag])
                is_new, is_old = tag not in seen, tag in seen[:-1]
                if is_new:
                    seen.append(tag)
            if is_old:  # on its way when the file changed, or from where the change has not come
                raise RetryLater("the server sent the version of before")
            if is_new:
                raise RestartFile("it changed on the server")

    def _locate(self, address: str, file: RemoteFile, commit: str) -> str:
        """Where a file's bytes are, asked without a range: an address that is given for one range might be good for that alone."""
        for _ in range(MOST_REDIRECTS):
            response, target = self._ask("HEAD", address, file, commit, None)
            response.close()
            if target is None or Url.parse(target).origin != self._home.origin:
                return target or address
            address = target
        raise ConnectionFailed("too many redirects", again=False)

    def _follow(self, address: str, file: RemoteFile | None = None, commit: str = "", span: str | None = None) -> tuple[Response, str]:
        """The answer behind all redirects, and its address."""
        for _ in range(MOST_REDIRECTS):
            response, target = self._ask("GET", address, file, commit, span)
            if target is None:
                return response, address
            response.close()
            address = target
        raise ConnectionFailed("too many redirects", again=False)

    def _ask(self, method: str, address: str, file: RemoteFile | None, commit: str, span: str | None) -> tuple[Response, str | None]:
        """One request: the answer, and where it sends on to. The token goes to the hub's own origin alone."""
        url = Url.parse(address)
        at_home = url.origin == self._home.origin
        own = {"Range": span} if span else {}
        if self._token and at_home:
            own["Authorization"] = f"Bearer {self._token}"
        response = self.network.request(method, url, own)
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
                response.read(LARGEST_ERROR)
            target = redirected(url, address, location)
            if url.scheme == "https" and not target.startswith("https:"):
                raise ConnectionFailed(f"{url.authority} redirects to an unencrypted URL", again=False)
            return response, target
        except BaseException:
            response.close()
            raise

    # -- what an answer means ------------------------------------------------------------------------------------------------------

    def _judge(self, response: Response, repo: str, name: str = "") -> None:
        """Nothing for success; else the error that the hub's headers and status spell."""
        status, code = response.status, response.header("X-Error-Code") or ""
        if status in (200, 206):
            return
        said = response.header("X-Error-Message") or ""
        if status in BUSY:
            raise RetryLater("too many requests" if status == 429 else f"the server answered {status}",
                           retry_after(response.header("Retry-After"), moment(response.header("Date")) or time.time()))
        if code == "GatedRepo":
            raise self.gated(repo)
        if code == "RevisionNotFound":
            raise ModelNotFound(f"{repo} has no such revision", f"its branches and tags are at {self.page(repo)}/tree/main")
        if code == "EntryNotFound" or status == 404 and not code and name:
            raise NoSuchFile(f"{repo} has no file {name or 'of that name'}", f"its files are at {self.page(repo)}/tree/main")
        if "Invalid credentials" in said or status == 401 and self.has_token and code != "RepoNotFound":
            raise ModelNotFound(f"the hub rejected the configured token (for {repo})", "hf auth login, or unset HF_TOKEN")
        if "disabled" in said.lower():
            raise ModelNotFound(f"{repo} was disabled by the hub", "choose another model: effllm list --all")
        if code == "RepoNotFound" or status in (401, 404):
            private = "the token may not see it" if self.has_token else "a private one needs hf auth login"
            raise NoSuchRepository(f"{self._home.authority} shows no repository {show(repo)}: it does not exist, or it is private",
                                   f"check the spelling; {private}")
        if status == 403:
            raise ModelNotFound(f"this token has no access to {repo}", f"see {self.page(repo)}, then hf auth login")
        if status == 407:
            raise DownloadFailed("the proxy asks for a name and password", CREDENTIAL)
        raise DownloadFailed(f"the hub answered {status} for {name or repo}{': ' + show(said) if said else ''}", GO_ON)

    def gated(self, repo: str) -> Gated:
        step = f"ask for access at {self.page(repo)}"
        return Gated(f"{repo} is gated: its authors ask for consent" + (", and this token has none yet" if self.has_token else ""),
                     step if self.has_token else f"{step}, then hf auth login")

    def _not_the_hub(self, text: bytes) -> DownloadFailed:
        web = "a web page" if b"<" in text[:200] or not text else "something else"
        return DownloadFailed(f"{self._home.authority} answered with {web} instead of a model: a sign-in page of the network, or a proxy",
                              "open a page in a browser to sign in to the network, or check HTTPS_PROXY and HF_ENDPOINT")


def redirected(url: Url, address: str, location: str) -> str:
    """The address that an answer of `url` sends on to. Raises ConnectionFailed where it can never be reached."""
    try:
        target = urljoin(address, location)
        Url.parse(target)
    except (ValueError, ConnectionFailed):  # brackets that are never closed are an error already when the two are joined
        raise ConnectionFailed(f"{url.authority} redirects to something other than an http or https URL", again=False) from None
    return target


def check_version(response: Response, file: RemoteFile, commit: str) -> None:
    """The hub's own headers say which version it is about to send. Raises RestartFile where it is not the one that was planned."""
    at = response.header("X-Repo-Commit")
    if at is not None and at != commit:
        raise DownloadFailed(f"the hub sent {file.name} of another version ({show(at[:12])})", "run the same command again")
    linked = normal_etag(response.header("X-Linked-Etag"))
    if file.is_lfs and linked not in (None, file.etag):
        raise RestartFile("it changed on the hub")


def normal_etag(text: str | None) -> str | None:
    return text.removeprefix("W/").strip('"') if text else None
