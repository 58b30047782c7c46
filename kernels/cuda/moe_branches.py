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
                    router: Linear, experts: Sequence[Expert], parallel: ParallelExperts, routing: Routing, act: str,
                    observer: Callable[[torch.Tensor], None] | None = None, visit_observer: Callable[[Routed], None] | None = None,
                    post_norm: Norm | None = None, correction: torch.Tensor | None = None) -> torch.Tensor:
    """See `BlockOps`."""
    if down is not None:
        n = ops.stages.normalise(x, norm)
        hidden = ops.stages.gated(ops._linear(n, gate), ops._linear(n, up), act)
        if observer is not None:
            observer(hidden)
    total = expert_branch(ops, x, parallel.pre_norm, router, experts, parallel, routing, act, visit_observer, correction)
    normed = lambda branch, norm: branch if norm is None else ops.stages.normalise(branch, norm)  # noqa: E731
    branch = 0 if down is None else normed(ops._linear(hidden, down), parallel.mlp_post_norm)
    return x.add_(normed(branch + normed(total, parallel.post_norm), post_norm))


def expert_branch(ops: TorchOps, x: torch.Tensor, norm: Norm, router: Linear, experts: Sequence[Expert], parallel: ParallelExperts,
                  routing: Routing, act: str, observer: Callable[[Routed], None] | None = None, correction: torch.Tensor | None = None,
                  shared: SharedExpert | None = None, router_input: torch.Tensor | None = None) -> torch.Tensor:
    """See `BlockOps`."""
    n = ops.stages.normalise(x, norm)
    shared_input = None if shared is None else ops.shared_hidden(n, shared, act)
    router_rows = ops.stages.normalise(x, parallel.router_norm) if router_input is None else router_input
    chosen, shares = routed(ops._linear(router_rows, router), routing, correction)
    total = torch.zeros_like(x)
    ops._visited(total, n, chosen, shares * parallel.expert_scales[chosen], experts, act, observer, shared_input,
                 zero_experts=routing.zero_experts)
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
