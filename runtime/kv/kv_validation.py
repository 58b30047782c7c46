"""Validating packed-cache settings by their effect on the model's output, on text that the profile was not recorded on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...quant.kv import codec
from ...quant.kv_sink_split import SINK_SPLITS
from ..cache import KVCache
from ..engine import Engine
from ..events import Notice, Progress
from ..measuring.evaluate import log_softmax
from ..prefill_chunks import FEW
from .cache_builder import build_cache
from .cache_components import layer_codecs
from .cache_shape import layer_specs
from .kv_profile import Profile, flips_of

FIRST_BITS = 4  # mean bits to try first
CANDIDATE_BITS = (3, 4, 5, 6, 8)  # of `--kv auto`
MAX_PASSES = 3  # over the window, one for each setting tried
CHECKED_LAST_BITS = 2  # always measured: its cost is so far from the others' that its predicted effect was half of the real one
AUTO_FLIPS = 0.005  # maximum share of changed top tokens for `--kv auto`
MIN_SCORED = 256  # minimum tokens that read a packed page: with fewer, a single token decides


@dataclass(frozen=True)
class KvValidation:
    """The measured effect of a mean number of bits."""

    bits: int
    cost: float  # as predicted by the profile
    kld: float  # KL divergence in nats per token
    flips: float  # share of changed top tokens


def held_out_window(windows: Sequence[Sequence[int]], first: int) -> int | None:
    """The index of the window held out for validation: the last of the longest, not counting the first. None if fewer than MIN_SCORED of
    its tokens, which are those from `first` on, read a packed page."""
    held_out = max(range(1, len(windows)), key=lambda number: (len(windows[number]), number), default=None)
    return None if held_out is None or len(windows[held_out]) - first < MIN_SCORED else held_out


def validate_auto(engine: Engine, profile: Profile, window: Sequence[int],
                  until: float = math.inf) -> Iterator[Progress | Notice | Profile]:
    """Find the bits of `--kv auto`, and whether the profile's sink split helps; yields the profile with both last.

    At most MAX_PASSES passes over `window` are made, guided by predicted cost, and fewer, with a Notice, if time is up; but the most bits
    are tried before concluding that none is good enough. One more pass measures CHECKED_LAST_BITS, so that refusing them is based on their
    effect. The sink split is kept if it changes the output less than the default one.

    engine: on the CPU, with room for packed caches
    until: end of the time, by the monotonic clock
    """
    profile, sink_split = replace(profile, ends=SINK_SPLITS[0]), profile.ends
    yield Progress("checking bits", 0, MAX_PASSES + 1, "passes")
    reference = _log_probs(engine, _open_cache(engine, "32bit", None), window)
    results: dict[int, KvValidation] = {}
    bits, good_bits, is_late = FIRST_BITS, [], False
    while len(results) < MAX_PASSES and bits not in results and not (is_late and good_bits):
        results[bits] = _check(engine, profile, bits, window, reference)
        profile = _with_checks(profile, results.values())
        yield Progress("checking bits", len(results), MAX_PASSES + 1, "passes")
        good_bits = [bits_tried for bits_tried, result in results.items() if flips_of(result.kld, result.flips) <= AUTO_FLIPS]
        is_late = time.monotonic() >= until
        likely_bits = [bits_tried for bits_tried in CANDIDATE_BITS if profile.flips(profile.bits(bits_tried)) <= AUTO_FLIPS]
        is_last = is_late or len(results) == MAX_PASSES - 1
        bits = likely_bits[0] if likely_bits and (good_bits or not is_last) else CANDIDATE_BITS[-1]
    if bits not in results and len(results) < MAX_PASSES:
        yield Notice(f"validation stopped at its time limit, after {len(results)} of {MAX_PASSES} passes (more --seconds)")
    if time.monotonic() < until:
        profile = _with_checks(profile, [*results.values(), _check(engine, profile, CHECKED_LAST_BITS, window, reference)])
        yield Progress("checking bits", MAX_PASSES + 1, MAX_PASSES + 1, "passes")
    is_late = time.monotonic() >= until
    if sink_split != SINK_SPLITS[0] and is_late:
        yield Notice("there was no time to check {} first and {} newest tokens, which promised less damage: {} and {} stay exact "
                     "(more --seconds)".format(*sink_split, *SINK_SPLITS[0]))
    elif sink_split != SINK_SPLITS[0]:
        yield Progress("validating sinks and window", 0, 2, "passes")
        default_result = _check(engine, profile, FIRST_BITS, window, reference, by_token=True)
        yield Progress("validating sinks and window", 1, 2, "passes")
        split_result = _check(engine, replace(profile, ends=sink_split), FIRST_BITS, window, reference, by_token=True)
        profile = replace(profile, ends=sink_split if split_result.kld < default_result.kld else SINK_SPLITS[0])
    yield replace(profile, auto=min(good_bits) if good_bits else None)


def _with_checks(profile: Profile, results: Iterable[KvValidation]) -> Profile:
    return replace(profile, checks=tuple(sorted((result.cost, result.kld, result.flips) for result in results)))


def _open_cache(engine: Engine, name: str, profile: Profile | None) -> KVCache:
    config, kv = engine.config, codec(name)
    codecs = layer_codecs(kv, config.cache_kv_heads, profile)
    backends = [engine.backends[device] for device in engine.placement.devices]
    sinks, newest = SINK_SPLITS[0] if profile is None else profile.ends
    return build_cache(backends, layer_specs(config), kv, replace(engine.prepared.shape, sink=sinks, window=newest), codecs)


def _check(engine: Engine, profile: Profile, bits: int, window: Sequence[int], reference: np.ndarray,
           by_token: bool = False) -> KvValidation:
    """Measure a mean number of bits against the reference log-probabilities."""
    log_probs = _log_probs(engine, _open_cache(engine, f"{bits}bit", profile), window, by_token)
    kld = float((np.exp(reference) * (reference - log_probs)).sum(-1).mean())
    return KvValidation(bits, profile.cost(profile.bits(bits)), kld, float((reference.argmax(-1) != log_probs.argmax(-1)).mean()))


def _log_probs(engine: Engine, cache: KVCache, window: Sequence[int], by_token: bool = False) -> np.ndarray:
    """Log-probabilities of the tokens that read packed pages, float32 [T, V].

    The window is read page by page or, `by_token`, FEW tokens at a time, as when decoding: the last tokens of a page then find fewer exact
    tokens, since more pages are sealed before them.
    """
    previous, engine.cache = engine.cache, cache
    first = cache.shape.first_reader(by_token)
    try:
        if by_token:
            engine.reset()
            chunks = ((start, engine.forward_logits(window[start : start + FEW])) for start in range(0, len(window), FEW))
        else:
            chunks = engine.score(window, pages=1)
        parts = [log_softmax(logits[max(0, first - start) :]) for start, logits in chunks if start + len(logits) > first]
    finally:
        engine.reset()
        engine.cache = previous
    return np.concatenate(parts)
