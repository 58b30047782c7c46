"""EAGLE-3 heads (arXiv:2503.01840): one decoder layer that drafts for a model by what comes into three of its layers.

A matrix makes a state of the three, which stand low, in the middle and high in the model. The layer reads the embedding of the token that
follows and that state, each behind a norm and side by side, and adds to the state. What it made, as it is before the last norm, takes the
state's place for a further guess. The head scores a part of the vocabulary: its row i is the token i + d2t[i] of the model.

Checkpoints are those of SpecForge and its like (`LlamaForCausalLMEagle3`), and of speculators, whose config keeps the layer's in an object
of its own. They may hold a copy of the model's embedding, which is not read: the model's own is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.cpu.ops import FEW
from ...kernels.layout import PAGE
from ...kernels.workspace import Dims
from ...offload.checkpoint import CheckpointError, TensorStore
from ..config_reader import ConfigError, Keys, show
from ..families import TensorRule, llama
from ..kv.cache_shape import AttnSpec
from ..rope import rope_tables
from ..tensors import tensors_of
from .draft_types import INNER
from .frequent_head import FrequentHead
from .state_drafts import StateDrafts, cache_shape, known_tokens, layer_cache_nbytes, normalised
from .trained import NO_NUMBERS, Reads, Trained, TrainedWeights, numbers_info, refuse_unless

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..config import ModelConfig
    from ..events import Progress
    from ..model import Model
    from .trained import Run

IDS, OWN = "eagle_aux_hidden_state_layer_ids", "eagle_config"
MAP = "d2t"
LAYER = ("midlayer.", "layers.0.", "model.layers.0.")  # what the layer's tensors are called
MOST_STATES, NUMBER = 8, 8  # states that are joined at most; bytes of a token's number


@dataclass(frozen=True)
class Eagle3(Trained):
    """`places`: of the states that the matrix joins in turn, where each is among those that are kept. `ctx`: of the run at most; `normed`:
    the layer adds to the state as it is behind its norm."""

    places: tuple[int, ...] = ()
    ctx: int = 0
    normed: bool = False

    def drafts(self, model: Model, cache: KVCache, ctx: int, chunk: int) -> Eagle3Drafts:
        return Eagle3Drafts(self, model)


def planned(folder: Path, raw: Mapping[str, object], store: TensorStore, target: ModelConfig, run: Run) -> Eagle3:
    """The head in `folder`, for a run of `target`. Raises UsageError where it was trained for another, ConfigError and CheckpointError for
    one that is not whole."""
    keys = Keys(raw)
    config = config_of(keys)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    reads, scored = keys.integer("target_hidden_size", hidden, high=2**20), keys.integer("draft_vocab_size", vocabulary, high=vocabulary)
    refuse_unless(reads == target.hidden_size, folder, "a hidden size of", reads, target.hidden_size)
    refuse_unless(vocabulary == target.vocab_size, folder, "a vocabulary of", vocabulary, target.vocab_size)
    refuse_unless(not target.streams and target.embedding_multiplier == 1.0, folder, "one stream and embeddings", "as they are stored",
                  f"others ({target.family})")
    layers = _layers(keys, target.num_hidden_layers)
    refuse_unless(all(layer < target.num_hidden_layers for layer in layers), folder, "more layers than", max(layers),
                  target.num_hidden_layers)
    outer = _outer(config, scored, len(layers) * reads, hidden != reads)
    tensors = {"outer": tensors_of(outer, store), 0: tensors_of(_layer(config), store)}
    lists = (numbers_info(store, MAP, scored),) if scored != vocabulary or MAP in store.tensors else ()
    heads, kept = config.heads_of(0), tuple(dict.fromkeys(layers))
    dims = Dims(hidden, config.num_attention_heads, *heads, config.widest, scored, PAGE, cache_shape(run.ctx).ctx, 1,
                joined=max(2 * hidden, len(layers) * reads))
    nbytes = layer_cache_nbytes(heads, run.ctx) + NUMBER * scored * len(lists)
    return Eagle3(folder, store, config, tensors, dims, run.workers, Reads(kept), lists, nbytes, tuple(map(kept.index, layers)), run.ctx,
                  keys.flag("norm_before_residual", False))


def config_of(keys: Keys) -> ModelConfig:
    """Of the layer."""
    inner = keys.section(INNER) or keys.raw
    own = Keys({"model_type": "llama", **inner})
    if own.text("model_type") != "llama":
        raise ConfigError(f"config.json: an EAGLE-3 head of a {show(own.text('model_type'))} layer is not supported", "known: llama")
    config = llama.config(own)
    if config.num_hidden_layers != 1:
        raise ConfigError(f"config.json: an EAGLE-3 head of {config.num_hidden_layers} layers is not supported", "published ones have one")
    return config


def _layers(keys: Keys, count: int) -> tuple[int, ...]:
    """The layers before which states are read: as is stated, in one place of those before which and in the other of those behind which;
    else low, in the middle and high."""
    own = keys.section(OWN) or {}
    if own.get("use_aux_hidden_state") is False:
        raise ConfigError("config.json: an EAGLE-3 head that reads no states between layers is not supported",
                          "effllm drafts by those that read three")
    stated, behind = (keys.raw[IDS], 0) if keys.raw.get(IDS) else (own.get(IDS), 1)
    if not stated:
        return 2, count // 2, max(0, count - 3)
    if not isinstance(stated, list) or not 0 < len(stated) <= MOST_STATES or \
            any(not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < 2**16 for each in stated):
        raise ConfigError(f"config.json: {IDS} is {show(stated)}, expected numbers of layers")
    return tuple(each + behind for each in stated)


def _outer(config: ModelConfig, scored: int, joined: int, embeds: bool) -> dict[str, TensorRule]:
    """What surrounds the layer. `embeds`: its embeddings are not as wide as the model's, so it has a table of its own."""
    hidden = config.hidden_size
    shapes = {"join": ("fc", (hidden, joined)), "norm": ("norm", (hidden,)), "head": ("lm_head", (scored, hidden)),
              **({"embed": ("embed_tokens", (config.vocab_size, hidden))} if embeds else {})}
    rules = {role: TensorRule(f"{name}.weight", shape, also=(f"model.{name}.weight",)) for role, (name, shape) in shapes.items()}
    return rules | {"state_norm": _named(TensorRule("hidden_norm.weight", (hidden,)))}


def _layer(config: ModelConfig) -> dict[str, TensorRule]:
    """The layer, as a Llama's is but for what q, k and v read."""
    rules = llama.layer_tensors(config, 0)
    return {role: _named(replace(rule, name=rule.name.removeprefix(LAYER[-1]),
                                 shape=(rule.shape[0], 2 * config.hidden_size) if role in ("q", "k", "v") else rule.shape))
            for role, rule in rules.items()}


def _named(rule: TensorRule) -> TensorRule:
    """A rule of the layer by the names that it may have."""
    names = [f"{prefix}{rule.name}" for prefix in LAYER]
    return replace(rule, name=names[0], also=tuple(names[1:]))


class Eagle3Drafts(StateDrafts):
    """Guesses of an EAGLE-3 head for `model`, which was opened with what it reads."""

    def __init__(self, own: Eagle3, model: Model) -> None:
        self._own, self._model, config = own, model, own.config
        self._weights = TrainedWeights(own, model.backends["cpu"].pool)
        host = self._weights.host
        (kv_heads, size), shape = config.heads_of(0), cache_shape(own.ctx)
        self._rope, self._frequent = rope_tables(config, shape.ctx)[0], FrequentHead()
        self._kept, self._first = np.empty((0, 0, 0), np.float32), 0  # states of the pass in hand, and where in it the piece in hand begins
        super().__init__(host, AttnSpec(config.num_attention_heads, kv_heads, size, size**-0.5), own.ctx, model.config.vocab_size,
                         host.workspace.take("states", PAGE + FEW, config.hidden_size))

    def load(self) -> Iterator[Progress]:
        """Read its weights. Raises CheckpointError where its head is of tokens that the model lacks."""
        yield from self._weights.load()
        own, weights = self._own, self._weights
        (self._layer,), self._join, self._head = weights.layers(), weights.linear("join"), weights.linear("head")
        self._norm, self._state_norm = weights.norm("norm"), weights.norm("state_norm")
        self._embed = weights.linear("embed").weight if "embed" in own.tensors["outer"] else None
        self._numbers = None
        if own.lists:
            offsets = weights.list(own.lists[0])
            self._numbers = np.arange(len(offsets)) + offsets
            if not 0 <= self._numbers.min() <= self._numbers.max() < self._model.config.vocab_size:
                raise CheckpointError(f"the draft model {own.folder}: {MAP} names tokens that the model does not have",
                                      "the file is damaged, or of another model")

    def close(self) -> None:
        """Give its memory back."""
        super().close()
        self._weights.close()

    def saw(self, held: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, certain: bool) -> None:
        """As of any: piece by piece, since what the model keeps for it stays where it is to the next pass."""
        layers, config = len(self._own.reads.between), self._model.config
        self._kept = self._model.backends["cpu"].workspace.take("between", layers, len(ids), config.hidden_size)
        for first in range(0, len(ids), PAGE):
            self._first, end = first, min(first + PAGE, len(ids))
            super().saw(held, start + first, ids[first:end], x[first:end], certain)

    def _put(self, x: np.ndarray, out: np.ndarray) -> None:
        rows, width = slice(self._first, self._first + len(out)), self._kept.shape[2]
        joined = self._host.workspace.take("joined", len(out), len(self._own.places) * width)
        for at, place in enumerate(self._own.places):
            joined[:, at * width : (at + 1) * width] = self._kept[place, rows]
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
            x = self._run(drafted[-1:], x.copy())

    def _run(self, ids: Sequence[int], states: np.ndarray) -> np.ndarray:
        own, host, tokens, w = self._own.config, self._host, known_tokens(ids), self._layer
        width, (kv_heads, size) = own.hidden_size, own.heads_of(0)
        joined = host.workspace.take("joined", len(tokens), 2 * width)
        if self._embed is None:
            with self._model.outer() as outer:
                embedded = self._model.backends["cpu"].embed(tokens, outer.embed)
        else:
            embedded = host.embed(tokens, self._embed)
        normalised(embedded, w.input_norm, joined[:, :width])
        normalised(states, self._state_norm, joined[:, width:])
        x = host.from_host(joined[:, width:] if self._own.normed else states)
        with host.together():
            step = self._cache.begin(len(tokens))
            q, k, v = host.norm_linear(joined, None, [w.q, w.k, w.v])
            q = host.rope_heads(q, own.num_attention_heads, size, step.positions, self._rope, None)
            k = host.rope_heads(k, kv_heads, size, step.positions, self._rope, None)
            x = host.linear_add(self._cache.layer(0).attend(q, k, v), w.o, x)
            x = host.gated_mlp(x, w.post_norm, w.gate, w.up, w.down, own.hidden_act)
        self._cache.commit()
        return x
