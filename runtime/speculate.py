"""Speculative decoding: several drafted tokens are verified in one pass together with the certain one. If a pass waits for the disk this
costs almost nothing; in memory it costs less than decoding them one by one.

Output does not change. The kernels give a token the same bits in a pass of up to COLUMNS tokens as in a pass of its own, so row i holds
exactly the logits of a run without speculation, as long as the drafts before i were right. The run's own sampler draws from the rows in
order, with the same history and random numbers; its token is the answer's, whatever was drafted. If it equals the draft, the next row is
already there; otherwise the remaining rows are discarded. No token is accepted for being likely, so no rejection sampling is needed: a
seeded run gives the same text with and without speculation.

Rows are taken as they are needed. If an answer ends early, is cancelled or shifts its context, the remaining rows were never committed to
the KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from operator import add, sub
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..kernels.cpu.ops import FEW_TOKENS
from ..offload.notes import Fallback
from .speculation.draft_length import COMPUTING, STEADY, WAITING, AcceptanceRates, DraftThresholds, PassCosts, best_length
from .speculation.draft_model import KIND, DraftModel
from .speculation.drafts import SAME, Draft, Proposer, RecycledTokens, SuffixMatch
from .speculation.mtp import OwnDrafts
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

COLUMNS = FEW_TOKENS  # the most tokens of a pass that are multiplied and attend as one token does
TOO_SHORT = "the answer ended while passes of one token were timed"
NO_GUESS = "nothing in the text repeated"
UNLIKELY = "no draft was likely enough to pay off"
RESTED = "the answer ended between two attempts to draft, which are rare where passes are quick and the last ones had no draft"
FORCED = "forced"  # the kind of a guess that leaves the model no choice but that of how to cut it into tokens
# Looking for a guess takes some 40 us. Where a pass takes less than QUICK_S, and none of the last QUIET had a draft, effllm looks in
# every fourth only: a repetition is found up to three tokens later.
QUICK_S, QUIET, LOOK_EVERY = 0.004, 32, 4
# A draft model that does not pay: passes between guesses, tokens of one, the share of those passes' time that it may take with what is read
# for it, and right guesses that are assumed of it while it has read the text.
TRY_EVERY, TRY, TRY_SHARE, HOPE = 64, 2, 0.025, 3.0


class Counts(NamedTuple):
    """Passes of an answer, drafted tokens, and accepted ones. `cost`: of the passes, in passes of one token. `free`: passes with room
    for a draft, `guesses`: those that had one, run or not. `rested`: passes for which none was looked for."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0
    free: int = 0
    guesses: int = 0
    rested: int = 0

    def __add__(self, more: Counts) -> Counts:
        """The sum; a tuple's own + would concatenate."""
        return Counts(*map(add, self, more))

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
        if not self.free:
            return RESTED if self.rested else TOO_SHORT
        return UNLIKELY if self.guesses else NO_GUESS

    def to_json(self) -> dict[str, object]:
        return {"passes": self.passes, "drafted": self.drafted, "accepted": self.accepted, "tokens_per_pass": self.tokens_per_pass,
                "gain": self.gain, "undrafted": self.undrafted or None}


def speculation(prepared: Prepared, own: Model, cache: KVCache) -> Speculation | None:
    """The drafting of a run of the model `own` with the KV cache `cache`, None for a run without."""
    if not prepared.speculation:
        return None
    model: ModelDrafts | None = None
    if isinstance(prepared.speculation.draft, TrainedDraft):
        model = prepared.speculation.draft.drafts(own, cache, prepared.placement.ctx, prepared.shape.chunk)
    elif prepared.speculation.draft is not None:
        model = DraftModel(prepared.speculation.draft, prepared.config.vocab_size)
    elif prepared.speculation.mtp:
        model = OwnDrafts(own, prepared.placement.ctx, prepared.shape.chunk)
    proposers = (SuffixMatch(), RecycledTokens()) if prepared.speculation.recycles else (SuffixMatch(),)
    return Speculation(proposers, model, pays=WAITING if prepared.speculation.waits else COMPUTING)


class Speculation:
    """Drafting for one engine. `proposers` draft at negligible cost, `model` is a draft model or a layer of the engine's model. It lives
    as long as the engine: costs and acceptance rates are learned across answers."""

    def __init__(self, proposers: Sequence[Proposer], model: ModelDrafts | None = None,
                 clock: Callable[[], float] = time.perf_counter, pays: DraftThresholds = WAITING) -> None:
        self._proposers, self._model, self._clock = proposers, model, clock
        self._trust, self._costs = AcceptanceRates(), PassCosts(pays)
        self._passes = self._drafted = self._accepted = self._free = self._guesses = self._rested = 0
        self._cost = 0.0
        self._history: list[int] = []
        self._judged: list[Draft] = []  # guesses of the last pass, run or not
        self.forced: Callable[[int], Sequence[int]] | None = None  # what has to come, at most so many tokens; see `constraint.py`
        self._step: object = None  # the cache's step that the rows below belong to
        self._ahead: tuple[int, ...] = ()
        self._rows = np.empty((0, 0), np.float32)
        self._said_failed = self._right = False  # the latter: the last guess of the draft model was, as a whole
        self._since_model, self._since_draft = TRY_EVERY, 0  # the latter counts passes that ended

    def another(self) -> Speculation:
        """For another sequence of the same model, without a draft model. What was learned about the model (pass costs, likely
        successors) is shared; positions in the text are not."""
        made = Speculation([SuffixMatch() if isinstance(each, SuffixMatch) else each for each in self._proposers], clock=self._clock)
        made._costs = self._costs
        return made

    @property
    def counts(self) -> Counts:
        """Totals over all answers."""
        return Counts(self._passes, self._drafted, self._accepted, self._cost, self._free, self._guesses, self._rested)

    @property
    def waiting(self) -> int:
        """Drafts of the last pass that may still be accepted."""
        return len(self._ahead)

    def load(self) -> Iterator[Progress]:
        """Load the draft model."""
        return self._model.load() if self._model else iter(())

    def read(self, engine: Engine) -> Iterator[Progress]:
        """Let the draft model prefill the engine's prompt, unless its drafts are known not to pay."""
        if (model := self._drafting) is None:
            return
        known, extra = self._costs.is_known(1), model.costs.token
        if not known or best_length(self._trust.share(KIND, HOPE), self._costs, COLUMNS - 1, extra / self._costs.alone)[0]:
            model.follow(engine.tokens)
            yield from model.read(engine.cancelled)

    @property
    def reads(self) -> int | None:
        """How many of a pass's last hidden states the drafts need, None for all."""
        return 0 if self._model is None else self._model.reads

    def saw(self, held: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, certain: bool) -> None:
        """The hidden states of a pass, see `ModelDrafts.saw`."""
        if self._model is not None:
            self._model.saw(held, start, ids, x, certain)

    def announcements(self) -> list[Fallback]:
        """New notices since the last call."""
        if self._model is None or not self._model.failed or self._said_failed:
            return []
        self._said_failed = True
        return [Fallback(self._model.failed)]

    @property
    def _drafting(self) -> ModelDrafts | None:
        """The draft model, if it is usable."""
        return None if self._model is None or self._model.failed else self._model

    def reset(self) -> None:
        """The engine drops its sequence."""
        if self._model:
            self._model.reset()

    def close(self) -> None:
        if self._model:
            self._model.close()

    def choose_as(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Set how tokens will be sampled."""
        if self._model:
            self._model.choose_as(settings, breakers)

    def has_next(self, engine: Engine, token: int) -> bool:
        """Was `token` drafted, so that the logits after it exist? Valid until the next pass of the model, for whatever sequence."""
        return bool(self._ahead) and engine.cache.step is self._step and self._ahead[0] == token

    def after(self, engine: Engine, token: int, left: int | None) -> np.ndarray:
        """Hold `token`; returns the logits after it, float32 [V], a view. `left`: tokens that may still be generated (None: no limit)."""
        if self.has_next(engine, token):
            engine.accept_token(token)
            self._ahead, self._rows = self._ahead[1:], self._rows[1:]
            self._accepted += 1
            return self._rows[0]
        self._ahead = ()
        if self._rests():
            rows = engine.run_ahead([token])
            engine.accept_token(token)
            self._since_draft, self._rested = self._since_draft + 1, self._rested + 1
            self._passes, self._cost = self._passes + 1, self._cost + 1.0
            return rows[0]
        most = min(COLUMNS, engine.cache.ahead, engine.n_ctx - len(engine.tokens) - 1, COLUMNS if left is None else left) - 1
        self._follow(engine.tokens, token)
        began = self._clock()
        draft, started = self._draft(most, engine), self._clock()
        rows = engine.run_ahead([token, *draft])
        if draft and np.isnan(rows).any():  # a guess may overflow what the answer does not come near
            draft, rows = (), engine.run_ahead([token])
        engine.accept_token(token)
        for proposer in self._proposers:
            proposer.observe([token, *draft], rows)
        self._step, self._ahead, self._rows = engine.cache.step, draft, rows
        self._since_draft = 0 if draft else self._since_draft + 1
        self._costs.took(1 + len(draft), self._clock() - started)
        guessing = (started - began) / self._costs.alone if self._model else 0.0
        self._passes, self._drafted = self._passes + 1, self._drafted + len(draft)
        self._cost += max(1.0, self._costs.ratio(1 + len(draft))) + guessing  # no less than one token's: that is a clock's noise
        return rows[0]

    def _rests(self) -> bool:
        """Does this pass go without looking for a draft? Never before the first complete pass."""
        if self._since_draft < QUIET or self._since_draft % LOOK_EVERY == 0 or len(self._proposers) > 1:
            return False  # what past passes found likely is seen pass by pass
        return self._model is None and self.forced is None and self._costs.alone < QUICK_S

    def _follow(self, held: list[int], token: int) -> None:
        """The text is now `held` and a token: judge the last drafts, and update all proposers. Constant time in the length of the text:
        whether it continues the previous one is judged by its end."""
        known = len(self._history)
        new = [*held[known:], token]
        if known <= len(held) and held[max(0, known - SAME) : known] == self._history[-SAME:]:
            for draft in self._judged:
                whole = self._trust.judge(draft.kind, draft.tokens, new)
                self._right = whole if draft.kind == KIND else self._right
            self._history += new
        else:
            known, self._history = 0, [*held, token]
        for proposer in self._proposers:
            proposer.follow(self._history, known)

    def _draft(self, most: int, engine: Engine) -> tuple[int, ...]:
        """The tokens to verify after the next: as many as pay, of the draft with the highest expected gain."""
        self._judged = [draft for proposer in self._proposers if (draft := proposer.propose(COLUMNS - 1)) is not None]
        if self.forced is not None and (tokens := self.forced(COLUMNS - 1)):
            self._judged.append(Draft(tuple(tokens), FORCED))
        self._since_model += 1
        if self._costs.alone_is_due or most < 1:
            return ()
        self._free += 1
        self._guesses += bool(self._judged) or self._drafting is not None
        found = [(*best_length(self._trust.share(draft.kind), self._costs, min(most, len(draft.tokens))), draft) for draft in self._judged]
        length, value, draft = max(found, key=lambda each: each[1], default=(0, 0.0, None))
        if (model := self._drafting) is not None:
            guess = self._guess(model, most, value if length else 0.0, engine.cancelled)
            if guess is not None:
                return guess.tokens
        return draft.tokens[:length] if length else ()

    def _guess(self, model: ModelDrafts, most: int, otherwise: float, cancelled: Callable[[], bool]) -> Draft | None:
        """The draft model's draft, if it promises more than `otherwise`, or is due for a trial. Its catching up must pay off within
        TRY_EVERY passes by measured costs; guessed ones are low, and it would catch up again and again."""
        extra, behind = model.costs.token / self._costs.alone, model.behind(len(self._history))
        reading = model.costs.reading(behind) / self._costs.alone
        length, value = best_length(self._trust.share(KIND), self._costs, most, extra)
        gain = TRY_EVERY * (value - max(1.0, otherwise)) if self._costs.is_known(1 + length) else 0.0
        if not length or value <= otherwise or reading > gain:
            length = min(TRY, most)
            if not self._tries(length, extra, otherwise, behind, reading):
                return None
        model.follow(self._history)
        guess = model.propose(length, cancelled)
        self._since_model = 0
        if guess is not None:
            self._judged.append(guess)
        return guess

    def _tries(self, length: int, extra: float, otherwise: float, behind: int, reading: float) -> bool:
        """Is the draft model tried although it is not expected to pay? While it is up to date, a few drafts show its acceptance rate,
        continued while they are right. Later it would have to catch up first: only rarely, where accepted drafts would pay and catching
        up is cheap."""
        share = self._trust.share(KIND, HOPE) if behind <= STEADY and not self._right else 1.0
        hoped, value = best_length(share, self._costs, length, extra)
        if not hoped or value <= otherwise:
            return False
        spent = reading + extra * length + self._costs.ratio(1 + length) - 1
        return behind <= STEADY or (self._since_model >= TRY_EVERY and spent <= TRY_SHARE * self._since_model)
