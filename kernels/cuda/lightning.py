"""Lightning attention on torch tensors (`kernels/reference_lightning.py`), with layer states on the device.

Few tokens are processed one by one, many in chunks, as for state space models (`mamba2.py`): a constant decay per head is a special case of
one per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..layout import MAX_DECODE_TOKENS
from ..lightning_shape import LightningShape
from .mamba2 import in_stretches, one_by_one
from .recurrent import TorchRecurrent

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Lightning
    from .states import Linears


class TorchLightning(TorchRecurrent):
    """See the module and `runtime/kv/states.py`. States are recomputed with the decays of the last pass."""

    shape: LightningShape

    def __init__(self, shape: LightningShape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear, (shape.heads, shape.head_dim, shape.head_dim))
        self._logs: torch.Tensor | None = None

    def mix(self, products: list[torch.Tensor], w: Lightning) -> torch.Tensor:
        """As `kernels/cpu/lightning.py`."""
        vkq, z = products
        self._logs = w.decay.log()
        mixed = functional.silu(vkq)
        out = self.recurred(vkq, mixed, mixed[:, :0]).flatten(1)
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + w.norm.eps) * w.norm.weight
        return normed * torch.sigmoid(z)

    def _recur(self, mixed: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Activated inputs [T, channels] -> (head outputs [T, H, P], state after them)."""
        v, k, q = (part.unflatten(1, (self.shape.heads, -1)) for part in mixed.chunk(3, dim=1))
        run = one_by_one if len(mixed) <= MAX_DECODE_TOKENS else in_stretches
        return run(v, k, q, self._logs.expand(len(mixed), -1), state)
