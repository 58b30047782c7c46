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
from .embedding_requests import EmbeddingRequests, check_token_ids, never
from .slot import Slot

if TYPE_CHECKING:
    import numpy as np

    from ..adapters.adapter_selection import AdapterScales
    from ..constraints.constraint import CompiledConstraint, Constraint
    from ..images.media import MediaCache, MediaItem
    from ..sessions.prompt_cache import PromptCache
    from ..tool_calls.filter import CallFilter
    from ..tool_calls.tool_calling import Tools

ALWAYS_TOKENIZED_CHARS = 1 << 20  # a shorter prompt is always tokenized, so that errors can state its exact length
MAX_SHRINK = 4  # factor by which normalization may shorten a text before it is tokenized, a generous bound
DEFAULT_INFILL_TOKENS = 256  # tokens reserved for an infill completion without a limit


@dataclass(frozen=True)
class GenerationOptions:
    """How one request is answered."""

    settings: SamplerSettings
    think: str = "auto"  # auto leaves reasoning to the model, on and off ask the chat template for it
    stops: tuple[str, ...] = ()  # stop strings
    max_tokens: int | None = None  # None: no limit
    ignore_eos: bool = False  # continue after the end-of-text token
    constraint: Constraint | None = None
    logprobs: int | None = None  # log-probabilities of each token and of this many top alternatives; None: none are reported
    echo: bool = False  # return the prompt first, with its log-probabilities
    max_seconds: float | None = None  # this long after the first token, end at the next complete line
    indent: int = 0  # end before a line that is indented by fewer spaces
    infill_sampling: bool = False  # llama.cpp's infill sampler, unless there is a constraint
    choice: AdapterScales | None = None  # the scale of each LoRA adapter, None for `ServedModel.default_scales`
    max_reasoning_tokens: int | None = None  # None: no limit
    translate: bool = False  # a transcribing model translates speech into English
    may_shift: bool = True  # a full context may drop its middle, if the run allows it
    skip_cache: bool = False  # reuse no cached prefix for the prompt


class ServedModel(ChatPrompts, EmbeddingRequests):
    """One model with a slot for `engine` and one for each of `other_engines`: as many requests run at once.

    A request's `cancelled` is polled between tokens, between chunks of the prompt and while waiting for the disk. `default_scales`: adapter
    scales of requests that name none.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, prompt_cache: PromptCache | None = None,
                 other_engines: Iterable[Engine] = ()) -> None:
        self.engine, self.tokenizer, self.prompt_cache = engine, tokenizer, prompt_cache
        self.default_scales = engine.adapter_scales
        self._prompts = self._new_prompt_builder()
        self._slots = [Slot(engine, self._prompts, prompt_cache),
                           *(Slot(other, self._new_prompt_builder(), prompt_cache and prompt_cache.for_sequence(other))
                             for other in other_engines)]
        self._request_count = 0
        self._compiled: CompiledConstraint | None = None

    def _new_prompt_builder(self) -> PromptBuilder:
        """One that knows of no cached text."""
        return PromptBuilder(self.tokenizer, media=self.engine.media)

    def add_image(self, data: bytes, source: str) -> MediaItem:
        """Decode the bytes of an image file; safe from any thread. The item is available as long as the caller holds it. Raises UsageError
        that begins with its `source`.
        """
        return self.require_vision().add(decode_image(data, source))

    def add_video(self, data: bytes, source: str) -> list[tuple[str, MediaItem]]:
        """As `add_image`, for frames of a video: (text before the frame, frame)."""
        return self.require_vision().add_video(decode_video(data, source))

    def add_audio(self, data: bytes, source: str) -> MediaItem:
        """As `add_image`, for an audio clip."""
        return self.require_audio().add(self.audio_samples(data, source))

    def audio_samples(self, data: bytes, source: str) -> np.ndarray:
        """Decoded audio samples, float32 [n]. Raises EffllmError for a model without audio input."""
        self.require_audio()
        return decode_audio(data, source)

    def require_vision(self) -> MediaCache:
        """The media cache. Raises EffllmError for a model without image input, or whose images are not supported."""
        return require_media(self.engine.media)

    def require_audio(self) -> MediaCache:
        """The media cache. Raises EffllmError for a model without audio input."""
        return require_media(self.engine.media, AUDIO_INPUT)

    @property
    def accepts_images(self) -> bool:
        """Whether the model takes images."""
        return self._accepts(IMAGE_INPUT)

    @property
    def accepts_audio(self) -> bool:
        """Whether the model takes audio."""
        return self._accepts(AUDIO_INPUT)

    def _accepts(self, modality: Modality) -> bool:
        media = self.engine.media
        return media is not None and modality in media.encoders

    def reply(self, messages: Sequence[Message], options: GenerationOptions, tools: Tools | None = None,
              variables: Mapping[str, Any] | None = None, cancelled: Callable[[], bool] = never) -> Iterator[Event]:
        """Answer a conversation.

        `messages`: dicts of `role`, `content` (text, a list of `{"type": "text", "text": ...}` parts, or None) and any other key that the
        chat template reads (`reasoning_content`, `name`). Leading system messages become one system prompt; a final assistant message is
        continued.
        `tools`: the answer may contain calls of them, each an event of its own; earlier calls (`tool_calls`, and the role tool with
        `tool_call_id`) are rendered as the template expects them.
        `variables`: template variables, which override what `options.think` sets.

        Raises EffllmError before the first event if these messages cannot be answered.
        """
        prompt, answer_prefix = self._build_prompt(self._prompts, messages, options.think, tools, variables)
        tool_calling = self._calling if tools else None
        if tools:
            options = replace(options, stops=options.stops + tool_calling.stops(),
                              constraint=tool_calling.constraint(tools, options.constraint))
        for fallback in [*self._fallbacks(options.think), *(tool_calling.fallbacks(tools) if tools else ())]:
            if self.engine.options.strict:
                refuse_fallbacks([Fallback(fallback)])
            yield Notice(fallback)
        prompt = self._prompts.with_answer_prefix(prompt, answer_prefix)
        self._check_length(prompt)
        choice = self._choice(options)
        yield from self._encode_media(prompt, cancelled)
        with self.acquire_slot(prompt, choice) as slot:
            ids = slot.tokenize(prompt, choice)
            if slot.prompt_cache is not None:
                ids = yield from slot.prompt_cache.switch_to(prompt, ids, slot.prompts, choice=choice)
            slot.engine.choose(choice)
            slot.begin(options.skip_cache)
            ids = slot.tokenize(prompt, choice) if options.skip_cache else ids
            slot.prompt_tokens = len(ids)
            think, visible_tokens = self.tokenizer.reasoning(ids, tools is not None), None
            if tools:
                think, visible_tokens = tool_calling.call_filter(think, tools), tool_calling.visible_tokens
            answer = yield from self._answer(slot.engine, ids, options, cancelled, think, answer_prefix, self._prompts.raw, visible_tokens)
            slot.prompts.record_cached(prompt, ids, answer.tokens[: len(answer.tokens) - (answer.finish == "stop")],
                                       answer.text[len(answer_prefix) :])

    def _encode_media(self, prompt: str, cancelled: Callable[[], bool]) -> Iterator[Event]:
        """Encode the media of a prompt. Other answers run between the chunks, since a tower takes seconds."""
        for event in self._new_prompt_builder().encode_media(prompt, self.engine, cancelled):
            yield event
            if self.engine.batched_passes is not None and isinstance(event, Progress):
                yield Yield()

    def complete(self, prompt: str | Sequence[int], options: GenerationOptions, cancelled: Callable[[], bool] = never,
                 cacheable_tokens: int | None = None) -> Iterator[Event]:
        """Continue text or token ids without a chat template; reasoning is part of the text.

        In an infill prompt (from `build_infill_prompt`, or with the client's own markers) the other infill tokens end the completion.
        `cacheable_tokens`: prompt tokens worth saving when another prompt takes the slot, None for all. Raises EffllmError before the first
        event.
        """
        ids = self._token_ids(prompt)
        extra_stop_ids = self.fim_tokens.ends if self.fim_tokens is not None and self.fim_tokens.prefix in ids else frozenset()
        choice = self._choice(options)
        with self.acquire_slot(ids, choice) as slot:
            if slot.prompt_cache is not None:
                ids = yield from slot.prompt_cache.switch_to(None, ids, slot.prompts, cacheable_tokens, choice)
            slot.engine.choose(choice)
            slot.begin(options.skip_cache)
            slot.prompt_tokens = len(ids) if cacheable_tokens is None else cacheable_tokens
            is_scored = options.echo and options.logprobs is not None
            if options.echo:
                yield from self._echo_prompt(slot.engine, prompt, ids, options, cancelled)
            yield from self._answer(slot.engine, ids, options, cancelled, None, is_raw=True, is_scored=is_scored,
                                    extra_stop_ids=extra_stop_ids)

    def check_length(self, prompt: str | Sequence[int], options: GenerationOptions) -> None:
        """Raises what `complete` would for a prompt that cannot be continued; safe from any thread."""
        tokens, engine = len(self._token_ids(prompt)), self.engine
        may_shift = engine.options.overflow == "shift" and engine.n_ctx >= MIN_SHIFT_CTX and not (options.echo
                                                                                                  and options.logprobs is not None)
        if tokens >= engine.n_ctx and not may_shift:
            raise context_overflow(tokens, engine.n_ctx, engine.config.context_length)

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a raw prompt. Raises UsageError, and ContextOverflow for a text that is far too long."""
        if not prompt:
            raise UsageError("the prompt is empty", "send at least one character or token")
        if not isinstance(prompt, str):
            return self.check_token_ids(prompt)
        self._check_length(prompt)
        return self.tokenizer.encode(prompt)

    @cached_property
    def fim_tokens(self) -> FimTokens | None:
        """The model's tokens for filling in the middle, None where it has none."""
        return find_fim_tokens(self.tokenizer.vocabulary(), self.tokenizer.special_tokens)

    @cached_property
    def _plain_text(self) -> PlainText:
        return PlainText(self.tokenizer, self.fim_tokens.ends)

    def build_infill_prompt(self, gap: InfillContext, max_tokens: int | None, may_cut: bool) -> InfillPrompt:
        """The prompt that asks for the text of a gap; safe from any thread.

        `max_tokens`: tokens reserved for the completion, None for the default. `may_cut`: text far from the gap is dropped if there is no
        room. Raises UsageError for a model without fill-in-the-middle tokens, ContextOverflow.
        """
        if self.fim_tokens is None:
            raise UsageError("this model has no fill-in-the-middle tokens", "use a model that was trained for it")
        if may_cut:  # so that megabytes are not tokenized only to be dropped
            max_chars = self.engine.n_ctx * self._max_token_chars
            gap = InfillContext(gap.prefix[-max_chars:], gap.suffix[:max_chars], gap.middle,
                                tuple((name, text[-max_chars:]) for name, text in gap.files))
        self._check_length(gap.middle if may_cut else gap.prefix + gap.suffix)
        has_bos = self.tokenizer.encode("a")[:1] == [self.tokenizer.bos_id]
        return infill_prompt(self.fim_tokens, gap, self._plain_text.encode_start, self._plain_text.encode_continuation,
                             self.tokenizer.bos_id if has_bos
                             else None,
                         self.engine.n_ctx, DEFAULT_INFILL_TOKENS if max_tokens is None else max_tokens, may_cut)

    def _echo_prompt(self, engine: Engine, prompt: str | Sequence[int], ids: list[int], options: GenerationOptions,
                cancelled: Callable[[], bool]) -> Iterator[Event]:
        """The text of the prompt, with log-probabilities if requested: the whole prompt is then prefilled from its first token."""
        n_ctx, may_shift = engine.n_ctx, engine.options.overflow == "shift" and options.logprobs is None
        if len(ids) >= n_ctx and not may_shift:  # an error must come before the first event
            raise ContextOverflow(f"the prompt has {len(ids)} tokens and the context holds {n_ctx}", "shorten it")
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids, False)
        if options.logprobs is None:
            yield TextDelta(text)
            return
        engine.cancelled = cancelled
        logprobs = [TokenLogprobs(ids[0], None)]
        for start, logits in engine.score(ids):
            engine.require_finite_logits(logits)
            logprobs += [token_logprobs(row, token, options.logprobs) for row, token in zip(logits, ids[start + 1 :])]
            yield Progress("reading the prompt", start + len(logits), len(ids), "tokens")
            if cancelled():
                return
            if engine.batched_passes is not None and start + len(logits) == len(engine.tokens):  # the pass is finished
                yield Yield()
        has_added_bos = isinstance(prompt, str) and ids[0] == self.tokenizer.bos_id and ids[0] not in self.tokenizer.encode(prompt,
                                                                                                                            False)[:1]
        yield TextDelta(text, tokens=tuple(logprobs[has_added_bos:]))

    def check_token_ids(self, ids: Sequence[int]) -> list[int]:
        """Token ids sent by a client. Raises UsageError for an id outside the vocabulary."""
        return check_token_ids(ids, self.engine.config.prompt_vocab_size)

    def _choice(self, options: GenerationOptions) -> AdapterScales:
        return self.default_scales if options.choice is None else options.choice

    @contextmanager
    def acquire_slot(self, prompt: str | list[int], choice: AdapterScales) -> Iterator[Slot]:
        """A free slot for this prompt: the one with the most reusable tokens, else the least recently used. Raises RuntimeError if none is
        free."""
        free = [slot for slot in self._slots if slot.is_free]
        if not free:
            raise RuntimeError(f"more than {len(self._slots)} answers at once")
        if len(free) > 1:
            fresh_ids = prompt if isinstance(prompt, list) else self._new_prompt_builder().tokenize(prompt)
            free.sort(key=lambda slot: (-slot.reusable_tokens(prompt, fresh_ids, choice), slot.last_request))
        with self._occupy(free[0]) as slot:
            yield slot

    def _occupy(self, slot: Slot) -> AbstractContextManager[Slot]:
        self._request_count += 1
        return slot.occupy(self._request_count)

    def run_on_slot(self, number: int, action: Callable[[Slot], Iterator[Event]], cancelled: Callable[[], bool] = never) -> Iterator[Event]:
        """Run `action` on a slot, after the request that occupies it."""
        slot = self._slots[number]
        while not slot.is_free:
            if cancelled():
                return
            yield Yield()
        with self._occupy(slot):
            yield from action(slot)

    def _answer(self, engine: Engine, ids: list[int], options: GenerationOptions, cancelled: Callable[[], bool],
                think: Reasoning | CallFilter | None, answer_prefix: str = "", is_raw: bool = False,
                visible_tokens: Mapping[int, str] | None = None,
                is_scored: bool = False, extra_stop_ids: frozenset[int] = frozenset()) -> Generator[Event, None, Answer]:
        engine.cancelled = cancelled
        sampler = Sampler(options.settings, engine.config.vocab_size, breakers_of(self.tokenizer, options.settings))
        sampler.logprobs = options.logprobs
        answer = Answer(engine, self.tokenizer, sampler, think, options.stops, options.max_tokens, cancelled, options.ignore_eos,
                        self._compile(options.constraint), options.think != "off", is_raw, answer_prefix, visible_tokens, extra_stop_ids,
                        options.max_seconds,
                        options.indent,
                        options.infill_sampling, options.max_reasoning_tokens, options.translate, options.may_shift)
        try:
            is_prefilled = False
            for event in answer.generate(ids):
                if not is_prefilled and isinstance(event, TextDelta | Call):
                    yield PromptRead(len(ids), engine.num_cached_tokens)
                    is_prefilled = True
                yield event
        except EffllmError:
            raise
        except Exception:  # a pass was interrupted, for example by a disk error: the cache is in an unknown state
            engine.reset()
            raise
        stats = answer.cost(explain=False)  # clients do not ask why, and the next request waits
        if is_scored:  # the tokens in the cache were prefilled by this request
            stats = replace(stats, cached_tokens=0)
        if not is_prefilled:
            yield PromptRead(stats.prompt_tokens, stats.cached_tokens)
        yield from answer.closing_notices()
        yield Done(stats)
        return answer

    @cached_property
    def _max_token_chars(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.vocabulary()))

    def _check_length(self, text: str) -> None:
        """Raises ContextOverflow for a text too long at any tokenization: tokenizing 30 MB would take a gigabyte."""
        n_ctx = self.engine.n_ctx
        if self.engine.options.overflow == "shift" or len(text) <= ALWAYS_TOKENIZED_CHARS:
            return
        if len(text) <= MAX_SHRINK * n_ctx * self._max_token_chars:
            return
        min_tokens = len(text) // self._max_token_chars
        raise ContextOverflow(f"the prompt has at least {min_tokens} tokens and the context holds {n_ctx}", "shorten it")

    def _compile(self, constraint: Constraint | None) -> CompiledConstraint | None:
        if constraint is None:
            return None
        compiled = self._compiled
        if compiled:
            self._compiled = compiled.compile_other(constraint)
        else:
            self._compiled = constraint.compile(self.tokenizer, self.engine.config.vocab_size)
        return self._compiled

    def slots(self) -> list[tuple[bool, int]]:
        """For each slot: whether it is busy, and how many tokens it holds."""
        return [(not slot.is_free, len(slot.engine.tokens)) for slot in self._slots]
