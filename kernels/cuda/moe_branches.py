"""Experts parallel to an MLP or on their own, and routers that are small networks, with torch ops: the counterparts of `cpu/moe.py` and
`cpu/residual_scaling.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..reference_moe import Routed, Routing
from .routing import routed
from .stages import activated

if TYPE_CHECKING:
    from ...quant.weight import Expert, Linear, Norm, ParallelExperts, RouterMlp, SharedExpert
    from .torch_ops import TorchOps


def mlp_and_experts(ops: TorchOps, x: torch.Tensor, norm: Norm, gate: Linear | None, up: Linear | None, down: Linear | None,
                    router: Linear, experts: Sequence[Expert], apart: ParallelExperts, routing: Routing, act: str,
                    see: Callable[[torch.Tensor], None] | None = None, see_visits: Callable[[Routed], None] | None = None,
                    after: Norm | None = None, correction: torch.Tensor | None = None) -> torch.Tensor:
    """See `BlockOps`."""
    if down is not None:
        n = ops.stages.normalise(x, norm)
        hidden = ops.stages.gated(ops._linear(n, gate), ops._linear(n, up), act)
        if see is not None:
            see(hidden)
    total = expert_branch(ops, x, apart.pre_norm, router, experts, apart, routing, act, see_visits, correction)
    normed = lambda branch, norm: branch if norm is None else ops.stages.normalise(branch, norm)  # noqa: E731
    branch = 0 if down is None else normed(ops._linear(hidden, down), apart.mlp_post_norm)
    return x.add_(normed(branch + normed(total, apart.post_norm), after))


def expert_branch(ops: TorchOps, x: torch.Tensor, norm: Norm, router: Linear, experts: Sequence[Expert], apart: ParallelExperts,
                  routing: Routing, act: str, see: Callable[[Routed], None] | None = None, correction: torch.Tensor | None = None,
                  shared: SharedExpert | None = None, said: torch.Tensor | None = None) -> torch.Tensor:
    """See `BlockOps`."""
    n = ops.stages.normalise(x, norm)
    shared_input = None if shared is None else ops.shared_hidden(n, shared, act)
    reads = ops.stages.normalise(x, apart.router_norm) if said is None else said
    chosen, shares = routed(ops._linear(reads, router), routing, correction)
    total = torch.zeros_like(x)
    ops._visited(total, n, chosen, shares * apart.expert_scales[chosen], experts, act, see, shared_input, handed=routing.zero_experts)
    return total if shared is None else ops.linear_add(shared_input, shared.down, total, None, shared.multiplier)


def router_mlp(ops: TorchOps, x: torch.Tensor, norm: Norm, path: RouterMlp, streams: torch.Tensor) -> torch.Tensor:
    """See `BlockOps`."""
    y = ops._linear(ops.stages.normalise(x, norm), path.down)
    carried = streams[:, x.shape[1] :][:, : y.shape[1]]
    if path.previous_scale is not None:
        y = torch.addcmul(y, path.previous_scale, carried)
    carried.copy_(y)
    inner = activated(ops._linear(ops.stages.normalise(y, path.norm), path.fc1), "gelu")
    return activated(ops._linear(inner, path.fc2), "gelu")
