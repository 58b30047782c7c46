"""N-gram embedding states and values on torch tensors (`kernels/reference_ngrams.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..layout import MAX_DECODE_TOKENS
from ..ngram_shape import NgramShape
from ..reference_ngrams import MIN_MATCH
from ..state_shape import NO_SLOT
from .states import TorchSlots
from .stream_mixing import normed_streams

if TYPE_CHECKING:
    from ...quant.recurrent_weights import NgramWeights
    from .states import Linears
    from .torch_ops import TorchOps


class TorchNgrams(TorchSlots):
    """See the module and `runtime/kv/states.py`. Words come from the host, so those of the last pass stay there."""

    shape: NgramShape

    def __init__(self, shape: NgramShape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear)
        self._raw = self.rollback_log[: MAX_DECODE_TOKENS * shape.channels].view(MAX_DECODE_TOKENS, -1)
        self._recent_words = np.zeros(0, np.int64)  # words of the last pass of few tokens, and those before it

    def words(self, ids: np.ndarray, end: int) -> np.ndarray:
        """As `kernels/cpu/ngrams.py`."""
        (source, target, after, kept), num_previous = self.pass_slots(), self.shape.size - 1
        before = np.full(num_previous, end, np.int64) if source == NO_SLOT else self._words_of(source).cpu().numpy().astype(np.int64)
        all_words = np.concatenate([before, ids])
        self._hold(target, all_words[len(ids) :])
        if after:
            self._hold(kept, all_words[after:][:num_previous])
        if len(ids) <= MAX_DECODE_TOKENS:
            self._recent_words = all_words
        return np.lib.stride_tricks.sliding_window_view(all_words, num_previous + 1)

    def add(self, x: torch.Tensor, products: Sequence[torch.Tensor], w: NgramWeights) -> torch.Tensor:
        """As `kernels/cpu/ngrams.py`."""
        (keys, values), shape, tokens = products, self.shape, len(x)
        count = shape.count
        match = (normed_streams(keys, w.key_norm, count) * normed_streams(x, w.query_norm, count)).sum(-1) / shape.width**0.5
        gate = torch.sigmoid(match.abs().clamp_min(MIN_MATCH).sqrt() * match.sign())
        values_added = (gate[..., None] * values[:, None]).flatten(1)
        inputs = normed_streams(values_added, w.conv_norm, count).flatten(1)
        if tokens <= MAX_DECODE_TOKENS:
            self._raw[:tokens] = inputs
        inputs_with_previous, taps = self.append_inputs(inputs), w.conv.view(shape.kernel, -1)
        convolved = sum(taps[tap] * inputs_with_previous[tap * shape.size :][:tokens] for tap in range(shape.kernel))
        return x.add_(values_added).add_(functional.silu(convolved))

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        """As `kernels/cpu/states.py`."""
        self.inputs_of(target).copy_(self.last_inputs(source, self._raw[:tokens]))
        self._hold(target, self._recent_words[tokens:][: self.shape.size - 1])

    def _words_of(self, slot: int) -> torch.Tensor:
        return self.state_in(slot).view(torch.int32)

    def _hold(self, slot: int, words: np.ndarray) -> None:
        self._words_of(slot).copy_(torch.from_numpy(words.astype(np.int32)))


def ngram_products(ops: TorchOps, rows: torch.Tensor, w: NgramWeights) -> list[torch.Tensor]:
    """See `BlockOps`."""
    return [ops._linear(rows, matrix) for matrix in (w.key, w.value)]
