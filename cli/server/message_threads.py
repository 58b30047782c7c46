"""Threads of Anthropic's Messages API: a request with `thread` has its conversation stored under the id of the answer, and the next one
names that answer and brings only what is new, as anthropic-python's `tool_runner` does. They are kept in memory until the server ends, the
oldest dropped first; a code tells clients to send everything again."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from .messages_requests import CREATE, CountTokensRequest, Tool, Turn
from .problems import THREAD_MISMATCH, THREAD_NOT_FOUND, Problem
from .store_limits import ENTRY_NBYTES, MAX_STORE_NBYTES, nbytes_of


@dataclass(frozen=True)
class ThreadTurn:
    """The messages of a request and its answer."""

    previous_id: str | None  # the answer that it continues
    turns: Sequence[Turn]
    system: Any  # of the whole thread, as are the tools
    tools: list[Tool] | None
    nbytes: int


class MessageThreads:
    """The stored threads, `max_nbytes` in all."""

    def __init__(self, max_nbytes: int = MAX_STORE_NBYTES) -> None:
        self._max_nbytes, self._nbytes = max_nbytes, 0
        self._turns: dict[str, ThreadTurn] = {}  # by answer id, the oldest first

    def with_history(self, payload: CountTokensRequest) -> CountTokensRequest:
        """A copy of the request with its history, in which media are replaced by markers. Raises Problem for an answer that is not
        stored."""
        thread = payload.thread
        if thread is None:
            return payload
        if thread.type == CREATE:
            return payload.model_copy(update={"messages": deepcopy(payload.messages)})
        previous = self._find(thread.previous_message_id)
        for name in ("system", "tools"):
            if (value := getattr(payload, name)) is not None and value != getattr(previous, name):
                raise Problem(400, f"{name} differs from that of the thread: leave it out, or start a new thread", param=name,
                              code=THREAD_MISMATCH)
        turns, name = [*payload.messages], thread.previous_message_id
        while name is not None:
            stored = self._find(name)
            turns, name = [*stored.turns, *turns], stored.previous_id
        return payload.model_copy(update={"messages": deepcopy(turns), "system": previous.system, "tools": previous.tools})

    def keep(self, payload: CountTokensRequest, full_request: CountTokensRequest, name: str, blocks: Sequence[dict[str, Any]]) -> None:
        """Store an answer that has ended, if its request is part of a thread. The oldest ones are dropped for it."""
        if payload.thread is None:
            return
        turns = (*payload.messages, Turn(role="assistant", content=[*blocks]))
        shared = [full_request.system, [tool.model_dump() for tool in full_request.tools or ()]] if payload.thread.type == CREATE else []
        nbytes = nbytes_of([*(turn.model_dump() for turn in turns), *shared]) + ENTRY_NBYTES * len(turns)
        if nbytes > self._max_nbytes:
            return
        self._turns[name] = ThreadTurn(payload.thread.previous_message_id, turns, full_request.system, full_request.tools, nbytes)
        self._nbytes += nbytes
        while self._nbytes > self._max_nbytes:
            self._nbytes -= self._turns.pop(next(iter(self._turns))).nbytes

    def _find(self, name: str | None) -> ThreadTurn:
        if (turn := self._turns.get(name or "")) is None:
            raise Problem(404, f"thread.previous_message_id: {name!r:.60} is not stored, or no longer: start a thread with the whole "
                               "conversation", param="thread.previous_message_id", code=THREAD_NOT_FOUND)
        return turn
