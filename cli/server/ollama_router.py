"""Ollama's model endpoints of a router: the same as of one model, from headers alone where a model is not loaded."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .gemini_models import GeminiRouter
from .keep_alive import FOREVER_S
from .lm_studio import LmStudioRouter
from .ollama import common_routes, requested_name, version
from .ollama_models import ModelEntry, RunningModel, digest_and_mtime, files_of_folder, ps_response, show_response, tags_response
from .problems import OLLAMA
from .streams import json_response

if TYPE_CHECKING:
    from .router import ModelState, Router


class OllamaRouter:
    """The models of `router`."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def routes(self) -> list[Route]:
        return [Route(f"{OLLAMA}version", version, methods=["GET"]), Route(f"{OLLAMA}tags", self.tags, methods=["GET"]),
                Route(f"{OLLAMA}ps", self.running, methods=["GET"]), Route(f"{OLLAMA}show", self.show, methods=["POST"]),
                *common_routes(self._demand), *LmStudioRouter(self._router, entry_of).routes(),
                *GeminiRouter(self._router).routes()]

    async def tags(self, request: Request) -> Response:
        states = await self._router.states()
        return json_response(await asyncio.to_thread(lambda: tags_response(entry_of(each) for each in states)))

    async def running(self, request: Request) -> Response:
        states = [each for each in await self._router.states() if each.loaded_at is not None]
        return json_response(await asyncio.to_thread(lambda: ps_response(running_model_of(each) for each in states)))

    async def show(self, request: Request) -> Response:
        """Loads nothing: clients ask it of every model."""
        state = self._router.state(await self._router.resolve(await requested_name(request)))
        return json_response(await asyncio.to_thread(lambda: show_response(entry_of(state),
                                                                           files_of_folder(state.model.folder, state.context))))

    async def _demand(self, name: str) -> None:
        await self._router.resolve(name)


def entry_of(state: ModelState) -> ModelEntry:
    """A list entry from the model's headers. A model with broken or missing files is listed all the same; loading it reports the error."""
    model, facts = state.model, state.model.facts
    family, params, bits, nbytes = (facts.family, facts.params, facts.bits, facts.size_bytes) if facts else ("", 0, 0.0, 0)
    return ModelEntry(model.name, family, params, model.variant or f"{bits:.4g}bit", nbytes,
                      *digest_and_mtime(model.name, model.folder, model.variant or ""), model.folder.is_file())


def running_model_of(state: ModelState) -> RunningModel:
    """A loaded model. GPU memory is known to its worker only."""
    return RunningModel(entry_of(state), state.nbytes or 0, 0, state.context or 0, state.expires_at or time.time() + FOREVER_S)
