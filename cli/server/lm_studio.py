"""What LM Studio's own API (its REST API v0) tells of models, for programs that look for that server: which there are, what each is for,
how much context it has. Its chats, texts and vectors are asked for as OpenAI's, at paths of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .ollama_models import Files, Listed, capabilities
from .problems import LM_STUDIO
from .streams import json_response

if TYPE_CHECKING:
    from .front import Front, State

MODELS, MODEL = f"{LM_STUDIO}models", f"{LM_STUDIO}models/{{name:path}}"
LOADED, LOADING, NOT_LOADED = "loaded", "loading", "not-loaded"


@dataclass(frozen=True)
class Made:
    """What a model is for."""

    writes: bool
    sees: bool
    takes_tools: bool  # every model with a chat template is told of them

    @property
    def kind(self) -> str:
        return "embeddings" if not self.writes else "vlm" if self.sees else "llm"


def card(model: Listed, made: Made, state: str, most: int | None, context: int | None) -> dict[str, object]:
    """A model as its lists have it. Programs read `compatibility_type` as one of two words: a folder of safetensors is MLX's more than a
    GGUF file."""
    can = [word for word, does in (("tool_use", made.takes_tools), ("vision", made.sees)) if does]
    publisher, _, _ = model.name.rpartition("/")
    told = {"id": model.name, "object": "model", "type": made.kind, "publisher": publisher or "effllm", "arch": model.family,
            "compatibility_type": "gguf" if model.is_gguf else "mlx", "quantization": model.stored, "state": state,
            "max_context_length": most}
    return {**told, **({"loaded_context_length": context} if state == LOADED else {}), "capabilities": can}


def listing(cards: Iterable[Mapping[str, object]]) -> Response:
    return json_response({"object": "list", "data": [*cards]})


class LmStudio:
    """One model. `about` reads what its files tell, `demand` raises Problem for the name of another."""

    def __init__(self, about: Callable[[], tuple[Listed, Files]], demand: Callable[[str], None]) -> None:
        self._about, self._demand = about, demand

    def routes(self) -> list[Route]:
        return [Route(MODELS, self.models, methods=["GET"]), Route(MODEL, self.model, methods=["GET"])]

    async def models(self, request: Request) -> Response:
        return listing([await asyncio.to_thread(self._card)])

    async def model(self, request: Request) -> Response:
        self._demand(request.path_params["name"])
        return json_response(await asyncio.to_thread(self._card))

    def _card(self) -> dict[str, object]:
        model, files = self._about()
        writes = not {"embedding", "rerank"} & {*capabilities(files)}
        made = Made(writes, files.sees, writes and files.tokenizer.template is not None)
        return card(model, made, LOADED, files.config.context_length, files.context)


class LmStudioFront:
    """The models of `front`, from their headers; `listed` says what these tell."""

    def __init__(self, front: Front, listed: Callable[[State], Listed]) -> None:
        self._front, self._listed = front, listed

    def routes(self) -> list[Route]:
        return [Route(MODELS, self.models, methods=["GET"]), Route(MODEL, self.model, methods=["GET"])]

    async def models(self, request: Request) -> Response:
        states = await self._front.states()
        return listing(await asyncio.to_thread(lambda: [self._card(each) for each in states]))

    async def model(self, request: Request) -> Response:
        state = self._front.state(await self._front.meant(request.path_params["name"]))
        return json_response(await asyncio.to_thread(self._card, state))

    def _card(self, state: State) -> dict[str, object]:
        facts = state.model.facts
        made = Made(facts.writes, "pictures" in facts.takes, facts.has_template) if facts is not None else Made(True, False, False)
        now = LOADED if state.since is not None else LOADING if state.is_loading else NOT_LOADED
        return card(self._listed(state), made, now, facts.context if facts else state.context, state.context)
