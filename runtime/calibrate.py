"""Calibration: statistics of every tensor's inputs over a text, layer by layer, with one layer's weights in memory and all tokens'
activations.

The text runs in windows through the same blocks and kernels as generation, tapped where a matrix reads. Statistics are those of the
unquantized model: propagating quantized layers changed the KL divergence by less than its error and would fix the order of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from operator import attrgetter
from pathlib import Path

import numpy as np

from .. import EffllmError, UsageError
from ..kernels.reference import activate, linear, normalise
from ..quant.kv import codec
from ..quant.stats import Stats
from ..quant.weight import Norm
from .cache import KVCache
from .config import ModelConfig, read_config
from .conversion.calibration_stats import LEAST_VISITS, ExpertStats, StatsAccumulator, expert_stats
from .conversion.convert_stream import DAMAGED
from .events import Notice, Progress
from .families import EXPERT_ROLES, SHARED_EXPERT_ROLES, base_role
from .kv.cache_builder import build_cache
from .kv.cache_shape import CacheShape, LayerSpec, SharedPages, layer_specs
from .layer import Layer, LayerWeights
from .model import Model
from .planning.compile_kernels import compile_needed
from .planning.needed_kernels import calibration_kinds
from .planning.plan_request import LOGIT_ROWS
from .planning.timing import median_times
from .prepare import EngineOptions, worker_count
from .source import open_store
from .tokenizer import Tokenizer
from .weights.weight_records import PreHead
from .workspace_dims import dims

TOKENS, LEAST, WINDOW = 16384, 512, 512
SHORTEST = 64  # of a last window
VARIED = 128  # different tokens, below which a text shows a model's inputs too narrowly
READS = {"block_in": ("q", "k", "v", "kv_a", "q_a", "attn_gate", "state_in", "state_gate", "low_in"), "q_in": ("q_b",), "attn_out": ("o",),
         "state_out": ("state_out",), "mlp_in": ("gate", "up", "experts_in"), "mlp_hidden": ("down",), "inputs_in": ("input_gate",),
         "inputs_hidden": ("input_out",), "low_hidden": ("low_out",), "lent_in": ("lent_out",), "receptance_in": ("state_r",),
         "key_in": ("state_k",), "value_in": ("state_v",), "ngrams_in": ("ngram_key", "ngram_value"),
         "experts_out": ("experts_out",)}  # tap -> roles
DOUBLED_READS = {"doubled_in": ("q_b", "attn_gate")}  # where both are made of a latent, normed and as it is
SHIFTED_READS = {"shifted_in": ("up",)}  # where an MLP reads each token on its way to the one before
SHARED_READS = {"mlp_in": SHARED_EXPERT_ROLES[:2], "shared_hidden": SHARED_EXPERT_ROLES[2:3]}  # those of a shared expert
NORMS = {"block_in": "input_norm", "q_in": "mla.q_a_norm", "mlp_in": "post_norm"}  # a tap before a norm
GATED = {"block_in": 0, "mlp_in": 1}  # and those that come behind norm and gates, where a layer has such gates
WIDE = {"q_in": "compressed_attention.q_a_norm"}  # where attention is of another kind
FEW = 4  # how costs are measured: a quarter of the tokens apart


@dataclass(frozen=True)
class LayerStats:
    """Statistics by role of layer `key` or, at the end, "outer": the head, or the embedding if tied.

    Roles that read the same inputs share one Stats. `scarce` experts were visited too rarely for statistics of their own.
    """

    key: int | str
    roles: Mapping[str, Stats]
    scarce: int = 0


def built_in_text() -> str:
    """The built-in sample: prose, dialogue, code, numbers and a few languages."""
    return (files(__package__) / "calibration.txt").read_text(encoding="utf-8")


def calibration_ids(folder: Path, config: ModelConfig, text: str, tokens: int = TOKENS) -> list[int]:
    """The first `tokens` tokens of a text. Raises UsageError for fewer than LEAST, too few for statistics."""
    ids = Tokenizer.load(folder, config).encode(text)[:tokens]
    if len(ids) < LEAST:
        raise UsageError(f"the calibration text has {len(ids)} tokens, at least {LEAST} are needed, {TOKENS} are enough",
                         "a longer --calib FILE, or none for the built-in sample")
    return ids


def variety_warning(ids: Sequence[int]) -> Iterator[Notice]:
    """A warning about a text with few distinct tokens: methods that rely on it sacrifice what it never shows."""
    if 0 < (count := len(set(ids))) < VARIED:
        yield Notice(f"the calibration text has only {count} different tokens among {len(ids)}: what it does not cover may degrade, "
                     "more than with --method rtn (leave out --calib for the built-in sample)")


def calibrate(folder: Path, ids: Sequence[int], threads: int | None = None) -> Iterator[Progress | LayerStats | Notice]:
    """Run `ids` through the unquantized model of `folder`; yields Progress, LayerStats per layer and for the head, and what was scarce."""
    config = read_config(folder)
    yield from compile_needed(calibration_kinds(config))
    with opened(folder, config, windows(ids, min(WINDOW, config.context_length)), threads) as calibration:
        yield from calibration.run()


@contextmanager
def opened(folder: Path, config: ModelConfig, cut: list[np.ndarray], threads: int | None) -> Iterator[Calibration]:
    """A calibration pass before its first layer."""
    from ..kernels.cpu.candidates import default_registry
    from ..kernels.cpu.ops import CpuOps
    from ..kernels.threads import ThreadPool

    width = len(cut[0])
    ops = CpuOps(ThreadPool(worker_count(EngineOptions(threads=threads))), dims(config, width, width, LOGIT_ROWS),
                 default_registry(exact=True))  # the same activations on every processor
    try:
        with open_store(folder) as store:
            yield Calibration(Model(config, store, ["cpu"] * config.num_hidden_layers, {"cpu": ops}, width), ops, cut)
    finally:
        ops.close()


@dataclass(frozen=True)
class TextCosts:
    """Measured seconds of a pass: loading a layer, a window of `width` tokens through it, and through the head."""

    width: int
    layer_s: float
    window_s: float
    head_s: float

    def seconds(self, layers: int, tokens: int) -> float:
        """Estimate for `tokens` tokens through `layers` layers."""
        count = tokens / self.width
        return layers * (self.layer_s + count * self.window_s) + count * self.head_s


def text_costs(folder: Path, config: ModelConfig, ids: Sequence[int], threads: int | None, most: int) -> TextCosts:
    """Time a window of `ids` through the last layer. If it is longer than `most`, `most` and a quarter of that are timed instead, to
    separate fixed and per-token cost. Compiles kernels."""
    cut = windows(ids, min(WINDOW, config.context_length))
    width, layer = len(cut[0]), max(config.moe.layers) if config.moe else config.num_hidden_layers - 1
    layer = layer if not config.kv_sources else config.attention_layers[-1]  # the others' keys and values are not known
    with opened(folder, config, cut[:1], threads) as calibration:
        begun = time.monotonic()
        weights = calibration.model.read_layer(layer)
        layer_s = time.monotonic() - begun
        through = calibration.timed(layer, weights)
        n, few = min(width, most), max(1, min(width, most) // FEW)
        through(few)  # loads kernels, and makes room for the sums
        if n == width:
            (window_s,) = median_times(lambda: (through(width),))
        else:
            some, more = median_times(lambda: (through(few), through(n)))
            window_s = more + (width - n) * max(0.0, more - some) / (n - few)
        begun = time.monotonic()
        calibration.head()
        return TextCosts(width, layer_s, window_s, time.monotonic() - begun)


def windows(ids: Sequence[int], width: int) -> list[np.ndarray]:
    """Token ids in independent windows; a short last one is dropped."""
    cut = [np.array(ids[start : start + width], np.int64) for start in range(0, len(ids), width)]
    return [window for window in cut if len(window) >= min(SHORTEST, width)]


class Calibration:
    """One pass. `states` float32 [tokens, D] is every token's residual stream at the current layer."""

    def __init__(self, model: Model, ops: object, cut: list[np.ndarray]) -> None:
        self.model, self.ops, self.cut = model, ops, cut
        self.states = model.read_states(cut)
        self._kept: dict[tuple[int, int], dict[str, np.ndarray]] = {}  # keys and values by layer and window, for layers without their own
        self._demand_finite()

    def run(self) -> Iterator[Progress | LayerStats | Notice]:
        """Layer by layer over all windows; yields each layer's LayerStats."""
        config = self.model.config
        scarce = 0
        done, total = 0, len(self.states) * config.num_hidden_layers
        for layer in range(config.num_hidden_layers):
            weights, cache = self.model.read_layer(layer), self._cache(layer)
            gathered: dict[str, StatsAccumulator] = {}
            own = expert_stats(weights)
            begin = 0
            for number, window in enumerate(self.cut):
                end = begin + len(window)
                self.states[begin:end] = self._block(layer, weights, cache, self.states[begin:end], gathered, own, number)
                done, begin = done + len(window), end
                yield Progress("calibrating", done, total, "tokens")
            self._demand_finite()
            found = {name: each.stats() for name, each in gathered.items()}
            reads = [*READS.items(), *(SHARED_READS.items() if weights.shared_expert is not None else ()),
                     *((tap, roles) for tap, roles in {**SHIFTED_READS, **DOUBLED_READS}.items() if tap in found)]
            if "doubled_in" in found:
                reads.remove(("q_in", READS["q_in"]))
            entered = "mlp_in", "mlp_in", "mlp_hidden"
            if weights.parallel_experts is not None:
                entered = "experts_in", "experts_in", "experts_hidden"
                if weights.down is None:  # and no MLP beside them
                    reads.remove(("mlp_hidden", READS["mlp_hidden"]))
            del weights, cache
            known = self.model.tensors[layer].keys() | {base_role(role) for role in self.model.tensors[layer]}
            by_role = {role: found[name] for name, roles in reads for role in roles if role in known}
            if own is None:
                yield LayerStats(layer, by_role)
            else:
                own.usual = {role: found[name] for role, name in zip(EXPERT_ROLES, entered, strict=True)}
                own.shared = {role: stats for role, stats in by_role.items() if role in self.model.tensors[layer]}
                scarce += own.scarce
                yield LayerStats(layer, own, own.scarce)
        if scarce:
            yield Notice(f"{scarce} of {config.moe.num_experts * len(config.moe.layers)} experts were activated by fewer than "
                         f"{LEAST_VISITS} of {len(self.states)} tokens: they are calibrated on all tokens of their layer")
        yield LayerStats("outer", self.head())

    def _demand_finite(self) -> None:
        """Raises EffllmError naming the tensor that makes activations NaN or infinite."""
        if not np.isfinite(self.states.sum(dtype=np.float64)):
            name = self.model.find_nan()
            raise EffllmError("the calibration text's activations are NaN or infinite" if name is None else f"{name}: NaN or infinity",
                              "--method rtn needs no text" if name is None else DAMAGED)

    def timed(self, layer: int, weights: LayerWeights) -> Callable[[int], float]:
        """A function that runs tokens of the first window through a layer and returns the seconds."""
        cache = self._cache(layer)
        gathered: dict[str, StatsAccumulator] = {}

        def through(tokens: int) -> float:
            own = expert_stats(weights)
            begun = time.monotonic()
            self._block(layer, weights, cache, self.states[:tokens], gathered, own, 0)
            return time.monotonic() - begun

        return through

    def _cache(self, layer: int) -> KVCache:
        """An exact cache for a window of a layer; for a layer without keys and values, that of the layer it reads."""
        specs = layer_specs(self.model.config)
        spec = specs[specs[layer].layer] if isinstance(specs[layer], SharedPages) else specs[layer]
        return one_layer_cache(self.ops, spec, len(self.cut[0]))

    def _block(self, layer: int, weights: LayerWeights, cache: KVCache, states: np.ndarray, gathered: dict[str, StatsAccumulator],
               own: ExpertStats | None, number: int) -> np.ndarray:
        """Run as many tokens of window `number` as there are states through a layer, from an empty cache."""
        entered, apart = None, weights.parallel_experts
        sources = self.model.config.kv_sources
        source = sources[layer] if sources else layer
        keeps = source == layer and sources.count(layer) > 1

        def gather(name: str, inputs: np.ndarray) -> None:
            gathered.setdefault(name, StatsAccumulator(inputs.shape[1])).add(inputs)

        def tap(name: str, layer: int, value: object) -> None:
            nonlocal entered
            if name == "visits":
                own.add(entered, value)
                if value.shared is not None:
                    gather("shared_hidden", value.shared)
                if apart is not None:
                    gather("experts_hidden", value.hidden[: value.offsets[-1]])
                    return
                name, value = "mlp_hidden", value.hidden
            if keeps and name in ("k", "v"):
                self._kept.setdefault((layer, number), {})[name] = np.array(value)
            if name in READS or name in SHIFTED_READS or name in DOUBLED_READS:
                before = WIDE if name in WIDE and weights.compressed_attention is not None else NORMS
                is_read = name not in NORMS or name in GATED and weights.norm_gates[GATED[name]] is not None  # as it is told
                inputs = value if is_read else normalised(value, attrgetter(before[name])(weights))
                gather(name, inputs)
                entered = inputs if name == "mlp_in" and apart is None else entered
            if name == "shared_hidden":
                gather(name, value)
            if name == "experts_in":  # of a norm already
                entered = np.array(value)
                gather(name, entered)
            if name == "mlp_in" and apart is not None and weights.latent_projections is None:
                entered = normalised(value, apart.pre_norm)
                gather("experts_in", entered)

        model, kv = self.model, cache.layer(0)
        cache.clear()
        step = cache.begin(len(states))
        if source != layer:
            kept = self._kept[source, number]
            kv.pages.write(kept["k"], kept["v"], step.slots, step.rows)
        given = model.read_inputs(layer, self.cut[number][: len(states)])
        x = self.ops.from_host(states)
        at = Layer(self.ops, weights, kv, step.positions, model.ropes[layer], model.config, layer, tap)
        return model.block(x, at, *(() if given is None else (given,)))

    def head(self) -> dict[str, Stats]:
        """Statistics of the head's inputs, from `states` after all layers."""
        model = self.model
        norm, before, gathered = model.read_norm(), model.read_before_head(), StatsAccumulator(model.config.hidden_size)
        begin = 0
        for window in self.cut:
            read = normalised(model.read_left(self.states[begin : begin + len(window)]), norm)
            gathered.add(read if before is None else head_inputs(read, before))
            begin += len(window)
        stats = gathered.stats()
        return {"head": stats} if "head" in model.tensors["outer"] else {"embed": tied_head_stats(stats)}


def tied_head_stats(stats: Stats) -> Stats:
    """Statistics of a tied head: as an embedding every column counts alike, and as much as the head's average.

    On the reference model this avoided a quarter of the head's damage, where the head's own Hessian avoided a fifth.
    """
    power = stats.hessian.diagonal().mean()
    hessian = stats.hessian + power * np.eye(len(stats.hessian), dtype=np.float32)
    return replace(stats, hessian=hessian, mean_square=stats.mean_square + power)


def normalised(states: np.ndarray, norm: Norm) -> np.ndarray:
    """float32 [T, K]."""
    return normalise(states, norm.kind, norm.weight, norm.bias, norm.eps).astype(np.float32)


def head_inputs(states: np.ndarray, before: PreHead) -> np.ndarray:
    """The head's inputs from normed states [T, D], after a matrix, an activation and a norm before the head, float32 [T, D]."""
    weight = before.matrix.weight.to_f32()
    return normalised(activate(linear(states, weight, before.matrix.bias), before.act), before.norm)


def one_layer_cache(ops: object, spec: LayerSpec, tokens: int) -> KVCache:
    """An exact cache of one layer that holds a window."""
    return build_cache([ops], [spec], codec("32bit"), CacheShape(tokens, sink=0, window=tokens, chunk=tokens))
