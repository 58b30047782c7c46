"""Mamba 2 on torch tensors (`kernels/reference_mamba2.py`), with layer states on the device.

Few tokens are processed one by one. Many are processed in chunks of STRETCH, which are matrix products (the chunked form of arXiv
2405.21060), so the bits of a prompt depend on how it is split, as on this backend they do anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..layout import MAX_DECODE_TOKENS
from ..mamba2_shape import Mamba2Shape
from ..state_shape import CHUNK_TOKENS
from .recurrent import TorchRecurrent

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Mamba2
    from .states import Linears


class TorchMamba2(TorchRecurrent):
    """See the module and `runtime/kv/states.py`. Of the gates, log decays and steps are logged."""

    shape: Mamba2Shape

    def __init__(self, shape: Mamba2Shape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear, (shape.heads, shape.head_dim, shape.depth))

    def mix(self, products: list[torch.Tensor], w: Mamba2) -> torch.Tensor:
        """As `kernels/cpu/mamba2.py`."""
        (xbc, z, steps), shape = products, self.shape
        mixed = self.convolve(xbc, w.conv)
        mixed = functional.silu(mixed if w.conv_bias is None else mixed + w.conv_bias)
        step = functional.softplus(steps * w.dt_multiplier + w.dt_bias, threshold=80.0)
        gates = torch.cat([-w.decay * step, step], dim=1)
        out = self.recurred(xbc, mixed, gates)
        out = out + w.skip[:, None] * mixed[:, : shape.values].unflatten(1, (shape.heads, -1))
        out = out.flatten(1) * functional.silu(z * w.gate_multiplier)
        if w.norm is None:
            return out
        out = out.unflatten(1, (shape.groups, -1))
        return (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + w.norm.eps)).flatten(1) * w.norm.weight

    def _recur(self, mixed: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolution outputs [T, channels], gates [T, 2 * H] -> (head outputs [T, H, P], state after them)."""
        shape = self.shape
        x, b, c = mixed.split((shape.values, shape.groups * shape.depth, shape.groups * shape.depth), dim=1)
        b, c = (side.unflatten(1, (shape.groups, -1)).repeat_interleave(shape.heads // shape.groups, dim=1) for side in (b, c))
        logs, steps = gates.chunk(2, dim=1)
        x = x.unflatten(1, (shape.heads, -1)) * steps[:, :, None]
        run = one_by_one if len(mixed) <= MAX_DECODE_TOKENS else in_stretches
        return run(x, b, c, logs, state)


def one_by_one(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, logs: torch.Tensor,
                state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H, P] times its steps, b and c [T, H, N], log decays [T, H], state [H, P, N]."""
    out = torch.empty_like(x)
    for t in range(len(x)):
        state = state * logs[t].exp()[:, None, None] + x[t, :, :, None] * b[t, :, None]
        out[t] = (state @ c[t, :, :, None]).squeeze(-1)
    return out, state


def in_stretches(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, logs: torch.Tensor,
                  state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `one_by_one`, in chunks."""
    out = torch.empty_like(x)
    for begin in range(0, len(x), CHUNK_TOKENS):
        part = slice(begin, begin + CHUNK_TOKENS)
        values, writes, reads = (side[part].transpose(0, 1) for side in (x, b, c))  # [H, T, ...]
        total = logs[part].cumsum(0).T  # [H, T]
        later = (total[:, :, None] - total[:, None]).tril().exp().tril()  # decay between tokens s and t
        read = total.exp()[:, :, None] * (reads @ state.transpose(1, 2)) + (reads @ writes.transpose(1, 2) * later) @ values
        out[part] = read.transpose(0, 1)
        left = (total[:, -1:] - total).exp()[:, :, None]
        state = total[:, -1].exp()[:, None, None] * state + values.transpose(1, 2) @ (writes * left)
    return out, state
