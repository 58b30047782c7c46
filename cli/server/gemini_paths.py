"""The paths of Google's Gemini API that a model of text has an answer for. The model is named in them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import papers, pictures
from .bodies import read
from .fields import ChatAsked
from .gemini_fields import CALLED, CountAsked, GenerateAsked, chat_of
from .gemini_models import COUNTED, GENERATED, in_list
from .gemini_shape import GeminiShape
from .multiple_answers import choice_count, in_sequence, with_seeds
from .streams import json_response

if TYPE_CHECKING:
    from .application import GenerationService, PreparedRequest


class GeminiPaths:
    """Of one model, which `service` has."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        answers = {GENERATED[0]: partial(self.generate, False), GENERATED[1]: partial(self.generate, True), COUNTED: self.count}
        return [Route(path, answer, methods=["POST"]) for path, answer in answers.items()]

    async def generate(self, streams: bool, request: Request) -> Response:
        asked, service = await read(request, GenerateAsked), self._service
        chat, wanted = await self._wanted(request, asked, streams)
        each, told_by = choice_count(chat.n, field=CALLED["n"]), None if wanted.wish.tells is None else service.replies.tokenizer
        starts = [partial(service.reply, replace(wanted, wish=wish)) for wish in with_seeds(wanted.wish, each)]
        shape = GeminiShape(service.called(chat.model), in_list(request), asked.shows_thoughts, told_by)
        return await service.answer(request, chat, shape, in_sequence(starts))

    async def count(self, request: Request) -> Response:
        _, wanted = await self._wanted(request, (await read(request, CountAsked)).about)
        return json_response({"totalTokens": await self._service.count(wanted)})

    async def _wanted(self, request: Request, asked: GenerateAsked, streams: bool = False) -> tuple[ChatAsked, PreparedRequest]:
        """What a request comes to."""
        service = self._service
        service.demand_model(name := request.path_params["name"], "model")
        held = await service.pictures(pictures.in_contents(asked), papers.in_contents(asked))
        chat, messages = chat_of(asked, name, streams)
        return chat, await service.wanted(chat, messages, CALLED, held)
