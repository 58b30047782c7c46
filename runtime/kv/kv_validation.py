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

FIRST, MEANS, PASSES = 4, (3, 4, 5, 6, 8), 3  # first bits to try, candidates of `--kv auto`, passes
FEWEST_BITS = 2  # tried last: its cost is far from the others', and its predicted effect was half of the real one
AUTO_FLIPS = 0.005  # of top next tokens, at most, for `--kv auto`
MIN_SCORED = 256  # tokens that read a packed page: with fewer, a single token decides


@dataclass(frozen=True)
class KvValidation:
    """A mean number of bits, its predicted cost, and its effect: KL divergence in nats per token, share of changed top tokens."""

    bits: int
    cost: float
    kld: float
    flips: float


def held_out_window(cut: Sequence[Sequence[int]], first: int) -> int | None:
    """The index of the window held out for validation: the last of the longest after the first one, if at least LEAST_SCORED of its tokens,
    those from `first` on, read a packed page; else None."""
    longest = max(range(1, len(cut)), key=lambda number: (len(cut[number]), number), default=None)
    return None if longest is None or len(cut[longest]) - first < MIN_SCORED else longest


def validate_auto(engine: Engine, profile: Profile, window: Sequence[int],
                  until: float = math.inf) -> Iterator[Progress | Notice | Profile]:
    """Find the bits of `--kv auto` in at most PASSES passes over `window`, guided by cost. Fewer, with a Notice, if time is up (`until`, by
    the monotonic clock); but the most bits are tried before concluding that none will do. One more pass measures FEWEST bits, so that
    refusing them is based on their effect. Other sink and window sizes than the default are kept if they change the output less. Yields the
    profile with both. `engine`: on the CPU, with room for packed caches."""
    profile, ends = replace(profile, ends=SINK_SPLITS[0]), profile.ends
    yield Progress("checking bits", 0, PASSES + 1, "passes")
    wanted = _answers(engine, _open(engine, "32bit", None), window)
    found: dict[int, KvValidation] = {}
    bits, good, late = FIRST, [], False
    while len(found) < PASSES and bits not in found and not (late and good):
        found[bits] = _check(engine, profile, bits, window, wanted)
        profile = _with(profile, found.values())
        yield Progress("checking bits", len(found), PASSES + 1, "passes")
        good, late = [mean for mean, one in found.items() if flips_of(one.kld, one.flips) <= AUTO_FLIPS], time.monotonic() >= until
        likely = [mean for mean in MEANS if profile.flips(profile.bits(mean)) <= AUTO_FLIPS]
        is_last = late or len(found) == PASSES - 1
        bits = likely[0] if likely and (good or not is_last) else MEANS[-1]
    if bits not in found and len(found) < PASSES:
        yield Notice(f"validation stopped at its time limit, after {len(found)} of {PASSES} passes (more --seconds)")
    if time.monotonic() < until:
        profile = _with(profile, [*found.values(), _check(engine, profile, FEWEST_BITS, window, wanted)])
        yield Progress("checking bits", PASSES + 1, PASSES + 1, "passes")
    late = time.monotonic() >= until
    if ends != SINK_SPLITS[0] and late:
        yield Notice("there was no time to check {} first and {} newest tokens, which promised less damage: {} and {} stay exact "
                     "(more --seconds)".format(*ends, *SINK_SPLITS[0]))
    elif ends != SINK_SPLITS[0]:
        yield Progress("validating sinks and window", 0, 2, "passes")
        usual = _check(engine, profile, FIRST, window, wanted, answers=True)
        yield Progress("validating sinks and window", 1, 2, "passes")
        other = _check(engine, replace(profile, ends=ends), FIRST, window, wanted, answers=True)
        profile = replace(profile, ends=ends if other.kld < usual.kld else SINK_SPLITS[0])
    yield replace(profile, auto=min(good) if good else None)


def _with(profile: Profile, found: Iterable[KvValidation]) -> Profile:
    return replace(profile, checks=tuple(sorted((one.cost, one.kld, one.flips) for one in found)))


def _open(engine: Engine, name: str, profile: Profile | None) -> KVCache:
    config, kv = engine.config, codec(name)
    codecs = layer_codecs(kv, config.cache_kv_heads, profile)
    backends = [engine.backends[device] for device in engine.placement.devices]
    sinks, newest = SINK_SPLITS[0] if profile is None else profile.ends
    return build_cache(backends, layer_specs(config), kv, replace(engine.prepared.shape, sink=sinks, window=newest), codecs)


def _check(engine: Engine, profile: Profile, bits: int, window: Sequence[int], wanted: np.ndarray, answers: bool = False) -> KvValidation:
    here = _answers(engine, _open(engine, f"{bits}bit", profile), window, answers)
    kld = float((np.exp(wanted) * (wanted - here)).sum(-1).mean())
    return KvValidation(bits, profile.cost(profile.bits(bits)), kld, float((wanted.argmax(-1) != here.argmax(-1)).mean()))


def _answers(engine: Engine, cache: KVCache, window: Sequence[int], answers: bool = False) -> np.ndarray:
    """Log-probabilities where packed pages are read: page by page, or FEW tokens at a time, as decoding does. A page that begins when
    others are sealed finds more tokens exact than its last token would while decoding."""
    old, engine.cache = engine.cache, cache
    first = cache.shape.first_reader(answers)
    try:
        if answers:
            engine.reset()
            pieces = ((at, engine.forward_logits(window[at : at + FEW])) for at in range(0, len(window), FEW))
        else:
            pieces = engine.score(window, pages=1)
        parts = [log_softmax(logits[max(0, first - start) :]) for start, logits in pieces if start + len(logits) > first]
    finally:
        engine.reset()
        engine.cache = old
    return np.concatenate(parts)
