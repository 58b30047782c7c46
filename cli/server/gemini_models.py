"""Google's Gemini API on models: lists and cards, of one model or of a router's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .guard import METHODS
from .ollama_models import ModelEntry, ModelFiles, capabilities
from .problems import GOOGLE
from .streams import json_response

if TYPE_CHECKING:
    from .router import ModelState, Router

MODELS, MODEL = f"{GOOGLE}models", f"{GOOGLE}models/{{name:path}}"
PATHS = tuple(f"{MODEL}:{method}" for method in METHODS)
GENERATED, COUNTED, EMBEDDED = PATHS[:2], PATHS[2], PATHS[3:]
WRITES, EMBEDS = (METHODS[0], METHODS[2]), METHODS[3:]


def wants_json_list(request: Request) -> bool:
    """Whether a stream is one JSON list instead of server-sent events."""
    return request.query_params.get("alt") != "sse"


def card(name: str, methods: Iterable[str], context: int | None, thinks: bool) -> dict[str, object]:
    """A model as in its lists."""
    return {"name": f"models/{name}", "version": "1", "displayName": name, "description": f"{name}, served by effllm",
            "inputTokenLimit": context, "outputTokenLimit": context, "supportedGenerationMethods": [*methods], "thinking": thinks}


class GeminiModels:
    """One model. `about` reads its files; `demand` raises Problem for another model's name."""

    def __init__(self, about: Callable[[], tuple[ModelEntry, ModelFiles]], demand: Callable[[str], None]) -> None:
        self._about, self._demand = about, demand

    def routes(self) -> list[Route]:
        return [Route(MODELS, self.models, methods=["GET"]), Route(MODEL, self.model, methods=["GET"])]

    async def models(self, request: Request) -> Response:
        return json_response({"models": [await asyncio.to_thread(self._card)]})

    async def model(self, request: Request) -> Response:
        self._demand(request.path_params["name"])
        return json_response(await asyncio.to_thread(self._card))

    def _card(self) -> dict[str, object]:
        model, files = self._about()
        can = capabilities(files)
        methods = (*(WRITES if "completion" in can else ()), *(EMBEDS if "embedding" in can else ()))
        return card(model.name, methods, files.context, "thinking" in can)


class GeminiRouter:
    """The models of a router, from their headers, which do not tell whether one reasons."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def routes(self) -> list[Route]:
        return [Route(MODELS, self.models, methods=["GET"]), Route(MODEL, self.model, methods=["GET"])]

    async def models(self, request: Request) -> Response:
        return json_response({"models": [self._card(each) for each in await self._router.states()]})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(self._router.state(await self._router.resolve(request.path_params["name"]))))

    def _card(self, state: ModelState) -> dict[str, object]:
        facts = state.model.facts
        return card(state.model.name, WRITES if facts is None or facts.writes else EMBEDS, state.context, False)
