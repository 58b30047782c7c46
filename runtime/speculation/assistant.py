"""Gemma 4's assistants: small models that draft from the target's last hidden state and its own KV cache.

An assistant has no keys and values: its layers attend to those of the target's last layer of the same kind, windowed or full. Its input is
the newest token's embedding, from the target's table, joined with the hidden state after the target's final norm; for further drafts its
own projected state takes that place. All drafts have the newest token's position, because the cache holds nothing after it. The small
assistants score only a few clusters of the vocabulary (centroids), the larger ones all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.cpu.ops import FEW_TOKENS
from ...kernels.reference import normalise
from ...kernels.workspace import Dims
from ...offload.checkpoint import CheckpointError, TensorStore
from ..config import parse_config
from ..config_reader import REQUIRED, ConfigError, Keys
from ..families import TensorRule, gemma4_text
from ..layer import Layer
from ..rope import rope_tables
from .draft_length import DraftCosts
from .draft_model import KIND
from .drafts import Draft
from .frequent_head import FrequentHead
from .greedy_choice import GreedyChoice
from .state_drafts import known_tokens, normalised
from .trained_draft import NO_NUMBERS, DraftInputs, TrainedDraft, TrainedDraftWeights, numbers_info, read_as, require_match

if TYPE_CHECKING:
    from ...kernels.cpu.pages import LayerPages
    from ..cache import KVCache
    from ..config import ModelConfig
    from ..events import Progress
    from ..model import Model
    from ..sampler import SamplerSettings
    from ..sampling.dry import Breakers
    from .trained_draft import DraftRun

# What an assistant cannot have, which models of the family may: it is small.
WITHOUT = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True)
class Centroids:
    """Of a vocabulary in `groups` of equal size, the tokens of the `best` are scored."""

    groups: int
    best: int


@dataclass(frozen=True)
class Assistant(TrainedDraft):
    """`sources`: by layer, the target's layer whose keys and values it reads."""

    sources: tuple[int, ...] = ()
    centroids: Centroids | None = None

    def drafts(self, model: Model, cache: KVCache, ctx: int, chunk: int) -> AssistantDrafts:
        return AssistantDrafts(self, model, cache, ctx)


def planned(folder: Path, raw: Mapping[str, object], store: TensorStore, target: ModelConfig, run: DraftRun) -> Assistant:
    """The assistant in `folder`, for a run of `target`. Raises UsageError if it was trained for another, ConfigError and CheckpointError
    if it is incomplete."""
    keys = Keys(raw)
    config, sources = config_of(keys), []
    backbone = keys.integer("backbone_hidden_size", REQUIRED, high=2**20)
    require_match(target.family == gemma4_text.__name__.rpartition(".")[2], folder, "the family", "gemma4", target.family)
    require_match(backbone == target.hidden_size, folder, "a hidden size of", backbone, target.hidden_size)
    require_match(config.vocab_size == target.vocab_size, folder, "a vocabulary of", config.vocab_size, target.vocab_size)
    for layer, window in enumerate(config.windows):
        alike = [each for each in target.attention_layers if (target.windows[each] is None) == (window is None)]
        has, wants = [target.kv_heads_of(each) for each in alike[-1:]], config.kv_heads_of(layer)
        require_match(has == [wants], folder, "key-value heads and their size of", wants, has[0] if has else "none")
        sources.append(alike[-1])
    centroids = _centroids(keys, config.vocab_size)
    lists = () if centroids is None else (numbers_info(store, ORDER, config.vocab_size),)
    rules = {layer: gemma4_text.layer_tensors(config, layer) for layer in range(config.num_hidden_layers)}
    store, tensors = read_as(run.spec, store, {"outer": _outer(config, backbone, centroids), **rules})
    heads = [config.kv_heads_of(layer) for layer in range(config.num_hidden_layers)]
    rows = max(config.vocab_size, backbone, centroids.groups if centroids else 0)
    # One token at a time. `spilled_kv` is of pages of two kinds as well, through which attention goes in turns.
    dims = Dims(config.hidden_size, config.num_attention_heads, *heads[0], config.widest_intermediate, rows, 1, run.ctx, 1,
                packed_kv=run.packed,
                spilled_kv=run.in_turns, other_heads=tuple(sorted({*heads} - {heads[0]})), mtp_inputs=2 * backbone)
    return Assistant(folder, store, config, tensors, dims, run.workers, DraftInputs(cache=True), lists,
                     4 * FEW_TOKENS * backbone, tuple(sources), centroids)


def config_of(keys: Keys) -> ModelConfig:
    """Config of its layers, all of which attend to the target's cache."""
    text = keys.section("text_config")
    if text is None:
        raise ConfigError("config.json: text_config is missing")
    if stray := [name for name in WITHOUT if text.get(name)]:
        raise ConfigError(f"config.json: {stray[0]} of a draft model is not supported", "no published one has it")
    left = {*WITHOUT, "num_kv_shared_layers", "architectures"}
    config = parse_config({"model_type": "gemma4_text", **{key: value for key, value in text.items() if key not in left}, WITHOUT[0]: 0})
    return replace(config, kv_sources=(-1,) * config.num_hidden_layers, tie_word_embeddings=True)


def _centroids(keys: Keys, vocabulary: int) -> Centroids | None:
    if not keys.flag("use_ordered_embeddings", False):
        return None
    groups = keys.integer("num_centroids", 2048, high=vocabulary)
    if vocabulary % groups:
        raise ConfigError(f"config.json: num_centroids {groups} does not divide the vocabulary of {vocabulary}")
    return Centroids(groups, keys.integer("centroid_intermediate_top_k", 32, high=groups))


def _outer(config: ModelConfig, backbone: int, centroids: Centroids | None) -> dict[str, TensorRule]:
    """The tensors outside the layers."""
    hidden = config.hidden_size
    rules = {"head": TensorRule("model.embed_tokens.weight", (config.vocab_size, hidden), also=("lm_head.weight",)),
             "norm": TensorRule("model.norm.weight", (hidden,)),
             "enter": TensorRule("pre_projection.weight", (hidden, 2 * backbone)),
             "leave": TensorRule("post_projection.weight", (backbone, hidden))}
    return rules if centroids is None else rules | {
        "centroids": TensorRule("masked_embedding.centroids.weight", (centroids.groups, hidden))}


@dataclass(frozen=True)
class Seen:
    """What a layer attends to: the `blocks` held in the target's cache, from the position of the next token."""

    pages: LayerPages
    position: int
    blocks: np.ndarray

    def attend(self, q: np.ndarray, k: None, v: None, sinks: None = None) -> np.ndarray:
        return self.pages.attend(q, self.position, self.blocks, sinks)


class AssistantDrafts:
    """Greedy drafts of an assistant, under the run's penalties. `_ids` are the newest tokens of the target's last pass, from position
    `_first`, and `_states` their hidden states after the final norm."""

    reads = FEW_TOKENS

    def __init__(self, own: Assistant, model: Model, cache: KVCache, ctx: int) -> None:
        self._own, self._model, self._cache = own, model, cache
        self._weights = TrainedDraftWeights(own, model.backends["cpu"].pool)
        self._host = self._weights.host
        self._pages = [cache.layer(source).pages.reader(self._host, window)
                       for source, window in zip(own.sources, own.config.windows, strict=True)]
        self._ropes = rope_tables(own.config, ctx)
        self._likeliest = GreedyChoice(own.config.vocab_size)
        self._states = np.empty((FEW_TOKENS, model.config.hidden_size), np.float32)
        self._first, self._ids, self._history = 0, [], []
        self.costs, self.failed, self._frequent = DraftCosts(), "", FrequentHead()

    def load(self) -> Iterator[Progress]:
        """Load its weights. Raises CheckpointError for an invalid token order."""
        yield from self._weights.load()
        own, weights = self._own, self._weights
        self._layers = weights.layers()
        self._enter, self._leave, self._head, self._norm = *map(weights.linear, ("enter", "leave", "head")), weights.norm("norm")
        if own.centroids is not None:
            order = weights.list(own.lists[0])
            if not np.array_equal(np.sort(order), np.arange(len(order))):
                raise CheckpointError(f"the draft model {own.folder}: {ORDER} does not name every token once",
                                      "the file is damaged, or of another model")
            self._groups, self._centroids = order.reshape(own.centroids.groups, -1), weights.linear("centroids")

    def choose_as(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Draft what a run with these settings finds likeliest."""
        self._likeliest.choose_as(settings, breakers)

    def reset(self) -> None:
        """Drop the sequence."""
        self._ids = []

    def close(self) -> None:
        """Free its memory."""
        self._weights.close()

    def saw(self, held: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, certain: bool) -> None:
        """See `StateDrafts.saw`: the newest states of a pass are kept, since drafting goes on from the last certain one."""
        newest = min(FEW_TOKENS, len(ids))
        with self._model.outer() as outer:
            normalised(x[-newest:], outer.norm, self._states[:newest])
        self._first, self._ids = start + len(ids) - newest, list(ids[-newest:])

    def follow(self, history: Sequence[int]) -> None:
        """The sequence is now `history`, whose last token was in no pass yet. Runs nothing."""
        self._history = history

    def behind(self, tokens: int) -> int:
        """Nothing to catch up on: it reads the target's cache."""
        return 1

    def read(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Prompts are not prefilled."""
        return iter(())

    def propose(self, most: int, cancelled: Callable[[], bool] = lambda: False) -> Draft | None:
        """Up to `most` next tokens; None if the last pass was not seen."""
        known = len(self._history) - 1
        place = known - 1 - self._first
        if most < 1 or self._cache.n != known or not 0 <= place < len(self._ids) or self._ids[place] != self._history[known - 1]:
            return None
        started, drafted = time.perf_counter(), []
        seen = [Seen(pages, known, blocks) for blocks in (self._cache.held(),) for pages in self._pages]
        positions, state = np.array([known], np.int64), self._states[place]
        while True:
            x = self._run((drafted or self._history)[-1], state, seen, positions)
            logits, numbers = self._scores(x)
            if not np.isfinite(logits).all():
                self.failed = NO_NUMBERS.format(self._own.folder)
                return None
            drafted.append(self._likeliest.token(logits, self._history, drafted, numbers))
            if len(drafted) == most:
                break
            state = self._host.logits(x, self._norm, self._leave)[0]
        self.costs.guessed(len(drafted), time.perf_counter() - started, 1, 0.0)
        return Draft(tuple(drafted), KIND)

    def _run(self, token: int, state: np.ndarray, seen: Sequence[Seen], positions: np.ndarray) -> np.ndarray:
        """Run the layers over a token and the state [D] before it; returns [1, H], a view."""
        own, host, width = self._own.config, self._host, len(state)
        joined = host.workspace.take("joined", 1, 2 * width)
        joined[0, width:] = state
        target = self._model
        with target.outer() as outer:
            joined[0, :width] = target.backends["cpu"].embed(known_tokens([token]), outer.embed, target.config.embedding_multiplier)[0]
        with host.collecting():
            (made,) = host.norm_linear(joined, None, [self._enter])
            host.flush()
            x = host.from_host(made)
            for layer, (weights, kv) in enumerate(zip(self._layers, seen, strict=True)):
                x = gemma4_text.block(x, Layer(host, weights, kv, positions, self._ropes[layer], own, layer))
        return x

    def _scores(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """(scores float32 [N] of x [1, H], their token ids, or None for the first N)."""
        if self._own.centroids is None:
            return self._host.logits(x, self._norm, self._frequent.of(self._head, self._history))[0], None
        best = self._own.centroids.best
        of_groups = self._host.logits(x, self._norm, self._centroids)[0]
        groups = self._groups[np.argpartition(of_groups, -best)[-best:]]
        norm, head = self._norm, self._head.weight
        state = normalise(x, norm.kind, norm.weight, norm.bias, norm.eps)[0].astype(np.float32)
        rows = np.empty((groups.shape[1], len(state)), np.float32)  # some at a time
        return np.concatenate([self._host.table_rows(group, head, rows) @ state for group in groups]), groups.ravel()
