"""What is served: the paths of OpenAI's, Anthropic's, Google's, Ollama's and llama.cpp's APIs that a model of text has an answer for.
Whatever API a request is of, it is read as one of chat completions, or of completions, and its answer has the shape of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import EffllmError
from ...runtime.generation.served_model import GenerationOptions, ServedModel
from ...runtime.tokens.infill import Gap
from . import messages_requests, ollama_requests, papers, responses_requests
from . import pictures as pictures_sent
from .answer_queue import Start
from .background import HELD, UNKEPT, Background, Following
from .compaction import (
    COMPACT,
    CompactionSerializer,
    after_summary,
    compacted,
    compaction_threshold,
    summary_max_tokens,
    summary_request,
    verbatim_items,
    with_summary,
)
from .conversations import Conversations
from .custom_tools import names_of
from .followed import Events
from .gemini_paths import GeminiPaths
from .guard import RECORD
from .kept_responses import KeptResponses
from .llama_paths import LlamaPaths
from .llama_slots import LlamaSlots
from .lm_studio_chat import LmStudioChat
from .messages_requests import CountTokensRequest, MessagesRequest
from .messages_serializer import MessageSerializer
from .metrics import Tally
from .multiple_answers import MultipleAnswers, choice_count, in_sequence, with_seeds
from .ollama import OllamaModels
from .ollama_requests import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest, waited_ns
from .ollama_serializer import OllamaChatSerializer, OllamaGenerateSerializer
from .openai_requests import ChatRequest, CompletionRequest, GenerationRequest, Kind, messages_of, prompts_of
from .pictures import Sent
from .problems import LEAVE_IT, MESSAGES, OLLAMA, Problem, problem_of
from .responses_paths import ResponsesPaths
from .responses_requests import ResponsesRequest, ToolNames
from .responses_serializer import CUT, DONE, ResponseSerializer
from .serializers import AnswerSerializer, ChatSerializer, CompletionSerializer, TextSerializer
from .single_model import CHATS, COUNTED, TEXTS, SingleModelService
from .streams import EventStream, LineStream, Listener, ListStream, Record, json_response, whole
from .threads import Threads
from .tools import tools_asked
from .transcription import TranscriptionPaths
from .wishes import Defaults, reasoning_of, unreasoned, wish_of

if TYPE_CHECKING:
    import numpy as np

    from ...runtime.events import Event
    from ...runtime.images.media import MediaItem
    from ...runtime.sessions.slot_files import SlotFiles
    from ...runtime.tool_calls.tool_calling import Tools

SYSTEM = ("system", "developer")
COUNT_OF_OPENAI = {"object": "response.input_tokens"}
NO_INSERT = 'suffix is not supported: "{}" does not support insert, having no tokens for filling in the middle'  # words of Ollama's in it


@dataclass(frozen=True)
class PreparedRequest:
    """What a request for an answer to messages comes to. `pictures` are held here, until it is answered."""

    messages: list[dict[str, Any]]
    wish: GenerationOptions
    tools: Tools | None
    variables: dict[str, Any]
    pictures: tuple[MediaItem, ...] = ()


@dataclass
class GenerationService(SingleModelService):
    """A model that writes, and what its answers are by default. In `slot_files` programs save what sequences hold, None: nowhere."""

    replies: ServedModel
    defaults: Defaults = field(kw_only=True)
    slot_files: SlotFiles | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tally, self._taking, self._reading = Tally(), pictures_sent.Taking(self.replies, self.note), papers.Reading(self.note)
        self._kept, self._conversations, self._threads, self._background = KeptResponses(), Conversations(), Threads(), Background()

    def routes(self) -> list[Route]:
        post = partial(Route, methods=["POST"])
        return [*super().routes(), *(post(path, self.chat) for path in CHATS), *(post(path, self.text) for path in TEXTS),
                *(post(path, self.responses) for path in ("/v1/responses", "/responses")),
                *(post(path, self.compact) for path in COMPACT),
                *(post(path, self.count_response) for path in COUNTED[:2]), *(post(path, self.count_chat) for path in COUNTED[2:]),
                post(MESSAGES, self.messages), post(f"{MESSAGES}/count_tokens", self.count_tokens),
                post(f"{OLLAMA}chat", self.ollama_chat), post(f"{OLLAMA}generate", self.ollama_generate),
                *OllamaModels(self.name, self.replies, self.defaults, self.demand_model).routes(),
                *GeminiPaths(self).routes(), *LlamaPaths(self).routes(), *LlamaSlots(self, self.slot_files).routes(),
                *self.adapters.routes(), *LmStudioChat(self, self._kept).routes(),
                *ResponsesPaths(self._kept, self._conversations, self._background).routes(), *TranscriptionPaths(self).routes()]

    async def chat(self, request: Request) -> Response:
        payload = await self.payload(request, ChatRequest)
        pictures = await self.pictures(pictures_sent.in_chat(payload), papers.in_chat(payload))
        answer, each = await self.wanted(payload, messages_of(payload), pictures=pictures), choice_count(payload.n)
        starts = [partial(self.reply, replace(answer, wish=wish)) for wish in with_seeds(answer.wish, each)]
        return await self._answers(request, payload, partial(self._completion, ChatSerializer, payload, answer.wish), starts, each)

    async def responses(self, request: Request) -> Response:
        payload = await self.payload(request, ResponsesRequest)
        if payload.background and payload.store is False:
            raise Problem(400, UNKEPT, param="store", hint=LEAVE_IT)
        self._background.demand_ended(payload.previous_response_id)
        own = self._kept.own(payload)
        said = [*self._conversations.before(payload), *own]
        whole_request = self._kept.whole(payload, said)
        answer, names = await self.wanted_response(whole_request)
        start = await self._in_room(whole_request, said, answer)

        def keep(response: dict[str, Any], events: Events | None = None) -> None:
            self._kept.keep(payload, said, response, events)
            if payload.conversation_id is not None and response["status"] in (DONE, CUT):
                self._conversations.answered(payload.conversation_id, [*own, *response["output"]])

        shape = ResponseSerializer(self.called(payload.model), payload, names, self.replies.tokenizer if payload.tells else None,
                                   None if payload.background else keep)
        if not payload.background:
            return await self.answer(request, payload, shape, start)
        listener = Listener(self.answer_queue.submit(start), self.note, Record(), self.tally.add)
        running = self._background.begin(shape, listener, keep, self.note)
        request.scope[RECORD].made, request.scope[RECORD].behind = f"{shape.id} goes on in the background", running.task
        return Following(running.events, shape.id, running) if payload.stream else json_response(running.response, headers={HELD: shape.id})

    async def _in_room(self, payload: ResponsesRequest, own: Sequence[dict[str, Any]], answer: PreparedRequest) -> Start:
        """What begins an answer to a request, behind what its conversation comes to where that is too long for what it asks for."""
        most, items = compaction_threshold(payload, self.replies.engine.n_ctx), payload.input if isinstance(payload.input, list) else own
        if most is None or await self.count(answer) <= most or (short := compacted(payload, items, place := uuid.uuid4().hex)) is None:
            return partial(self.reply, answer)
        notes, _ = await self.wanted_response(summary_request(payload, items, summary_max_tokens(self.replies.engine.n_ctx)))
        again, _ = await self.wanted_response(short)

        def behind(text: str) -> Start:
            return partial(self.reply, replace(again, messages=with_summary(again.messages, place, text), pictures=answer.pictures))

        return after_summary(partial(self.reply, notes), behind)

    async def wanted_response(self, payload: ResponsesRequest) -> tuple[PreparedRequest, ToolNames]:
        """What a request of Responses comes to, and what its program calls the tools."""
        pictures = await self.pictures(pictures_sent.in_responses(payload), papers.in_responses(payload))
        chat, messages, names = await asyncio.to_thread(responses_requests.chat_of, payload)  # which reads the grammars of tools
        return await self.wanted(chat, messages, responses_requests.CALLED, pictures), names

    async def compact(self, request: Request) -> Response:
        payload = await self.payload(request, ResponsesRequest)
        own = self._kept.own(payload)
        before = self._kept.whole(payload, [*self._conversations.before(payload), *own]).input
        if not (items := own if isinstance(before, str) else before):
            raise Problem(400, "input is missing", param="input", hint="it is the conversation that is to become short")
        shape = CompactionSerializer(deepcopy(verbatim_items(items)))
        answer, _ = await self.wanted_response(summary_request(payload, items, payload.max_output_tokens))
        return await self.answer(request, payload.model_copy(update={"stream": False}), shape, partial(self.reply, answer))

    async def messages(self, request: Request) -> Response:
        payload = await self.payload(request, MessagesRequest)
        whole = self._threads.whole(payload)
        pictures = await self.pictures(pictures_sent.in_messages(whole), papers.in_messages(whole))
        answer = await self.wanted(*messages_requests.chat_of(whole), messages_requests.CALLED, pictures)
        shape = MessageSerializer(self.called(payload.model), payload, partial(self._threads.keep, payload, whole))
        return await self.answer(request, payload, shape, partial(self.reply, answer))

    async def count_chat(self, request: Request) -> Response:
        payload = await self.payload(request, ChatRequest)
        pictures = await self.pictures(pictures_sent.in_chat(payload), papers.in_chat(payload))
        return await self._counted(await self.wanted(payload, messages_of(payload), pictures=pictures))

    async def count_response(self, request: Request) -> Response:
        payload = await self.payload(request, ResponsesRequest)
        said = [*self._conversations.before(payload), *self._kept.own(payload)]
        wanted, _ = await self.wanted_response(self._kept.whole(payload, said))
        return await self._counted(wanted)

    async def count_tokens(self, request: Request) -> Response:
        payload = self._threads.whole(await self.payload(request, CountTokensRequest))
        pictures = await self.pictures(pictures_sent.in_messages(payload), papers.in_messages(payload))
        return await self._counted(await self.wanted(*messages_requests.chat_of(payload), messages_requests.CALLED, pictures), {})

    async def _counted(self, wanted: PreparedRequest, told: Mapping[str, str] = COUNT_OF_OPENAI) -> Response:
        """How many tokens the prompt has, beside what else is `told`."""
        return json_response({**told, "input_tokens": await self.count(wanted)})

    async def count(self, wanted: PreparedRequest) -> int:
        return await asyncio.to_thread(self.replies.count, wanted.messages, wanted.wish.think, wanted.tools, wanted.variables)

    async def ollama_chat(self, request: Request) -> Response:
        payload = await self._asked_as_ollama(request, OllamaChatRequest)
        shape = OllamaChatSerializer(payload.model or self.name, waited_ns(request.headers),
                                     self.replies.tokenizer if payload.logprobs else None)
        if not payload.messages:
            return json_response(shape.loaded())
        pictures = await self.pictures(pictures_sent.in_ollama_chat(payload))
        answer = await self.wanted(*ollama_requests.chat_of(payload), ollama_requests.CALLED, pictures)
        return await self.answer(request, payload, shape, partial(self.reply, answer))

    async def ollama_generate(self, request: Request) -> Response:
        payload = await self._asked_as_ollama(request, OllamaGenerateRequest)
        shape = OllamaGenerateSerializer(payload.model or self.name, waited_ns(request.headers),
                                         self.replies.tokenizer if payload.logprobs else None)
        if not payload.prompt:
            return json_response(shape.loaded())
        pictures = await self.pictures(pictures_sent.in_ollama_text(payload))
        if payload.raw or payload.suffix:
            wish = await self._wish(ollama_requests.raw_completion(payload), ollama_requests.CALLED_RAW)
            return await self.answer(request, payload, shape, await self._completed(payload.prompt, payload.suffix, wish))
        answer = await self.wanted(*ollama_requests.generate_as_chat(payload), ollama_requests.CALLED, pictures)
        return await self.answer(request, payload, shape, partial(self.reply, answer))

    async def text(self, request: Request) -> Response:
        payload = await self.payload(request, CompletionRequest)
        prompts, wish = prompts_of(payload), await self._wish(payload)
        each = choice_count(payload.n, len(prompts))
        if not payload.suffix:
            await self.demand_room(prompts, wish)
        starts = [await self._completed(prompt, payload.suffix, own) for prompt in prompts for own in with_seeds(wish, each)]
        return await self._answers(request, payload, partial(self._completion, TextSerializer, payload, wish), starts, each)

    async def demand_room(self, prompts: Sequence[str | list[int]], wish: GenerationOptions) -> None:
        """Of several prompts that are answered in turn one that cannot be is told of before the first is. Raises Problem that names it."""
        for number, prompt in enumerate(prompts if len(prompts) > 1 else ()):
            try:
                await asyncio.to_thread(self.replies.demand_room, prompt, wish)
            except EffllmError as error:
                problem = problem_of(error, f"prompt[{number}]")
                problem.message = f"prompt[{number}]: {problem.message}"
                raise problem from error

    async def _asked_as_ollama(self, request: Request, kind: type[Kind]) -> Kind:
        payload = await self.payload(request, kind)
        if remark := ollama_requests.check_request(payload, self.name, self.replies.tokenizer.thinks, self.replies.engine.n_ctx):
            self.note(remark)
        return payload

    async def _wish(self, payload: GenerationRequest, called: Mapping[str, str] | None = None) -> GenerationOptions:
        """Raises Problem that names the field, as it is `called` where the request comes from."""
        try:
            wish = await asyncio.to_thread(wish_of, payload, self.defaults, self.replies.tokenizer)
            return replace(wish, choice=self.adapters.choice(payload))
        except Problem as problem:
            raise problem.renamed(called or {}) from problem

    async def _completed(self, prompt: str | list[int], suffix: str | None, wish: GenerationOptions) -> Start:
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

    async def pictures(self, sent: Iterable[Sent], files: Iterable[papers.Sent] = ()) -> tuple[MediaItem, ...]:
        """The pictures of a request, in whose places marks are then; in those of its files are their texts. Raises Problem."""
        await self._reading.all(files)
        return await self._taking.all(sent)

    async def samples(self, data: bytes, where: str) -> np.ndarray:
        """Those of a sound that came as a file. Raises Problem."""
        return await self._taking.samples(data, where)

    async def wanted(self, payload: ChatRequest, messages: list[dict[str, Any]], called: Mapping[str, str] | None = None,
                     pictures: tuple[MediaItem, ...] = ()) -> PreparedRequest:
        """What a request comes to. Raises Problem that names the field, as it is `called` where the request comes from."""
        if self.defaults.system and not any(message["role"] in SYSTEM for message in messages):
            messages = [{"role": "system", "content": self.defaults.system}, *messages]
        try:
            tools = await asyncio.to_thread(tools_asked, payload)
            wish, variables = reasoning_of(payload, await self._wish(payload), self.replies.tokenizer)
        except Problem as problem:
            raise problem.renamed(called or {}) from problem
        if remark := unreasoned(payload, self.replies.tokenizer):
            self.note(remark)
        return PreparedRequest(messages, wish, tools, variables, pictures)

    def reply(self, wanted: PreparedRequest, cancelled: Callable[[], bool]) -> Iterator[Event]:
        return self.replies.reply(wanted.messages, wanted.wish, wanted.tools, wanted.variables, cancelled)

    def _completion(self, kind: type[CompletionSerializer], payload: GenerationRequest, wish: GenerationOptions) -> CompletionSerializer:
        told_by = None if wish.tells is None else self.replies.tokenizer
        made = kind(self.called(payload.model), bool(payload.stream_options and payload.stream_options.include_usage), told_by)
        made.says_none = payload.cache_prompt is None  # of llama-server's programs, some take usage of null for the last piece
        made.calls.free = names_of(payload.tools) if isinstance(payload, ChatRequest) else frozenset()
        return made

    async def _answers(self, request: Request, payload: GenerationRequest, make: Callable[[], CompletionSerializer],
                       starts: Sequence[Start],
                       each: int) -> Response:
        """One answer of a shape, or several, `each` of them to one prompt."""
        shape = make() if len(starts) == 1 else MultipleAnswers(make, len(starts), each)
        return await self.answer(request, payload, shape, in_sequence(starts))

    async def answer(self, request: Request, payload: GenerationRequest | OllamaRequest, shape: AnswerSerializer, start: Start) -> Response:
        """The answer that `start` begins, whole or as a stream. Raises Problem."""
        listener = Listener(self.answer_queue.submit(start), self.note, request.scope[RECORD], self.tally.add)
        kind = LineStream if shape.by_line else ListStream if shape.in_list else EventStream
        return kind(listener, shape) if payload.stream else await whole(request, listener, shape)
