"""The configuration file of MCP servers that MCP clients share: `{"mcpServers": {NAME: {…}}}`.

A server is a program (`command`, `args`, `env`, `cwd`) or a URL (`url`, `headers`). Unknown keys are ignored. `${NAME}` and
`${NAME:-default}` expand environment variables, so secrets need not be in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import UsageError
from ..files.bounded_read import read_text

LARGEST = 1 << 20  # bytes
SERVERS = "mcpServers"
EXAMPLE = '{"mcpServers": {"NAME": {"command": "PROGRAM", "args": []}}} is how it is written'
PATIENCE_S, MOST_PATIENCE_S = 60.0, 3600.0
SPOKEN = ("stdio", "http", "streamable-http", "streamableHttp", "streamable_http")
HEADER_NAME, HEADER_VALUE = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII), re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class ServerEntry:
    """One configured server. `approved`: tools that need no approval; `patience_s`: timeout of a request."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    approved: frozenset[str] = frozenset()
    patience_s: float = PATIENCE_S
    source: str = ""

    @property
    def place(self) -> str:
        """Where it is configured, for hints."""
        return f"{SERVERS}.{self.name} in {self.source}"


def read_configuration(path: Path, env: Mapping[str, str]) -> tuple[ServerEntry, ...]:
    """The enabled servers of a file. Raises UsageError."""
    try:
        content = json.loads(read_text(path, LARGEST))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", f"--mcp takes the path of a file: {EXAMPLE}") from error
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno}: {error.msg})" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path} is not JSON{where}", EXAMPLE) from None
    servers = content.get(SERVERS) if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise UsageError(f"{path} has no object {SERVERS}", EXAMPLE)
    made = [_entry(name, given, path, env) for name, given in servers.items()
            if not (isinstance(given, dict) and given.get("disabled") is True)]
    if not made:
        raise UsageError(f"{path} names no server{' that is not disabled' if servers else ''}", EXAMPLE)
    return tuple(made)


def _entry(name: str, given: Any, path: Path, env: Mapping[str, str]) -> ServerEntry:
    where = f"{path}: {SERVERS}.{name}"
    if not isinstance(given, dict):
        raise UsageError(f"{where} is not an object", EXAMPLE)
    kind = given.get("type", "stdio" if "command" in given else "http")
    if kind not in SPOKEN:
        raise UsageError(f"{where} is of type {kind!r:.40}, which is not supported", 'programs ("command") and streamable HTTP ("url") are')
    if ("command" in given) == ("url" in given):
        raise UsageError(f"{where} has {'both a command and' if 'url' in given else 'neither a command nor'} a url",
                         "give the one by which it is reached")
    texts = _Texts(where, env)
    headers = texts.mapped(given, "headers")
    for header, value in headers.items():
        if not HEADER_NAME.fullmatch(header) or not HEADER_VALUE.fullmatch(value):
            raise UsageError(f"{where}.headers: {header!r:.40} is not a header that can be sent",
                             "its value must be one line of ASCII, without a line break")
    approved = [*texts.listed(given, "autoApprove"), *texts.listed(given, "alwaysAllow")]
    patience = given.get("timeout", PATIENCE_S)
    if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 < patience <= MOST_PATIENCE_S:
        raise UsageError(f"{where}.timeout is {patience!r:.40}", f"seconds that an answer may take, at most {MOST_PATIENCE_S:.0f}")
    return ServerEntry(name, texts.text(given, "command"), tuple(texts.listed(given, "args")), texts.mapped(given, "env"),
                       texts.text(given, "cwd") or None, texts.text(given, "url"), headers, frozenset(approved),
                       float(patience), str(path))


class _Texts:
    """Strings of an entry, with variables expanded. Raises UsageError for other types and for unset variables."""

    def __init__(self, where: str, env: Mapping[str, str]) -> None:
        self._where, self._env = where, env

    def text(self, given: Mapping[str, Any], key: str) -> str:
        return self._filled(given[key], key) if key in given else ""

    def listed(self, given: Mapping[str, Any], key: str) -> list[str]:
        value = given.get(key, [])
        if not isinstance(value, list):
            raise UsageError(f"{self._where}.{key} is not a list", f'write it as "{key}": ["…"]')
        return [self._filled(each, key) for each in value]

    def mapped(self, given: Mapping[str, Any], key: str) -> dict[str, str]:
        value = given.get(key, {})
        if not isinstance(value, dict):
            raise UsageError(f"{self._where}.{key} is not an object", f'write it as "{key}": {{"NAME": "…"}}')
        return {name: self._filled(each, f"{key}.{name}") for name, each in value.items()}

    def _filled(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise UsageError(f"{self._where}.{key} is not text", "put it between quotes")

        def of(found: re.Match[str]) -> str:
            name, otherwise = found.groups()
            known = self._env.get(name) or otherwise
            if known is None:
                raise UsageError(f"{self._where}.{key} names the variable {name}, which is not set", f"export {name}=…, or ${{{name}:-…}}")
            return known

        return VARIABLE.sub(of, value)
