"""A Mamba 2 layer on torch tensors, as `kernels/reference_mamba2.py` says, with its states on its device.

A few tokens go one after the other. Many go in stretches of STRETCH, which are products (the chunked form of arXiv 2405.21060), so the bits
of a prompt depend on how it is cut, as on this backend they do anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..layout import REPEATED
from ..mamba2_shape import Mamba2Shape
from ..state_shape import NO_SLOT, STRETCH
from .states import TorchSlots

if TYPE_CHECKING:
    from ...quant.state_weights import Mamba2


class TorchMamba2(TorchSlots):
    """See the module and `runtime/states.py`. What is kept of gates are logarithms of decays, and steps."""

    shape: Mamba2Shape

    def __init__(self, shape: Mamba2Shape, memory: torch.Tensor, told: np.ndarray) -> None:
        super().__init__(shape, memory, told)
        wide, recent = REPEATED * shape.channels, self.recent
        self._raw, self._mixed = (recent[at * wide :][:wide].view(REPEATED, -1) for at in (0, 1))
        self._gates = recent[2 * wide :][: 2 * REPEATED * shape.heads].view(REPEATED, 2, shape.heads)

    def mix(self, products: list[torch.Tensor], w: Mamba2) -> torch.Tensor:
        """As `kernels/cpu/mamba2.py`."""
        (xbc, z, steps), (source, target, after, kept) = products, self.told()
        tokens, shape = len(xbc), self.shape
        mixed = self.convolve(xbc, w.conv)
        mixed = functional.silu(mixed if w.bias is None else mixed + w.bias)
        step = functional.softplus(steps + w.dt, threshold=80.0)
        gates = torch.stack([-w.decay * step, step], dim=1)
        if tokens <= REPEATED:
            self._raw[:tokens], self._mixed[:tokens], self._gates[:tokens] = xbc, mixed, gates
        state, parts, at = self._begun(source), [], 0
        for end, slot in ((after, kept), (tokens, target)):
            if end > at:
                read, state = self._recur(mixed[at:end], gates[at:end], state)
                self._state(slot).copy_(state)
                parts.append(read)
                at = end
        out = torch.cat(parts) if len(parts) > 1 else parts[0]
        out = out + w.skip[:, None] * mixed[:, : shape.values].unflatten(1, (shape.heads, -1))
        out = (out.flatten(1) * functional.silu(z)).unflatten(1, (shape.groups, -1))
        return (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + w.norm.eps)).flatten(1) * w.norm.weight

    def again(self, source: int, target: int, tokens: int) -> None:
        """As `kernels/cpu/states.py`."""
        self.inputs_of(target).copy_(self.last_inputs(source, self._raw[:tokens]))
        self._state(target).copy_(self._recur(self._mixed[:tokens], self._gates[:tokens], self._begun(source))[1])

    def _state(self, slot: int) -> torch.Tensor:
        shape = self.shape
        return self.state_in(slot).view(shape.heads, shape.head_dim, shape.depth)

    def _begun(self, source: int) -> torch.Tensor:
        return torch.zeros_like(self._state(0)) if source == NO_SLOT else self._state(source)

    def _recur(self, mixed: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of the convolution [T, channels], gates [T, 2, H] -> (what was read [T, H, P], the state behind them)."""
        shape = self.shape
        x, b, c = mixed.split((shape.values, shape.groups * shape.depth, shape.groups * shape.depth), dim=1)
        b, c = (side.unflatten(1, (shape.groups, -1)).repeat_interleave(shape.heads // shape.groups, dim=1) for side in (b, c))
        x = x.unflatten(1, (shape.heads, -1)) * gates[:, 1, :, None]
        run = _one_by_one if len(mixed) <= REPEATED else _in_stretches
        return run(x, b, c, gates[:, 0], state)


def _one_by_one(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, logs: torch.Tensor,
                state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H, P] times its steps, b and c [T, H, N], logarithms of decays [T, H], state [H, P, N]."""
    out = torch.empty_like(x)
    for t in range(len(x)):
        state = state * logs[t].exp()[:, None, None] + x[t, :, :, None] * b[t, :, None]
        out[t] = (state @ c[t, :, :, None]).squeeze(-1)
    return out, state


def _in_stretches(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, logs: torch.Tensor,
                  state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_one_by_one`."""
    out = torch.empty_like(x)
    for begin in range(0, len(x), STRETCH):
        part = slice(begin, begin + STRETCH)
        values, writes, reads = (side[part].transpose(0, 1) for side in (x, b, c))  # [H, T, ...]
        total = logs[part].cumsum(0).T  # [H, T]
        later = (total[:, :, None] - total[:, None]).tril().exp().tril()  # what is left at token t of what token s wrote
        read = total.exp()[:, :, None] * (reads @ state.transpose(1, 2)) + (reads @ writes.transpose(1, 2) * later) @ values
        out[part] = read.transpose(0, 1)
        left = (total[:, -1:] - total).exp()[:, :, None]
        state = total[:, -1].exp()[:, None, None] * state + values.transpose(1, 2) @ (writes * left)
    return out, state
