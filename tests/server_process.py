"""`effllm serve` as a separate process, and a client for it that sees every byte."""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

QUESTION = "Tell me a story about the fox and the king."
MESSAGES = [{"role": "user", "content": QUESTION}]
MINUTE = 60


def wait_until(condition: Callable[[], object], seconds: float = MINUTE,
               message: Callable[[], object] = lambda: "the condition never became true") -> None:
    """Wait for a condition; with a timeout generous enough for a busy machine, so no test should rely on its expiry."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, message()
        time.sleep(0.02)


class Reply:
    """A response read to its end."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object in OpenAI's format."""
        error = self.json["error"]
        assert set(self.json) == {"error"} and set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
        return error

    @property
    def events(self) -> list[Any]:
        """The objects of a stream, checking that it is terminated."""
        lines = [line for line in self.body.decode().split("\n") if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @property
    def named_events(self) -> list[Any]:
        """The objects of a stream of named events, checking their names."""
        blocks = [[line for line in block.split("\n") if line and line[0] != ":"] for block in self.body.decode().split("\n\n")]
        events = []
        for name, data in filter(None, blocks):
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


class ServerProcess:
    """A running server. `err` is its terminal output so far."""

    def __init__(self, process: subprocess.Popen, stderr: Any) -> None:
        self.process, self._stderr = process, stderr
        self.said = json.loads(process.stdout.readline())
        self.url, self.port = self.said["url"], int(self.said["url"].rsplit(":", 1)[1].removesuffix("/v1"))

    @property
    def err(self) -> str:
        file = self._stderr.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()  # the server writes where the last one who moved left the place

    def open(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """Send a request whose response is yet to be read. A body given as bytes is sent unchanged."""
        connection = self.open_later(method, path, body, **headers)
        response = connection.getresponse()
        response.connection = connection  # kept open as long as it
        return response

    def open_later(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        """Send a request whose response is yet to come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=MINUTE)
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, sent, {"Content-Type": "application/json", **named})
        return connection

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        response = self.open(method, path, body, **headers)
        try:
            return Reply(response.status, dict(response.headers), response.read())
        finally:
            response.connection.close()

    def chat(self, messages: Any = MESSAGES, **fields: Any) -> Reply:
        return self.request("POST", "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 24, **fields})

    def complete(self, prompt: Any = "Once upon a time", **fields: Any) -> Reply:
        return self.request("POST", "/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 24, **fields})

    def respond(self, input: Any = QUESTION, **fields: Any) -> Reply:
        return self.request("POST", "/v1/responses", {"input": input, "temperature": 0, "max_output_tokens": 24, **fields})

    def message(self, messages: Any = MESSAGES, path: str = "/v1/messages", **fields: Any) -> Reply:
        return self.request("POST", path, {"messages": messages, "temperature": 0, "max_tokens": 24, **fields})

    def wait_for_output(self, message: str, seconds: float = MINUTE) -> None:
        """Wait for a line of terminal output."""
        wait_until(lambda: message in self.err, seconds, lambda: self.err)


def start_server(*flags: str, model: str | None = "fable", **variables: str) -> tuple[subprocess.Popen, Any]:
    """`model` None serves all local models."""
    stderr = tempfile.TemporaryFile("a+b")
    model_argument = [] if model is None else [model]
    process = subprocess.Popen([sys.executable, "-P", "-m", "effllm", "serve", *model_argument, "--port", "0", "--json", *flags],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, **variables})
    return process, stderr


@contextmanager
def serving(*flags: str, model: str | None = "fable", **variables: str) -> Iterator[ServerProcess]:
    process, stderr = start_server(*flags, model=model, **variables)
    try:
        yield ServerProcess(process, stderr)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        stderr.close()
