"""Ollama's endpoints about models, and errors for those that change models, which this server does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__, typed
from .bodies import read_request
from .gemini_models import GeminiModels
from .keep_alive import FOREVER_S
from .lm_studio import LmStudioService
from .ollama_models import (
    ModelEntry,
    ModelFiles,
    RunningModel,
    encoder_entry,
    engine_entry,
    files_of_engine,
    ps_response,
    running_model,
    show_response,
    tags_response,
)
from .ollama_requests import ModelRequest, untagged
from .problems import OLLAMA, Problem
from .streams import json_response

if TYPE_CHECKING:
    from ...runtime.generation.served_encoder import ServedEncoder
    from ...runtime.generation.served_model import ServedModel
    from .generation_options import Defaults

# The version of Ollama whose API this is: clients ask for 0.6.4 or later (tool calls, separate reasoning), or for 0.14.2, the first with
# Anthropic's API, and compare version numbers.
VERSION = "0.14.2"
AT_TERMINAL = "models are created, renamed and removed on the command line: effllm {}"
COMMAND_HINTS = {"create": AT_TERMINAL.format("quantize, effllm alias"), "blobs/{digest}": AT_TERMINAL.format("quantize, effllm alias"),
           "copy": AT_TERMINAL.format("alias NAME MODEL"), "delete": AT_TERMINAL.format("rm MODEL"),
           "push": "effllm uploads no models: effllm export MODEL -o FILE writes one for other programs"}
METHODS = ["GET", "POST", "PUT", "DELETE"]


class OllamaModels:
    """One model in Ollama's API. `demand` raises Problem for another model's name."""

    def __init__(self, name: str, served: ServedModel | ServedEncoder, defaults: Defaults | None,
                 demand: Callable[[str, str | None], None]) -> None:
        self._name, self._served, self._defaults, self._check_model = name, served, defaults, demand
        self._since = time.time()

    def routes(self) -> list[Route]:
        return [Route(f"{OLLAMA}version", version, methods=["GET"]), Route(f"{OLLAMA}tags", self.tags, methods=["GET"]),
                Route(f"{OLLAMA}ps", self.running, methods=["GET"]), Route(f"{OLLAMA}show", self.show, methods=["POST"]),
                *common_routes(self._check_model_async), *LmStudioService(self.about, self._check_model).routes(),
                *GeminiModels(self.about, self._check_model).routes()]

    async def tags(self, request: Request) -> Response:
        return json_response(tags_response([await self._model()]))

    async def running(self, request: Request) -> Response:
        return json_response(ps_response([running_model(await self._model(), self._served.engine, self._since)]))

    async def show(self, request: Request) -> Response:
        self._check_model(await requested_name(request), "model")
        return json_response(await asyncio.to_thread(lambda: self._show_json))

    async def _check_model_async(self, name: str) -> None:
        self._check_model(name, "model")

    async def _model(self) -> ModelEntry:
        return await asyncio.to_thread(lambda: self._entry)

    @cached_property
    def _show_json(self) -> dict[str, object]:
        return show_response(*self.about(), self._defaults)

    def about(self) -> tuple[ModelEntry, ModelFiles]:
        """Its list entry and what its files state, read once."""
        return self._entry, self._files

    @cached_property
    def _files(self) -> ModelFiles:
        return files_of_engine(self._served)

    @cached_property
    def _entry(self) -> ModelEntry:
        return engine_entry(self._name, self._served.engine)


class OllamaEncoder(OllamaModels):
    """An encoder in Ollama's API."""

    def __init__(self, name: str, served: ServedEncoder, demand: Callable[[str, str | None], None]) -> None:
        super().__init__(name, served, None, demand)

    async def running(self, request: Request) -> Response:
        encoder = self._served.encoder
        held = RunningModel(await self._model(), encoder.plan.total_bytes, 0, encoder.n_ctx, self._since + FOREVER_S)
        return json_response(ps_response([held]))

    @cached_property
    def _show_json(self) -> dict[str, object]:
        return show_response(*self.about())

    @cached_property
    def _files(self) -> ModelFiles:
        encoder = self._served.encoder
        return ModelFiles(encoder.folder, encoder.config, encoder.tokenizer, encoder.n_ctx)

    @cached_property
    def _entry(self) -> ModelEntry:
        return encoder_entry(self._name, self._served.encoder.folder)


def common_routes(demand: Callable[[str], Awaitable[None]]) -> list[Route]:
    """Endpoints that would change models. `demand` raises Problem for a model that is not here."""
    return [Route(f"{OLLAMA}pull", partial(_pull, demand), methods=["POST"]),
            *(Route(OLLAMA + path, partial(_not_served, path), methods=METHODS) for path in COMMAND_HINTS)]


async def version(request: Request) -> Response:
    return json_response({"version": VERSION, "effllm": __version__})


async def _pull(demand: Callable[[str], Awaitable[None]], request: Request) -> Response:
    """Succeeds for a model that is here; requests never download one."""
    name = await requested_name(request)
    try:
        await demand(name)
    except Problem as problem:
        message = f"{problem.message}; requests cannot download models: effllm pull {typed(untagged(name))} on the command line"
        raise Problem(problem.status, message, param=problem.param, code=problem.code) from problem
    return json_response({"status": "success"})


async def requested_name(request: Request) -> str:
    """The model that a request names. Raises Problem."""
    payload = await read_request(request, ModelRequest)
    if not payload.about:
        raise Problem(400, "model is missing", param="model")
    return payload.about


async def _not_served(path: str, request: Request) -> Response:
    raise Problem(501, COMMAND_HINTS[path], code="not_served")
