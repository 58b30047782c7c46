"""What packing a model's keys and values costs, where: a profile that is recorded on a text, kept beside the weights and read by runs.

`record` runs windows of a text through the model and looks at q, k and v of every layer through taps. Two questions are asked of them:
in which directions noise in K and V costs most (`quant/kv_price.Moments`, which gives each layer its `KVBasis`), and what the sides of
each head cost at 1 to 8 bits (`trials`). `Profile.bits` then shares a mean number of bits among layers, heads and sides.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import UsageError
from ..quant.kv_basis import KVBasis
from ..quant.kv_bits import SIDES, share
from ..quant.kv_price import Moments, Reading, trials
from .engine import Engine
from .evaluate import windows
from .events import Notice, Progress
from .families import LayerWeights
from .model import attention_specs
from .text import Tokenizer

WINDOW = 1024  # tokens of a window, where the context allows
ROWS = 128  # queries of a window that are looked at
SECONDS = 60.0
FOR_MOMENTS = 0.7  # of the seconds; the rest is for trials
KEPT_NBYTES = 512 << 20  # of recorded q, k and v, for trials
MOST_WINDOWS = 16

Bits = list[list[tuple[int, int]]]  # per layer, per KV head: of K, of V


@dataclass(frozen=True)
class Profile:
    """One basis a layer, and what the sides of its heads cost at each of `quant.kv_bits.SIDES`, float32 [H, sides] (K, V); none for a
    layer that the recording did not reach. `weights` names the weights that it was recorded with."""

    layers: tuple[KVBasis, ...]
    costs: tuple[tuple[np.ndarray, np.ndarray] | None, ...]
    weights: str
    tokens: int

    @property
    def hash(self) -> int:
        """64 bits that name the profile in the header of every page."""
        digest = hashlib.sha256(self.weights.encode())
        for basis in self.layers:
            for side in (basis.k_scale, basis.k_matrix, basis.v_matrix):
                digest.update(np.ascontiguousarray(side, "<f4").tobytes())
        return int.from_bytes(digest.digest()[:8], "little") or 1

    def bits(self, mean_k: float, mean_v: float | None = None) -> Bits:
        """Bits of every head's K and V: `mean_k` on average over all sides, or over those of K where `mean_v` says what those of V have."""
        given = np.empty((len(self.layers), self.layers[0].k_scale.shape[0], 2), int)
        for sides, mean in (((0, 1), mean_k),) if mean_v is None else (((0,), mean_k), ((1,), mean_v)):
            given[..., sides] = int(mean)
            reached = [layer for layer, cost in enumerate(self.costs) if cost is not None]
            places = [(layer, head, side) for layer in reached for head in range(given.shape[1]) for side in sides]
            each = share([self.costs[layer][side][head] for layer, head, side in places], mean)
            for place, bits in zip(places, each, strict=True):
                given[place] = bits
        return [[(int(k), int(v)) for k, v in layer] for layer in given]

    def bases(self, bits: Bits) -> list[KVBasis]:
        """The bases for those bits, with the profile's hash."""
        own = self.hash
        return [replace(basis.spread(*zip(*each, strict=True)), profile=own) for basis, each in zip(self.layers, bits, strict=True)]

    def cost(self, bits: Bits) -> float:
        """What those bits cost, in the unit of `quant.kv_price`: for comparing settings of one model."""
        reached = [(cost, layer) for cost, layer in zip(self.costs, bits, strict=True) if cost is not None]
        return sum(float(cost[side][head][SIDES.index(pair[side])]) for cost, layer in reached for head, pair in enumerate(layer)
                   for side in range(2))


def record(engine: Engine, tokenizer: Tokenizer, text: str, weights: str, seconds: float = SECONDS, source: str = "the text",
           clock: Callable[[], float] = time.monotonic) -> Iterator[Progress | Notice | Profile]:
    """Record a profile in about `seconds`; yields Progress, what had to be cut short, and the Profile last.

    `engine`: of the CPU, with an exact cache and a chunk of its whole context, which is a window. `weights`: their name
    (`kv_profile_file.identity`). Raises UsageError for a text or a context in which nothing would be packed.
    """
    shape = engine.cache.shape
    least = Reading(1.0).first_packed_query() + 2
    if engine.n_ctx < least:
        raise UsageError(f"a context of {engine.n_ctx} tokens is never packed: sinks, window and a page take {least}",
                         "a profile is of use for longer contexts only")
    cut = [window for window in windows(tokenizer, text, engine.n_ctx, source) if len(window) >= least][:MOST_WINDOWS]
    if not cut:
        raise UsageError(f"{source} has too few tokens for a profile: at least {least} in a row are needed", "a longer --text")
    assert shape.chunk >= len(cut[0])
    yield from _Recording(engine, cut, clock, clock() + seconds, seconds).run(weights)


class _Stop(Exception):
    """The seconds are over in the middle of a window."""


class _Recording:
    def __init__(self, engine: Engine, cut: Sequence[Sequence[int]], clock: Callable[[], float], until: float, seconds: float) -> None:
        config = engine.config
        self.engine, self.cut, self.clock, self.until, self.seconds = engine, cut, clock, until, seconds
        self.readings = [Reading(spec.scale, spec.window, spec.softcap) for spec in attention_specs(config)]
        self.moments = [Moments(config.num_key_value_heads, config.head_dim) for _ in self.readings]
        self.grams: dict[int, np.ndarray] = {}
        self.sinks: dict[int, np.ndarray | None] = {}
        self.kept: list[list[tuple[np.ndarray, ...]]] = []
        self.kept_nbytes = 0
        self._tapped: dict[str, np.ndarray] = {}

    def run(self, weights: str) -> Iterator[Progress | Notice | Profile]:
        began, done, layers = self.clock(), 0, len(self.moments)
        for number, window in enumerate(self.cut, 1):
            self.kept.append([])
            self.engine.reset()
            try:
                self.engine.model.forward(np.array(window, np.int64), self.engine.cache, self._tap)
            except _Stop:
                break
            done += len(window)
            yield Progress("recording keys and values", done, sum(map(len, self.cut)), "tokens")
            spent = self.clock() - began
            if spent + spent / number > FOR_MOMENTS * self.seconds:
                break
        self.engine.reset()
        reached = sum(moments.windows > 0 for moments in self.moments)
        if not reached:
            raise UsageError(f"{self.seconds:g} seconds are too few to see a layer of this model", "more --seconds")
        if reached < layers:
            yield Notice(f"the profile stopped at its budget of {self.seconds:g} s after {reached} of {layers} layers; the others get the "
                         "same bits everywhere (more --seconds)")
        elif done < sum(map(len, self.cut)):
            yield Notice(f"the profile stopped at its budget of {self.seconds:g} s after {done} of {sum(map(len, self.cut))} tokens")
        config = self.engine.config
        plain = KVBasis.plain(config.num_key_value_heads, config.head_dim)
        bases = [KVBasis.from_moments(*moments.means) if moments.windows else plain for moments in self.moments]
        costs: list[tuple[np.ndarray, np.ndarray] | None] = [None] * layers
        yield from self._try(bases, costs, reached)
        yield Profile(tuple(bases), tuple(costs), weights, max(done, len(self.cut[0])))

    def _try(self, bases: Sequence[KVBasis], costs: list, reached: int) -> Iterator[Progress]:
        """Costs of the layers reached, the mean over as many windows as there is time for, at least one."""
        total = len(self.kept) * reached
        for number, window in enumerate(self.kept):
            if len(window) < reached or (number and self.clock() > self.until):
                break
            for layer, recorded in enumerate(window[:reached]):
                found = trials(*recorded, self.readings[layer], bases[layer], self.sinks[layer])
                old = costs[layer] or (0.0, 0.0)
                costs[layer] = tuple((was * number + now) / (number + 1) for was, now in zip(old, found, strict=True))
                yield Progress("trying bits", number * reached + layer + 1, total, "layers")

    def _tap(self, name: str, layer: int, value: object) -> None:
        if name in ("block_in", "q", "k", "v", "attn_out"):
            self._tapped[name] = np.array(value, np.float32)
        if name != "mlp_in":
            return
        config, tapped = self.engine.config, self._tapped
        power = float(np.square(value, dtype=np.float64).sum(1).mean())
        if layer not in self.grams:
            with self.engine.model.layer(layer) as weights:
                self.grams[layer] = _grams(weights, tapped["attn_out"], config.num_attention_heads, config.residual_multiplier)
                self.sinks[layer] = None if weights.sinks is None else np.array(weights.sinks, np.float32)
        tokens, size = len(tapped["q"]), config.head_dim
        first = Reading(1.0).first_packed_query()
        rows = np.unique(np.linspace(first, tokens - 1, ROWS).astype(np.int64))
        q = np.ascontiguousarray(tapped["q"].reshape(tokens, -1, size)[rows].swapaxes(0, 1))
        k, v = (np.ascontiguousarray(tapped[side].reshape(tokens, -1, size).swapaxes(0, 1)) for side in "kv")
        recorded = (q, k, v, self.grams[layer] / max(power, 1e-30), rows)
        self.moments[layer].add(*recorded, self.readings[layer], self.sinks[layer])
        nbytes = sum(each.nbytes for each in recorded)
        if len(self.kept) == 1 or self.kept_nbytes + nbytes <= KEPT_NBYTES:
            self.kept[-1].append(recorded)
            self.kept_nbytes += nbytes
        if self.clock() > self.until:
            raise _Stop


def _grams(weights: LayerWeights, attended: np.ndarray, heads: int, multiplier: float) -> np.ndarray:
    """W_oᵀ W_o of each query head, float64 [heads, D, D], with what stands between W_o and the residual stream."""
    o = weights.o.weight.to_f32()
    scale = np.float64(multiplier)
    if weights.o_norm is not None and weights.o_norm.kind != "none":
        branch = attended @ o.T
        scale = scale / np.sqrt(np.square(branch, dtype=np.float64).mean())
        if weights.o_norm.weight is not None:
            o = o * (weights.o_norm.weight + np.float32(weights.o_norm.kind == "rms+1"))[:, None]
    parts = np.ascontiguousarray(o.reshape(len(o), heads, -1).swapaxes(0, 1))
    return (parts.swapaxes(1, 2) @ parts).astype(np.float64) * scale**2
