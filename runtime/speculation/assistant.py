"""Gemma 4's assistants: small models that draft from the target's last hidden state and its own KV cache.

An assistant has no KV cache: its layers attend to that of the target's last layer of the same kind, windowed or full. Its input is
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
from .draft_model import MODEL_DRAFT
from .drafts import Draft
from .frequent_head import FrequentHead
from .greedy_choice import GreedyChoice
from .state_drafts import embedding_ids, normalize_rows
from .trained_draft import NAN_SCORES, DraftInputs, TrainedDraft, TrainedDraftWeights, require_match, resolve_tensors, token_list_info

if TYPE_CHECKING:
    from ...kernels.cpu.pages import LayerPages
    from ..cache import KVCache
    from ..config import ModelConfig
    from ..events import Progress
    from ..model import Model
    from ..sampler import SamplerSettings
    from ..sampling.dry import Breakers
    from .trained_draft import DraftRun

# Keys of the family's config that no assistant uses.
UNSUPPORTED_KEYS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
TOKEN_ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True)
class Centroids:
    """A vocabulary in clusters of equal size, of which the best are scored."""

    clusters: int
    top_k: int


@dataclass(frozen=True)
class Assistant(TrainedDraft):
    """The plan of an assistant.

    sources: by layer, the target's layer whose keys and values it reads.
    centroids: None if it scores the whole vocabulary.
    """

    sources: tuple[int, ...] = ()
    centroids: Centroids | None = None

    def drafts(self, model: Model, cache: KVCache, ctx: int, chunk: int) -> AssistantDrafts:
        return AssistantDrafts(self, model, cache, ctx)


def plan_assistant(folder: Path, raw: Mapping[str, object], store: TensorStore, target: ModelConfig, run: DraftRun) -> Assistant:
    """The assistant in `folder`, for a run of `target`. Raises UsageError if it was trained for another, ConfigError and CheckpointError
    if it is incomplete."""
    keys = Keys(raw)
    config, sources = config_of(keys), []
    backbone = keys.integer("backbone_hidden_size", REQUIRED, high=2**20)
    require_match(target.family == gemma4_text.__name__.rpartition(".")[2], folder, "the family", "gemma4", target.family)
    require_match(backbone == target.hidden_size, folder, "a hidden size of", backbone, target.hidden_size)
    require_match(config.vocab_size == target.vocab_size, folder, "a vocabulary of", config.vocab_size, target.vocab_size)
    for layer, window in enumerate(config.windows):
        same_kind = [other for other in target.attention_layers if (target.windows[other] is None) == (window is None)]
        has, wants = [target.kv_heads_of(other) for other in same_kind[-1:]], config.kv_heads_of(layer)
        require_match(has == [wants], folder, "key-value heads and their size of", wants, has[0] if has else "none")
        sources.append(same_kind[-1])
    centroids = _centroids(keys, config.vocab_size)
    token_lists = () if centroids is None else (token_list_info(store, TOKEN_ORDER, config.vocab_size),)
    rules = {layer: gemma4_text.layer_tensors(config, layer) for layer in range(config.num_hidden_layers)}
    store, tensors = resolve_tensors(run.spec, store, {"outer": _outer_rules(config, backbone, centroids), **rules})
    heads = [config.kv_heads_of(layer) for layer in range(config.num_hidden_layers)]
    rows = max(config.vocab_size, backbone, centroids.clusters if centroids else 0)
    # A pass has one token. `spilled_kv` also covers pages of two kinds, over which attention runs one after the other.
    dims = Dims(config.hidden_size, config.num_attention_heads, *heads[0], config.widest_intermediate, rows, 1, run.ctx, 1,
                packed_kv=run.packed_kv,
                spilled_kv=run.mixed_kv, other_kv_heads=tuple(sorted({*heads} - {heads[0]})), mtp_input_width=2 * backbone)
    return Assistant(folder, store, config, tensors, dims, run.workers, DraftInputs(kv_cache=True), token_lists,
                     4 * FEW_TOKENS * backbone, tuple(sources), centroids)


def config_of(keys: Keys) -> ModelConfig:
    """The config of its layers, all of which attend to the target's cache."""
    text = keys.section("text_config")
    if text is None:
        raise ConfigError("config.json: text_config is missing")
    if unsupported := [name for name in UNSUPPORTED_KEYS if text.get(name)]:
        raise ConfigError(f"config.json: {unsupported[0]} of a draft model is not supported", "no published one has it")
    ignored = {*UNSUPPORTED_KEYS, "num_kv_shared_layers", "architectures"}
    text_keys = {key: value for key, value in text.items() if key not in ignored}
    config = parse_config({"model_type": "gemma4_text", **text_keys, UNSUPPORTED_KEYS[0]: 0})
    return replace(config, kv_sources=(-1,) * config.num_hidden_layers, tie_word_embeddings=True)


def _centroids(keys: Keys, vocab_size: int) -> Centroids | None:
    if not keys.flag("use_ordered_embeddings", False):
        return None
    clusters = keys.integer("num_centroids", 2048, high=vocab_size)
    if vocab_size % clusters:
        raise ConfigError(f"config.json: num_centroids {clusters} does not divide the vocabulary of {vocab_size}")
    return Centroids(clusters, keys.integer("centroid_intermediate_top_k", 32, high=clusters))


def _outer_rules(config: ModelConfig, backbone: int, centroids: Centroids | None) -> dict[str, TensorRule]:
    """The tensors outside the layers."""
    hidden = config.hidden_size
    rules = {"head": TensorRule("model.embed_tokens.weight", (config.vocab_size, hidden), also=("lm_head.weight",)),
             "norm": TensorRule("model.norm.weight", (hidden,)),
             "enter": TensorRule("pre_projection.weight", (hidden, 2 * backbone)),
             "leave": TensorRule("post_projection.weight", (backbone, hidden))}
    return rules if centroids is None else rules | {
        "centroids": TensorRule("masked_embedding.centroids.weight", (centroids.clusters, hidden))}


@dataclass(frozen=True)
class TargetKV:
    """The keys and values of the target that a layer attends to."""

    pages: LayerPages
    position: int  # of the next token
    blocks: np.ndarray  # in the target's cache

    def attend(self, q: np.ndarray, k: None, v: None, sinks: None = None) -> np.ndarray:
        return self.pages.attend(q, self.position, self.blocks, sinks)


class AssistantDrafts:
    """Greedy drafts of an assistant, under the run's penalties.

    `_ids` are the newest tokens of the target's last pass, from position `_first`, and `_states` their hidden states after the final norm.
    """

    num_hidden_states = FEW_TOKENS

    def __init__(self, plan: Assistant, model: Model, cache: KVCache, ctx: int) -> None:
        self._plan, self._model, self._cache = plan, model, cache
        self._weights = TrainedDraftWeights(plan, model.backends["cpu"].pool)
        self._host = self._weights.host
        self._pages = [cache.layer(source).pages.reader(self._host, window)
                       for source, window in zip(plan.sources, plan.config.windows, strict=True)]
        self._ropes = rope_tables(plan.config, ctx)
        self._greedy = GreedyChoice(plan.config.vocab_size)
        self._states = np.empty((FEW_TOKENS, model.config.hidden_size), np.float32)
        self._first, self._ids, self._history = 0, [], []
        self.costs, self.failed, self._frequent_head = DraftCosts(), "", FrequentHead()

    def load(self) -> Iterator[Progress]:
        """Load its weights. Raises CheckpointError for an invalid token order."""
        yield from self._weights.load()
        plan, weights = self._plan, self._weights
        self._layers = weights.layers()
        self._pre_projection, self._post_projection = weights.linear("enter"), weights.linear("leave")
        self._head, self._norm = weights.linear("head"), weights.norm("norm")
        if plan.centroids is not None:
            order = weights.token_list(plan.token_lists[0])
            if not np.array_equal(np.sort(order), np.arange(len(order))):
                raise CheckpointError(f"the draft model {plan.folder}: {TOKEN_ORDER} does not name every token once",
                                      "the file is damaged, or of another model")
            self._clusters, self._centroids = order.reshape(plan.centroids.clusters, -1), weights.linear("centroids")

    def set_sampling(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Draft the most likely tokens of a run with these settings."""
        self._greedy.set_sampling(settings, breakers)

    def reset(self) -> None:
        """Drop the sequence."""
        self._ids = []

    def close(self) -> None:
        """Free its memory."""
        self._weights.close()

    def add_hidden_states(self, tokens: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, verified: bool) -> None:
        """See `ModelDrafts.add_hidden_states`: the newest states of a pass are kept, since a draft continues from the last verified one."""
        count = min(FEW_TOKENS, len(ids))
        with self._model.outer() as outer:
            normalize_rows(x[-count:], outer.norm, self._states[:count])
        self._first, self._ids = start + len(ids) - count, list(ids[-count:])

    def follow(self, history: Sequence[int]) -> None:
        """The sequence is now `history`, whose last token was in no pass yet. Runs nothing."""
        self._history = history

    def tokens_behind(self, tokens: int) -> int:
        """It reads the target's cache, and so has nothing to catch up on."""
        return 1

    def read(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Nothing to do: prompts are not prefilled."""
        return iter(())

    def propose(self, limit: int, cancelled: Callable[[], bool] = lambda: False) -> Draft | None:
        """Up to `limit` next tokens; None without the states of the last pass."""
        known = len(self._history) - 1
        index = known - 1 - self._first
        if limit < 1 or self._cache.n != known or not 0 <= index < len(self._ids) or self._ids[index] != self._history[known - 1]:
            return None
        started, drafted = time.perf_counter(), []
        blocks = self._cache.held_blocks()
        target_kv = [TargetKV(pages, known, blocks) for pages in self._pages]
        positions, state = np.array([known], np.int64), self._states[index]
        while True:
            x = self._forward((drafted or self._history)[-1], state, target_kv, positions)
            logits, ids = self._logits(x)
            if not np.isfinite(logits).all():
                self.failed = NAN_SCORES.format(self._plan.folder)
                return None
            drafted.append(self._greedy.token(logits, self._history, drafted, ids))
            if len(drafted) == limit:
                break
            state = self._host.logits(x, self._norm, self._post_projection)[0]
        self.costs.record_draft(len(drafted), time.perf_counter() - started, 1, 0.0)
        return Draft(tuple(drafted), MODEL_DRAFT)

    def _forward(self, token: int, state: np.ndarray, target_kv: Sequence[TargetKV], positions: np.ndarray) -> np.ndarray:
        """Run the layers over a token and the state [D] before it; returns [1, H], a view."""
        config, host, width = self._plan.config, self._host, len(state)
        joined = host.workspace.take("joined", 1, 2 * width)
        joined[0, width:] = state
        target = self._model
        with target.outer() as outer:
            embedded = target.backends["cpu"].embed(embedding_ids([token]), outer.embed, target.config.embedding_multiplier)
            joined[0, :width] = embedded[0]
        with host.collecting():
            (projected,) = host.norm_linear(joined, None, [self._pre_projection])
            host.flush()
            x = host.from_host(projected)
            for layer, (weights, kv) in enumerate(zip(self._layers, target_kv, strict=True)):
                x = gemma4_text.block(x, Layer(host, weights, kv, positions, self._ropes[layer], config, layer))
        return x

    def _logits(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """(logits float32 [N] of x [1, H], their token ids, or None for the first N)."""
        if self._plan.centroids is None:
            return self._host.logits(x, self._norm, self._frequent_head.select(self._head, self._history))[0], None
        top_k = self._plan.centroids.top_k
        cluster_logits = self._host.logits(x, self._norm, self._centroids)[0]
        clusters = self._clusters[np.argpartition(cluster_logits, -top_k)[-top_k:]]
        norm, head = self._norm, self._head.weight
        state = normalise(x, norm.kind, norm.weight, norm.bias, norm.eps)[0].astype(np.float32)
        rows = np.empty((clusters.shape[1], len(state)), np.float32)  # of one cluster
        return np.concatenate([self._host.table_rows(ids, head, rows) @ state for ids in clusters]), clusters.ravel()
