"""Chat templates: render messages to the prompt format that a model was trained on.

A template is a Jinja program that comes with the model: `chat_template.jinja` takes precedence over `chat_template` in
tokenizer_config.json (a string, or a list of named ones, of which "default" is used, and "tool_use" with tools). Variables are those of
transformers: messages, tools, documents, add_generation_prompt, special tokens, and options such as enable_thinking. It is compiled on
first use, because importing jinja2 takes 50 ms that raw completions do not need. Malicious templates end in a one-line TemplateError; see
`template_sandbox`.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import EffllmError
from ..files.bounded_read import read_text
from ..tokens.terminal_text import sanitize

if TYPE_CHECKING:
    from jinja2 import Template

    from .template_sandbox import TemplateEnvironment

SOURCE_LIMIT = 64_000  # characters; compiling that many takes a second, and published templates have a third of it
TOOL_TEMPLATE = "tool_use"  # name of the template for tools in a list of templates
RENDER_SECONDS = 2.0
MESSAGES_PER_LIMIT = 100  # the time limit grows by RENDER_SECONDS per so many messages: Gemma 4's template is quadratic in them
RAW_HINT = 'complete without a template: effllm run MODEL --raw "…"'


class TemplateError(EffllmError):
    """The model's chat template is malformed, exceeds a limit, or fails on these messages."""


class TemplateRefused(TemplateError):
    """The template rejected the messages through raise_exception (role order, no system role, …)."""


class ChatTemplate:
    """A chat template with its special tokens. Thread-safe; renders one at a time.

    `seconds`: CPU time allowed per render and MESSAGES_PER_LIMIT messages. `for_tools`: another template, used when there are tools.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, seconds: float = RENDER_SECONDS,
                 for_tools: str | None = None) -> None:
        if len(source) > SOURCE_LIMIT:
            raise TemplateError(
                f"the model's chat template has {len(source):,} characters, more than the {SOURCE_LIMIT:,} allowed", RAW_HINT
            )
        self.source, self.special_tokens, self.seconds = source, dict(special_tokens or {}), seconds
        has_tool_template = for_tools is not None and len(for_tools) <= SOURCE_LIMIT
        self.for_tools = ChatTemplate(for_tools, special_tokens, seconds) if has_tool_template else None
        self._lock = threading.Lock()
        self._compiled: tuple[TemplateEnvironment, Template] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The prompt text. `messages` are dicts with role and content; `options` reach the template as variables (enable_thinking, …)."""
        if tools and self.for_tools:
            return self.for_tools.render(messages, add_generation_prompt, tools, **options)
        variables = {"documents": None, **self.special_tokens, **options, "messages": list(messages), "tools": tools}
        try:
            text = json.dumps(variables | {"add_generation_prompt": add_generation_prompt})
        except (TypeError, ValueError) as error:
            raise TemplateError(f"chat messages must be plain text, numbers, lists and mappings: {error}") from None
        # The round trip leaves only exact built-in types: an object with methods of its own would be a hole in the sandbox.
        with self._lock:
            return self._render(json.loads(text), len(text))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the template reads; empty for one that does not parse, which rendering reports."""
        from jinja2 import meta

        from .template_sandbox import TemplateEnvironment

        try:
            return frozenset(meta.find_undeclared_variables(TemplateEnvironment().parse(self.source)))
        except Exception:  # untrusted code, as in `_render`
            return frozenset()

    def _render(self, variables: dict[str, Any], num_chars: int) -> str:
        from .template_limits import LimitExceeded, Meter
        from .template_sandbox import Refusal, TemplateEnvironment

        try:
            environment, template = self._compiled or (TemplateEnvironment(), None)
            seconds = self.seconds * (1 + len(variables["messages"]) / MESSAGES_PER_LIMIT)
            environment.meter = Meter(num_chars, seconds)
            if template is None:
                template = environment.load(self.source)
                environment.meter = Meter(num_chars, seconds)
                self._compiled = environment, template
            return "".join(template.root_render_func(template.new_context(variables)))
        except Refusal as error:
            raise TemplateRefused(f"the model's chat template refuses these messages: {_one_line(error)}", RAW_HINT) from None
        except LimitExceeded as error:
            raise TemplateError(f"the model's chat template was stopped: {_one_line(error)}", RAW_HINT) from None
        except RecursionError:
            raise TemplateError("the model's chat template was stopped: it is nested or recurses too deeply", RAW_HINT) from None
        except Exception as error:  # untrusted code may raise any exception
            raise self._failure(error) from None

    @staticmethod
    def _failure(error: Exception) -> TemplateError:
        from jinja2 import TemplateSyntaxError
        from jinja2.exceptions import SecurityError

        if isinstance(error, TemplateSyntaxError):
            return TemplateError(
                f"the model's chat template is malformed (line {error.lineno}): {_one_line(error.message or '')}", RAW_HINT
            )
        if isinstance(error, SecurityError):
            return TemplateError(f"the model's chat template was stopped: {_one_line(error)}", RAW_HINT)
        return TemplateError(f"the model's chat template failed: {_one_line(error)} ({type(error).__name__})", RAW_HINT)


def _one_line(error: object) -> str:
    text = " ".join(sanitize(str(error)[:1000]).split())
    return text if len(text) <= 200 else text[:199] + "…"


def load_template(folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The chat template of a model folder; None for a base model without one."""
    for name in ("chat_template.jinja", "chat_template.json"):
        path = folder / name
        try:
            if not path.exists():
                continue
            text = read_text(path, 8 * SOURCE_LIMIT)
            source, for_tools = (text, None) if name.endswith(".jinja") else _from_entry(json.loads(text), path)
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise TemplateError(f"cannot read {path}: {_one_line(reason)}", "fetch the model's files again, or remove this file") from None
        if source is not None:
            return ChatTemplate(source, special_tokens, for_tools=for_tools)
    source, for_tools = _from_entry(tokenizer_config, folder / "tokenizer_config.json")
    return None if source is None else ChatTemplate(source, special_tokens, for_tools=for_tools)


def _from_entry(config: Any, path: Path) -> tuple[str | None, str | None]:
    """The template in a config, and the one for tools."""
    for_tools = None
    entry = config.get("chat_template") if isinstance(config, Mapping) else None
    if isinstance(entry, list):
        named = {str(e.get("name")): e.get("template") for e in entry if isinstance(e, Mapping)}
        entry = named.get("default", next(iter(named.values()), None))
        for_tools = named.get(TOOL_TEMPLATE)
    if entry is not None and not isinstance(entry, str):
        raise TemplateError(f"chat_template in {path} is neither text nor a list of named templates", RAW_HINT)
    return entry, for_tools if isinstance(for_tools, str) else None
