"""LoRA adapter scales of a pass on a device, as in `kernels/cpu/lora.py`.

A pass replayed as a graph reads the scales from a device array of its own, into which the host's are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ...quant.weight import Linear, Lora
    from .matmul import ResidualAndFactor

NONE, UNSCALED, PER_TOKEN = range(3)


class AdapterScales:
    """The part of it that `TorchOps` holds."""

    _scaling, _chosen = NONE, ()

    def __init__(self) -> None:
        self._scales_by_rows: dict[int, np.ndarray] = {}  # by number of rows; recorded passes identify arrays by identity

    def adapt(self, scales: np.ndarray | None) -> None:
        """As on the CPU: float32 [1, adapters] or a row per token; None if no adapter is used."""
        scaling = NONE if scales is None or not scales.any() else UNSCALED if (scales == 1).all() else PER_TOKEN
        self._scaling, self._chosen = scaling, () if scaling == NONE else tuple(scales.any(0).tolist())
        self.repeats.key = scaling, self._chosen  # distinguishes recorded passes
        if scaling == PER_TOKEN:
            self._scales = self._scales_by_rows.setdefault(len(scales), np.zeros(scales.shape, np.float32))
            self._scales[:] = scales

    @property
    def is_adapted(self) -> bool:
        """As on the CPU."""
        return self._scaling != NONE

    def lengthened(self, x: torch.Tensor, each: Linear, y: torch.Tensor, into: ResidualAndFactor) -> torch.Tensor:
        """`beside` applied to a product y of its own [T, N] whose rows adapters rescale (DoRA); added to `into`."""
        total = self.upload(self._scales) @ each.lora.dora_gains if self._scaling == PER_TOKEN else each.lora.dora_gains.sum(0)
        y = y + total * (y if each.bias is None else y - each.bias)
        y = self.beside(x, each.lora, y, 1.0)
        residual, factor = into
        return y if residual is None else residual.add_(y, alpha=factor)

    def beside(self, x: torch.Tensor, own: Lora, y: torch.Tensor, factor: float) -> torch.Tensor:
        """y + factor * out(s * into(x)) for each adapter used by a text of the pass, in place."""
        for pair in own.pairs if self._scaling != NONE else ():
            if not self._chosen[pair.adapter]:
                continue
            between = self._linear(x, pair.into)
            if self._scaling == PER_TOKEN:
                between = between * self.upload(self._scales)[:, pair.adapter : pair.adapter + 1]
            y = self._linear(between, pair.out, (y, factor))
        return y
