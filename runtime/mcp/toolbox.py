"""The tools of all MCP servers as the model sees them: under unique names, without those that are turned off."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ... import UsageError
from ..events import Notice, Progress
from ..tool_calls.messages import NAME
from ..tool_calls.tool_calling import Tools, tools_of
from .client import MAX_TOOLS, Client, ServerFailed
from .configuration import ServerEntry
from .results import ToolResult, sanitized

INVALID_CHARACTERS = re.compile(r"[^\w./-]")
FALLBACK_NAME, MAX_NAME_LENGTH = "_", 128
MAX_SCHEMA_DEPTH = 64  # nested objects and lists of a schema
MAX_DEFINITION_LENGTH = 100_000  # characters of a tool's definition; the longest published ones take a fifth
MAX_NAMES_SHOWN = 5  # in a notice


@dataclass(frozen=True)
class Tool:
    """A tool of a server."""

    name: str  # as the model calls it
    original_name: str  # as the server does
    client: Client
    function: Mapping[str, Any]  # in the format of OpenAI's API

    @property
    def server(self) -> str:
        return self.client.entry.name

    @property
    def key(self) -> tuple[Client, str]:
        """An identity that does not depend on the assigned name."""
        return self.client, self.original_name

    @property
    def definition(self) -> dict[str, Any]:
        """The server's definition of it."""
        return {**self.function["function"], "name": self.original_name}

    @property
    def description(self) -> str:
        return self.function["function"]["description"]


class Toolbox:
    """Servers, their tools, and which are turned off or approved. Call `close` however a run ends.

    `strict`: an unreachable server is an error, otherwise it is skipped
    `disabled`, `approved`: names of tools
    `approves_all`: every tool is approved, later ones too
    """

    def __init__(self, entries: Iterable[ServerEntry], env: Mapping[str, str], strict: bool = False) -> None:
        self._strict = strict
        self.clients = [Client(entry, env) for entry in entries]
        self.all_tools: list[Tool] = []
        self.disabled: set[str] = set()
        self.approved: set[str] = set()
        self.approves_all = False

    def start(self) -> Iterator[Notice]:
        """Start all servers, `connect` later: they take seconds. Raises ServerFailed if strict."""
        for client in self.clients:
            try:
                client.start()
            except ServerFailed as failed:
                if self._strict:
                    raise
                yield Notice(failure_line(failed))

    def connect(self, cancelled: Callable[[], bool]) -> Iterator[Progress | Notice]:
        """List the tools of all started servers; a server that fails is skipped with a notice. Raises Cancelled, and ServerFailed if
        strict."""
        for client in self.clients:
            if client.is_started:
                try:
                    yield from client.connect(cancelled)
                except ServerFailed as failed:
                    if self._strict:
                        raise
                    yield Notice(failure_line(failed))
                else:
                    if not client.tools:
                        yield Notice(f"server {client.entry.name} offers no tools (check {client.entry.location})")
        yield from self._assign_names()

    @property
    def is_changed(self) -> bool:
        """A server announced a changed tool list."""
        return any(client.is_changed for client in self.clients)

    def refresh(self, cancelled: Callable[[], bool]) -> Iterator[Progress | Notice]:
        """List the tools of servers that announced a change, with notices about it. Raises Cancelled."""
        before = {tool.key: tool.definition for tool in self.all_tools}
        for client in self.clients:
            if client.is_changed:
                try:
                    yield from client.refresh(cancelled)
                except ServerFailed as failed:
                    yield Notice(failure_line(failed))
        yield from self._assign_names()
        now = {tool.key: tool.definition for tool in self.all_tools}
        for client in self.clients:
            keys = [key for key in (before | now) if key[0] is client]
            changes = {"new": [key for key in keys if key not in before], "gone": [key for key in keys if key not in now],
                       "told otherwise": [key for key in keys if key in before and key in now and before[key] != now[key]]}
            summary = "; ".join(f"{change}: {_abridged([name for _, name in changed])}" for change, changed in changes.items() if changed)
            if summary:
                yield Notice(f"server {client.entry.name} has changed its tools ({summary})")

    def _assign_names(self) -> Iterator[Notice]:
        """Assign unique names, prefixed by the server's where two collide. A tool that is off stays off under any name; one whose
        definition changed needs approval again."""
        before = {tool.key: tool for tool in self.all_tools}
        disabled, approved = ({key for key, tool in before.items() if tool.name in names} for names in (self.disabled, self.approved))
        yield from self._collect()
        now = {tool.key: tool for tool in self.all_tools}
        gone = {before[key].name for key in disabled if key not in now}  # such a tool may come back
        still_disabled = {tool.name for key, tool in now.items() if key in disabled}
        self.disabled = self.disabled - {tool.name for tool in before.values()} | still_disabled | gone
        self.approved = {tool.name for key, tool in now.items()
                         if self.approves_all or key in approved and before[key].definition == tool.definition or _is_approved(tool)}

    def _collect(self) -> Iterator[Notice]:
        """Set `all_tools` from the servers' lists, without unusable ones."""
        offered = [(client, tool) for client in self.clients for tool in client.tools]
        name_counts = Counter(_valid_name(name) for _, name in {(client, tool["name"]) for client, tool in offered})
        taken: set[str] = set()
        self.all_tools = []
        for client in self.clients:
            if client.has_more:
                yield Notice(f"server {client.entry.name} offers more than {MAX_TOOLS} tools: only the first are used, "
                             f"and they take room in every prompt (check {client.entry.location})")
        for client, tool in offered:
            name = _valid_name(tool["name"])
            if name_counts[name] > 1:
                name = _valid_name(f"{client.entry.name}.{name}")
            if name in taken:
                yield Notice(f"server {client.entry.name} has two tools named {tool['name']:.80}: the first is used")
                continue
            taken.add(name)
            schema = tool.get("inputSchema") if isinstance(tool.get("inputSchema"), Mapping) else {"type": "object"}
            if _is_too_deep(schema):
                yield Notice(f"tool {tool['name']:.80} of server {client.entry.name} is left out: its schema is nested too deeply")
                continue
            description = next((text for key in ("description", "title") if isinstance(text := tool.get(key), str) and text), "")
            function = {"name": name, "description": sanitized(description), "parameters": _sanitized_strings(schema)}
            if (length := len(json.dumps(function, ensure_ascii=False))) > MAX_DEFINITION_LENGTH:
                yield Notice(f"tool {tool['name']:.80} of server {client.entry.name} is left out: its description has {length:,} "
                             f"characters, more than the {MAX_DEFINITION_LENGTH:,} allowed")
                continue
            self.all_tools.append(Tool(name, tool["name"], client, {"type": "function", "function": function}))

    def __contains__(self, name: str) -> bool:
        return any(tool.name == name for tool in self.all_tools)

    @property
    def enabled(self) -> list[Tool]:
        """The tools that are not turned off."""
        return [tool for tool in self.all_tools if tool.name not in self.disabled]

    @property
    def tools(self) -> Tools | None:
        """The enabled tools in the API's format; None if there are none."""
        return tools_of([tool.function for tool in self.enabled]) if self.enabled else None

    def find(self, name: str) -> Tool | None:
        """The tool of this name, if it is enabled."""
        return next((tool for tool in self.enabled if tool.name == name), None)

    def set_enabled(self, name: str, is_enabled: bool) -> list[Tool]:
        """Turn a tool, or all of a server, on or off. Raises UsageError for an unknown name."""
        matches = [tool for tool in self.all_tools if name in (tool.name, tool.original_name, tool.server)]
        if not matches:
            raise UsageError(f"there is no tool or server {name!r:.80}", "/tools lists them")
        names = {tool.name for tool in matches}
        self.disabled = self.disabled - names if is_enabled else self.disabled | names
        return matches

    def call(self, tool: Tool, arguments: Mapping[str, Any], cancelled: Callable[[], bool]) -> Iterator[Progress | Notice | ToolResult]:
        """Call a tool; yields progress, the result last, also if its server failed. Raises Cancelled."""
        try:
            yield from tool.client.call(tool.original_name, arguments, cancelled)
        except ServerFailed as failed:
            yield Notice(failure_line(failed))
            yield ToolResult(f"Error: {sanitized(failed.message)}", is_error=True)

    def close(self) -> None:
        for client in self.clients:
            with suppress(OSError):
                client.close()


def failure_line(failed: ServerFailed) -> str:
    """A failure that does not end the run, as one line."""
    return f"{failed.message} ({failed.hint})" if failed.hint else failed.message


def arguments_of(text: str) -> dict[str, Any]:
    """Parse a call's arguments. Raises ValueError for anything but a JSON object."""
    value = json.loads(text or "{}")
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _is_approved(tool: Tool) -> bool:
    """Whether the configuration approves it."""
    return bool({tool.original_name, tool.name, "*"} & tool.client.entry.approved)


def _abridged(names: list[str]) -> str:
    shown = ", ".join(f"{name:.40}" for name in names[:MAX_NAMES_SHOWN])
    return shown if len(names) <= MAX_NAMES_SHOWN else f"{shown} and {len(names) - MAX_NAMES_SHOWN} more"


def _valid_name(name: str) -> str:
    """A tool name in the characters that models and templates accept."""
    valid = INVALID_CHARACTERS.sub("_", name)[:MAX_NAME_LENGTH]
    return valid if NAME.fullmatch(valid) else FALLBACK_NAME


def _sanitized_strings(value: Any) -> Any:
    """Every string of a schema, `sanitized`."""
    if isinstance(value, str):
        return sanitized(value)
    if isinstance(value, Mapping):
        return {sanitized(str(key)): _sanitized_strings(item) for key, item in value.items()}
    return [_sanitized_strings(item) for item in value] if isinstance(value, list) else value


def _is_too_deep(value: Any, depth: int = 0) -> bool:
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return depth > MAX_SCHEMA_DEPTH or any(_is_too_deep(child, depth + 1) for child in children)
