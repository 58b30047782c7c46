"""A model hub on the loopback: the API, files behind a redirect to storage on another port, and every failure mode.

It speaks huggingface_hub's protocol, which tests/test_pull.py checks with that library. `requests` holds every request with its headers,
`served` counts bytes of bodies by file name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".gguf", ".bin", "tokenizer.json")
CHUNK_NBYTES = 64 << 10


@dataclass
class Repo:
    """Files by name. `gate` is the token that opens it; `renamed_to` sends on."""

    files: dict[str, bytes]
    branches: tuple[str, ...] = ("main",)
    gate: str | None = None
    private: bool = False
    renamed_to: str | None = None
    licence: str = "apache-2.0"
    downloads: int = 1
    gguf: dict[str, object] | None = None  # what the hub says of its files' header
    task: str = "text-generation"

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + sha256(content))
        return digest.hexdigest()


@dataclass
class Request:
    port: int
    method: str
    path: str
    headers: dict[str, str]

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


def reported_config(repo: Repo) -> dict[str, object] | None:
    """The subset of a config that a hub reports."""
    raw = json.loads(repo.files.get("config.json", b"null"))
    wanted = ("architectures", "model_type", "quantization_config")
    return {key: raw[key] for key in wanted if key in raw} if isinstance(raw, dict) else None


def reported_parameters(repo: Repo) -> dict[str, object] | None:
    """Parameter counts by dtype over all safetensors files, from their headers."""
    counts: Counter = Counter()
    for name, content in repo.files.items():
        if name.endswith(".safetensors"):
            for key, tensor in json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).items():
                if key != "__metadata__":
                    counts[tensor["dtype"]] += math.prod(tensor["shape"])
    return {"parameters": dict(counts), "total": sum(counts.values())} if counts else None


def etag(name: str, content: bytes) -> str:
    if name.endswith(LFS_SUFFIXES):
        return sha256(content).hex()
    return git_sha1(content)


@lru_cache(16)
def sha256(content: bytes) -> bytes:
    """Cached: a large file is requested in many ranges."""
    return hashlib.sha256(content).digest()


@lru_cache(16)
def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@lru_cache(16)
def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def xet_hash(content: bytes) -> str:
    """As the library that hubs are filled with computes it; in a process of its own, for it catches Ctrl-C and logs."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        command = [sys.executable, "-c", "import hf_xet, sys; print(hf_xet.hash_files(sys.argv[1:])[0].hash)", file.name]
        env = os.environ | {"HF_XET_LOG_DEST": os.devnull}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


# What a request gets instead of its answer: (status, headers, body), or None for the usual one.
Reply = tuple[int, dict[str, str], bytes]
Disturbance = Callable[[Request], Reply | None]


@dataclass
class Hub:
    """`disturb` is asked first on every request; `cut_after` bytes of a body, connections break for `cuts` times; `rate` bytes a second and
    connection slow the storage down; `ranges` False ignores them; `direct`: no storage behind; `swap` changes bytes of a file on the way,
    `tags` its ETag; `xet` names its hash in Xet."""

    repos: dict[str, Repo] = field(default_factory=dict)
    disturb: Disturbance | None = None
    cut_after: int | None = None
    cuts: int = 0
    rate: float | None = None
    ranges: bool = True
    direct: bool = False
    swap: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, Iterator[str]] = field(default_factory=dict)
    xet: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    served: Counter = field(default_factory=Counter)
    endpoint: str = ""
    storage: str = ""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def add(self, repo: str, folder: Path | None = None, **more: object) -> Repo:
        files = dict(more.pop("files", {}))
        if folder is not None:
            files |= {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.repos[repo] = Repo(files, **more)
        return self.repos[repo]

    def requests_for(self, word: str) -> list[Request]:
        return [request for request in self.requests if word in request.path]

    def forget(self) -> None:
        self.requests.clear()
        self.served.clear()


@contextmanager
def running(hub: Hub | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Hub]:
    """Two ports: the hub, and the storage it redirects to; with `tls` both use TLS, as hubs do."""
    hub = hub or Hub()
    servers = []
    for _ in range(2):
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
        server.daemon_threads = True
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
    hub.endpoint, hub.storage = (f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}" for server in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        request = Request(self.server.server_address[1], self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        with self.hub.lock:
            self.hub.requests.append(request)
            disturbed = self.hub.disturb(request) if self.hub.disturb else None
        if disturbed is not None:
            self.send(*disturbed, body)
            return
        path = unquote(urlsplit(self.path).path)
        words = path.strip("/").split("/")
        if self.hub.storage.endswith(f":{request.port}"):
            self.send_file("/".join(words[:2]), "/".join(words[2:]), {}, request, body)
        elif words[:2] == ["api", "models"] and words[4:5] == ["tree"]:
            self.list_tree("/".join(words[2:4]), request, body)
        elif words == ["api", "models"]:
            self.search(parse_qs(urlsplit(self.path).query), body)
        elif words[:2] == ["api", "models"]:
            self.describe("/".join(words[2:4]), words[5] if len(words) > 5 else "main", request, body)
        elif len(words) > 4 and words[2] == "resolve":
            self.resolve("/".join(words[:2]), words[3], "/".join(words[4:]), request, body)
        else:
            self.fail(404, "RepoNotFound", "Repository not found", body)

    # -- the hub -----------------------------------------------------------------------------------------------------------------

    def describe(self, name: str, revision: str, request: Request, body: bool) -> None:
        repo = self.allowed(name, request, body, metadata=True)
        if repo is None:
            return
        if revision not in (*repo.branches, repo.commit):
            return self.fail(404, "RevisionNotFound", "Invalid rev id", body)
        siblings = []
        for file, content in repo.files.items():
            sibling = {"rfilename": file, "size": len(content), "blobId": git_sha1(content)}
            if file.endswith(LFS_SUFFIXES):
                sibling["lfs"] = {"sha256": etag(file, content), "size": len(content), "pointerSize": 134}
            siblings.append(sibling)
        value = {"id": name, "modelId": name, "sha": repo.commit, "private": repo.private, "disabled": False,
                 "gated": "manual" if repo.gate else False, "downloads": 1, "likes": 1, "tags": [f"license:{repo.licence}"],
                 "cardData": {"license": repo.licence}, "siblings": siblings, "lastModified": "2026-01-01T00:00:00.000Z"}
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode(), body)

    def search(self, query: dict[str, list[str]], body: bool) -> None:
        """Of each repository whose name holds all words its name, and what `expand` asks for."""
        results, words = [], query.get("search", [""])[0].lower().split()
        for name, repo in self.hub.repos.items():
            task = query.get("pipeline_tag", [repo.task])[0]
            if repo.private or repo.task != task or not all(word in name.lower() for word in words):
                continue
            facts = {"config": reported_config(repo), "safetensors": reported_parameters(repo), "gguf": repo.gguf,
                     "downloads": repo.downloads, "likes": 1,
                     "gated": "manual" if repo.gate else False, "tags": [f"license:{repo.licence}"]}
            details = {key: facts[key] for key in query.get("expand", []) if facts[key] is not None}
            results.append({"_id": repo.commit[:24], "id": name, **details})
        if query.get("sort") == ["downloads"]:
            results.sort(key=lambda result: -self.hub.repos[result["id"]].downloads)
        answer = results[: int(query["limit"][0])] if "limit" in query else results
        self.send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode(), body)

    def list_tree(self, name: str, request: Request, body: bool) -> None:
        """What `snapshot_download` of newer libraries asks for."""
        repo = self.allowed(name, request, body, metadata=True)
        if repo is not None:
            entries = [{"type": "file", "path": file, "size": len(content), "oid": etag("", content)}
                       | ({"lfs": {"oid": etag(file, content), "size": len(content), "pointerSize": 134}} if file.endswith(LFS_SUFFIXES)
                          else {}) for file, content in repo.files.items()]
            self.send(200, {"Content-Type": "application/json"}, json.dumps(entries).encode(), body)

    def allowed(self, name: str, request: Request, body: bool, metadata: bool = False) -> Repo | None:
        """The repository, or None after the answer that refuses it."""
        repo, token = self.hub.repos.get(name), request.headers.get("authorization", "").removeprefix("Bearer ")
        if token == "expired":
            self.fail(401, "", "Invalid credentials in Authorization header", body)
        elif repo is None or repo.private and token != repo.gate:
            self.fail(404 if token else 401, "RepoNotFound" if token else "", "Repository not found", body)
        elif repo.renamed_to:
            self.send(307, {"Location": self.path.replace(name, repo.renamed_to, 1)}, b"", body)
        elif repo.gate and not metadata and token != repo.gate:
            self.fail(403 if token else 401, "GatedRepo", "Access to model is restricted", body)
        else:
            return repo
        return None

    def resolve(self, name: str, revision: str, file: str, request: Request, body: bool) -> None:
        repo = self.allowed(name, request, body)
        if repo is None:
            return
        if revision not in (*repo.branches, repo.commit):
            return self.fail(404, "RevisionNotFound", "Invalid rev id", body)
        if file not in repo.files:
            return self.fail(404, "EntryNotFound", "Entry not found", body)
        content = repo.files[file]
        headers = {"X-Repo-Commit": repo.commit}
        if file.endswith(LFS_SUFFIXES) and not self.hub.direct:
            headers |= {"X-Linked-Etag": f'"{etag(file, content)}"', "X-Linked-Size": str(len(content)),
                        "Location": f"{self.hub.storage}/{name}/{file}?signed=yes"}
            if file in self.hub.xet:
                headers["X-Xet-Hash"] = self.hub.xet[file]
            self.send(302, headers, b"", body)
        else:
            self.send_file(name, file, headers | {"ETag": f'"{etag(file, content)}"'}, request, body)

    # -- bytes -------------------------------------------------------------------------------------------------------------------

    def send_file(self, name: str, file: str, headers: dict[str, str], request: Request, body: bool) -> None:
        content = self.hub.swap.get(file, self.hub.repos[name].files[file])
        tag = next(self.hub.tags[file]) if file in self.hub.tags else md5(content)
        headers = {"ETag": f'"{tag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"} | headers
        begin, end, status = 0, len(content), 200
        if request.range and self.hub.ranges:
            first, _, last = request.range.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), int(last) + 1 if last else end, 206
            if begin >= len(content):
                return self.send(416, {"Content-Range": f"bytes */{len(content)}"}, b"", body)
            end = min(end, len(content))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self.send(status, headers, memoryview(content)[begin:end], body, file)

    def fail(self, status: int, code: str, message: str, body: bool) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.send(status, headers, json.dumps({"error": message}).encode(), body)

    def send(self, status: int, headers: dict[str, str], content: bytes | memoryview, body: bool, file: str = "") -> None:
        try:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.send_body(content, file)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def send_body(self, content: bytes | memoryview, file: str) -> None:
        hub, view = self.hub, memoryview(content)
        for offset in range(0, len(content), CHUNK_NBYTES):
            chunk = view[offset : offset + CHUNK_NBYTES]
            if file and hub.cut_after is not None and offset + len(chunk) > hub.cut_after:
                with hub.lock:
                    cut = hub.cuts > 0
                    hub.cuts -= cut
                if cut:
                    chunk = chunk[: hub.cut_after - offset]
                    self.wfile.write(chunk)
                    self.wfile.flush()
                    hub.served[file] += len(chunk)
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
            self.wfile.write(chunk)
            with hub.lock:
                hub.served[file] += len(chunk)
            if file and hub.rate:
                time.sleep(len(chunk) / hub.rate)


def always(status: int, headers: dict[str, str] | None = None, body: bytes = b"", word: str = "", times: int = 1000) -> Disturbance:
    """Answers requests whose path holds `word`, for a number of times."""
    num_left = [times]

    def disturb(request: Request) -> Reply | None:
        if word not in request.path or not num_left[0]:
            return None
        num_left[0] -= 1
        return status, headers or {}, body

    return disturb
