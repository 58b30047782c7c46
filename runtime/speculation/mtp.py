"""Drafts by the model's own multi-token-prediction layer (`mtp_tensors.py`).

For every token the layer takes the hidden state after the final norm, joined with the embedding of the next token; its output through the
LM head predicts the token after that. For further drafts its own output takes the state's place. Its KV cache is that of
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
from .mtp_tensors import MTP_NAMES, mtp_model_layer
from .state_drafts import KV, StateDrafts, cache_shape, embedding_ids, layer_cache_nbytes, normalize_rows

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..model import Model


def mtp_cache_nbytes(config: ModelConfig, ctx: int) -> int:
    """Bytes of the layer's KV cache, and of its indexer's keys if it has one."""
    layer = mtp_model_layer(config)
    index = None if config.indexer is None else config.indexer.shape_of(layer)
    index_nbytes = 0 if index is None else index.nbytes(cache_shape(ctx).ctx, index_type(codec(KV)))
    return layer_cache_nbytes(config.kv_heads_of(layer), ctx) + index_nbytes


class MtpDrafts(StateDrafts):
    """Drafts of the model's own MTP layer.

    model: opened with that layer.
    ctx: context length of the run.
    chunk: tokens of the longest pass.
    """

    def __init__(self, model: Model, ctx: int, chunk: int) -> None:
        config, host, self._model = model.config, model.backends["cpu"], model
        self._layer = mtp_model_layer(config)
        self._block, self._head = families.get(config.family).block, FrequentHead()
        spec = attention_specs(config)[config.attention_layers.index(self._layer)]
        states = host.workspace.take("states", min(chunk, ctx) + FEW_TOKENS, config.hidden_size)
        super().__init__(host, [spec], ctx, config.vocab_size, states)

    def _store_states(self, x: np.ndarray, out: np.ndarray) -> None:
        with self._model.outer() as outer:
            normalize_rows(x, outer.norm, out)

    def _draft_tokens(self, x: np.ndarray, count: int) -> list[int]:
        config, drafted = self._model.config, []
        with self._model.outer() as outer:
            norm, head = outer.mtp.norm, self._head.select(outer.head, self._history)
            while True:
                logits = self._host.logits(x, norm, head, config.final_logit_softcapping, 1 / config.logits_scaling)[0]
                drafted.append(self._greedy.token(logits, self._history, drafted))
                if len(drafted) == count:
                    return drafted
                x = self._forward(drafted[-1:], normalize_rows(x, norm, np.empty_like(x)))

    def _forward(self, ids: Sequence[int], states: np.ndarray) -> np.ndarray:
        model, host, tokens = self._model, self._host, embedding_ids(ids)
        config, width = model.config, states.shape[1]
        with model.outer() as outer, host.collecting():
            mtp, step = outer.mtp, self._cache.begin(len(tokens))
            joined = host.workspace.take("joined", len(tokens), 2 * width)
            embedded = host.embed(tokens, outer.embed, config.embedding_multiplier)
            host.flush()
            columns = (width, 0) if MTP_NAMES[config.family].state_first else (0, width)
            for column, values, norm in zip(columns, (embedded, states), (mtp.embed_norm, mtp.state_norm), strict=True):
                normalize_rows(values, norm, joined[:, column : column + width])
            (inputs,) = host.norm_linear(joined, None, [mtp.eh_proj])
            host.flush()
            layer = Layer(host, mtp.layer, self._cache.layer(0), step.positions, model.ropes[self._layer], config, self._layer)
            x = self._block(host.from_host(inputs), layer)
        self._cache.commit()
        return x
