"""An answer that calls tools, in rounds: it is written, its calls are asked for and run, what they gave back is told, and it goes on.

Each step is a value that whoever shows the conversation carries out, in order: shows what is written, decides on a question, waits for
what runs. However it ends, every call of the history has something that it gave back, so that any template takes it.
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
REFUSED = "Error: the person did not allow this call."
STOPPED = "Error: the person stopped this before it was run."
GIVEN_UP = "Error: the person stopped this before it had given anything back."


@dataclass(frozen=True)
class Generating:
    """Events of an answer."""

    events: Iterator[Event]


@dataclass
class ApprovalRequest:
    """May this be called? `is_allowed` is for whoever asks to set; `is_over`: nothing more is to be called, or said."""

    call: Call
    tool: Tool
    is_allowed: bool = False
    is_over: bool = False


class Cancellable:
    """A step that runs as its `events` are read; `cancel` gives it up."""

    is_cancelled = False
    events: Iterator[Progress | Notice]

    def __post_init__(self) -> None:
        self.events = self._run()

    def cancel(self) -> None:
        """Safe in a signal handler."""
        self.is_cancelled = True


@dataclass
class ToolExecution(Cancellable):
    """A call that was allowed. `found`: what it gave back."""

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
    """What of a call is in the history now: `text` is what the model reads, `found` what the tool gave back, if it was called."""

    call: Call
    tool: Tool | None
    text: str
    found: ToolResult | None = None
    remarks: tuple[str, ...] = ()


@dataclass
class ToolRefresh(Cancellable):
    """Servers that offer other tools now are asked for them. Given up, so is the answer."""

    box: Toolbox

    def _run(self) -> Iterator[Progress | Notice]:
        with suppress(Cancelled):
            yield from self.box.renew(lambda: self.is_cancelled)


Step = Generating | ToolRefresh | ApprovalRequest | ToolExecution | ToolReported | Notice


def agent_loop(session: Session, events: Iterator[Event], box: Toolbox, most: int = MOST_ROUNDS) -> Iterator[Step]:
    """The steps of an answer of `session`, begun by `events`, that may call the tools of a box in at most `most` rounds. To be closed."""
    try:
        yield from _listed(session, box)
        yield Generating(events)
        done = 0
        while session.open_calls:
            is_over = session.was_cancelled
            if done == most and not is_over:
                yield Notice(f"the answer called tools {most} times over: nothing more is called (--tool-rounds N allows more)")
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
    """The session knows the tools that there are now."""
    if box.is_changed:
        yield ToolRefresh(box)
        session.tools = box.tools


def append_result(session: Session, call: Call, tool: Tool | None, otherwise: str, found: ToolResult | None = None) -> ToolReported:
    """Put what a call gave back into the history, as much of it as the context has room for."""
    if found is None:
        session.take_result(call, otherwise)
        return ToolReported(call, tool, otherwise)
    text, remarks, pictures = found.text, [], []
    for number, data in enumerate(found.pictures, 1):
        try:
            pictures.append(session.picture(decode_image(data, f"picture {number} of {call.name}")))
        except EffllmError as error:  # a model that takes none, or what is none
            remarks.append(f"picture {number} of {call.name} is left out: {error.message}")
            text += f"\n[picture {number} is left out: {error.message}]"
    text, left = truncated_to_context(session, text)
    if left:
        remarks.append(f"the context has room for part of what {call.name} gave back: {left} tokens are left out (-c for a larger one)")
    session.take_result(call, text, pictures)
    return ToolReported(call, tool, text, found, tuple(remarks))


def truncated_to_context(session: Session, text: str) -> tuple[str, int]:
    """As much of a text as the context has room for, which says itself what is missing, and how many tokens that are."""
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
