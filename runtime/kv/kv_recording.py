"""Recording a KV profile: windows of text run through the model, with taps on q, k and v of every layer.

They answer three questions: in which directions noise costs most (`quant/kv_price.Moments`), what each side of each head costs at few bits
(`trials`), and which tokens should stay exact (`quant/kv_sink_split.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from ... import EffllmError, UsageError
from ...quant.kv_basis import KVBasis
from ...quant.kv_noise_cost import AttentionParams, Moments, trial_costs
from ...quant.kv_sink_split import SINK_SPLITS, choose_sink_split, sink_split_costs
from ..config import ModelConfig
from ..conversion.convert_stream import DAMAGED
from ..engine import Engine
from ..events import Notice, Progress
from ..layer import LayerWeights
from ..measuring.evaluate import windows
from ..tokenizer import Tokenizer
from .cache_shape import attention_specs
from .kv_profile import Profile

WINDOW = 1024  # tokens per window, if the context allows
ROWS = 128  # queries sampled per window
SECONDS = 60.0
MOMENTS_SHARE, TRIALS_SHARE = 0.7, 0.2  # of the time; the rest is for comparing ends
ENDS_BITS, ENDS_STEP = 4, 4  # mean bits at which ends are compared; use every n-th sampled query
MAX_RECORDED_NBYTES = 512 << 20  # of recorded q, k and v, for trials
MAX_WINDOWS = 16
TAPPED = {"q": "queries", "k": "keys", "v": "values", "attn_out": "outputs of attention"}


def record(engine: Engine, tokenizer: Tokenizer, text: str, weights: str, seconds: float = SECONDS, source: str = "the text",
           clock: Callable[[], float] = time.monotonic, held_back: int | None = None) -> Iterator[Progress | Notice | Profile]:
    """Record a profile in about `seconds`; yields Progress, notices of what was cut short, and the Profile last.

    `engine`: on the CPU, with a chunk as long as its context, which is a window. `weights`: their `kv_profile_file.identity`. Of the
    windows that are long enough, number `held_back` is held out. Raises UsageError for a text or context too short to pack anything,
    EffllmError if the model produces NaN or infinity."""
    shape = engine.cache.shape
    least = AttentionParams(1.0).first_packed_query() + 2
    if engine.n_ctx < least:
        raise UsageError(f"a context of {engine.n_ctx} tokens is never packed: sinks, window and a page take {least}",
                         "a profile only helps longer contexts")
    cut = [window for window in windows(tokenizer, text, engine.n_ctx, source) if len(window) >= least]
    cut = [window for number, window in enumerate(cut) if number != held_back][:MAX_WINDOWS]
    cut = [echoed(window) if number % 2 == 0 else window for number, window in enumerate(cut)]
    if not cut:
        raise UsageError(f"{source} has too few tokens for a profile: at least {least} in a row are needed", "a longer --text")
    assert shape.chunk >= len(cut[0])
    yield from _Recording(engine, cut, clock, clock() + seconds, seconds).run(weights)


def echoed(window: Sequence[int]) -> list[int]:
    """A window that repeats its first half. Induction heads are inactive on most texts; in an answer that depends on its context they are
    the ones that matter."""
    half = list(window[: len(window) // 2])
    return half + half


class _Stop(Exception):
    """Time is up in the middle of a window."""


class _Recording:
    def __init__(self, engine: Engine, cut: Sequence[Sequence[int]], clock: Callable[[], float], until: float, seconds: float) -> None:
        config = engine.config
        self.engine, self.cut, self.clock, self.until, self.seconds = engine, cut, clock, until, seconds
        self.readings = [AttentionParams(spec.scale, spec.window, spec.softcap) for spec in attention_specs(config)]
        self.places = {layer: place for place, layer in enumerate(config.attention_layers)}  # layers with keys and values, in order
        self.moments = [Moments(*heads) for heads in config.cache_kv_heads]
        self.grams: dict[int, np.ndarray] = {}
        self.sinks: dict[int, np.ndarray | None] = {}
        self.kept: list[list[tuple[np.ndarray, ...]]] = []
        self.kept_nbytes = 0
        self._tapped: dict[str, np.ndarray] = {}

    def run(self, weights: str) -> Iterator[Progress | Notice | Profile]:
        """Record for about `seconds`; the Profile comes last. `weights`: the hash of the weights. Raises UsageError if there is no time for
        a single layer."""
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
            if spent + spent / number > MOMENTS_SHARE * self.seconds:
                break
        self.engine.reset()
        reached = sum(moments.windows > 0 for moments in self.moments)
        if not reached:
            raise UsageError(f"{self.seconds:g} seconds are not enough for a single layer of this model", "increase --seconds")
        if reached < layers:
            yield Notice(f"recording stopped at its time limit, {self.seconds:g} s, after {reached} of {layers} layers; the others "
                         "get uniform bits (increase --seconds)")
        elif done < sum(map(len, self.cut)):
            yield Notice(f"recording stopped at its time limit, {self.seconds:g} s, after {done} of {sum(map(len, self.cut))} "
                         "tokens")
        bases = [KVBasis.from_moments(*moments.means) if moments.windows else KVBasis.plain(*heads)
                 for moments, heads in zip(self.moments, self.engine.config.cache_kv_heads, strict=True)]
        costs: list[tuple[np.ndarray, np.ndarray] | None] = [None] * layers
        yield from self._try(bases, costs, reached)
        profile = Profile(tuple(bases), tuple(costs), weights, max(done, len(self.cut[0])))
        compared: list[np.ndarray] = []
        yield from self._compare_ends(profile, compared)
        yield replace(profile, ends=SINK_SPLITS[choose_sink_split(np.array(compared))])

    def _try(self, bases: Sequence[KVBasis], costs: list, reached: int) -> Iterator[Progress]:
        """Costs of the layers reached, averaged over as many windows as time allows, at least one."""
        total, until = len(self.kept) * reached, self.until - (1 - MOMENTS_SHARE - TRIALS_SHARE) * self.seconds
        for number, window in enumerate(self.kept):
            if len(window) < reached or (number and self.clock() > until):
                break
            for layer, recorded in enumerate(window[:reached]):
                found = trial_costs(*recorded, self.readings[layer], bases[layer], self.sinks[layer])
                old = costs[layer] or (0.0, 0.0)
                costs[layer] = tuple((was * number + now) / (number + 1) for was, now in zip(old, found, strict=True))
                yield Progress("trying bits", number * reached + layer + 1, total, "layers")

    def _compare_ends(self, profile: Profile, compared: list[np.ndarray]) -> Iterator[Progress]:
        """Add to `compared` the cost of each of ENDS, for every stored window that time allows."""
        whole, bits = [window for window in self.kept if len(window) == len(self.moments)], profile.bits(ENDS_BITS)
        for number, window in enumerate(whole, 1):
            if self.clock() > self.until:
                break
            cost = np.zeros(len(SINK_SPLITS))
            for layer, (q, k, v, gram, rows) in enumerate(window):
                few = slice(number % ENDS_STEP, None, ENDS_STEP)
                cost += sink_split_costs(q[:, few], k, v, gram, rows[few], self.readings[layer], profile.layers[layer], bits[layer],
                                  self.sinks[layer])
            compared.append(cost)
            yield Progress("comparing sinks and windows", number, len(whole), "windows")

    def _tap(self, name: str, layer: int, value: object) -> None:
        if (place := self.places.get(layer)) is None:
            return
        if name in TAPPED:
            self._tapped[name] = np.array(value, np.float32)
            if not np.isfinite(self._tapped[name]).all():
                self._refuse(f"{TAPPED[name]} of layer {layer} are NaN or infinite on this text")
        config, tapped = self.engine.config, self._tapped
        if name != ("block_out" if layer in config.layers_without_mlp else "mlp_in"):  # where attention's output has been added
            return
        power = float(np.square(value, dtype=np.float64).sum(1).mean())
        if place not in self.grams:
            with self.engine.model.layer(layer) as weights:
                self.grams[place] = _grams(weights, tapped["attn_out"], config, layer)
                self.sinks[place] = None if weights.sinks is None else np.array(weights.sinks, np.float32)
        tokens, size = len(tapped["q"]), config.kv_heads_of(layer)[1]
        first = AttentionParams(1.0).first_packed_query()
        rows = np.unique(np.linspace(first, tokens - 1, ROWS).astype(np.int64))
        q = np.ascontiguousarray(tapped["q"].reshape(tokens, -1, size)[rows].swapaxes(0, 1))
        k, v = (np.ascontiguousarray(tapped[side].reshape(tokens, -1, size).swapaxes(0, 1)) for side in "kv")
        recorded = (q, k, v, self.grams[place] / max(power, 1e-30), rows)
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is reported below
            self.moments[place].add(*recorded, self.readings[place], self.sinks[place])
        if not self.moments[place].are_finite:
            self._refuse(f"keys or values of layer {layer} are too large to be squared on this text")
        nbytes = sum(each.nbytes for each in recorded)
        if len(self.kept) == 1 or self.kept_nbytes + nbytes <= MAX_RECORDED_NBYTES:
            self.kept[-1].append(recorded)
            self.kept_nbytes += nbytes
        if self.clock() > self.until:
            raise _Stop

    def _refuse(self, why: str) -> NoReturn:
        """Raises EffllmError, naming the tensor that is the cause, if any."""
        name = self.engine.model.find_nan()
        raise EffllmError(why if name is None else f"tensor {name} holds NaN or infinity",
                          "the model runs without a profile; effllm verify MODEL looks for damage" if name is None else DAMAGED)


def _grams(weights: LayerWeights, attended: np.ndarray, config: ModelConfig, layer: int) -> np.ndarray:
    """W_oᵀ W_o of each query head, float64 [heads, D, D], including what stands between W_o and the residual stream; for latent attention,
    W_o is the latent's up-projection, and rotary channels do not contribute."""
    o, heads = weights.o.weight.to_f32(), config.query_heads_of(layer)
    scale = np.float64(config.residual_multiplier * config.multiplier("o"))
    if weights.o_norm is not None and weights.o_norm.kind != "none":
        branch = attended @ o.T
        scale = scale / np.sqrt(np.square(branch, dtype=np.float64).mean())
        if weights.o_norm.weight is not None:
            o = o * (weights.o_norm.weight + np.float32(weights.o_norm.kind == "rms+1"))[:, None]
    parts = np.ascontiguousarray(o.reshape(len(o), heads // (2 if config.differential_attention else 1), -1).swapaxes(0, 1))
    if config.differential_attention:  # differential attention: the second half of the heads is subtracted from the first
        parts = np.concatenate([parts, np.float32(weights.differential_lambda) * parts])
    if (own := config.mla_of(layer)) is not None:
        values = weights.mla.kv_b.to_f32().reshape(heads, own.kv_b_rows, own.rank)[:, own.nope :]
        parts = np.pad(parts @ values, ((0, 0), (0, 0), (own.rope, 0)))
    return (parts.swapaxes(1, 2) @ parts).astype(np.float64) * scale**2
