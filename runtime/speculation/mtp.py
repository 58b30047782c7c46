"""Drafts by the model's own multi-token-prediction layer (`mtp_tensors.py`).

For every token the layer takes the hidden state after the final norm, joined with the embedding of the next token; its output through the
LM head predicts the token after that. For further drafts its own output takes the state's place. What it caches, and when:
`state_drafts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.cpu.ops import FEW_TOKENS
from ...quant.kv import codec
from .. import families
from ..kv.cache_shape import attention_specs, index_type
from ..layer import Layer
from .frequent_head import FrequentHead
from .mtp_tensors import PLACES, like
from .state_drafts import KV, StateDrafts, cache_shape, known_tokens, layer_cache_nbytes, normalised

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..model import Model


def own_cache_nbytes(config: ModelConfig, ctx: int) -> int:
    """Bytes of the layer's KV cache, and of its indexer's keys if it has one."""
    layer = like(config)
    index = None if config.indexer is None else config.indexer.shape_of(layer)
    chosen_by = 0 if index is None else index.nbytes(cache_shape(ctx).ctx, index_type(codec(KV)))
    return layer_cache_nbytes(config.kv_heads_of(layer), ctx) + chosen_by


class OwnDrafts(StateDrafts):
    """Drafts of the model's own MTP layer. `model` was opened with it; `ctx`: of the run; `chunk`: tokens of the widest pass."""

    def __init__(self, model: Model, ctx: int, chunk: int) -> None:
        config, host, self._model = model.config, model.backends["cpu"], model
        self._layer = like(config)
        self._block, self._head = families.get(config.family).block, FrequentHead()
        spec = attention_specs(config)[config.attention_layers.index(self._layer)]
        states = host.workspace.take("states", min(chunk, ctx) + FEW_TOKENS, config.hidden_size)
        super().__init__(host, [spec], ctx, config.vocab_size, states)

    def _put(self, x: np.ndarray, out: np.ndarray) -> None:
        with self._model.outer() as outer:
            normalised(x, outer.norm, out)

    def _guesses(self, x: np.ndarray, most: int) -> list[int]:
        config, drafted = self._model.config, []
        with self._model.outer() as outer:
            norm, head = outer.mtp.norm, self._head.of(outer.head, self._history)
            while True:
                logits = self._host.logits(x, norm, head, config.final_logit_softcapping, 1 / config.logits_scaling)[0]
                drafted.append(self._likeliest.token(logits, self._history, drafted))
                if len(drafted) == most:
                    return drafted
                x = self._run(drafted[-1:], normalised(x, norm, np.empty_like(x)))

    def _run(self, ids: Sequence[int], states: np.ndarray) -> np.ndarray:
        model, host, tokens = self._model, self._host, known_tokens(ids)
        config, width = model.config, states.shape[1]
        with model.outer() as outer, host.collecting():
            own, step = outer.mtp, self._cache.begin(len(tokens))
            joined = host.workspace.take("joined", len(tokens), 2 * width)
            x = host.embed(tokens, outer.embed, config.embedding_multiplier)
            host.flush()
            at = (width, 0) if PLACES[config.family].state_first else (0, width)
            for place, values, norm in zip(at, (x, states), (own.embed_norm, own.state_norm), strict=True):
                normalised(values, norm, joined[:, place : place + width])
            (made,) = host.norm_linear(joined, None, [own.join])
            host.flush()
            here = Layer(host, own.layer, self._cache.layer(0), step.positions, model.ropes[self._layer], config, self._layer)
            x = self._block(host.from_host(made), here)
        self._cache.commit()
        return x
