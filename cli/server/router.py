"""The router of a server with several models: a request names its model, whose worker process is started if necessary, and is proxied to
that worker. No answer is generated here.

While a model is loading, a stream gets a comment every few seconds, as one that waits in a queue does; errors then come as its last
event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ... import EffllmError
from . import page, responses_requests
from .bodies import read_body, read_request
from .compaction import COMPACT
from .form_data import parts_of
from .gemini_models import GENERATED, wants_json_list
from .gemini_models import PATHS as GEMINI
from .gemini_serializer import GeminiSerializer
from .keep_alive import parse_keep_alive
from .llama_paths import refuse_change
from .llama_serializer import LlamaSerializer
from .lm_studio_chat import CHAT as LM_CHAT
from .lm_studio_chat import LmStudioSerializer
from .messages_requests import MessagesRequest
from .messages_serializer import MessageSerializer
from .model_pool import LoadedModel, ModelPool
from .model_registry import ModelRegistry, RegisteredModel
from .ollama_requests import untagged
from .ollama_router import OllamaRouter
from .ollama_serializer import UNLOAD, OllamaChatSerializer, OllamaGenerateSerializer
from .openai_requests import PLACEHOLDER_MODEL, Body, parse
from .problems import LM_STUDIO, MESSAGES, OLLAMA, Problem, closing
from .proxy import UpstreamLost, proxied
from .relay import Relay, RelayIfLoaded, RelayToHolder
from .reranking import PATHS as RERANKING
from .responses_paths import CANCEL, CONVERSATIONS, END, STORED_PATHS
from .responses_requests import ResponsesRequest
from .responses_serializer import ResponseSerializer
from .serializers import AnswerSerializer, ChatSerializer, TextSerializer
from .single_model import CHAT_PATHS, COMPLETION_PATHS, COUNT_TOKENS_PATHS, on_disconnect, on_http_exception, on_problem
from .streams import json_response
from .transcription import AUDIO_PATHS, TranscriptSerializer, fields_of

GREETING = ("effllm serves models by name: APIs like OpenAI's and Anthropic's under /v1, where /v1/models lists them, and like Ollama's "
            "under /api, whose programs look here for the words \"Ollama is running\"\n")


class RoutingFields(Body):
    """The fields of a proxied request that the router reads."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # the worker checks

    model: str | None = None
    stream: bool | None = None
    keep_alive: str | int | float | None = None  # Ollama's, as are the next two
    messages: Any = None
    prompt: Any = None


def responses_serializer(name: str, body: bytes) -> AnswerSerializer:
    payload = parse(ResponsesRequest, body)
    return ResponseSerializer(name, payload, responses_requests.chat_of(payload)[2])


@dataclass(frozen=True)
class ProxiedPaths:
    """Paths of requests that models answer. `serializer`: that of their streams, given the model's name and the body; None where they
    have no stream, or one that only the worker can begin. `streams`: without being asked to, as Ollama's do."""

    paths: tuple[str, ...]
    serializer: Callable[[str, bytes], AnswerSerializer] | None = None
    streams: bool = False


PROXIED = (ProxiedPaths(CHAT_PATHS, lambda name, body: ChatSerializer(name)),
          ProxiedPaths(COMPLETION_PATHS, lambda name, body: TextSerializer(name)),
          ProxiedPaths(("/completion", "/completions", "/infill"), lambda name, body: LlamaSerializer(name)),
          ProxiedPaths(("/v1/responses", "/responses"), responses_serializer),
          ProxiedPaths((MESSAGES,), lambda name, body: MessageSerializer(name, parse(MessagesRequest, body))),
          ProxiedPaths((LM_CHAT,), lambda name, body: LmStudioSerializer(name)),
          ProxiedPaths((f"{OLLAMA}chat",), lambda name, body: OllamaChatSerializer(name), streams=True),
          ProxiedPaths((f"{OLLAMA}generate",), lambda name, body: OllamaGenerateSerializer(name), streams=True),
          ProxiedPaths(("/v1/embeddings", "/embeddings", "/embedding", f"{OLLAMA}embed", f"{OLLAMA}embeddings", f"{LM_STUDIO}embeddings")),
          ProxiedPaths(RERANKING),
          ProxiedPaths((f"{MESSAGES}/count_tokens", *COUNT_TOKENS_PATHS, *COMPACT, "/tokenize", "/detokenize", "/apply-template")))
QUERY_PATHS = ("/props",)  # of the model named in the query, which is loaded for it
POLLED_PATHS = ("/slots", "/metrics")  # never load a model nor keep it loaded: monitoring polls them for ever


@dataclass(frozen=True)
class ModelState:
    """One model, as in lists of models; None for what does not apply. `loaded_at`, `expires_at`: in seconds since 1970."""

    model: RegisteredModel
    context: int | None
    nbytes: int | None = None
    loaded_at: float | None = None
    expires_at: float | None = None
    is_loading: bool = False


class Router:
    """`key`: the API key of the workers; `max_context`: the limit on the context of each (-c); `shows_page`: to browsers."""

    def __init__(self, registry: ModelRegistry, pool: ModelPool, key: str, max_context: int | None = None,
                 shows_page: bool = True) -> None:
        self.registry, self.pool, self.key, self._max_context, self._shows_page = registry, pool, key, max_context, shows_page
        self._created, self._background = int(time.time()), set[asyncio.Task[None]]()

    def application(self) -> Starlette:
        get = partial(Route, methods=["GET"])
        routes = [*page.routes(GREETING, self._shows_page), *(get(path, self.health) for path in ("/health", "/v1/health")),
                  *(get(path, self.models) for path in ("/v1/models", "/models")),
                  *(get(path, self.model) for path in ("/v1/models/{name:path}", "/models/{name:path}")),
                  *(Route(path, partial(self.proxy, passed), methods=["POST"]) for passed in PROXIED for path in passed.paths),
                  *(Route(path, self.proxy_gemini, methods=["POST"]) for path in GEMINI),
                  *(Route(path, self.proxy_form, methods=["POST"]) for path in AUDIO_PATHS),
                  *(get(path, self.proxy_query) for path in QUERY_PATHS), *(get(path, self.proxy_if_loaded) for path in POLLED_PATHS),
                  Route("/slots/{id_slot}", self.proxy_slot, methods=["POST"]), Route("/props", refuse_change, methods=["POST"]),
                  *(Route(path, self.proxy_to_holder, methods=["GET", "POST", "DELETE"]) for path in (*STORED_PATHS, CANCEL)),
                  Route(CONVERSATIONS, self.begin, methods=["POST"]), *OllamaRouter(self).routes(),
                  Route("/models/load", self.load, methods=["POST"]), Route("/models/unload", self.unload, methods=["POST"])]
        return Starlette(routes=routes, exception_handlers={Problem: on_problem, HTTPException: on_http_exception, EffllmError: on_problem,
                                                            ClientDisconnect: on_disconnect, Exception: on_problem})

    async def health(self, request: Request) -> Response:
        if self.pool.is_closed:
            raise closing()
        return json_response({"status": "ok", "waiting": self.pool.waiting})

    async def states(self) -> list[ModelState]:
        """All models, loaded or not, for the model lists of every API."""
        models = await asyncio.to_thread(self.registry.models)
        keys = {each.key for each in models}
        others = [each.model for each in self.pool.loaded() if each.model.key not in keys]  # loaded by names that are not listed
        return [self.state(each) for each in (*models, *others)]

    def state(self, model: RegisteredModel) -> ModelState:
        loaded = self.pool.find(model)
        if loaded is not None:
            return ModelState(model, loaded.context, loaded.nbytes, loaded.loaded_at, loaded.expires_at)
        contexts = [each for each in (model.facts and model.facts.context, self._max_context) if each]
        return ModelState(model, min(contexts, default=None), is_loading=self.pool.is_loading(model))

    async def models(self, request: Request) -> Response:
        cards = [self._card(each) for each in await self.states()]
        first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
        return json_response({"object": "list", "data": cards, "has_more": False, "first_id": first, "last_id": last})

    async def model(self, request: Request) -> Response:
        model = await asyncio.to_thread(self.registry.find, request.path_params["name"])
        return json_response(self._card(self.state(model)))

    def _card(self, state: ModelState) -> dict[str, object]:
        """A model as in OpenAI's and Anthropic's lists, with llama-server's status and whether it generates text."""
        created, name, facts = self._created, state.model.name, state.model.facts
        status = "loaded" if state.loaded_at is not None else "loading" if state.is_loading else "unloaded"
        return {"id": name, "object": "model", "created": created, "owned_by": "effllm", "max_model_len": state.context,
                "status": {"value": status}, "writes": facts is None or facts.writes, "type": "model", "display_name": name,
                "max_input_tokens": state.context, "meta": {"n_ctx": state.context, "n_ctx_train": facts.context if facts else None},
                "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))}

    async def load(self, request: Request) -> Response:
        """As in llama-server, except that the response comes once the model is loaded."""
        payload = await read_request(request, RoutingFields)
        loaded = await self.pool.acquire(await self.resolve(payload.model))
        self.pool.release(loaded, keep_alive_of(payload))
        return json_response({"success": True})

    async def unload(self, request: Request) -> Response:
        await self.unload_when_idle((await read_request(request, RoutingFields)).model, "model")
        return json_response({"success": True})

    async def unload_when_idle(self, name: str | None, param: str) -> RegisteredModel:
        """Unload a model once its running answers have ended. Raises Problem."""
        model = await self.resolve(name)
        if not self.pool.unload_when_idle(model):
            raise Problem(400, f"{model.name} is not loaded", param=param, hint="/v1/models shows which are")
        return model

    async def proxy(self, paths: ProxiedPaths, request: Request) -> Response:
        body = await read_body(request)
        payload = await asyncio.to_thread(parse, RoutingFields, body)
        model, keep_s = await self.resolve(payload.model), keep_alive_of(payload)
        if paths.streams and keep_s == 0 and not payload.messages and not payload.prompt:  # that is how `ollama stop` unloads
            self.pool.unload_when_idle(model)
            return json_response(paths.serializer(payload.model or model.name, body).loaded(UNLOAD))
        streams = paths.streams if payload.stream is None else payload.stream
        serializer = await asyncio.to_thread(paths.serializer, model.name, body) if paths.serializer is not None and streams else None
        return Relay(self, model, serializer, body, keep_s)

    async def proxy_gemini(self, request: Request) -> Response:
        """The model is named in the path. A stream that is one JSON list cannot begin before the worker's own."""
        body, model = await read_body(request), await self.resolve(request.path_params["name"])
        streams = request.url.path.endswith(GENERATED[1].rpartition(":")[2]) and not wants_json_list(request)
        return Relay(self, model, GeminiSerializer(model.name) if streams else None, body, None)

    async def proxy_form(self, request: Request) -> Response:
        body = await read_body(request)
        payload = await asyncio.to_thread(lambda: fields_of(parts_of(request.headers.get("content-type", ""), body)))
        return Relay(self, await self.resolve(payload.model), TranscriptSerializer("transcribe") if payload.stream else None, body, None)

    async def proxy_query(self, request: Request) -> Response:
        return Relay(self, await self.resolve(request.query_params.get("model")), None, b"", None)

    async def proxy_slot(self, request: Request) -> Response:
        """The body may be empty, with the model named in the query."""
        body = await read_body(request)
        name = (await asyncio.to_thread(parse, RoutingFields, body)).model if body.strip() else None
        return Relay(self, await self.resolve(name or request.query_params.get("model")), None, body, None)

    async def begin(self, request: Request) -> Response:
        """A conversation belongs to one model, whose worker stores it."""
        body = await read_body(request)
        name = (await asyncio.to_thread(parse, RoutingFields, body)).model if body.strip() else None
        return Relay(self, await self.resolve(name or request.query_params.get("model")), None, body, None)

    async def proxy_to_holder(self, request: Request) -> Response:
        """For an object that is named without its model: the worker that stores it answers."""
        return RelayToHolder(self, await read_body(request))

    async def proxy_if_loaded(self, request: Request) -> Response:
        return RelayIfLoaded(self, await self.resolve(request.query_params.get("model")), None, b"", None)

    def release(self, loaded: LoadedModel, keep_s: float | None, background_id: str | None) -> None:
        """Release a model after its answer, or, if a background response continues (`background_id`), once that has ended."""
        if background_id is None:
            self.pool.release(loaded, keep_s)
        else:
            self._background.add(task := asyncio.ensure_future(self._hold(loaded, keep_s, background_id)))
            task.add_done_callback(self._background.discard)

    async def _hold(self, loaded: LoadedModel, keep_s: float | None, name: str) -> None:
        try:
            with contextlib.suppress(UpstreamLost):
                async with proxied(loaded.worker.port, self.key, "GET", END.format(name=name).encode(), (), b"", 0) as answer:
                    await anext(answer.chunks, None)
        finally:
            self.pool.release(loaded, keep_s)

    async def resolve(self, name: str | None) -> RegisteredModel:
        """The model that a request is for. Raises Problem."""
        if (name := untagged(name or "")) and not PLACEHOLDER_MODEL.fullmatch(name):
            return self.pool.named(name) or await asyncio.to_thread(self.registry.find, name)
        loaded = self.pool.loaded()
        if len(loaded) != 1:
            state = "none is loaded" if not loaded else f"{len(loaded)} are loaded"
            raise Problem(400, f"model is missing, and {state}: name one of those that /v1/models lists", param="model")
        return loaded[0].model


def keep_alive_of(payload: RoutingFields) -> float | None:
    """A request's keep-alive in seconds, None if it has none. Raises Problem."""
    if payload.keep_alive is None:
        return None
    try:
        return parse_keep_alive(payload.keep_alive)
    except ValueError:
        raise Problem(400, "keep_alive has to be seconds, or a duration such as \"5m\"; negative is forever", param="keep_alive") from None
