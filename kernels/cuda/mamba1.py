"""Mamba on torch tensors (`kernels/reference_mamba1.py`), with layer states on the device.

Few tokens are processed one by one. Many are processed in chunks of STRETCH, in which the states after every token are computed together by
a parallel scan: a run of tokens scales a state and adds to it, and two runs compose into one. So the bits of a prompt depend on how it is
split, as on this backend they do anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..layout import MAX_DECODE_TOKENS
from ..mamba1_shape import CHUNK_TOKENS, Mamba1Shape
from .recurrent import TorchRecurrent

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Mamba1
    from ...quant.weight import Norm
    from .states import Linears


class TorchMamba1(TorchRecurrent):
    """See the module and `runtime/kv/states.py`. `_decay` is that of the last pass: it belongs to the layer."""

    shape: Mamba1Shape

    def __init__(self, shape: Mamba1Shape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear, (shape.values, shape.depth))

    def mix(self, products: list[torch.Tensor], w: Mamba1) -> torch.Tensor:
        """As `kernels/cpu/mamba1.py`."""
        (x, z), self._decay = products, w.decay.view(self.sizes)
        mixed = self.convolve(x, w.conv)
        mixed = functional.silu(mixed if w.conv_bias is None else mixed + w.conv_bias)
        low = _normed(self.linear(mixed, w.dt_down), w.dt_norm)
        b, c = self.linear(mixed, w.bc_proj).chunk(2, dim=1)
        steps = functional.softplus(self.linear(low, w.dt_up) + w.dt_bias, threshold=80.0)
        out = self.recurred(x, mixed, torch.cat([steps, _normed(b, w.b_norm), _normed(c, w.c_norm)], dim=1))
        return (out + w.skip * mixed).mul_(functional.silu(z))

    def _recur(self, mixed: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolution outputs [T, V], gates [T, V + 2 * N] -> (outputs [T, V], state after them)."""
        steps, b, c = gates.split((self.shape.values, self.shape.depth, self.shape.depth), dim=1)
        out, stretch = torch.empty_like(mixed), 1 if len(mixed) <= MAX_DECODE_TOKENS else CHUNK_TOKENS
        for begin in range(0, len(mixed), stretch):
            part = slice(begin, begin + stretch)
            left = torch.exp(-self._decay * steps[part, :, None])  # [T, V, N]: decay of the previous state
            sums = (steps[part] * mixed[part])[:, :, None] * b[part, None]
            sums[0] += left[0] * state
            run = 1
            while run < len(sums):  # each holds the effect of its last `run` tokens on a state
                sums[run:] = sums[run:] + left[run:] * sums[:-run]
                left[run:] = left[run:] * left[:-run]
                run *= 2
            out[part] = (sums @ c[part, :, None]).squeeze(-1)
            state = sums[-1]
        return out, state


def _normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return x if norm is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
