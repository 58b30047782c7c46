"""MCP tools at a terminal: which there are, the question before each call, and a line about its result.

A call runs only if the user has agreed, by an answer now, or by a flag or the configuration before; if nobody can be asked, it does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from .. import UsageError, typed
from .attachment import named_path
from .interrupt import interruptible, termination_signal, without_echo
from .loading import follow, tokenizer_of
from .options import RunFlags, ToolFlags
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.catalog import ModelRef
    from ..runtime.events import Call, Stats
    from ..runtime.mcp.agent_loop import ApprovalRequest, ToolExecution, ToolRefresh, ToolReported
    from ..runtime.mcp.toolbox import Toolbox
    from ..runtime.session import Session
    from .conversation import Conversation

SHOWN_LETTERS = 1200  # of a call, before a question about it
BRIEF = 100  # characters shown of a call, or of its result
CHOICES = "[y]es, [n]o, [a]lways this tool, e[x] no to all"
USAGE = "/tools [on|off NAME]"


@contextmanager
def offered_tools(flags: ToolFlags, ref: ModelRef, engine: RunFlags, screen: Screen) -> Iterator[ToolUse | None]:
    """The tools of --mcp, with their servers running until the context ends; None without the flag. Raises UsageError for a model whose
    template has no tools, before anything is started or loaded."""
    for name, given in (("--yes-tools", flags.yes_tools), ("--tool-rounds", flags.tool_rounds is not None)):
        if given and flags.mcp is None and name.removeprefix("--").replace("-", "_") not in flags.settled:
            raise UsageError(f"{name} needs tools", "give a file of servers: --mcp FILE")
    if flags.tool_rounds is not None and flags.tool_rounds < 1:
        raise UsageError(f"--tool-rounds {flags.tool_rounds} is out of range", "1 or more")
    if flags.mcp is None:
        yield None
        return
    from ..runtime.mcp.agent_loop import MOST_ROUNDS
    from ..runtime.mcp.configuration import read_configuration
    from ..runtime.mcp.toolbox import Toolbox
    from ..runtime.tool_calls.tool_calling import ToolCalling

    entries = read_configuration(named_path(flags.mcp), screen.environment.variables)
    tokenizer = tokenizer_of(ref, engine.options())
    if tokenizer.template is None or not ToolCalling(tokenizer).style.knows_tools:
        why = f"the chat template of {ref.text} has no tool support"
        if tokenizer.template is None:
            why = f"{ref.text} is a base model without a template"
        if "mcp" not in flags.settled:
            raise UsageError(f"--mcp: {why}", f"leave it out, or use another model; tool support: effllm show {typed(ref.text)}")
        screen.note(f"EFFLLM_MCP is ignored: {why}")
        yield None
        return
    with closing(Toolbox(entries, screen.environment.variables, engine.strict)) as box:
        for notice in box.start():
            screen.note(notice.text)
        yield ToolUse(box, screen, flags.mcp, flags.yes_tools, flags.tool_rounds or MOST_ROUNDS)


class ToolUse:
    """The tools of one run or chat. `calls`: those made so far, for --json; `was_stopped`: the user stopped the last answer."""

    def __init__(self, box: Toolbox, screen: Screen, source: str, is_approved: bool, most: int) -> None:
        self.box, self.screen, self.source, self.most = box, screen, source, most
        self.calls: list[dict[str, object]] = []
        self.was_stopped = False
        box.approves_all = is_approved
        self._is_refused = False

    def begin(self, session: Session) -> None:
        """List the tools, and let answers call them. Ctrl-C skips servers that have not answered yet."""
        from ..runtime.mcp.client import Cancelled

        stopped: list[bool] = []
        try:
            with interruptible(lambda: stopped.append(True)):
                list(follow(self.box.connect(lambda: bool(stopped)), self.screen, type(None)))
        except Cancelled:
            raise KeyboardInterrupt from None
        session.tools = self.box.tools
        if not self.box.found:
            self.screen.note(f"no tools are available: answering without them (check the servers of {self.source})")
        elif (tokens := self._tokens(session)) > session.n_ctx // 2:
            self.screen.note(f"tool definitions take about {tokens:,} of the {session.n_ctx:,} tokens of context: "
                             f"\"disabled\": true in {self.source} turns a server off, -c gives more room")

    def _tokens(self, session: Session) -> int:
        """About how many tokens the tool definitions take in every prompt."""
        return session.count(json.dumps([tool.function for tool in self.box.on], ensure_ascii=False))

    def say_offered(self, session: Session) -> None:
        """The number of tools, and the prompt tokens they take."""
        if self.box.on:
            tokens = self._tokens(session)
            servers = dict.fromkeys(tool.server for tool in self.box.on)
            self.screen.note(f"{len(self.box.on)} tools of {', '.join(servers)}, about {tokens} tokens of every prompt (/tools lists them)")

    def answer(self, events: Iterable[object], session: Session, show: Callable[[Iterable[object]], Stats]) -> Stats:
        """`show` an answer, confirm and run its calls, and repeat until it makes none. Returns the statistics of the last answer."""
        from ..runtime.events import Notice
        from ..runtime.mcp.agent_loop import ApprovalRequest, Generating, ToolExecution, ToolRefresh, ToolReported, agent_loop

        cost, self.was_stopped, self._is_refused = None, False, False
        with closing(agent_loop(session, events, self.box, self.most)) as steps:
            for step in steps:
                if isinstance(step, Generating):
                    cost = show(step.events)
                elif isinstance(step, ToolRefresh):
                    self._list(step)
                elif isinstance(step, ApprovalRequest):
                    self._ask(step)
                elif isinstance(step, ToolExecution):
                    self._run(step)
                elif isinstance(step, ToolReported):
                    self._tell(step)
                elif isinstance(step, Notice):
                    self.screen.note(step.text)
        return cost

    def _list(self, listing: ToolRefresh) -> None:
        with without_echo(self.screen.environment.stdin), interruptible(listing.cancel):
            list(follow(listing.events, self.screen, type(None)))
        if listing.is_cancelled:
            raise KeyboardInterrupt

    def _ask(self, question: ApprovalRequest) -> None:
        screen, said = self.screen, format_call(question.call)
        if self._is_refused:
            return
        if not screen.environment.is_interactive:
            screen.note_once(f"there is no terminal for questions: calls of {question.tool.name} are refused (--yes-tools allows all, "
                             f"autoApprove of {question.tool.server} in {self.source} some)")
            return
        is_cut = len(said) > SHOWN_LETTERS
        screen.note(f"{question.tool.server} wants to run {said[:SHOWN_LETTERS]}{'…' if is_cut else ''}")
        discard_typeahead(screen)
        while True:
            try:
                reply = screen.prompt(f"Call it? {CHOICES}{f', [s]how all {len(said)} characters' if is_cut else ''}:")
            except KeyboardInterrupt:
                question.is_over = self.was_stopped = True
                screen.note("stopped by Ctrl-C: no more tools are called")
                return
            word = reply.strip().lower()
            if word in ("s", "show") and is_cut:
                screen.note(said)
                continue
            if word in ("a", "always"):
                self.box.approved.add(question.tool.name)
            self._is_refused = word in ("x", "exit", "none")
            question.is_allowed = word in ("y", "yes", "a", "always")
            if reply and word not in ("y", "yes", "a", "always", "n", "no", "x", "exit", "none"):
                continue
            return

    def _run(self, running: ToolExecution) -> None:
        stdin = self.screen.environment.stdin
        with without_echo(stdin), interruptible(running.cancel):
            list(follow(running.events, self.screen, type(None)))
        if running.is_cancelled:
            self.was_stopped = True
            self.screen.note(f"stopped by {termination_signal() or 'Ctrl-C'}: {running.call.name} was cancelled")

    def _tell(self, told_: ToolReported) -> None:
        call, found = told_.call, told_.found
        self.calls.append({"name": call.name, "server": told_.tool and told_.tool.server, "arguments": json.loads(call.arguments or "{}"),
                           "result": told_.text, "is_error": found is None or found.is_error, "was_run": found is not None})
        line = " ".join(told_.text.split())
        if found is not None:
            self.screen.note(f"{brief(format_call(call))} → {brief(line)}{f' ({len(told_.text)} characters)' if len(line) > BRIEF else ''}")
        elif told_.tool is None or not self.was_stopped:
            self.screen.note(f"{brief(format_call(call))} was not run: {line.removeprefix('Error: ')}")
        for remark in told_.remarks:
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
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"


def discard_typeahead(screen: Screen) -> None:
    """Discard what was typed during the answer: it was not meant for this question."""
    import termios

    termios.tcflush(screen.environment.stdin, termios.TCIFLUSH)


def tools(chat: Conversation, rest: str) -> None:
    """`/tools`, `/tools on NAME`, `/tools off NAME`."""
    if chat.tools is None:
        raise UsageError("there are no tools in this chat", "start it with tools: effllm chat MODEL --mcp FILE")
    word, _, name = rest.partition(" ")
    box = chat.tools.box
    if word:
        if word not in ("on", "off") or not name.strip():
            raise UsageError(f"/tools takes on or off and the name of a tool or server, not {rest!r:.80}", "/tools off NAME")
        box.turn(name.strip(), word == "on")
        chat.session.tools = box.tools
    for client in box.clients:
        own = [tool for tool in box.found if tool.client is client]
        chat.screen.note(f"{client.entry.name}: {len(own)} tools" if own else f"{client.entry.name}: no tools")
        for tool in own:
            how = "off" if tool.name in box.off else "on, without asking" if tool.name in box.approved else "on"
            chat.screen.note(f"  {tool.name} ({how})  {brief(tool.description.strip().partition(chr(10))[0])}".rstrip(), 4)


def names(chat: Conversation) -> list[str]:
    """Names of tools and servers, for completion."""
    box = chat.tools and chat.tools.box
    return [*dict.fromkeys(name for tool in box.found for name in (tool.server, tool.name))] if box else []


def refuse_raw_tools(raw: bool, flags: ToolFlags) -> None:
    """Raises UsageError for tools with --raw."""
    if raw and flags.mcp is not None and "mcp" not in flags.settled:
        raise UsageError("--mcp cannot be combined with --raw", "drop one of them")
