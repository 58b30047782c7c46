"""Endpoints on stored responses and conversations, answered from memory without the model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .background import NOT_STREAMED, BackgroundResponses, EventReplay
from .bodies import read_request
from .conversations import MAX_DIGITS, Conversations, page_of
from .guard import RECORD
from .openai_requests import Body
from .problems import Problem
from .response_store import ResponseStore
from .responses_requests import check_items
from .streams import CLIENT_CLOSED_REQUEST, json_response, unless_disconnected

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
STORED_PATHS = (f"{RESPONSES}/{{name}}", f"{RESPONSES}/{{name}}/input_items", f"{CONVERSATIONS}/{{name}}",
                f"{CONVERSATIONS}/{{name}}/items",
                f"{CONVERSATIONS}/{{name}}/items/{{item}}")  # named without their model
CANCEL = f"{RESPONSES}/{{name}}/cancel"
END = f"{RESPONSES}/{{name}}/end"  # for the router, which keeps a model loaded until then
MAX_ITEMS = 20  # of one request, as OpenAI has it
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # pairs; characters of each


class ConversationRequest(Body):
    """Creates or changes a conversation."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    model: str | None = None
    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class AddItemsRequest(Body):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    items: list[dict[str, Any]]


class ResponsesPaths:
    def __init__(self, kept: ResponseStore, conversations: Conversations, background: BackgroundResponses) -> None:
        self._responses, self._conversations, self._background = kept, conversations, background

    def routes(self) -> list[Route]:
        get, post, delete = (partial(Route, methods=[method]) for method in ("GET", "POST", "DELETE"))
        response, read_for, conversation, items, item = STORED_PATHS
        return [get(response, self.response), delete(response, self.forget), get(read_for, self.input_items), post(CANCEL, self.cancel),
                get(END, self.end), post(CONVERSATIONS, self.begin), get(conversation, self.conversation), post(conversation, self.change),
                delete(conversation, self.drop), get(items, self.items), post(items, self.add), get(item, self.item),
                delete(item, self.drop_item)]

    async def response(self, request: Request) -> Response:
        name, query = request.path_params["name"], request.query_params
        running = self._background.find(name)
        if query.get("stream", "false") == "false":
            request.scope[RECORD].is_unlogged = running is not None  # clients poll it many times a second
            return json_response(self._responses.get(name) if running is None else running.response)
        if (events := self._responses.events(name) if running is None else running.events) is None:
            raise Problem(400, NOT_STREAMED, param="stream", code="unsupported_parameter")
        return EventReplay(events, name, running, first_event(query.get("starting_after")))

    async def forget(self, request: Request) -> Response:
        if (running := self._background.find(name := request.path_params["name"])) is not None:
            running.cancel()
        self._responses.delete(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        return json_response(page_of(self._responses.list_input_items(request.path_params["name"]), request.query_params))

    async def cancel(self, request: Request) -> Response:
        """Has no effect on a response that has ended, as clients cannot know."""
        if (running := self._background.find(name := request.path_params["name"])) is not None:
            running.cancel()
        if not (response := self._responses.get(name))["background"]:
            raise Problem(400, "this response did not run in the background, and is complete: there is nothing to cancel",
                          code="not_cancellable")
        return json_response(response)

    async def end(self, request: Request) -> Response:
        """Answers when a response has ended."""
        request.scope[RECORD].is_unlogged = True
        running = self._background.find(request.path_params["name"])

        async def ended() -> Response:
            while running is not None and not running.has_ended:
                await running.changed()
            return json_response({})

        return await unless_disconnected(request.receive, ended(), lambda: None) or Response(status_code=CLIENT_CLOSED_REQUEST)

    async def begin(self, request: Request) -> Response:
        payload = await read_request(request, ConversationRequest)
        return json_response(self._conversations.create(checked_items(payload.items or []), metadata_of(payload)).to_json())

    async def conversation(self, request: Request) -> Response:
        return json_response(self._conversations.find(request.path_params["name"]).to_json())

    async def change(self, request: Request) -> Response:
        payload = await read_request(request, ConversationRequest)
        return json_response(self._conversations.set_metadata(request.path_params["name"], metadata_of(payload)).to_json())

    async def drop(self, request: Request) -> Response:
        self._conversations.drop(name := request.path_params["name"])
        return json_response({"id": name, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        return json_response(page_of(self._conversations.find(request.path_params["name"]).items, request.query_params))

    async def add(self, request: Request) -> Response:
        items = checked_items((await read_request(request, AddItemsRequest)).items)
        return json_response(page_of(self._conversations.add(request.path_params["name"], items), {"order": "asc"}))

    async def item(self, request: Request) -> Response:
        return json_response(self._conversations.item(request.path_params["name"], request.path_params["item"]))

    async def drop_item(self, request: Request) -> Response:
        return json_response(self._conversations.drop_item(request.path_params["name"], request.path_params["item"]).to_json())


def checked_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items that a conversation may hold, checked now rather than when it is continued. Raises Problem."""
    if len(items) > MAX_ITEMS:
        raise Problem(400, f"at most {MAX_ITEMS} items are accepted: send the others in another request", param="items")
    check_items(items)
    return items


def first_event(said: str | None) -> int:
    """The number of the first event to send, by `starting_after`, the last that the client has. Raises Problem."""
    if said is None:
        return 0
    if not said.isdecimal() or len(said) > MAX_DIGITS:
        raise Problem(400, f"starting_after has to be the sequence_number of an event, not {said!r:.40}", param="starting_after")
    return int(said) + 1


def metadata_of(payload: ConversationRequest) -> dict[str, str]:
    """Raises Problem for too many pairs, or too long ones: OpenAI's limits."""
    if len(payload.metadata or {}) > MAX_METADATA:
        raise Problem(400, f"metadata may have at most {MAX_METADATA} pairs", param="metadata")
    for key, value in (payload.metadata or {}).items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise Problem(400, f"metadata: keys have at most {MAX_KEY} characters, values {MAX_VALUE}", param=f"metadata.{key:.{MAX_KEY}}")
    return payload.metadata or {}
