"""A layer of lightning attention on torch tensors, as `kernels/reference_lightning.py` says, with its states on its device.

A few tokens go one after the other, many in stretches, as state spaces do (`mamba2.py`): a decay that is a head's own is one of a token's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..layout import REPEATED
from ..lightning_shape import LightningShape
from .mamba2 import in_stretches, one_by_one
from .recurrent import TorchRecurrent

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Lightning
    from .states import Linears


class TorchLightning(TorchRecurrent):
    """See the module and `runtime/kv/states.py`. States are made again by the decays of the last pass."""

    shape: LightningShape

    def __init__(self, shape: LightningShape, memory: torch.Tensor, told: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, told, linear, (shape.heads, shape.head_dim, shape.head_dim))
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
        """What was activated [T, channels] -> (what was read [T, H, P], the state behind them)."""
        v, k, q = (part.unflatten(1, (self.shape.heads, -1)) for part in mixed.chunk(3, dim=1))
        run = one_by_one if len(mixed) <= REPEATED else in_stretches
        return run(v, k, q, self._logs.expand(len(mixed), -1), state)
