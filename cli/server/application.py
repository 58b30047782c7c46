"""The service of a generative model: OpenAI's, Anthropic's, Google's, Ollama's, LM Studio's and llama.cpp's endpoints. A request of any API
is translated to one of chat completions, or of completions; its answer is serialized in the format of its own API."""

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
from ...runtime.tokens.infill import InfillContext
from . import documents, media, messages_requests, ollama_requests, responses_requests
from .answer_queue import Start
from .background import HELD, NEEDS_STORE, BackgroundResponses, EventReplay
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
from .event_log import EventLog
from .gemini_paths import GeminiPaths
from .generation_options import Defaults, apply_reasoning, options_of, reasoning_notice
from .guard import RECORD
from .llama_paths import LlamaPaths
from .llama_slots import LlamaSlots
from .lm_studio_chat import LmStudioChat
from .media import MediaPart
from .message_threads import MessageThreads
from .messages_requests import CountTokensRequest, MessagesRequest
from .messages_serializer import MessageSerializer
from .metrics import Metrics
from .multiple_answers import MultipleAnswers, choice_count, in_sequence, with_seeds
from .ollama import OllamaModels
from .ollama_requests import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest, waited_ns
from .ollama_serializer import OllamaChatSerializer, OllamaGenerateSerializer
from .openai_requests import ChatRequest, CompletionRequest, GenerationRequest, Kind, messages_of, prompts_of
from .problems import LEAVE_IT, MESSAGES, OLLAMA, Problem, problem_of
from .response_store import ResponseStore
from .responses_paths import ResponsesPaths
from .responses_requests import ResponsesRequest, ToolNames
from .responses_serializer import CUT, DONE, ResponseSerializer
from .serializers import AnswerSerializer, ChatSerializer, CompletionSerializer, TextSerializer
from .single_model import CHATS, COUNTED, TEXTS, SingleModelService
from .streams import EventReader, EventStream, LineStream, ListStream, RequestRecord, json_response, whole_response
from .tools import requested_tools
from .transcription import TranscriptionPaths

if TYPE_CHECKING:
    import numpy as np

    from ...runtime.events import Event
    from ...runtime.images.media import MediaItem
    from ...runtime.sessions.slot_files import SlotFiles
    from ...runtime.tool_calls.tool_calling import Tools

SYSTEM = ("system", "developer")
COUNT_OF_OPENAI = {"object": "response.input_tokens"}
# In Ollama's words, which clients match.
NO_INSERT = 'suffix is not supported: "{}" does not support insert, having no tokens for filling in the middle'


@dataclass(frozen=True)
class PreparedRequest:
    """A request for an answer to messages, ready to run. It holds `pictures` (any media) until it is answered."""

    messages: list[dict[str, Any]]
    options: GenerationOptions
    tools: Tools | None
    variables: dict[str, Any]
    pictures: tuple[MediaItem, ...] = ()


@dataclass
class GenerationService(SingleModelService):
    """A generative model with the `defaults` of its answers. `slot_files`: where slots are saved on request; None: nowhere."""

    served: ServedModel
    defaults: Defaults = field(kw_only=True)
    slot_files: SlotFiles | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.totals = Metrics()
        self._media, self._documents = media.MediaLoader(self.served, self.note), documents.DocumentReader(self.note)
        self._stored, self._background = ResponseStore(), BackgroundResponses()
        self._conversations, self._threads = Conversations(), MessageThreads()

    def routes(self) -> list[Route]:
        post = partial(Route, methods=["POST"])
        return [*super().routes(), *(post(path, self.chat) for path in CHATS), *(post(path, self.text) for path in TEXTS),
                *(post(path, self.responses) for path in ("/v1/responses", "/responses")),
                *(post(path, self.compact) for path in COMPACT),
                *(post(path, self.count_response) for path in COUNTED[:2]), *(post(path, self.count_chat) for path in COUNTED[2:]),
                post(MESSAGES, self.messages), post(f"{MESSAGES}/count_tokens", self.count_tokens),
                post(f"{OLLAMA}chat", self.ollama_chat), post(f"{OLLAMA}generate", self.ollama_generate),
                *OllamaModels(self.name, self.served, self.defaults, self.demand_model).routes(),
                *GeminiPaths(self).routes(), *LlamaPaths(self).routes(), *LlamaSlots(self, self.slot_files).routes(),
                *self.adapters.routes(), *LmStudioChat(self, self._stored).routes(),
                *ResponsesPaths(self._stored, self._conversations, self._background).routes(), *TranscriptionPaths(self).routes()]

    async def chat(self, request: Request) -> Response:
        payload = await self.payload(request, ChatRequest)
        pictures = await self.pictures(media.in_chat(payload), documents.in_chat(payload))
        answer, each = await self.wanted(payload, messages_of(payload), pictures=pictures), choice_count(payload.n)
        starts = [partial(self.reply, replace(answer, options=options)) for options in with_seeds(answer.options, each)]
        return await self._answers(request, payload, partial(self._completion, ChatSerializer, payload, answer.options), starts, each)

    async def responses(self, request: Request) -> Response:
        payload = await self.payload(request, ResponsesRequest)
        if payload.background and payload.store is False:
            raise Problem(400, NEEDS_STORE, param="store", hint=LEAVE_IT)
        self._background.demand_ended(payload.previous_response_id)
        own = self._stored.own(payload)
        said = [*self._conversations.before(payload), *own]
        whole_request = self._stored.whole(payload, said)
        answer, names = await self.wanted_response(whole_request)
        start = await self._in_room(whole_request, said, answer)

        def keep(response: dict[str, Any], events: EventLog | None = None) -> None:
            self._stored.keep(payload, said, response, events)
            if payload.conversation_id is not None and response["status"] in (DONE, CUT):
                self._conversations.answered(payload.conversation_id, [*own, *response["output"]])

        serializer = ResponseSerializer(self.called(payload.model), payload, names, self.served.tokenizer if payload.tells else None,
                                        None if payload.background else keep)
        if not payload.background:
            return await self.answer(request, payload, serializer, start)
        reader = EventReader(self.answer_queue.submit(start), self.note, RequestRecord(), self.totals.add)
        running = self._background.begin(serializer, reader, keep, self.note)
        request.scope[RECORD].outcome, request.scope[RECORD].behind = f"{serializer.id} continues in the background", running.task
        return EventReplay(running.events, serializer.id, running) if payload.stream else json_response(running.response,
                                                                                                        headers={HELD: serializer.id})

    async def _in_room(self, payload: ResponsesRequest, own: Sequence[dict[str, Any]], answer: PreparedRequest) -> Start:
        """Start an answer; where the conversation is longer than the request's compaction threshold, summarize it first."""
        most, items = compaction_threshold(payload, self.served.engine.n_ctx), payload.input if isinstance(payload.input, list) else own
        if most is None or await self.count(answer) <= most or (short := compacted(payload, items, place := uuid.uuid4().hex)) is None:
            return partial(self.reply, answer)
        notes, _ = await self.wanted_response(summary_request(payload, items, summary_max_tokens(self.served.engine.n_ctx)))
        again, _ = await self.wanted_response(short)

        def behind(text: str) -> Start:
            return partial(self.reply, replace(again, messages=with_summary(again.messages, place, text), pictures=answer.pictures))

        return after_summary(partial(self.reply, notes), behind)

    async def wanted_response(self, payload: ResponsesRequest) -> tuple[PreparedRequest, ToolNames]:
        """A Responses request, prepared, and the client's names of its tools."""
        pictures = await self.pictures(media.in_responses(payload), documents.in_responses(payload))
        chat, messages, names = await asyncio.to_thread(responses_requests.chat_of, payload)  # it parses the grammars of tools
        return await self.wanted(chat, messages, responses_requests.CALLED, pictures), names

    async def compact(self, request: Request) -> Response:
        payload = await self.payload(request, ResponsesRequest)
        own = self._stored.own(payload)
        before = self._stored.whole(payload, [*self._conversations.before(payload), *own]).input
        if not (items := own if isinstance(before, str) else before):
            raise Problem(400, "input is missing", param="input", hint="send the conversation to compact")
        serializer = CompactionSerializer(deepcopy(verbatim_items(items)))
        answer, _ = await self.wanted_response(summary_request(payload, items, payload.max_output_tokens))
        return await self.answer(request, payload.model_copy(update={"stream": False}), serializer, partial(self.reply, answer))

    async def messages(self, request: Request) -> Response:
        payload = await self.payload(request, MessagesRequest)
        continued = self._threads.whole(payload)
        pictures = await self.pictures(media.in_messages(continued), documents.in_messages(continued))
        answer = await self.wanted(*messages_requests.chat_of(continued), messages_requests.CALLED, pictures)
        serializer = MessageSerializer(self.called(payload.model), payload, partial(self._threads.keep, payload, continued))
        return await self.answer(request, payload, serializer, partial(self.reply, answer))

    async def count_chat(self, request: Request) -> Response:
        payload = await self.payload(request, ChatRequest)
        pictures = await self.pictures(media.in_chat(payload), documents.in_chat(payload))
        return await self._counted(await self.wanted(payload, messages_of(payload), pictures=pictures))

    async def count_response(self, request: Request) -> Response:
        payload = await self.payload(request, ResponsesRequest)
        said = [*self._conversations.before(payload), *self._stored.own(payload)]
        wanted, _ = await self.wanted_response(self._stored.whole(payload, said))
        return await self._counted(wanted)

    async def count_tokens(self, request: Request) -> Response:
        payload = self._threads.whole(await self.payload(request, CountTokensRequest))
        pictures = await self.pictures(media.in_messages(payload), documents.in_messages(payload))
        return await self._counted(await self.wanted(*messages_requests.chat_of(payload), messages_requests.CALLED, pictures), {})

    async def _counted(self, wanted: PreparedRequest, told: Mapping[str, str] = COUNT_OF_OPENAI) -> Response:
        """The number of prompt tokens, beside the fields in `told`."""
        return json_response({**told, "input_tokens": await self.count(wanted)})

    async def count(self, wanted: PreparedRequest) -> int:
        return await asyncio.to_thread(self.served.count, wanted.messages, wanted.options.think, wanted.tools, wanted.variables)

    async def ollama_chat(self, request: Request) -> Response:
        payload = await self._asked_as_ollama(request, OllamaChatRequest)
        serializer = OllamaChatSerializer(payload.model or self.name, waited_ns(request.headers),
                                          self.served.tokenizer if payload.logprobs else None)
        if not payload.messages:
            return json_response(serializer.loaded())
        pictures = await self.pictures(media.in_ollama_chat(payload))
        answer = await self.wanted(*ollama_requests.chat_of(payload), ollama_requests.CALLED, pictures)
        return await self.answer(request, payload, serializer, partial(self.reply, answer))

    async def ollama_generate(self, request: Request) -> Response:
        payload = await self._asked_as_ollama(request, OllamaGenerateRequest)
        serializer = OllamaGenerateSerializer(payload.model or self.name, waited_ns(request.headers),
                                              self.served.tokenizer if payload.logprobs else None)
        if not payload.prompt:
            return json_response(serializer.loaded())
        pictures = await self.pictures(media.in_ollama_text(payload))
        if payload.raw or payload.suffix:
            options = await self._options(ollama_requests.raw_completion(payload), ollama_requests.CALLED_RAW)
            return await self.answer(request, payload, serializer, await self._completed(payload.prompt, payload.suffix, options))
        answer = await self.wanted(*ollama_requests.generate_as_chat(payload), ollama_requests.CALLED, pictures)
        return await self.answer(request, payload, serializer, partial(self.reply, answer))

    async def text(self, request: Request) -> Response:
        payload = await self.payload(request, CompletionRequest)
        prompts, options = prompts_of(payload), await self._options(payload)
        each = choice_count(payload.n, len(prompts))
        if not payload.suffix:
            await self.demand_room(prompts, options)
        starts = [await self._completed(prompt, payload.suffix, own) for prompt in prompts for own in with_seeds(options, each)]
        return await self._answers(request, payload, partial(self._completion, TextSerializer, payload, options), starts, each)

    async def demand_room(self, prompts: Sequence[str | list[int]], options: GenerationOptions) -> None:
        """Check several prompts before the first is answered. Raises Problem that names the one that does not fit."""
        for number, prompt in enumerate(prompts if len(prompts) > 1 else ()):
            try:
                await asyncio.to_thread(self.served.demand_room, prompt, options)
            except EffllmError as error:
                problem = problem_of(error, f"prompt[{number}]")
                problem.message = f"prompt[{number}]: {problem.message}"
                raise problem from error

    async def _asked_as_ollama(self, request: Request, kind: type[Kind]) -> Kind:
        payload = await self.payload(request, kind)
        if remark := ollama_requests.check_request(payload, self.name, self.served.tokenizer.thinks, self.served.engine.n_ctx):
            self.note(remark)
        return payload

    async def _options(self, payload: GenerationRequest, called: Mapping[str, str] | None = None) -> GenerationOptions:
        """Raises Problem that names the field, as it is `called` in the client's API."""
        try:
            options = await asyncio.to_thread(options_of, payload, self.defaults, self.served.tokenizer)
            return replace(options, choice=self.adapters.choice(payload))
        except Problem as problem:
            raise problem.renamed(called or {}) from problem

    async def _completed(self, prompt: str | list[int], suffix: str | None, options: GenerationOptions) -> Start:
        """Start an answer to a raw prompt, or to what belongs between it and a suffix (FIM). Raises Problem, EffllmError."""
        if not suffix:
            return partial(self.served.complete, prompt, options)
        if options.echo or not isinstance(prompt, str):
            raise Problem(400, "suffix needs a text prompt without echo", param="suffix")
        if await asyncio.to_thread(lambda: self.served.marks) is None:
            raise Problem(400, NO_INSERT.format(self.name), param="suffix", code="unsupported_parameter")
        around = await asyncio.to_thread(self.served.around, InfillContext(prompt, suffix), options.max_tokens, False)
        return partial(self.served.complete, around.ids, options, lasting=around.lasting)

    async def pictures(self, sent: Iterable[MediaPart], files: Iterable[documents.DocumentPart] = ()) -> tuple[MediaItem, ...]:
        """The media of a request, replaced by marks in its messages; document files are replaced by their text. Raises Problem."""
        await self._documents.all(files)
        return await self._media.all(sent)

    async def samples(self, data: bytes, where: str) -> np.ndarray:
        """The samples of an uploaded audio file. Raises Problem."""
        return await self._media.samples(data, where)

    async def wanted(self, payload: ChatRequest, messages: list[dict[str, Any]], called: Mapping[str, str] | None = None,
                     pictures: tuple[MediaItem, ...] = ()) -> PreparedRequest:
        """A request, prepared. Raises Problem that names the field, as it is `called` in the client's API."""
        if self.defaults.system and not any(message["role"] in SYSTEM for message in messages):
            messages = [{"role": "system", "content": self.defaults.system}, *messages]
        try:
            tools = await asyncio.to_thread(requested_tools, payload)
            options, variables = apply_reasoning(payload, await self._options(payload), self.served.tokenizer)
        except Problem as problem:
            raise problem.renamed(called or {}) from problem
        if remark := reasoning_notice(payload, self.served.tokenizer):
            self.note(remark)
        return PreparedRequest(messages, options, tools, variables, pictures)

    def reply(self, wanted: PreparedRequest, cancelled: Callable[[], bool]) -> Iterator[Event]:
        return self.served.reply(wanted.messages, wanted.options, wanted.tools, wanted.variables, cancelled)

    def _completion(self, kind: type[CompletionSerializer], payload: GenerationRequest, options: GenerationOptions) -> CompletionSerializer:
        told_by = None if options.logprobs is None else self.served.tokenizer
        made = kind(self.called(payload.model), bool(payload.stream_options and payload.stream_options.include_usage), told_by)
        made.says_none = payload.cache_prompt is None  # some clients of llama-server take a null usage for the last chunk
        made.calls.free = names_of(payload.tools) if isinstance(payload, ChatRequest) else frozenset()
        return made

    async def _answers(self, request: Request, payload: GenerationRequest, make: Callable[[], CompletionSerializer],
                       starts: Sequence[Start],
                       each: int) -> Response:
        """One answer, or several, `each` of them to one prompt."""
        serializer = make() if len(starts) == 1 else MultipleAnswers(make, len(starts), each)
        return await self.answer(request, payload, serializer, in_sequence(starts))

    async def answer(self, request: Request, payload: GenerationRequest | OllamaRequest, serializer: AnswerSerializer,
                     start: Start) -> Response:
        """The answer that `start` starts, whole or as a stream. Raises Problem."""
        reader = EventReader(self.answer_queue.submit(start), self.note, request.scope[RECORD], self.totals.add)
        kind = LineStream if serializer.by_line else ListStream if serializer.in_list else EventStream
        return kind(reader, serializer) if payload.stream else await whole_response(request, reader, serializer)
