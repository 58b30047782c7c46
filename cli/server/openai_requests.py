"""Request bodies of OpenAI's chat completions and completions, and the base of all others. Types are strict; unknown fields are ignored,
unless they ask for something that is not supported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, RootModel, ValidationError

from .custom_tools import call_of
from .problems import LEAVE_OUT, Problem

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text")  # types of parts that are text
# What clients of the Hugging Face hub send as model where only a URL was given: Python's, now and before; JavaScript's sends the URL.
PLACEHOLDER_MODEL = re.compile(r"dummy|tgi|https?://.*", re.IGNORECASE)
REASONING_FIELDS = ("reasoning_content", "reasoning",
                    "thinking")  # names of an assistant's reasoning in messages sent back
# Unsupported fields -> the values with which they ask for nothing.
UNSUPPORTED_FIELDS: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (0,),
    "n_probs": (0,), "echo": (False,), "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (), "web_search_options": (),
    "dynatemp_range": (0,), "min_tokens": (0,), "post_sampling_probs": (False,),
    "length_penalty": (1,), "use_beam_search": (False,), "allowed_token_ids": ([],), "bad_words": ([],)}


def one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def whole_number(value: Any) -> Any:
    """Clients without integers send 8192.0, which is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int | None, BeforeValidator(whole_number)]


class Body(BaseModel):
    """`unsupported`: fields with the values by which they ask for nothing; `alternatives`: what to use in place of them."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED_FIELDS
    alternatives: ClassVar[Mapping[str, str]] = {}


class Scale(Body):
    """The scale of an adapter, by its number."""

    id: int
    scale: float


class Scales(RootModel[list[Scale]]):
    """A body that is a list of scales."""

    model_config = ConfigDict(strict=True)
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationRequest(Body):
    """Fields common to all requests for answers. None means the default of the command line."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: Whole = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Whole = None
    dry_penalty_last_n: Whole = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None
    mirostat: Whole = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    logit_bias: Any = None
    seed: Whole = None
    stop: Annotated[list[str] | None, BeforeValidator(one_or_more)] = None
    max_tokens: Whole = None
    max_completion_tokens: Whole = None
    n_predict: Whole = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    thinking_budget_tokens: Whole = None
    thinking_token_budget: Whole = None
    lora: list[Scale] | None = None
    cache_prompt: bool | None = None


EFFORT_OF = {"off": "none", False: "none", "on": "medium", True: "medium"}
TYPE_OF = {True: "enabled", False: "disabled"}


def as_object(field: str, names: Mapping[object, str]) -> Callable[[Any], Any]:
    """A validator for fields that some clients send as a word or a switch, others as an object that has it as a `field`."""
    def read(value: Any) -> Any:
        return {field: names.get(value, value)} if isinstance(value, str | bool) else value

    return read


class Reasoning(Body):
    """Reasoning as in Responses, and in chats of OpenRouter's clients."""

    effort: str | None = None
    summary: str | None = None
    enabled: bool | None = None
    max_tokens: Whole = None


class Thinking(Body):
    """Reasoning as in Anthropic's API, and in chats of DeepSeek's and others."""

    type: str | None = None
    budget_tokens: Whole = None


class Message(Body):
    role: str
    content: Any = None


class ChatRequest(GenerationRequest):
    messages: list[Message]
    n: Whole = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: Annotated[Reasoning | None, BeforeValidator(as_object("effort", EFFORT_OF))] = None
    thinking: Annotated[Thinking | None, BeforeValidator(as_object("type", TYPE_OF))] = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    thinking_budget: Whole = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Whole = None
    n_probs: Whole = None


class CompletionRequest(GenerationRequest):
    prompt: Any
    n: Whole = None
    logprobs: int | bool | None = None
    n_probs: Whole = None
    echo: bool | None = None
    suffix: str | None = None


class Tokenize(Body):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Detokenize(Body):
    tokens: list[int]


NO_JSON, REPLACED = "json_invalid", rb"\ufffd"
# JSON escapes. The first group is half a surrogate pair: clients that cut a text within an emoji send it, again with each turn.
ESCAPES = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL)
Kind = TypeVar("Kind", bound=Body | Scales)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """A body as an object of `kind`. Raises Problem that names the field."""
    try:
        payload = kind.model_validate_json(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if details["type"] == NO_JSON and (repaired := ESCAPES.sub(_whole, body)) != body:
            return parse(kind, repaired)
        param = field_path(details["loc"])
        reason = details["msg"][:1].lower() + details["msg"][1:]
        raise Problem(400, f"{param}: {reason}" if param else f"the body is not a valid request: {reason}", param=param or None) from None
    refuse_unsupported(payload)
    return payload


def _whole(escape: re.Match[bytes]) -> bytes:
    return REPLACED if escape[1] else escape[0]


def refuse_unsupported(payload: Body | Scales, where: str = "") -> None:
    """Raises Problem for a field that asks for something unsupported; `where`: prefix of its name."""
    for field, neutral_values in payload.unsupported.items():
        value = (payload.model_extra or {}).get(field)
        if value is not None and not any(is_same(value, neutral) for neutral in neutral_values):
            alternative = payload.alternatives.get(field, LEAVE_OUT)
            raise Problem(400, f"{where}{field} is not supported; {alternative}", param=where + field, code="unsupported_parameter")


def is_same(value: object, other: object) -> bool:
    """Equal, and not a number compared to a bool: logprobs 0 does ask for something."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def field_path(place: tuple[str | int, ...]) -> str:
    """`messages[0].content`"""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).lstrip(".")


def messages_of(payload: ChatRequest) -> list[dict[str, Any]]:
    """The messages with all their keys. Raises Problem for content that is no text."""
    return [_checked(message, f"messages[{number}]") for number, message in enumerate(payload.messages)]


def _checked(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise Problem(400, f"{where}.role has to be one of {', '.join(ROLES)}, not {message.role!r:.40}", param=f"{where}.role")
    content, param = message.content, f"{where}.content"
    fields = message.model_dump(exclude_unset=True)
    if message.role == "assistant":
        content, fields = split_reasoning(content, fields, param)
        if isinstance(calls := fields.get("tool_calls"), list):
            fields["tool_calls"] = [call_of(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if content is None and message.role not in ("assistant", "tool"):
        raise Problem(400, f"{param} is missing", param=param)
    if content is not None and not isinstance(content, str | list):
        raise Problem(400, f"{param} has to be a string or a list of parts", param=param)
    if isinstance(content, list):
        for number, part in enumerate(content := [as_text(part) for part in content]):
            text_of(part, f"{param}[{number}]")
    return fields | {"content": content}


def split_reasoning(content: Any, fields: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """An assistant's content and message, with its reasoning moved to `reasoning_content` from whichever field or content part has it."""
    reasoning = [fields[name] for name in REASONING_FIELDS if isinstance(fields.get(name), str) and fields[name]]
    if isinstance(content, list):
        reasoning += ["".join(texts_of(part["thinking"], f"{where}[{index}].thinking")) for index,
                  part in enumerate(content) if is_reasoning_part(part)]
        content = [part for part in content if not is_reasoning_part(part)]
    return content, fields | ({"reasoning_content": reasoning[0]} if reasoning else {})


def as_text(part: object) -> object:
    """A refusal of another model that is sent back is plain text."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str)
    return {"type": "text", "text": part["refusal"]} if is_refusal else part


def is_reasoning_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking" and isinstance(part.get("thinking"), str | list)


def text_of(part: object, where: str) -> str:
    """The text of a content part. Raises Problem for one that has none."""
    part = as_text(part)
    if isinstance(part, dict) and part.get("type") in TEXTS and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else None
    reason = f"{kind} is not supported here: text is, and images or audio in user messages" \
        if isinstance(kind, str) and kind not in TEXTS else "a part is {\"type\": \"text\", \"text\": ...}"
    raise Problem(400, f"{where}: {reason}", param=where)


def texts_of(content: object, where: str) -> list[str]:
    """The texts of content that is a string or a list of parts. Raises Problem."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise Problem(400, f"{where} has to be a string or a list of parts", param=where)
    return [text_of(part, f"{where}[{number}]") for number, part in enumerate(content)]


def prompts_of(payload: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request, each a text or token ids: one, in a list or not, or several in a list. Raises Problem."""
    prompt = payload.prompt
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    if all(isinstance(item, str) or isinstance(item, list) and all(type(token) is int for token in item) for item in prompts):
        return prompts
    raise Problem(400, "prompt has to be a string or a list of token ids, or a list of these", param="prompt")
