"""Requests of Anthropic's Messages API, translated to chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from .anthropic_tools import KNOWN
from .generation_options import EFFORTS, OF_HARMONY
from .message_builder import ASSISTANT, SYSTEM, USER, MessageBuilder, text_at
from .openai_requests import UNSUPPORTED_FIELDS, Body, ChatRequest, GenerationRequest, Thinking, text_of, texts_of, whole_number
from .problems import Problem

ROLES = (USER, ASSISTANT, SYSTEM)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
FIELD_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
CREATE = "create"
ENABLED, DISABLED = "enabled", "disabled"
SERVER_TOOL_USES, RESULT_SUFFIX = ("server_tool_use", "mcp_tool_use"), "_tool_result"  # blocks of server-side tools
SEARCH = "tool_search_tool_"  # tool search, which defers tool definitions: here all of them are in the prompt
READABLE_FIELDS = ("title", "url", "text", "data", "stdout", "stderr", "tool_name", "error_code", "source", "content", "tool_references")
CLIENT_TOOL_TYPES = ("custom", "function")  # types of client-side tools with a schema
ATTRIBUTION = "x-anthropic-billing-header:"  # differs in each request, so it would defeat the prompt cache


class Choice(Body):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(Body):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class OutputConfig(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None


class Turn(Body):
    role: str
    content: Any


class Thread(Body):
    """Whether to store the conversation under the id of its answer, or which answer it continues."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class CountTokensRequest(GenerationRequest):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {**UNSUPPORTED_FIELDS, "mcp_servers": ([],), "container": ()}

    messages: list[Turn]
    system: Any = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thread: Thread | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, BeforeValidator(whole_number)]


def chat_of(payload: CountTokensRequest) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """The request as one of chat completions, and its messages. Raises Problem."""
    if payload.max_tokens is not None and payload.max_tokens < 0:
        raise Problem(400, f"max_tokens has to be 0 or more, not {payload.max_tokens}", param="max_tokens")
    config, choice = payload.output_config or OutputConfig(), payload.tool_choice
    common = {name: getattr(payload, name) for name in GenerationRequest.model_fields}
    tools = [(tool, f"tools[{number}]") for number, tool in enumerate(payload.tools or ()) if not (tool.type or "").startswith(SEARCH)]
    translated = {"messages": [], "tools": [_function(tool, where) for tool, where in tools],
           "thinking": payload.thinking, "tool_choice": choice and _choice(choice),
           "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
           "chat_template_kwargs": {**_thinking(payload.thinking, config.effort), **(payload.chat_template_kwargs or {})}}
    if payload.stop_sequences is not None:
        translated["stop"] = payload.stop_sequences
    if response_format := config.format or payload.output_format:
        translated["response_format"] = response_format
    return ChatRequest.model_construct(**{**common, **translated}), _messages(payload)


def _thinking(thinking: Thinking | None, effort: str | None) -> dict[str, Any]:
    """Template variables for reasoning. Unlike in chat completions, effort alone does not ask for reasoning: clients always send it."""
    kind, place = thinking and thinking.type, "output_config.effort"
    if kind not in (None, ENABLED, DISABLED, "adaptive", "between_tools"):
        raise Problem(400, f"thinking.type has to be enabled, adaptive, between_tools or disabled, not {kind!r:.40}", param="thinking.type")
    if effort is not None and effort not in EFFORTS:
        raise Problem(400, f"{place} has to be one of {', '.join(EFFORTS)}, not {effort!r:.40}", param=place)
    variables = {} if effort is None else {"reasoning_effort": OF_HARMONY.get(effort, effort)}
    return {**variables, "enable_thinking": kind == ENABLED} if kind in (ENABLED, DISABLED) else variables


def _function(tool: Tool, where: str) -> dict[str, Any]:
    if (known := KNOWN.get(tool.type or "")) is not None:
        return {"type": "function", "function": {"name": tool.name, "description": known[0], "parameters": known[1],
                                                 "strict": tool.strict is True}}
    if tool.type is not None and tool.type not in CLIENT_TOOL_TYPES:
        raise Problem(400, f"{where}: tools of type {tool.type} are not supported, those of your own with an input_schema are", param=where)
    if tool.input_schema is None:
        raise Problem(400, f"{where}.input_schema is missing", param=f"{where}.input_schema")
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema,
                                             "strict": tool.strict is True}}


def _choice(choice: Choice) -> str | dict[str, Any]:
    if choice.type == "tool" and choice.name:
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in CHOICES:
        raise Problem(400, f"tool_choice.type has to be auto, any, none or, with a name, tool, not {choice.type!r:.40}",
                      param="tool_choice.type")
    return CHOICES[choice.type]


def _messages(payload: CountTokensRequest) -> list[dict[str, Any]]:
    builder = MessageBuilder()
    system = [text for text in texts_of(payload.system or [], "system") if not text.startswith(ATTRIBUTION)]
    if system:
        builder.add_text(SYSTEM, system)
    for number, turn in enumerate(payload.messages):
        where = f"messages[{number}]"
        if turn.role not in ROLES:
            raise Problem(400, f"{where}.role has to be user or assistant, not {turn.role!r:.40}", param=f"{where}.role")
        if not isinstance(turn.content, list):
            builder.add_text(turn.role, texts_of(turn.content, f"{where}.content"))
            continue
        for at, block in enumerate(turn.content):
            _add(builder, turn.role, block, f"{where}.content[{at}]")
    return builder.messages


def _add(builder: MessageBuilder, role: str, block: object, where: str) -> None:
    """One content block of a message."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in ("document", "search_result") and role == USER:
        builder.add_text(role, _read(block, where))
    elif kind == "tool_use" and role == ASSISTANT:
        given = block.get("input")
        if not isinstance(given, dict):
            raise Problem(400, f"{where}.input has to be an object", param=f"{where}.input")
        builder.add_call(text_at(block, "id", where), text_at(block, "name", where), given)
    elif kind == "tool_result" and role == USER:
        texts = _texts(block.get("content") or [], f"{where}.content")
        builder.add_result(text_at(block, "tool_use_id", where), ["Error: " + "\n".join(texts)] if block.get("is_error") else texts)
    elif kind in SERVER_TOOL_USES and role == ASSISTANT:  # a tool that another server ran, and its result
        given = block.get("input")
        builder.add_call(text_at(block, "id", where), text_at(block, "name", where), given if isinstance(given, dict) else {})
    elif isinstance(kind, str) and kind.endswith(RESULT_SUFFIX) and role == ASSISTANT:
        builder.add_result(text_at(block, "tool_use_id", where), [*_readable_texts(block.get("content"))])
    elif kind == "compaction" and role == ASSISTANT:  # a summary of earlier messages
        builder.add_text(role, [*_readable_texts(block.get("content"))])
    elif kind == "thinking" and role == ASSISTANT:
        builder.add_reasoning(text_at(block, "thinking", where))
    elif kind == "redacted_thinking" and role == ASSISTANT:  # encrypted by another server
        return
    elif kind in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
        raise Problem(400, f"{where}: blocks of type {kind} do not belong to the {role}", param=where)
    else:
        builder.add_text(role, [text_of(block, where)])


def _readable_texts(content: object) -> Iterator[str]:
    """The readable texts in the result of a server-side tool, whatever its format."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for each in content:
            yield from _readable_texts(each)
    elif isinstance(content, dict) and content.get("type") != "base64":
        for name in READABLE_FIELDS:
            yield from _readable_texts(content.get(name))


def _texts(content: object, where: str) -> list[str]:
    """The content of a tool result: texts, with titles where it has them."""
    if not isinstance(content, list):
        return texts_of(content, where)
    texts: list[str] = []
    for at, block in enumerate(content):
        kind, place = block.get("type") if isinstance(block, dict) else None, f"{where}[{at}]"
        if kind in ("document", "search_result"):
            texts += _read(block, place)
        elif kind == "tool_reference":  # a tool found by tool search
            texts.append(text_at(block, "tool_name", place))
        else:
            texts.append(text_of(block, place))
    return texts


def _read(block: dict[str, Any], where: str) -> list[str]:
    """The texts of a document or a search result, after its title. Raises Problem for files."""
    source, content = block.get("source"), block.get("content")
    head = [text for name in ("title", "context") if isinstance(text := block.get(name), str) and text]
    if block["type"] == "search_result":
        return [*head, *([source] if isinstance(source, str) else []), *texts_of(content, f"{where}.content")]
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text":
        return [*head, text_at(source, "data", f"{where}.source")]
    if kind == "content":
        return [*head, *texts_of(source.get("content"), f"{where}.source.content")]
    raise Problem(400, f"{where}: document is not supported here as {kind}: send its text, as a source of type text", param=where)
