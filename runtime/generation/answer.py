"""One answer: prompt tokens in, a stream of events out.

Drives the engine's decode loop, detokenizes, separates reasoning and tool calls from content, and stops at a stop string, an end-of-turn
token, a token limit, or when cancelled. The history and what happens to the answer are the session's concern."""

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
    """The settings and the state of one answer.

    Limits: `stops` are stop strings, `ends` stop tokens beside the model's own; `max_tokens` and `max_reasoning_tokens` (None: no limit);
    after `max_seconds` from the first token it ends once it has a complete line; it ends before a line indented by fewer than `indent`
    blanks. `cancelled` is polled between tokens and between chunks of the prompt. `shifts`: a full context may shift, if the run does.

    `compiled` is the constraint on its text; `may_reason`: reasoning may come first. `infill_sampling`: llama.cpp's infill sampler picks
    tokens, unless there is a constraint. `raw`: the prompt is plain text to continue, not a rendered chat. `translates`: speech is
    translated into English, by models that transcribe.

    `said` is the prefill: the beginning of an answer that is continued. Filled while it runs: `shown` and `thought` (text), `calls`,
    `tokens` as sampled, including the one that ended it, `reasoned` (how many of them were reasoning), `stopped_by` (the stop string, if
    one ended it) and `is_exact` (detokenizing `tokens` gives exactly the text). `think` parses reasoning, and tool calls, of which `marks`
    are the special tokens.
    """

    engine: Engine
    tokenizer: Tokenizer
    sampler: Sampler
    think: Reasoning | CallFilter | None
    stops: tuple[str, ...]
    max_tokens: int | None
    cancelled: Callable[[], bool]
    ignore_eos: bool = False
    compiled: CompiledConstraint | None = None
    may_reason: bool = True
    raw: bool = False
    said: str = ""
    marks: Mapping[int, str] | None = None
    ends: frozenset[int] = frozenset()
    max_seconds: float | None = None
    indent: int = 0
    infill_sampling: bool = False
    max_reasoning_tokens: int | None = None
    translates: bool = False
    shifts: bool = True
    calls: list[Call] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    reasoned: int = 0
    finish: str = "length"
    stopped_by: str | None = None
    is_exact: bool = False

    @property
    def text(self) -> str:
        """The content of the answer, without reasoning, with the prefill."""
        return "".join(self.shown)

    @property
    def _sure(self) -> InfillSampler:
        from ..sampling.infill_sampler import InfillSampler  # of few answers

        return InfillSampler(self.tokenizer, self.tokenizer.stop_ids | self.ends, self.sampler.settings)

    def _thought_limit(self, otherwise: Callable[[np.ndarray], None] | None) -> ReasoningBudget | None:
        if self.max_reasoning_tokens is None:
            return None
        from ..sampling.reasoning_budget import ReasoningBudget  # of few answers

        return ReasoningBudget(self.max_reasoning_tokens, self.tokenizer, self.think, otherwise)

    def written(self, ids: list[int], inside: bool = False) -> Iterator[Event]:
        """Prefill the prompt `ids` and generate the answer; `inside`: the prompt ends within the answer."""
        self._begin(ids)
        self.shown = [self.said]
        text = AnswerText(self, self.tokenizer.stream(ids if self.raw or self.said or inside else (), self.marks))
        limit = self._narrow(ids, inside)
        try:
            yield from self._read(ids)
            if self.finish != "cancelled" and self.max_tokens != 0:
                yield from self._write(text, limit)
            yield from text.ended()
            if text.is_over and self.finish in ("length", "context"):  # which came to light behind its last token
                self.finish = "stop"
            if limit and limit.is_exhausted:
                yield Notice(f"reasoning was ended after {self.max_reasoning_tokens} tokens (--reasoning-budget)")
        except KeyboardInterrupt:  # a pass was left in its middle: what the cache holds is not known
            self.engine.reset()
            raise
        self.think, self.is_exact, self.stopped_by = text.think, not text.stops.hit, text.stops.matched

    def _begin(self, ids: list[int]) -> None:
        """Take the readings from which costs are counted."""
        engine = self.engine
        self._ids, self._started, self._first_at = ids, time.monotonic(), None
        self._read_before, self._cpu_before = engine.disk_traffic, hardware.cpu_time()
        self._before = engine.prefill_s, engine.decode_s, engine.passes_s
        self._drafted = engine.speculation and engine.speculation.counts

    @property
    def _written_down(self) -> Callable[[np.ndarray], None] | None:
        """The logits filter of a model that only transcribes speech."""
        hearing = self.engine.media and self.engine.media.encoders.get(AUDIO_INPUT)
        if not hearing or hearing.constrain_logits is None:
            return None
        return lambda logits: hearing.constrain_logits([*self._ids, *self.tokens], self.translates, logits)

    @property
    def _may_shift(self) -> bool:
        """Whether the context may shift. Not while transcribing: a model that repeats itself would never end."""
        return self.shifts and self._written_down is None

    def _narrow(self, ids: list[int], inside: bool) -> ReasoningBudget | None:
        """Set the sampler's logits filter: constraint, infill sampling, reasoning budget."""
        held = self._held = self.compiled and self.compiled.begin(self.said, self.raw or inside, self.think, self.may_reason,
                                                                  ids if inside else ())
        narrow = held.mask_logits if held else self._sure.mask_logits if self.infill_sampling else self._written_down
        limit = None if self.think is None else self._thought_limit(narrow)
        self.sampler.mask_logits = limit.mask_logits if limit else narrow
        if self.engine.speculation is not None:
            self.engine.speculation.forced = held and held.forced
        return limit

    def _read(self, ids: list[int]) -> Iterator[Event]:
        """Prefill, chunk by chunk."""
        engine = self.engine
        if engine.batched_passes is not None:
            yield from engine.batched_passes.waits(engine, ids, self.cancelled)
        for progress in engine.prefill(ids):
            yield progress
            if engine.batched_passes is not None and isinstance(progress, Progress):
                yield Yield()
            if self.cancelled():
                break
        self.finish = "cancelled" if self.cancelled() else self.finish
        if engine.truncated:
            yield Notice(f"the prompt of {len(ids)} tokens is longer than the context: its middle was dropped (--overflow shift)")
        self._read_before, self._cpu_before = engine.disk_traffic, hardware.cpu_time()

    def _write(self, text: AnswerText, limit: ReasoningBudget | None) -> Iterator[Event]:
        """Decode token by token until one ends the answer."""
        engine, held, dropped = self.engine, self._held, self.engine.truncated
        stop_ids = self.tokenizer.stop_ids | self.ends
        for step in engine.generate(self.sampler, self.max_tokens, stop_ids, self.ignore_eos and not held, self._may_shift):
            if isinstance(step, Yield):
                yield step
                continue
            self.tokens.append(step.token)
            self._first_at = self._first_at or time.monotonic()
            if limit:
                limit.accept(step.token)
            yield from text.took(step)
            self.reasoned += text.reasons
            if held:
                held.took(step.token, text.is_thought)
            yield from (Notice(line) for line in engine.announcements())
            if engine.truncated and not dropped:
                dropped = True
                yield Notice("the context is full: its middle was dropped to continue (--overflow shift)")
            if self._ends_with(step, text):
                return
        self.finish = "cancelled" if self.cancelled() else self.finish

    def _ends_with(self, step: Step, text: AnswerText) -> bool:
        """Is this the last token? `finish` then says why."""
        given_up, at_end = self.cancelled(), text.is_over
        self.finish = "stop" if at_end else "cancelled" if given_up else step.finish or self.finish
        is_late = text.has_line and self.max_seconds is not None and time.monotonic() - self._first_at >= self.max_seconds
        return at_end or given_up or step.finish is not None or text.indented.hit or is_late

    def cost(self, from_process_start: bool = False, explained: bool = True) -> Stats:
        """What the finished answer cost. `from_process_start`: time to first token counts from there. `explained`: with why it was
        slower than predicted."""
        engine = self.engine
        origin = time.monotonic() - hardware.process_age() if from_process_start else self._started
        ttft = (self._first_at or time.monotonic()) - origin
        prefill, decode, passes = (now - then for now, then in zip((engine.prefill_s, engine.decode_s, engine.passes_s), self._before))
        drafted = self._drafted and engine.speculation.counts.since(self._drafted)
        from ..planning.forecast_outcome import engine_costs, outcome  # not on the way to the first token

        found = outcome(engine, engine.num_cached_tokens + engine.num_prefilled_tokens, engine.num_cached_tokens, len(self.tokens),
                        prefill, decode, passes, drafted,
                        engine.disk_traffic.since(self._read_before), hardware.cpu_time().since(self._cpu_before), explained)
        return Stats(
            text="".join(self.shown[1:]), token_ids=tuple(self.tokens), seed=self.sampler.seed, prompt_tokens=len(self._ids),
            finish_reason="length" if self.finish == "context" else self.finish, prefill_s=prefill, decode_s=decode,
            ttft_s=ttft, speculation=drafted and drafted.to_json(),
            reasoning_tokens=self.reasoned, stop_string=self.stopped_by, is_whole=self._held.is_whole if self._held else None,
            **engine_costs(engine, found))

    def remarks(self) -> Iterator[Notice]:
        """Notices about how it ended."""
        engine = self.engine
        if self._held and self.finish != "cancelled" and not self._held.is_whole:
            yield Notice(f"the answer ended before it was complete: it does not match {self.compiled.source.flag}")
        if self.finish == "context":
            ways = ["-c for a larger one"] if engine.n_ctx < engine.config.context_length else []
            ways += ["--overflow shift to go on"] if self._may_shift else []
            more = f" ({', '.join(ways)})" if ways else ""
            yield Notice(f"the context of {engine.n_ctx} tokens is full: the answer stops here{more}")
