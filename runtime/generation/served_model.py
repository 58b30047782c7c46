"""Answers for programs, which send all messages each time: nothing is kept from one to the next but what the cache holds.

Each comes with a wish of its own (how it is sampled, where it ends, what it is held to), so that nothing of one request is left in the
next. What a prompt has in common with what was read and written last is not read again, as in a conversation. Where several are answered
at once, each goes to that sequence of the free ones which has most in common with it.
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
from ..prefill_chunks import SHORTEST, too_long
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

COUNTED = 1 << 20  # letters of a text that is cut in any case, to say how many tokens it has
SHRINKS = 4  # times that a text may become shorter before it is cut into tokens, generously
USUAL = 256  # tokens that are kept free behind a gap that is filled in, where no limit is given


@dataclass(frozen=True)
class GenerationOptions:
    """What one answer is to be. `think`: auto leaves reasoning to the model, on and off ask its template for it. `stops` end the answer,
    `max_tokens` too (None: no limit); with `ignore_eos` it goes on behind the model's end of text. `form` is what it is held to.
    `tells`: how likely each token was is told, and of so many of the likeliest beside it (None: nothing is). `echo`: a text comes first
    that it is to continue, with the same of its tokens. `most_s`: seconds behind its first token after which it ends, if it has a whole
    line by then. `indent`: it ends before a line that is indented by fewer blanks. `sure`: it has what the model is sure of, and ends
    where that is nothing, unless it has a form. `choice`: how much of each adapter it has, None for what `ServedModel.usual` says.
    `most_thought`: so many of its tokens may be reasoning (None: no limit). `translates`, `shifts`: as of `Answer`. `anew`: its prompt
    is read as if nothing of it were held."""

    settings: SamplerSettings
    think: str = "auto"
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    form: Constraint | None = None
    tells: int | None = None
    echo: bool = False
    most_s: float | None = None
    indent: int = 0
    sure: bool = False
    choice: AdapterScales | None = None
    most_thought: int | None = None
    translates: bool = False
    shifts: bool = True
    anew: bool = False


class ServedModel(ChatPrompts, EmbeddingRequests):
    """One model and one sequence, as Engine, for one answer after the other; `beside` are engines of others, for as many more at once.
    `cancelled` of an answer is asked between tokens, between chunks of the prompt and while the disk is waited for, and ends it. `usual`:
    how much of each adapter answers have that do not say it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, kept: PromptCache | None = None, beside: Iterable[Engine] = ()) -> None:
        self.engine, self.tokenizer, self.kept = engine, tokenizer, kept
        self.usual = engine.choice
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
        """Those of a sound, float32 [n], for a model that hears. Raises EffllmError."""
        self.demand_hearing()
        return decode_audio(data, source)

    def demand_sight(self) -> MediaCache:
        """Raises EffllmError for a model that takes no pictures, or whose pictures are not read here."""
        return require_media(self.engine.media)

    def demand_hearing(self) -> MediaCache:
        """As `check_modality`, of sounds."""
        return require_media(self.engine.media, AUDIO_INPUT)

    @property
    def sees(self) -> bool:
        """Whether pictures can be sent."""
        return self._takes(IMAGE_INPUT)

    @property
    def hears(self) -> bool:
        """Whether sounds can be sent."""
        return self._takes(AUDIO_INPUT)

    def _takes(self, modality: Modality) -> bool:
        media = self.engine.media
        return media is not None and modality in media.encoders

    def reply(self, messages: Sequence[Message], wish: GenerationOptions, tools: Tools | None = None,
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
        choice = self._choice(wish)
        yield from self._looked(prompt, cancelled)
        with self.slot_for(prompt, choice) as own:
            ids = own.encoded(prompt, choice)
            if own.kept is not None:
                ids = yield from own.kept.turn_to(prompt, ids, own.prompts, choice=choice)
            own.engine.choose(choice)
            own.begin(wish.anew)
            ids = own.encoded(prompt, choice) if wish.anew else ids
            own.prompt = len(ids)
            think, marks = self.tokenizer.reasoning(ids, tools is not None), None
            if tools:
                think, marks = calling.reading(think, tools), calling.marks
            answer = yield from self._answer(own.engine, ids, wish, cancelled, think, said, self._prompts.raw, marks)
            own.prompts.hold(prompt, ids, answer.tokens[: len(answer.tokens) - (answer.finish == "stop")], answer.text[len(said) :])

    def _looked(self, prompt: str, cancelled: Callable[[], bool]) -> Iterator[Event]:
        """See the pictures of a prompt, between whose pieces others go on where there are some: a tower takes seconds."""
        for event in self._other_prompts().encode(prompt, self.engine, cancelled):
            yield event
            if self.engine.shares is not None and isinstance(event, Progress):
                yield Yield()

    def complete(self, prompt: str | Sequence[int], wish: GenerationOptions, cancelled: Callable[[], bool] = never,
                 lasting: int | None = None) -> Iterator[Event]:
        """Continue a text, or token ids, as they stand, without a template; reasoning is a part of the text. Behind a place to fill in, as
        `around` or a program marks it, other marks end what is written. `lasting`: tokens of the prompt that are worth keeping when another
        takes its place, None for all. Raises EffllmError before the first event."""
        ids = self._ids(prompt)
        ends = self.marks.ends if self.marks is not None and self.marks.prefix in ids else frozenset()
        choice = self._choice(wish)
        with self.slot_for(ids, choice) as own:
            if own.kept is not None:
                ids = yield from own.kept.turn_to(None, ids, own.prompts, lasting, choice)
            own.engine.choose(choice)
            own.begin(wish.anew)
            own.prompt = len(ids) if lasting is None else lasting
            is_scored = wish.echo and wish.tells is not None
            if wish.echo:
                yield from self._echoed(own.engine, prompt, ids, wish, cancelled)
            yield from self._answer(own.engine, ids, wish, cancelled, None, raw=True, is_scored=is_scored, ends=ends)

    def demand_room(self, prompt: str | Sequence[int], wish: GenerationOptions) -> None:
        """From any thread: raises, as `complete` does, for a prompt that cannot be continued."""
        count, engine = len(self._ids(prompt)), self.engine
        may_shift = engine.options.overflow == "shift" and engine.n_ctx >= SHORTEST and not (wish.echo and wish.tells is not None)
        if count >= engine.n_ctx and not may_shift:
            raise too_long(count, engine.n_ctx, engine.config.context_length)

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt that is taken as it stands. Raises UsageError, ContextOverflow for a text that is much too long."""
        if not prompt:
            raise UsageError("the prompt is empty", "send at least one letter or token")
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
            raise UsageError("this model has no tokens for filling in the middle", "ask one that was trained for it")
        if may_cut:  # before megabytes of it are made tokens
            far = self.engine.n_ctx * self._longest
            gap = InfillContext(gap.prefix[-far:], gap.suffix[:far], gap.begun, tuple((name, text[-far:]) for name, text in gap.files))
        self._demand_near(gap.begun if may_cut else gap.prefix + gap.suffix)
        begins = self.tokenizer.encode("a")[:1] == [self.tokenizer.bos_id]
        return infill_prompt(self.marks, gap, self._plain.first, self._plain.going_on, self.tokenizer.bos_id if begins else None,
                         self.engine.n_ctx, USUAL if most is None else most, may_cut)

    def _echoed(self, engine: Engine, prompt: str | Sequence[int], ids: list[int], wish: GenerationOptions,
                cancelled: Callable[[], bool]) -> Iterator[Event]:
        """The text of a prompt, with how likely its tokens are where that is told: they are read from the first one on."""
        room, may_shift = engine.n_ctx, engine.options.overflow == "shift" and wish.tells is None
        if len(ids) >= room and not may_shift:  # before the first of it is sent
            raise ContextOverflow(f"the prompt has {len(ids)} tokens and the context holds {room}", "shorten it")
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids, False)
        if wish.tells is None:
            yield TextDelta(text)
            return
        engine.cancelled = cancelled
        found = [TokenLogprobs(ids[0], None)]
        for start, logits in engine.score(ids):
            engine.demand_finite(logits)
            found += [token_logprobs(row, token, wish.tells) for row, token in zip(logits, ids[start + 1 :])]
            yield Progress("reading the prompt", start + len(logits), len(ids), "tokens")
            if cancelled():
                return
            if engine.shares is not None and start + len(logits) == len(engine.tokens):  # what another's pass writes over was read
                yield Yield()
        is_added = isinstance(prompt, str) and ids[0] == self.tokenizer.bos_id and ids[0] not in self.tokenizer.encode(prompt, False)[:1]
        yield TextDelta(text, tokens=tuple(found[is_added:]))

    def demand_known(self, ids: Sequence[int]) -> list[int]:
        """Token ids of a program. Raises UsageError for one that there is not, before they are taken for text."""
        return known(ids, self.engine.config.vocab_size)

    def _choice(self, wish: GenerationOptions) -> AdapterScales:
        return self.usual if wish.choice is None else wish.choice

    @contextmanager
    def slot_for(self, prompt: str | list[int], choice: AdapterScales) -> Iterator[Slot]:
        """The sequence for an answer to this prompt: of those that are free the one where it saves most, else the one that rested longest.
        Raises RuntimeError for more answers at once than there are."""
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
        """Act on one sequence, behind the answer that goes to it."""
        own = self._slots[number]
        while not own.is_free:
            if cancelled():
                return
            yield Yield()
        with self._taken(own):
            yield from act(own)

    def _answer(self, engine: Engine, ids: list[int], wish: GenerationOptions, cancelled: Callable[[], bool],
                think: Reasoning | CallFilter | None, said: str = "", raw: bool = False, marks: Mapping[int, str] | None = None,
                is_scored: bool = False, ends: frozenset[int] = frozenset()) -> Generator[Event, None, Answer]:
        engine.cancelled = cancelled
        sampler = Sampler(wish.settings, engine.config.vocab_size, breakers_of(self.tokenizer, wish.settings))
        sampler.tells = wish.tells
        answer = Answer(engine, self.tokenizer, sampler, think, wish.stops, wish.max_tokens, cancelled, wish.ignore_eos,
                        self._held_to(wish.form), wish.think != "off", raw, said, marks, ends, wish.most_s, wish.indent,
                        wish.sure, wish.most_thought, wish.translates, wish.shifts)
        try:
            is_read = False
            for event in answer.written(ids):
                if not is_read and isinstance(event, TextDelta | Call):
                    yield PromptRead(len(ids), engine.reused)
                    is_read = True
                yield event
        except EffllmError:
            raise
        except Exception:  # a pass was left in its middle, by a disk, say: what the cache holds is not known
            engine.reset()
            raise
        stats = answer.cost(explained=False)  # a program does not ask why, and the next one waits
        if is_scored:  # what is held of it was read for this answer
            stats = replace(stats, cached_tokens=0)
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

    def _held_to(self, form: Constraint | None) -> CompiledConstraint | None:
        if form is None:
            return None
        known = self._vocabulary
        self._vocabulary = known.holding(form) if known else form.opened(self.tokenizer, self.engine.config.vocab_size)
        return self._vocabulary

    def slots(self) -> list[tuple[bool, int]]:
        """Of each sequence whether an answer goes to it, and how many tokens it holds."""
        return [(not each.is_free, len(each.engine.tokens)) for each in self._slots]
