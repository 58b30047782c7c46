"""Chat templates for GGUF files that Ollama converted: its Go templates are recognized by their special tokens, and a Jinja template of the
same format is used.

Go templates are not executed. This applies where a model's own file has no chat template. BOS is prepended where the tokenizer adds it. A
new format is an entry in FORMATS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .template import ChatTemplate

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer


@dataclass(frozen=True)
class Format:
    """A prompt format."""

    markers: tuple[str, ...]  # a Go template of this format contains all of them
    turn: str  # of each message, with {role} and {text}
    answer: str  # the generation prompt
    excluded: tuple[str, ...] = ()  # a Go template of this format contains none of them
    roles: Mapping[str, str] | None = None  # names of roles that differ from the usual ones
    turns: Mapping[str, str] | None = None  # by role, in place of `turn`
    system: tuple[str, str] | None = None  # text around a system prompt that is merged into the first user message; None if it has a turn


_MODEL = {"assistant": "model"}
# The first match counts, so formats with more specific markers come first.
FORMATS: Mapping[str, Format] = {
    "Phi 4": Format(("<|im_start|>", "<|im_sep|>"), "<|im_start|>{role}<|im_sep|>{text}<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "ChatML": Format(("<|im_start|>", "<|im_end|>"), "<|im_start|>{role}\n{text}<|im_end|>\n", "<|im_start|>assistant\n"),
    "Llama 3": Format(("<|start_header_id|>", "<|eot_id|>"), "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>",
                      "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "Llama 4": Format(("<|header_start|>", "<|eot|>"), "<|header_start|>{role}<|header_end|>\n\n{text}<|eot|>",
                      "<|header_start|>assistant<|header_end|>\n\n"),
    "Gemma": Format(("<start_of_turn>", "<end_of_turn>"), "<start_of_turn>{role}\n{text}<end_of_turn>\n", "<start_of_turn>model\n",
                    roles=_MODEL, system=("", "\n\n")),
    "Granite 3": Format(("<|start_of_role|>", "<|end_of_text|>"), "<|start_of_role|>{role}<|end_of_role|>{text}<|end_of_text|>\n",
                        "<|start_of_role|>assistant<|end_of_role|>"),
    "Mistral with system prompts": Format(("[SYSTEM_PROMPT]", "[INST]"), "", "", turns={
        "system": "[SYSTEM_PROMPT]{text}[/SYSTEM_PROMPT]", "user": "[INST]{text}[/INST]", "assistant": "{text}</s>"}),
    "Llama 2": Format(("[INST]", "<<SYS>>"), "", "", turns={"user": "<s>[INST] {text} [/INST]", "assistant": " {text} </s>"},
                      system=("<<SYS>>\n", "\n<</SYS>>\n\n")),
    "Mistral": Format(("[INST]", "[/INST]"), "", "", turns={"user": "[INST] {text}[/INST]", "assistant": " {text}</s>"},
                      system=("", "\n\n")),
    "Phi 3": Format(("<|user|>", "<|end|>"), "<|{role}|>\n{text}<|end|>\n", "<|assistant|>\n", excluded=("<|channel|>",)),
    "Zephyr": Format(("<|user|>", "</s>"), "<|{role}|>\n{text}</s>\n", "<|assistant|>\n"),
}


def detect_format(source: str) -> str | None:
    """The format of an Ollama template; None for an unknown one."""
    return next((name for name, format in FORMATS.items() if all(marker in source for marker in format.markers)
                 and not any(marker in source for marker in format.excluded)), None)


def install_template(tokenizer: Tokenizer, name: str) -> None:
    """Set the chat template of a tokenizer that has none."""
    bos = "{{- bos_token -}}" if tokenizer.encode("") and "bos_token" in tokenizer.special_tokens else ""
    tokenizer.template = ChatTemplate(bos + jinja_source(name), tokenizer.special_tokens)


def jinja_source(name: str) -> str:
    """The chat template of a format."""
    format = FORMATS[name]
    roles, parts = format.roles or {}, []
    turns = format.turns or {role: format.turn.replace("{role}", roles.get(role, role)) for role in ("system", "user", "assistant")}
    if format.system is not None:
        turns = {role: turn for role, turn in turns.items() if role != "system"}
        parts.append("{%- set first = messages[0]['content'] if messages and messages[0]['role'] == 'system' else '' -%}"
                     "{%- set told = messages[1:] if first else messages -%}")
    else:
        parts.append("{%- set told = messages -%}")
    parts.append("{%- for message in told -%}")
    for number, (role, turn) in enumerate(turns.items()):
        before, _, after = turn.partition("{text}")
        text = "message['content']"
        if format.system is not None and role == "user":
            system_text = f"{_quoted(format.system[0])} ~ first ~ {_quoted(format.system[1])}"
            text = f"(({system_text}) if loop.first and first else '') ~ ({text})"
        parts.append(f"{{%- {'elif' if number else 'if'} message['role'] == '{role}' -%}}"
                     f"{{{{- {_quoted(before)} ~ ({text}) ~ {_quoted(after)} -}}}}")
    parts.append("{%- else -%}{{- raise_exception('this template has no turn for ' ~ message['role']) -}}{%- endif -%}{%- endfor -%}")
    parts.append(f"{{%- if add_generation_prompt -%}}{{{{- {_quoted(format.answer)} -}}}}{{%- endif -%}}" if format.answer else "")
    return "".join(parts)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
