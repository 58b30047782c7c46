"""Requests of Ollama's API, translated to chat completions, or to completions for raw prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from .generation_options import ALONE, NO_LIMIT
from .message_builder import ASSISTANT, SYSTEM, TOOL, USER
from .openai_requests import (
    ROLES,
    Body,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Whole,
    one_or_more,
    refuse_unsupported,
    texts_of,
)
from .problems import Problem

LATEST = ":latest"  # appended by its clients to a name without a tag
JSON = "json"
WAITED_HEADER = "x-effllm-waited"  # header set by the router: nanoseconds that a request waited for its model
MAX_DIGITS = 18
LEVELS = ("low", "medium", "high", "max")
IN_CHAT = "/api/chat takes a conversation"


def unless_none(value: Any) -> Any:
    return True if value is None else value


class Options(Body):
    temperature: float | None = None
    top_k: Whole = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Whole = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: Whole = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: Whole = None
    stop: Annotated[list[str] | None, BeforeValidator(one_or_more)] = None
    num_predict: Whole = None
    num_ctx: Whole = None


SAME = tuple(name for name in Options.model_fields if name in GenerationRequest.model_fields)  # same names as in chat completions
FIELD_NAMES = {"response_format": "format", **{name: f"options.{name}" for name in SAME}}
RAW_FIELD_NAMES = {**FIELD_NAMES, "logprobs": "top_logprobs"}  # a number in completions


class OllamaRequest(Body):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "suffix": ("",), "template": ("",), "context": ([],), "images": ([],)}
    alternatives: ClassVar[Mapping[str, str]] = {
        "template": "the model's own is used, and with raw a prompt is used as is", "context": IN_CHAT,
        "images": "in a chat each message has its own"}

    model: str | None = None
    stream: Annotated[bool, BeforeValidator(unless_none)] = True
    format: Any = None
    think: bool | str | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Whole = None


class Turn(Body):
    role: str
    content: Any = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest):
    messages: list[Turn] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest):
    prompt: str | None = None
    suffix: str | None = None
    images: list[Any] | None = None
    system: str | None = None
    raw: bool | None = None


class ModelRequest(Body):
    """A request about a model."""

    model: str | None = None
    name: str | None = None  # what `model` was called

    @property
    def about(self) -> str | None:
        return self.model or self.name


def untagged(name: str) -> str:
    """A model's name without the tag `:latest`."""
    return name.removesuffix(LATEST)


def waited_ns(headers: Mapping[str, str]) -> int:
    """How long the router held the request while its model was loading; 0 without a router."""
    text = headers.get(WAITED_HEADER, "")
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0


def check_request(payload: OllamaRequest, name: str, thinks: bool, context: int) -> str | None:
    """A notice about a request to a model of this name and context, or None. Raises Problem for reasoning that the model does not support,
    in the words that make clients retry without it."""
    if payload.think and not thinks:
        raise Problem(400, f'"{name}" does not support thinking: leave out think', param="think")
    if payload.options is None or (payload.options.num_ctx or 0) <= context:
        return None
    return f"a client requests num_ctx {payload.options.num_ctx}: the context is {context} tokens (-c), and longer prompts are refused"


def chat_of(payload: OllamaChatRequest) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """The request as one of chat completions, and its messages. Raises Problem."""
    return _chat(payload, payload.tools), _messages(payload.messages or [])


def generate_as_chat(payload: OllamaGenerateRequest) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """As `chat_of`, for a prompt that goes through the chat template."""
    system = [{"role": SYSTEM, "content": payload.system}] if payload.system else []
    return _chat(payload), [*system, {"role": USER, "content": payload.prompt or ""}]


def raw_completion(payload: OllamaGenerateRequest) -> CompletionRequest:
    """The request as one of completions, for a raw prompt. Raises Problem."""
    if payload.system and not payload.suffix:  # whose prompts have no place for it at Ollama either
        raise Problem(400, "raw uses the prompt as is: system is a part of it, or nothing", param="system")
    if payload.top_logprobs and not payload.logprobs:
        raise Problem(400, ALONE, param="top_logprobs")
    return CompletionRequest.model_construct(prompt=payload.prompt, logprobs=(payload.top_logprobs or 0) if payload.logprobs else None,
                                             **_common(payload))


def _chat(payload: OllamaRequest, tools: list[dict[str, Any]] | None = None) -> ChatRequest:
    if isinstance(payload.think, str) and payload.think not in LEVELS:
        raise Problem(400, f"think has to be true, false, {', '.join(LEVELS)}, not {payload.think!r:.40}", param="think")
    effort = payload.think if isinstance(payload.think, str) else None
    switch = {"enable_thinking": payload.think} if isinstance(payload.think, bool) else None
    return ChatRequest.model_construct(messages=[], tools=tools, reasoning_effort=effort, chat_template_kwargs=switch,
                                       logprobs=payload.logprobs, top_logprobs=payload.top_logprobs, **_common(payload))


def _common(payload: OllamaRequest) -> dict[str, Any]:
    """The fields that all requests share."""
    options = payload.options or Options()
    refuse_unsupported(options, "options.")
    num_predict = options.num_predict
    return {**{name: getattr(options, name) for name in SAME}, "model": payload.model, "response_format": _response_format(payload.format),
            "max_tokens": NO_LIMIT if num_predict is not None and num_predict <= 0 else num_predict}


def _response_format(format: object) -> dict[str, Any] | None:
    """The format as a `response_format`."""
    if format is None or format == "":
        return None
    if format == JSON:
        return {"type": "json_object"}
    if isinstance(format, dict):
        return {"type": "json_schema", "json_schema": {"schema": format}}
    raise Problem(400, f'format has to be "json" or a JSON schema, not {format!r:.40}', param="format")


def _messages(turns: list[Turn]) -> list[dict[str, Any]]:
    """The messages with ids for tool calls, which Ollama's lack: a tool result belongs to the first unanswered call of that tool."""
    messages, num_calls, unanswered = [], 0, {}
    for number, turn in enumerate(turns):
        role, where = turn.role.lower(), f"messages[{number}]"
        if role not in ROLES:
            raise Problem(400, f"{where}.role has to be system, user, assistant or tool, not {turn.role!r:.40}", param=f"{where}.role")
        message = {"role": role, "content": "\n".join(texts_of(turn.content or "", f"{where}.content"))}
        if role == ASSISTANT and turn.thinking:
            message["reasoning_content"] = turn.thinking
        if role == ASSISTANT and turn.tool_calls:
            message["tool_calls"] = []
            for call in turn.tool_calls:
                if isinstance(call, dict):
                    call = {"id": f"call_{num_calls}", "type": "function", **call}
                    num_calls += 1
                    function = call.get("function")
                    unanswered[str(call["id"])] = function.get("name") if isinstance(function, dict) else None
                message["tool_calls"].append(call)
        if role == TOOL:
            call_id = turn.tool_call_id or next((id for id, name in unanswered.items() if name == turn.tool_name), None)
            unanswered.pop(call_id, None)
            message |= {key: value for key, value in (("tool_call_id", call_id), ("name", turn.tool_name)) if value}
        messages.append(message)
    return messages
