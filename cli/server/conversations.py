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

LOST = "the least recently used are dropped first: create a new one"


@dataclass
class Conversation:
    """`metadata`: the client's own, returned as it was sent."""

    id: str
    metadata: dict[str, str]
    created: int = field(default_factory=lambda: int(time.time()))
    items: list[Item] = field(default_factory=list)
    nbytes: int = 0

    def told(self) -> dict[str, object]:
        return {"id": self.id, "object": "conversation", "created_at": self.created, "metadata": self.metadata}


class Conversations:
    """At most `most` bytes in all."""

    def __init__(self, most: int = MAX_STORE_NBYTES) -> None:
        self._most = most
        self._held: dict[str, Conversation] = {}  # by id, least recently used first

    def begin(self, items: Sequence[Item], metadata: Mapping[str, str]) -> Conversation:
        """Raises Problem for items larger than the limit."""
        made = Conversation(f"conv_{uuid.uuid4().hex}", dict(metadata), nbytes=nbytes_of(metadata) + ENTRY_NBYTES)
        self._held[made.id] = made
        try:
            self.add(made.id, items)
        except Problem:
            del self._held[made.id]
            raise
        return made

    def find(self, name: str, param: str | None = None) -> Conversation:
        """`param`: the request field that names it, None if the path does. Raises Problem if it is not stored."""
        if (found := self._held.pop(name, None)) is None:
            raise Problem(400 if param else 404, f"conversation {name!r:.60} does not exist, or no longer: {LOST}", param=param,
                          code="conversation_not_found")
        self._held[name] = found
        return found

    def before(self, payload: ResponsesRequest) -> Sequence[Item]:
        """The items of the conversation that a request continues, none if it names none. Raises Problem."""
        if payload.conversation_id is None:
            return ()
        if payload.previous_response_id is not None:
            raise Problem(400, "conversation and previous_response_id both set the history", param="conversation", hint=LEAVE_ONE_OUT)
        return (*self.find(payload.conversation_id, "conversation").items,)

    def add(self, name: str, items: Sequence[Item]) -> list[Item]:
        """Append items, each with an id; least recently used conversations make room. Raises Problem."""
        held = self.find(name)
        added = named_items(items, f"_{uuid.uuid4().hex}")
        more = sum(map(nbytes_of, added))
        if held.nbytes + more > self._most:
            raise Problem(400, f"the conversation would exceed {self._most >> 20} MiB: create a new one", code="conversation_too_large")
        held.items += added
        held.nbytes += more
        while sum(each.nbytes for each in self._held.values()) > self._most:
            del self._held[next(iter(self._held))]
        return added

    def answered(self, name: str, items: Sequence[Item]) -> None:
        """Append what a request said and was answered, if its conversation still exists."""
        if name in self._held:
            self.add(name, items)

    def item(self, name: str, called: str) -> Item:
        """Raises Problem for an unknown item."""
        found = next((each for each in self.find(name).items if each["id"] == called), None)
        if found is None:
            raise Problem(404, f"item {called!r:.60} is not in this conversation", code="item_not_found")
        return found

    def drop_item(self, name: str, called: str) -> Conversation:
        """Raises Problem for an unknown item."""
        found, held = self.item(name, called), self.find(name)
        held.items.remove(found)
        held.nbytes -= nbytes_of(found)
        return held

    def drop(self, name: str) -> None:
        """Raises Problem for an unknown conversation."""
        del self._held[self.find(name).id]

    def changed(self, name: str, metadata: dict[str, str]) -> Conversation:
        """Replace its metadata. Raises Problem."""
        held = self.find(name)
        held.nbytes += nbytes_of(metadata) - nbytes_of(held.metadata)
        held.metadata = metadata
        return held


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of a list of items, by its query: newest first unless `order` is asc, `limit` items `after` an id. Raises Problem."""
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise Problem(400, f"order has to be asc or desc, not {order!r:.40}", param="order")
    if not limit.isdecimal() or not 1 <= int(limit) <= 100:
        raise Problem(400, f"limit has to be 1 to 100, not {limit!r:.40}", param="limit")
    rest = [*items] if order == "asc" else [*reversed(items)]
    if after:
        at = next((at for at, each in enumerate(rest) if each["id"] == after), None)
        if at is None:
            raise Problem(400, f"after: there is no item {after!r:.60} in this list", param="after")
        rest = rest[at + 1 :]
    data = rest[: int(limit)]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(rest) > len(data)}
