"""Requests of OpenAI's Responses API, translated to chat completions.

Function tools in a namespace are given to the model under a qualified name, and custom tools as functions with one string argument.
`ToolNames` maps the model's names back to the client's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...runtime.tool_calls.free_text import TEXT_ARGUMENT
from .custom_tools import function_of
from .encrypted_content import decode_summary, replaces_history
from .message_builder import ASSISTANT, SYSTEM, USER, MessageBuilder, parse_object, text_at
from .openai_requests import UNSUPPORTED_FIELDS, Body, ChatRequest, GenerationRequest, Reasoning, Whole, texts_of
from .problems import LEAVE_OUT, Problem
from .tools import ALLOWED

ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM, "developer": SYSTEM}
FIELD_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}
TOOL_FIELDS = ("description", str, "a text"), ("parameters", dict, "a JSON schema"), ("strict", bool, "true or false")  # of tools
OUTPUTS = ("function_call_output", "custom_tool_call_output")  # tool outputs
COMPACTION = "compaction"  # an item with a summary of earlier ones
ITEM_TYPES = ("message", "function_call", "custom_tool_call", "reasoning", COMPACTION, *OUTPUTS)
RESEND_HINT = "send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"


class Text(Body):
    format: dict[str, Any] | None = None


class Conversation(Body):
    id: str


class ResponsesRequest(GenerationRequest):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **UNSUPPORTED_FIELDS, "prompt": (), "truncation": ("disabled",)}

    input: Any = None  # optional where the request continues a response
    instructions: str | None = None
    max_output_tokens: Whole = None
    previous_response_id: str | None = None
    conversation: str | Conversation | None = None
    store: bool | None = None
    background: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The conversation that it continues."""
        return self.conversation.id if isinstance(self.conversation, Conversation) else self.conversation

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return LOGPROBS in (self.include or ())


@dataclass
class ToolNames:
    """The client's names of tools, by the model's: `spaces`: namespace and name, `free`: custom tools."""

    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)

    @staticmethod
    def inside(space: Any, name: str) -> str:
        """The model's name of a tool, which may be in a namespace."""
        return f"{space}.{name}" if space else name


def chat_of(payload: ResponsesRequest) -> tuple[ChatRequest, list[dict[str, Any]], ToolNames]:
    """The request as one of chat completions, its messages, and the names of its tools. Raises Problem."""
    if payload.top_logprobs and not payload.wants_logprobs:
        raise Problem(400, f"top_logprobs goes with {LOGPROBS} in include", param="top_logprobs")
    names = ToolNames()
    common = {name: getattr(payload, name) for name in GenerationRequest.model_fields}
    translated = {"messages": [], "tools": _functions(payload.tools or [], names), "tool_choice": _choice(payload.tool_choice),
           "parallel_tool_calls": payload.parallel_tool_calls, "chat_template_kwargs": payload.chat_template_kwargs,
           "reasoning": payload.reasoning, "reasoning_effort": payload.reasoning and payload.reasoning.effort,
           "logprobs": payload.wants_logprobs, "top_logprobs": payload.top_logprobs}
    if payload.max_output_tokens is not None:
        translated["max_tokens"] = payload.max_output_tokens
    if payload.text is not None and payload.text.format is not None:
        translated["response_format"] = payload.text.format
    return ChatRequest.model_construct(**{**common, **translated}), _messages(payload), names


def _functions(tools: list[dict[str, Any]], names: ToolNames, space: str = "", where: str = "tools") -> list[dict[str, Any]]:
    """Tools as in chat completions. Raises Problem for server-side ones."""
    functions: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        place = f"{where}[{number}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in ("function", "custom", "namespace") or kind == "namespace" and space:
            raise Problem(400, f"{place}: tools of type {kind} are not supported, functions of your own are", param=place,
                          code="unsupported_parameter")
        name = text_at(tool, "name", place)
        if kind == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise Problem(400, f"{place}.tools has to be a list of functions", param=f"{place}.tools")
            functions += _functions(inner, names, name, f"{place}.tools")
            continue
        for key, item_type, expected in TOOL_FIELDS:
            if tool.get(key) is not None and not isinstance(tool[key], item_type):
                raise Problem(400, f"{place}.{key} has to be {expected}", param=f"{place}.{key}")
        model_name = ToolNames.inside(space, name)
        if space:
            names.spaces[model_name] = space, name
        if kind == "custom":
            names.free.add(model_name)
            function = function_of(model_name, tool.get("description"), tool.get("format"), f"{place}.format")
        else:
            function = {"name": model_name, "description": tool.get("description"), "parameters": tool.get("parameters"),
                        "strict": tool.get("strict") is True}
        functions.append({"type": "function", "function": function})
    return functions


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The tool choice as in chat completions."""
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom") and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": ToolNames.inside(choice.get("namespace"), choice["name"])}}
    if isinstance(choice, dict) and choice.get("type") == ALLOWED and isinstance(choice.get("tools"), list):
        return {"type": ALLOWED, ALLOWED: {"mode": choice.get("mode", "auto"), "tools": [*map(_choice, choice["tools"])]}}
    return choice


def _messages(payload: ResponsesRequest) -> list[dict[str, Any]]:
    builder = MessageBuilder()
    if payload.instructions:
        builder.add_text(SYSTEM, [payload.instructions])
    if isinstance(payload.input, str):
        builder.add_text(USER, [payload.input])
    elif payload.input is None:
        raise Problem(400, "input is missing", param="input")
    elif not isinstance(payload.input, list):
        raise Problem(400, "input has to be a string or a list of items", param="input")
    else:
        begins = history_start(payload.input)
        for number, item in enumerate(payload.input):
            if number < begins and not is_system_message(item):
                continue
            if not isinstance(item, dict):
                raise Problem(400, f"input[{number}] is not an item", param=f"input[{number}]",
                              hint='an item is an object, as {"role": "user", "content": "..."}')
            _add(builder, item, f"input[{number}]")
    return builder.messages


def history_start(items: list[Any]) -> int:
    """Index of the last item that replaces all before it, system prompts excepted; 0 if there is none."""
    replacing = (index for index, item in enumerate(items) if isinstance(item, dict) and item.get("type") == COMPACTION
             and replaces_history(item.get("encrypted_content")))
    return max(replacing, default=0)


def is_system_message(item: Any) -> bool:
    return isinstance(item, dict) and item_type(item) == "message" and item.get("role") in ("system", "developer")


def check_items(items: list[dict[str, Any]]) -> None:
    """Raises Problem for items of an unsupported type."""
    for number, item in enumerate(items):
        if (kind := item_type(item)) not in ITEM_TYPES:
            raise Problem(400, f"items[{number}]: items of type {kind} are not supported", param=f"items[{number}]", hint=LEAVE_OUT)


def item_type(item: dict[str, Any]) -> Any:
    return item.get("type") or ("message" if "role" in item else None)


def _add(builder: MessageBuilder, item: dict[str, Any], where: str) -> None:
    """One input item."""
    kind = item_type(item)
    if kind == "message":
        role = text_at(item, "role", where)
        if role not in ROLES:
            raise Problem(400, f"{where}.role has to be one of {', '.join(ROLES)}, not {role!r:.40}", param=f"{where}.role")
        builder.add_text(ROLES[role], texts_of(item.get("content"), f"{where}.content"))
    elif kind in ("function_call", "custom_tool_call"):
        name = ToolNames.inside(item.get("namespace"), text_at(item, "name", where))
        given = {TEXT_ARGUMENT: text_at(item, TEXT_ARGUMENT, where)} if kind == "custom_tool_call" else \
            parse_object(text_at(item, "arguments", where), f"{where}.arguments")
        builder.add_call(text_at(item, "call_id", where), name, given)
    elif kind in OUTPUTS:
        builder.add_result(text_at(item, "call_id", where), texts_of(item.get("output"), f"{where}.output"))
    elif kind == COMPACTION:
        has_begun = any(message["role"] == USER for message in builder.messages)  # templates expect a user message first
        builder.add_text(ASSISTANT if has_begun else USER, [decode_summary(item.get("encrypted_content"), where)])
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary")
        parts = parts if isinstance(parts, list) else []
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts:
            builder.add_reasoning("\n".join(texts))
    else:
        raise Problem(400, f"{where}: items of type {kind} are not supported", param=where, hint=LEAVE_OUT)
