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

    def apply_dora(self, x: torch.Tensor, matrix: Linear, y: torch.Tensor, residual_and_factor: ResidualAndFactor) -> torch.Tensor:
        """`add_lora` applied to a product y of its own [T, N] whose rows adapters rescale (DoRA); added to `residual_and_factor`."""
        gain = self.upload(self._scales) @ matrix.lora.dora_gains if self._scaling == PER_TOKEN else matrix.lora.dora_gains.sum(0)
        y = y + gain * (y if matrix.bias is None else y - matrix.bias)
        y = self.add_lora(x, matrix.lora, y, 1.0)
        residual, factor = residual_and_factor
        return y if residual is None else residual.add_(y, alpha=factor)

    def add_lora(self, x: torch.Tensor, lora: Lora, y: torch.Tensor, factor: float) -> torch.Tensor:
        """y + factor * out(s * into(x)) for each adapter used by a text of the pass, in place."""
        for pair in lora.pairs if self._scaling != NONE else ():
            if not self._chosen[pair.adapter]:
                continue
            hidden = self._linear(x, pair.into)
            if self._scaling == PER_TOKEN:
                hidden = hidden * self.upload(self._scales)[:, pair.adapter : pair.adapter + 1]
            y = self._linear(hidden, pair.out, (y, factor))
        return y
