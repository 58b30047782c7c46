"""Speculative decoding: several drafted tokens are verified in one pass together with the last sampled token. If a pass waits for the disk
this costs almost nothing; in memory it costs less than decoding them one by one.

Output does not change. The kernels give a token the same bits in a pass of up to MAX_VERIFIED tokens as in a pass of its own, so row i of
the logits is exactly that of a run without speculation, as long as the drafts before i were right. The run's own sampler samples from the
rows in order, with the same history and random numbers; its token is the answer's, whatever was drafted. If it equals the draft, the next
row is already there; otherwise the remaining rows are discarded. No token is accepted for being likely, so no rejection sampling is needed:
a seeded run gives the same text with and without speculation.

A drafted token is committed to the KV cache only when it is accepted. So an answer may end early, be cancelled or shift its context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from operator import add, sub
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..kernels.cpu.ops import FEW_TOKENS
from ..offload.notes import Fallback
from .speculation.draft_length import IN_MEMORY, MAX_CATCH_UP, ON_DISK, AcceptanceRates, DraftThresholds, PassCosts, best_length
from .speculation.draft_model import MODEL_DRAFT, DraftModel
from .speculation.drafts import CHECKED_TOKENS, Draft, Proposer, RecycledTokens, SuffixMatch
from .speculation.mtp import MtpDrafts
from .speculation.trained_draft import TrainedDraft

if TYPE_CHECKING:
    from .cache import KVCache
    from .engine import Engine
    from .events import Progress
    from .model import Model
    from .prepare import Prepared
    from .sampler import SamplerSettings
    from .sampling.dry import Breakers
    from .speculation.drafts import ModelDrafts

MAX_VERIFIED = FEW_TOKENS  # tokens of a pass that the kernels multiply and attend exactly as one token
TOO_SHORT = "the answer ended while passes of one token were timed"
NO_DRAFT = "nothing in the text repeated"
NOT_WORTH_IT = "no draft was likely enough to pay off"
SKIPPED = "the answer ended between two attempts to draft, which are rare where passes are quick and the last ones had no draft"
FORCED = "forced"  # kind of a draft that a constraint forces, up to the choice of how to cut the text into tokens
# A lookup takes some 40 us. If passes take less than FAST_PASS_S and the last IDLE_PASSES had no draft, only one pass in LOOKUP_INTERVAL
# looks for one: a repetition is then found up to three tokens later.
FAST_PASS_S, IDLE_PASSES, LOOKUP_INTERVAL = 0.004, 32, 4
# A draft model that does not pay is tried once in TRIAL_INTERVAL passes, with TRIAL_TOKENS, if that takes (with catching up) at most
# MAX_TRIAL_SHARE of those passes' time. While it is up to date, TRIAL_PRIOR accepted tokens are assumed.
TRIAL_INTERVAL, TRIAL_TOKENS, MAX_TRIAL_SHARE, TRIAL_PRIOR = 64, 2, 0.025, 3.0


class Counts(NamedTuple):
    """What speculation did during an answer."""

    passes: int = 0
    drafted: int = 0  # tokens
    accepted: int = 0  # tokens
    cost: float = 0.0  # of all passes and of drafting, in passes of one token
    draftable: int = 0  # passes with room for a draft
    proposed: int = 0  # passes for which a draft was found, verified or not
    skipped: int = 0  # passes for which none was looked for

    def __add__(self, other: Counts) -> Counts:
        """The sum; a tuple's own + would concatenate."""
        return Counts(*map(add, self, other))

    def since(self, before: Counts) -> Counts:
        return Counts(*map(sub, self, before))

    @property
    def tokens_per_pass(self) -> float:
        return (self.passes + self.accepted) / self.passes if self.passes else 0.0

    @property
    def gain(self) -> float:
        """The speedup over decoding without drafts."""
        return (self.passes + self.accepted) / self.cost if self.cost else 1.0

    @property
    def undrafted(self) -> str:
        """Why nothing was drafted; empty if something was."""
        if self.drafted:
            return ""
        if not self.draftable:
            return SKIPPED if self.skipped else TOO_SHORT
        return NOT_WORTH_IT if self.proposed else NO_DRAFT

    def to_json(self) -> dict[str, object]:
        return {"passes": self.passes, "drafted": self.drafted, "accepted": self.accepted, "tokens_per_pass": self.tokens_per_pass,
                "gain": self.gain, "undrafted": self.undrafted or None}


def speculation(prepared: Prepared, target: Model, cache: KVCache) -> Speculation | None:
    """The drafting of a run of the model `target` with the KV cache `cache`, None for a run without."""
    if not prepared.speculation:
        return None
    model: ModelDrafts | None = None
    if isinstance(prepared.speculation.draft, TrainedDraft):
        model = prepared.speculation.draft.drafts(target, cache, prepared.placement.ctx, prepared.shape.chunk)
    elif prepared.speculation.draft is not None:
        model = DraftModel(prepared.speculation.draft, prepared.config.vocab_size)
    elif prepared.speculation.mtp:
        model = MtpDrafts(target, prepared.placement.ctx, prepared.shape.chunk)
    proposers = (SuffixMatch(), RecycledTokens()) if prepared.speculation.recycles else (SuffixMatch(),)
    return Speculation(proposers, model, thresholds=ON_DISK if prepared.speculation.waits else IN_MEMORY)


class Speculation:
    """Drafting for one engine. It lives as long as the engine: costs and acceptance rates are learned across answers.

    proposers: sources that draft at negligible cost.
    model: a draft model, or a layer of the engine's model; None if there is neither.
    forced: of a constraint (`constraint.py`): the tokens that must come next, at most so many; None without one.
    """

    def __init__(self, proposers: Sequence[Proposer], model: ModelDrafts | None = None,
                 clock: Callable[[], float] = time.perf_counter, thresholds: DraftThresholds = ON_DISK) -> None:
        self._proposers, self._model, self._clock = proposers, model, clock
        self._acceptance, self._costs = AcceptanceRates(), PassCosts(thresholds)
        self._passes = self._drafted = self._accepted = self._draftable = self._proposed = self._skipped = 0
        self._cost = 0.0
        self._history: list[int] = []
        self._drafts: list[Draft] = []  # of the last pass, verified or not
        self.forced: Callable[[int], Sequence[int]] | None = None
        self._step: object = None  # the cache's step that `_logits` belong to
        self._pending: tuple[int, ...] = ()  # drafted tokens that may still be accepted
        self._logits = np.empty((0, 0), np.float32)  # after the last token and after each pending one
        self._failure_reported = False
        self._model_was_right = False  # whether the model's last draft was right as a whole
        self._passes_since_trial = TRIAL_INTERVAL
        self._passes_since_draft = 0

    def fork(self) -> Speculation:
        """For another sequence of the same model, without a draft model. What was learned about the model (pass costs, likely
        successors) is shared; positions in the text are not."""
        fork = Speculation([SuffixMatch() if isinstance(source, SuffixMatch) else source for source in self._proposers], clock=self._clock)
        fork._costs = self._costs
        return fork

    @property
    def counts(self) -> Counts:
        """Totals over all answers."""
        return Counts(self._passes, self._drafted, self._accepted, self._cost, self._draftable, self._proposed, self._skipped)

    @property
    def num_pending(self) -> int:
        """Drafts of the last pass that may still be accepted."""
        return len(self._pending)

    def load(self) -> Iterator[Progress]:
        """Load the draft model."""
        return self._model.load() if self._model else iter(())

    def read(self, engine: Engine) -> Iterator[Progress]:
        """Let the draft model prefill the engine's prompt, unless its drafts are known not to pay."""
        if (model := self._usable_model) is None:
            return
        timed, per_token = self._costs.is_known(1), model.costs.per_token
        rate = self._acceptance.rate(MODEL_DRAFT, TRIAL_PRIOR)
        if not timed or best_length(rate, self._costs, MAX_VERIFIED - 1, per_token / self._costs.single_token)[0]:
            model.follow(engine.tokens)
            yield from model.read(engine.cancelled)

    @property
    def num_hidden_states(self) -> int | None:
        """How many of a pass's last hidden states the drafts need, None for all."""
        return 0 if self._model is None else self._model.num_hidden_states

    def add_hidden_states(self, tokens: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, verified: bool) -> None:
        """The hidden states of a pass, see `ModelDrafts.add_hidden_states`."""
        if self._model is not None:
            self._model.add_hidden_states(tokens, start, ids, x, verified)

    def announcements(self) -> list[Fallback]:
        """New notices since the last call."""
        if self._model is None or not self._model.failed or self._failure_reported:
            return []
        self._failure_reported = True
        return [Fallback(self._model.failed)]

    @property
    def _usable_model(self) -> ModelDrafts | None:
        """The draft model, unless it failed."""
        return None if self._model is None or self._model.failed else self._model

    def reset(self) -> None:
        """The engine drops its sequence."""
        if self._model:
            self._model.reset()

    def close(self) -> None:
        if self._model:
            self._model.close()

    def set_sampling(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Set how tokens will be sampled."""
        if self._model:
            self._model.set_sampling(settings, breakers)

    def has_next(self, engine: Engine, token: int) -> bool:
        """Whether `token` was drafted, so that the logits after it exist. Valid until the next pass of the model, for any sequence."""
        return bool(self._pending) and engine.cache.step is self._step and self._pending[0] == token

    def next_logits(self, engine: Engine, token: int, left: int | None) -> np.ndarray:
        """Append `token`; returns the logits after it, float32 [V], a view. `left`: tokens that may still be generated, None for no
        limit."""
        if self.has_next(engine, token):
            engine.accept_token(token)
            self._pending, self._logits = self._pending[1:], self._logits[1:]
            self._accepted += 1
            return self._logits[0]
        self._pending = ()
        if self._skips_lookup():
            logits = engine.run_draft([token])
            engine.accept_token(token)
            self._passes_since_draft, self._skipped = self._passes_since_draft + 1, self._skipped + 1
            self._passes, self._cost = self._passes + 1, self._cost + 1.0
            return logits[0]
        limit = min(MAX_VERIFIED, engine.cache.max_speculative_tokens, engine.n_ctx - len(engine.tokens) - 1,
                    MAX_VERIFIED if left is None else left) - 1
        self._follow(engine.tokens, token)
        started = self._clock()
        draft = self._draft(limit, engine)
        drafted_at = self._clock()
        logits = engine.run_draft([token, *draft])
        if draft and np.isnan(logits).any():  # a wrong draft may overflow where the answer does not
            draft, logits = (), engine.run_draft([token])
        engine.accept_token(token)
        for proposer in self._proposers:
            proposer.observe([token, *draft], logits)
        self._step, self._pending, self._logits = engine.cache.step, draft, logits
        self._passes_since_draft = 0 if draft else self._passes_since_draft + 1
        self._costs.record(1 + len(draft), self._clock() - drafted_at)
        drafting_cost = (drafted_at - started) / self._costs.single_token if self._model else 0.0
        self._passes, self._drafted = self._passes + 1, self._drafted + len(draft)
        self._cost += max(1.0, self._costs.ratio(1 + len(draft))) + drafting_cost  # a ratio below 1 is noise of the clock
        return logits[0]

    def _skips_lookup(self) -> bool:
        """Whether this pass looks for no draft. Never before the first complete pass."""
        if self._passes_since_draft < IDLE_PASSES or self._passes_since_draft % LOOKUP_INTERVAL == 0 or len(self._proposers) > 1:
            return False  # with recycled tokens, the logits of every pass count
        return self._model is None and self.forced is None and self._costs.single_token < FAST_PASS_S

    def _follow(self, tokens: list[int], token: int) -> None:
        """The text is now `tokens` and `token`: evaluate the last drafts, and update all proposers. Takes constant time in the length of
        the text, because only its end decides whether it continues the previous one."""
        known = len(self._history)
        new = [*tokens[known:], token]
        if known <= len(tokens) and tokens[max(0, known - CHECKED_TOKENS) : known] == self._history[-CHECKED_TOKENS:]:
            for draft in self._drafts:
                all_right = self._acceptance.update(draft.kind, draft.tokens, new)
                self._model_was_right = all_right if draft.kind == MODEL_DRAFT else self._model_was_right
            self._history += new
        else:
            known, self._history = 0, [*tokens, token]
        for proposer in self._proposers:
            proposer.follow(self._history, known)

    def _draft(self, limit: int, engine: Engine) -> tuple[int, ...]:
        """The tokens to verify after the next, at most `limit`: as many as pay, of the draft with the highest expected gain."""
        self._drafts = [draft for proposer in self._proposers if (draft := proposer.propose(MAX_VERIFIED - 1)) is not None]
        if self.forced is not None and (tokens := self.forced(MAX_VERIFIED - 1)):
            self._drafts.append(Draft(tuple(tokens), FORCED))
        self._passes_since_trial += 1
        if self._costs.single_token_is_due or limit < 1:
            return ()
        self._draftable += 1
        self._proposed += bool(self._drafts) or self._usable_model is not None
        length, gain, draft = 0, 0.0, None
        for candidate in self._drafts:
            rate = self._acceptance.rate(candidate.kind)
            candidate_length, candidate_gain = best_length(rate, self._costs, min(limit, len(candidate.tokens)))
            if draft is None or candidate_gain > gain:
                length, gain, draft = candidate_length, candidate_gain, candidate
        if (model := self._usable_model) is not None:
            model_draft = self._model_draft(model, limit, gain if length else 0.0, engine.cancelled)
            if model_draft is not None:
                return model_draft.tokens
        return draft.tokens[:length] if length else ()

    def _model_draft(self, model: ModelDrafts, limit: int, other_gain: float, cancelled: Callable[[], bool]) -> Draft | None:
        """The draft model's draft, if it promises more than `other_gain` (that of the best other draft), or is due for a trial. Catching
        up must pay off within TRIAL_INTERVAL passes by measured costs: assumed ones are low, and it would catch up again and again."""
        per_token, behind = model.costs.per_token / self._costs.single_token, model.tokens_behind(len(self._history))
        catch_up = model.costs.prefill_s(behind) / self._costs.single_token
        length, gain = best_length(self._acceptance.rate(MODEL_DRAFT), self._costs, limit, per_token)
        saved = TRIAL_INTERVAL * (gain - max(1.0, other_gain)) if self._costs.is_known(1 + length) else 0.0
        if not length or gain <= other_gain or catch_up > saved:
            length = min(TRIAL_TOKENS, limit)
            if not self._is_trial(length, per_token, other_gain, behind, catch_up):
                return None
        model.follow(self._history)
        draft = model.propose(length, cancelled)
        self._passes_since_trial = 0
        if draft is not None:
            self._drafts.append(draft)
        return draft

    def _is_trial(self, length: int, per_token: float, other_gain: float, behind: int, catch_up: float) -> bool:
        """Whether to try the draft model although it is not expected to pay. While it is up to date, a few drafts show its acceptance
        rate, and go on while they are right. Later it would have to catch up first: then only rarely, and only if accepted drafts would
        pay and catching up is cheap."""
        is_current = behind <= MAX_CATCH_UP
        rate = self._acceptance.rate(MODEL_DRAFT, TRIAL_PRIOR) if is_current and not self._model_was_right else 1.0
        best, gain = best_length(rate, self._costs, length, per_token)
        if not best or gain <= other_gain:
            return False
        spent = catch_up + per_token * length + self._costs.ratio(1 + length) - 1
        is_due = self._passes_since_trial >= TRIAL_INTERVAL and spent <= MAX_TRIAL_SHARE * self._passes_since_trial
        return is_current or is_due
