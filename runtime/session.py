"""A conversation: text in, events out. Holds the message history, the sampler and everything between token ids and displayed text.

The engine's KV cache stays between turns: each turn renders the whole history through the chat template and prefills only what follows the
common prefix. `cancel` is safe in a signal handler: it sets a flag that is polled between tokens and between chunks of the prompt, so
nothing is left half done.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import EffllmError, UsageError
from ..offload.notes import Fallback, refuse_fallbacks
from .engine import Engine
from .events import Call, Done, Event, Notice, Stats
from .generation.answer import Answer, Reasoning
from .images.media import require_media
from .images.modality import IMAGE_INPUT, Modality, modality_of
from .sampler import Sampler, SamplerSettings
from .sampling.dry import breakers_of
from .sessions.conversation_file import History, load_conversation, save_conversation
from .sessions.session_format import TokenizedText
from .templates.prompt_builder import NO_SYSTEM_ROLE, NO_TEMPLATE, PromptBuilder
from .tokenizer import NOTHING_TO_LIMIT, Tokenizer

if TYPE_CHECKING:
    import numpy as np

    from .constraints.constraint import CompiledConstraint, Constraint
    from .images.media import MediaItem
    from .images.video_file import Frame
    from .tool_calls.filter import CallFilter
    from .tool_calls.tool_calling import Tools
    from .tool_calls.tool_messages import ToolMessages

SUMMARY_PROMPT = "Summarise our conversation so far in a few sentences, keeping names, numbers and decisions."
MAX_SUMMARY_TOKENS = 2048  # of a summary with its reasoning, if --max-tokens is lower
# Stands in for an answer that was stopped after its tool calls: chat templates expect roles to alternate.
INTERRUPTED_REPLY = "(stopped here)"
Message = dict[str, Any]


@dataclass(frozen=True)
class LastAnswer:
    """The state after the last answer, needed to continue it token by token."""

    messages: list[Message]
    system: str | None
    ids: list[int]  # of the prompt and the answer
    prompt: int  # how many of them are the prompt
    think: Reasoning | None  # the reasoning parser, as the answer left it


class Session:
    """A conversation with one engine.

    `system`: the system prompt, which is not among `messages`. Messages are dicts with `role` and `content`.
    `think`: on and off ask the chat template for reasoning or none; auto leaves it to the model.
    `stops`: stop strings. `raw`: no chat template. `constraint`: what answers must match.
    `max_tokens` and `max_reasoning_tokens`: limits of each answer and of its reasoning, None: no limit.
    `from_process_start`: the first answer's time to first token counts from the start of the process, for one-shot commands.
    An answer may call `tools`. Its message then has `tool_calls`, and the caller adds a result for each of the `open_calls`
    (`take_result`), then calls `answer_tool_results`.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: SamplerSettings, system: str | None = None, think: str = "auto",
                 stops: Sequence[str] = (), max_tokens: int | None = None, raw: bool = False, ignore_eos: bool = False,
                 from_process_start: bool = False, constraint: Constraint | None = None, max_reasoning_tokens: int | None = None) -> None:
        self.engine, self.tokenizer, self.system, self.think, self.stops = engine, tokenizer, system, think, tuple(stops)
        self.max_tokens, self.ignore_eos, self.max_reasoning_tokens = max_tokens, ignore_eos, max_reasoning_tokens
        self._prompts = PromptBuilder(tokenizer, raw, engine.media)
        self._media_items: set[MediaItem] = set()  # references that keep their encoded rows while the conversation lives
        self.raw = self._prompts.raw
        self.settings = settings
        self.set_constraint(constraint)
        self.messages: list[Message] = []
        self.tools: Tools | None = None
        self.open_calls: list[Call] = []
        self.stats: Stats | None = None
        self._cancelled = False
        self.from_process_start = from_process_start
        self._warned_no_template, self._warned_think, self._warned_limit = raw, False, False
        engine.cancelled = lambda: self._cancelled
        self._warned_no_system_role = False
        self._last_answer: LastAnswer | None = None
        self._token_count: tuple[list[Message], str | None, int] = ([], system, 0)

    @property
    def settings(self) -> SamplerSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: SamplerSettings) -> None:
        """Start a new sampler, with a new random state."""
        self._settings = settings
        self._sampler = Sampler(settings, self.engine.config.vocab_size, breakers_of(self.tokenizer, settings))

    @property
    def constraint(self) -> Constraint | None:
        """What answers must match."""
        return self._compiled and self._compiled.source

    def set_constraint(self, constraint: Constraint | None) -> None:
        """Constrain answers from now on; None: no longer. Raises EffllmError, and then nothing changes."""
        self._compiled = constraint and constraint.compile(self.tokenizer, self.engine.config.vocab_size)

    @property
    def used(self) -> int:
        """Context tokens that the conversation takes: after an answer those in the KV cache. If the history was changed since (undo, load,
        another system prompt), they are counted again."""
        if not self.messages:
            return 0
        messages, system, tokens = self._token_count
        if messages != self.messages or system != self.system:
            tokens = self._count()
        return tokens

    def _count(self) -> int:
        try:
            tokens = self._prompts.count(self._prompt(reply=False))
        except EffllmError:  # the template refuses this history; the error is reported by the next answer
            tokens = sum(len(self.tokenizer.encode(message["content"], add_special_tokens=False)) for message in self.messages)
        self._token_count = list(self.messages), self.system, tokens
        return tokens

    def count(self, text: str) -> int:
        """Tokens of a text within a message."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def n_ctx(self) -> int:
        return self.engine.n_ctx

    def require_modality(self, modality: Modality = IMAGE_INPUT) -> None:
        """Raises EffllmError if the model takes no input of this modality, or none that this program supports."""
        require_media(self.engine.media, modality)

    def add_media(self, points: np.ndarray) -> MediaItem:
        """An image of uint8 pixels [height, width, 3] or a sound of float32 samples [n], as input for `ask`. Its encoded rows are kept for
        the whole conversation. Raises EffllmError."""
        item = require_media(self.engine.media, modality_of(points)).add(points)
        self._media_items.add(item)
        return item

    def add_video(self, frames: Sequence[Frame]) -> list[tuple[str, MediaItem]]:
        """As `add_media`, for frames of a video: (the text before it, the item) for each frame or group of frames."""
        items = require_media(self.engine.media).add_video(frames)
        self._media_items.update(each for _, each in items)
        return items

    def cancel(self) -> None:
        """Stop the running answer after the current token. Safe in a signal handler."""
        self._cancelled = True

    @property
    def was_cancelled(self) -> bool:
        """Was the last answer cancelled?"""
        return self.stats is not None and self.stats.finish_reason == "cancelled"

    # -- turns -----------------------------------------------------------------------------------------------------------------

    def ask(self, text: str, media: Sequence[MediaItem | str] = ()) -> Iterator[Event]:
        """One turn: append the user's message and answer it. `media`: images, sounds and the text between them, which precede `text`. A
        prompt that cannot be answered leaves the history as it was."""
        if not text.strip() and not media:
            raise UsageError("the prompt is empty", "give a prompt, or -f FILE")
        previous = list(self.messages)
        self._media_items.update(each for each in media if not isinstance(each, str))
        if previous and previous[-1]["role"] == "tool":
            self.messages.append({"role": "assistant", "content": INTERRUPTED_REPLY})
        parts = [each if isinstance(each, str) else each.marker for each in media]
        self.messages.append({"role": "user", "content": "\n".join([*parts, *([text] if text.strip() else [])])})
        yield from self._restoring_on_failure(previous)
        if self.messages and self.messages[-1]["role"] == "user":  # no answer: templates expect roles to alternate
            self.messages = previous

    def complete(self, text: str) -> Iterator[Event]:
        """Continue a text as it is, without chat template and history."""
        if not text:
            raise UsageError("the prompt is empty", "give a prompt, or -f FILE")
        self._cancelled = False
        ids = self.tokenizer.encode(text)
        yield from self._answer(ids, "", self.tokenizer.reasoning(ids))

    def take_result(self, call: Call, text: str, pictures: Sequence[MediaItem] = ()) -> None:
        """Add the result of one of the pending tool calls, to be sent with the next turn."""
        self.open_calls.remove(call)
        self._media_items.update(pictures)
        self.messages.append(self._tool_messages.result(call, "\n".join([text, *(each.marker for each in pictures)])))

    def answer_tool_results(self) -> Iterator[Event]:
        """Answer after tool results."""
        yield from self._restoring_on_failure(list(self.messages))

    def regenerate(self) -> Iterator[Event]:
        """Answer the last user message again; the random state advances, so the answer may differ."""
        if not any(message["role"] == "user" for message in self.messages):
            raise UsageError("nothing to answer again", "ask something first")
        before, last_answer = list(self.messages), self._last_answer
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        yield from self._restoring_on_failure(before)
        if self.messages[-1]["role"] == "user":  # stopped before any text: keep the previous answer
            self.messages, self._last_answer = before, last_answer

    def continue_(self) -> Iterator[Event]:
        """Continue the last answer where it was cut off, or after the tool calls it made."""
        if self.messages and self.messages[-1]["role"] == "tool":
            yield from self.answer_tool_results()
            return
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UsageError("there is no answer to continue", "ask something first")
        before, last_answer = list(self.messages), self._last_answer
        resumable = last_answer if last_answer and last_answer.messages == before and last_answer.system == self.system else None
        prefix = self.messages.pop()["content"]
        yield from self._restoring_on_failure(before, prefix, resumable)
        if self.messages[-1]["role"] == "user":  # stopped before any text
            self.messages, self._last_answer = before, last_answer

    def _restoring_on_failure(self, before: list[Message], prefix: str = "", last_answer: LastAnswer | None = None) -> Iterator[Event]:
        """`_turn`, restoring the `before` history if the turn cannot begin or ends before any text."""
        try:
            yield from self._turn(prefix, last_answer)
        except EffllmError:
            self.messages, self._last_answer, self.open_calls = before, last_answer, []
            raise
        except BaseException:
            if not self.messages or self.messages[-1]["role"] == "user":
                self.messages, self._last_answer = before, last_answer
            raise

    def undo(self) -> bool:
        """Remove the last question and its answer; False if there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                del self.messages[index:]
                return True
        return False

    def clear(self) -> None:
        """Clear the history; the system prompt stays."""
        self.messages = []
        self._media_items.clear()
        self.engine.reset()

    def compact(self) -> Iterator[Event]:
        """Replace the history by a summary that the model writes. It has a token limit of its own, no constraint and no tools; a summary
        that hits the limit is discarded."""
        if not self.messages:
            raise UsageError("there is nothing to summarise", "ask something first")
        before, constraint, max_tokens, tools = list(self.messages), self._compiled, self.max_tokens, self.tools
        self._compiled, self.max_tokens, self.tools = None, max_tokens and max(max_tokens, MAX_SUMMARY_TOKENS), None
        self.messages.append({"role": "user", "content": SUMMARY_PROMPT})
        is_complete = False
        try:
            yield from self._turn()
            is_complete = self.stats is not None and self.stats.finish_reason == "stop" and bool(self.messages[-1]["content"].strip())
        finally:
            self._compiled, self.max_tokens, self.tools = constraint, max_tokens, tools
            summary = self.messages[-1]["content"].strip() if is_complete else ""
            if is_complete:
                self.messages = [{"role": "user", "content": SUMMARY_PROMPT}, {"role": "assistant", "content": summary}]
            else:
                self.messages = before
        if not is_complete:
            yield Notice("no summary was completed: the history is unchanged")

    def _turn(self, prefix: str = "", last_answer: LastAnswer | None = None) -> Iterator[Event]:
        """Answer `messages`, beginning with `prefix`. With `last_answer`, the token ids of that answer are continued, reasoning included;
        otherwise the text of `prefix` is tokenized."""
        self._cancelled, self.open_calls = False, []
        prompt = self._prompt()
        if not last_answer:
            prompt = self._prompts.with_answer_prefix(prompt, prefix)
        yield from self._new_warnings()
        if not last_answer:
            yield from self._prompts.encode_media(prompt, self.engine, lambda: self._cancelled)
        ids = last_answer.ids if last_answer else self._prompts.tokenize(prompt)
        prompt_length = last_answer.prompt if last_answer else len(ids)
        parser = self._output_parser(ids, last_answer)
        marks = None if last_answer or not self.tools else self._tool_messages.calling.visible_tokens
        self._last_answer = None
        answer = yield from self._answer(ids, prefix, parser, self.messages, last_answer is not None, marks)
        has_stop_token = self.stats.finish_reason == "stop"
        answer_ids = [*ids[prompt_length:], *self.stats.token_ids[: len(self.stats.token_ids) - has_stop_token]]
        self._prompts.record_cached(prompt, ids[:prompt_length], answer_ids, answer.text if last_answer else answer.text[len(prefix) :])
        if self.messages[-1]["role"] == "assistant":
            self._token_count = list(self.messages), self.system, len(self.engine.tokens)
            if answer.is_exact and self.tools is None:
                self._last_answer = LastAnswer(list(self.messages), self.system, ids[:prompt_length] + answer_ids, prompt_length,
                                               answer.think)

    def _new_warnings(self) -> Iterator[Notice]:
        """Notices about settings without effect on this model, each once per session."""
        if self.raw and not self._warned_no_template:
            self._warned_no_template = True
            yield self._fallback(NO_TEMPLATE)
        if not self._warned_think and (reason := self.tokenizer.unsupported_think(self.think)):
            self._warned_think = True
            yield self._fallback(f"--think {self.think} has no effect: {reason}")
        if not self._warned_limit and self.max_reasoning_tokens is not None and not self.tokenizer.thinks:
            self._warned_limit = True
            yield Notice(NOTHING_TO_LIMIT)
        if self._prompts.folds_system and not self._warned_no_system_role:
            self._warned_no_system_role = True
            yield self._fallback(NO_SYSTEM_ROLE)

    def _fallback(self, text: str) -> Notice:
        if self.engine.options.strict:
            refuse_fallbacks([Fallback(text)])
        return Notice(text)

    def _prompt(self, reply: bool = True) -> str:
        """The rendered history; with `reply`, up to where the answer begins."""
        prompts, options = self._prompts, {"add_generation_prompt": reply}
        if self.tools is None and not any(message["role"] == "tool" for message in self.messages):
            return prompts.render(self.messages, self.system, self.think, options)
        return self._tool_messages.rendered(prompts, self.messages, self.system, self.think, options, self.tools)

    @cached_property
    def _tool_messages(self) -> ToolMessages:
        """Tool messages, for conversations that have any."""
        from .tool_calls.tool_messages import ToolMessages

        return ToolMessages(self.tokenizer)

    def _output_parser(self, ids: list[int], last_answer: LastAnswer | None) -> Reasoning | CallFilter | None:
        """The parser that separates reasoning and tool calls from content."""
        if last_answer:
            return copy.copy(last_answer.think)
        reasoning = self.tokenizer.reasoning(ids, self.tools is not None)
        return reasoning if self.tools is None else self._tool_messages.calling.call_filter(reasoning, self.tools)

    @property
    def _answer_constraint(self) -> CompiledConstraint | None:
        """The compiled constraint of an answer: tool calls, or else the session's constraint."""
        constraint = self._tool_messages.calling.constraint(self.tools, self.constraint) if self.tools else self.constraint
        if constraint is None or constraint == self.constraint:
            return self._compiled if constraint else None
        if self._compiled:
            return self._compiled.compile_other(constraint)
        return constraint.compile(self.tokenizer, self.engine.config.vocab_size)

    # -- the answer ------------------------------------------------------------------------------------------------------------

    def _answer(self, ids: list[int], prefix: str, think: Reasoning | CallFilter | None, history: list[Message] | None = None,
                is_continued: bool = False, marks: Mapping[int, str] | None = None) -> Generator[Event, None, Answer]:
        """Prefill and stream the answer; `is_continued`: the prompt ends within the answer."""
        answer = Answer(self.engine, self.tokenizer, self._sampler, think, self.stops, self.max_tokens, lambda: self._cancelled,
                        self.ignore_eos, self._answer_constraint, self.think != "off", self.raw, prefix, marks,
                        max_reasoning_tokens=self.max_reasoning_tokens)
        try:
            yield from answer.generate(ids, is_continued)
        finally:
            if history is not None and answer.calls:
                message, self.open_calls = self._tool_messages.calling_message(answer.text, "".join(answer.reasoning_parts), answer.calls)
                history.append(message)
            elif history is not None and (answer.tokens or prefix):
                history.append({"role": "assistant", "content": answer.text})
        self.stats, self.from_process_start = answer.cost(self.from_process_start), False
        yield from answer.closing_notices()
        yield Done(self.stats)
        return answer

    # -- files -----------------------------------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        return History(list(self.messages), self.system, self.settings)

    @property
    def tokenized_text(self) -> TokenizedText | None:
        """The token ids of the text so far, if known: tokenizing it again could give others."""
        text, ids = self._prompts.cached
        last = self._last_answer
        whole = last is not None and last.think is None and last.ids == ids and (last.messages, last.system) == (self.messages, self.system)
        return TokenizedText(text, tuple(ids), last.prompt if whole else None) if text else None

    def restore(self, messages: list[Message], system: str | None, tokenized_text: TokenizedText | None = None) -> None:
        """Replace the conversation by this one, restored from a file."""
        self.messages, self.system = messages, system
        self._prompts.cached = ("", []) if tokenized_text is None else (tokenized_text.text, list(tokenized_text.ids))
        self._last_answer = None
        if tokenized_text is not None and tokenized_text.prompt is not None:
            self._last_answer = LastAnswer(list(messages), system, list(tokenized_text.ids), tokenized_text.prompt, None)

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, atomically."""
        save_conversation(self.history, path)

    def load(self, path: Path) -> None:
        """Load a conversation. Raises EffllmError for a file that is not one; the current conversation is then unchanged."""
        history = load_conversation(path)
        self.messages, self.system, self.settings = history.messages, history.system, history.settings
