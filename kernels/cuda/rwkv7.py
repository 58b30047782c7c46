"""RWKV 7 on torch tensors (`kernels/reference_rwkv7.py`), with layer states on the device.

Tokens are processed one by one, with a few operations over all heads each. So a prompt is bit-identical to single tokens, except for
products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..layout import MAX_DECODE_TOKENS
from ..reference_rwkv7 import EPS, SLOWEST
from ..rwkv7_shape import PARTS, Rwkv7Shape
from ..state_shape import NO_SLOT
from .states import TorchSlots

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Rwkv7
    from ...quant.weight import Linear, Norm
    from .states import Linears


class TorchRwkv7(TorchSlots):
    """See the module and `runtime/kv/states.py`."""

    shape: Rwkv7Shape

    def __init__(self, shape: Rwkv7Shape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear)
        self.sizes, begin = (shape.heads, shape.head_dim, shape.head_dim), 2 * MAX_DECODE_TOKENS * shape.values
        self._rows = self.rollback_log[:begin].view(MAX_DECODE_TOKENS, 2, shape.values)
        self._parts = self.rollback_log[begin:][: PARTS * MAX_DECODE_TOKENS * shape.values].view(PARTS, MAX_DECODE_TOKENS, shape.values)

    def shifted(self, x: torch.Tensor, norm: Norm, mix: torch.Tensor, half: int) -> list[torch.Tensor]:
        """As `kernels/cpu/rwkv7.py`."""
        source, target, after, kept = self.pass_slots()
        rows = _normed(x, norm)
        first = torch.zeros_like(rows[:1]) if source == NO_SLOT else self.inputs_of(source)[half, None]
        difference = torch.cat([first, rows[:-1]]) - rows
        if len(x) <= MAX_DECODE_TOKENS:
            self._rows[: len(x), half] = rows
        if after:
            self.inputs_of(kept)[half] = rows[after - 1]
        self.inputs_of(target)[half] = rows[-1]
        return [rows + difference * share for share in mix.view(-1, x.shape[1])]

    def products(self, rows: list[torch.Tensor], linears: tuple[Linear, ...], w: Rwkv7,
                 first: torch.Tensor | None) -> list[torch.Tensor]:
        """As `kernels/cpu/rwkv7.py`."""
        r, k, v = (self.linear(rows[row], matrix) for row, matrix in zip((0, 2, 3), linears))
        decay = self.linear(torch.tanh(self.linear(rows[1], w.w_lora.down)), w.w_lora.up)
        if first is not None:
            v = v + (first - v) * torch.sigmoid(self.linear(self.linear(rows[3], w.v_lora.down), w.v_lora.up))
        rate = self.linear(self.linear(rows[4], w.a_lora.down), w.a_lora.up)
        gate = self.linear(torch.sigmoid(self.linear(rows[5], w.g_lora.down)), w.g_lora.up)
        return [r, k, v, decay, rate, gate]

    def mix(self, products: list[torch.Tensor], w: Rwkv7) -> torch.Tensor:
        """As `kernels/cpu/rwkv7.py`."""
        (r, k, v, raw, rate, gate), heads = products, self.shape.heads
        in_context_rate, removed = torch.sigmoid(rate), (k * w.k_k).unflatten(1, (heads, -1))
        removed = (removed / removed.norm(dim=-1, keepdim=True).clamp_min(EPS)).flatten(1)
        k = k * (1 + (in_context_rate - 1) * w.k_a)
        parts = torch.stack([r, k, v, torch.exp(-SLOWEST * torch.sigmoid(raw)), removed, removed * in_context_rate])
        read = functional.group_norm(self._recurred(parts), heads, w.norm.weight, w.norm.bias, w.norm.eps)
        share = (r * k * w.r_k).unflatten(1, (heads, -1)).sum(-1, keepdim=True)
        return (read + (share * v.unflatten(1, (heads, -1))).flatten(1)) * gate

    def _recurred(self, parts: torch.Tensor) -> torch.Tensor:
        """The outputs of a pass [T, values]; states go into the slots set for the pass, and few tokens are logged for rollback."""
        if (tokens := parts.shape[1]) <= MAX_DECODE_TOKENS:
            self._parts[:, :tokens] = parts
        return self.from_slot_to_slot(tokens, lambda own, state: self._recur(parts[:, own], state))

    def _recur(self, parts: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts [PARTS, T, values] -> (outputs [T, values], state after them)."""
        out = []
        for r, k, v, decay, removed, put in parts.unflatten(2, (self.shape.heads, -1)).unbind(1):
            removal = state @ removed[:, :, None]
            state = state * decay[:, None] - removal * put[:, None] + v[:, :, None] * k[:, None]
            out.append((state @ r[:, :, None]).flatten())
        return torch.stack(out), state

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        """As `kernels/cpu/states.py`."""
        self.inputs_of(target).copy_(self._rows[tokens - 1])
        self.state_of(target).copy_(self._recur(self._parts[:, :tokens], self.initial_state(source))[1])


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[1:], norm.weight, norm.bias, norm.eps)
