"""LoRA adapters per request: by number with a scale each, as in llama-server, or by naming an adapter as the model, as in vLLM. The default
scales can be changed while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import UsageError
from ...runtime.adapters.adapter_selection import AdapterScales, check_scales
from .bodies import read_body
from .ollama_requests import untagged
from .openai_requests import GenerationRequest, Scale, Scales, parse
from .problems import LEAVE_ONE_OUT, Problem
from .streams import json_response

if TYPE_CHECKING:
    from ...runtime.generation.served_model import ServedModel

PATH, LORA = "/lora-adapters", "lora"


class Adapters:
    """The adapters of a served model. `reserved`: names that select the model itself."""

    def __init__(self, served: ServedModel, reserved: Container[str]) -> None:
        self._served = served
        adapted = served.adapters
        self.names, self._scales = adapted.names, adapted.scales
        self._by_name = {name: number for number, name in enumerate(adapted.names) if name not in reserved}

    def routes(self) -> list[Route]:
        return [Route(PATH, self.listed, methods=["GET"]), Route(PATH, self.set, methods=["POST"])]

    async def listed(self, request: Request) -> Response:
        """List the adapters. The path is the adapter's name, as no response names a folder of this machine."""
        return json_response([{"id": number, "path": name, "scale": scale}
                              for number, (name, scale) in enumerate(zip(self.names, self._served.default_scales, strict=True))])

    async def set(self, request: Request) -> Response:
        """Set the scales of requests that do not state any."""
        payload = await asyncio.to_thread(parse, Scales, await read_body(request))
        self._served.default_scales = self._chosen(payload.root, "")
        return json_response({"success": True})

    def requested_adapter(self, model: str | None) -> str | None:
        """The adapter that a request names as its model; None for any other name."""
        return next((name for name in (model, untagged(model)) if name in self._by_name), None) if model else None

    @property
    def models(self) -> Iterable[str]:
        """Adapter names, for lists of models."""
        return self._by_name

    def choice(self, payload: GenerationRequest) -> AdapterScales:
        """The scale of each adapter for a request. Raises Problem."""
        if payload.lora is None:
            return self.choice_of(payload.model)
        if (name := self.requested_adapter(payload.model)) is not None:
            raise Problem(400, f"lora and model {name!r:.100} both select an adapter", param=LORA, hint=LEAVE_ONE_OUT)
        return self._chosen(payload.lora, LORA)

    def choice_of(self, model: str | None) -> AdapterScales:
        """The scales for a request that names this model. If that is an adapter, it has its initial scale, or 1 if that was 0, and all
        others have 0."""
        if (name := self.requested_adapter(model)) is None:
            return self._served.default_scales
        return tuple((scale or 1.0) if number == self._by_name[name] else 0.0 for number, scale in enumerate(self._scales))

    def _chosen(self, payload: Iterable[Scale], where: str) -> AdapterScales:
        """The scales that a request states; other adapters have scale 0. `where`: the field in errors. Raises Problem."""
        scales, prefix = [0.0] * len(self.names), f"{where}: " if where else ""
        for entry in payload:
            if not 0 <= entry.id < len(scales):
                known = f"there are {len(scales)}, from 0 on" if scales else "this server has none (effllm serve MODEL --lora ADAPTER)"
                raise Problem(400, f"{prefix}there is no adapter {entry.id}: {known}", param=where or None)
            scales[entry.id] = entry.scale
        choice = tuple(scales)
        try:
            check_scales(choice, self.names)
        except UsageError as error:
            raise Problem(400, f"{prefix}{error.message}", param=where or None, hint=error.hint) from error
        return choice
