"""Gated short convolution on torch tensors (`kernels/reference_conv.py`), with layer states on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..conv_shape import ConvShape
from ..layout import MAX_DECODE_TOKENS
from .states import TorchSlots

if TYPE_CHECKING:
    from ...quant.recurrent_weights import ShortConv
    from .states import Linears


class TorchConv(TorchSlots):
    """See the module and `runtime/kv/states.py`."""

    shape: ConvShape

    def __init__(self, shape: ConvShape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear)
        self._raw = self.rollback_log[: MAX_DECODE_TOKENS * shape.width].view(MAX_DECODE_TOKENS, -1)

    def mix(self, products: list[torch.Tensor], w: ShortConv) -> torch.Tensor:
        """As `kernels/cpu/short_conv.py`."""
        b, c, x = products[0].chunk(3, dim=1)
        gated = b * x
        if len(gated) <= MAX_DECODE_TOKENS:
            self._raw[: len(gated)] = gated
        return self.convolve(gated, w.conv).mul_(c)

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        """As `kernels/cpu/states.py`."""
        self.inputs_of(target).copy_(self.last_inputs(source, self._raw[:tokens]))
