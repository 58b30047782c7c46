"""A hub behind TLS, as the public one is, through CONNECT proxies."""

import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_server import Hub, running
from hub_user import HubUser, on_disk, tiny

REPO = "org/name"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One that nobody trusts of himself, for the loopback, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hub", "-addext",
                    "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
                   check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
def hub(certificate: tuple[Path, Path]) -> Iterator[Hub]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    with running(tls=context) as hub:
        hub.add(REPO, files=tiny())
        yield hub


@pytest.fixture
def user(hub: Hub, tmp_path: Path) -> HubUser:
    return HubUser(tmp_path, hub.endpoint)


@pytest.fixture
def trusted(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))


@contextmanager
def proxy(credential: str = "") -> Iterator[tuple[str, list[str]]]:
    """Its address, and the first lines of what was asked of it; with a `credential`, what it demands."""
    asked: list[str] = []

    class Tunnel(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            first, *more = iter(lambda: self.rfile.readline().decode().strip(), "")
            asked.append(first)
            if credential and f"Proxy-Authorization: {credential}" not in more:
                self.wfile.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            host, _, port = first.split()[1].rpartition(":")
            with socket.create_connection((host, int(port))) as far:
                self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=pump, args=(far, self.connection), daemon=True)
                back.start()
                pump(self.connection, far)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(1 << 16):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the other side has gone


def test_a_pull_through_a_proxy_that_asks_for_a_name(hub: Hub, user: HubUser, trusted: None) -> None:
    with proxy("Basic bWU6cGEgc3M=") as (address, asked):
        ran = user.run("pull", REPO, "--json", HTTPS_PROXY=f"http://me:pa%20ss@{address}")
        assert on_disk(user.snapshot(REPO, ran.json["plan"]["revision"])) == hub.repos[REPO].files
        ports = {request.split()[1].rpartition(":")[2] for request in asked}
        assert all(line.startswith("CONNECT 127.0.0.1:") for line in asked)
        assert ports == {address.rpartition(":")[2] for address in (hub.endpoint, hub.storage)}, "the storage behind the hub too"
        said = user.run("pull", "org/other", HTTPS_PROXY=f"http://{address}").refused(6)
        assert "asks for a name and password" in said and "http://name:password@host:port" in said


def test_a_certificate_that_is_not_trusted_is_reported_with_what_would_make_it_so(user: HubUser) -> None:
    said = user.run("pull", REPO).refused(6)
    assert "certificate is not trusted" in said and "SSL_CERT_FILE" in said


def test_a_pull_without_a_proxy_and_around_one(hub: Hub, user: HubUser, trusted: None) -> None:
    with proxy() as (address, asked):
        assert user.run("pull", REPO, HTTPS_PROXY=f"http://{address}", NO_PROXY="127.0.0.1").code == 0 and not asked
    assert user.run("rm", REPO, "-y").code == 0 and user.run("pull", REPO).code == 0


def test_a_hub_behind_tls_never_sends_on_to_an_address_without(hub: Hub, user: HubUser, trusted: None) -> None:
    hub.storage = hub.storage.replace("https", "http")
    assert "unencrypted" in user.run("pull", REPO).refused(6)
