"""Responses of before, which a request of OpenAI's Responses API may name in the place of what it would send again: by
`previous_response_id`, or item by item. Programs do so unless they ask for nothing to be kept (`store` false). They lie in memory, the
newest of them, until the server ends."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from .problems import Problem
from .responses_fields import NOT_KEPT, ResponsesAsked

MOST_NBYTES = 16 << 20  # of all of them, about; one that is larger is not kept
OF_AN_OBJECT = 64  # bytes beside texts, about
REFERENCE = "item_reference"
Item = dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """What a request said, behind the response `before` it if it named one, and what it was answered."""

    before: str | None
    said: Sequence[Item]
    answered: Sequence[Item]
    nbytes: int


class KeptResponses:
    def __init__(self, most: int = MOST_NBYTES) -> None:
        self._most, self._nbytes = most, 0
        self._kept: dict[str, Kept] = {}  # by their names, the oldest first
        self._items: dict[str, Item] = {}  # those that were answered, by theirs

    def own(self, asked: ResponsesAsked) -> list[Item]:
        """The items that a request brings, with those that it names. Raises Problem for one that is not kept."""
        if isinstance(asked.input, str):
            return [{"role": "user", "content": asked.input}]
        return [self._meant(item, f"input[{at}]") for at, item in enumerate(asked.input if isinstance(asked.input, list) else ())]

    def whole(self, asked: ResponsesAsked, own: Sequence[Item]) -> ResponsesAsked:
        """The request with all that was said before it. Raises Problem for a response that is not kept."""
        if not isinstance(asked.input, str | list):  # which is refused where items are read
            return asked
        before: list[Item] = []
        name = asked.previous_response_id
        while name is not None:
            kept = self._kept.get(name)
            if kept is None:
                raise Problem(400, f"previous_response_id: {name!r:.60} is not kept here, or no longer: {NOT_KEPT}",
                              param="previous_response_id", code="previous_response_not_found")
            before = [*kept.said, *kept.answered, *before]
            name = kept.before
        if asked.previous_response_id is None and isinstance(asked.input, str):
            return asked
        return asked.model_copy(update={"input": deepcopy([*before, *own])})  # where a picture was stands a mark in the end

    def keep(self, name: str, asked: ResponsesAsked, own: Sequence[Item], answered: Sequence[Item]) -> None:
        """A response that has ended; the oldest make room for it."""
        nbytes = nbytes_of([*own, *answered])
        if asked.store is False or nbytes > self._most:
            return
        self._kept[name] = Kept(asked.previous_response_id, own, answered, nbytes)
        self._items |= {item["id"]: item for item in answered}
        self._nbytes += nbytes
        while self._nbytes > self._most:
            gone = self._kept.pop(next(iter(self._kept)))
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


def nbytes_of(value: object) -> int:
    """What a value takes, about, without a copy of it: pictures are megabytes of text."""
    if isinstance(value, str):
        return len(value)
    inner = value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return OF_AN_OBJECT + sum(map(nbytes_of, inner))
