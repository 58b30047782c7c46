"""The Muon optimizer (Jordan et al., 2024) in float32: matrix updates towards the nearest orthogonal matrix.

torch's own version multiplies in bfloat16, which suits a GPU; a CPU without bf16 units takes far longer for that than for float32. Ten
steps of fable's training took 158 s on two cores with AVX2 that way, and 38 s this way, with more tokens in each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

TURNS, QUINTIC = 5, (3.4445, -4.7750, 2.0315)  # of the iteration, and the polynomial of singular values that each is


def orthogonal(matrix: Tensor) -> Tensor:
    """[N, K] with the same singular vectors and singular values near 1 (between some 0.3 and 1.3)."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    a, b, c = QUINTIC
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(TURNS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if wide is not matrix else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, decoupled weight decay; all parameters are matrices."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                running = self.state[weight].setdefault("running", torch.zeros_like(weight))
                running.lerp_(weight.grad, 1 - momentum)
                rows, columns = weight.shape
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(orthogonal(weight.grad.lerp(running, momentum)), alpha=-rate * math.sqrt(max(1, rows / columns)))
