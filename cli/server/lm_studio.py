"""LM Studio's REST API (v0 and v1) on models: lists, types, context lengths; v1 also loads and unloads them. Chat, completions and
embeddings of v0 are OpenAI's at other paths; the chat of v1 is in `lm_studio_chat.py`."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import EffllmError, typed
from .bodies import read_request
from .ollama_models import ModelEntry, ModelFiles, capabilities, files_of_folder, template_takes_tools
from .ollama_requests import untagged
from .openai_requests import Body
from .problems import JOB_GONE, LM_STUDIO, LM_STUDIO_1, Problem, stays_loaded
from .streams import json_response

if TYPE_CHECKING:
    from .router import ModelState, Router

LOADED, LOADING, NOT_LOADED = "loaded", "loading", "not-loaded"


class ModelRequest(Body):
    model: str
    echo_load_config: bool | None = None


class UnloadRequest(Body):
    instance_id: str


@dataclass(frozen=True)
class LmStudioModel:
    """A model as LM Studio describes it."""

    model: ModelEntry
    writes: bool  # generates text
    has_vision: bool
    takes_tools: bool  # its chat template does
    state: str
    max_context: int | None  # tokens
    context: int | None  # tokens it is served with

    @property
    def publisher(self) -> str:
        return self.model.name.rpartition("/")[0] or "effllm"

    @property
    def format(self) -> str:
        """Clients know two formats: a folder of safetensors is closer to MLX than to GGUF."""
        return "gguf" if self.model.is_gguf else "mlx"

    def card(self) -> dict[str, object]:
        """As in the lists of v0."""
        model, capability_names = self.model, [word for word, does in (("tool_use", self.takes_tools), ("vision", self.has_vision)) if does]
        fields = {"id": model.name, "object": "model", "type": "embeddings" if not self.writes else "vlm" if self.has_vision else "llm",
                "publisher": self.publisher, "arch": model.family, "compatibility_type": self.format, "quantization": model.stored,
                "state": self.state, "max_context_length": self.max_context}
        return {**fields, **({"loaded_context_length": self.context} if self.state == LOADED else {}), "capabilities": capability_names}

    def card_1(self) -> dict[str, object]:
        """As in the lists of v1."""
        model = self.model
        bits = round(8 * model.nbytes / model.parameters, 2) if model.parameters else None
        details = {"architecture": model.family, "description": None, "capabilities": {
            "vision": self.has_vision, "trained_for_tool_use": self.takes_tools}} if self.writes else {}
        loaded = [{"id": model.name, "config": {"context_length": self.context}}] if self.state == LOADED else []
        return {"type": self.kind, "publisher": self.publisher, "key": model.name, "display_name": model.name,
                "quantization": {"name": model.stored, "bits_per_weight": bits}, "size_bytes": model.nbytes,
                "params_string": model.details["parameter_size"], "loaded_instances": loaded, "max_context_length": self.max_context,
                "format": self.format, **details}

    @property
    def kind(self) -> str:
        return "llm" if self.writes else "embedding"


class ModelPaths(ABC):
    """The endpoints of both versions, for one model or several."""

    def routes(self) -> list[Route]:
        told = {f"{LM_STUDIO}models": self.models, f"{LM_STUDIO}models/{{name:path}}": self.model, f"{LM_STUDIO_1}models": self.models_1,
                f"{LM_STUDIO_1}models/download/status": self.downloads, f"{LM_STUDIO_1}models/download/status/{{job}}": self.download_of}
        done = {"load": self.load, "unload": self.unload, "download": self.download}
        return [*(Route(path, answer, methods=["GET"]) for path, answer in told.items()),
                *(Route(f"{LM_STUDIO_1}models/{name}", answer, methods=["POST"]) for name, answer in done.items())]

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [each.card() for each in await self.all()]})

    async def model(self, request: Request) -> Response:
        return json_response((await self.one(request.path_params["name"])).card())

    async def models_1(self, request: Request) -> Response:
        return json_response({"models": [each.card_1() for each in await self.all()]})

    async def load(self, request: Request) -> Response:
        """The load configuration is ignored: the server's flags decide."""
        payload, started = await read_request(request, ModelRequest), time.monotonic()
        model = await self.loaded(payload.model)
        config = {"load_config": {"context_length": model.context}} if payload.echo_load_config else {}
        return json_response({"type": model.kind, "instance_id": model.model.name, "load_time_seconds": time.monotonic() - started,
                              "status": LOADED, **config})

    async def unload(self, request: Request) -> Response:
        return json_response({"instance_id": await self.end((await read_request(request, UnloadRequest)).instance_id)})

    async def download(self, request: Request) -> Response:
        """Succeeds for a model that is here; requests never download one. It may be named by a URL."""
        name = (await read_request(request, ModelRequest)).model
        name = urlsplit(name).path.strip("/") if "://" in name else name
        try:
            await self.one(name)
        except Problem as problem:
            message = f"{problem.message}; requests cannot download models: effllm pull {typed(untagged(name))} on the command line"
            raise Problem(problem.status, message, param=problem.param, code=problem.code) from problem
        return json_response({"status": "already_downloaded"})

    async def downloads(self, request: Request) -> Response:
        return json_response({"downloading": [], "completed": [], "failed": [], "paused": []})

    async def download_of(self, request: Request) -> Response:
        raise Problem(404, "requests cannot start downloads, so there is no such job", code=JOB_GONE, hint="effllm pull in a terminal")

    @abstractmethod
    async def all(self) -> list[LmStudioModel]:
        """All models."""

    @abstractmethod
    async def one(self, name: str) -> LmStudioModel:
        """Raises Problem for an unknown name."""

    @abstractmethod
    async def loaded(self, name: str) -> LmStudioModel:
        """The model, loaded. Raises Problem."""

    @abstractmethod
    async def end(self, name: str) -> str:
        """Unload it; returns its name. Raises Problem."""


class LmStudioService(ModelPaths):
    """The endpoints of one model. `about` reads its files; `demand` raises Problem for the name of another model."""

    def __init__(self, about: Callable[[], tuple[ModelEntry, ModelFiles]], demand: Callable[[str], None]) -> None:
        self._about, self._demand = about, demand

    async def all(self) -> list[LmStudioModel]:
        return [await asyncio.to_thread(self._describe)]

    async def one(self, name: str) -> LmStudioModel:
        self._demand(name)
        return await asyncio.to_thread(self._describe)

    async def loaded(self, name: str) -> LmStudioModel:
        return await self.one(name)

    async def end(self, name: str) -> str:
        self._demand(name)
        raise stays_loaded()

    def _describe(self) -> LmStudioModel:
        model, files = self._about()
        known = {*capabilities(files)}
        writes = not {"embedding", "rerank"} & known
        return LmStudioModel(model, writes, files.has_vision, writes and "tools" in known, LOADED, files.config.context_length,
                             files.context)


class LmStudioRouter(ModelPaths):
    """The models of a router, from their headers; `listed` makes a list entry of them."""

    def __init__(self, router: Router, listed: Callable[[ModelState], ModelEntry]) -> None:
        self._router, self._listed = router, listed
        self._takes_tools: dict[str, bool] = {}  # digest of a model -> whether its template takes tools: that reads its vocabulary

    async def all(self) -> list[LmStudioModel]:
        states = await self._router.states()
        return await asyncio.to_thread(lambda: [self._describe(each) for each in states])

    async def one(self, name: str) -> LmStudioModel:
        return await asyncio.to_thread(self._describe, self._router.state(await self._router.resolve(name)))

    async def loaded(self, name: str) -> LmStudioModel:
        model = await self._router.resolve(name)
        loaded = await self._router.pool.acquire(model)
        try:
            return await asyncio.to_thread(self._describe, self._router.state(model))
        finally:
            self._router.pool.release(loaded)

    async def end(self, name: str) -> str:
        return (await self._router.unload_when_idle(name, "instance_id")).name

    def _describe(self, state: ModelState) -> LmStudioModel:
        facts = state.model.facts
        now = LOADED if state.loaded_at is not None else LOADING if state.is_loading else NOT_LOADED
        if facts is None:  # its files are broken, or gone
            return LmStudioModel(self._listed(state), True, False, False, now, state.context, state.context)
        listed = self._listed(state)
        if (takes_tools := self._takes_tools.get(listed.digest)) is None:
            takes_tools = self._takes_tools[listed.digest] = facts.writes and facts.has_template and takes_tools_by_files(facts.folder)
        return LmStudioModel(listed, facts.writes, "image" in facts.takes, takes_tools, now, facts.context, state.context)


def takes_tools_by_files(folder: Path) -> bool:
    """Whether the template in a model's files takes tools; not if they are broken."""
    try:
        return template_takes_tools(files_of_folder(folder, None).tokenizer)
    except (EffllmError, OSError):
        return False
