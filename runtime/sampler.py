"""The sampler: biases, penalties, DRY, top-n-sigma, temperature, top-k, top-p, min-p, typical, XTC. The order is that of transformers;
samplers that only llama.cpp has stand where llama.cpp has them. Mirostat (`mirostat.py`) replaces all filters.

Filters run in one compiled kernel over buffers that the sampler owns (28 bytes per token of the vocabulary); token counts are kept between
calls and updated incrementally, so a long history costs no more than a short one. Each sampled token takes one 64-bit number from a
counter-based generator, with XTC one more before it; a greedy token takes none. So the same seed, flags and logits give the same tokens,
whatever the number of threads.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from .. import EffllmError, UsageError
from ..kernels.cpu import sampling
from ..kernels.workspace import address
from .sampling.logprobs import TokenLogprobs, token_logprobs
from .sampling.mirostat import LOOKED_AT, Mirostat

if TYPE_CHECKING:
    from .sampling.dry import Breakers

SMALLEST_TEMPERATURE = 1e-6
MOST_PENALTY = 1e6  # further out a logit may be more than float32 holds
BANNED = -1e30  # a bias that no token is drawn with, and a number all the same
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
MOST_BREAKERS = 64  # each is looked for in every token
MOST_BITS = 100  # of surprise: no token of a softmax in float32 has more than some 150
ROOM = 1024  # tokens of a history that are made room for at once
WHOLE = ("top_k", "penalty_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "seed")
LISTS = ("dry_sequence_breakers", "logit_bias")
OWN = ("seed", "logit_bias")  # of a request, never of a model
HINT = "effllm run --help says what each setting takes and which value is off"


@dataclass(frozen=True)
class SamplerSettings:
    """Temperature 0 is greedy. Neutral: top_k 0, top_p 1, min_p 0, typical_p 1, repetition_penalty 1, presence and frequency 0,
    dry_multiplier 0, top_n_sigma 0 or less, xtc_probability 0 or xtc_threshold above a half, mirostat 0.

    Penalties look at the newest `penalty_last_n` tokens of the history, prompt included; -1 is all of it (as in transformers). DRY looks at
    the newest `dry_penalty_last_n`, and not beyond one of `dry_sequence_breakers`, which are texts. `logit_bias` are pairs of a token id
    and what is added to its logit. `mirostat` is the version, 1 or 2, `mirostat_tau` the target surprise in bits per token, and
    `mirostat_eta` the learning rate.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = -1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = BREAKERS
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    top_n_sigma: float = -1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in LISTS:  # a saved conversation has them as JSON does
            self._take_list(name)
        for name in WHOLE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) and not (name == "seed" and value is None):
                raise UsageError(f"{name} must be a whole number, not {value!r}", HINT)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in LISTS or field.name in WHOLE:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == math.inf:
                raise UsageError(f"{field.name} must be a number, not {value!r}", HINT)
            if abs(value) > sys.float_info.max:  # a whole number that is no float
                raise UsageError(f"{field.name} is too large", HINT)
        self._demand(self.temperature == 0 or self.temperature >= SMALLEST_TEMPERATURE, "temperature",
                     f"0 (greedy) or at least {SMALLEST_TEMPERATURE:g}")
        self._demand(self.top_k >= 0, "top_k", "0 (off) or more")
        self._demand(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        self._demand(0 <= self.min_p <= 1, "min_p", "between 0 (off) and 1")
        self._demand(0 < self.typical_p <= 1, "typical_p", "above 0 and at most 1 (off)")
        self._demand(1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY, "repetition_penalty",
                     f"above 0 and at most {MOST_PENALTY:g}; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            self._demand(abs(getattr(self, name)) <= MOST_PENALTY, name, f"between -{MOST_PENALTY:g} and {MOST_PENALTY:g}; 0 is off")
        for name in ("penalty_last_n", "dry_penalty_last_n"):
            self._demand(getattr(self, name) >= -1, name, "-1 (the whole history) or more")
        self._demand(0 <= self.dry_multiplier <= MOST_PENALTY, "dry_multiplier", f"between 0 (off) and {MOST_PENALTY:g}")
        self._demand(1 <= self.dry_base <= MOST_PENALTY, "dry_base", f"between 1 and {MOST_PENALTY:g}")
        self._demand(0 <= self.dry_allowed_length < 2**31, "dry_allowed_length", "a number of tokens, 0 or more")
        for name in ("xtc_probability", "xtc_threshold"):
            self._demand(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        self._demand(self.mirostat in (0, 1, 2), "mirostat", "0 (off), 1 or 2")
        self._demand(0 <= self.mirostat_tau <= MOST_BITS, "mirostat_tau", f"between 0 and {MOST_BITS}, in bits")
        self._demand(0 <= self.mirostat_eta <= 1, "mirostat_eta", "between 0 and 1")
        self._demand(self.seed is None or 0 <= self.seed < 2**64, "seed", "between 0 and 2**64 - 1")

    def _take_list(self, name: str) -> None:
        """Convert a field with several values to a tuple, and validate it."""
        value = getattr(self, name)
        try:
            value = tuple((token, bias) for token, bias in value) if name == "logit_bias" else value
            is_list = isinstance(value, list | tuple)
        except (TypeError, ValueError):
            is_list = False
        if not is_list:
            raise UsageError(f"{name} must be a list, not {value!r:.80}", HINT)
        object.__setattr__(self, name, tuple(value))
        if name == "dry_sequence_breakers" and len(value) > MOST_BREAKERS:
            raise UsageError(f"{name} must be at most {MOST_BREAKERS} texts, not {len(value)}", HINT)
        for each in value:
            if name == "dry_sequence_breakers" and not (isinstance(each, str) and each):
                raise UsageError(f"{name} must be non-empty strings, not {each!r:.80}", HINT)
            if name == "logit_bias" and not (type(each[0]) is int and each[0] >= 0 and type(each[1]) in (int, float)
                                             and (abs(each[1]) <= MOST_PENALTY or each[1] == BANNED)):
                raise UsageError(f"{name} must be token ids, each with a number of at most {MOST_PENALTY:g}, not {each!r:.80}", HINT)

    def _demand(self, holds: bool, name: str, range_: str) -> None:
        if not holds:
            raise UsageError(f"{name} must be {range_}, not {getattr(self, name)}", HINT)

    @property
    def penalises(self) -> bool:
        """Whether any penalty is on."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return not neutral and self.penalty_last_n != 0

    @property
    def breaks_repeats(self) -> bool:
        """Whether DRY is on."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def moves(self) -> bool:
        """Whether the greedy token may differ from the model's top token."""
        return self.penalises or self.breaks_repeats or bool(self.logit_bias)

    @property
    def cuts_top(self) -> bool:
        """Whether XTC is on."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @classmethod
    def from_generation_config(cls, raw: Mapping[str, object], **overrides: object) -> SamplerSettings:
        """Overrides that are not None win, then `generation_config.json`, then the built-in defaults.

        A file that states any filter is a recipe and is taken whole: what it leaves out is off, not our default.
        """
        stated = {name: raw[name] for name in (field.name for field in fields(cls)) if raw.get(name) is not None and name not in OWN}
        if stated.get("top_k") == -1:
            stated["top_k"] = 0
        recipe = {**OFF, **stated} if stated.keys() & OFF.keys() else stated
        if raw.get("do_sample") is False:
            recipe["temperature"] = 0.0
        try:
            settings = cls(**recipe)
        except UsageError as error:
            hint = "correct the file, or remove it to use the built-in defaults"
            raise EffllmError(f"generation_config.json: {error.message}", hint) from error
        return replace(settings, **{name: value for name, value in overrides.items() if value is not None})


class TokenCounts:
    """Distinct tokens of a history and their counts, updated incrementally with a list that grows, or is truncated or edited."""

    def __init__(self, vocab_size: int) -> None:
        self.counts, self.distinct, self.known = np.zeros(vocab_size, np.int64), np.empty(vocab_size, np.int32), 0
        self._counted: list[int] = []

    def follow(self, history: Sequence[int], last_n: int) -> None:
        """Count the newest `last_n` tokens (-1: all). Ids outside the vocabulary have no logit and are skipped."""
        history = history if isinstance(history, list) else list(history)
        first = 0 if last_n < 0 else max(0, len(history) - last_n)
        held = len(self._counted)
        if first or history[:held] != self._counted:
            self.counts[self.distinct[:self.known]] = 0
            self._counted, self.known, held = [], 0, first
        new = list(history[held:])
        tokens = np.array(new, np.int64)
        self.known = sampling.count_tokens(address(tokens), len(tokens), address(self.counts), len(self.counts), address(self.distinct),
                                           self.known)
        self._counted += new


class Recent:
    """The newest tokens of a history as an array, updated incrementally. `matches` is scratch of its length."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._tokens = np.empty(ROOM, np.int32)
        self.matches = np.empty(ROOM, np.int32)

    def follow(self, history: Sequence[int], last_n: int) -> np.ndarray:
        """int32 [n] of the newest `last_n` tokens (-1: all), a view. Values beyond int32 become -1."""
        history = history if isinstance(history, list) else [int(token) for token in history]
        held = len(self._held)
        if history[:held] != self._held:
            self._held, held = [], 0
        new = history[held:]
        if len(history) > len(self._tokens):
            room = len(history) + max(ROOM, len(history) // 2)
            self._tokens, self.matches = np.resize(self._tokens, room), np.empty(room, np.int32)
        self._tokens[held : len(history)] = [token if 0 <= token < 2**31 else -1 for token in new]
        self._held += new
        return self._tokens[0 if last_n < 0 else max(0, len(history) - last_n) : len(history)]


class Sampler:
    """Samples tokens from logits[V]. `seed` is the one in use, also if none was given. `breakers` are those of the settings, as tokens
    (`dry.py`), or None."""

    def __init__(self, settings: SamplerSettings, vocab_size: int, breakers: Breakers | None = None) -> None:
        self.settings, self.vocab_size, self.breakers = settings, vocab_size, breakers
        self._seen, self._recent = TokenCounts(vocab_size), Recent()
        bias = [(token, value) for token, value in settings.logit_bias if token < vocab_size]
        self._biased, self._bias = np.array([token for token, _ in bias], np.int64), np.array([value for _, value in bias], np.float32)
        self._logits = np.empty(vocab_size, np.float32)
        self._ids, self._weights = np.empty(vocab_size, np.int32), np.empty(vocab_size, np.float32)
        self._keys, self._mass = np.empty(vocab_size, np.uint32), np.empty(sampling.BINS, np.float64)
        self._mirostat = Mirostat(settings.mirostat_tau, settings.mirostat_eta) if settings.mirostat else None
        self.narrow: Callable[[np.ndarray], None] | None = None  # takes away in place what may not be drawn, see `constraint.py`
        self.logprobs: int | None = None  # of how many tokens beside the drawn one it is told how likely they were, in `chances`
        self.chances: TokenLogprobs | None = None
        self.reset(settings.seed)

    def reset(self, seed: int | None = None) -> None:
        """Restart the random numbers, from `seed` or a fresh one, and Mirostat."""
        self.seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        self._random = np.random.Philox(key=self.seed)
        if self._mirostat is not None:
            self._mirostat.reset()

    def sample(self, logits: np.ndarray, history: Sequence[int] = ()) -> int:
        """The next token after `history`, from float32 logits[V]. Raises EffllmError for NaN or infinity."""
        token = self._drawn(self._penalised(logits, history))
        if self.logprobs is not None:
            self.chances = token_logprobs(logits, token, self.logprobs)
        return token

    def _drawn(self, values: np.ndarray) -> int:
        if self.settings.temperature == 0:
            token = int(values.argmax())  # a NaN wins every comparison, ties go to the lowest id
            refuse_broken(values[token])
            return token
        if self._mirostat is not None:
            return self._drawn_by_surprise(values, self._mirostat)
        return self._draw(self._survivors(values))

    def _draw(self, count: int) -> int:
        """Sample one of the first `count` of `_ids`, by weight."""
        return int(sampling.draw(address(self._ids), address(self._weights), count, self._uniform()))

    def _drawn_by_surprise(self, values: np.ndarray, mirostat: Mirostat) -> int:
        ids, weights = self._ids, self._weights
        if self.settings.mirostat == 1:
            count = self._unfiltered(values, LOOKED_AT)
            most = mirostat.likeliest(np.sort(weights[:count])[::-1][:LOOKED_AT], self.vocab_size)
            count = self._unfiltered(values, most)
        else:
            known = self._unfiltered(values)
            kept = np.flatnonzero(mirostat.likely_enough(weights[:known]))
            count = len(kept)
            ids[:count], weights[:count] = ids[kept], weights[kept]
        token = self._draw(count)
        share = float(weights[np.searchsorted(ids[:count], token)])  # ids ascend
        mirostat.drew(share / float(weights[:count].sum(dtype=np.float64)))
        return token

    def _penalised(self, logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
        if logits.shape != (self.vocab_size,):
            raise ValueError(f"logits of shape {logits.shape} for a vocabulary of {self.vocab_size}")
        np.copyto(self._logits, logits)
        settings = self.settings
        if len(self._biased):
            refuse_broken(float(self._logits.max()))  # a sum with what is no number may be one
            np.add.at(self._logits, self._biased, self._bias)
        if settings.penalises and len(history):
            seen = self._seen
            seen.follow(history, settings.penalty_last_n)
            sampling.penalise(address(self._logits), address(seen.counts), address(seen.distinct), seen.known,
                              settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty)
        if settings.breaks_repeats:
            self._penalise_repeats(history)
        if self.narrow is not None:
            refuse_broken(float(self._logits.max()))  # nothing that is broken is hidden by being taken away
            self.narrow(self._logits)
        return self._logits

    def _penalise_repeats(self, history: Sequence[int]) -> None:
        s, breakers = self.settings, self.breakers
        tokens = self._recent.follow(history, s.dry_penalty_last_n)
        rows, at = (0, (0, 0, 0)) if breakers is None else (breakers.rows, map(address, (breakers.first, breakers.starts, breakers.tails)))
        sampling.penalise_repeats(address(self._logits), self.vocab_size, address(tokens), len(tokens), rows, *at,
                                  address(self._recent.matches), address(self._keys), s.dry_multiplier, s.dry_base, s.dry_allowed_length)

    def _uniform(self) -> float:
        """The next random number, in [0, 1)."""
        return (int(self._random.random_raw()) >> 11) * 2.0**-53

    def _survivors(self, values: np.ndarray) -> int:
        s = self.settings
        threshold = s.xtc_threshold if s.cuts_top and self._uniform() < s.xtc_probability else 1.0
        return self._left(values, s.top_n_sigma, s.top_k, s.top_p, s.min_p, s.typical_p, threshold)

    def _unfiltered(self, values: np.ndarray, top_k: int = 0) -> int:
        """The top `top_k` tokens (0: all) with their weights at the temperature."""
        return self._left(values, 0.0, top_k, 1.0, 0.0, 1.0, 1.0)

    def _left(self, values: np.ndarray, sigmas: float, top_k: int, top_p: float, min_p: float, typical_p: float, threshold: float) -> int:
        """How many tokens the filters leave, at the beginning of `_ids` and `_weights`."""
        count = sampling.survivors(address(values), len(values), sigmas, min(top_k, len(values)), self.settings.temperature, top_p, min_p,
                                   typical_p, threshold, *map(address, (self._ids, self._weights, self._keys, self._mass)))
        if count < 0:
            refuse_broken({sampling.FOUND_NAN: math.nan, sampling.FOUND_INFINITY: math.inf}.get(count, -math.inf))
        return count


def refuse_broken(largest: float) -> None:
    """Raises EffllmError for logits whose `largest` is NaN or infinite."""
    if not math.isfinite(largest):
        what = "NaN" if math.isnan(largest) else "infinite logits"
        raise EffllmError(f"the model produced {what} instead of a next token",
                          "the weights may be damaged, or overflow in 16 bits: run again with `--kv 32bit`, else fetch the model again")
