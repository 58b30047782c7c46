"""llama.cpp's own API, as editors and its own clients use it: completions, FIM, tokenization, templates, properties, slots and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...runtime.generation.served_model import GenerationOptions
from ...runtime.images.media_markers import describe_markers
from ...runtime.tokens.token_bytes import token_bytes_of
from .bodies import read_request
from .llama_requests import InfillRequest, LlamaCompletionRequest, completion_prompts, llama_options
from .llama_serializer import LlamaAnswerContext, LlamaListSerializer, LlamaSerializer, generation_settings
from .media import in_chat
from .metrics import CONTENT_TYPE
from .multiple_answers import in_sequence, with_seeds
from .openai_requests import ChatRequest, Detokenize, Tokenize, messages_of
from .problems import BUSY, LEAVE_OUT, UNSUPPORTED, Problem
from .serializers import FINGERPRINT
from .streams import json_response

if TYPE_CHECKING:
    from .application import GenerationService
    from .single_model import SingleModelService

NO_INFILL = "Infill is not supported by this model: {} has no tokens for filling in the middle"  # clients match this text
CONTEXT_CUT = "infill context exceeds the model's context: only what is nearest to the gap is read (-c for a larger one)"
CODE_MODELS_HINT = "models for code have them, as Qwen 2.5 Coder"

NOT_CHANGED = "only POST /lora-adapters changes server settings: set generation options in each request"


class TokenPaths:
    """/tokenize and /detokenize, for one model of any kind."""

    def __init__(self, service: SingleModelService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("/tokenize", self.tokenize, methods=["POST"]), Route("/detokenize", self.detokenize, methods=["POST"])]

    async def tokenize(self, request: Request) -> Response:
        payload = await read_request(request, Tokenize)
        tokenizer = self._service.served.tokenizer

        def respond() -> Response:  # in a thread: megabytes take seconds, and streams have to go on
            ids = (tokenizer if payload.parse_special else tokenizer.without_special_tokens).encode(payload.content, payload.add_special)
            spelled = token_bytes_of(tokenizer)
            return json_response({"tokens": [{"id": each, "piece": piece(spelled(each))} for each in ids] if payload.with_pieces else ids})

        return await asyncio.to_thread(respond)

    async def detokenize(self, request: Request) -> Response:
        payload = await read_request(request, Detokenize)
        self._service.check_token_ids(payload.tokens, "tokens")
        return json_response({"content": await asyncio.to_thread(self._service.served.tokenizer.decode, payload.tokens, False)})


class LlamaPaths(TokenPaths):
    """The endpoints of one generative model's `service`."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        answers = {"/completion": self.complete, "/completions": self.complete, "/infill": self.infill, "/props": refuse_change,
                   "/apply-template": self.apply_template}
        told = {"/props": self.props, "/slots": self.slots, "/metrics": self.metrics}
        return [*super().routes(), *(Route(path, answer, methods=["POST"]) for path, answer in answers.items()),
                *(Route(path, answer, methods=["GET"]) for path, answer in told.items())]

    async def complete(self, request: Request) -> Response:
        payload, served = await self._service.payload(request, LlamaCompletionRequest), self._service.served
        prompts = await asyncio.to_thread(completion_prompts, payload, served.tokenizer)
        options = await self._options(payload)
        await self._service.check_prompts_fit(prompts, options)
        for prompt in prompts:
            if not isinstance(prompt, str):
                self._service.check_token_ids(prompt, "prompt")
        return await self._answer(request, payload, prompts, options)

    async def infill(self, request: Request) -> Response:
        """Text that does not fit in the context is left out: editors send whatever surrounds the cursor, at every key."""
        payload, service = await self._service.payload(request, InfillRequest), self._service
        for field, count in (("n_cmpl", payload.n_cmpl), ("n", payload.n)):
            if count not in (None, 1):
                raise Problem(400, f"{field} is not supported; {LEAVE_OUT}", param=field, code="unsupported_parameter")
        served, options = service.served, await self._options(payload)
        if await asyncio.to_thread(lambda: served.fim_tokens) is None:
            raise Problem(501, NO_INFILL.format(service.name), UNSUPPORTED, code="not_supported", hint=CODE_MODELS_HINT)
        prompt = await asyncio.to_thread(served.build_infill_prompt, payload.gap, options.max_tokens, True)
        if prompt.is_truncated:
            service.note(CONTEXT_CUT)
        return await self._answer(request, payload, [prompt.ids], options, prompt.cacheable, prompt.is_truncated)

    async def apply_template(self, request: Request) -> Response:
        payload = await self._service.payload(request, ChatRequest)
        media_items = await self._service.load_media(in_chat(payload))
        prepared = await self._service.prepare(payload, messages_of(payload), media_items=media_items)
        render = partial(self._service.served.render_prompt, prepared.messages, prepared.options.think, prepared.tools, prepared.variables)
        return json_response({"prompt": describe_markers(await asyncio.to_thread(render))})

    async def props(self, request: Request) -> Response:
        service = self._service
        tokenizer, options = service.served.tokenizer, service.defaults.options
        params = generation_settings(replace(options, choice=service.served.default_scales), True)
        default_slot = {"id": 0, "n_ctx": service.served.engine.n_ctx, "is_processing": False, "params": params}
        template = "" if tokenizer.template is None else tokenizer.template.source
        special = tokenizer.special_tokens
        # No answer names a folder of this machine, so the path is the name.
        return json_response({"default_generation_settings": default_slot, "total_slots": service.answer_queue.parallel,
                              "model_alias": service.name,
                              "model_path": service.name, "chat_template": template, "bos_token": special.get("bos_token", ""),
                              "eos_token": special.get("eos_token", ""),
                              "modalities": {"vision": service.served.accepts_images, "audio": service.served.accepts_audio},
                              "build_info": FINGERPRINT, "is_sleeping": False})

    async def slots(self, request: Request) -> Response:
        service, slots = self._service, self._service.served.slots()
        if request.query_params.get("fail_on_no_slot") and all(is_busy for is_busy, _ in slots):
            raise Problem(503, "no slot is free", BUSY, code="no_slot", hint="retry when an answer has finished")
        speculates = service.served.engine.speculation is not None
        return json_response([{"id": number, "n_ctx": service.served.engine.n_ctx, "speculative": speculates, "is_processing": is_busy,
                               "n_prompt_tokens": tokens} for number, (is_busy, tokens) in enumerate(slots)])

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(self._service.answer_queue), media_type=CONTENT_TYPE)

    async def _options(self, payload: LlamaCompletionRequest) -> GenerationOptions:
        options = await asyncio.to_thread(llama_options, payload, self._service.defaults, self._service.served.tokenizer)
        return replace(options, choice=self._service.adapters.choice(payload))

    async def _answer(self, request: Request, payload: LlamaCompletionRequest, prompts: list[str | list[int]], options: GenerationOptions,
                      cacheable_tokens: int | None = None, is_cut: bool = False) -> Response:
        """One answer, or a list: `n` to each prompt."""
        service, tokenizer = self._service, self._service.served.tokenizer
        serializers, starts = [], []
        variants = with_seeds(options, payload.answers(len(prompts)))
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else await asyncio.to_thread(tokenizer.decode, prompt, False)
            for variant in variants:
                settings = LlamaAnswerContext(generation_settings(variant, bool(payload.stream), payload.grammar or ""), text,
                                              None if not payload.response_fields else tuple(payload.response_fields),
                                              bool(payload.return_tokens),
                                              tokenizer if payload.n_probs else None, is_cut)
                serializers.append(LlamaSerializer(service.response_model_name(payload.model), settings))
                starts.append(partial(service.served.complete, prompt, variant, cacheable_tokens=cacheable_tokens))
        return await service.answer(request, payload, serializers[0] if len(serializers) == 1 else LlamaListSerializer(serializers),
                                    in_sequence(starts))


async def refuse_change(request: Request) -> Response:
    """llama-server has no properties that could be set, even with --props."""
    raise Problem(501, NOT_CHANGED, UNSUPPORTED, code="not_supported")


def piece(spelled: bytes) -> str | list[int]:
    """A token as text, or as its bytes where it is not valid UTF-8."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return [*spelled]
