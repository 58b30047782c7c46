"""EAGLE-3 heads (arXiv:2503.01840): one decoder layer that drafts from the inputs of three of the target's layers.

A matrix joins the three hidden states (low, middle and high) into one. The layer reads the next token's embedding and that state, each
normed, side by side, and adds to the state. Its output before the last norm takes the state's place for further drafts. The head scores
part of the vocabulary: row i is the target's token i + d2t[i].

Configs may differ: further, ordinary layers; norms before the matrix, of all three or each; drafting from the output after the last norm;
no matrix, the state being what the target's final norm leaves.

Checkpoints are those of SpecForge and its like (`LlamaForCausalLMEagle3`), and of speculators, whose config nests the layer's. A copy of
the target's embedding is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.cpu.ops import FEW_TOKENS
from ...kernels.layout import PAGE
from ...kernels.workspace import Dims
from ...offload.checkpoint import CheckpointError, TensorStore
from .. import families
from ..config_reader import ConfigError, Keys, is_count, show
from ..families import TensorRule
from ..kv.cache_shape import AttnSpec
from ..layer import Layer
from ..rope import rope_tables
from .draft_types import INNER
from .frequent_head import FrequentHead
from .state_drafts import StateDrafts, cache_shape, known_tokens, layer_cache_nbytes, normalised
from .trained_draft import NO_NUMBERS, DraftInputs, TrainedDraft, TrainedDraftWeights, numbers_info, read_as, require_match

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..config import ModelConfig
    from ..events import Progress
    from ..model import Model
    from .trained_draft import DraftRun

IDS, OWN = "eagle_aux_hidden_state_layer_ids", "eagle_config"
MAP = "d2t"
SLIDING = "sliding_attention"  # a kind of layer
LAYER = ("midlayer.", "layers.0.", "model.layers.0.")  # what the layer's tensors are called
KINDS = ("llama", "qwen3")  # of layers, by their families
MOST_STATES, MOST_LAYERS, NUMBER = 8, 8, 8  # states that are joined and layers, at most; bytes of a token's number


@dataclass(frozen=True)
class Eagle3(TrainedDraft):
    """`places`: the indexes, among the kept states, of those that the matrix joins; empty if the state is what the target's final norm
    leaves. `ctx`: of the run at most; `normed`: the residual is the normed state; `fed_normed`: drafts go on from the output after the
    last norm."""

    places: tuple[int, ...] = ()
    ctx: int = 0
    normed: bool = False
    fed_normed: bool = False

    def drafts(self, model: Model, cache: KVCache, ctx: int, chunk: int) -> Eagle3Drafts:
        return Eagle3Drafts(self, model)


def planned(folder: Path, raw: Mapping[str, object], store: TensorStore, target: ModelConfig, run: DraftRun) -> Eagle3:
    """The head in `folder`, for a run of `target`. Raises UsageError if it was trained for another, ConfigError and CheckpointError if
    it is incomplete."""
    keys = Keys(raw)
    config = config_of(keys)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    reads, scored = keys.integer("target_hidden_size", hidden, high=2**20), keys.integer("draft_vocab_size", vocabulary, high=vocabulary)
    require_match(reads == target.hidden_size, folder, "a hidden size of", reads, target.hidden_size)
    require_match(vocabulary == target.vocab_size, folder, "a vocabulary of", vocabulary, target.vocab_size)
    require_match(not target.residual_streams and target.embedding_multiplier == 1.0, folder, "one stream and embeddings",
                  "as they are stored",
                  f"others ({target.family})")
    layers = _layers(keys, target.num_hidden_layers)
    require_match(all(layer < target.num_hidden_layers for layer in layers), folder, "more layers than", max(layers, default=0),
                  target.num_hidden_layers)
    lists = (numbers_info(store, MAP, scored),) if scored != vocabulary or MAP in store.tensors else ()
    require_match(bool(layers) or reads == hidden, folder, "a hidden size of", hidden, target.hidden_size)
    outer = _outer(config, scored, reads, len(layers), _says(keys, "norm_before_fc"), _says(keys, "fc_norm"))
    rules = {"outer": outer, **{layer: _layer(keys, config, layer) for layer in range(config.num_hidden_layers)}}
    store, tensors = read_as(run.spec, store, rules)
    heads, kept = config.kv_heads_of(0), tuple(dict.fromkeys(layers))
    dims = Dims(hidden, config.num_attention_heads, *heads, config.widest_intermediate, scored, PAGE, cache_shape(run.ctx).ctx, 1,
                mtp_inputs=max(2 * hidden, len(layers) * reads))
    nbytes = layer_cache_nbytes(heads, run.ctx, config.num_hidden_layers) + NUMBER * scored * len(lists)
    return Eagle3(folder, store, config, tensors, dims, run.workers, DraftInputs(kept), lists, nbytes, tuple(map(kept.index, layers)),
                  run.ctx,
                  _says(keys, "norm_before_residual"), _says(keys, "norm_output"))


def config_of(keys: Keys) -> ModelConfig:
    """Config of its layers."""
    own = _of_layers(keys)
    if own.text("model_type") not in KINDS:
        raise ConfigError(f"config.json: an EAGLE-3 head of a {show(own.text('model_type'))} layer is not supported",
                          f"known: {', '.join(KINDS)}")
    config = families.get(own.text("model_type")).config(own)
    if config.num_hidden_layers > MOST_LAYERS:
        raise ConfigError(f"config.json: an EAGLE-3 head of {config.num_hidden_layers} layers is not supported",
                          f"published ones have one or few, at most {MOST_LAYERS} are run")
    kinds, window = own.raw.get("layer_types"), own.raw.get("sliding_window")
    if isinstance(kinds, list) and SLIDING in kinds and is_count(window) and window:
        config = replace(config, windows=tuple(window if kind == SLIDING else None for kind in kinds[: config.num_hidden_layers]))
    return config


def _of_layers(keys: Keys) -> Keys:
    """The config keys of the layers."""
    return Keys({"model_type": "llama", **(keys.section(INNER) or keys.raw)})


def _says(keys: Keys, name: str) -> bool:
    """Is a flag set, in either place where tools write it?"""
    return keys.flag(name, False) or Keys(keys.section(OWN) or {}).flag(name, False)


def _layers(keys: Keys, count: int) -> tuple[int, ...]:
    """The layers whose inputs are read: as stated, in one place as layers before which, in the other as layers after which; by default
    low, middle and high. None for a head that goes on from the target's final norm."""
    own = keys.section(OWN) or {}
    if own.get("use_aux_hidden_state") is False:
        return ()
    stated, behind = (keys.raw[IDS], 0) if keys.raw.get(IDS) else (own.get(IDS), 1)
    if not stated:
        return 2, count // 2, max(0, count - 3)
    if not isinstance(stated, list) or not 0 < len(stated) <= MOST_STATES or \
            any(not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < 2**16 for each in stated):
        raise ConfigError(f"config.json: {IDS} is {show(stated)}, expected layer indices")
    return tuple(each + behind for each in stated)


def _outer(config: ModelConfig, scored: int, reads: int, states: int, whole: bool, each: bool) -> dict[str, TensorRule]:
    """The tensors outside the layers, for a head that joins `states` states of width `reads`: all behind one norm, or `each` behind its
    own. A head with narrower embeddings has a table of its own."""
    hidden = config.hidden_size
    shapes = {"norm": ("norm", (hidden,)), "head": ("lm_head", (scored, hidden))}
    shapes |= {"join": ("fc", (hidden, states * reads))} if states else {}
    shapes |= {"joined_norm": ("input_norm", (states * reads,))} if whole and states else {}
    shapes |= {f"state_norm{at}": (f"fc_norm.{at}", (reads,)) for at in range(states if each else 0)}
    shapes |= {"embed": ("embed_tokens", (config.vocab_size, hidden))} if hidden != reads else {}
    rules = {role: TensorRule(f"{name}.weight", shape, also=(f"model.{name}.weight",)) for role, (name, shape) in shapes.items()}
    return rules | {"state_norm": _named(TensorRule("hidden_norm.weight", (hidden,)))}


def _layer(keys: Keys, config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """A layer of the usual kind, except for the inputs of q, k and v of the first."""
    rules = families.get(_of_layers(keys).text("model_type")).layer_tensors(config, layer)
    if layer:
        return {role: replace(rule, also=(rule.name.removeprefix("model."),)) for role, rule in rules.items()}
    return {role: _named(replace(rule, name=rule.name.removeprefix(LAYER[-1]),
                                 shape=(rule.shape[0], 2 * config.hidden_size) if role in ("q", "k", "v") else rule.shape))
            for role, rule in rules.items()}


def _named(rule: TensorRule) -> TensorRule:
    """A rule with the names that the layer's tensors may have."""
    names = [f"{prefix}{rule.name}" for prefix in LAYER]
    return replace(rule, name=names[0], also=tuple(names[1:]))


class Eagle3Drafts(StateDrafts):
    """Drafts of an EAGLE-3 head for `model`, which was opened with what it reads."""

    def __init__(self, own: Eagle3, model: Model) -> None:
        self._own, self._model, config = own, model, own.config
        self._weights = TrainedDraftWeights(own, model.backends["cpu"].pool)
        host = self._weights.host
        (kv_heads, size), count = config.kv_heads_of(0), config.num_hidden_layers
        self._ropes, self._frequent = rope_tables(config, cache_shape(own.ctx).ctx), FrequentHead()
        self._kept, self._first = np.empty((0, 0, 0), np.float32), 0  # states of the pass in hand, and where in it the piece in hand begins
        specs = [AttnSpec(config.num_attention_heads, kv_heads, size, size**-0.5, config.windows[layer]) for layer in range(count)]
        super().__init__(host, specs, own.ctx, model.config.vocab_size,
                         host.workspace.take("states", PAGE + FEW_TOKENS, config.hidden_size))

    def load(self) -> Iterator[Progress]:
        """Load its weights. Raises CheckpointError if its head has tokens that the target lacks."""
        yield from self._weights.load()
        own, weights = self._own, self._weights
        outer = own.tensors["outer"]
        self._layers, self._head = weights.layers(), weights.linear("head")
        self._join = weights.linear("join") if own.places else None
        self._norm, self._state_norm = weights.norm("norm"), weights.norm("state_norm")
        self._joined_norm = weights.norm("joined_norm") if "joined_norm" in outer else None
        self._each_norm = [weights.norm(f"state_norm{at}") for at in range(len(own.places)) if f"state_norm{at}" in outer]
        self._embed = weights.linear("embed").weight if "embed" in outer else None
        self._numbers = None
        if own.lists:
            offsets = weights.list(own.lists[0])
            self._numbers = np.arange(len(offsets)) + offsets
            if not 0 <= self._numbers.min() <= self._numbers.max() < self._model.config.vocab_size:
                raise CheckpointError(f"the draft model {own.folder}: {MAP} names tokens that the model does not have",
                                      "the file is damaged, or of another model")

    def close(self) -> None:
        """Free its memory."""
        super().close()
        self._weights.close()

    def saw(self, held: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, certain: bool) -> None:
        """Chunk by chunk, since the target keeps what it reads only until the next pass."""
        layers, config = len(self._own.reads.between), self._model.config
        if layers:
            self._kept = self._model.backends["cpu"].workspace.take("between", layers, len(ids), config.hidden_size)
        for first in range(0, len(ids), PAGE):
            self._first, end = first, min(first + PAGE, len(ids))
            super().saw(held, start + first, ids[first:end], x[first:end], certain)

    def _put(self, x: np.ndarray, out: np.ndarray) -> None:
        if self._join is None:
            with self._model.outer() as outer:
                normalised(x, outer.norm, out)
            return
        rows, width = slice(self._first, self._first + len(out)), self._kept.shape[2]
        joined = self._host.workspace.take("joined", len(out), len(self._own.places) * width)
        for at, place in enumerate(self._own.places):
            part = joined[:, at * width : (at + 1) * width]
            part[:] = self._kept[place, rows]
            if self._each_norm:
                normalised(part, self._each_norm[at], part)
        if self._joined_norm is not None:
            normalised(joined, self._joined_norm, joined)
        out[:] = self._host.norm_linear(joined, None, [self._join])[0]

    def _guesses(self, x: np.ndarray, most: int) -> list[int]:
        drafted: list[int] = []
        head = self._head if self._numbers is not None else self._frequent.of(self._head, self._history)
        while True:
            logits = self._host.logits(x, self._norm, head)[0]
            if not np.isfinite(logits).all():
                self.failed = NO_NUMBERS.format(self._own.folder)
                return drafted
            drafted.append(self._likeliest.token(logits, self._history, drafted, self._numbers))
            if len(drafted) == most:
                return drafted
            x = self._run(drafted[-1:], normalised(x, self._norm, np.empty_like(x)) if self._own.fed_normed else x.copy())

    def _run(self, ids: Sequence[int], states: np.ndarray) -> np.ndarray:
        own, host, tokens, w = self._own.config, self._host, known_tokens(ids), self._layers[0]
        width, (kv_heads, size) = own.hidden_size, own.kv_heads_of(0)
        joined = host.workspace.take("joined", len(tokens), 2 * width)
        if self._embed is None:
            with self._model.outer() as outer:
                embedded = self._model.backends["cpu"].embed(tokens, outer.embed)
        else:
            embedded = host.embed(tokens, self._embed)
        normalised(embedded, w.input_norm, joined[:, :width])
        normalised(states, self._state_norm, joined[:, width:])
        x = host.from_host(joined[:, width:] if self._own.normed else states)
        with host.collecting():
            step = self._cache.begin(len(tokens))
            q, k, v = host.norm_linear(joined, None, [w.q, w.k, w.v])
            q = host.rope_heads(q, own.num_attention_heads, size, step.positions, self._ropes[0], w.q_norm)
            k = host.rope_heads(k, kv_heads, size, step.positions, self._ropes[0], w.k_norm)
            x = host.linear_add(self._cache.layer(0).attend(q, k, v), w.o, x)
            x = host.gated_mlp(x, w.post_norm, w.gate, w.up, w.down, own.hidden_act)
            block = families.get(own.family).block
            for layer, weights in enumerate(self._layers[1:], 1):
                x = block(x, Layer(host, weights, self._cache.layer(layer), step.positions, self._ropes[layer], own, layer))
        self._cache.commit()
        return x
