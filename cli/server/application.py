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
from .background import BACKGROUND_HEADER, NEEDS_STORE, BackgroundResponses, EventReplay
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
from .problems import LEAVE_OUT, MESSAGES, OLLAMA, Problem, problem_of
from .response_store import ResponseStore
from .responses_paths import ResponsesPaths
from .responses_requests import ResponsesRequest, ToolNames
from .responses_serializer import COMPLETED, INCOMPLETE, ResponseSerializer
from .serializers import AnswerSerializer, ChatSerializer, CompletionSerializer, TextSerializer
from .single_model import CHAT_PATHS, COMPLETION_PATHS, COUNT_TOKENS_PATHS, SingleModelService
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
# Ollama's wording, which clients match.
NO_INSERT = 'suffix is not supported: "{}" does not support insert, having no tokens for filling in the middle'


@dataclass(frozen=True)
class PreparedRequest:
    """A request for an answer to messages, ready to run."""

    messages: list[dict[str, Any]]
    options: GenerationOptions
    tools: Tools | None
    variables: dict[str, Any]  # of the chat template
    media_items: tuple[MediaItem, ...] = ()  # of the markers in messages, which do not keep them alive


@dataclass
class GenerationService(SingleModelService):
    """The service of a generative model. `defaults`: options of requests that do not state them; `slot_files`: where slots are saved on
    request, None if they cannot be."""

    served: ServedModel
    defaults: Defaults = field(kw_only=True)
    slot_files: SlotFiles | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.metrics = Metrics()
        self._media, self._documents = media.MediaLoader(self.served, self.note), documents.DocumentReader(self.note)
        self._stored, self._background = ResponseStore(), BackgroundResponses()
        self._conversations, self._threads = Conversations(), MessageThreads()

    def routes(self) -> list[Route]:
        post = partial(Route, methods=["POST"])
        return [*super().routes(), *(post(path, self.chat) for path in CHAT_PATHS), *(post(path, self.text) for path in COMPLETION_PATHS),
                *(post(path, self.responses) for path in ("/v1/responses", "/responses")),
                *(post(path, self.compact) for path in COMPACT),
                *(post(path, self.count_response) for path in COUNT_TOKENS_PATHS[:2]),
                *(post(path, self.count_chat) for path in COUNT_TOKENS_PATHS[2:]),
                post(MESSAGES, self.messages), post(f"{MESSAGES}/count_tokens", self.count_tokens),
                post(f"{OLLAMA}chat", self.ollama_chat), post(f"{OLLAMA}generate", self.ollama_generate),
                *OllamaModels(self.name, self.served, self.defaults, self.check_model).routes(),
                *GeminiPaths(self).routes(), *LlamaPaths(self).routes(), *LlamaSlots(self, self.slot_files).routes(),
                *self.adapters.routes(), *LmStudioChat(self, self._stored).routes(),
                *ResponsesPaths(self._stored, self._conversations, self._background).routes(), *TranscriptionPaths(self).routes()]

    async def chat(self, request: Request) -> Response:
        payload = await self.payload(request, ChatRequest)
        media_items = await self.load_media(media.in_chat(payload), documents.in_chat(payload))
        answer, num_choices = await self.prepare(payload, messages_of(payload), media_items=media_items), choice_count(payload.n)
        starts = [partial(self.reply, replace(answer, options=options)) for options in with_seeds(answer.options, num_choices)]
        make_serializer = partial(self._completion, ChatSerializer, payload, answer.options)
        return await self._answers(request, payload, make_serializer, starts, num_choices)

    async def responses(self, request: Request) -> Response:
        payload = await self.payload(request, ResponsesRequest)
        if payload.background and payload.store is False:
            raise Problem(400, NEEDS_STORE, param="store", hint=LEAVE_OUT)
        self._background.check_finished(payload.previous_response_id)
        new_items = self._stored.input_items(payload)
        items = [*self._conversations.history(payload), *new_items]
        full_request = self._stored.with_history(payload, items)
        answer, names = await self.prepare_response(full_request)
        start = await self._start_with_compaction(full_request, items, answer)

        def keep(response: dict[str, Any], events: EventLog | None = None) -> None:
            self._stored.keep(payload, items, response, events)
            if payload.conversation_id is not None and response["status"] in (COMPLETED, INCOMPLETE):
                self._conversations.append_answer(payload.conversation_id, [*new_items, *response["output"]])

        tokenizer = self.served.tokenizer if payload.wants_logprobs else None
        serializer = ResponseSerializer(self.response_model_name(payload.model), payload, names, tokenizer,
                                        None if payload.background else keep)
        if not payload.background:
            return await self.answer(request, payload, serializer, start)
        reader = EventReader(self.answer_queue.submit(start), self.note, RequestRecord(), self.metrics.add)
        running = self._background.begin(serializer, reader, keep, self.note)
        record = request.scope[RECORD]
        record.summary, record.background_task = f"{serializer.id} continues in the background", running.task
        if payload.stream:
            return EventReplay(running.events, serializer.id, running)
        return json_response(running.response, headers={BACKGROUND_HEADER: serializer.id})

    async def _start_with_compaction(self, payload: ResponsesRequest, new_items: Sequence[dict[str, Any]],
                                     answer: PreparedRequest) -> Start:
        """The start of an answer. If the conversation exceeds the request's compaction threshold, it is summarized first."""
        threshold = compaction_threshold(payload, self.served.engine.n_ctx)
        if threshold is None or await self.count(answer) <= threshold:
            return partial(self.reply, answer)
        items, placeholder = payload.input if isinstance(payload.input, list) else new_items, uuid.uuid4().hex
        if (short := compacted(payload, items, placeholder)) is None:
            return partial(self.reply, answer)
        summary, _ = await self.prepare_response(summary_request(payload, items, summary_max_tokens(self.served.engine.n_ctx)))
        continued, _ = await self.prepare_response(short)

        def continue_with(text: str) -> Start:
            messages = with_summary(continued.messages, placeholder, text)
            return partial(self.reply, replace(continued, messages=messages, media_items=answer.media_items))

        return after_summary(partial(self.reply, summary), continue_with)

    async def prepare_response(self, payload: ResponsesRequest) -> tuple[PreparedRequest, ToolNames]:
        """Prepare a Responses request. Returns the client's names of its tools, too."""
        media_items = await self.load_media(media.in_responses(payload), documents.in_responses(payload))
        chat, messages, names = await asyncio.to_thread(responses_requests.chat_of, payload)  # it parses the grammars of tools
        return await self.prepare(chat, messages, responses_requests.FIELD_NAMES, media_items), names

    async def compact(self, request: Request) -> Response:
        payload = await self.payload(request, ResponsesRequest)
        new_items = self._stored.input_items(payload)
        input_items = self._stored.with_history(payload, [*self._conversations.history(payload), *new_items]).input
        if not (items := new_items if isinstance(input_items, str) else input_items):
            raise Problem(400, "input is missing", param="input", hint="send the conversation to compact")
        serializer = CompactionSerializer(deepcopy(verbatim_items(items)))
        answer, _ = await self.prepare_response(summary_request(payload, items, payload.max_output_tokens))
        return await self.answer(request, payload.model_copy(update={"stream": False}), serializer, partial(self.reply, answer))

    async def messages(self, request: Request) -> Response:
        payload = await self.payload(request, MessagesRequest)
        continued = self._threads.with_history(payload)
        media_items = await self.load_media(media.in_messages(continued), documents.in_messages(continued))
        answer = await self.prepare(*messages_requests.chat_of(continued), messages_requests.FIELD_NAMES, media_items)
        serializer = MessageSerializer(self.response_model_name(payload.model), payload, partial(self._threads.keep, payload, continued))
        return await self.answer(request, payload, serializer, partial(self.reply, answer))

    async def count_chat(self, request: Request) -> Response:
        payload = await self.payload(request, ChatRequest)
        media_items = await self.load_media(media.in_chat(payload), documents.in_chat(payload))
        return await self._counted(await self.prepare(payload, messages_of(payload), media_items=media_items))

    async def count_response(self, request: Request) -> Response:
        payload = await self.payload(request, ResponsesRequest)
        items = [*self._conversations.history(payload), *self._stored.input_items(payload)]
        prepared, _ = await self.prepare_response(self._stored.with_history(payload, items))
        return await self._counted(prepared)

    async def count_tokens(self, request: Request) -> Response:
        payload = self._threads.with_history(await self.payload(request, CountTokensRequest))
        media_items = await self.load_media(media.in_messages(payload), documents.in_messages(payload))
        return await self._counted(await self.prepare(*messages_requests.chat_of(payload), messages_requests.FIELD_NAMES, media_items), {})

    async def _counted(self, prepared: PreparedRequest, extra_fields: Mapping[str, str] = COUNT_OF_OPENAI) -> Response:
        """A response with the number of prompt tokens and `extra_fields`."""
        return json_response({**extra_fields, "input_tokens": await self.count(prepared)})

    async def count(self, prepared: PreparedRequest) -> int:
        return await asyncio.to_thread(self.served.count, prepared.messages, prepared.options.think, prepared.tools, prepared.variables)

    async def ollama_chat(self, request: Request) -> Response:
        payload = await self._ollama_payload(request, OllamaChatRequest)
        serializer = OllamaChatSerializer(payload.model or self.name, waited_ns(request.headers),
                                          self.served.tokenizer if payload.logprobs else None)
        if not payload.messages:
            return json_response(serializer.loaded())
        media_items = await self.load_media(media.in_ollama_chat(payload))
        answer = await self.prepare(*ollama_requests.chat_of(payload), ollama_requests.FIELD_NAMES, media_items)
        return await self.answer(request, payload, serializer, partial(self.reply, answer))

    async def ollama_generate(self, request: Request) -> Response:
        payload = await self._ollama_payload(request, OllamaGenerateRequest)
        serializer = OllamaGenerateSerializer(payload.model or self.name, waited_ns(request.headers),
                                              self.served.tokenizer if payload.logprobs else None)
        if not payload.prompt:
            return json_response(serializer.loaded())
        media_items = await self.load_media(media.in_ollama_text(payload))
        if payload.raw or payload.suffix:
            options = await self._options(ollama_requests.raw_completion(payload), ollama_requests.RAW_FIELD_NAMES)
            return await self.answer(request, payload, serializer, await self._start_completion(payload.prompt, payload.suffix, options))
        answer = await self.prepare(*ollama_requests.generate_as_chat(payload), ollama_requests.FIELD_NAMES, media_items)
        return await self.answer(request, payload, serializer, partial(self.reply, answer))

    async def text(self, request: Request) -> Response:
        payload = await self.payload(request, CompletionRequest)
        prompts, options = prompts_of(payload), await self._options(payload)
        num_choices = choice_count(payload.n, len(prompts))
        if not payload.suffix:
            await self.check_prompts_fit(prompts, options)
        starts = [await self._start_completion(prompt, payload.suffix, seeded) for prompt in prompts
                  for seeded in with_seeds(options, num_choices)]
        return await self._answers(request, payload, partial(self._completion, TextSerializer, payload, options), starts, num_choices)

    async def check_prompts_fit(self, prompts: Sequence[str | list[int]], options: GenerationOptions) -> None:
        """Check several prompts before the first is answered. Raises Problem that names one that does not fit."""
        for number, prompt in enumerate(prompts if len(prompts) > 1 else ()):
            try:
                await asyncio.to_thread(self.served.check_length, prompt, options)
            except EffllmError as error:
                problem = problem_of(error, f"prompt[{number}]")
                problem.message = f"prompt[{number}]: {problem.message}"
                raise problem from error

    async def _ollama_payload(self, request: Request, kind: type[Kind]) -> Kind:
        payload = await self.payload(request, kind)
        if notice := ollama_requests.check_request(payload, self.name, self.served.tokenizer.thinks, self.served.engine.n_ctx):
            self.note(notice)
        return payload

    async def _options(self, payload: GenerationRequest, field_names: Mapping[str, str] | None = None) -> GenerationOptions:
        """The generation options of a request. Raises Problem that names the field; `field_names`: our field names -> the client's."""
        try:
            options = await asyncio.to_thread(options_of, payload, self.defaults, self.served.tokenizer)
            return replace(options, choice=self.adapters.choice(payload))
        except Problem as problem:
            raise problem.renamed(field_names or {}) from problem

    async def _start_completion(self, prompt: str | list[int], suffix: str | None, options: GenerationOptions) -> Start:
        """The start of a completion of a raw prompt, or with a suffix of the text between them (FIM). Raises Problem, EffllmError."""
        if not suffix:
            return partial(self.served.complete, prompt, options)
        if options.echo or not isinstance(prompt, str):
            raise Problem(400, "suffix needs a text prompt without echo", param="suffix")
        if await asyncio.to_thread(lambda: self.served.fim_tokens) is None:
            raise Problem(400, NO_INSERT.format(self.name), param="suffix", code="unsupported_parameter")
        infill = await asyncio.to_thread(self.served.build_infill_prompt, InfillContext(prompt, suffix), options.max_tokens, False)
        return partial(self.served.complete, infill.ids, options, cacheable_tokens=infill.cacheable)

    async def load_media(self, sent: Iterable[MediaPart], files: Iterable[documents.DocumentPart] = ()) -> tuple[MediaItem, ...]:
        """Load the media of a request, which are replaced by markers in its messages; document files are replaced by their text. Raises
        Problem."""
        await self._documents.all(files)
        return await self._media.all(sent)

    async def samples(self, data: bytes, where: str) -> np.ndarray:
        """Decode an uploaded audio file; `where`: its name in errors. Raises Problem."""
        return await self._media.samples(data, where)

    async def prepare(self, payload: ChatRequest, messages: list[dict[str, Any]], field_names: Mapping[str, str] | None = None,
                     media_items: tuple[MediaItem, ...] = ()) -> PreparedRequest:
        """Prepare a chat request. Raises Problem that names the field; `field_names`: our field names -> the client's."""
        if self.defaults.system and not any(message["role"] in SYSTEM for message in messages):
            messages = [{"role": "system", "content": self.defaults.system}, *messages]
        try:
            tools = await asyncio.to_thread(requested_tools, payload)
            options, variables = apply_reasoning(payload, await self._options(payload), self.served.tokenizer)
        except Problem as problem:
            raise problem.renamed(field_names or {}) from problem
        if notice := reasoning_notice(payload, self.served.tokenizer):
            self.note(notice)
        return PreparedRequest(messages, options, tools, variables, media_items)

    def reply(self, prepared: PreparedRequest, cancelled: Callable[[], bool]) -> Iterator[Event]:
        return self.served.reply(prepared.messages, prepared.options, prepared.tools, prepared.variables, cancelled)

    def _completion(self, kind: type[CompletionSerializer], payload: GenerationRequest, options: GenerationOptions) -> CompletionSerializer:
        tokenizer = None if options.logprobs is None else self.served.tokenizer
        include_usage = bool(payload.stream_options and payload.stream_options.include_usage)
        serializer = kind(self.response_model_name(payload.model), include_usage, tokenizer)
        serializer.null_usage = payload.cache_prompt is None  # some clients of llama-server take a null usage for the last chunk
        serializer.call_list.custom_tools = names_of(payload.tools) if isinstance(payload, ChatRequest) else frozenset()
        return serializer

    async def _answers(self, request: Request, payload: GenerationRequest, make: Callable[[], CompletionSerializer],
                       starts: Sequence[Start], num_choices: int) -> Response:
        """Respond with one answer, or with several: `num_choices` to each prompt."""
        serializer = make() if len(starts) == 1 else MultipleAnswers(make, len(starts), num_choices)
        return await self.answer(request, payload, serializer, in_sequence(starts))

    async def answer(self, request: Request, payload: GenerationRequest | OllamaRequest, serializer: AnswerSerializer,
                     start: Start) -> Response:
        """Queue an answer, and respond with it whole or as a stream. Raises Problem."""
        reader = EventReader(self.answer_queue.submit(start), self.note, request.scope[RECORD], self.metrics.add)
        kind = LineStream if serializer.json_lines else ListStream if serializer.is_json_list else EventStream
        return kind(reader, serializer) if payload.stream else await whole_response(request, reader, serializer)
