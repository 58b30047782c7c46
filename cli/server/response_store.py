"""Responses of before, which a request of OpenAI's Responses API may name in the place of what it would send again: by
`previous_response_id`, or item by item. Programs do so unless they ask for nothing to be kept (`store` false), and may have them told
again, or forgotten. They lie in memory, the newest of them, until the server ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from .event_log import EventLog
from .problems import Problem
from .responses_requests import COMPACTION, NOT_KEPT, ResponsesRequest
from .store_limits import ENTRY_NBYTES, MAX_STORE_NBYTES, nbytes_of

REFERENCE = "item_reference"
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
            "custom_tool_call_output": "ctco", COMPACTION: "cmp"}
Item = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """What a request said, behind the response `before` it if it named one, and the response as it was told; of one that went on in the
    background also its `events`, if its program followed them."""

    before: str | None
    said: Sequence[Item]
    response: Mapping[str, Any]
    nbytes: int
    events: EventLog | None = None

    @property
    def answered(self) -> Sequence[Item]:
        return self.response["output"]


class ResponseStore:
    def __init__(self, most: int = MAX_STORE_NBYTES) -> None:
        self._most, self._nbytes = most, 0
        self._kept: dict[str, StoredResponse] = {}  # by their names, the oldest first
        self._items: dict[str, Item] = {}  # those that were answered, by theirs

    def own(self, payload: ResponsesRequest) -> list[Item]:
        """The items that a request brings, with those that it names. Raises Problem for one that is not kept."""
        if isinstance(payload.input, str):
            return [{"role": "user", "content": payload.input}]
        return [self._meant(item, f"input[{at}]") for at, item in enumerate(payload.input if isinstance(payload.input, list) else ())]

    def whole(self, payload: ResponsesRequest, own: Sequence[Item]) -> ResponsesRequest:
        """The request with all that was said before it, of which what a conversation has is among its `own` already. Raises Problem for
        a response that is not kept."""
        goes_on = payload.previous_response_id is not None or payload.conversation is not None
        if not goes_on and not isinstance(payload.input, list) or not isinstance(payload.input, str | list | None):
            return payload  # what is no input is refused where items are read
        before = self._before(payload.previous_response_id)
        return payload.model_copy(update={"input": deepcopy([*before, *own])})  # where a picture was stands a mark in the end

    def _before(self, name: str | None) -> list[Item]:
        """All that was said and answered up to a response. Raises Problem for one that is not kept."""
        before: list[Item] = []
        while name is not None:
            kept = self._kept.get(name)
            if kept is None:
                raise Problem(400, f"previous_response_id: {name!r:.60} is not kept here, or no longer: {NOT_KEPT}",
                              param="previous_response_id", code="previous_response_not_found")
            before = [*kept.said, *kept.answered, *before]
            name = kept.before
        return before

    def keep(self, payload: ResponsesRequest, own: Sequence[Item], response: Mapping[str, Any], events: EventLog | None = None) -> None:
        """A response that has ended; the oldest make room for it. Of its events the newest are kept that both have room for."""
        nbytes = nbytes_of([*own, response]) + ENTRY_NBYTES
        if payload.store is False or nbytes > self._most:
            return
        if events is not None:
            while nbytes + events.nbytes > self._most:
                events.make_room()
            nbytes += events.nbytes
        self._kept[response["id"]] = StoredResponse(payload.previous_response_id, own, response, nbytes, events)
        self._items |= {item["id"]: item for item in response["output"]}
        self._nbytes += nbytes
        while self._nbytes > self._most:
            self._drop(next(iter(self._kept)))

    def told(self, name: str) -> Mapping[str, Any]:
        """A response, as it was told. Raises Problem."""
        return self._found(name).response

    def events(self, name: str) -> EventLog | None:
        """Of a response, if it was followed. Raises Problem."""
        return self._found(name).events

    def forget(self, name: str) -> None:
        """Raises Problem for one that is not kept."""
        self._found(name)
        self._drop(name)

    def read_for(self, name: str) -> list[Item]:
        """The items that a response is the answer to, those before it too, each with a name. Raises Problem."""
        kept = self._found(name)
        return named_items([*self._before(kept.before), *kept.said], name)

    def _found(self, name: str) -> StoredResponse:
        if (kept := self._kept.get(name)) is None:
            raise Problem(404, f"there is no response {name!r:.60} here, or no longer: those with store false are not kept, and old ones "
                               "make room for new ones", code="response_not_found")
        return kept

    def _drop(self, name: str) -> None:
        gone = self._kept.pop(name)
        self._nbytes -= gone.nbytes
        for item in gone.answered:
            del self._items[item["id"]]

    def _meant(self, item: Any, where: str) -> Any:
        """An item, or the one that it names."""
        if not isinstance(item, dict) or item.get("type") != REFERENCE and {*item} - {"type"} != {"id"}:
            return item
        found = self._items.get(item["id"]) if isinstance(item.get("id"), str) else None
        if found is None:
            raise Problem(400, f"{where} is not kept here, or no longer: {NOT_KEPT}", param=where, code="item_not_found")
        return found


def named_items(items: Sequence[Item], of: str) -> list[Item]:
    """Items as lists of them are told: each with a name, those that came without have one that is made of whose they are, and with parts
    where it came with a text."""
    return [_as_told(item, f"{of.partition('_')[2]}{number:04x}") for number, item in enumerate(items)]


def _as_told(item: Item, own: str) -> Item:
    kind = item.get("type") or "message"
    made = {"id": f"{PREFIXES.get(kind, 'item')}_{own}", "type": kind, "status": "completed", **item}
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []} if item.get("role") == "assistant" \
            else {"type": "input_text", "text": content}
        made["content"] = [part]
    return made
