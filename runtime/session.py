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

SUMMARISE = "Summarise our conversation so far in a few sentences, keeping names, numbers and decisions."
SUMMARY_TOKENS = 2048  # that a summary may have, its reasoning included, where answers have fewer
CALLED_LAST = "(stopped here)"  # what the assistant said where it called tools and was not let go on: templates want roles to take turns
Message = dict[str, Any]


@dataclass(frozen=True)
class Answered:
    """How the last answer came about, to continue it: `ids` are its prompt and all its tokens, the first `prompt` of them the prompt."""

    messages: list[Message]
    system: str | None
    ids: list[int]
    prompt: int
    think: Reasoning | None


class Session:
    """`think`: auto leaves reasoning to the model, on and off ask the chat template for it. `stops` are stop strings, `constraint`
    constrains answers, `max_reasoning_tokens` limits the reasoning of each (None: no limit).

    Messages are dicts with `role` and `content`; the system prompt is kept apart in `system`. An answer may call `tools`: its message then
    has `tool_calls`, and the caller returns a result for each of the `open_calls` (`take_result`), then calls `go_on`.
    `from_process_start`: the first answer's time to first token counts from the start of the process, for one-shot commands.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: SamplerSettings, system: str | None = None, think: str = "auto",
                 stops: Sequence[str] = (), max_tokens: int | None = None, raw: bool = False, ignore_eos: bool = False,
                 from_process_start: bool = False, constraint: Constraint | None = None, max_reasoning_tokens: int | None = None) -> None:
        self.engine, self.tokenizer, self.system, self.think, self.stops = engine, tokenizer, system, think, tuple(stops)
        self.max_tokens, self.ignore_eos, self.max_reasoning_tokens = max_tokens, ignore_eos, max_reasoning_tokens
        self._prompts = PromptBuilder(tokenizer, raw, engine.media)
        self._pictures: set[MediaItem] = set()  # whose rows may be wanted again while the conversation lives
        self.raw = self._prompts.raw
        self.settings = settings
        self.hold_to(constraint)
        self.messages: list[Message] = []
        self.tools: Tools | None = None
        self.open_calls: list[Call] = []
        self.stats: Stats | None = None
        self._cancelled = False
        self.from_process_start = from_process_start
        self._said_raw, self._said_think, self._said_limit = raw, False, False
        engine.cancelled = lambda: self._cancelled
        self._said_folds = False
        self._answered: Answered | None = None
        self._counted: tuple[list[Message], str | None, int] = ([], system, 0)

    @property
    def settings(self) -> SamplerSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: SamplerSettings) -> None:
        """New settings start a new sampler; the old random state ends with it."""
        self._settings = settings
        self._sampler = Sampler(settings, self.engine.config.vocab_size, breakers_of(self.tokenizer, settings))

    @property
    def constraint(self) -> Constraint | None:
        """What answers are held to."""
        return self._compiled and self._compiled.source

    def hold_to(self, constraint: Constraint | None) -> None:
        """Constrain answers from now on, None to stop. Raises EffllmError, and then nothing changes."""
        self._compiled = constraint and constraint.compile(self.tokenizer, self.engine.config.vocab_size)

    @property
    def used(self) -> int:
        """Context tokens that the conversation fills: after an answer those in the KV cache; counted anew if the history was changed
        since (undo, load, another system prompt)."""
        if not self.messages:
            return 0
        messages, system, tokens = self._counted
        if messages != self.messages or system != self.system:
            tokens = self._count()
        return tokens

    def _count(self) -> int:
        try:
            tokens = self._prompts.count(self._prompt(reply=False))
        except EffllmError:  # a history that the template refuses is told when it is answered
            tokens = sum(len(self.tokenizer.encode(message["content"], add_special_tokens=False)) for message in self.messages)
        self._counted = list(self.messages), self.system, tokens
        return tokens

    def count(self, text: str) -> int:
        """Tokens of a text within a message."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def n_ctx(self) -> int:
        return self.engine.n_ctx

    def demand_sight(self, modality: Modality = IMAGE_INPUT) -> None:
        """Raises EffllmError for a model that takes no pictures, or no sounds, or whose are not read here."""
        require_media(self.engine.media, modality)

    def picture(self, points: np.ndarray) -> MediaItem:
        """The picture of points uint8 [height, width, 3], or the sound of samples float32 [n], for `ask`; its rows are kept while the
        conversation lives. Raises EffllmError."""
        made = require_media(self.engine.media, modality_of(points)).add(points)
        self._pictures.add(made)
        return made

    def film(self, frames: Sequence[Frame]) -> list[tuple[str, MediaItem]]:
        """As `picture`, of moments of a video: what stands before each, and the picture, or what is seen as one."""
        made = require_media(self.engine.media).add_video(frames)
        self._pictures.update(each for _, each in made)
        return made

    def cancel(self) -> None:
        """Stop the running answer after the current token. Safe in a signal handler."""
        self._cancelled = True

    @property
    def was_cancelled(self) -> bool:
        """Was the last answer cancelled?"""
        return self.stats is not None and self.stats.finish_reason == "cancelled"

    # -- turns -----------------------------------------------------------------------------------------------------------------

    def ask(self, text: str, shown: Sequence[MediaItem | str] = ()) -> Iterator[Event]:
        """One turn: append the user's message, with what is `shown` before its words: pictures that it is about, and words before each;
        answer it. A prompt that cannot be answered leaves the history as it was."""
        if not text.strip() and not shown:
            raise UsageError("the prompt is empty", "give a prompt, or -f FILE")
        before = list(self.messages)
        self._pictures.update(each for each in shown if not isinstance(each, str))
        if before and before[-1]["role"] == "tool":
            self.messages.append({"role": "assistant", "content": CALLED_LAST})
        pieces = [each if isinstance(each, str) else each.mark for each in shown]
        self.messages.append({"role": "user", "content": "\n".join([*pieces, *([text] if text.strip() else [])])})
        yield from self._guarded(before)
        if self.messages and self.messages[-1]["role"] == "user":  # nothing was said: two questions in a row would confuse a template
            self.messages = before

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
        self._pictures.update(pictures)
        self.messages.append(self._turns.result(call, "\n".join([text, *(each.mark for each in pictures)])))

    def go_on(self) -> Iterator[Event]:
        """Answer after tool results."""
        yield from self._guarded(list(self.messages))

    def regenerate(self) -> Iterator[Event]:
        """Answer the last user message again; the random state advances, so the answer may differ."""
        if not any(message["role"] == "user" for message in self.messages):
            raise UsageError("nothing to answer again", "ask something first")
        before, last = list(self.messages), self._answered
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        yield from self._guarded(before)
        if self.messages[-1]["role"] == "user":  # stopped before anything was said: the answer of before stands
            self.messages, self._answered = before, last

    def continue_(self) -> Iterator[Event]:
        """Continue the last answer where it was cut off, or after the tool calls it made."""
        if self.messages and self.messages[-1]["role"] == "tool":
            yield from self.go_on()
            return
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UsageError("there is no answer to continue", "ask something first")
        before, last = list(self.messages), self._answered
        resumed = last if last and last.messages == before and last.system == self.system else None
        said = self.messages.pop()["content"]
        yield from self._guarded(before, said, resumed)
        if self.messages[-1]["role"] == "user":  # stopped before anything was added
            self.messages, self._answered = before, last

    def _guarded(self, before: list[Message], said: str = "", resumed: Answered | None = None) -> Iterator[Event]:
        """A turn that restores the history if it cannot begin, or ends before any text."""
        try:
            yield from self._turn(said, resumed)
        except EffllmError:
            self.messages, self._answered, self.open_calls = before, resumed, []
            raise
        except BaseException:
            if not self.messages or self.messages[-1]["role"] == "user":
                self.messages, self._answered = before, resumed
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
        self._pictures.clear()
        self.engine.reset()

    def compact(self) -> Iterator[Event]:
        """Replace the history by a summary that the model writes. It has a token limit of its own, no constraint and no tools; a summary
        that hits the limit is discarded."""
        if not self.messages:
            raise UsageError("there is nothing to summarise", "ask something first")
        before, constraint, most, tools = list(self.messages), self._compiled, self.max_tokens, self.tools
        self._compiled, self.max_tokens, self.tools = None, most and max(most, SUMMARY_TOKENS), None
        self.messages.append({"role": "user", "content": SUMMARISE})
        finished = False
        try:
            yield from self._turn()
            finished = self.stats is not None and self.stats.finish_reason == "stop" and bool(self.messages[-1]["content"].strip())
        finally:
            self._compiled, self.max_tokens, self.tools = constraint, most, tools
            summary = self.messages[-1]["content"].strip() if finished else ""
            self.messages = [{"role": "user", "content": SUMMARISE}, {"role": "assistant", "content": summary}] if finished else before
        if not finished:
            yield Notice("no summary was completed: the history is unchanged")

    def _turn(self, said: str = "", resumed: Answered | None = None) -> Iterator[Event]:
        """Answer `messages`; `said` is the prefill. With `resumed`, its own tokens are continued, reasoning included; otherwise the
        prefill's text is tokenized again."""
        self._cancelled, self.open_calls = False, []
        prompt = self._prompt()
        if not resumed:
            prompt = self._prompts.with_answer_prefix(prompt, said)
        if self.raw and not self._said_raw:
            self._said_raw = True
            yield self._fallback(NO_TEMPLATE)
        if not self._said_think and (why := self.tokenizer.unsupported_think(self.think)):
            self._said_think = True
            yield self._fallback(f"--think {self.think} has no effect: {why}")
        if not self._said_limit and self.max_reasoning_tokens is not None and not self.tokenizer.thinks:
            self._said_limit = True
            yield Notice(NOTHING_TO_LIMIT)
        if self._prompts.folds_system and not self._said_folds:
            self._said_folds = True
            yield self._fallback(NO_SYSTEM_ROLE)
        if not resumed:
            yield from self._prompts.encode_media(prompt, self.engine, lambda: self._cancelled)
        ids = resumed.ids if resumed else self._prompts.tokenize(prompt)
        first = resumed.prompt if resumed else len(ids)
        think, self._answered = self._reading(ids, resumed), None
        marks = None if resumed or not self.tools else self._turns.calling.visible_tokens
        answer = yield from self._answer(ids, said, think, self.messages, resumed is not None, marks)
        made = [*ids[first:], *self.stats.token_ids[: len(self.stats.token_ids) - (self.stats.finish_reason == "stop")]]
        self._prompts.record_cached(prompt, ids[:first], made, answer.text if resumed else answer.text[len(said) :])
        if self.messages[-1]["role"] == "assistant":
            self._counted = list(self.messages), self.system, len(self.engine.tokens)
            said_so = Answered(list(self.messages), self.system, ids[:first] + made, first, answer.think)
            self._answered = said_so if answer.is_exact and self.tools is None else None

    def _fallback(self, text: str) -> Notice:
        if self.engine.options.strict:
            refuse_fallbacks([Fallback(text)])
        return Notice(text)

    def _prompt(self, reply: bool = True) -> str:
        """The rendered history; with `reply`, up to where the answer begins."""
        prompts, options = self._prompts, {"add_generation_prompt": reply}
        if self.tools is None and not any(message["role"] == "tool" for message in self.messages):
            return prompts.render(self.messages, self.system, self.think, options)
        return self._turns.rendered(prompts, self.messages, self.system, self.think, options, self.tools)

    @cached_property
    def _turns(self) -> ToolMessages:
        """Tool messages, for conversations that have any."""
        from .tool_calls.tool_messages import ToolMessages

        return ToolMessages(self.tokenizer)

    def _reading(self, ids: list[int], resumed: Answered | None) -> Reasoning | CallFilter | None:
        """The parser that separates reasoning and tool calls from content."""
        if resumed:
            return copy.copy(resumed.think)
        think = self.tokenizer.reasoning(ids, self.tools is not None)
        return think if self.tools is None else self._turns.calling.call_filter(think, self.tools)

    @property
    def _held(self) -> CompiledConstraint | None:
        """The compiled constraint of an answer: tool calls, or else the session's constraint."""
        constraint = self._turns.calling.constraint(self.tools, self.constraint) if self.tools else self.constraint
        if constraint is None or constraint == self.constraint:
            return self._compiled if constraint else None
        if self._compiled:
            return self._compiled.compile_other(constraint)
        return constraint.compile(self.tokenizer, self.engine.config.vocab_size)

    # -- the answer ------------------------------------------------------------------------------------------------------------

    def _answer(self, ids: list[int], said: str, think: Reasoning | CallFilter | None, history: list[Message] | None = None,
                inside: bool = False, marks: Mapping[int, str] | None = None) -> Generator[Event, None, Answer]:
        """Prefill and stream the answer; `inside`: the prompt ends within the answer."""
        answer = Answer(self.engine, self.tokenizer, self._sampler, think, self.stops, self.max_tokens, lambda: self._cancelled,
                        self.ignore_eos, self._held, self.think != "off", self.raw, said, marks,
                        max_reasoning_tokens=self.max_reasoning_tokens)
        try:
            yield from answer.generate(ids, inside)
        finally:
            if history is not None and answer.calls:
                message, self.open_calls = self._turns.calling_message(answer.text, "".join(answer.reasoning_parts), answer.calls)
                history.append(message)
            elif history is not None and (answer.tokens or said):
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
    def spoken(self) -> TokenizedText | None:
        """How the text so far was tokenized, where that is known."""
        text, ids = self._prompts.cached
        last = self._answered
        whole = last is not None and last.think is None and last.ids == ids and (last.messages, last.system) == (self.messages, self.system)
        return TokenizedText(text, tuple(ids), last.prompt if whole else None) if text else None

    def take_up(self, messages: list[Message], system: str | None, spoken: TokenizedText | None = None) -> None:
        """Replace the conversation by this one."""
        self.messages, self.system = messages, system
        self._prompts.cached = ("", []) if spoken is None else (spoken.text, list(spoken.ids))
        self._answered = None
        if spoken is not None and spoken.prompt is not None:
            self._answered = Answered(list(messages), system, list(spoken.ids), spoken.prompt, None)

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, atomically."""
        save_conversation(self.history, path)

    def load(self, path: Path) -> None:
        """Load a conversation. Raises EffllmError for a file that is not one; the current conversation is then unchanged."""
        history = load_conversation(path)
        self.messages, self.system, self.settings = history.messages, history.system, history.settings
