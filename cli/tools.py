"""MCP tools at a terminal: lists them, asks before each call, and notes its result.

A call runs only with approval: the user's answer, a flag or the configuration. If nobody can be asked, it does not run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from .. import UsageError, typed
from .attachment import expand_path
from .interrupt import interruptible, termination_signal, without_echo
from .loading import show_progress, tokenizer_of
from .options import RunFlags, ToolFlags
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.events import Call, Stats
    from ..runtime.mcp.agent_loop import ApprovalRequest, ToolExecution, ToolRefresh, ToolReported
    from ..runtime.mcp.toolbox import Toolbox
    from ..runtime.session import Session
    from .conversation import Conversation

MAX_SHOWN = 1200  # characters shown of a call that needs approval
BRIEF_LENGTH = 100  # characters shown of a call, or of its result
CHOICES = "[y]es, [n]o, [a]lways this tool, e[x] no to all"
USAGE = "/tools [on|off NAME]"


@contextmanager
def open_tools(flags: ToolFlags, ref: ModelRef, engine: RunFlags, screen: Screen) -> Iterator[ToolSession | None]:
    """A context that yields the tools of --mcp, None without the flag, and runs their servers until it ends. Raises UsageError for a model
    without tool support, before anything is started or loaded."""
    for name, is_given in (("--yes-tools", flags.yes_tools), ("--tool-rounds", flags.tool_rounds is not None)):
        if is_given and flags.mcp is None and name.removeprefix("--").replace("-", "_") not in flags.from_settings:
            raise UsageError(f"{name} needs tools", "give a file of servers: --mcp FILE")
    if flags.tool_rounds is not None and flags.tool_rounds < 1:
        raise UsageError(f"--tool-rounds {flags.tool_rounds} is out of range", "1 or more")
    if flags.mcp is None:
        yield None
        return
    from ..runtime.mcp.agent_loop import MAX_ROUNDS
    from ..runtime.mcp.configuration import read_configuration
    from ..runtime.mcp.toolbox import Toolbox
    from ..runtime.tool_calls.tool_calling import ToolCalling

    entries = read_configuration(expand_path(flags.mcp), screen.environment.variables)
    tokenizer = tokenizer_of(ref, engine.options())
    if tokenizer.template is None or not ToolCalling(tokenizer).style.knows_tools:
        reason = f"the chat template of {ref.text} has no tool support"
        if tokenizer.template is None:
            reason = f"{ref.text} is a base model without a template"
        if "mcp" not in flags.from_settings:
            raise UsageError(f"--mcp: {reason}", f"leave it out, or use another model; tool support: effllm show {typed(ref.text)}")
        screen.note(f"EFFLLM_MCP is ignored: {reason}")
        yield None
        return
    with closing(Toolbox(entries, screen.environment.variables, engine.strict)) as toolbox:
        for notice in toolbox.start():
            screen.note(notice.text)
        yield ToolSession(toolbox, screen, flags.mcp, flags.yes_tools, flags.tool_rounds or MAX_ROUNDS)


class ToolSession:
    """The tools of one run or chat.

    calls: the calls made so far, for --json.
    was_stopped: the user stopped the last answer.
    """

    def __init__(self, toolbox: Toolbox, screen: Screen, source: str, is_approved: bool, max_rounds: int) -> None:
        self.box, self.screen, self.source, self.most = toolbox, screen, source, max_rounds
        self.calls: list[dict[str, object]] = []
        self.was_stopped = False
        toolbox.approves_all = is_approved
        self._rejects_all = False

    def begin(self, session: Session) -> None:
        """List the tools, and let answers call them. Ctrl-C skips servers that have not answered yet."""
        from ..runtime.mcp.client import Cancelled

        stopped: list[bool] = []
        try:
            with interruptible(lambda: stopped.append(True)):
                list(show_progress(self.box.connect(lambda: bool(stopped)), self.screen, type(None)))
        except Cancelled:
            raise KeyboardInterrupt from None
        session.tools = self.box.tools
        if not self.box.all_tools:
            self.screen.note(f"no tools are available: answering without them (check the servers of {self.source})")
        elif (tokens := self._tokens(session)) > session.n_ctx // 2:
            self.screen.note(f"tool definitions take about {tokens:,} of the {session.n_ctx:,} tokens of context: "
                             f"\"disabled\": true in {self.source} turns a server off, -c gives more room")

    def _tokens(self, session: Session) -> int:
        """Approximate number of tokens that the tool definitions take in every prompt."""
        return session.count(json.dumps([tool.function for tool in self.box.enabled], ensure_ascii=False))

    def announce(self, session: Session) -> None:
        """Note how many tools there are, and how many prompt tokens they take."""
        if self.box.enabled:
            tokens = self._tokens(session)
            servers = dict.fromkeys(tool.server for tool in self.box.enabled)
            self.screen.note(f"{len(self.box.enabled)} tools of {', '.join(servers)}, about {tokens} tokens of every prompt "
                             "(/tools lists them)")

    def answer(self, events: Iterable[object], session: Session, show: Callable[[Iterable[object]], Stats]) -> Stats:
        """Show an answer with `show`, run its approved calls, and repeat until an answer makes none. Returns the statistics of the last
        answer."""
        from ..runtime.events import Notice
        from ..runtime.mcp.agent_loop import ApprovalRequest, Generating, ToolExecution, ToolRefresh, ToolReported, agent_loop

        stats, self.was_stopped, self._rejects_all = None, False, False
        with closing(agent_loop(session, events, self.box, self.most)) as steps:
            for step in steps:
                if isinstance(step, Generating):
                    stats = show(step.events)
                elif isinstance(step, ToolRefresh):
                    self._refresh(step)
                elif isinstance(step, ApprovalRequest):
                    self._request_approval(step)
                elif isinstance(step, ToolExecution):
                    self._execute(step)
                elif isinstance(step, ToolReported):
                    self._report(step)
                elif isinstance(step, Notice):
                    self.screen.note(step.text)
        return stats

    def _refresh(self, refresh: ToolRefresh) -> None:
        with without_echo(self.screen.environment.stdin), interruptible(refresh.cancel):
            list(show_progress(refresh.events, self.screen, type(None)))
        if refresh.is_cancelled:
            raise KeyboardInterrupt

    def _request_approval(self, request: ApprovalRequest) -> None:
        screen, call_text = self.screen, format_call(request.call)
        if self._rejects_all:
            return
        if not screen.environment.is_interactive:
            screen.note_once(f"there is no terminal for questions: calls of {request.tool.name} are refused (--yes-tools allows all, "
                             f"autoApprove of {request.tool.server} in {self.source} some)")
            return
        is_cut = len(call_text) > MAX_SHOWN
        screen.note(f"{request.tool.server} wants to run {call_text[:MAX_SHOWN]}{'…' if is_cut else ''}")
        discard_typeahead(screen)
        while True:
            try:
                reply = screen.prompt(f"Call it? {CHOICES}{f', [s]how all {len(call_text)} characters' if is_cut else ''}:")
            except KeyboardInterrupt:
                request.is_stopped = self.was_stopped = True
                screen.note("stopped by Ctrl-C: no more tools are called")
                return
            answer = reply.strip().lower()
            if answer in ("s", "show") and is_cut:
                screen.note(call_text)
                continue
            if answer in ("a", "always"):
                self.box.approved.add(request.tool.name)
            self._rejects_all = answer in ("x", "exit", "none")
            request.is_allowed = answer in ("y", "yes", "a", "always")
            if reply and answer not in ("y", "yes", "a", "always", "n", "no", "x", "exit", "none"):
                continue
            return

    def _execute(self, execution: ToolExecution) -> None:
        stdin = self.screen.environment.stdin
        with without_echo(stdin), interruptible(execution.cancel):
            list(show_progress(execution.events, self.screen, type(None)))
        if execution.is_cancelled:
            self.was_stopped = True
            self.screen.note(f"stopped by {termination_signal() or 'Ctrl-C'}: {execution.call.name} was cancelled")

    def _report(self, report: ToolReported) -> None:
        call, result = report.call, report.result
        self.calls.append({"name": call.name, "server": report.tool and report.tool.server, "arguments": json.loads(call.arguments or "{}"),
                           "result": report.text, "is_error": result is None or result.is_error, "was_run": result is not None})
        line = " ".join(report.text.split())
        if result is not None:
            length = f" ({len(report.text)} characters)" if len(line) > BRIEF_LENGTH else ""
            self.screen.note(f"{brief(format_call(call))} → {brief(line)}{length}")
        elif report.tool is None or not self.was_stopped:
            self.screen.note(f"{brief(format_call(call))} was not run: {line.removeprefix('Error: ')}")
        for remark in report.remarks:
            self.screen.note(remark)


def format_call(call: Call) -> str:
    """A call as text: name(argument=value)."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return f"{call.name}({call.arguments})"
    return f"{call.name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in arguments.items())})"


def brief(text: str) -> str:
    return text if len(text) <= BRIEF_LENGTH else f"{text[: BRIEF_LENGTH - 1]}…"


def discard_typeahead(screen: Screen) -> None:
    """Discard input typed during the answer, which was not meant for this question."""
    import termios

    termios.tcflush(screen.environment.stdin, termios.TCIFLUSH)


def tools(chat: Conversation, rest: str) -> None:
    """`/tools`, `/tools on NAME`, `/tools off NAME`."""
    if chat.tools is None:
        raise UsageError("there are no tools in this chat", "start it with tools: effllm chat MODEL --mcp FILE")
    word, _, name = rest.partition(" ")
    toolbox = chat.tools.box
    if word:
        if word not in ("on", "off") or not name.strip():
            raise UsageError(f"/tools takes on or off and the name of a tool or server, not {rest!r:.80}", "/tools off NAME")
        toolbox.set_enabled(name.strip(), word == "on")
        chat.session.tools = toolbox.tools
    for client in toolbox.clients:
        client_tools = [tool for tool in toolbox.all_tools if tool.client is client]
        chat.screen.note(f"{client.entry.name}: {len(client_tools)} tools" if client_tools else f"{client.entry.name}: no tools")
        for tool in client_tools:
            state = "off" if tool.name in toolbox.disabled else "on, without asking" if tool.name in toolbox.approved else "on"
            chat.screen.note(f"  {tool.name} ({state})  {brief(tool.description.strip().partition(chr(10))[0])}".rstrip(), 4)


def names(chat: Conversation) -> list[str]:
    """Names of tools and servers, for completion."""
    toolbox = chat.tools and chat.tools.box
    return [*dict.fromkeys(name for tool in toolbox.all_tools for name in (tool.server, tool.name))] if toolbox else []


def refuse_raw_tools(raw: bool, flags: ToolFlags) -> None:
    """Raises UsageError for tools with --raw."""
    if raw and flags.mcp is not None and "mcp" not in flags.from_settings:
        raise UsageError("--mcp cannot be combined with --raw", "drop one of them")
