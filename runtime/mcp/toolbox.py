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
from .client import MOST_TOOLS, Client, ServerFailed
from .configuration import ServerEntry
from .results import ToolResult, sanitized

ODD = re.compile(r"[^\w./-]")
NO_NAME, LONGEST_NAME = "_", 128
DEEPEST = 64  # a schema's objects and lists within one another
LONGEST = 100_000  # letters of what a model is told of a tool; the longest published ones take a fifth
SOME = 5  # names in a notice


@dataclass(frozen=True)
class Tool:
    """A tool of a server. `name`: as the model calls it, `own`: as the server does; `function`: in the format of OpenAI's API."""

    name: str
    own: str
    client: Client
    function: Mapping[str, Any]

    @property
    def server(self) -> str:
        return self.client.entry.name

    @property
    def key(self) -> tuple[Client, str]:
        """An identity that does not depend on the assigned name."""
        return self.client, self.own

    @property
    def told(self) -> dict[str, Any]:
        """The server's definition of it."""
        return {**self.function["function"], "name": self.own}

    @property
    def description(self) -> str:
        return self.function["function"]["description"]


class Toolbox:
    """Servers, their tools, and which are turned off or approved. `strict`: an unreachable server is an error, otherwise it is skipped.
    `approves_all`: every tool is approved, later ones too. Call `close` however a run ends."""

    def __init__(self, entries: Iterable[ServerEntry], env: Mapping[str, str], strict: bool = False) -> None:
        self._strict = strict
        self.clients = [Client(entry, env) for entry in entries]
        self.found: list[Tool] = []
        self.off: set[str] = set()  # names of tools
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
            if client.is_begun:
                try:
                    yield from client.connect(cancelled)
                except ServerFailed as failed:
                    if self._strict:
                        raise
                    yield Notice(failure_line(failed))
                else:
                    if not client.tools:
                        yield Notice(f"server {client.entry.name} offers no tools (check {client.entry.place})")
        yield from self._name()

    @property
    def is_changed(self) -> bool:
        """A server announced a changed tool list."""
        return any(client.is_changed for client in self.clients)

    def renew(self, cancelled: Callable[[], bool]) -> Iterator[Progress | Notice]:
        """List the tools of servers that announced a change, with notices about it. Raises Cancelled."""
        before = {tool.key: tool.told for tool in self.found}
        for client in self.clients:
            if client.is_changed:
                try:
                    yield from client.renew(cancelled)
                except ServerFailed as failed:
                    yield Notice(failure_line(failed))
        yield from self._name()
        now = {tool.key: tool.told for tool in self.found}
        for client in self.clients:
            own = [key for key in (before | now) if key[0] is client]
            kinds = (("new", [key for key in own if key not in before]), ("gone", [key for key in own if key not in now]),
                     ("told otherwise", [key for key in own if key in before and key in now and before[key] != now[key]]))
            if said := "; ".join(f"{kind}: {_some([name for _, name in keys])}" for kind, keys in kinds if keys):
                yield Notice(f"server {client.entry.name} has changed its tools ({said})")

    def _name(self) -> Iterator[Notice]:
        """Assign unique names, prefixed by the server's where two collide. A tool that is off stays off under any name; one whose
        definition changed needs approval again."""
        before = {tool.key: tool for tool in self.found}
        off, approved = ({key for key, tool in before.items() if tool.name in names} for names in (self.off, self.approved))
        yield from self._take_in()
        now = {tool.key: tool for tool in self.found}
        gone = {before[key].name for key in off if key not in now}
        self.off = self.off - {tool.name for tool in before.values()} | {tool.name for key, tool in now.items() if key in off} | gone
        self.approved = {tool.name for key, tool in now.items()
                         if self.approves_all or key in approved and before[key].told == tool.told or _is_approved(tool)}

    def _take_in(self) -> Iterator[Notice]:
        offered = [(client, tool) for client in self.clients for tool in client.tools]
        names = [_fit(tool["name"]) for _, tool in offered]
        times = Counter(_fit(own) for _, own in {(client, tool["name"]) for client, tool in offered})
        taken: set[str] = set()
        self.found = []
        for client in self.clients:
            if client.has_more:
                yield Notice(f"server {client.entry.name} offers more than {MOST_TOOLS} tools: only the first are used, "
                             f"and they take room in every prompt (check {client.entry.place})")
        for (client, tool), name in zip(offered, names, strict=True):
            name = name if times[name] == 1 else _fit(f"{client.entry.name}.{name}")
            if name in taken:
                yield Notice(f"server {client.entry.name} has two tools named {tool['name']:.80}: the first is used")
                continue
            taken.add(name)
            schema = tool.get("inputSchema") if isinstance(tool.get("inputSchema"), Mapping) else {"type": "object"}
            if _is_deep(schema):
                yield Notice(f"tool {tool['name']:.80} of server {client.entry.name} is left out: its schema is nested too deeply")
                continue
            described = next((text for key in ("description", "title") if isinstance(text := tool.get(key), str) and text), "")
            function = {"name": name, "description": sanitized(described), "parameters": _cleaned(schema)}
            if (letters := len(json.dumps(function, ensure_ascii=False))) > LONGEST:
                yield Notice(f"tool {tool['name']:.80} of server {client.entry.name} is left out: its description has {letters:,} "
                             f"characters, more than the {LONGEST:,} allowed")
                continue
            self.found.append(Tool(name, tool["name"], client, {"type": "function", "function": function}))

    def __contains__(self, name: str) -> bool:
        return any(tool.name == name for tool in self.found)

    @property
    def on(self) -> list[Tool]:
        return [tool for tool in self.found if tool.name not in self.off]

    @property
    def tools(self) -> Tools | None:
        """The tools that are on, in the API's format; None if there are none."""
        return tools_of([tool.function for tool in self.on]) if self.on else None

    def find(self, name: str) -> Tool | None:
        """The tool of this name, if it is on."""
        return next((tool for tool in self.on if tool.name == name), None)

    def turn(self, word: str, is_on: bool) -> list[Tool]:
        """Turn a tool, or all of a server, on or off. Raises UsageError for an unknown name."""
        chosen = [tool for tool in self.found if word in (tool.name, tool.own, tool.server)]
        if not chosen:
            raise UsageError(f"there is no tool or server {word!r:.80}", "/tools lists them")
        names = {tool.name for tool in chosen}
        self.off = self.off - names if is_on else self.off | names
        return chosen

    def call(self, tool: Tool, arguments: Mapping[str, Any], cancelled: Callable[[], bool]) -> Iterator[Progress | Notice | ToolResult]:
        """Call a tool; yields progress, the result last, also if its server failed. Raises Cancelled."""
        try:
            yield from tool.client.call(tool.own, arguments, cancelled)
        except ServerFailed as failed:
            yield Notice(failure_line(failed))
            yield ToolResult(f"Error: {sanitized(failed.message)}", is_error=True)

    def close(self) -> None:
        for client in self.clients:
            with suppress(OSError):
                client.close()


def failure_line(failed: ServerFailed) -> str:
    """A tolerated failure, as one line."""
    return f"{failed.message} ({failed.hint})" if failed.hint else failed.message


def arguments_of(text: str) -> dict[str, Any]:
    """Parse a call's arguments. Raises ValueError for what is no object."""
    value = json.loads(text or "{}")
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _is_approved(tool: Tool) -> bool:
    """By the configuration."""
    return bool({tool.own, tool.name, "*"} & tool.client.entry.approved)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"{name:.40}" for name in names[:SOME])
    return shown if len(names) <= SOME else f"{shown} and {len(names) - SOME} more"


def _fit(name: str) -> str:
    """A tool name in the characters that models and templates accept."""
    fit = ODD.sub("_", name)[:LONGEST_NAME]
    return fit if NAME.fullmatch(fit) else NO_NAME


def _cleaned(value: Any) -> Any:
    """Every string of a schema, `sanitized`."""
    if isinstance(value, str):
        return sanitized(value)
    if isinstance(value, Mapping):
        return {sanitized(str(key)): _cleaned(each) for key, each in value.items()}
    return [_cleaned(each) for each in value] if isinstance(value, list) else value


def _is_deep(value: Any, depth: int = 0) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return depth > DEEPEST or any(_is_deep(each, depth + 1) for each in inside)
