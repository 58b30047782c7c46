"""Recording a KV profile: windows of text run through the model, with taps on q, k and v of every layer.

The recorded values answer three questions: in which directions noise costs most (`Moments`), what each side of each head costs at few bits
(`trial_costs`), and which tokens should stay exact (`quant/kv_sink_split.py`).
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
QUERIES_PER_WINDOW = 128  # queries sampled per window
DEFAULT_SECONDS = 60.0
MOMENTS_SHARE, TRIALS_SHARE = 0.7, 0.2  # of the time; the rest is for comparing sink splits
SPLIT_BITS, SPLIT_QUERY_STEP = 4, 4  # sink splits are compared at this mean number of bits, with every n-th sampled query
MAX_RECORDED_NBYTES = 512 << 20  # of recorded q, k and v, for trials
MAX_WINDOWS = 16
TAPPED_NAMES = {"q": "queries", "k": "keys", "v": "values", "attn_out": "outputs of attention"}


def record(engine: Engine, tokenizer: Tokenizer, text: str, weights: str, seconds: float = DEFAULT_SECONDS, source: str = "the text",
           clock: Callable[[], float] = time.monotonic, held_back: int | None = None) -> Iterator[Progress | Notice | Profile]:
    """Record a profile in about `seconds`; yields Progress, notices of what was cut short, and the Profile last.

    engine: on the CPU, with a chunk as long as its context, which is the length of a window
    weights: `kv_profile_file.identity` of the weights
    source: what the text is called in messages
    held_back: index, among the windows that are long enough, of one not to use

    Raises UsageError for a text or context too short to pack anything, EffllmError if the model produces NaN or infinity.
    """
    shape = engine.cache.shape
    min_tokens = AttentionParams(1.0).first_packed_query() + 2
    if engine.n_ctx < min_tokens:
        raise UsageError(f"a context of {engine.n_ctx} tokens is never packed: sinks, window and a page take {min_tokens}",
                         "a profile only helps longer contexts")
    token_windows = [window for window in windows(tokenizer, text, engine.n_ctx, source) if len(window) >= min_tokens]
    token_windows = [window for number, window in enumerate(token_windows) if number != held_back][:MAX_WINDOWS]
    token_windows = [repeat_first_half(window) if number % 2 == 0 else window for number, window in enumerate(token_windows)]
    if not token_windows:
        raise UsageError(f"{source} has too few tokens for a profile: at least {min_tokens} in a row are needed", "a longer --text")
    assert shape.chunk >= len(token_windows[0])
    yield from _Recording(engine, token_windows, clock, clock() + seconds, seconds).run(weights)


def repeat_first_half(window: Sequence[int]) -> list[int]:
    """The first half of a window, twice. It activates induction heads, which are inactive on most texts but matter in answers that depend
    on their context."""
    half = list(window[: len(window) // 2])
    return half + half


class _TimeUp(Exception):
    """Time is up in the middle of a window."""


class _Recording:
    """One recording: runs the windows, then evaluates what the taps recorded."""

    def __init__(self, engine: Engine, windows: Sequence[Sequence[int]], clock: Callable[[], float], until: float, seconds: float) -> None:
        config = engine.config
        self.engine, self.token_windows, self.clock, self.until, self.seconds = engine, windows, clock, until, seconds
        self.attention_params = [AttentionParams(spec.scale, spec.window, spec.softcap) for spec in attention_specs(config)]
        self.indexes = {layer: index for index, layer in enumerate(config.attention_layers)}  # of layers with keys and values
        self.moments = [Moments(*heads) for heads in config.cache_kv_heads]
        self.grams: dict[int, np.ndarray] = {}
        self.sinks: dict[int, np.ndarray | None] = {}
        self.recorded: list[list[tuple[np.ndarray, ...]]] = []  # by window and layer: arguments of `Moments.add`
        self.recorded_nbytes = 0
        self._tapped: dict[str, np.ndarray] = {}

    def run(self, weights: str) -> Iterator[Progress | Notice | Profile]:
        """Record for about `seconds`; yields the Profile last. Raises UsageError if there is no time for a single layer."""
        started, tokens_done, layers = self.clock(), 0, len(self.moments)
        total_tokens = sum(map(len, self.token_windows))
        for number, window in enumerate(self.token_windows, 1):
            self.recorded.append([])
            self.engine.reset()
            try:
                self.engine.model.forward(np.array(window, np.int64), self.engine.cache, self._tap)
            except _TimeUp:
                break
            tokens_done += len(window)
            yield Progress("recording keys and values", tokens_done, total_tokens, "tokens")
            spent = self.clock() - started
            if spent + spent / number > MOMENTS_SHARE * self.seconds:
                break
        self.engine.reset()
        num_reached = sum(moments.windows > 0 for moments in self.moments)
        if not num_reached:
            raise UsageError(f"{self.seconds:g} seconds are not enough for a single layer of this model", "increase --seconds")
        if num_reached < layers:
            yield Notice(f"recording stopped at its time limit, {self.seconds:g} s, after {num_reached} of {layers} layers; the others "
                         "get uniform bits (increase --seconds)")
        elif tokens_done < total_tokens:
            yield Notice(f"recording stopped at its time limit, {self.seconds:g} s, after {tokens_done} of {total_tokens} tokens")
        bases = [KVBasis.from_moments(*moments.means) if moments.windows else KVBasis.plain(*heads)
                 for moments, heads in zip(self.moments, self.engine.config.cache_kv_heads, strict=True)]
        costs: list[tuple[np.ndarray, np.ndarray] | None] = [None] * layers
        yield from self._run_trials(bases, costs, num_reached)
        profile = Profile(tuple(bases), tuple(costs), weights, max(tokens_done, len(self.token_windows[0])))
        split_costs: list[np.ndarray] = []
        yield from self._compare_sink_splits(profile, split_costs)
        yield replace(profile, ends=SINK_SPLITS[choose_sink_split(np.array(split_costs))])

    def _run_trials(self, bases: Sequence[KVBasis], costs: list, reached: int) -> Iterator[Progress]:
        """Set `costs` of the layers reached, averaged over as many windows as time allows, at least one."""
        total, until = len(self.recorded) * reached, self.until - (1 - MOMENTS_SHARE - TRIALS_SHARE) * self.seconds
        for number, window in enumerate(self.recorded):
            if len(window) < reached or (number and self.clock() > until):
                break
            for layer, recorded in enumerate(window[:reached]):
                trial = trial_costs(*recorded, self.attention_params[layer], bases[layer], self.sinks[layer])
                previous = costs[layer] or (0.0, 0.0)
                costs[layer] = tuple((before * number + value) / (number + 1) for before, value in zip(previous, trial, strict=True))
                yield Progress("trying bits", number * reached + layer + 1, total, "layers")

    def _compare_sink_splits(self, profile: Profile, split_costs: list[np.ndarray]) -> Iterator[Progress]:
        """Add to `split_costs` the costs of all SINK_SPLITS, for each complete window that time allows."""
        complete, bits = [window for window in self.recorded if len(window) == len(self.moments)], profile.bits(SPLIT_BITS)
        for number, window in enumerate(complete, 1):
            if self.clock() > self.until:
                break
            cost = np.zeros(len(SINK_SPLITS))
            for layer, (q, k, v, gram, rows) in enumerate(window):
                sampled = slice(number % SPLIT_QUERY_STEP, None, SPLIT_QUERY_STEP)
                cost += sink_split_costs(q[:, sampled], k, v, gram, rows[sampled], self.attention_params[layer], profile.layers[layer],
                                         bits[layer], self.sinks[layer])
            split_costs.append(cost)
            yield Progress("comparing sinks and windows", number, len(complete), "windows")

    def _tap(self, name: str, layer: int, value: object) -> None:
        """Record a value of a layer; after the layer's attention, add it to the moments. Raises _TimeUp, EffllmError."""
        if (index := self.indexes.get(layer)) is None:
            return
        if name in TAPPED_NAMES:
            self._tapped[name] = np.array(value, np.float32)
            if not np.isfinite(self._tapped[name]).all():
                self._refuse(f"{TAPPED_NAMES[name]} of layer {layer} are NaN or infinite on this text")
        config, tapped = self.engine.config, self._tapped
        if name != ("block_out" if layer in config.layers_without_mlp else "mlp_in"):  # where attention's output has been added
            return
        power = float(np.square(value, dtype=np.float64).sum(1).mean())
        if index not in self.grams:
            with self.engine.model.layer(layer) as weights:
                self.grams[index] = _output_grams(weights, tapped["attn_out"], config, layer)
                self.sinks[index] = None if weights.sinks is None else np.array(weights.sinks, np.float32)
        tokens, size = len(tapped["q"]), config.kv_heads_of(layer)[1]
        first = AttentionParams(1.0).first_packed_query()
        rows = np.unique(np.linspace(first, tokens - 1, QUERIES_PER_WINDOW).astype(np.int64))
        q = np.ascontiguousarray(tapped["q"].reshape(tokens, -1, size)[rows].swapaxes(0, 1))
        k, v = (np.ascontiguousarray(tapped[side].reshape(tokens, -1, size).swapaxes(0, 1)) for side in "kv")
        recorded = (q, k, v, self.grams[index] / max(power, 1e-30), rows)
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is reported below
            self.moments[index].add(*recorded, self.attention_params[index], self.sinks[index])
        if not self.moments[index].are_finite:
            self._refuse(f"keys or values of layer {layer} are too large to be squared on this text")
        nbytes = sum(part.nbytes for part in recorded)
        if len(self.recorded) == 1 or self.recorded_nbytes + nbytes <= MAX_RECORDED_NBYTES:
            self.recorded[-1].append(recorded)
            self.recorded_nbytes += nbytes
        if self.clock() > self.until:
            raise _TimeUp

    def _refuse(self, why: str) -> NoReturn:
        """Raises EffllmError, naming the tensor that is the cause, if any."""
        name = self.engine.model.find_nan()
        raise EffllmError(why if name is None else f"tensor {name} holds NaN or infinity",
                          "the model runs without a profile; effllm verify MODEL looks for damage" if name is None else DAMAGED)


def _output_grams(weights: LayerWeights, attended: np.ndarray, config: ModelConfig, layer: int) -> np.ndarray:
    """W_oᵀ W_o of each query head, float64 [heads, D, D], scaled by norm and multipliers between W_o and the residual stream.

    For latent attention, W_o includes the latent's up-projection, and rotary channels do not contribute.
    """
    o, heads = weights.o.weight.to_f32(), config.query_heads_of(layer)
    scale = np.float64(config.residual_multiplier * config.multiplier("o"))
    if weights.o_norm is not None and weights.o_norm.kind != "none":
        branch = attended @ o.T
        scale = scale / np.sqrt(np.square(branch, dtype=np.float64).mean())
        if weights.o_norm.weight is not None:
            o = o * (weights.o_norm.weight + np.float32(weights.o_norm.kind == "rms+1"))[:, None]
    parts = np.ascontiguousarray(o.reshape(len(o), heads // (2 if config.differential_attention else 1), -1).swapaxes(0, 1))
    if config.differential_attention:  # the second half of the heads is subtracted from the first
        parts = np.concatenate([parts, np.float32(weights.differential_lambda) * parts])
    if (mla := config.mla_of(layer)) is not None:
        values = weights.mla.kv_b.to_f32().reshape(heads, mla.kv_b_rows, mla.rank)[:, mla.nope :]
        parts = np.pad(parts @ values, ((0, 0), (0, 0), (mla.rope, 0)))
    return (parts.swapaxes(1, 2) @ parts).astype(np.float64) * scale**2
