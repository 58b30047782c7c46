"""Requests of Google's Gemini API, translated to chat completions. Fields may be in camelCase, as in its JSON (`inlineData`), or in
snake_case, as in its protocol buffers (`inline_data`), and a single element may stand for a list: clients and documentation have both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict
from pydantic.alias_generators import to_camel

from .gemini_schema import schema_of
from .message_builder import ASSISTANT, SYSTEM, USER, MessageBuilder
from .openai_requests import Body, ChatRequest, Whole, one_or_more, refuse_unsupported
from .problems import Problem
from .tools import ALLOWED

ROLES = {None: USER, "": USER, "user": USER, "function": USER, "model": ASSISTANT}
MODES = {"": "auto", "MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
CONFIG = "generationConfig"
SAME = {"temperature": "temperature", "top_p": "topP", "top_k": "topK", "seed": "seed", "presence_penalty": "presencePenalty",
        "frequency_penalty": "frequencyPenalty"}
OTHERS = {"max_tokens": "maxOutputTokens", "stop": "stopSequences", "n": "candidateCount", "top_logprobs": "logprobs",
          "structured_outputs": "responseSchema", "response_format": "responseSchema", "thinking_budget": "thinkingConfig.thinkingBudget",
          "reasoning_effort": "thinkingConfig.thinkingLevel"}
# Our field names -> Google's.
FIELD_NAMES = {"tool_choice": "toolConfig.functionCallingConfig",
               **{name: f"{CONFIG}.{field}" for name, field in {**SAME, **OTHERS}.items()}}
JSON_TYPE, ENUM_TYPE, PLAIN = "application/json", "text/x.enum", "text/plain"
UNSPECIFIED_LEVEL = "THINKING_LEVEL_UNSPECIFIED"
RESPONSE_KEYS = ("output", "result")  # keys whose value is the whole response of a function
URL_SAFE = str.maketrans("-_", "+/")  # URL-safe base64, which Google's servers accept as well


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def as_parts(value: Any) -> Any:
    """Parts may be texts, and a single one may stand for a list."""
    parts = [value] if isinstance(value, str | dict) else value
    return [{"text": each} if isinstance(each, str) else each for each in parts] if isinstance(parts, list) else parts


def as_content(value: Any) -> Any:
    """A text is content of the user's, with that text as its part."""
    return {"parts": [{"text": value}]} if isinstance(value, str) else value


def as_contents(value: Any) -> Any:
    """Contents may be texts, and a single one may stand for a list. Texts that follow each other are parts of one content, as in Google's
    Python library."""
    if not isinstance(value, list):
        return [as_content(value)] if isinstance(value, str | dict) else value
    runs = [(is_text, [*run]) for is_text, run in groupby(value, lambda each: isinstance(each, str))]
    return [content for is_text, run in runs for content in ([{"parts": run}] if is_text else run)]


class GeminiModel(Body):
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}


class Blob(GeminiModel):
    mime_type: str = ""
    data: str
    display_name: str | None = None


class FileData(GeminiModel):
    mime_type: str = ""
    file_uri: str


class FunctionCall(GeminiModel):
    id: str | None = None
    name: str
    args: dict[str, Any] | None = None


class FunctionResponse(GeminiModel):
    id: str | None = None
    name: str = ""
    response: dict[str, Any] | None = None
    parts: Annotated[list[Part] | None, BeforeValidator(as_list)] = None


class Part(GeminiModel):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: dict[str, Any] | None = None
    code_execution_result: dict[str, Any] | None = None


class Content(GeminiModel):
    role: str | None = None
    parts: Annotated[list[Part] | None, BeforeValidator(as_parts)] = None


AnyContent = Annotated[Content, BeforeValidator(as_content)]
Contents = Annotated[list[Content], BeforeValidator(as_contents)]


class ThinkingConfig(GeminiModel):
    include_thoughts: bool | None = None
    thinking_budget: Whole = None
    thinking_level: str | None = None


class GenerationConfig(GeminiModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: nothing for names, nothing in ((("responseModalities", "response_modalities"), ([], ["TEXT"], ["text"])),
                                             (("speechConfig", "speech_config"), ()), (("imageConfig", "image_config"), ()))
        for name in names}

    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole = None
    seed: Whole = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_output_tokens: Whole = None
    stop_sequences: Annotated[list[str] | None, BeforeValidator(one_or_more)] = None
    candidate_count: Whole = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_logprobs: bool | None = None
    logprobs: Whole = None
    thinking_config: ThinkingConfig | None = None


class FunctionDeclaration(GeminiModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class Tool(GeminiModel):
    function_declarations: Annotated[list[FunctionDeclaration] | None, BeforeValidator(as_list)] = None


class FunctionCallingConfig(GeminiModel):
    mode: str | None = None
    allowed_function_names: Annotated[list[str] | None, BeforeValidator(one_or_more)] = None


class ToolConfig(GeminiModel):
    function_calling_config: FunctionCallingConfig | None = None


class GenerateContentRequest(GeminiModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"cachedContent": ("",), "cached_content": ("",)}
    alternatives: ClassVar[Mapping[str, str]] = dict.fromkeys(unsupported, "common prefixes of prompts are cached automatically")

    contents: Contents
    system_instruction: AnyContent | None = None
    generation_config: GenerationConfig | None = None
    tools: Annotated[list[Tool] | None, BeforeValidator(as_list)] = None
    tool_config: ToolConfig | None = None

    @property
    def config(self) -> GenerationConfig:
        return self.generation_config or GenerationConfig()

    @property
    def shows_thoughts(self) -> bool:
        return bool(self.config.thinking_config and self.config.thinking_config.include_thoughts)


class CountTokensRequest(GeminiModel):
    """Contents, or a whole request, to count the tokens of."""

    contents: Contents | None = None
    generate_content_request: GenerateContentRequest | None = None

    @property
    def about(self) -> GenerateContentRequest:
        return self.generate_content_request or GenerateContentRequest.model_construct(contents=self.contents or [])


class EmbedContentRequest(GeminiModel):
    content: AnyContent
    task_type: str | None = None
    title: str | None = None
    output_dimensionality: Whole = None


class BatchEmbedContentsRequest(GeminiModel):
    requests: Annotated[list[EmbedContentRequest], BeforeValidator(as_list)]


@dataclass(frozen=True)
class AttachedFile:
    """A file in a part, in base64 or as a URL. `from_tool`: a function returned it."""

    part: Part
    where: str
    from_tool: bool = False

    @property
    def kind(self) -> str:
        """The main type of its MIME type, such as image."""
        return self._content.mime_type.partition("/")[0].lower()

    @property
    def text(self) -> str:
        held = self._content
        return held.data.translate(URL_SAFE) if isinstance(held, Blob) else held.file_uri

    @property
    def name(self) -> str:
        return (self.part.inline_data and self.part.inline_data.display_name) or ""

    @property
    def _content(self) -> Blob | FileData:
        return self.part.inline_data or self.part.file_data

    def put(self, text: str) -> None:
        """Replace the file by text."""
        self.part.text, self.part.inline_data, self.part.file_data = text, None, None


def attached_files(payload: GenerateContentRequest) -> Iterator[AttachedFile]:
    """The files of a request, each to be replaced by text."""
    for number, content in enumerate(payload.contents):
        for at, part in enumerate(content.parts or ()):
            where = f"contents[{number}].parts[{at}]"
            if part.inline_data or part.file_data:
                yield AttachedFile(part, where)
            for inner, other in enumerate(part.function_response and part.function_response.parts or ()):
                if other.inline_data or other.file_data:
                    yield AttachedFile(other, f"{where}.functionResponse.parts[{inner}]", from_tool=True)


def chat_of(payload: GenerateContentRequest, model: str, stream: bool = False) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """The request as one of chat completions, and its messages. Raises Problem."""
    config = payload.config
    refuse_unsupported(config, f"{CONFIG}.")
    thinking = config.thinking_config or ThinkingConfig()
    level = thinking.thinking_level if thinking.thinking_level != UNSPECIFIED_LEVEL else None
    translated = {"model": model, "stream": stream, "max_tokens": config.max_output_tokens, "n": config.candidate_count or None,
           "logprobs": config.response_logprobs, "top_logprobs": config.logprobs, "thinking_budget": thinking.thinking_budget,
           "reasoning_effort": level and level.lower(), "tools": [*_functions(payload)], "tool_choice": _choice(payload),
           **_response_format(config)}
    if config.stop_sequences:
        translated["stop"] = config.stop_sequences
    return ChatRequest.model_construct(messages=[], **{name: getattr(config, name) for name in SAME}, **translated), _messages(payload)


def text_of(content: Content, where: str) -> str:
    """The text of content that is text only. Raises Problem."""
    parts = content.parts or []
    if (other := next((at for at, part in enumerate(parts) if part.text is None), None)) is not None:
        raise Problem(400, f"{where}.parts[{other}] is not text", param=f"{where}.parts[{other}]", hint="only text is accepted here")
    return "\n".join(part.text for part in parts)


def _response_format(config: GenerationConfig) -> dict[str, Any]:
    kind, schema = config.response_mime_type or PLAIN, config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = schema_of(config.response_schema, f"{CONFIG}.responseSchema")
    place = f"{CONFIG}.responseMimeType"
    if kind not in (PLAIN, JSON_TYPE, ENUM_TYPE):
        raise Problem(400, f"{place} has to be {PLAIN}, {JSON_TYPE} or {ENUM_TYPE}, not {kind!r:.40}", param=place)
    if kind == PLAIN and schema is not None:
        raise Problem(400, f"a schema goes with {place} {JSON_TYPE}", param=place)
    if kind == ENUM_TYPE:
        return {"structured_outputs": {"choice": (schema or {}).get("enum") or []}}
    response_format = {"type": "json_object"} if schema is None else {"type": "json_schema", "json_schema": {"schema": schema}}
    return {} if kind == PLAIN else {"response_format": response_format}


def _functions(payload: GenerateContentRequest) -> Iterator[dict[str, Any]]:
    """Raises Problem for tools that a server would have to run."""
    for number, tool in enumerate(payload.tools or ()):
        where = f"tools[{number}]"
        if (other := next((name for name, value in (tool.model_extra or {}).items() if value is not None), None)) is not None:
            raise Problem(400, f"{where}.{other:.40} is not supported, functionDeclarations of your own are", param=f"{where}.{other:.40}",
                          code="unsupported_parameter")
        for at, function in enumerate(tool.function_declarations or ()):
            schema = function.parameters_json_schema
            if schema is None and function.parameters is not None:
                schema = schema_of(function.parameters, f"{where}.functionDeclarations[{at}].parameters")
            own = {"name": function.name, "description": function.description, "parameters": schema or {"type": "object", "properties": {}}}
            yield {"type": "function", "function": own}


def _choice(payload: GenerateContentRequest) -> str | dict[str, Any] | None:
    config = payload.tool_config and payload.tool_config.function_calling_config
    if config is None:
        return None
    mode, place = MODES.get((config.mode or "").upper()), f"{FIELD_NAMES['tool_choice']}.mode"
    if mode is None:
        raise Problem(400, f"{place} has to be AUTO, ANY, VALIDATED or NONE, not {config.mode!r:.40}", param=place)
    if not config.allowed_function_names or mode == "none":
        return mode
    functions = [{"type": "function", "function": {"name": name}} for name in config.allowed_function_names]
    return {"type": ALLOWED, ALLOWED: {"mode": mode, "tools": functions}}


def _messages(payload: GenerateContentRequest) -> list[dict[str, Any]]:
    """Raises Problem. A function response without an id belongs to the first unanswered call of that function."""
    builder, unanswered = MessageBuilder(), dict[str, str]()
    if not payload.contents:
        raise Problem(400, "contents is empty", param="contents", hint='send {"role": "user", "parts": [{"text": "..."}]}')
    if payload.system_instruction and (text := text_of(payload.system_instruction, "systemInstruction")):
        builder.add_text(SYSTEM, [text])
    for number, content in enumerate(payload.contents):
        if content.role not in ROLES:
            place = f"contents[{number}].role"
            raise Problem(400, f"{place} has to be user or model, not {content.role!r:.40}", param=place)
        for at, part in enumerate(content.parts or ()):
            _add(builder, ROLES[content.role], part, f"contents[{number}].parts[{at}]", unanswered)
    return builder.messages


def _add(builder: MessageBuilder, role: str, part: Part, where: str, unanswered: dict[str, str]) -> None:
    """Add one part. `unanswered`: names of the called functions without a response yet, by call id."""
    if part.text is not None:
        builder.add_reasoning(part.text) if part.thought and role == ASSISTANT else builder.add_text(role, [part.text])
    elif (call := part.function_call) is not None and role == ASSISTANT:
        call_id = call.id or f"call_{where}"
        unanswered[call_id] = call.name
        builder.add_call(call_id, call.name, call.args or {})
    elif (result := part.function_response) is not None and role == USER:
        call_id = result.id or next((each for each, name in unanswered.items() if name == result.name), result.name)
        unanswered.pop(call_id, None)
        builder.add_result(call_id, filter(None, [_response_text(result.response or {}), *(each.text for each in result.parts or ())]))
    elif (code := part.executable_code or part.code_execution_result) is not None and role == ASSISTANT:  # run by Google's server
        builder.add_text(role, [str(code.get("code") or code.get("output") or "")])
    elif call is not None or part.function_response is not None:
        raise Problem(400, f"{where}: functionCall belongs to the model, functionResponse to the user", param=where)
    elif part.thought_signature is None:
        raise Problem(400, f"{where} has no text, inlineData, functionCall or functionResponse", param=where)


def _response_text(response: dict[str, Any]) -> str:
    """A function's response for the model: only its text if it has nothing else."""
    if len(response) == 1:
        (name, value), = response.items()
        if name in RESPONSE_KEYS or name == "error":
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            return f"Error: {text}" if name == "error" else text
    return json.dumps(response, ensure_ascii=False)
