"""The sampler: biases, penalties, DRY, top-n-sigma, temperature, top-k, top-p, min-p, typical, XTC. The order is that of transformers;
samplers that only llama.cpp has come where llama.cpp applies them. Mirostat (`mirostat.py`) replaces all filters.

Filters run in one compiled kernel over buffers that the sampler owns (28 bytes per token of the vocabulary); token counts are kept between
calls and updated incrementally, so a long history costs no more than a short one. Each sampled token takes one 64-bit number from a
counter-based generator, and XTC one more before it; a greedy token takes none. So the same seed, settings and logits give the same
tokens, for any number of threads.
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
from .sampling.mirostat import V1_SAMPLE, Mirostat

if TYPE_CHECKING:
    from .sampling.dry import Breakers

MIN_TEMPERATURE = 1e-6
MAX_PENALTY = 1e6  # a larger one could push a logit out of float32
BANNED_BIAS = -1e30  # the token is never sampled; finite, so that a sum with it is never NaN
NEUTRAL_FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
DEFAULT_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
MAX_BREAKERS = 64  # every token of the vocabulary is searched for each
MAX_SURPRISE_BITS = 100  # a softmax in float32 gives no token a surprise of more than about 150 bits
HISTORY_STEP = 1024  # tokens by which the history buffer grows at least
INTEGER_SETTINGS = ("top_k", "penalty_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "seed")
LIST_SETTINGS = ("dry_sequence_breakers", "logit_bias")
REQUEST_SETTINGS = ("seed", "logit_bias")  # never taken from generation_config.json
HINT = "effllm run --help says what each setting takes and which value is off"


@dataclass(frozen=True)
class SamplerSettings:
    """The settings of a `Sampler`. A value out of range is a UsageError."""

    temperature: float = 0.8  # 0 is greedy
    top_k: int = 40  # 0 is off
    top_p: float = 0.95  # 1 is off
    min_p: float = 0.05  # 0 is off
    typical_p: float = 1.0  # 1 is off
    repetition_penalty: float = 1.0  # 1 is off
    presence_penalty: float = 0.0  # 0 is off
    frequency_penalty: float = 0.0  # 0 is off
    penalty_last_n: int = -1  # tokens of the history, prompt included, that the penalties count; -1 is all (as in transformers)
    dry_multiplier: float = 0.0  # 0 is off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # tokens of the history that DRY searches; -1 is all
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_BREAKERS  # texts that a repeated sequence does not cross
    xtc_probability: float = 0.0  # 0 is off
    xtc_threshold: float = 0.1  # above a half is off
    top_n_sigma: float = -1.0  # 0 or less is off
    mirostat: int = 0  # version 1 or 2; 0 is off
    mirostat_tau: float = 5.0  # target surprise, in bits per token
    mirostat_eta: float = 0.1  # learning rate
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    seed: int | None = None  # None: a random one

    def __post_init__(self) -> None:
        for name in LIST_SETTINGS:  # lists when read from a saved conversation (JSON)
            self._set_tuple(name)
        for name in INTEGER_SETTINGS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) and not (name == "seed" and value is None):
                raise UsageError(f"{name} must be a whole number, not {value!r}", HINT)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in LIST_SETTINGS or field.name in INTEGER_SETTINGS:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == math.inf:
                raise UsageError(f"{field.name} must be a number, not {value!r}", HINT)
            if abs(value) > sys.float_info.max:  # an int beyond any float
                raise UsageError(f"{field.name} is too large", HINT)
        self._require(self.temperature == 0 or self.temperature >= MIN_TEMPERATURE, "temperature",
                     f"0 (greedy) or at least {MIN_TEMPERATURE:g}")
        self._require(self.top_k >= 0, "top_k", "0 (off) or more")
        self._require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        self._require(0 <= self.min_p <= 1, "min_p", "between 0 (off) and 1")
        self._require(0 < self.typical_p <= 1, "typical_p", "above 0 and at most 1 (off)")
        self._require(1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY, "repetition_penalty",
                     f"above 0 and at most {MAX_PENALTY:g}; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(abs(getattr(self, name)) <= MAX_PENALTY, name, f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}; 0 is off")
        for name in ("penalty_last_n", "dry_penalty_last_n"):
            self._require(getattr(self, name) >= -1, name, "-1 (the whole history) or more")
        self._require(0 <= self.dry_multiplier <= MAX_PENALTY, "dry_multiplier", f"between 0 (off) and {MAX_PENALTY:g}")
        self._require(1 <= self.dry_base <= MAX_PENALTY, "dry_base", f"between 1 and {MAX_PENALTY:g}")
        self._require(0 <= self.dry_allowed_length < 2**31, "dry_allowed_length", "a number of tokens, 0 or more")
        for name in ("xtc_probability", "xtc_threshold"):
            self._require(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        self._require(self.mirostat in (0, 1, 2), "mirostat", "0 (off), 1 or 2")
        self._require(0 <= self.mirostat_tau <= MAX_SURPRISE_BITS, "mirostat_tau", f"between 0 and {MAX_SURPRISE_BITS}, in bits")
        self._require(0 <= self.mirostat_eta <= 1, "mirostat_eta", "between 0 and 1")
        self._require(self.seed is None or 0 <= self.seed < 2**64, "seed", "between 0 and 2**64 - 1")

    def _set_tuple(self, name: str) -> None:
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
        if name == "dry_sequence_breakers" and len(value) > MAX_BREAKERS:
            raise UsageError(f"{name} must be at most {MAX_BREAKERS} texts, not {len(value)}", HINT)
        for item in value:
            if name == "dry_sequence_breakers" and not (isinstance(item, str) and item):
                raise UsageError(f"{name} must be non-empty strings, not {item!r:.80}", HINT)
            if name == "logit_bias" and not _is_valid_bias(*item):
                raise UsageError(f"{name} must be token ids, each with a number of at most {MAX_PENALTY:g}, not {item!r:.80}", HINT)

    def _require(self, holds: bool, name: str, range_: str) -> None:
        if not holds:
            raise UsageError(f"{name} must be {range_}, not {getattr(self, name)}", HINT)

    @property
    def has_penalties(self) -> bool:
        """Whether a repetition, presence or frequency penalty is on."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return not neutral and self.penalty_last_n != 0

    @property
    def has_dry(self) -> bool:
        """Whether DRY is on."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def changes_argmax(self) -> bool:
        """Whether the greedy token may differ from the model's top token."""
        return self.has_penalties or self.has_dry or bool(self.logit_bias)

    @property
    def has_xtc(self) -> bool:
        """Whether XTC is on."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @classmethod
    def from_generation_config(cls, raw: Mapping[str, object], **overrides: object) -> SamplerSettings:
        """Overrides that are not None win, then `generation_config.json` (`raw`), then the built-in defaults.

        A file with any filter setting is a complete recipe: a filter that it omits is off, instead of having our default.
        """
        names = [field.name for field in fields(cls) if field.name not in REQUEST_SETTINGS]
        stated = {name: raw[name] for name in names if raw.get(name) is not None}
        if stated.get("top_k") == -1:
            stated["top_k"] = 0
        recipe = {**NEUTRAL_FILTERS, **stated} if stated.keys() & NEUTRAL_FILTERS.keys() else stated
        if raw.get("do_sample") is False:
            recipe["temperature"] = 0.0
        try:
            settings = cls(**recipe)
        except UsageError as error:
            hint = "correct the file, or remove it to use the built-in defaults"
            raise EffllmError(f"generation_config.json: {error.message}", hint) from error
        return replace(settings, **{name: value for name, value in overrides.items() if value is not None})


def _is_valid_bias(token: object, bias: object) -> bool:
    return type(token) is int and token >= 0 and type(bias) in (int, float) and (abs(bias) <= MAX_PENALTY or bias == BANNED_BIAS)


class TokenCounts:
    """The distinct tokens of a history and their counts, updated incrementally while the history is appended to, truncated or edited.

    counts: int64 [V], occurrences of each token.
    distinct: int32 [V], whose first `num_distinct` are the tokens that occur.
    """

    def __init__(self, vocab_size: int) -> None:
        self.counts, self.distinct, self.num_distinct = np.zeros(vocab_size, np.int64), np.empty(vocab_size, np.int32), 0
        self._counted: list[int] = []

    def follow(self, history: Sequence[int], last_n: int) -> None:
        """Count the newest `last_n` tokens (-1: all). Ids outside the vocabulary have no logit and are skipped."""
        history = history if isinstance(history, list) else list(history)
        first = 0 if last_n < 0 else max(0, len(history) - last_n)
        counted = len(self._counted)
        if first or history[:counted] != self._counted:
            self.counts[self.distinct[:self.num_distinct]] = 0
            self._counted, self.num_distinct, counted = [], 0, first
        new = list(history[counted:])
        tokens = np.array(new, np.int64)
        self.num_distinct = sampling.count_tokens(address(tokens), len(tokens), address(self.counts), len(self.counts),
                                                  address(self.distinct), self.num_distinct)
        self._counted += new


class RecentTokens:
    """The newest tokens of a history as an array, updated incrementally. `matches` is scratch of its length."""

    def __init__(self) -> None:
        self._history: list[int] = []
        self._tokens = np.empty(HISTORY_STEP, np.int32)
        self.matches = np.empty(HISTORY_STEP, np.int32)

    def follow(self, history: Sequence[int], last_n: int) -> np.ndarray:
        """int32 [n] of the newest `last_n` tokens (-1: all), a view. Values beyond int32 become -1."""
        history = history if isinstance(history, list) else [int(token) for token in history]
        known = len(self._history)
        if history[:known] != self._history:
            self._history, known = [], 0
        new = history[known:]
        if len(history) > len(self._tokens):
            capacity = len(history) + max(HISTORY_STEP, len(history) // 2)
            self._tokens, self.matches = np.resize(self._tokens, capacity), np.empty(capacity, np.int32)
        self._tokens[known : len(history)] = [token if 0 <= token < 2**31 else -1 for token in new]
        self._history += new
        return self._tokens[0 if last_n < 0 else max(0, len(history) - last_n) : len(history)]


class Sampler:
    """Samples tokens from logits[V].

    seed: the one in use, also if the settings have none.
    breakers: the sequence breakers of the settings as tokens (`dry.py`), or None.
    mask_logits: masks the tokens that may not be sampled, in place (a constraint, a reasoning budget); None if all may.
    logprobs: the number of alternatives to report with each token; None reports nothing.
    token_logprobs: log-probabilities of the last token, if `logprobs` is set.
    """

    def __init__(self, settings: SamplerSettings, vocab_size: int, breakers: Breakers | None = None) -> None:
        self.settings, self.vocab_size, self.breakers = settings, vocab_size, breakers
        self._counts, self._recent = TokenCounts(vocab_size), RecentTokens()
        bias = [(token, value) for token, value in settings.logit_bias if token < vocab_size]
        self._bias_tokens, self._bias = np.array([token for token, _ in bias], np.int64), np.array([value for _, value in bias], np.float32)
        self._logits = np.empty(vocab_size, np.float32)
        self._ids, self._weights = np.empty(vocab_size, np.int32), np.empty(vocab_size, np.float32)
        self._keys, self._mass = np.empty(vocab_size, np.uint32), np.empty(sampling.BINS, np.float64)
        self._mirostat = Mirostat(settings.mirostat_tau, settings.mirostat_eta) if settings.mirostat else None
        self.mask_logits: Callable[[np.ndarray], None] | None = None
        self.logprobs: int | None = None
        self.token_logprobs: TokenLogprobs | None = None
        self.reset(settings.seed)

    def reset(self, seed: int | None = None) -> None:
        """Restart the random numbers, from `seed` or a fresh one, and Mirostat."""
        self.seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        self._random = np.random.Philox(key=self.seed)
        if self._mirostat is not None:
            self._mirostat.reset()

    def sample(self, logits: np.ndarray, history: Sequence[int] = ()) -> int:
        """The next token after `history`, from float32 logits[V]. Raises EffllmError for NaN or infinity."""
        token = self._select(self._penalise(logits, history))
        if self.logprobs is not None:
            self.token_logprobs = token_logprobs(logits, token, self.logprobs)
        return token

    def _select(self, values: np.ndarray) -> int:
        if self.settings.temperature == 0:
            token = int(values.argmax())  # a NaN wins every comparison, ties go to the lowest id
            require_finite(values[token])
            return token
        if self._mirostat is not None:
            return self._sample_mirostat(values, self._mirostat)
        return self._draw(self._filter(values))

    def _draw(self, count: int) -> int:
        """Sample one of the first `count` of `_ids`, by weight."""
        return int(sampling.draw(address(self._ids), address(self._weights), count, self._uniform()))

    def _sample_mirostat(self, values: np.ndarray, mirostat: Mirostat) -> int:
        ids, weights = self._ids, self._weights
        if self.settings.mirostat == 1:
            count = self._top_k(values, V1_SAMPLE)
            top_k = mirostat.top_k(np.sort(weights[:count])[::-1][:V1_SAMPLE], self.vocab_size)
            count = self._top_k(values, top_k)
        else:
            total = self._top_k(values)
            kept = np.flatnonzero(mirostat.within_bound(weights[:total]))
            count = len(kept)
            ids[:count], weights[:count] = ids[kept], weights[kept]
        token = self._draw(count)
        weight = float(weights[np.searchsorted(ids[:count], token)])  # ids ascend
        mirostat.update(weight / float(weights[:count].sum(dtype=np.float64)))
        return token

    def _penalise(self, logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
        if logits.shape != (self.vocab_size,):
            raise ValueError(f"logits of shape {logits.shape} for a vocabulary of {self.vocab_size}")
        np.copyto(self._logits, logits)
        settings = self.settings
        if len(self._bias_tokens):
            require_finite(float(self._logits.max()))  # a bias could turn infinity into NaN
            np.add.at(self._logits, self._bias_tokens, self._bias)
        if settings.has_penalties and len(history):
            seen = self._counts
            seen.follow(history, settings.penalty_last_n)
            sampling.penalise(address(self._logits), address(seen.counts), address(seen.distinct), seen.num_distinct,
                              settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty)
        if settings.has_dry:
            self._penalise_repeats(history)
        if self.mask_logits is not None:
            require_finite(float(self._logits.max()))  # the mask must not hide a NaN
            self.mask_logits(self._logits)
        return self._logits

    def _penalise_repeats(self, history: Sequence[int]) -> None:
        """Apply DRY."""
        s, breakers = self.settings, self.breakers
        tokens = self._recent.follow(history, s.dry_penalty_last_n)
        rows, tables = (0, (0, 0, 0)) if breakers is None else (
            breakers.rows, map(address, (breakers.first, breakers.starts, breakers.tails)))
        sampling.penalise_repeats(address(self._logits), self.vocab_size, address(tokens), len(tokens), rows, *tables,
                                  address(self._recent.matches), address(self._keys), s.dry_multiplier, s.dry_base, s.dry_allowed_length)

    def _uniform(self) -> float:
        """The next random number, in [0, 1)."""
        return (int(self._random.random_raw()) >> 11) * 2.0**-53

    def _filter(self, values: np.ndarray) -> int:
        """The number of tokens that the filters of the settings keep, see `_run_filters`."""
        s = self.settings
        xtc_threshold = s.xtc_threshold if s.has_xtc and self._uniform() < s.xtc_probability else 1.0
        return self._run_filters(values, s.top_n_sigma, s.top_k, s.top_p, s.min_p, s.typical_p, xtc_threshold)

    def _top_k(self, values: np.ndarray, top_k: int = 0) -> int:
        """Only top-k (0: all tokens), with weights at the temperature of the settings."""
        return self._run_filters(values, 0.0, top_k, 1.0, 0.0, 1.0, 1.0)

    def _run_filters(self, values: np.ndarray, top_n_sigma: float, top_k: int, top_p: float, min_p: float, typical_p: float,
                     xtc_threshold: float) -> int:
        """The number of tokens that the filters keep; they and their weights become the first of `_ids` and `_weights`."""
        count = sampling.survivors(address(values), len(values), top_n_sigma, min(top_k, len(values)), self.settings.temperature, top_p,
                                   min_p, typical_p, xtc_threshold, *map(address, (self._ids, self._weights, self._keys, self._mass)))
        if count < 0:
            require_finite({sampling.HAS_NAN: math.nan, sampling.HAS_INFINITY: math.inf}.get(count, -math.inf))
        return count


def require_finite(largest: float) -> None:
    """Raises EffllmError for logits whose `largest` is NaN or infinite."""
    if not math.isfinite(largest):
        what = "NaN" if math.isnan(largest) else "infinite logits"
        raise EffllmError(f"the model produced {what} instead of a next token",
                          "the weights may be damaged, or overflow in 16 bits: run again with `--kv 32bit`, else fetch the model again")
