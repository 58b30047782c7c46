"""The optimizer of the training script: the steps of torch's own, which rounds to bfloat16 in between."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from fable_muon import Muon, orthogonal


def test_singular_values_come_near_one_and_vectors_stay() -> None:
    torch.manual_seed(1)
    for shape in ((48, 20), (20, 48), (32, 32)):
        matrix = torch.randn(shape)
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        found = left.T @ orthogonal(matrix) @ right.T
        values = found.diagonal()
        assert values.min() > 0.3 and values.max() < 1.3
        assert (found - torch.diag(values)).abs().max() < 1e-4


def test_steps_are_those_of_torch() -> None:
    torch.manual_seed(2)
    start = [torch.randn(40, 24), torch.randn(16, 64)]
    ours, theirs = ([each.clone().requires_grad_(True) for each in start] for _ in range(2))
    options = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.05}
    optimizers = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for before, a, b in zip(start, ours, theirs, strict=True):
        assert (a - b).norm() < 0.03 * (b - before).norm()
