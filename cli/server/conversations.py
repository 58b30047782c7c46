"""Conversations of OpenAI's API: named lists of items, which a Responses request continues, and to which its items and those of its answer
are appended. They are kept in memory until the server ends, least recently used ones dropped first."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .problems import LEAVE_ONE_OUT, Problem
from .response_store import Item, named_items
from .responses_requests import ResponsesRequest
from .store_limits import ENTRY_NBYTES, MAX_STORE_NBYTES, nbytes_of

MAX_DIGITS = 9  # of a number in a path or a query: int() refuses thousands of them
DROPPED_HINT = "the least recently used are dropped first: create a new one"


@dataclass
class Conversation:
    """A stored conversation. `metadata` is returned as the client sent it."""

    id: str
    metadata: dict[str, str]
    created: int = field(default_factory=lambda: int(time.time()))
    items: list[Item] = field(default_factory=list)
    nbytes: int = 0

    def to_json(self) -> dict[str, object]:
        return {"id": self.id, "object": "conversation", "created_at": self.created, "metadata": self.metadata}


class Conversations:
    """The stored conversations, `max_nbytes` in all."""

    def __init__(self, max_nbytes: int = MAX_STORE_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._conversations: dict[str, Conversation] = {}  # by id, least recently used first

    def create(self, items: Sequence[Item], metadata: Mapping[str, str]) -> Conversation:
        """Store a new conversation. Raises Problem for items larger than the limit."""
        conversation = Conversation(f"conv_{uuid.uuid4().hex}", dict(metadata), nbytes=nbytes_of(metadata) + ENTRY_NBYTES)
        self._conversations[conversation.id] = conversation
        try:
            self.add(conversation.id, items)
        except Problem:
            del self._conversations[conversation.id]
            raise
        return conversation

    def find(self, name: str, param: str | None = None) -> Conversation:
        """The conversation of that id. `param`: the request field that names it, None for the path. Raises Problem if it is not stored."""
        if (conversation := self._conversations.pop(name, None)) is None:
            raise Problem(400 if param else 404, f"conversation {name!r:.60} does not exist, or no longer: {DROPPED_HINT}", param=param,
                          code="conversation_not_found")
        self._conversations[name] = conversation
        return conversation

    def history(self, payload: ResponsesRequest) -> Sequence[Item]:
        """The items of the conversation that a request continues, none if it names none. Raises Problem."""
        if payload.conversation_id is None:
            return ()
        if payload.previous_response_id is not None:
            raise Problem(400, "conversation and previous_response_id both set the history", param="conversation", hint=LEAVE_ONE_OUT)
        return (*self.find(payload.conversation_id, "conversation").items,)

    def add(self, name: str, items: Sequence[Item]) -> list[Item]:
        """Append items, and return them with ids. Least recently used conversations are dropped for them. Raises Problem."""
        conversation = self.find(name)
        added = named_items(items, f"_{uuid.uuid4().hex}")
        nbytes = sum(map(nbytes_of, added))
        if conversation.nbytes + nbytes > self._max_nbytes:
            raise Problem(400, f"the conversation would exceed {self._max_nbytes >> 20} MiB: create a new one",
                          code="conversation_too_large")
        conversation.items += added
        conversation.nbytes += nbytes
        while sum(each.nbytes for each in self._conversations.values()) > self._max_nbytes:
            del self._conversations[next(iter(self._conversations))]
        return added

    def append_answer(self, name: str, items: Sequence[Item]) -> None:
        """Append the items of a request and of its answer, if the conversation still exists."""
        if name in self._conversations:
            self.add(name, items)

    def item(self, name: str, item_id: str) -> Item:
        """The item of that id. Raises Problem for an unknown one."""
        found = next((each for each in self.find(name).items if each["id"] == item_id), None)
        if found is None:
            raise Problem(404, f"item {item_id!r:.60} is not in this conversation", code="item_not_found")
        return found

    def drop_item(self, name: str, item_id: str) -> Conversation:
        """Remove an item. Raises Problem for an unknown one."""
        item, conversation = self.item(name, item_id), self.find(name)
        conversation.items.remove(item)
        conversation.nbytes -= nbytes_of(item)
        return conversation

    def drop(self, name: str) -> None:
        """Remove a conversation. Raises Problem for an unknown one."""
        del self._conversations[self.find(name).id]

    def set_metadata(self, name: str, metadata: dict[str, str]) -> Conversation:
        """Replace its metadata. Raises Problem."""
        conversation = self.find(name)
        conversation.nbytes += nbytes_of(metadata) - nbytes_of(conversation.metadata)
        conversation.metadata = metadata
        return conversation


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of items by the query: newest first unless `order` is asc, `limit` items `after` an id. Raises Problem."""
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise Problem(400, f"order has to be asc or desc, not {order!r:.40}", param="order")
    if not limit.isdecimal() or len(limit) > MAX_DIGITS or not 1 <= int(limit) <= 100:
        raise Problem(400, f"limit has to be 1 to 100, not {limit!r:.40}", param="limit")
    rest = [*items] if order == "asc" else [*reversed(items)]
    if after:
        index = next((index for index, each in enumerate(rest) if each["id"] == after), None)
        if index is None:
            raise Problem(400, f"after: there is no item {after!r:.60} in this list", param="after")
        rest = rest[index + 1 :]
    data = rest[: int(limit)]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(rest) > len(data)}
