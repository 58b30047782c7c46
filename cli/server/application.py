"""What is served: the paths of OpenAI's, Anthropic's, Ollama's and llama.cpp's APIs that a model of text has an answer for. Whatever API a
request is of, it is read as one of chat completions, or of completions, and its answer has the shape of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ... import EffllmError
from ...runtime.answers.replies import Replies, Wish
from ...runtime.tokens.infill import Gap
from . import messages_fields, ollama_fields, page, responses_fields
from . import pictures as pictures_sent
from .adapters import Adapters
from .bodies import read
from .desk import Desk, Start
from .embeddings import Embeddings
from .fields import Asked, ChatAsked, Kind, TextAsked, messages_of, prompts_of
from .guard import RECORD
from .llama_paths import LlamaPaths
from .llama_slots import LlamaSlots
from .messages_fields import CountAsked, MessagesAsked
from .messages_shape import MessageShape
from .metrics import Tally
from .ollama import OllamaModels
from .ollama_fields import OllamaAsked, OllamaChat, OllamaText, untagged, waited_ns
from .ollama_shape import OllamaMessage, OllamaResponse
from .pictures import Sent
from .problems import FAILED, MESSAGES, NO_MODEL, OLLAMA, Problem, closing, problem_of
from .reranking import Reranking
from .responses_fields import ResponsesAsked
from .responses_shape import ResponseShape
from .several import Several, counted, in_turn, varied
from .shapes import ChatShape, Completion, Shape, TextShape
from .streams import GONE, LEFT, EventStream, LineStream, Listener, json_response, problem_response, whole
from .tools import tools_asked
from .wishes import Defaults, reasoning_of, wish_of

if TYPE_CHECKING:
    from ...runtime.calls.calling import Tools
    from ...runtime.events import Event
    from ...runtime.images.album import Picture
    from ...runtime.sessions.slot_files import SlotFiles

SYSTEM = ("system", "developer")
SERVED = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /api/chat, /api/generate, /completion and /infill"
NO_INSERT = 'suffix is not supported: "{}" does not support insert, having no tokens for filling in the middle'  # words of Ollama's in it


@dataclass(frozen=True)
class Wanted:
    """What a request for an answer to messages comes to. `pictures` are held here, until it is answered."""

    messages: list[dict[str, Any]]
    wish: Wish
    tools: Tools | None
    variables: dict[str, Any]
    pictures: tuple[Picture, ...] = ()


@dataclass
class Service:
    """One model by its `name`, and what its answers are by default. `also` are other names that it is asked for by, None: any; `note` is
    told what the engine remarks; in `slot_files` programs save what sequences hold, None: nowhere; `shows_page`: to browsers."""

    replies: Replies
    desk: Desk
    defaults: Defaults
    name: str
    note: Callable[[str], None]
    also: frozenset[str] | None = frozenset()
    slot_files: SlotFiles | None = None
    shows_page: bool = True

    def __post_init__(self) -> None:
        self._created, self.tally, self._taking = int(time.time()), Tally(), pictures_sent.Taking(self.replies)

    @cached_property
    def adapters(self) -> Adapters:
        return Adapters(self.replies, {self.name, *(self.also or ())})

    def application(self) -> Starlette:
        get, post = partial(Route, methods=["GET"]), partial(Route, methods=["POST"])
        routes = [*page.routes(self.greeting, self.shows_page), *(get(path, self.health) for path in ("/health", "/v1/health")),
                  *(get(path, self.models) for path in ("/v1/models", "/models")),
                  *(get(path, self.model) for path in ("/v1/models/{name:path}", "/models/{name:path}")),
                  *(post(path, self.chat) for path in ("/v1/chat/completions", "/chat/completions")),
                  post("/v1/completions", self.text),
                  *(post(path, self.responses) for path in ("/v1/responses", "/responses")),
                  post(MESSAGES, self.messages), post(f"{MESSAGES}/count_tokens", self.count_tokens),
                  post(f"{OLLAMA}chat", self.ollama_chat), post(f"{OLLAMA}generate", self.ollama_generate),
                  *Embeddings(self.replies, self.desk, self.name, self.note, self.demand_model, self.adapters).routes(),
                  *OllamaModels(self.name, self.replies, self.defaults, self.demand_model).routes(),
                  *LlamaPaths(self).routes(), *LlamaSlots(self, self.slot_files).routes(), *Reranking(self).routes(),
                  *self.adapters.routes()]
        return Starlette(routes=routes, exception_handlers={Problem: on_problem, HTTPException: on_path, EffllmError: on_problem,
                                                            ClientDisconnect: on_left, Exception: on_problem})

    @property
    def greeting(self) -> str:
        return (f"effllm serves {self.name}: APIs like OpenAI's and Anthropic's under /v1, and like Ollama's under /api, whose programs "
                "look here for the words \"Ollama is running\"\n")

    async def health(self, request: Request) -> Response:
        if self.desk.is_closed:
            raise closing()
        return json_response({"status": "ok", "waiting": self.desk.waiting})

    async def models(self, request: Request) -> Response:
        cards = [self._card(), *map(self._card, self.adapters.models)]
        return json_response({"object": "list", "data": cards, "has_more": False, "first_id": self.name, "last_id": cards[-1]["id"]})

    async def model(self, request: Request) -> Response:
        self.demand_model(name := request.path_params["name"])
        return json_response(self._card(self.adapters.called(name)))

    async def chat(self, request: Request) -> Response:
        asked = await self.asked(request, ChatAsked)
        pictures = await self.pictures(pictures_sent.in_chat(asked))
        answer, each = await self.wanted(asked, messages_of(asked), pictures=pictures), counted(asked.n)
        starts = [partial(self._reply, replace(answer, wish=wish)) for wish in varied(answer.wish, each)]
        return await self._answers(request, asked, partial(self._completion, ChatShape, asked, answer.wish), starts, each)

    async def responses(self, request: Request) -> Response:
        asked = await self.asked(request, ResponsesAsked)
        pictures = await self.pictures(pictures_sent.in_responses(asked))
        chat, messages, names = responses_fields.chat_of(asked)
        answer = await self.wanted(chat, messages, responses_fields.CALLED, pictures)
        shape = ResponseShape(self.called(asked.model), asked, names, self.replies.tokenizer if asked.tells else None)
        return await self.answer(request, asked, shape, partial(self._reply, answer))

    async def messages(self, request: Request) -> Response:
        asked = await self.asked(request, MessagesAsked)
        pictures = await self.pictures(pictures_sent.in_messages(asked))
        answer = await self.wanted(*messages_fields.chat_of(asked), messages_fields.CALLED, pictures)
        return await self.answer(request, asked, MessageShape(self.called(asked.model), asked), partial(self._reply, answer))

    async def count_tokens(self, request: Request) -> Response:
        asked = await self.asked(request, CountAsked)
        pictures = await self.pictures(pictures_sent.in_messages(asked))
        wanted = await self.wanted(*messages_fields.chat_of(asked), messages_fields.CALLED, pictures)
        count = await asyncio.to_thread(self.replies.count, wanted.messages, wanted.wish.think, wanted.tools, wanted.variables)
        return json_response({"input_tokens": count})

    async def ollama_chat(self, request: Request) -> Response:
        asked = await self._asked_as_ollama(request, OllamaChat)
        shape = OllamaMessage(asked.model or self.name, waited_ns(request.headers), self.replies.tokenizer if asked.logprobs else None)
        if not asked.messages:
            return json_response(shape.loaded())
        pictures = await self.pictures(pictures_sent.in_ollama_chat(asked))
        answer = await self.wanted(*ollama_fields.chat_of(asked), ollama_fields.CALLED, pictures)
        return await self.answer(request, asked, shape, partial(self._reply, answer))

    async def ollama_generate(self, request: Request) -> Response:
        asked = await self._asked_as_ollama(request, OllamaText)
        shape = OllamaResponse(asked.model or self.name, waited_ns(request.headers), self.replies.tokenizer if asked.logprobs else None)
        if not asked.prompt:
            return json_response(shape.loaded())
        pictures = await self.pictures(pictures_sent.in_ollama_text(asked))
        if asked.raw or asked.suffix:
            wish = await self._wish(ollama_fields.raw_of(asked), ollama_fields.CALLED_RAW)
            return await self.answer(request, asked, shape, await self._completed(asked.prompt, asked.suffix, wish))
        answer = await self.wanted(*ollama_fields.answer_of(asked), ollama_fields.CALLED, pictures)
        return await self.answer(request, asked, shape, partial(self._reply, answer))

    async def text(self, request: Request) -> Response:
        asked = await self.asked(request, TextAsked)
        prompts, wish = prompts_of(asked), await self._wish(asked)
        each = counted(asked.n, len(prompts))
        if not asked.suffix:
            await self.demand_room(prompts, wish)
        starts = [await self._completed(prompt, asked.suffix, own) for prompt in prompts for own in varied(wish, each)]
        return await self._answers(request, asked, partial(self._completion, TextShape, asked, wish), starts, each)

    def demand_tokens(self, ids: Sequence[int], param: str) -> None:
        """Before they become a text. Raises Problem for one that the model does not have."""
        rows = self.replies.engine.config.vocab_size
        if (bad := next((each for each in ids if not 0 <= each < rows), None)) is not None:
            raise Problem(400, f"token id {bad} is outside the vocabulary of {rows}", param=param, hint="ids are those of /tokenize")

    async def demand_room(self, prompts: Sequence[str | list[int]], wish: Wish) -> None:
        """Of several prompts that are answered in turn one that cannot be is told of before the first is. Raises Problem that names it."""
        for number, prompt in enumerate(prompts if len(prompts) > 1 else ()):
            try:
                await asyncio.to_thread(self.replies.demand_room, prompt, wish)
            except EffllmError as error:
                problem = problem_of(error, f"prompt[{number}]")
                problem.message = f"prompt[{number}]: {problem.message}"
                raise problem from error

    async def asked(self, request: Request, kind: type[Kind]) -> Kind:
        """The body of a request that is for this model. Raises Problem."""
        asked = await read(request, kind)
        if asked.model:
            self.demand_model(asked.model, "model")
        return asked

    async def _asked_as_ollama(self, request: Request, kind: type[Kind]) -> Kind:
        asked = await self.asked(request, kind)
        if remark := ollama_fields.judged(asked, self.name, self.replies.tokenizer.thinks, self.replies.engine.n_ctx):
            self.note(remark)
        return asked

    async def _wish(self, asked: Asked, called: Mapping[str, str] | None = None) -> Wish:
        """Raises Problem that names the field, as it is `called` where the request comes from."""
        try:
            wish = await asyncio.to_thread(wish_of, asked, self.defaults, self.replies.tokenizer)
            return replace(wish, choice=self.adapters.choice(asked))
        except Problem as problem:
            raise problem.renamed(called or {}) from problem

    async def _completed(self, prompt: str | list[int], suffix: str | None, wish: Wish) -> Start:
        """What begins an answer to a prompt that is taken as it stands, or to what belongs between it and a suffix. Raises Problem,
        EffllmError."""
        if not suffix:
            return partial(self.replies.complete, prompt, wish)
        if wish.echo or not isinstance(prompt, str):
            raise Problem(400, "suffix goes with a prompt that is a text, without echo", param="suffix")
        if await asyncio.to_thread(lambda: self.replies.marks) is None:
            raise Problem(400, NO_INSERT.format(self.name), param="suffix", code="unsupported_parameter")
        around = await asyncio.to_thread(self.replies.around, Gap(prompt, suffix), wish.max_tokens, False)
        return partial(self.replies.complete, around.ids, wish, lasting=around.lasting)

    async def pictures(self, sent: Iterable[Sent]) -> tuple[Picture, ...]:
        """The pictures of a request, in whose places marks are then. Raises Problem."""
        return await self._taking.all(sent)

    async def wanted(self, asked: ChatAsked, messages: list[dict[str, Any]], called: Mapping[str, str] | None = None,
                     pictures: tuple[Picture, ...] = ()) -> Wanted:
        """What a request comes to. Raises Problem that names the field, as it is `called` where the request comes from."""
        if self.defaults.system and not any(message["role"] in SYSTEM for message in messages):
            messages = [{"role": "system", "content": self.defaults.system}, *messages]
        try:
            tools = await asyncio.to_thread(tools_asked, asked)
            wish, variables = reasoning_of(asked, await self._wish(asked), self.replies.tokenizer)
        except Problem as problem:
            raise problem.renamed(called or {}) from problem
        return Wanted(messages, wish, tools, variables, pictures)

    def _reply(self, wanted: Wanted, cancelled: Callable[[], bool]) -> Iterator[Event]:
        return self.replies.reply(wanted.messages, wanted.wish, wanted.tools, wanted.variables, cancelled)

    def _completion(self, kind: type[Completion], asked: Asked, wish: Wish) -> Completion:
        told_by = None if wish.tells is None else self.replies.tokenizer
        return kind(self.called(asked.model), bool(asked.stream_options and asked.stream_options.include_usage), told_by)

    async def _answers(self, request: Request, asked: Asked, make: Callable[[], Completion], starts: Sequence[Start],
                       each: int) -> Response:
        """One answer of a shape, or several, `each` of them to one prompt."""
        shape = make() if len(starts) == 1 else Several(make, len(starts), each)
        return await self.answer(request, asked, shape, in_turn(starts))

    async def answer(self, request: Request, asked: Asked | OllamaAsked, shape: Shape, start: Start) -> Response:
        """The answer that `start` begins, whole or as a stream. Raises Problem."""
        listener = Listener(self.desk.ask(start), self.note, request.scope[RECORD], self.tally.add)
        kind = LineStream if shape.by_line else EventStream
        return kind(listener, shape) if asked.stream else await whole(request, listener, shape)

    def called(self, model: str | None) -> str:
        """What answers to a request for this model are told as: its own name, or that of an adapter."""
        return self.adapters.called(model) or self.name

    def demand_model(self, name: str, param: str | None = None) -> None:
        known = {name, untagged(name)} & {self.name, *(self.also or ()), *self.adapters.models}
        if self.also is not None and not known:
            raise Problem(404, f"there is no model {name!r:.100} here: this server serves {self.name} (--name NAME calls it otherwise)",
                          param=param, code=NO_MODEL)

    def _card(self, adapter: str | None = None) -> dict[str, object]:
        """The model as lists have it, or with one of its adapters, whose parent it is."""
        engine, name = self.replies.engine, adapter or self.name
        own = {} if adapter is None else {"parent": self.name}
        if self.replies.sees:
            own["capabilities"] = ["completion", "vision"]
        meta = {"n_ctx": engine.n_ctx, "n_ctx_train": engine.config.context_length, "n_vocab": engine.config.vocab_size}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "effllm", "max_model_len": engine.n_ctx,
                "meta": meta, "type": "model", "display_name": name, "max_input_tokens": engine.n_ctx,
                "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created)), **own}


async def on_problem(request: Request, error: Exception) -> Response:
    problem, record = problem_of(error), request.scope[RECORD]
    if problem.type != FAILED:
        record.ending = problem.message
    elif not record.problem:
        record.problem = f"{type(error).__name__}: {error}"
    return problem_response(problem, request.url.path)


async def on_left(request: Request, error: Exception) -> Response:
    """The client went away before its request was whole."""
    request.scope[RECORD].ending = LEFT
    return Response(status_code=GONE)


async def on_path(request: Request, error: HTTPException) -> Response:
    """A path or a method that there is not."""
    if error.status_code == 405:
        said = f"{request.url.path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}"
        return problem_response(Problem(405, said, code="method_not_allowed", headers=error.headers), request.url.path)
    said = f"there is no {request.method} {request.url.path} here: {SERVED} are served"
    return problem_response(Problem(error.status_code, said, code="unknown_url"), request.url.path)
