"""Stored responses of OpenAI's Responses API, which later requests continue by `previous_response_id` or refer to item by item, and which
clients may retrieve or delete. A response is stored unless its request has `store` false. They are kept in memory until the server ends,
the oldest dropped first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from .event_log import EventLog
from .problems import Problem
from .responses_requests import COMPACTION, RESEND_HINT, ResponsesRequest
from .store_limits import ENTRY_NBYTES, MAX_STORE_NBYTES, nbytes_of

REFERENCE = "item_reference"
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
            "custom_tool_call_output": "ctco", COMPACTION: "cmp"}
Item = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """A response and the input of its request."""

    previous_id: str | None  # of the response that it continues
    input_items: Sequence[Item]
    response: Mapping[str, Any]
    nbytes: int
    events: EventLog | None = None  # of a background response that was streamed

    @property
    def output_items(self) -> Sequence[Item]:
        return self.response["output"]


class ResponseStore:
    def __init__(self, max_nbytes: int = MAX_STORE_NBYTES) -> None:
        self._max_nbytes, self._nbytes = max_nbytes, 0
        self._responses: dict[str, StoredResponse] = {}  # by id, the oldest first
        self._items: dict[str, Item] = {}  # output items, by id

    def input_items(self, payload: ResponsesRequest) -> list[Item]:
        """The items of a request, with references resolved. Raises Problem for an item that is not stored."""
        if isinstance(payload.input, str):
            return [{"role": "user", "content": payload.input}]
        return [self._dereference(item, f"input[{at}]") for at, item in enumerate(payload.input if isinstance(payload.input, list) else ())]

    def with_history(self, payload: ResponsesRequest, new_items: Sequence[Item]) -> ResponsesRequest:
        """The request with its history as input. `new_items`: its own items, after those of its conversation. Raises Problem for a response
        that is not stored."""
        continues = payload.previous_response_id is not None or payload.conversation is not None
        if not continues and not isinstance(payload.input, list) or not isinstance(payload.input, str | list | None):
            return payload  # an invalid input is refused when its items are parsed
        history = self._before(payload.previous_response_id)
        return payload.model_copy(update={"input": deepcopy([*history, *new_items])})  # a copy, in which media are replaced by markers

    def _before(self, name: str | None) -> list[Item]:
        """The items up to and including a response. Raises Problem if one is not stored."""
        items: list[Item] = []
        while name is not None:
            stored = self._responses.get(name)
            if stored is None:
                raise Problem(400, f"previous_response_id: {name!r:.60} is not stored, or no longer: {RESEND_HINT}",
                              param="previous_response_id", code="previous_response_not_found")
            items = [*stored.input_items, *stored.output_items, *items]
            name = stored.previous_id
        return items

    def keep(self, payload: ResponsesRequest, new_items: Sequence[Item], response: Mapping[str, Any],
             events: EventLog | None = None) -> None:
        """Store a response that has ended, with the newest of its events that fit. The oldest responses are dropped for it."""
        nbytes = nbytes_of([*new_items, response]) + ENTRY_NBYTES
        if payload.store is False or nbytes > self._max_nbytes:
            return
        if events is not None:
            while nbytes + events.nbytes > self._max_nbytes:
                events.make_room()
            nbytes += events.nbytes
        self._responses[response["id"]] = StoredResponse(payload.previous_response_id, new_items, response, nbytes, events)
        self._items |= {item["id"]: item for item in response["output"]}
        self._nbytes += nbytes
        while self._nbytes > self._max_nbytes:
            self._drop(next(iter(self._responses)))

    def get(self, name: str) -> Mapping[str, Any]:
        """A stored response. Raises Problem."""
        return self._found(name).response

    def events(self, name: str) -> EventLog | None:
        """The events of a response, None if it was not streamed. Raises Problem."""
        return self._found(name).events

    def delete(self, name: str) -> None:
        """Raises Problem for a response that is not stored."""
        self._found(name)
        self._drop(name)

    def list_input_items(self, name: str) -> list[Item]:
        """The input items of a response, those of earlier responses included, each with an id. Raises Problem."""
        stored = self._found(name)
        return named_items([*self._before(stored.previous_id), *stored.input_items], name)

    def _found(self, name: str) -> StoredResponse:
        if (stored := self._responses.get(name)) is None:
            raise Problem(404, f"response {name!r:.60} is not stored, or no longer: those with store false are not stored, and old ones "
                               "are dropped for new ones", code="response_not_found")
        return stored

    def _drop(self, name: str) -> None:
        dropped = self._responses.pop(name)
        self._nbytes -= dropped.nbytes
        for item in dropped.output_items:
            del self._items[item["id"]]

    def _dereference(self, item: Any, where: str) -> Any:
        """An item, or the one that it refers to."""
        if not isinstance(item, dict) or item.get("type") != REFERENCE and {*item} - {"type"} != {"id"}:
            return item
        found = self._items.get(item["id"]) if isinstance(item.get("id"), str) else None
        if found is None:
            raise Problem(400, f"{where} is not stored, or no longer: {RESEND_HINT}", param=where, code="item_not_found")
        return found


def named_items(items: Sequence[Item], of: str) -> list[Item]:
    """Items as they are listed: each with an id, made from `of` where it has none, and with content parts where it came with a string."""
    return [_as_told(item, f"{of.partition('_')[2]}{number:04x}") for number, item in enumerate(items)]


def _as_told(item: Item, own: str) -> Item:
    kind = item.get("type") or "message"
    made = {"id": f"{PREFIXES.get(kind, 'item')}_{own}", "type": kind, "status": "completed", **item}
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []} if item.get("role") == "assistant" \
            else {"type": "input_text", "text": content}
        made["content"] = [part]
    return made
