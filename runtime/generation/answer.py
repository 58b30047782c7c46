"""One answer: prompt tokens in, a stream of events out.

Drives the engine's decode loop, detokenizes, separates reasoning and tool calls from content, and stops at a stop string, an end-of-turn
token, a token limit, or when cancelled. The session or server decides what becomes of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...offload import hardware
from ..engine import Engine, Step
from ..events import Call, Event, Notice, Progress, Stats, Yield
from ..images.modality import AUDIO_INPUT
from ..sampler import Sampler
from ..tokenizer import Tokenizer
from ..tokens.reasoning import ChannelFilter, ThinkFilter
from .answer_text import AnswerText

if TYPE_CHECKING:
    import numpy as np

    from ..constraints.constraint import CompiledConstraint
    from ..sampling.infill_sampler import InfillSampler
    from ..sampling.reasoning_budget import ReasoningBudget
    from ..tool_calls.filter import CallFilter

Reasoning = ThinkFilter | ChannelFilter


@dataclass
class Answer:
    """Settings and state of one answer: `generate` runs it, `cost` and `closing_notices` report on it afterwards."""

    engine: Engine
    tokenizer: Tokenizer
    sampler: Sampler
    think: Reasoning | CallFilter | None  # parser of reasoning and tool calls; after `generate`, in its final state
    stops: tuple[str, ...]  # stop strings
    max_tokens: int | None  # None: no limit
    cancelled: Callable[[], bool]  # polled between tokens and between chunks of the prompt
    ignore_eos: bool = False
    constraint: CompiledConstraint | None = None  # on the answer's text
    allow_reasoning: bool = True  # reasoning may precede constrained text
    is_raw: bool = False  # the prompt is plain text to continue, not a rendered chat
    answer_prefix: str = ""  # the beginning of an answer that is continued
    visible_tokens: Mapping[int, str] | None = None  # special tokens that mark tool calls: emitted as text
    extra_stop_ids: frozenset[int] = frozenset()  # stop tokens in addition to the model's own
    max_seconds: float | None = None  # this long after the first token, end at the next complete line
    indent: int = 0  # end before a line that is indented by fewer spaces
    infill_sampling: bool = False  # llama.cpp's infill sampler picks tokens, unless there is a constraint
    max_reasoning_tokens: int | None = None  # None: no limit
    translate: bool = False  # a transcribing model translates speech into English
    may_shift: bool = True  # a full context may drop its middle, if the run allows it
    calls: list[Call] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # as sampled, including the one that ended the answer
    content_parts: list[str] = field(default_factory=list)  # the first is the prefix
    reasoning_parts: list[str] = field(default_factory=list)
    reasoning_token_count: int = 0  # of `tokens`
    finish: str = "length"
    stop_string: str | None = None  # the one that ended the answer
    is_exact: bool = False  # detokenizing `tokens` gives exactly the text

    @property
    def text(self) -> str:
        """The content of the answer, without reasoning, with the prefill."""
        return "".join(self.content_parts)

    @property
    def _infill_sampler(self) -> InfillSampler:
        from ..sampling.infill_sampler import InfillSampler  # few answers need it

        return InfillSampler(self.tokenizer, self.tokenizer.stop_ids | self.extra_stop_ids, self.sampler.settings)

    def _reasoning_budget(self, inner_filter: Callable[[np.ndarray], None] | None) -> ReasoningBudget | None:
        if self.max_reasoning_tokens is None:
            return None
        from ..sampling.reasoning_budget import ReasoningBudget  # few answers need it

        return ReasoningBudget(self.max_reasoning_tokens, self.tokenizer, self.think, inner_filter)

    def generate(self, prompt_ids: list[int], continues_answer: bool = False) -> Iterator[Event]:
        """Prefill the prompt and generate the answer. `continues_answer`: the prompt ends within the answer."""
        self._start_counters(prompt_ids)
        self.content_parts = [self.answer_prefix]
        text = AnswerText(self,
                          self.tokenizer.stream(prompt_ids if self.is_raw or self.answer_prefix or continues_answer else (),
                                                self.visible_tokens))
        budget = self._set_logits_filter(prompt_ids, continues_answer)
        try:
            yield from self._prefill(prompt_ids)
            if self.finish != "cancelled" and self.max_tokens != 0:
                yield from self._decode(text, budget)
            yield from text.flush()
            if text.is_over and self.finish in ("length", "context"):  # flushing completed a stop string or a tool call
                self.finish = "stop"
            if budget and budget.is_exhausted:
                yield Notice(f"reasoning was ended after {self.max_reasoning_tokens} tokens (--reasoning-budget)")
        except KeyboardInterrupt:  # in the middle of a pass: the cache is in an unknown state
            self.engine.reset()
            raise
        self.think, self.is_exact, self.stop_string = text.think, not text.stop_filter.hit, text.stop_filter.matched

    def _start_counters(self, prompt_ids: list[int]) -> None:
        """Record the counters that `cost` subtracts."""
        engine = self.engine
        self._prompt_ids, self._started, self._first_token_at = prompt_ids, time.monotonic(), None
        self._disk_before, self._cpu_before = engine.disk_traffic, hardware.cpu_time()
        self._seconds_before = engine.prefill_s, engine.decode_s, engine.passes_s
        self._draft_counts_before = engine.speculation and engine.speculation.counts

    @property
    def _transcription_filter(self) -> Callable[[np.ndarray], None] | None:
        """Logits filter of a model that only transcribes speech, None for other models."""
        audio_encoder = self.engine.media and self.engine.media.encoders.get(AUDIO_INPUT)
        if not audio_encoder or audio_encoder.constrain_logits is None:
            return None
        return lambda logits: audio_encoder.constrain_logits([*self._prompt_ids, *self.tokens], self.translate, logits)

    @property
    def _may_shift(self) -> bool:
        """Whether the context may shift. Not while transcribing: a model that repeats itself would never end."""
        return self.may_shift and self._transcription_filter is None

    def _set_logits_filter(self, prompt_ids: list[int], continues_answer: bool) -> ReasoningBudget | None:
        """Set the sampler's logits filter (constraint, infill sampling or transcription, within a reasoning budget) and return the
        budget."""
        constraint = self._constraint_state = self.constraint and self.constraint.begin(
            self.answer_prefix, self.is_raw or continues_answer, self.think, self.allow_reasoning, prompt_ids if continues_answer else ())
        if constraint:
            logits_filter = constraint.mask_logits
        elif self.infill_sampling:
            logits_filter = self._infill_sampler.mask_logits
        else:
            logits_filter = self._transcription_filter
        budget = None if self.think is None else self._reasoning_budget(logits_filter)
        self.sampler.mask_logits = budget.mask_logits if budget else logits_filter
        if self.engine.speculation is not None:
            self.engine.speculation.forced = constraint and constraint.forced
        return budget

    def _prefill(self, prompt_ids: list[int]) -> Iterator[Event]:
        """Prefill, chunk by chunk."""
        engine = self.engine
        if engine.batched_passes is not None:
            yield from engine.batched_passes.wait_for_shared_prefix(engine, prompt_ids, self.cancelled)
        for progress in engine.prefill(prompt_ids):
            yield progress
            if engine.batched_passes is not None and isinstance(progress, Progress):
                yield Yield()
            if self.cancelled():
                break
        self.finish = "cancelled" if self.cancelled() else self.finish
        if engine.truncated:
            yield Notice(f"the prompt of {len(prompt_ids)} tokens is longer than the context: its middle was dropped (--overflow shift)")
        self._disk_before, self._cpu_before = engine.disk_traffic, hardware.cpu_time()

    def _decode(self, text: AnswerText, budget: ReasoningBudget | None) -> Iterator[Event]:
        """Decode token by token until one ends the answer."""
        engine, constraint, truncation_reported = self.engine, self._constraint_state, self.engine.truncated
        stop_ids = self.tokenizer.stop_ids | self.extra_stop_ids
        for step in engine.generate(self.sampler, self.max_tokens, stop_ids, self.ignore_eos and not constraint, self._may_shift):
            if isinstance(step, Yield):
                yield step
                continue
            self.tokens.append(step.token)
            self._first_token_at = self._first_token_at or time.monotonic()
            if budget:
                budget.accept(step.token)
            yield from text.push(step)
            self.reasoning_token_count += text.is_reasoning_token
            if constraint:
                constraint.accept(step.token, text.is_reasoning_text)
            yield from (Notice(line) for line in engine.announcements())
            if engine.truncated and not truncation_reported:
                truncation_reported = True
                yield Notice("the context is full: its middle was dropped to continue (--overflow shift)")
            if self._is_last(step, text):
                return
        self.finish = "cancelled" if self.cancelled() else self.finish

    def _is_last(self, step: Step, text: AnswerText) -> bool:
        """Whether this token ends the answer; sets `finish` to the reason."""
        is_cancelled, is_over = self.cancelled(), text.is_over
        if is_over:
            self.finish = "stop"
        elif is_cancelled:
            self.finish = "cancelled"
        else:
            self.finish = step.finish or self.finish
        is_late = text.has_complete_line and self.max_seconds is not None and time.monotonic() - self._first_token_at >= self.max_seconds
        return is_over or is_cancelled or step.finish is not None or text.indent_stop.hit or is_late

    def cost(self, from_process_start: bool = False, explain: bool = True) -> Stats:
        """What the finished answer cost. `from_process_start`: time to first token counts from there. `explain`: with why it was
        slower than predicted."""
        engine = self.engine
        origin = time.monotonic() - hardware.process_age() if from_process_start else self._started
        ttft = (self._first_token_at or time.monotonic()) - origin
        prefill, decode, passes = (now - then for now,
                                   then in zip((engine.prefill_s, engine.decode_s, engine.passes_s), self._seconds_before))
        drafted = self._draft_counts_before and engine.speculation.counts.since(self._draft_counts_before)
        from ..planning.forecast_outcome import engine_costs, outcome  # not on the way to the first token

        outcome_report = outcome(engine, engine.num_cached_tokens + engine.num_prefilled_tokens, engine.num_cached_tokens, len(self.tokens),
                                 prefill, decode, passes, drafted,
                        engine.disk_traffic.since(self._disk_before), hardware.cpu_time().since(self._cpu_before), explain)
        constraint = self._constraint_state
        return Stats(
            text="".join(self.content_parts[1:]), token_ids=tuple(self.tokens), seed=self.sampler.seed, prompt_tokens=len(self._prompt_ids),
            finish_reason="length" if self.finish == "context" else self.finish, prefill_s=prefill, decode_s=decode,
            ttft_s=ttft, speculation=drafted and drafted.to_json(),
            reasoning_tokens=self.reasoning_token_count, stop_string=self.stop_string, is_whole=constraint.is_whole if constraint else None,
            **engine_costs(engine, outcome_report))

    def closing_notices(self) -> Iterator[Notice]:
        """Notices about how it ended."""
        engine = self.engine
        if self._constraint_state and self.finish != "cancelled" and not self._constraint_state.is_whole:
            yield Notice(f"the answer ended before it was complete: it does not match {self.constraint.source.flag}")
        if self.finish == "context":
            hints = ["-c for a larger one"] if engine.n_ctx < engine.config.context_length else []
            hints += ["--overflow shift to go on"] if self._may_shift else []
            hint_text = f" ({', '.join(hints)})" if hints else ""
            yield Notice(f"the context of {engine.n_ctx} tokens is full: the answer stops here{hint_text}")
