"""Google's Gemini API for a generative model, which the path names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import documents, media
from .bodies import read_request
from .gemini_models import COUNTED, GENERATED, wants_json_list
from .gemini_requests import FIELD_NAMES, CountTokensRequest, GenerateContentRequest, chat_of
from .gemini_serializer import GeminiSerializer
from .multiple_answers import choice_count, in_sequence, with_seeds
from .openai_requests import ChatRequest
from .streams import json_response

if TYPE_CHECKING:
    from .application import GenerationService, PreparedRequest


class GeminiPaths:
    """The endpoints of one model's `service`."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        answers = {GENERATED[0]: partial(self.generate, False), GENERATED[1]: partial(self.generate, True), COUNTED: self.count}
        return [Route(path, answer, methods=["POST"]) for path, answer in answers.items()]

    async def generate(self, streams: bool, request: Request) -> Response:
        payload, service = await read_request(request, GenerateContentRequest), self._service
        chat, prepared = await self._wanted(request, payload, streams)
        num_choices = choice_count(chat.n, field=FIELD_NAMES["n"])
        tokenizer = None if prepared.options.logprobs is None else service.served.tokenizer
        starts = [partial(service.reply, replace(prepared, options=options)) for options in with_seeds(prepared.options, num_choices)]
        serializer = GeminiSerializer(service.response_model_name(chat.model), wants_json_list(request), payload.shows_thoughts, tokenizer)
        return await service.answer(request, chat, serializer, in_sequence(starts))

    async def count(self, request: Request) -> Response:
        _, prepared = await self._wanted(request, (await read_request(request, CountTokensRequest)).about)
        return json_response({"totalTokens": await self._service.count(prepared)})

    async def _wanted(self, request: Request, payload: GenerateContentRequest, streams: bool = False) -> tuple[ChatRequest,
                                                                                                               PreparedRequest]:
        """The request as a chat, prepared."""
        service = self._service
        service.check_model(name := request.path_params["name"], "model")
        held = await service.load_media(media.in_contents(payload), documents.in_contents(payload))
        chat, messages = chat_of(payload, name, streams)
        return chat, await service.prepare(chat, messages, FIELD_NAMES, held)
