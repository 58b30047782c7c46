"""A conversation: text in, events out. Holds the messages, the sampler and the filters between token ids and what a person reads.

The engine's cache stays between turns. A turn renders the whole history through the chat template, and the engine runs only the
tokens after the common prefix with what it holds. `cancel` may be called from a signal handler: it sets a flag that the running
answer looks at between tokens and between chunks of the prompt, so nothing is ever left half done.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import EffllmError, UsageError
from ..offload import hardware
from ..offload.notes import Fallback, refuse_fallbacks
from .conversation_file import History, load_conversation, save_conversation
from .engine import Engine
from .events import Done, Event, Notice, Stats, TextDelta
from .sampler import Sampler, SamplerSettings
from .saved_format import Spoken
from .stream_filters import ChannelFilter, StopStrings, ThinkFilter
from .template import TemplateRefused
from .text import Tokenizer

if TYPE_CHECKING:
    from .constraint import Form

SUMMARISE = "Summarise our conversation so far in a few sentences, keeping names, numbers and decisions."
ANSWER_CHANNEL = "<|channel|>final<|message|>"
NO_TEMPLATE = "this is a base model without a chat template: it continues the text as it stands"
NO_SYSTEM_ROLE = "this model's chat template has no system role: the system prompt goes in front of the first message"
Message = dict[str, str]
Reasoning = ThinkFilter | ChannelFilter


@dataclass(frozen=True)
class Answered:
    """How the last answer came about, for going on with it: `ids` are its prompt and all its tokens, of which `prompt` came from the
    prompt; `think` tells reasoning from the answer and stands where the text stopped."""

    messages: list[Message]
    system: str | None
    ids: list[int]
    prompt: int
    think: Reasoning | None


class Session:
    """`think`: auto leaves reasoning to the model, on and off ask its template for it. `stops` are strings that end an answer, `form` is
    what answers are held to.

    Messages are dicts with `role` and `content`, the system prompt kept apart in `system`. `from_process_start`: the first answer's time
    to first token counts from the start of the process, as for a command that does nothing else.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: SamplerSettings, system: str | None = None, think: str = "auto",
                 stops: Sequence[str] = (), max_tokens: int | None = None, raw: bool = False, ignore_eos: bool = False,
                 from_process_start: bool = False, form: Form | None = None) -> None:
        self.engine, self.tokenizer, self.system, self.think, self.stops = engine, tokenizer, system, think, tuple(stops)
        self.max_tokens, self.ignore_eos = max_tokens, ignore_eos
        self.raw = raw or tokenizer.template is None
        self.settings = settings
        self.hold_to(form)
        self.messages: list[Message] = []
        self.stats: Stats | None = None
        self._cancelled = False
        self.from_process_start = from_process_start
        self._said_raw, self._said_think = raw, False
        engine.cancelled = lambda: self._cancelled
        self._folds = self._said_folds = False  # whether the system prompt goes in front of the first message
        self._held: tuple[str, list[int]] = ("", [])
        self._answered: Answered | None = None
        self._counted: tuple[list[Message], str | None, int] = ([], system, 0)

    @property
    def settings(self) -> SamplerSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: SamplerSettings) -> None:
        """New settings start a new sampler; the old random state ends with it."""
        self._settings = settings
        self._sampler = Sampler(settings, self.engine.config.vocab_size)

    @property
    def form(self) -> Form | None:
        """What answers are held to."""
        return self._form and self._form.form

    def hold_to(self, form: Form | None) -> None:
        """Hold answers to a form from now on, or to none. Raises EffllmError, and what was stays."""
        self._form = form and form.opened(self.tokenizer, self.engine.config.vocab_size)

    @property
    def used(self) -> int:
        """Tokens of the context that the conversation fills. After an answer they are those that the cache holds; where the history was
        changed since (undo, load, another system prompt), it is counted anew."""
        if not self.messages:
            return 0
        messages, system, tokens = self._counted
        if messages != self.messages or system != self.system:
            tokens = self._count()
        return tokens

    def _count(self) -> int:
        try:
            tokens = len(self._encode(self._prompt(reply=False)))
        except EffllmError:  # a history that the template refuses is told when it is answered
            tokens = sum(len(self.tokenizer.encode(message["content"], add_special_tokens=False)) for message in self.messages)
        self._counted = list(self.messages), self.system, tokens
        return tokens

    def count(self, text: str) -> int:
        """Tokens of a piece of text in a message."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def n_ctx(self) -> int:
        return self.engine.n_ctx

    def cancel(self) -> None:
        """End the running answer after the current token. Safe in a signal handler."""
        self._cancelled = True

    # -- turns -----------------------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> Iterator[Event]:
        """One turn: append the user's message, answer it. A prompt that cannot be answered leaves the history as it was."""
        if not text.strip():
            raise UsageError("the prompt is empty", "give a prompt, or -f FILE")
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        yield from self._guarded(before)
        if self.messages and self.messages[-1]["role"] == "user":  # nothing was said: two questions in a row would confuse a template
            self.messages = before

    def complete(self, text: str) -> Iterator[Event]:
        """Continue a text as it stands, without a template and without a history."""
        if not text:
            raise UsageError("the prompt is empty", "give a prompt, or -f FILE")
        self._cancelled = False
        ids = self.tokenizer.encode(text)
        yield from self._answer(ids, "", self.tokenizer.reasoning(ids))

    def regenerate(self) -> Iterator[Event]:
        """Answer the last user message again; the random state goes on, so the answer may differ."""
        if not any(message["role"] == "user" for message in self.messages):
            raise UsageError("nothing to answer again", "ask something first")
        before, last = list(self.messages), self._answered
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        yield from self._guarded(before)
        if self.messages[-1]["role"] == "user":  # stopped before anything was said: the answer of before stands
            self.messages, self._answered = before, last

    def continue_(self) -> Iterator[Event]:
        """Go on with the last answer where it was cut."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UsageError("there is no answer to continue", "ask something first")
        before, last = list(self.messages), self._answered
        resumed = last if last and last.messages == before and last.system == self.system else None
        said = self.messages.pop()["content"]
        yield from self._guarded(before, said, resumed)
        if self.messages[-1]["role"] == "user":  # stopped before anything was added
            self.messages, self._answered = before, last

    def _guarded(self, before: list[Message], said: str = "", resumed: Answered | None = None) -> Iterator[Event]:
        """A turn that leaves the history as it was when it cannot begin, or ends before anything was said."""
        try:
            yield from self._turn(said, resumed)
        except EffllmError:
            self.messages, self._answered = before, resumed
            raise
        except BaseException:
            if not self.messages or self.messages[-1]["role"] == "user":
                self.messages, self._answered = before, resumed
            raise

    def undo(self) -> bool:
        """Forget the last question and its answer; False when there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                del self.messages[index:]
                return True
        return False

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self.messages = []
        self.engine.reset()

    def compact(self) -> Iterator[Event]:
        """Ask the model for a summary and put it in the place of the history."""
        if not self.messages:
            raise UsageError("there is nothing to summarise", "ask something first")
        before, form, self._form = list(self.messages), self._form, None
        self.messages.append({"role": "user", "content": SUMMARISE})
        finished = False
        try:
            yield from self._turn()
            finished = self.stats is not None and self.stats.finish_reason == "stop" and bool(self.messages[-1]["content"].strip())
        finally:
            self._form = form
            summary = self.messages[-1]["content"].strip() if finished else ""
            self.messages = [{"role": "user", "content": SUMMARISE}, {"role": "assistant", "content": summary}] if finished else before
        if not finished:
            yield Notice("no summary came to its end: the history stays as it was")

    def _turn(self, said: str = "", resumed: Answered | None = None) -> Iterator[Event]:
        """Answer `messages`; `said` is the beginning of the answer that was given before. With `resumed` its own tokens are gone on with,
        reasoning included; else its text is encoded again."""
        self._cancelled = False
        prompt = self._prompt()
        if said and not resumed:  # an answer goes on behind its reasoning, also where the template opens one
            tags = self.tokenizer.think_tags
            closing = f"{tags.close}\n\n" if tags and tags.opened_by(prompt) else ANSWER_CHANNEL if self.tokenizer.channels else ""
            prompt += closing + said
        if self.raw and not self._said_raw:
            self._said_raw = True
            yield self._fallback(NO_TEMPLATE)
        if not self._said_think and (why := self.tokenizer.unmoved(self.think)):
            self._said_think = True
            yield self._fallback(f"--think {self.think} changes nothing: {why}")
        if self._folds and not self._said_folds:
            self._said_folds = True
            yield self._fallback(NO_SYSTEM_ROLE)
        ids = resumed.ids if resumed else self._encode(prompt)
        first = resumed.prompt if resumed else len(ids)
        think, self._answered = copy.copy(resumed.think) if resumed else self.tokenizer.reasoning(ids), None
        text, exact, think = yield from self._answer(ids, said, think, self.messages, resumed is not None)
        made = [*ids[first:], *self.stats.token_ids[: len(self.stats.token_ids) - (self.stats.finish_reason == "stop")]]
        answer = text if resumed else text[len(said) :]
        self._held = (prompt + answer, ids[:first] + made) if self.tokenizer.decode(made) == answer else ("", [])
        if self.messages[-1]["role"] == "assistant":
            self._counted = list(self.messages), self.system, len(self.engine.tokens)
            self._answered = Answered(list(self.messages), self.system, ids[:first] + made, first, think) if exact else None

    def _fallback(self, text: str) -> Notice:
        if self.engine.options.strict:
            refuse_fallbacks([Fallback(text)])
        return Notice(text)

    def _encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt. Where it continues what the cache holds, the ids of the answer as it was sampled are kept: encoding its
        text again may cut it differently, and the cache would be thrown away from there on."""
        text, ids = self._held
        if text and prompt.startswith(text):
            rest = self.tokenizer.encode(prompt[len(text) :], add_special_tokens=False)
            if not rest or rest[0] in self.tokenizer.stop_ids:
                return ids + rest
        return self.tokenizer.encode(prompt, add_special_tokens=self.raw)

    def _prompt(self, reply: bool = True) -> str:
        """The history as the model reads it, up to where its `reply` begins. A system prompt that the template refuses, or drops, goes in
        front of the first message."""
        if self.raw:
            return "".join([self.system or "", *(message["content"] for message in self.messages)])
        thinking = {} if self.think == "auto" else self.tokenizer.thinking(self.think == "on")
        said = [self.system] if self.system else []
        if self.think == "off" and self.tokenizer.no_think:
            said.append(self.tokenizer.no_think)
        render = partial(self.tokenizer.render_chat, add_generation_prompt=reply, **thinking)
        if not said:
            return render(self.messages)
        if not self._folds:
            try:
                prompt = render([{"role": "system", "content": "\n".join(said)}, *self.messages])
            except TemplateRefused:
                prompt = "" if self.system else render(self.messages)
            if not self.system or self.system.strip() in prompt:
                return prompt
        first, *rest = self.messages
        prompt = render([{**first, "content": f"{self.system}\n\n{first['content']}"}, *rest])
        self._folds = True
        return prompt

    # -- the answer ------------------------------------------------------------------------------------------------------------

    def _answer(self, ids: list[int], said: str, think: Reasoning | None, history: list[Message] | None = None,
                inside: bool = False) -> Generator[Event, None, tuple[str, bool, Reasoning | None]]:
        """Run the prompt and stream the answer; `inside`: the prompt ends in the midst of it. However it ends, what was said goes into
        `history`. Returns its text, whether its tokens say just that, and `think` as it stood at the last of them."""
        engine = self.engine
        started, first_at = time.monotonic(), None
        read_before = engine.disk_traffic
        before, drafted = (engine.prefill_s, engine.decode_s, engine.passes_s), engine.speculation and engine.speculation.counts
        tokens: list[int] = []
        shown: list[str] = [said]
        thought: list[str] = []
        stops = StopStrings(self.stops, said)
        stream = self.tokenizer.stream(ids if self.raw or said or inside else ())
        held = self._form and self._form.begin(said, self.raw or inside, think, self.think != "off", ids if inside else ())
        self._sampler.narrow = held and held.narrow
        if engine.speculation is not None:
            engine.speculation.forced = held and held.forced
        finish = "length"

        def split(text: str) -> list[tuple[str, str]]:
            """Parts of a piece, noted. What was said before loses half a character that is whole now, and how a stop string began."""
            shown[0] = shown[0].removesuffix(stream.taken_back)
            shown[0] = shown[0][: len(shown[0]) - stops.overlap]
            stream.taken_back, stops.overlap = "", 0
            parts = think.push(text) if think else [("answer", text)] if text else []
            for kind, part in parts:
                (shown if kind == "answer" else thought).append(part)
            return parts

        try:
            for progress in engine.prefill(ids):
                yield progress
                if self._cancelled:
                    break
            finish = "cancelled" if self._cancelled else finish
            if engine.truncated:
                yield Notice(f"the prompt of {len(ids)} tokens is longer than the context: its middle was dropped (--overflow shift)")
            dropped, read_before = engine.truncated, engine.disk_traffic
            if finish != "cancelled" and self.max_tokens != 0:
                for step in engine.generate(self._sampler, self.max_tokens, self.tokenizer.stop_ids, self.ignore_eos and not held):
                    tokens.append(step.token)
                    first_at = first_at or time.monotonic()
                    ends = step.finish == "stop"
                    text = "" if ends else stream.push(step.token)
                    for kind, part in split(stops.push(text)):
                        yield TextDelta(part, kind)
                    if held:
                        held.took(step.token, think is not None and not think.at_answer)
                    yield from (Notice(line) for line in engine.announcements())
                    if engine.truncated and not dropped:
                        dropped = True
                        yield Notice("the context is full: its middle was dropped to go on (--overflow shift)")
                    finish = "stop" if stops.hit else "cancelled" if self._cancelled else step.finish or finish
                    if stops.hit or self._cancelled or step.finish:
                        break
                else:
                    finish = "cancelled" if self._cancelled else finish
            parts = [] if stops.hit else split(stops.push(stream.flush()) + stops.flush())
            stood = copy.copy(think)
            for kind, part in think.flush() if think else ():
                (shown if kind == "answer" else thought).append(part)
                parts.append((kind, part))
            for kind, part in parts:
                yield TextDelta(part, kind)
        except KeyboardInterrupt:  # a pass was left in its middle: what the cache holds is not known
            engine.reset()
            raise
        finally:
            if history is not None and (tokens or said):
                history.append({"role": "assistant", "content": "".join(shown)})
        origin = time.monotonic() - hardware.process_age() if self.from_process_start else started
        self.from_process_start = False
        took = [now - then for now, then in zip((engine.prefill_s, engine.decode_s, engine.passes_s), before)]
        from .outcome import stats  # not on the way to the first token

        self.stats = stats(engine, "".join(shown[1:]), tokens, "length" if finish == "context" else finish, self._sampler.seed, len(ids),
                           (first_at or time.monotonic()) - origin, *took, drafted and engine.speculation.counts.since(drafted),
                           engine.disk_traffic.since(read_before))
        if held and finish != "cancelled" and not held.is_whole:
            yield Notice(f"the answer ends before it is whole as {self.form.flag} wants it")
        if finish == "context":
            larger = "" if engine.n_ctx >= engine.config.context_length else "-c for a larger one, "
            yield Notice(f"the context of {engine.n_ctx} tokens is full: the answer ends here ({larger}--overflow shift to go on)")
        yield Done(self.stats)
        return "".join(shown), not stops.hit, stood

    # -- files -----------------------------------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        return History(list(self.messages), self.system, self.settings)

    @property
    def spoken(self) -> Spoken | None:
        """How the text up to here was cut into tokens, where it is known."""
        text, ids = self._held
        last = self._answered
        whole = last is not None and last.think is None and last.ids == ids and (last.messages, last.system) == (self.messages, self.system)
        return Spoken(text, tuple(ids), last.prompt if whole else None) if text else None

    def take_up(self, messages: list[Message], system: str | None, spoken: Spoken | None = None) -> None:
        """Let the conversation be this one."""
        self.messages, self.system = messages, system
        self._held = ("", []) if spoken is None else (spoken.text, list(spoken.ids))
        self._answered = None
        if spoken is not None and spoken.prompt is not None:
            self._answered = Answered(list(messages), system, list(spoken.ids), spoken.prompt, None)

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, whole or not at all."""
        save_conversation(self.history, path)

    def load(self, path: Path) -> None:
        """Read a conversation back. Raises EffllmError for a file that is not one; the current conversation is then untouched."""
        history = load_conversation(path)
        self.messages, self.system, self.settings = history.messages, history.system, history.settings
