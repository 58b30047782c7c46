"""What a setting of a packed cache does to a model's answers, measured on tokens that its profile was not recorded on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..quant.kv import codec
from ..quant.kv_ends import ENDS
from .cache import KVCache, open_cache
from .cache_parts import layer_codecs
from .engine import Engine
from .evaluate import log_softmax
from .events import Progress
from .kv_profile import Profile, flips_of
from .model import attention_specs
from .passes import FEW

FIRST, MEANS, PASSES = 4, (3, 4, 5, 6, 8), 3  # bits tried first, and those that `--kv auto` may take
AUTO_FLIPS = 0.005  # of the likeliest next tokens, at most, for `--kv auto`


@dataclass(frozen=True)
class Checked:
    """A mean number of bits, what it costs by the profile, and what it did: KL divergence in nats a token, share of changed top tokens."""

    bits: int
    cost: float
    kld: float
    flips: float


def checked(engine: Engine, profile: Profile, window: Sequence[int], until: float = math.inf) -> Iterator[Progress | Profile]:
    """Find the bits of `--kv auto` in at most PASSES passes over `window`, fewer where it is late (`until`, by the monotonic clock); costs
    tell where to look. Other ends than the usual ones are kept where they change the answers less. Yields the profile with both. `engine`:
    of the CPU, with room for packed caches.
    """
    profile, ends = replace(profile, ends=ENDS[0]), profile.ends
    yield Progress("checking bits", 0, PASSES, "passes")
    wanted = _answers(engine, _open(engine, "32bit", None), window)
    found: dict[int, Checked] = {}
    bits = FIRST
    while len(found) < PASSES and bits not in found and (not found or time.monotonic() < until):
        found[bits] = _check(engine, profile, bits, window, wanted)
        profile = replace(profile, checks=tuple(sorted((one.cost, one.kld, one.flips) for one in found.values())))
        yield Progress("checking bits", len(found), PASSES, "passes")
        likely = [mean for mean in MEANS if profile.flips(profile.bits(mean)) <= AUTO_FLIPS]
        bits = likely[0] if likely else MEANS[-1]
    if ends != ENDS[0] and time.monotonic() < until:
        yield Progress("checking sinks and window", 0, 2, "passes")
        usual = _check(engine, profile, FIRST, window, wanted, answers=True)
        yield Progress("checking sinks and window", 1, 2, "passes")
        other = _check(engine, replace(profile, ends=ends), FIRST, window, wanted, answers=True)
        profile = replace(profile, ends=ends if other.kld < usual.kld else ENDS[0])
    good = [mean for mean, one in found.items() if flips_of(one.kld, one.flips) <= AUTO_FLIPS]
    yield replace(profile, auto=min(good) if good else None)


def _open(engine: Engine, name: str, profile: Profile | None) -> KVCache:
    config, kv = engine.config, codec(name)
    codecs = layer_codecs(kv, config.num_hidden_layers, config.num_key_value_heads, config.head_dim, profile)
    backends = [engine.backends[device] for device in engine.placement.devices]
    sinks, newest = ENDS[0] if profile is None else profile.ends
    return open_cache(backends, attention_specs(config), kv, replace(engine.prepared.shape, sink=sinks, window=newest), codecs)


def _check(engine: Engine, profile: Profile, bits: int, window: Sequence[int], wanted: np.ndarray, answers: bool = False) -> Checked:
    here = _answers(engine, _open(engine, f"{bits}bit", profile), window, answers)
    kld = float((np.exp(wanted) * (wanted - here)).sum(-1).mean())
    return Checked(bits, profile.cost(profile.bits(bits)), kld, float((wanted.argmax(-1) != here.argmax(-1)).mean()))


def _answers(engine: Engine, cache: KVCache, window: Sequence[int], answers: bool = False) -> np.ndarray:
    """Log-probabilities where packed pages are read: page by page, or FEW tokens at a time, as `answers` goes. A page that begins where
    others are sealed finds more tokens exact than its last one would in an answer."""
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
