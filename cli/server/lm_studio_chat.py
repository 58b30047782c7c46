"""LM Studio's stateful chat (REST API v1): a request brings only what is new. It is translated to a Responses request, and stored as
one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...runtime.events import Call, PromptRead, Stats, TextDelta
from .openai_requests import EFFORT_OF, TEXTS, Body, Reasoning, Whole
from .problems import LM_STUDIO_1, Problem
from .response_store import Item, ResponseStore
from .responses_requests import ResponsesRequest, is_system_message
from .responses_serializer import ResponseSerializer
from .serializers import AnswerSerializer

if TYPE_CHECKING:
    from .application import GenerationService

CHAT = f"{LM_STUDIO_1}chat"
SHARED_FIELDS = ("model", "stream", "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "max_output_tokens", "store",
                 "previous_response_id")
REASONING = ("off", "low", "medium", "high", "on")
CONTEXT_NOTICE = "a client requests a context_length of {}: the context is {} tokens (-c), and longer prompts are refused"


class LmStudioChatRequest(Body):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"integrations": ([],)}
    alternatives: ClassVar[Mapping[str, str]] = {"integrations": "tools of the Model Context Protocol are those of run and chat (--mcp)"}

    model: str | None = None
    input: str | list[dict[str, Any]]
    system_prompt: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    max_output_tokens: Whole = None
    reasoning: str | None = None
    context_length: Whole = None
    store: bool | None = None
    previous_response_id: str | None = None


class LmStudioChat:
    """The chat of one model's `service`; responses are stored in `responses`."""

    def __init__(self, service: GenerationService, responses: ResponseStore) -> None:
        self._service, self._responses = service, responses

    def routes(self) -> list[Route]:
        return [Route(CHAT, self.chat, methods=["POST"])]

    async def chat(self, request: Request) -> Response:
        service, payload = self._service, await self._service.payload(request, LmStudioChatRequest)
        if (payload.context_length or 0) > service.served.engine.n_ctx:
            service.note(CONTEXT_NOTICE.format(payload.context_length, service.served.engine.n_ctx))
        responses_request = responses_of(payload)
        full_request = self._responses.with_history(responses_request, responses_request.input)
        answer, names = await service.prepare_response(full_request.model_copy(
            update={"input": with_newest_system(full_request.input)}))
        inner = ResponseSerializer(service.response_model_name(payload.model), responses_request, names,
                                   keep=partial(self._responses.keep, responses_request, responses_request.input))
        return await service.answer(request, responses_request, LmStudioSerializer(inner.model, inner), partial(service.reply, answer))


class LmStudioSerializer(AnswerSerializer):
    """Serializes an answer. `inner` serializes it as a stored response, too; None in the router."""

    has_event_names, terminator, starts_early = True, b"", True

    def __init__(self, model: str, inner: ResponseSerializer | None = None) -> None:
        self.model, self._inner = model, inner
        self._open: str | None = "prompt_processing"  # the phase that has begun and not ended

    def first_chunks(self) -> list[dict[str, object]]:
        return [{"type": "chat.start", "model_instance_id": self.model}, {"type": f"{self._open}.start"}]

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        self._inner.add(event)
        if not isinstance(event, TextDelta):
            return []
        kind = "message" if event.kind == "answer" else "reasoning"
        start = [] if self._open == kind else [*self._close(), {"type": f"{kind}.start"}]
        self._open = kind
        return [*start, {"type": f"{kind}.delta", "content": event.text}]

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        return [*self._close(), {"type": "chat.end", "result": self.whole_answer(stats)}]

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        response = self._inner.whole_answer(stats)
        response_id = {} if self._inner.payload.store is False else {"response_id": response["id"]}
        return {"model_instance_id": self.model, "output": [*map(_output_item, response["output"])], "stats": {
            "input_tokens": stats.prompt_tokens, "total_output_tokens": len(stats.token_ids),
            "reasoning_output_tokens": stats.reasoning_tokens, "tokens_per_second": stats.decode_tps,
            "time_to_first_token_seconds": stats.ttft_s}, **response_id}

    def error_chunks(self, problem: Problem) -> list[dict[str, object]]:
        return [{"type": "error", **problem.to_lm_studio()}]

    def _close(self) -> list[dict[str, object]]:
        """The event that ends the current phase, if any."""
        closed, self._open = self._open, None
        return [{"type": f"{closed}.end"}] if closed else []


def responses_of(payload: LmStudioChatRequest) -> ResponsesRequest:
    """The request as a Responses request with a list as input. Raises Problem."""
    if payload.reasoning is not None and payload.reasoning not in REASONING:
        raise Problem(400, f"reasoning has to be one of {', '.join(REASONING)}, not {payload.reasoning!r:.40}", param="reasoning")
    effort = EFFORT_OF.get(payload.reasoning, payload.reasoning)
    system = [{"role": "system", "content": payload.system_prompt}] if payload.system_prompt else []
    parts = payload.input
    if isinstance(payload.input, list):
        parts = [_part(item, f"input[{index}]") for index, item in enumerate(payload.input)]
    return ResponsesRequest.model_construct(**{name: getattr(payload, name) for name in SHARED_FIELDS},
                                            reasoning=effort and Reasoning(effort=effort),
                                            input=[*system, {"role": "user", "content": parts}])


def with_newest_system(items: Sequence[Item]) -> list[Item]:
    """The items with only the newest system prompt, at the beginning."""
    systems = [item for item in items if is_system_message(item)]
    return [*systems[-1:], *(item for item in items if not is_system_message(item))]


def _part(item: dict[str, Any], where: str) -> dict[str, Any]:
    """An input item as a content part of Responses. Raises Problem."""
    if item.get("type") in ("message", *TEXTS) and isinstance(text := item.get("content", item.get("text")), str):
        return {"type": "input_text", "text": text}
    if item.get("type") == "image" and isinstance(item.get("data_url"), str):
        return {"type": "input_image", "image_url": item["data_url"]}
    raise Problem(400, f"{where} has to be of type message, with its content, or image, with a data_url", param=where)


def _output_item(item: Item) -> dict[str, object]:
    """An output item in this API's format."""
    kind = "message" if item["type"] == "message" else "reasoning"
    return {"type": kind, "content": "".join(part["text"] for part in item["content"])}
