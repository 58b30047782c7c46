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

MAX_ROUNDS = 25
ANSWER_TOKENS = 512  # reserved for the answer after a tool result, at most a quarter of the context
MIN_RESULT_TOKENS = 16  # a shorter part of a result is not worth including
REFUSED = "Error: the user did not allow this call."
STOPPED = "Error: the user stopped this before it ran."
CANCELLED = "Error: the user stopped this before it returned anything."


@dataclass(frozen=True)
class Generating:
    """A stream of generated events."""

    events: Iterator[Event]


@dataclass
class ApprovalRequest:
    """Asks whether a tool may be called. The caller sets `is_allowed`, or `is_stopped` to end the loop."""

    call: Call
    tool: Tool
    is_allowed: bool = False
    is_stopped: bool = False


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
    """An approved call. `result`: None until it returned, and where it was cancelled."""

    call: Call
    tool: Tool
    box: Toolbox
    result: ToolResult | None = None

    def _run(self) -> Iterator[Progress | Notice]:
        try:
            for event in self.box.call(self.tool, arguments_of(self.call.arguments), lambda: self.is_cancelled):
                if isinstance(event, ToolResult):
                    self.result = event
                else:
                    yield event
        except Cancelled:
            self.result = None


@dataclass(frozen=True)
class ToolReported:
    """A tool result was appended to the history."""

    call: Call
    tool: Tool | None  # None if there is none of this name
    text: str  # what the model reads
    result: ToolResult | None = None  # None if the tool was not called
    remarks: tuple[str, ...] = ()  # notes for the user: what was left out


@dataclass
class ToolRefresh(Cancellable):
    """Asks servers whose tools changed for the new list. Cancelling it cancels the answer."""

    box: Toolbox

    def _run(self) -> Iterator[Progress | Notice]:
        with suppress(Cancelled):
            yield from self.box.refresh(lambda: self.is_cancelled)


Step = Generating | ToolRefresh | ApprovalRequest | ToolExecution | ToolReported | Notice


def agent_loop(session: Session, events: Iterator[Event], box: Toolbox, max_rounds: int = MAX_ROUNDS) -> Iterator[Step]:
    """The steps of an answer of `session`, begun by `events`, that may call the tools of `box` in at most `max_rounds` rounds.

    The caller must close the generator.
    """
    try:
        yield from _refresh_tools(session, box)
        yield Generating(events)
        rounds = 0
        while session.open_calls:
            is_stopped = session.was_cancelled
            if rounds == max_rounds and not is_stopped:
                yield Notice(f"the answer reached the limit of {max_rounds} tool rounds: no more tools are called "
                             "(--tool-rounds N allows more)")
                is_stopped = True
            for call in list(session.open_calls):
                if is_stopped:
                    yield append_result(session, call, None, STOPPED)
                    continue
                tool = box.find(call.name)
                if tool is None:
                    names = ", ".join(other.name for other in box.enabled)
                    yield append_result(session, call, None, f"Error: there is no tool {call.name}; there are: {names}")
                    continue
                if tool.name not in box.approved:
                    request = ApprovalRequest(call, tool)
                    yield request
                    is_stopped = request.is_stopped
                    if not request.is_allowed:
                        yield append_result(session, call, tool, STOPPED if is_stopped else REFUSED)
                        continue
                execution = ToolExecution(call, tool, box)
                yield execution
                is_stopped = execution.is_cancelled
                yield append_result(session, call, tool, CANCELLED, execution.result)
            if is_stopped:
                return
            rounds += 1
            yield from _refresh_tools(session, box)
            session.tools = box.tools
            yield Generating(session.answer_tool_results())
    finally:
        for call in list(session.open_calls):
            session.take_result(call, STOPPED)


def _refresh_tools(session: Session, box: Toolbox) -> Iterator[Step]:
    """Give the session the current tools, if a server changed its list."""
    if box.is_changed:
        yield ToolRefresh(box)
        session.tools = box.tools


def append_result(session: Session, call: Call, tool: Tool | None, error_text: str, result: ToolResult | None = None) -> ToolReported:
    """Append a tool result to the history, truncated to the context; `error_text` where there is none."""
    if result is None:
        session.take_result(call, error_text)
        return ToolReported(call, tool, error_text)
    text, remarks, images = result.text, [], []
    for number, data in enumerate(result.images, 1):
        try:
            images.append(session.add_media(decode_image(data, f"image {number} of {call.name}")))
        except EffllmError as error:  # the model takes no images, or the data is not an image
            remarks.append(f"image {number} of {call.name} is left out: {error.message}")
            text += f"\n[image {number} is left out: {error.message}]"
    text, dropped_tokens = truncated_to_context(session, text)
    if dropped_tokens:
        remarks.append(f"the context has room for only part of the result of {call.name}: {dropped_tokens} tokens are left out "
                       "(-c for a larger one)")
    session.take_result(call, text, images)
    return ToolReported(call, tool, text, result, tuple(remarks))


def truncated_to_context(session: Session, text: str) -> tuple[str, int]:
    """As much of a text as the context has room for, with a remark on what is missing; and its number of tokens."""
    total = session.count(text)
    available = session.n_ctx - session.used - min(ANSWER_TOKENS, session.n_ctx // 4)
    if session.engine.options.overflow == "shift":
        available = max(available, session.n_ctx // 4)
    if total <= max(0, available - MIN_RESULT_TOKENS):
        return text, 0
    kept = text[: len(text) * max(0, available - 2 * MIN_RESULT_TOKENS) // max(1, total)]
    while kept and session.count(kept) > available - 2 * MIN_RESULT_TOKENS:
        kept = kept[: len(kept) * 7 // 8]
    dropped = total - session.count(kept) if kept else total
    return f"{kept}\n[shortened: {dropped} of {total} tokens are left out, since the context is full]".lstrip("\n"), dropped
