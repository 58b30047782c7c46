"""The base of a service for one model of any kind: names, health, model card, embeddings and reranking. Subclasses add what their kind of
model can answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ... import EffllmError
from . import page
from .adapters import Adapters
from .answer_queue import AnswerQueue
from .bodies import read_request
from .embeddings import EmbeddingPaths
from .guard import RECORD
from .ollama_requests import untagged
from .openai_requests import PLACEHOLDER_MODEL, Body, Kind
from .problems import FAILED, LM_STUDIO, NO_MODEL, Problem, closing, problem_of, stays_loaded
from .reranking import RerankPaths
from .streams import CLIENT_CLOSED_REQUEST, CLIENT_LEFT, json_response, problem_response

if TYPE_CHECKING:
    from ...runtime.generation.served_encoder import ServedEncoder
    from ...runtime.generation.served_model import ServedModel

ENDPOINTS = ("/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /v1beta/models, /api/chat, /api/generate, "
          "/completion and /infill")

CHAT_PATHS = ("/v1/chat/completions", "/chat/completions", f"{LM_STUDIO}chat/completions")
COMPLETION_PATHS = ("/v1/completions", f"{LM_STUDIO}completions")

# Token counting: OpenAI's paths for Responses requests, llama-server's for chats.
COUNT_TOKENS_PATHS = ("/v1/responses/input_tokens", "/responses/input_tokens", "/v1/chat/completions/input_tokens",
                      "/chat/completions/input_tokens")


class NamedModel(Body):
    model: str | None = None


@dataclass
class SingleModelService:
    """The base of a service for one model."""

    served: ServedModel | ServedEncoder
    answer_queue: AnswerQueue
    name: str  # in responses
    note: Callable[[str], None]  # called with the engine's notices
    other_names: frozenset[str] | None = frozenset()  # further names in requests; None accepts any
    shows_page: bool = True  # serve the chat page

    def __post_init__(self) -> None:
        self._created = int(time.time())

    @cached_property
    def adapters(self) -> Adapters:
        return Adapters(self.served, {self.name, *(self.other_names or ())})

    def application(self) -> Starlette:
        handlers = {Problem: on_problem, HTTPException: on_http_exception, EffllmError: on_problem, ClientDisconnect: on_disconnect,
                    Exception: on_problem}
        return Starlette(routes=self.routes(), exception_handlers=handlers)

    def routes(self) -> list[Route]:
        """The routes of every kind of model; subclasses have more."""
        get = partial(Route, methods=["GET"])
        return [*page.routes(self.greeting, self.shows_page), *(get(path, self.health) for path in ("/health", "/v1/health")),
                *(get(path, self.models) for path in ("/v1/models", "/models")),
                *(get(path, self.model) for path in ("/v1/models/{name:path}", "/models/{name:path}")),
                Route("/models/load", self.load, methods=["POST"]), Route("/models/unload", self.unload, methods=["POST"]),
                *EmbeddingPaths(self.served, self.answer_queue, self.name, self.note, self.check_model, self.adapters).routes(),
                *RerankPaths(self).routes()]

    @property
    def greeting(self) -> str:
        return (f"effllm serves {self.name}: APIs like OpenAI's and Anthropic's under /v1, and like Ollama's under /api, whose programs "
                "look here for the words \"Ollama is running\"\n")

    async def health(self, request: Request) -> Response:
        if self.answer_queue.is_closed:
            raise closing()
        return json_response({"status": "ok", "waiting": self.answer_queue.waiting})

    async def models(self, request: Request) -> Response:
        cards = [self._card(), *map(self._card, self.adapters.models)]
        return json_response({"object": "list", "data": cards, "has_more": False, "first_id": self.name, "last_id": cards[-1]["id"]})

    async def model(self, request: Request) -> Response:
        self.check_model(name := request.path_params["name"])
        return json_response(self._card(self.adapters.requested_adapter(name)))

    async def load(self, request: Request) -> Response:
        """As on a server of several models, for programs that load a model before they use it: this one is."""
        await self.payload(request, NamedModel)
        return json_response({"success": True})

    async def unload(self, request: Request) -> Response:
        await self.payload(request, NamedModel)
        raise stays_loaded()

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Check token ids before they are decoded. Raises Problem for one outside the vocabulary."""
        vocab_size = self.served.config.prompt_vocab_size
        if (invalid := next((each for each in ids if not 0 <= each < vocab_size), None)) is not None:
            raise Problem(400, f"token id {invalid} is outside the vocabulary of {vocab_size}", param=param,
                          hint="ids are those of /tokenize")

    async def payload(self, request: Request, kind: type[Kind]) -> Kind:
        """The parsed body of a request, which has to be for this model. Raises Problem."""
        payload = await read_request(request, kind)
        if payload.model:
            self.check_model(payload.model, "model")
        return payload

    def response_model_name(self, model: str | None) -> str:
        """The model's name in a response: its own, or that of the requested adapter."""
        return self.adapters.requested_adapter(model) or self.name

    def check_model(self, name: str, param: str | None = None) -> None:
        known = {name, untagged(name)} & {self.name, *(self.other_names or ()), *self.adapters.models}
        if self.other_names is not None and not known and not PLACEHOLDER_MODEL.fullmatch(name):
            raise Problem(404, f"there is no model {name!r:.100}: this server serves {self.name} (--name NAME changes that)",
                          param=param, code=NO_MODEL)

    def _card(self, adapter: str | None = None) -> dict[str, object]:
        """The entry of the model in lists of models, or of one of its adapters, whose parent is the model."""
        served, name = self.served, adapter or self.name
        extra = {} if adapter is None else {"parent": self.name}
        if inputs := [name for name, is_supported in (("vision", served.accepts_images), ("audio", served.accepts_audio)) if is_supported]:
            extra["capabilities"] = ["completion", *inputs]
        meta = {"n_ctx": served.n_ctx, "n_ctx_train": served.config.context_length, "n_vocab": served.config.vocab_size}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "effllm", "max_model_len": served.n_ctx,
                "meta": meta, "type": "model", "display_name": name, "max_input_tokens": served.n_ctx,
                "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created)), **extra}


async def on_problem(request: Request, error: Exception) -> Response:
    problem, record = problem_of(error), request.scope[RECORD]
    if problem.type != FAILED:
        record.end_reason = problem.message
    elif not record.problem:
        record.problem = f"{type(error).__name__}: {error}"
    return problem_response(problem, request.url.path)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client disconnected before its request was complete."""
    request.scope[RECORD].end_reason = CLIENT_LEFT
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_http_exception(request: Request, error: HTTPException) -> Response:
    """An unknown path or method."""
    if error.status_code == 405:
        message = f"{request.url.path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}"
        return problem_response(Problem(405, message, code="method_not_allowed", headers=error.headers), request.url.path)
    message = f"unknown endpoint {request.method} {request.url.path}; available: {ENDPOINTS}"
    return problem_response(Problem(error.status_code, message, code="unknown_url"), request.url.path)
