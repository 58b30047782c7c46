"""EAGLE-3 heads (arXiv:2503.01840): one decoder layer that drafts from the inputs of three of the target's layers.

A matrix (`fc`) joins the three hidden states (low, middle and high) into one. The layer reads the next token's embedding and that state,
each normalized, side by side, and adds to the state. Its output before the last norm takes the state's place for further drafts. The head
scores part of the vocabulary: row i is the target's token i + d2t[i].

Variants by config: more layers, of the ordinary kind; norms before the matrix, of all three states together or of each; drafting from the
output after the last norm; no matrix, but the state after the target's final norm.

Checkpoints are those of SpecForge and similar trainers (`LlamaForCausalLMEagle3`), and of speculators, whose config nests the layer's. A
copy of the target's embedding is ignored.
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
from .draft_types import LAYER_CONFIG
from .frequent_head import FrequentHead
from .state_drafts import StateDrafts, cache_shape, embedding_ids, layer_cache_nbytes, normalize_rows
from .trained_draft import NAN_SCORES, DraftInputs, TrainedDraft, TrainedDraftWeights, require_match, resolve_tensors, token_list_info

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..config import ModelConfig
    from ..events import Progress
    from ..model import Model
    from .trained_draft import DraftRun

AUX_LAYER_IDS, EAGLE_CONFIG = "eagle_aux_hidden_state_layer_ids", "eagle_config"  # keys of config.json
TOKEN_MAP = "d2t"
SLIDING = "sliding_attention"  # a layer type
LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.layers.0.")  # that the first layer's tensors may have
LAYER_FAMILIES = ("llama", "qwen3")
MAX_AUX_STATES, MAX_LAYERS = 8, 8
TOKEN_ID_NBYTES = 8


@dataclass(frozen=True)
class Eagle3(TrainedDraft):
    """The plan of an EAGLE-3 head.

    state_indices: by state that the matrix joins, its index among `inputs.aux_layers`; empty for a head without the matrix.
    ctx: context length of the run.
    residual_normed: the residual is the normalized state.
    feeds_normed: drafts continue from the output after the last norm.
    """

    state_indices: tuple[int, ...] = ()
    ctx: int = 0
    residual_normed: bool = False
    feeds_normed: bool = False

    def drafts(self, model: Model, cache: KVCache, ctx: int, chunk: int) -> Eagle3Drafts:
        return Eagle3Drafts(self, model)


def plan_eagle3(folder: Path, raw: Mapping[str, object], store: TensorStore, target: ModelConfig, run: DraftRun) -> Eagle3:
    """The head in `folder`, for a run of `target`. Raises UsageError if it was trained for another, ConfigError and CheckpointError if
    it is incomplete."""
    keys = Keys(raw)
    config = config_of(keys)
    hidden, vocab_size = config.hidden_size, config.vocab_size
    target_hidden = keys.integer("target_hidden_size", hidden, high=2**20)
    draft_vocab_size = keys.integer("draft_vocab_size", vocab_size, high=vocab_size)
    require_match(target_hidden == target.hidden_size, folder, "a hidden size of", target_hidden, target.hidden_size)
    require_match(vocab_size == target.vocab_size, folder, "a vocabulary of", vocab_size, target.vocab_size)
    require_match(not target.residual_streams and target.embedding_multiplier == 1.0, folder, "one stream and embeddings",
                  "as they are stored",
                  f"others ({target.family})")
    layers = _aux_layers(keys, target.num_hidden_layers)
    require_match(all(layer < target.num_hidden_layers for layer in layers), folder, "more layers than", max(layers, default=0),
                  target.num_hidden_layers)
    has_map = draft_vocab_size != vocab_size or TOKEN_MAP in store.tensors
    token_lists = (token_list_info(store, TOKEN_MAP, draft_vocab_size),) if has_map else ()
    require_match(bool(layers) or target_hidden == hidden, folder, "a hidden size of", hidden, target.hidden_size)
    outer = _outer_rules(config, draft_vocab_size, target_hidden, len(layers), _flag(keys, "norm_before_fc"), _flag(keys, "fc_norm"))
    rules = {"outer": outer, **{layer: _layer_rules(keys, config, layer) for layer in range(config.num_hidden_layers)}}
    store, tensors = resolve_tensors(run.spec, store, rules)
    heads, distinct = config.kv_heads_of(0), tuple(dict.fromkeys(layers))
    dims = Dims(hidden, config.num_attention_heads, *heads, config.widest_intermediate, draft_vocab_size, PAGE, cache_shape(run.ctx).ctx, 1,
                mtp_input_width=max(2 * hidden, len(layers) * target_hidden))
    nbytes = layer_cache_nbytes(heads, run.ctx, config.num_hidden_layers) + TOKEN_ID_NBYTES * draft_vocab_size * len(token_lists)
    return Eagle3(folder, store, config, tensors, dims, run.workers, DraftInputs(distinct), token_lists, nbytes,
                  state_indices=tuple(map(distinct.index, layers)), ctx=run.ctx,
                  residual_normed=_flag(keys, "norm_before_residual"), feeds_normed=_flag(keys, "norm_output"))


def config_of(keys: Keys) -> ModelConfig:
    """The config of its layers."""
    layer_keys = _layer_keys(keys)
    if layer_keys.text("model_type") not in LAYER_FAMILIES:
        raise ConfigError(f"config.json: an EAGLE-3 head of a {show(layer_keys.text('model_type'))} layer is not supported",
                          f"known: {', '.join(LAYER_FAMILIES)}")
    config = families.get(layer_keys.text("model_type")).config(layer_keys)
    if config.num_hidden_layers > MAX_LAYERS:
        raise ConfigError(f"config.json: an EAGLE-3 head of {config.num_hidden_layers} layers is not supported",
                          f"published ones have one or few, at most {MAX_LAYERS} are run")
    types, window = layer_keys.raw.get("layer_types"), layer_keys.raw.get("sliding_window")
    if isinstance(types, list) and SLIDING in types and is_count(window) and window:
        config = replace(config, windows=tuple(window if kind == SLIDING else None for kind in types[: config.num_hidden_layers]))
    return config


def _layer_keys(keys: Keys) -> Keys:
    """The config keys of the layers."""
    return Keys({"model_type": "llama", **(keys.section(LAYER_CONFIG) or keys.raw)})


def _flag(keys: Keys, name: str) -> bool:
    """Whether a flag is set, in either place where tools write it."""
    return keys.flag(name, False) or Keys(keys.section(EAGLE_CONFIG) or {}).flag(name, False)


def _aux_layers(keys: Keys, num_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs are read; by default low, middle and high. Empty for a head that reads the state after the final
    norm. One key counts the layers before which states are read, the other those after which."""
    eagle_config = keys.section(EAGLE_CONFIG) or {}
    if eagle_config.get("use_aux_hidden_state") is False:
        return ()
    stated, offset = (keys.raw[AUX_LAYER_IDS], 0) if keys.raw.get(AUX_LAYER_IDS) else (eagle_config.get(AUX_LAYER_IDS), 1)
    if not stated:
        return 2, num_layers // 2, max(0, num_layers - 3)
    if not isinstance(stated, list) or not 0 < len(stated) <= MAX_AUX_STATES or \
            any(not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < 2**16 for layer in stated):
        raise ConfigError(f"config.json: {AUX_LAYER_IDS} is {show(stated)}, expected layer indices")
    return tuple(layer + offset for layer in stated)


def _outer_rules(config: ModelConfig, draft_vocab_size: int, target_hidden: int, num_states: int, joint_norm: bool,
                 separate_norms: bool) -> dict[str, TensorRule]:
    """The tensors outside the layers, for a head that joins `num_states` states of width `target_hidden`, normalized together or each.
    A head with narrower embeddings than the target has a table of its own."""
    hidden = config.hidden_size
    shapes = {"norm": ("norm", (hidden,)), "head": ("lm_head", (draft_vocab_size, hidden))}
    shapes |= {"join": ("fc", (hidden, num_states * target_hidden))} if num_states else {}
    shapes |= {"joined_norm": ("input_norm", (num_states * target_hidden,))} if joint_norm and num_states else {}
    shapes |= {f"state_norm{index}": (f"fc_norm.{index}", (target_hidden,)) for index in range(num_states if separate_norms else 0)}
    shapes |= {"embed": ("embed_tokens", (config.vocab_size, hidden))} if hidden != target_hidden else {}
    rules = {role: TensorRule(f"{name}.weight", shape, also=(f"model.{name}.weight",)) for role, (name, shape) in shapes.items()}
    return rules | {"state_norm": _with_aliases(TensorRule("hidden_norm.weight", (hidden,)))}


def _layer_rules(keys: Keys, config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """The tensors of a layer. The first takes inputs of twice the width in q, k and v; the others are ordinary."""
    rules = families.get(_layer_keys(keys).text("model_type")).layer_tensors(config, layer)
    if layer:
        return {role: replace(rule, also=(rule.name.removeprefix("model."),)) for role, rule in rules.items()}
    return {role: _with_aliases(replace(rule, name=rule.name.removeprefix(LAYER_PREFIXES[-1]),
                                        shape=(rule.shape[0], 2 * config.hidden_size) if role in ("q", "k", "v") else rule.shape))
            for role, rule in rules.items()}


def _with_aliases(rule: TensorRule) -> TensorRule:
    """A rule with the names that the first layer's tensors may have."""
    names = [f"{prefix}{rule.name}" for prefix in LAYER_PREFIXES]
    return replace(rule, name=names[0], also=tuple(names[1:]))


class Eagle3Drafts(StateDrafts):
    """Drafts of an EAGLE-3 head for `model`, which was opened to keep the states that the head reads."""

    def __init__(self, plan: Eagle3, model: Model) -> None:
        self._plan, self._model, config = plan, model, plan.config
        self._weights = TrainedDraftWeights(plan, model.backends["cpu"].pool)
        host = self._weights.host
        (kv_heads, head_dim), num_layers = config.kv_heads_of(0), config.num_hidden_layers
        self._ropes, self._frequent_head = rope_tables(config, cache_shape(plan.ctx).ctx), FrequentHead()
        self._aux_states = np.empty((0, 0, 0), np.float32)  # [layers, T, D] of the current pass
        self._first = 0  # where the current chunk begins in the pass
        specs = [AttnSpec(config.num_attention_heads, kv_heads, head_dim, head_dim**-0.5, config.windows[layer])
                 for layer in range(num_layers)]
        super().__init__(host, specs, plan.ctx, model.config.vocab_size,
                         host.workspace.take("states", PAGE + FEW_TOKENS, config.hidden_size))

    def load(self) -> Iterator[Progress]:
        """Load its weights. Raises CheckpointError if its head has tokens that the target lacks."""
        yield from self._weights.load()
        plan, weights = self._plan, self._weights
        outer = plan.tensors["outer"]
        self._layers, self._head = weights.layers(), weights.linear("head")
        self._join = weights.linear("join") if plan.state_indices else None
        self._norm, self._state_norm = weights.norm("norm"), weights.norm("state_norm")
        self._joined_norm = weights.norm("joined_norm") if "joined_norm" in outer else None
        self._separate_norms = [weights.norm(role) for index in range(len(plan.state_indices)) if (role := f"state_norm{index}") in outer]
        self._embed = weights.linear("embed").weight if "embed" in outer else None
        self._token_ids = None  # by row of the head, the target's token
        if plan.token_lists:
            offsets = weights.token_list(plan.token_lists[0])
            self._token_ids = np.arange(len(offsets)) + offsets
            if not 0 <= self._token_ids.min() <= self._token_ids.max() < self._model.config.vocab_size:
                raise CheckpointError(f"the draft model {plan.folder}: {TOKEN_MAP} names tokens that the model does not have",
                                      "the file is damaged, or of another model")

    def close(self) -> None:
        """Free its memory."""
        super().close()
        self._weights.close()

    def add_hidden_states(self, tokens: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, verified: bool) -> None:
        """Chunk by chunk, since the workspace keeps the target's states only until the next pass."""
        num_layers, config = len(self._plan.inputs.aux_layers), self._model.config
        if num_layers:
            self._aux_states = self._model.backends["cpu"].workspace.take("between", num_layers, len(ids), config.hidden_size)
        for first in range(0, len(ids), PAGE):
            self._first, end = first, min(first + PAGE, len(ids))
            super().add_hidden_states(tokens, start + first, ids[first:end], x[first:end], verified)

    def _store_states(self, x: np.ndarray, out: np.ndarray) -> None:
        if self._join is None:
            with self._model.outer() as outer:
                normalize_rows(x, outer.norm, out)
            return
        rows, width = slice(self._first, self._first + len(out)), self._aux_states.shape[2]
        joined = self._host.workspace.take("joined", len(out), len(self._plan.state_indices) * width)
        for number, index in enumerate(self._plan.state_indices):
            part = joined[:, number * width : (number + 1) * width]
            part[:] = self._aux_states[index, rows]
            if self._separate_norms:
                normalize_rows(part, self._separate_norms[number], part)
        if self._joined_norm is not None:
            normalize_rows(joined, self._joined_norm, joined)
        out[:] = self._host.norm_linear(joined, None, [self._join])[0]

    def _draft_tokens(self, x: np.ndarray, count: int) -> list[int]:
        drafted: list[int] = []
        head = self._head if self._token_ids is not None else self._frequent_head.select(self._head, self._history)
        while True:
            logits = self._host.logits(x, self._norm, head)[0]
            if not np.isfinite(logits).all():
                self.failed = NAN_SCORES.format(self._plan.folder)
                return drafted
            drafted.append(self._greedy.token(logits, self._history, drafted, self._token_ids))
            if len(drafted) == count:
                return drafted
            x = self._forward(drafted[-1:], normalize_rows(x, self._norm, np.empty_like(x)) if self._plan.feeds_normed else x.copy())

    def _forward(self, ids: Sequence[int], states: np.ndarray) -> np.ndarray:
        config, host, tokens, w = self._plan.config, self._host, embedding_ids(ids), self._layers[0]
        width, (kv_heads, head_dim) = config.hidden_size, config.kv_heads_of(0)
        joined = host.workspace.take("joined", len(tokens), 2 * width)
        if self._embed is None:
            with self._model.outer() as outer:
                embedded = self._model.backends["cpu"].embed(tokens, outer.embed)
        else:
            embedded = host.embed(tokens, self._embed)
        normalize_rows(embedded, w.input_norm, joined[:, :width])
        normalize_rows(states, self._state_norm, joined[:, width:])
        x = host.from_host(joined[:, width:] if self._plan.residual_normed else states)
        with host.collecting():
            step = self._cache.begin(len(tokens))
            q, k, v = host.norm_linear(joined, None, [w.q, w.k, w.v])
            q = host.rope_heads(q, config.num_attention_heads, head_dim, step.positions, self._ropes[0], w.q_norm)
            k = host.rope_heads(k, kv_heads, head_dim, step.positions, self._ropes[0], w.k_norm)
            x = host.linear_add(self._cache.layer(0).attend(q, k, v), w.o, x)
            x = host.gated_mlp(x, w.post_norm, w.gate, w.up, w.down, config.hidden_act)
            block = families.get(config.family).block
            for layer, weights in enumerate(self._layers[1:], 1):
                x = block(x, Layer(host, weights, self._cache.layer(layer), step.positions, self._ropes[layer], config, layer))
        self._cache.commit()
        return x
