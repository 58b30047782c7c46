"""Compressed convolutional attention's queries, keys and values on torch tensors (`kernels/reference_cca.py`), with layer states on the
device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..cca_shape import CcaShape
from ..layout import MAX_DECODE_TOKENS
from ..reference_cca import EPS
from .states import TorchSlots

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Cca
    from .states import Linears


class TorchCca(TorchSlots):
    """See the module and `runtime/kv/states.py`."""

    shape: CcaShape

    def __init__(self, shape: CcaShape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear)
        self._raw = self.rollback_log[: MAX_DECODE_TOKENS * shape.channels].view(MAX_DECODE_TOKENS, -1)

    def convolved(self, product: torch.Tensor, w: Cca) -> tuple[torch.Tensor, ...]:
        """As in `kernels/cpu/cca.py`."""
        shape, x, tokens = self.shape, product[:, : self.shape.channels], len(product)
        inputs = self.append_inputs(x)
        if tokens <= MAX_DECODE_TOKENS:
            self._raw[:tokens] = x
        convolved, group = self._twice(inputs[:, : shape.qk_channels], tokens, w), shape.heads // shape.kv_heads
        split = x[:, : shape.qk_channels].unflatten(1, (-1, shape.depth))
        residual = 0.5 * (split[:, : shape.heads] + split[:, shape.heads :].repeat_interleave(group, 1))
        q = _stretched(convolved[:, : shape.heads] + residual)
        k = _stretched(convolved[:, shape.heads :] + residual.unflatten(1, (-1, group)).mean(2)) * w.key_temperatures[:, None]
        delayed = inputs[shape.taps - 2 :][:tokens, shape.qk_channels :]
        return q.flatten(1), k.flatten(1), torch.cat([product[:, shape.channels :], delayed], 1)

    def _twice(self, rows: torch.Tensor, tokens: int, w: Cca) -> torch.Tensor:
        """Heads [T, heads + kv_heads, depth] after both convolutions of rows [taps - 1 + T, convolved]."""
        shape, count = self.shape, len(rows) - self.shape.first + 1
        taps = w.conv.view(shape.first, -1)
        once = (w.conv_bias + sum(taps[tap] * rows[tap : tap + count] for tap in range(shape.first))).unflatten(1, (-1, shape.depth))
        by_head = w.head_conv.view(-1, shape.depth, shape.second, shape.depth)
        twice = sum(torch.einsum("hoi,thi->tho", by_head[:, :, tap], once[tap : tap + tokens]) for tap in range(shape.second))
        return twice + w.head_conv_bias.view(-1, shape.depth)

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        """As `kernels/cpu/states.py`."""
        self.inputs_of(target).copy_(self.last_inputs(source, self._raw[:tokens]))


def _stretched(heads: torch.Tensor) -> torch.Tensor:
    """Heads [T, H, depth] normalized to the square root of their width."""
    return heads * (heads.shape[2] ** 0.5 / heads.norm(dim=2, keepdim=True).clamp_min(EPS))
