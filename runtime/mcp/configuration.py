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

MAX_FILE_NBYTES = 1 << 20
SERVERS = "mcpServers"
EXAMPLE = '{"mcpServers": {"NAME": {"command": "PROGRAM", "args": []}}} is how it is written'
DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 60.0, 3600.0
SUPPORTED_TYPES = ("stdio", "http", "streamable-http", "streamableHttp", "streamable_http")
HEADER_NAME, HEADER_VALUE = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII), re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class ServerEntry:
    """One configured server: a program or a URL."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None  # None for the current directory
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    approved: frozenset[str] = frozenset()  # tools that need no approval, * for all
    timeout_s: float = DEFAULT_TIMEOUT_S  # of a request
    source: str = ""  # path of the file

    @property
    def location(self) -> str:
        """Where it is configured, for hints."""
        return f"{SERVERS}.{self.name} in {self.source}"


def read_configuration(path: Path, env: Mapping[str, str]) -> tuple[ServerEntry, ...]:
    """The enabled servers of a file. Raises UsageError."""
    try:
        content = json.loads(read_text(path, MAX_FILE_NBYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", f"--mcp takes the path of a file: {EXAMPLE}") from error
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno}: {error.msg})" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path} is not JSON{where}", EXAMPLE) from None
    servers = content.get(SERVERS) if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise UsageError(f"{path} has no object {SERVERS}", EXAMPLE)
    entries = [_entry(name, fields, path, env) for name, fields in servers.items()
            if not (isinstance(fields, dict) and fields.get("disabled") is True)]
    if not entries:
        raise UsageError(f"{path} names no server{' that is not disabled' if servers else ''}", EXAMPLE)
    return tuple(entries)


def _entry(name: str, fields: Any, path: Path, env: Mapping[str, str]) -> ServerEntry:
    """Parse one server. Raises UsageError."""
    where = f"{path}: {SERVERS}.{name}"
    if not isinstance(fields, dict):
        raise UsageError(f"{where} is not an object", EXAMPLE)
    kind = fields.get("type", "stdio" if "command" in fields else "http")
    if kind not in SUPPORTED_TYPES:
        raise UsageError(f"{where} is of type {kind!r:.40}, which is not supported", 'programs ("command") and streamable HTTP ("url") are')
    if ("command" in fields) == ("url" in fields):
        raise UsageError(f"{where} has {'both a command and' if 'url' in fields else 'neither a command nor'} a url",
                         "give the one by which it is reached")
    reader = _EntryReader(where, env)
    headers = reader.string_map(fields, "headers")
    for header, value in headers.items():
        if not HEADER_NAME.fullmatch(header) or not HEADER_VALUE.fullmatch(value):
            raise UsageError(f"{where}.headers: {header!r:.40} is not a header that can be sent",
                             "its value must be one line of ASCII, without a line break")
    approved = [*reader.string_list(fields, "autoApprove"), *reader.string_list(fields, "alwaysAllow")]
    timeout = fields.get("timeout", DEFAULT_TIMEOUT_S)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise UsageError(f"{where}.timeout is {timeout!r:.40}", f"seconds that an answer may take, at most {MAX_TIMEOUT_S:.0f}")
    return ServerEntry(name, reader.text(fields, "command"), tuple(reader.string_list(fields, "args")), reader.string_map(fields, "env"),
                       reader.text(fields, "cwd") or None, reader.text(fields, "url"), headers, frozenset(approved),
                       float(timeout), str(path))


class _EntryReader:
    """Reads the strings of an entry and expands variables in them. Raises UsageError for other types and for unset variables."""

    def __init__(self, where: str, env: Mapping[str, str]) -> None:
        self._where, self._env = where, env

    def text(self, fields: Mapping[str, Any], key: str) -> str:
        return self._expanded(fields[key], key) if key in fields else ""

    def string_list(self, fields: Mapping[str, Any], key: str) -> list[str]:
        value = fields.get(key, [])
        if not isinstance(value, list):
            raise UsageError(f"{self._where}.{key} is not a list", f'write it as "{key}": ["…"]')
        return [self._expanded(item, key) for item in value]

    def string_map(self, fields: Mapping[str, Any], key: str) -> dict[str, str]:
        value = fields.get(key, {})
        if not isinstance(value, dict):
            raise UsageError(f"{self._where}.{key} is not an object", f'write it as "{key}": {{"NAME": "…"}}')
        return {name: self._expanded(item, f"{key}.{name}") for name, item in value.items()}

    def _expanded(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise UsageError(f"{self._where}.{key} is not text", "put it between quotes")

        def variable(match: re.Match[str]) -> str:
            name, default = match.groups()
            expansion = self._env.get(name) or default
            if expansion is None:
                raise UsageError(f"{self._where}.{key} names the variable {name}, which is not set", f"export {name}=…, or ${{{name}:-…}}")
            return expansion

        return VARIABLE.sub(variable, value)
