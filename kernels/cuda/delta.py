"""Gated delta rule (linear attention) on torch tensors (`kernels/reference_delta.py`), with layer states on the device.

Few tokens are processed one by one. Many are processed in chunks of CHUNK_TOKENS: within a chunk, what each token writes to the state
depends on those before it, a triangular system; all else is matrix products (the chunked form of arXiv 2412.06464). So the bits of a prompt
depend on how it is split, as on this backend they do anyway; and a NaN spreads to its whole chunk, where the CPU kernels leave the tokens
before it intact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..delta_shape import DeltaShape
from ..layout import MAX_DECODE_TOKENS
from ..reference_delta import KEY_EPS
from ..state_shape import CHUNK_TOKENS
from .recurrent import TorchRecurrent

if TYPE_CHECKING:
    from ...quant.recurrent_weights import GatedDelta
    from .states import Linears


class TorchDelta(TorchRecurrent):
    """See the module and `runtime/kv/states.py`."""

    shape: DeltaShape

    def __init__(self, shape: DeltaShape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear, (shape.value_heads, shape.value_dim, shape.key_dim))

    def mix(self, products: list[torch.Tensor], w: GatedDelta) -> torch.Tensor:
        """As `kernels/cpu/delta.py`."""
        qkv, z, b, a = products
        mixed = functional.silu(self.convolve(qkv, w.conv))
        gates = torch.cat([torch.exp(-w.decay * functional.softplus(a + w.dt_bias, threshold=80.0)),
                           self.shape.beta_scale * torch.sigmoid(b)], dim=1)
        out = self.recurred(qkv, mixed, gates)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + w.norm.eps) * w.norm.weight
        return out.flatten(1).mul_(torch.sigmoid(z) if self.shape.sigmoid_gate else functional.silu(z))

    def _recur(self, mixed: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolution outputs [T, channels], gates [T, 2 * G] -> (head outputs [T, G, dv], state after them)."""
        shape = self.shape
        q, k, v = mixed.split((shape.keys, shape.keys, shape.values), dim=1)
        group = shape.value_heads // shape.key_heads
        q, k = (unit(side.unflatten(1, (shape.key_heads, -1))) for side in (q, k))
        q, k = (side.repeat(1, group, 1) if shape.tiled else side.repeat_interleave(group, dim=1) for side in (q, k))
        q, v = q * shape.key_dim**-0.5, v.unflatten(1, (shape.value_heads, -1))
        run: Callable = _one_by_one if len(mixed) <= MAX_DECODE_TOKENS else _in_chunks
        return run(q, k, v, *gates.chunk(2, dim=1), state)


def unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + KEY_EPS)


def _one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
                state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [T, G, dk], v [T, G, dv], decay and beta [T, G], state [G, dv, dk]."""
    out = torch.empty_like(v)
    for t in range(len(v)):
        state = state * decay[t, :, None, None]
        difference = (v[t] - (state @ k[t, :, :, None]).squeeze(-1)) * beta[t, :, None]
        state = state + difference[:, :, None] * k[t, :, None]
        out[t] = (state @ q[t, :, :, None]).squeeze(-1)
    return out, state


def _in_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
               state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_one_by_one`, in chunks. With c_t the product of decays up to token t of a chunk and u_t what token t writes for its key: u_t =
    beta_t (v_t - c_t S k_t - sum over s < t of c_t / c_s (k_s . k_t) u_s)."""
    out = torch.empty_like(v)
    logs = torch.log(decay.clamp_min(torch.finfo(torch.float32).tiny))
    for begin in range(0, len(v), CHUNK_TOKENS):
        part = slice(begin, begin + CHUNK_TOKENS)
        queries, keys, values = (side[part].transpose(0, 1) for side in (q, k, v))  # [G, T, ...]
        total, share = logs[part].cumsum(0).T, beta[part].T[:, :, None]  # [G, T], [G, T, 1]
        later = (total[:, :, None] - total[:, None]).tril().exp().tril()  # decay between tokens s and t
        system = share * (keys @ keys.transpose(1, 2)) * later
        update = share * (values - total.exp()[:, :, None] * (keys @ state.transpose(1, 2)))
        written = torch.linalg.solve_triangular(system, update, upper=False, unitriangular=True)  # [G, T, dv]
        read = total.exp()[:, :, None] * (queries @ state.transpose(1, 2)) + (queries @ keys.transpose(1, 2) * later) @ written
        out[part] = read.transpose(0, 1)
        left = (total[:, -1:] - total).exp()[:, :, None]
        state = total[:, -1].exp()[:, None, None] * state + written.transpose(1, 2) @ (keys * left)
    return out, state
