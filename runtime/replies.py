"""Answers for programs, which send all messages each time: nothing is kept from one to the next but what the cache holds.

Each comes with a wish of its own (how it is sampled, where it ends, what it is held to), so that nothing of one request is left in the
next. What a prompt has in common with what was read and written last is not read again, as in a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .. import ContextOverflow, EffllmError, UsageError
from ..offload.notes import Fallback, refuse_fallbacks
from .answering import Answer, Reasoning
from .engine import Engine
from .events import Call, Done, Event, Notice, PromptRead, TextDelta
from .prompting import NO_SYSTEM_ROLE, NO_TEMPLATE, Prompts
from .sampler import Sampler, SamplerSettings
from .text import Tokenizer

if TYPE_CHECKING:
    from .calls.calling import Calling, Tools
    from .calls.filter import CallFilter
    from .constraint import Form, Vocabulary
    from .kept_prompts import KeptPrompts

Message = Mapping[str, Any]
COUNTED = 1 << 20  # letters of a text that is cut in any case, to say how many tokens it has
SHRINKS = 4  # times that a text may become shorter before it is cut into tokens, generously
SYSTEM, DEVELOPER = "system", "developer"  # newer programs call the system prompt's role so


def never() -> bool:
    return False


@dataclass(frozen=True)
class Wish:
    """What one answer is to be. `think`: auto leaves reasoning to the model, on and off ask its template for it. `stops` end the answer,
    `max_tokens` too (None: no limit); with `ignore_eos` it goes on behind the model's end of text. `form` is what it is held to."""

    settings: SamplerSettings
    think: str = "auto"
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    form: Form | None = None


class Replies:
    """One model and one sequence, as Engine, for one answer after the other. `cancelled` of an answer is asked between tokens, between
    chunks of the prompt and while the disk is waited for, and ends it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, kept: KeptPrompts | None = None) -> None:
        self.engine, self.tokenizer, self.kept = engine, tokenizer, kept
        self._prompts = Prompts(tokenizer)
        self._vocabulary: Vocabulary | None = None

    @cached_property
    def _calling(self) -> Calling:
        from .calls.calling import Calling

        return Calling(self.tokenizer)

    def reply(self, messages: Sequence[Message], wish: Wish, tools: Tools | None = None,
              variables: Mapping[str, Any] | None = None, cancelled: Callable[[], bool] = never) -> Iterator[Event]:
        """Answer messages. They are dicts of `role`, `content` (a text, parts `{"type": "text", "text": ...}` of one, or None) and whatever
        else the chat template reads (`reasoning_content`, `name`), which reaches it as it is; so do `variables`, over what `think` asks.
        System messages at the beginning are one system prompt. An answer that is the last message is gone on with. With `tools` the
        answer may call some: each is an event of its own. What was called before (`tool_calls`, and the role tool with `tool_call_id`) is
        told in the way that the template has for it.

        Raises EffllmError before the first event where these messages cannot be answered.
        """
        prompt, said = self._asking(self._prompts, messages, wish.think, tools, variables)
        calling = self._calling if tools else None
        if tools:
            wish = replace(wish, stops=wish.stops + calling.stops(), form=calling.form(tools, wish.form))
        for fallback in [*self._fallbacks(wish.think), *(calling.fallbacks(tools) if tools else ())]:
            if self.engine.options.strict:
                refuse_fallbacks([Fallback(fallback)])
            yield Notice(fallback)
        prompt = self._prompts.going_on(prompt, said)
        self._demand_near(prompt)
        ids = self._prompts.encoded(prompt)
        if self.kept is not None:
            ids = yield from self.kept.turn_to(prompt, ids, self._prompts)
        think, marks = self.tokenizer.reasoning(ids, tools is not None), None
        if tools:
            think, marks = calling.reading(think, tools), calling.marks
        answer = yield from self._answer(ids, wish, cancelled, think, said, self._prompts.raw, marks)
        self._prompts.hold(prompt, ids, answer.tokens[: len(answer.tokens) - (answer.finish == "stop")], answer.text[len(said) :])

    def count(self, messages: Sequence[Message], think: str = "auto", tools: Tools | None = None,
              variables: Mapping[str, Any] | None = None) -> int:
        """How many tokens the prompt of an answer to messages has; from any thread, whatever is answered meanwhile. Raises EffllmError as
        `reply` does."""
        prompts = Prompts(self.tokenizer)
        prompt, said = self._asking(prompts, messages, think, tools, variables)
        prompt = prompts.going_on(prompt, said)
        self._demand_near(prompt)
        return len(prompts.encoded(prompt))

    def complete(self, prompt: str | Sequence[int], wish: Wish, cancelled: Callable[[], bool] = never) -> Iterator[Event]:
        """Continue a text, or token ids, as they stand, without a template; reasoning is a part of the text. Raises EffllmError before the
        first event."""
        if not prompt:
            raise UsageError("the prompt is empty", "send at least one letter or token")
        if isinstance(prompt, str):
            self._demand_near(prompt)
        ids, rows = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt), self.engine.config.vocab_size
        if bad := [token for token in ids if not 0 <= token < rows]:  # before they are taken for text
            raise UsageError(f"token id {bad[0]} is outside the vocabulary of {rows}", "send ids of this model's tokenizer")
        if self.kept is not None:
            ids = yield from self.kept.turn_to(None, ids, self._prompts)
        yield from self._answer(ids, wish, cancelled, None, raw=True)

    def _answer(self, ids: list[int], wish: Wish, cancelled: Callable[[], bool], think: Reasoning | CallFilter | None,
                said: str = "", raw: bool = False, marks: Mapping[int, str] | None = None) -> Generator[Event, None, Answer]:
        self.engine.cancelled = cancelled
        sampler = Sampler(wish.settings, self.engine.config.vocab_size)
        answer = Answer(self.engine, self.tokenizer, sampler, think, wish.stops, wish.max_tokens, cancelled, wish.ignore_eos,
                        self._held_to(wish.form), wish.think != "off", raw, said, marks)
        try:
            is_read = False
            for event in answer.written(ids):
                if not is_read and isinstance(event, TextDelta | Call):
                    yield PromptRead(len(ids), self.engine.reused)
                    is_read = True
                yield event
        except EffllmError:
            raise
        except Exception:  # a pass was left in its middle, by a disk, say: what the cache holds is not known
            self.engine.reset()
            raise
        stats = answer.cost(explained=False)  # a program does not ask why, and the next one waits
        if not is_read:
            yield PromptRead(stats.prompt_tokens, stats.cached_tokens)
        yield from answer.remarks()
        yield Done(stats)
        return answer

    @cached_property
    def _longest(self) -> int:
        """Letters of the longest token."""
        return max(map(len, self.tokenizer.vocabulary()))

    def _demand_near(self, text: str) -> None:
        """Raises ContextOverflow for a text that is much too long whatever its tokens are: to make them of 30 MB takes a gigabyte."""
        room = self.engine.n_ctx
        if self.engine.options.overflow == "shift" or len(text) <= COUNTED or len(text) <= SHRINKS * room * self._longest:
            return
        least = len(text) // self._longest
        raise ContextOverflow(f"the prompt has at least {least} tokens and the context holds {room}", "shorten it")

    def _held_to(self, form: Form | None) -> Vocabulary | None:
        if form is None:
            return None
        known = self._vocabulary
        self._vocabulary = known.holding(form) if known else form.opened(self.tokenizer, self.engine.config.vocab_size)
        return self._vocabulary

    def _asking(self, prompts: Prompts, messages: Sequence[Message], think: str, tools: Tools | None,
                variables: Mapping[str, Any] | None) -> tuple[str, str]:
        """The prompt of messages, and how the answer begins that is to go on behind it. Raises EffllmError where there is none."""
        variables = variables or {}
        if tools or any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            messages, told = self._calling.prepared(messages, tools)
            variables = {**told, **variables}
        system, beside, rest = self._apart(messages)
        said = ""
        if rest and rest[-1]["role"] == "assistant" and not rest[-1].get("tool_calls"):
            said = rest.pop()["content"] or ""
        if not rest and not system:
            raise UsageError("there are no messages", "send at least one that has text")
        return prompts.rendered(rest, system, think, variables, beside), said

    def _apart(self, messages: Sequence[Message]) -> tuple[str | None, dict[str, Any], list[dict[str, Any]]]:
        """The system prompt, the keys that its message has beside, and the other messages with their content as one text."""
        template = "" if self.tokenizer.template is None else self.tokenizer.template.source
        rest = [{key: value for key, value in message.items() if value is not None} | {"content": whole_text(message.get("content"))}
                for message in messages]
        for message in rest:
            if message["content"] is None and not message.get("tool_calls"):  # an empty answer, as some clients send it back
                message["content"] = ""
        for message in rest:
            if message["role"] == DEVELOPER and DEVELOPER not in template:
                message["role"] = SYSTEM
        said, beside = [], {}
        while rest and rest[0]["role"] == SYSTEM:
            first = rest.pop(0)
            said.append(first.pop("content") or "")
            beside |= {key: value for key, value in first.items() if key not in ("role", "name")}
        return "\n\n".join(filter(None, said)) or None, beside, rest

    def _fallbacks(self, think: str) -> Iterator[str]:
        if self._prompts.raw:
            yield NO_TEMPLATE
        if why := self.tokenizer.unmoved(think):
            yield f"--think {think} changes nothing: {why}"
        if self._prompts.folds:
            yield NO_SYSTEM_ROLE


def whole_text(content: object) -> str | None:
    """The content of a message as one text, its parts on lines of their own; None where it has none."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
