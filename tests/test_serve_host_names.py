"""Host names of a server on the network without a key: those of the local network are answered, a site's own name is not."""

import pytest
from server_process import ServerProcess, serving
from starlette.datastructures import Headers

from effllm.cli.server.guard import AccessRules, is_local_name


@pytest.fixture(scope="module")
def server():
    with serving("--host", "0.0.0.0", "--cors", "https://chat.example") as served:
        yield served


@pytest.mark.parametrize("name", ["192.168.1.20", "[fe80::1]", "[::1]", "127.0.0.1", "localhost", "desk", "DESK.local", "desk.local.",
                                  "desk.lan", "desk.home", "desk.home.arpa", "host.docker.internal", "effllm.default.svc.cluster.local",
                                  "chat.example"])
def test_names_of_the_local_network_are_answered(server: ServerProcess, name: str) -> None:
    for host in (name, f"{name}:{server.port}"):
        assert server.request("GET", "/v1/models", host=host).status == 200, host


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "desk.local.evil.example", "notlocal.com", "x.lan.io"])
def test_a_sites_name_that_leads_here_is_refused(server: ServerProcess, name: str) -> None:
    """Its page would be of the same origin as this server, whose answers it could read."""
    host = f"{name}:{server.port}"
    refused = server.request("GET", "/v1/models", host=host, origin=f"http://{host}")
    assert refused.status == 403 and refused.error["code"] == "host_not_allowed" and f"--cors http://{host}" in refused.error["message"]
    assert server.request("GET", "/health", host=host).status == 403


def test_the_machines_own_names_and_a_key() -> None:
    def is_refused(rules: AccessRules, host: str) -> bool:
        return rules.refused("/health", Headers({"host": host})) is not None

    own = AccessRules(False, names=("box.example",))
    assert not is_refused(own, "box.example:80") and not is_refused(own, "BOX.example.") and is_refused(own, "a.box.example")
    assert not is_refused(AccessRules(False, key="k"), "evil.example"), "its page has no key"
    assert not is_refused(AccessRules(False, origins=("*",)), "evil.example"), "every page is allowed"
    assert AccessRules(False).refused("/", Headers({})) is None, "HTTP/1.0 has no Host, and no browser speaks it"
    assert not is_local_name("") and is_local_name("fe80::1%eth0") and not is_local_name("1.2.3.4.5")
