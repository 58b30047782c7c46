"""The agent loop: an answer is generated, its tool calls are approved and run, their results are appended, and generation continues.

Each step is a value that the caller acts on, in order: displays text, decides on an approval, waits for a tool. However the loop ends,
every tool call in the history has a result, so that any chat template accepts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ... import EffllmError
from ..events import Call, Event, Notice, Progress
from ..images.image_file import decode_image
from ..session import Session
from .client import Cancelled
from .results import ToolResult
from .toolbox import Tool, Toolbox, arguments_of

MOST_ROUNDS = 25
ANSWER_TOKENS = 512  # that are kept free for an answer behind what a tool gave back, at most a quarter of the context
SHORTEST = 16  # tokens of a result that are worth telling
REFUSED = "Error: the user did not allow this call."
STOPPED = "Error: the user stopped this before it ran."
GIVEN_UP = "Error: the user stopped this before it returned anything."


@dataclass(frozen=True)
class Generating:
    """A stream of generated events."""

    events: Iterator[Event]


@dataclass
class ApprovalRequest:
    """May this tool be called? The caller sets `is_allowed`; `is_over` stops the loop."""

    call: Call
    tool: Tool
    is_allowed: bool = False
    is_over: bool = False


class Cancellable:
    """A step that runs while its `events` are consumed; `cancel` stops it."""

    is_cancelled = False
    events: Iterator[Progress | Notice]

    def __post_init__(self) -> None:
        self.events = self._run()

    def cancel(self) -> None:
        """Safe in a signal handler."""
        self.is_cancelled = True


@dataclass
class ToolExecution(Cancellable):
    """A call that was approved. `found`: its result."""

    call: Call
    tool: Tool
    box: Toolbox
    found: ToolResult | None = None

    def _run(self) -> Iterator[Progress | Notice]:
        try:
            for event in self.box.call(self.tool, arguments_of(self.call.arguments), lambda: self.is_cancelled):
                if isinstance(event, ToolResult):
                    self.found = event
                else:
                    yield event
        except Cancelled:
            self.found = None


@dataclass(frozen=True)
class ToolReported:
    """A tool result was appended: `text` is what the model reads, `found` the tool's result, None if it was not called."""

    call: Call
    tool: Tool | None
    text: str
    found: ToolResult | None = None
    remarks: tuple[str, ...] = ()


@dataclass
class ToolRefresh(Cancellable):
    """Asks servers whose tools changed for the new list. Cancelling it cancels the answer."""

    box: Toolbox

    def _run(self) -> Iterator[Progress | Notice]:
        with suppress(Cancelled):
            yield from self.box.renew(lambda: self.is_cancelled)


Step = Generating | ToolRefresh | ApprovalRequest | ToolExecution | ToolReported | Notice


def agent_loop(session: Session, events: Iterator[Event], box: Toolbox, most: int = MOST_ROUNDS) -> Iterator[Step]:
    """The steps of an answer of `session`, begun by `events`, that may call the tools of `box` in at most `most` rounds. Close the
    generator."""
    try:
        yield from _listed(session, box)
        yield Generating(events)
        done = 0
        while session.open_calls:
            is_over = session.was_cancelled
            if done == most and not is_over:
                yield Notice(f"the answer reached the limit of {most} tool rounds: no more tools are called (--tool-rounds N allows more)")
                is_over = True
            for call in list(session.open_calls):
                if is_over:
                    yield append_result(session, call, None, STOPPED)
                    continue
                tool = box.find(call.name)
                if tool is None:
                    known = ", ".join(each.name for each in box.on)
                    yield append_result(session, call, None, f"Error: there is no tool {call.name}; there are: {known}")
                    continue
                if tool.name not in box.approved:
                    question = ApprovalRequest(call, tool)
                    yield question
                    is_over = question.is_over
                    if not question.is_allowed:
                        yield append_result(session, call, tool, STOPPED if is_over else REFUSED)
                        continue
                running = ToolExecution(call, tool, box)
                yield running
                is_over = running.is_cancelled
                yield append_result(session, call, tool, GIVEN_UP, running.found)
            if is_over:
                return
            done += 1
            yield from _listed(session, box)
            session.tools = box.tools
            yield Generating(session.go_on())
    finally:
        for call in list(session.open_calls):
            session.take_result(call, STOPPED)


def _listed(session: Session, box: Toolbox) -> Iterator[Step]:
    """Give the session the current tools."""
    if box.is_changed:
        yield ToolRefresh(box)
        session.tools = box.tools


def append_result(session: Session, call: Call, tool: Tool | None, otherwise: str, found: ToolResult | None = None) -> ToolReported:
    """Append a tool result to the history, truncated to the context."""
    if found is None:
        session.take_result(call, otherwise)
        return ToolReported(call, tool, otherwise)
    text, remarks, pictures = found.text, [], []
    for number, data in enumerate(found.pictures, 1):
        try:
            pictures.append(session.picture(decode_image(data, f"image {number} of {call.name}")))
        except EffllmError as error:  # a model that takes none, or what is none
            remarks.append(f"image {number} of {call.name} is left out: {error.message}")
            text += f"\n[image {number} is left out: {error.message}]"
    text, left = truncated_to_context(session, text)
    if left:
        remarks.append(f"the context has room for only part of the result of {call.name}: {left} tokens are left out (-c for a larger one)")
    session.take_result(call, text, pictures)
    return ToolReported(call, tool, text, found, tuple(remarks))


def truncated_to_context(session: Session, text: str) -> tuple[str, int]:
    """As much of a text as the context has room for, with a remark on what is missing; and its number of tokens."""
    whole = session.count(text)
    room = session.n_ctx - session.used - min(ANSWER_TOKENS, session.n_ctx // 4)
    if session.engine.options.overflow == "shift":
        room = max(room, session.n_ctx // 4)
    if whole <= max(0, room - SHORTEST):
        return text, 0
    kept = text[: len(text) * max(0, room - 2 * SHORTEST) // max(1, whole)]
    while kept and session.count(kept) > room - 2 * SHORTEST:
        kept = kept[: len(kept) * 7 // 8]
    left = whole - session.count(kept) if kept else whole
    return f"{kept}\n[shortened: {left} of {whole} tokens are left out, since the context is full]".lstrip("\n"), left
