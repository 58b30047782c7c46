"""The server of several models, in front of theirs: a request names its model, is passed on to the server of that one, which is started
where there is none yet, and so is what comes back, piece by piece. No answer is made here.

What is new here is the wait for a model that is loaded: a stream gets a comment every few seconds, as in one that waits for its turn, and
what goes wrong then is its last event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ... import EffllmError
from . import page, responses_fields
from .bodies import body_of, read
from .fields import Body, parsed
from .form_data import parts_of
from .guard import RECORD
from .lasting import seconds_of
from .llama_paths import refuse_change
from .llama_shape import LlamaShape
from .messages_fields import MessagesAsked
from .messages_shape import MessageShape
from .ollama_fields import untagged
from .ollama_front import OllamaFront
from .ollama_shape import UNLOAD, OllamaMessage, OllamaResponse
from .one_model import COUNTED, on_left, on_path, on_problem
from .passing import Answer, Broken, passed_on
from .problems import FAILED, MESSAGES, OLLAMA, Problem, closing
from .reranking import PATHS as RERANKING
from .residents import Resident, Residents
from .responses_fields import ResponsesAsked
from .responses_paths import CANCEL, CONVERSATIONS, TOLD_AGAIN
from .responses_shape import ResponseShape
from .shapes import ChatShape, Shape, TextShape
from .shelf import Shelf, Shelved
from .streams import EVENTS, HEADERS, KEEP_ALIVE_S, LEFT, LINES, json_response, unless_gone, written
from .transcribing import SPOKEN, TranscriptShape, fields_of

GREETING = ("effllm serves models by name: APIs like OpenAI's and Anthropic's under /v1, where /v1/models lists them, and like Ollama's "
            "under /api, whose programs look here for the words \"Ollama is running\"\n")
DEATH_S = 1.0  # a process that dies is known to some milliseconds after its connections have ended


class Named(Body):
    """What is read here of a request that is passed on."""

    not_here: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # the model's server judges

    model: str | None = None
    stream: bool | None = None
    keep_alive: str | int | float | None = None  # as Ollama's API has it, and these
    messages: Any = None
    prompt: Any = None


def response_shape(name: str, body: bytes) -> Shape:
    asked = parsed(ResponsesAsked, body)
    return ResponseShape(name, asked, responses_fields.chat_of(asked)[2])


@dataclass(frozen=True)
class Passed:
    """Paths of requests that models answer. `shape`: of their streams, given the model's name and the body; None where they have no
    stream, which then begins when the model does. `streams`: without being asked to, as Ollama's do."""

    paths: tuple[str, ...]
    shape: Callable[[str, bytes], Shape] | None = None
    streams: bool = False


PASSED = (Passed(("/v1/chat/completions", "/chat/completions"), lambda name, body: ChatShape(name)),
          Passed(("/v1/completions",), lambda name, body: TextShape(name)),
          Passed(("/completion", "/completions", "/infill"), lambda name, body: LlamaShape(name)),
          Passed(("/v1/responses", "/responses"), response_shape),
          Passed((MESSAGES,), lambda name, body: MessageShape(name, parsed(MessagesAsked, body))),
          Passed((f"{OLLAMA}chat",), lambda name, body: OllamaMessage(name), streams=True),
          Passed((f"{OLLAMA}generate",), lambda name, body: OllamaResponse(name), streams=True),
          Passed(("/v1/embeddings", "/embeddings", "/embedding", f"{OLLAMA}embed", f"{OLLAMA}embeddings")), Passed(RERANKING),
          Passed((f"{MESSAGES}/count_tokens", *COUNTED, "/tokenize", "/detokenize", "/apply-template")))
TOLD = ("/props",)  # of a model by its name in the query, which is loaded for it
GLANCED = ("/slots", "/metrics")  # nothing is loaded for these, and asking them is no use of a model: whoever watches asks for ever


@dataclass(frozen=True)
class State:
    """One model, as lists have it: None of what is not so. `since`, `until`: in seconds since 1970."""

    model: Shelved
    context: int | None
    nbytes: int | None = None
    since: float | None = None
    until: float | None = None
    is_loading: bool = False


class Front:
    """`key` is what the servers of models ask for; `most_context` what a person lets each have; `shows_page`: to browsers."""

    def __init__(self, shelf: Shelf, residents: Residents, key: str, most_context: int | None = None, shows_page: bool = True) -> None:
        self.shelf, self.residents, self.key, self._most_context, self._shows_page = shelf, residents, key, most_context, shows_page
        self._created = int(time.time())

    def application(self) -> Starlette:
        get = partial(Route, methods=["GET"])
        routes = [*page.routes(GREETING, self._shows_page), *(get(path, self.health) for path in ("/health", "/v1/health")),
                  *(get(path, self.models) for path in ("/v1/models", "/models")),
                  *(get(path, self.model) for path in ("/v1/models/{name:path}", "/models/{name:path}")),
                  *(Route(path, partial(self.pass_on, passed), methods=["POST"]) for passed in PASSED for path in passed.paths),
                  *(Route(path, self.pass_form, methods=["POST"]) for path in SPOKEN),
                  *(get(path, self.tell) for path in TOLD), *(get(path, self.glance) for path in GLANCED),
                  Route("/slots/{id_slot}", self.act_on_slot, methods=["POST"]), Route("/props", refuse_change, methods=["POST"]),
                  *(Route(path, self.search, methods=["GET", "POST", "DELETE"]) for path in (*TOLD_AGAIN, CANCEL)),
                  Route(CONVERSATIONS, self.begin, methods=["POST"]), *OllamaFront(self).routes(),
                  Route("/models/load", self.load, methods=["POST"]), Route("/models/unload", self.unload, methods=["POST"])]
        return Starlette(routes=routes, exception_handlers={Problem: on_problem, HTTPException: on_path, EffllmError: on_problem,
                                                            ClientDisconnect: on_left, Exception: on_problem})

    async def health(self, request: Request) -> Response:
        if self.residents.is_closed:
            raise closing()
        return json_response({"status": "ok", "waiting": self.residents.waiting})

    async def states(self) -> list[State]:
        """All models, loaded or not: what lists of any API are made of."""
        models = await asyncio.to_thread(self.shelf.models)
        here = {each.key for each in models}
        others = [each.model for each in self.residents.loaded() if each.model.key not in here]  # by names that no list has
        return [self.state(each) for each in (*models, *others)]

    def state(self, model: Shelved) -> State:
        resident = self.residents.find(model)
        if resident is not None:
            return State(model, resident.context, resident.nbytes, resident.since, resident.until)
        contexts = [each for each in (model.facts and model.facts.context, self._most_context) if each]
        return State(model, min(contexts, default=None), is_loading=self.residents.is_loading(model))

    async def models(self, request: Request) -> Response:
        cards = [self._card(each) for each in await self.states()]
        first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
        return json_response({"object": "list", "data": cards, "has_more": False, "first_id": first, "last_id": last})

    async def model(self, request: Request) -> Response:
        found = await asyncio.to_thread(self.shelf.find, request.path_params["name"])
        return json_response(self._card(self.state(found)))

    def _card(self, state: State) -> dict[str, object]:
        """A model as OpenAI's and Anthropic's lists have it, with llama-server's word for whether it is loaded, and
        whether it writes text."""
        made, name, facts = self._created, state.model.name, state.model.facts
        status = "loaded" if state.since is not None else "loading" if state.is_loading else "unloaded"
        return {"id": name, "object": "model", "created": made, "owned_by": "effllm", "max_model_len": state.context,
                "status": {"value": status}, "writes": facts is None or facts.writes, "type": "model", "display_name": name,
                "max_input_tokens": state.context, "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(made))}

    async def load(self, request: Request) -> Response:
        """As llama-server has it, but that what is answered is true then."""
        asked = await read(request, Named)
        resident = await self.residents.take(await self.meant(asked.model))
        self.residents.give_back(resident, keep_of(asked))
        return json_response({"success": True})

    async def unload(self, request: Request) -> Response:
        """Behind the answers that run."""
        model = await self.meant((await read(request, Named)).model)
        if not self.residents.let_go(model):
            raise Problem(400, f"{model.name} is not loaded", param="model", hint="it takes no memory, so there is nothing to unload")
        return json_response({"success": True})

    async def pass_on(self, passed: Passed, request: Request) -> Response:
        body = await body_of(request)
        asked = await asyncio.to_thread(parsed, Named, body)
        model, keep_s = await self.meant(asked.model), keep_of(asked)
        if passed.streams and keep_s == 0 and not asked.messages and not asked.prompt:  # which is how `ollama stop` says it
            self.residents.let_go(model)
            return json_response(passed.shape(asked.model or model.name, body).loaded(UNLOAD))
        streams = passed.streams if asked.stream is None else asked.stream
        shape = await asyncio.to_thread(passed.shape, model.name, body) if passed.shape is not None and streams else None
        return Relay(self, model, shape, body, keep_s)

    async def pass_form(self, request: Request) -> Response:
        body = await body_of(request)
        asked = await asyncio.to_thread(lambda: fields_of(parts_of(request.headers.get("content-type", ""), body)))
        return Relay(self, await self.meant(asked.model), TranscriptShape("transcribe") if asked.stream else None, body, None)

    async def tell(self, request: Request) -> Response:
        return Relay(self, await self.meant(request.query_params.get("model")), None, b"", None)

    async def act_on_slot(self, request: Request) -> Response:
        """Its body may be empty, and the model named in the query."""
        body = await body_of(request)
        named = (await asyncio.to_thread(parsed, Named, body)).model if body.strip() else None
        return Relay(self, await self.meant(named or request.query_params.get("model")), None, body, None)

    async def begin(self, request: Request) -> Response:
        """A conversation is with one model, whose server holds it."""
        body = await body_of(request)
        named = (await asyncio.to_thread(parsed, Named, body)).model if body.strip() else None
        return Relay(self, await self.meant(named or request.query_params.get("model")), None, body, None)

    async def search(self, request: Request) -> Response:
        """Of what is named without its model: the server that holds it tells it."""
        return Search(self, await body_of(request))

    async def glance(self, request: Request) -> Response:
        return Glance(self, await self.meant(request.query_params.get("model")), None, b"", None)

    async def meant(self, name: str | None) -> Shelved:
        """The model that a request is for. Raises Problem."""
        if name := untagged(name or ""):
            return self.residents.named(name) or await asyncio.to_thread(self.shelf.find, name)
        loaded = self.residents.loaded()
        if len(loaded) != 1:
            which = "none is loaded" if not loaded else f"{len(loaded)} are loaded"
            raise Problem(400, f"model is missing, and {which}: name one of those that /v1/models lists", param="model")
        return loaded[0].model


def keep_of(asked: Named) -> float | None:
    """How long a request wants its model to stay. Raises Problem."""
    if asked.keep_alive is None:
        return None
    try:
        return seconds_of(asked.keep_alive)
    except ValueError:
        raise Problem(400, "keep_alive is seconds, or a time as \"5m\"; negative is for ever", param="keep_alive") from None


class Relay(Response):
    """The answer of a model's server to a request, as it comes."""

    def __init__(self, front: Front, model: Shelved, shape: Shape | None, body: bytes, keep_s: float | None) -> None:
        self._front, self._model, self._shape, self._body, self._keep_s = front, model, shape, body, keep_s
        self._kind = LINES if shape is not None and shape.by_line else EVENTS
        self._began = self._passing = False  # bytes were sent; they are the model's

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send = scope, send
        await unless_gone(receive, self._answered(), self._left)

    def _left(self) -> None:
        if not self._passing:
            self._scope[RECORD].ending = LEFT

    async def _answered(self) -> None:
        record = self._scope[RECORD]
        try:
            await self._relayed()
        except Problem as problem:
            record.passed_on = False
            if not self._began:
                raise
            record.ending = problem.message
            if self._shape is None:  # nothing says it but that the connection ends before the answer
                return
            pieces = self._shape.broken_off(problem) if self._passing else self._shape.failed(problem)
            await self._piece(written(self._shape, pieces) + self._shape.ending, more=False)

    async def _relayed(self) -> None:
        """Raises Problem."""
        residents, began = self._front.residents, time.monotonic_ns()
        taking = asyncio.ensure_future(residents.take(self._model))
        try:
            while not (await asyncio.wait((taking,), timeout=KEEP_ALIVE_S))[0]:
                await self._comment(residents.at(self._model))
            await self._from(await taking, began)
        finally:
            if not taking.cancel() and not taking.cancelled() and taking.exception() is None:
                residents.give_back(taking.result(), self._keep_s)

    async def _from(self, resident: Resident, began: int) -> None:
        scope, record = self._scope, self._scope[RECORD]
        target = scope["raw_path"] + query_of(scope)
        try:
            async with passed_on(resident.child.port, self._front.key, scope["method"], target, scope["headers"], self._body,
                                 time.monotonic_ns() - began) as answer:
                record.passed_on = True
                if self._began:
                    await self._demand_events(answer)
                else:
                    self._began = True
                    await self._send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
                self._passing = True
                async for piece in answer.pieces:
                    await self._piece(piece)
                await self._piece(b"", more=False)
        except Broken as error:
            await asyncio.wait((resident.child.ended,), timeout=DEATH_S)  # who asks again at once is not to meet it once more
            raise Problem(500, f"{resident.model.name} ended before its answer did: the next request loads it again", FAILED,
                          code="model_ended") from error

    async def _demand_events(self, answer: Answer) -> None:
        """A stream has begun: what is none is an error, which is its last event. Raises Problem."""
        if any(name == b"content-type" and value.decode("latin-1") == self._kind for name, value in answer.headers):
            return
        raise problem_in(answer.status, b"".join([piece async for piece in answer.pieces]))

    async def _comment(self, text: str) -> None:
        """Lines have no comments: there it is a piece without text, as from a model that waits for its turn."""
        if self._shape is None:
            return
        if not self._began:
            self._began = True
            headers = raw((("content-type", self._kind), *HEADERS.items()))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        by_line = self._shape.by_line
        await self._piece(written(self._shape, self._shape.waiting()) if by_line else f": {text}\n\n".encode("utf-8", "replace"))

    async def _piece(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class Glance(Relay):
    """What the server of a model that is loaded tells of itself."""

    async def _relayed(self) -> None:
        resident = self._front.residents.find(self._model)
        if resident is None:
            raise Problem(400, f"{self._model.name} is not loaded", param="model", hint="POST /models/load loads it, and so does a prompt")
        await self._from(resident, time.monotonic_ns())


class Search(Response):
    """What one of the servers that run has, by a name that says nothing of which it is."""

    def __init__(self, front: Front, body: bytes) -> None:
        self._front, self._body = front, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered: list[tuple[Answer, bytes]] = []
        for resident in self._front.residents.loaded():
            with contextlib.suppress(Broken):  # it ends: what it held has gone
                async with passed_on(resident.child.port, self._front.key, scope["method"], scope["raw_path"] + query_of(scope),
                                     scope["headers"], self._body, 0) as answer:
                    answered.append((answer, b"".join([piece async for piece in answer.pieces])))
                if answer.status != 404:
                    break
        if not answered:
            raise Problem(404, "no model is loaded: what was kept of answers goes with the model that gave them", code="not_kept")
        answer, body = answered[-1]
        scope[RECORD].passed_on = True
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": body})


def query_of(scope: Scope) -> bytes:
    """As it stands behind the path of a request."""
    return b"?" + scope["query_string"] if scope["query_string"] else b""


def raw(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]


def problem_in(status: int, body: bytes) -> Problem:
    """The problem that an answer tells of, in the form of any API, or in words alone, as of a request that was no HTTP to it."""
    try:
        error = json.loads(body).get("error")
    except ValueError:
        error = body.decode("utf-8", "replace")
    if not isinstance(error, dict):
        error = {"message": error}
    return Problem(status, str(error.get("message")), error.get("type") or FAILED, error.get("param"), error.get("code"))
