"""Kimi Delta Attention on torch tensors (`kernels/reference_delta.py`), with layer states on the device.

As `delta.py`, but decay differs by channel and cannot be factored out of a product of keys, since the inverse of a tiny decay overflows; so
pairs of tokens are summed channel by channel, in shorter chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..kda_shape import CHUNK_TOKENS, KdaShape
from ..layout import MAX_DECODE_TOKENS
from .delta import TorchDelta, unit

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Kda


class TorchKda(TorchDelta):
    """See the module and `runtime/kv/states.py`. Of the gates, log decays and betas are logged."""

    shape: KdaShape

    def mix(self, products: list[torch.Tensor], w: Kda) -> torch.Tensor:
        """As `kernels/cpu/kda.py`."""
        (qkv, z, a, b), shape = products, self.shape
        if shape.low_rank_gates:
            z, a = self.linear(z, w.gate_up), self.linear(a, w.decay_up)
        mixed = functional.silu(self.convolve(qkv, w.conv))
        steps = (a + w.dt_bias).unflatten(1, (shape.key_heads, -1))
        if shape.decay_bound is None:
            logs = -w.decay[:, None] * functional.softplus(steps, threshold=80.0)
        else:
            logs = shape.decay_bound * torch.sigmoid(w.decay[:, None] * steps)
        gates = torch.cat([logs.flatten(1), torch.sigmoid(b)], dim=1)
        out = self.recurred(qkv, mixed, gates)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + w.norm.eps) * w.norm.weight
        return out.flatten(1).mul_(torch.sigmoid(z))

    def _recur(self, mixed: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolution outputs [T, channels], gates [T, keys + G] -> (head outputs [T, G, dv], state after them)."""
        shape = self.shape
        q, k, v = (side.unflatten(1, (shape.key_heads, -1)) for side in mixed.chunk(3, dim=1))
        logs, beta = gates.split((shape.keys, shape.value_heads), dim=1)
        run: Callable = _one_by_one if len(mixed) <= MAX_DECODE_TOKENS else _in_chunks
        return run(unit(q) * shape.key_dim**-0.5, unit(k), v, logs.unflatten(1, (shape.key_heads, -1)), beta, state)


def _one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logs: torch.Tensor, beta: torch.Tensor,
                state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, v and log decays [T, G, d], beta [T, G], state [G, d of values, d of keys]."""
    out = torch.empty_like(v)
    for t in range(len(v)):
        state = state * logs[t, :, None].exp()
        difference = (v[t] - (state @ k[t, :, :, None]).squeeze(-1)) * beta[t, :, None]
        state = state + difference[:, :, None] * k[t, :, None]
        out[t] = (state @ q[t, :, :, None]).squeeze(-1)
    return out, state


def _in_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logs: torch.Tensor, beta: torch.Tensor,
               state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_one_by_one`, in chunks. With c_t the products of decays up to token t, per channel, and u_t what token t writes for its key: u_t
    = beta_t (v_t - S (c_t k_t) - sum over s < t of (k_t . c_t / c_s k_s) u_s)."""
    out = torch.empty_like(v)
    for begin in range(0, len(v), CHUNK_TOKENS):
        part = slice(begin, begin + CHUNK_TOKENS)
        queries, keys, values, sums = (side[part].transpose(0, 1) for side in (q, k, v, logs))  # [G, T, ...]
        total, share = sums.cumsum(1), beta[part].T[:, :, None]  # [G, T, d], [G, T, 1]
        ahead = torch.ones(values.shape[1], values.shape[1], dtype=torch.bool, device=v.device).triu(1)[:, :, None]
        later = (total[:, :, None] - total[:, None]).masked_fill(ahead, -torch.inf).exp()  # [G, T, T, d]: at token t of token s
        system = share * torch.einsum("gtc,gsc,gtsc->gts", keys, keys, later)
        update = share * (values - (total.exp() * keys) @ state.transpose(1, 2))
        written = torch.linalg.solve_triangular(system, update, upper=False, unitriangular=True)  # [G, T, d]
        read = (total.exp() * queries) @ state.transpose(1, 2) + torch.einsum("gtc,gsc,gtsc->gts", queries, keys, later) @ written
        out[part] = read.transpose(0, 1)
        left = (total[:, -1:] - total).exp()
        state = total[:, -1, None].exp() * state + written.transpose(1, 2) @ (keys * left)
    return out, state
