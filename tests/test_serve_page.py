"""The chat page of `effllm serve`: which files are served to whom. Its behaviour in a browser is in `test_page_in_browser.py`."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, serving

from effllm import __version__

FOLDER = Path(__file__).resolve().parent.parent / "cli" / "server" / "browser"
HTML = "text/html,application/xhtml+xml,*/*;q=0.8"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--api-key", "secret") as server:
        yield server


def test_a_browser_finds_a_page_and_a_program_a_line(server: ServerProcess) -> None:
    page = server.request("GET", "/", accept=HTML)
    assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.body == (FOLDER / "index.html").read_bytes() and page.headers["vary"] == "accept"
    line = server.request("GET", "/", authorization="Bearer secret")
    assert line.headers["content-type"] == "text/plain; charset=utf-8" and line.headers["vary"] == "accept"
    assert b"Ollama is running" in line.body
    assert server.request("GET", "/").status == server.request("GET", "/v1/models", accept=HTML).status == 401
    assert f"http://127.0.0.1:{server.port}/ is the chat page\n" in server.err


@pytest.mark.parametrize(("accept", "kind"), [
    ("application/json", "application/json"), ("application/json; q=0.9", "application/json"), ("*/*", "text/plain; charset=utf-8"),
    ("application/json, text/plain, */*", "text/plain; charset=utf-8"), (HTML, "text/html; charset=utf-8")])
def test_who_asks_for_json_alone_gets_it_and_head_tells_the_same(server: ServerProcess, accept: str, kind: str) -> None:
    """Programs that take text too look for Ollama's words in it."""
    reply = server.request("GET", "/", accept=accept, authorization="Bearer secret")
    assert reply.status == 200 and reply.headers["content-type"] == kind
    if kind == "application/json":
        assert reply.json["status"] == "ok" and "Ollama is running" in reply.json["message"] and reply.json["version"] == __version__
    head = server.request("HEAD", "/", accept=accept, authorization="Bearer secret")
    assert (head.status, head.body) == (200, b"")
    assert {**head.headers, "date": ""} == {**reply.headers, "date": ""}


def test_each_part_is_given_without_a_key_and_may_reach_this_server_alone(server: ServerProcess) -> None:
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
             ".html": "text/html; charset=utf-8"}
    for file in FOLDER.iterdir():
        part = server.request("GET", f"/browser/{file.name}")
        assert part.status == 200 and part.body == file.read_bytes() and part.headers["content-type"] == kinds[file.suffix], file
        policy = dict(each.split(" ", 1) for each in part.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert part.headers["x-content-type-options"] == "nosniff" and part.headers["cache-control"] == "no-cache"
        again = server.request("GET", f"/browser/{file.name}", if_none_match=part.headers["etag"])
        assert again.status == 304 and again.body == b""
    assert "/browser/" not in server.err  # a terminal is told of requests for models


@pytest.mark.parametrize("path", ["/browser/none.js", "/browser/../page.py", "/browser/..%2fpage.py", "/browser/%2fetc%2fpasswd",
                                  "/browser/"])
def test_nothing_else_is_given(server: ServerProcess, path: str) -> None:
    assert server.request("GET", path).status == 404 and server.request("POST", path, {}).status in (404, 405)


def test_foreign_origins_and_host_names_are_refused(server: ServerProcess) -> None:
    assert server.request("GET", "/", accept=HTML, origin="https://elsewhere.example").status == 403
    assert server.request("GET", "/browser/main.js", host="elsewhere.example").status == 403


def test_the_page_names_what_is_there() -> None:
    """Every file is reached from the page, and what scripts and styles name stands in it."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    page, scripts = texts["index.html"], "".join(text for name, text in texts.items() if name.endswith(".js"))
    reached = {*re.findall(r'(?:href|src)="browser/([\w.]+)"', page), *re.findall(r'from "\./([\w.]+)"', scripts), "index.html"}
    assert reached == set(texts)
    ids = set(re.findall(r'\bid="([\w-]+)"', page))
    assert set(re.findall(r'byId\("([\w-]+)"\)', scripts)) <= ids
    fetched = re.search(r"https?://(?!www\.w3\.org/2000/svg)[a-z]", page + texts["icon.svg"] + texts["style.css"])
    assert not fetched, "nothing comes from elsewhere"
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=\"", page + scripts), "no text becomes markup"
    assert all(len(text.splitlines()) <= 400 for text in texts.values())


def test_a_server_can_be_without_it() -> None:
    with serving("--no-webui") as server:
        reply = server.request("GET", "/", accept=HTML)
        assert reply.headers["content-type"] == "text/plain; charset=utf-8" and b"effllm serves fable" in reply.body
        assert server.request("GET", "/browser/main.js").status == 404 and "the chat page" not in server.err


@pytest.mark.slow
def test_a_server_of_several_models_has_it_once() -> None:
    with serving(model=None) as server:
        assert server.request("GET", "/", accept=HTML).body == (FOLDER / "index.html").read_bytes()
        assert server.request("GET", "/browser/api.js").status == 200
        assert server.chat(model="fable").status == 200 and server.err.count("is the chat page") == 1
