"""A model behind an API: requests in, events out. Clients send the whole conversation each time; only the KV cache survives from one
request to the next.

Every request carries its own `GenerationOptions`, so no state leaks into the next. The prefix that a prompt shares with a slot's cached
tokens is not prefilled again; with several slots, a request goes to the free one with the longest shared prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ... import ContextOverflow, EffllmError, UsageError
from ...offload.notes import Fallback, refuse_fallbacks
from ..audio.audio_file import decode_audio
from ..engine import Engine
from ..events import Call, Done, Event, Notice, Progress, PromptRead, TextDelta, Yield
from ..images.image_file import decode_image
from ..images.media import require_media
from ..images.modality import AUDIO_INPUT, IMAGE_INPUT, Modality
from ..images.video_file import decode_video
from ..prefill_chunks import MIN_SHIFT_CTX, context_overflow
from ..sampler import Sampler, SamplerSettings
from ..sampling.dry import breakers_of
from ..sampling.logprobs import TokenLogprobs, token_logprobs
from ..templates.prompt_builder import PromptBuilder
from ..tokenizer import Tokenizer
from ..tokens.infill import FimTokens, InfillContext, InfillPrompt, find_fim_tokens, infill_prompt
from ..tokens.plain_text import PlainText
from .answer import Answer, Reasoning
from .chat_prompts import ChatPrompts, Message
from .embedding_requests import EmbeddingRequests, known, never
from .slot import Slot

if TYPE_CHECKING:
    import numpy as np

    from ..adapters.adapter_selection import AdapterScales
    from ..constraints.constraint import CompiledConstraint, Constraint
    from ..images.media import MediaCache, MediaItem
    from ..sessions.prompt_cache import PromptCache
    from ..tool_calls.filter import CallFilter
    from ..tool_calls.tool_calling import Tools

COUNTED = 1 << 20  # characters; a shorter prompt is always tokenized, so that errors can state its exact length
SHRINKS = 4  # times by which normalization may shorten a text before it is tokenized, a generous bound
USUAL = 256  # tokens reserved for an infill completion without a limit


@dataclass(frozen=True)
class GenerationOptions:
    """How one request is answered. `think`: auto leaves reasoning to the model, on and off ask the chat template for it. `stops` are
    stop strings; `max_tokens` and `max_reasoning_tokens`: None for no limit; `ignore_eos` goes on after the end-of-text token.
    `logprobs`: report the log-probability of each token and of this many top alternatives, None for none. `echo`: return the prompt
    first, with its log-probabilities. `max_seconds`: after this long from the first token, end at the next complete line. `indent`: end
    before a line that is indented by fewer blanks. `infill_sampling`: llama.cpp's infill sampler, unless there is a `constraint`.
    `choice`: the scale of each LoRA adapter, None for `ServedModel.usual`. `translates`, `shifts`: see `Answer`. `anew`: reuse nothing
    of the KV cache for the prompt."""

    settings: SamplerSettings
    think: str = "auto"
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    constraint: Constraint | None = None
    logprobs: int | None = None
    echo: bool = False
    max_seconds: float | None = None
    indent: int = 0
    infill_sampling: bool = False
    choice: AdapterScales | None = None
    max_reasoning_tokens: int | None = None
    translates: bool = False
    shifts: bool = True
    anew: bool = False


class ServedModel(ChatPrompts, EmbeddingRequests):
    """One model with a slot for `engine` and one for each engine of `beside`, so that as many requests run at once. A request's
    `cancelled` is polled between tokens, between chunks of the prompt and while waiting for the disk. `usual`: adapter scales of
    requests that name none."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, kept: PromptCache | None = None, beside: Iterable[Engine] = ()) -> None:
        self.engine, self.tokenizer, self.kept = engine, tokenizer, kept
        self.usual = engine.adapter_scales
        self._prompts = self._other_prompts()
        self._slots = [Slot(engine, self._prompts, kept),
                           *(Slot(each, self._other_prompts(), kept and kept.beside(each)) for each in beside)]
        self._answers = 0
        self._vocabulary: CompiledConstraint | None = None

    def _other_prompts(self) -> PromptBuilder:
        """Which know of no text that is held."""
        return PromptBuilder(self.tokenizer, media=self.engine.media)

    def picture(self, data: bytes, source: str) -> MediaItem:
        """The picture in the bytes of a file, from any thread; it is at hand as long as the caller holds it. Raises UsageError that begins
        with its `source`."""
        return self.demand_sight().add(decode_image(data, source))

    def video(self, data: bytes, source: str) -> list[tuple[str, MediaItem]]:
        """As `picture`, of moments of a video: what stands before each, and the picture."""
        return self.demand_sight().add_video(decode_video(data, source))

    def sound(self, data: bytes, source: str) -> MediaItem:
        """As `picture`, of a sound."""
        return self.demand_hearing().add(self.samples(data, source))

    def samples(self, data: bytes, source: str) -> np.ndarray:
        """Decoded audio samples, float32 [n]. Raises EffllmError for a model without audio input."""
        self.demand_hearing()
        return decode_audio(data, source)

    def demand_sight(self) -> MediaCache:
        """Raises EffllmError for a model that takes no pictures, or whose pictures are not read here."""
        return require_media(self.engine.media)

    def demand_hearing(self) -> MediaCache:
        """Raises EffllmError for a model without audio input."""
        return require_media(self.engine.media, AUDIO_INPUT)

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self._takes(IMAGE_INPUT)

    @property
    def hears(self) -> bool:
        """Whether the model takes audio."""
        return self._takes(AUDIO_INPUT)

    def _takes(self, modality: Modality) -> bool:
        media = self.engine.media
        return media is not None and modality in media.encoders

    def reply(self, messages: Sequence[Message], options: GenerationOptions, tools: Tools | None = None,
              variables: Mapping[str, Any] | None = None, cancelled: Callable[[], bool] = never) -> Iterator[Event]:
        """Answer a conversation. Messages are dicts of `role`, `content` (text, a list of `{"type": "text", "text": ...}` parts, or None)
        and any other key that the chat template reads (`reasoning_content`, `name`), passed through as it is; so are `variables`, which
        override what `think` sets. Leading system messages become one system prompt. A final assistant message is continued. With `tools`
        the answer may contain tool calls, each an event of its own; earlier ones (`tool_calls`, and the role tool with `tool_call_id`) are
        rendered as the template wants them.

        Raises EffllmError before the first event if these messages cannot be answered.
        """
        prompt, said = self._asking(self._prompts, messages, options.think, tools, variables)
        calling = self._calling if tools else None
        if tools:
            options = replace(options, stops=options.stops + calling.stops(), constraint=calling.constraint(tools, options.constraint))
        for fallback in [*self._fallbacks(options.think), *(calling.fallbacks(tools) if tools else ())]:
            if self.engine.options.strict:
                refuse_fallbacks([Fallback(fallback)])
            yield Notice(fallback)
        prompt = self._prompts.going_on(prompt, said)
        self._demand_near(prompt)
        choice = self._choice(options)
        yield from self._looked(prompt, cancelled)
        with self.slot_for(prompt, choice) as own:
            ids = own.encoded(prompt, choice)
            if own.kept is not None:
                ids = yield from own.kept.switch_to(prompt, ids, own.prompts, choice=choice)
            own.engine.choose(choice)
            own.begin(options.anew)
            ids = own.encoded(prompt, choice) if options.anew else ids
            own.prompt = len(ids)
            think, marks = self.tokenizer.reasoning(ids, tools is not None), None
            if tools:
                think, marks = calling.reading(think, tools), calling.marks
            answer = yield from self._answer(own.engine, ids, options, cancelled, think, said, self._prompts.raw, marks)
            own.prompts.hold(prompt, ids, answer.tokens[: len(answer.tokens) - (answer.finish == "stop")], answer.text[len(said) :])

    def _looked(self, prompt: str, cancelled: Callable[[], bool]) -> Iterator[Event]:
        """See the pictures of a prompt, between whose pieces others go on where there are some: a tower takes seconds."""
        for event in self._other_prompts().encode(prompt, self.engine, cancelled):
            yield event
            if self.engine.batched_passes is not None and isinstance(event, Progress):
                yield Yield()

    def complete(self, prompt: str | Sequence[int], options: GenerationOptions, cancelled: Callable[[], bool] = never,
                 lasting: int | None = None) -> Iterator[Event]:
        """Continue text or token ids without a chat template; reasoning is part of the text. In an infill prompt (from `around`, or with
        the client's own markers) the other infill tokens end the completion. `lasting`: prompt tokens worth saving when another prompt
        takes the slot, None for all. Raises EffllmError before the first event."""
        ids = self._ids(prompt)
        ends = self.marks.ends if self.marks is not None and self.marks.prefix in ids else frozenset()
        choice = self._choice(options)
        with self.slot_for(ids, choice) as own:
            if own.kept is not None:
                ids = yield from own.kept.switch_to(None, ids, own.prompts, lasting, choice)
            own.engine.choose(choice)
            own.begin(options.anew)
            own.prompt = len(ids) if lasting is None else lasting
            is_scored = options.echo and options.logprobs is not None
            if options.echo:
                yield from self._echoed(own.engine, prompt, ids, options, cancelled)
            yield from self._answer(own.engine, ids, options, cancelled, None, raw=True, is_scored=is_scored, ends=ends)

    def demand_room(self, prompt: str | Sequence[int], options: GenerationOptions) -> None:
        """Raises what `complete` would for a prompt that cannot be continued; safe from any thread."""
        count, engine = len(self._ids(prompt)), self.engine
        may_shift = (engine.options.overflow == "shift" and engine.n_ctx >= MIN_SHIFT_CTX
                     and not (options.echo and options.logprobs is not None))
        if count >= engine.n_ctx and not may_shift:
            raise context_overflow(count, engine.n_ctx, engine.config.context_length)

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a raw prompt. Raises UsageError, and ContextOverflow for a text that is far too long."""
        if not prompt:
            raise UsageError("the prompt is empty", "send at least one character or token")
        if not isinstance(prompt, str):
            return self.demand_known(prompt)
        self._demand_near(prompt)
        return self.tokenizer.encode(prompt)

    @cached_property
    def marks(self) -> FimTokens | None:
        """The model's tokens for filling in the middle, None where it has none."""
        return find_fim_tokens(self.tokenizer.vocabulary(), self.tokenizer.special_tokens)

    @cached_property
    def _plain(self) -> PlainText:
        return PlainText(self.tokenizer, self.marks.ends)

    def around(self, gap: InfillContext, most: int | None, may_cut: bool) -> InfillPrompt:
        """The prompt that asks for what belongs into a gap, of `most` tokens; from any thread. Of what has no room the farthest is left out
        where that `may_cut`. Raises UsageError for a model that does not know how, ContextOverflow."""
        if self.marks is None:
            raise UsageError("this model has no fill-in-the-middle tokens", "use a model that was trained for it")
        if may_cut:  # before megabytes are tokenized
            far = self.engine.n_ctx * self._longest
            gap = InfillContext(gap.prefix[-far:], gap.suffix[:far], gap.begun, tuple((name, text[-far:]) for name, text in gap.files))
        self._demand_near(gap.begun if may_cut else gap.prefix + gap.suffix)
        begins = self.tokenizer.encode("a")[:1] == [self.tokenizer.bos_id]
        return infill_prompt(self.marks, gap, self._plain.first, self._plain.going_on, self.tokenizer.bos_id if begins else None,
                         self.engine.n_ctx, USUAL if most is None else most, may_cut)

    def _echoed(self, engine: Engine, prompt: str | Sequence[int], ids: list[int], options: GenerationOptions,
                cancelled: Callable[[], bool]) -> Iterator[Event]:
        """The text of the prompt, with log-probabilities if requested: then the whole prompt is prefilled from its first token."""
        room, may_shift = engine.n_ctx, engine.options.overflow == "shift" and options.logprobs is None
        if len(ids) >= room and not may_shift:  # before anything is sent
            raise ContextOverflow(f"the prompt has {len(ids)} tokens and the context holds {room}", "shorten it")
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids, False)
        if options.logprobs is None:
            yield TextDelta(text)
            return
        engine.cancelled = cancelled
        found = [TokenLogprobs(ids[0], None)]
        for start, logits in engine.score(ids):
            engine.demand_finite(logits)
            found += [token_logprobs(row, token, options.logprobs) for row, token in zip(logits, ids[start + 1 :])]
            yield Progress("reading the prompt", start + len(logits), len(ids), "tokens")
            if cancelled():
                return
            if engine.batched_passes is not None and start + len(logits) == len(engine.tokens):  # logits were read
                yield Yield()
        is_added = isinstance(prompt, str) and ids[0] == self.tokenizer.bos_id and ids[0] not in self.tokenizer.encode(prompt, False)[:1]
        yield TextDelta(text, tokens=tuple(found[is_added:]))

    def demand_known(self, ids: Sequence[int]) -> list[int]:
        """Token ids sent by a client. Raises UsageError for an id outside the vocabulary."""
        return known(ids, self.engine.config.vocab_size)

    def _choice(self, options: GenerationOptions) -> AdapterScales:
        return self.usual if options.choice is None else options.choice

    @contextmanager
    def slot_for(self, prompt: str | list[int], choice: AdapterScales) -> Iterator[Slot]:
        """A free slot for this prompt: the one that saves most prefill, else the least recently used. Raises RuntimeError if none is
        free."""
        free = [each for each in self._slots if each.is_free]
        if not free:
            raise RuntimeError(f"more than {len(self._slots)} answers at once")
        if len(free) > 1:
            plain = prompt if isinstance(prompt, list) else self._other_prompts().encoded(prompt)
            free.sort(key=lambda each: (-each.saves(prompt, plain, choice), each.used))
        with self._taken(free[0]) as own:
            yield own

    def _taken(self, own: Slot) -> AbstractContextManager[Slot]:
        self._answers += 1
        return own.taken(self._answers)

    def at_slot(self, number: int, act: Callable[[Slot], Iterator[Event]], cancelled: Callable[[], bool] = never) -> Iterator[Event]:
        """Run `act` on a slot, after the request that occupies it."""
        own = self._slots[number]
        while not own.is_free:
            if cancelled():
                return
            yield Yield()
        with self._taken(own):
            yield from act(own)

    def _answer(self, engine: Engine, ids: list[int], options: GenerationOptions, cancelled: Callable[[], bool],
                think: Reasoning | CallFilter | None, said: str = "", raw: bool = False, marks: Mapping[int, str] | None = None,
                is_scored: bool = False, ends: frozenset[int] = frozenset()) -> Generator[Event, None, Answer]:
        engine.cancelled = cancelled
        sampler = Sampler(options.settings, engine.config.vocab_size, breakers_of(self.tokenizer, options.settings))
        sampler.logprobs = options.logprobs
        answer = Answer(engine, self.tokenizer, sampler, think, options.stops, options.max_tokens, cancelled, options.ignore_eos,
                        self._held_to(options.constraint), options.think != "off", raw, said, marks, ends, options.max_seconds,
                        options.indent,
                        options.infill_sampling, options.max_reasoning_tokens, options.translates, options.shifts)
        try:
            is_read = False
            for event in answer.written(ids):
                if not is_read and isinstance(event, TextDelta | Call):
                    yield PromptRead(len(ids), engine.num_cached_tokens)
                    is_read = True
                yield event
        except EffllmError:
            raise
        except Exception:  # a pass was interrupted, by a disk error for example: the cache is in an unknown state
            engine.reset()
            raise
        stats = answer.cost(explained=False)  # clients do not ask why, and the next request waits
        if is_scored:  # its cached tokens were prefilled for this answer
            stats = replace(stats, cached_tokens=0)
        if not is_read:
            yield PromptRead(stats.prompt_tokens, stats.cached_tokens)
        yield from answer.remarks()
        yield Done(stats)
        return answer

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.vocabulary()))

    def _demand_near(self, text: str) -> None:
        """Raises ContextOverflow for a text too long at any tokenization: tokenizing 30 MB would take a gigabyte."""
        room = self.engine.n_ctx
        if self.engine.options.overflow == "shift" or len(text) <= COUNTED or len(text) <= SHRINKS * room * self._longest:
            return
        least = len(text) // self._longest
        raise ContextOverflow(f"the prompt has at least {least} tokens and the context holds {room}", "shorten it")

    def _held_to(self, constraint: Constraint | None) -> CompiledConstraint | None:
        if constraint is None:
            return None
        known = self._vocabulary
        self._vocabulary = known.holding(constraint) if known else constraint.opened(self.tokenizer, self.engine.config.vocab_size)
        return self._vocabulary

    def slots(self) -> list[tuple[bool, int]]:
        """For each slot: is it busy, and how many tokens it holds."""
        return [(not each.is_free, len(each.engine.tokens)) for each in self._slots]
