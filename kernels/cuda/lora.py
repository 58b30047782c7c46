"""LoRA adapter scales of a pass on a device, as in `kernels/cpu/lora.py`.

A pass replayed as a graph reads the scales from a device array of its own, into which the host's are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ...quant.weight import Linear, Lora
    from .matmul import Into

NONE, AS_THEY_ARE, BY_TEXT = range(3)


class AdapterScales:
    """The part of it that `TorchOps` holds."""

    _way, _chosen = NONE, ()

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray] = {}  # by rows: a recorded pass knows an array by its identity

    def adapt(self, scales: np.ndarray | None) -> None:
        """As on the CPU: float32 [1, adapters] or a row per token; None if no adapter is used."""
        way = NONE if scales is None or not scales.any() else AS_THEY_ARE if (scales == 1).all() else BY_TEXT
        self._way, self._chosen = way, () if way == NONE else tuple(scales.any(0).tolist())
        self.repeats.key = way, self._chosen  # what a recorded pass does
        if way == BY_TEXT:
            self._scales = self._held.setdefault(len(scales), np.zeros(scales.shape, np.float32))
            self._scales[:] = scales

    @property
    def is_adapted(self) -> bool:
        """As on the CPU."""
        return self._way != NONE

    def lengthened(self, x: torch.Tensor, each: Linear, y: torch.Tensor, into: Into) -> torch.Tensor:
        """`beside` applied to a product y of its own [T, N] whose rows adapters rescale (DoRA); added to `into`."""
        total = self.upload(self._scales) @ each.lora.gains if self._way == BY_TEXT else each.lora.gains.sum(0)
        y = y + total * (y if each.bias is None else y - each.bias)
        y = self.beside(x, each.lora, y, 1.0)
        held, factor = into
        return y if held is None else held.add_(y, alpha=factor)

    def beside(self, x: torch.Tensor, own: Lora, y: torch.Tensor, factor: float) -> torch.Tensor:
        """y + factor * out(s * into(x)) for each adapter used by a text of the pass, in place."""
        for each in own.pairs if self._way != NONE else ():
            if not self._chosen[each.adapter]:
                continue
            between = self._linear(x, each.into)
            if self._way == BY_TEXT:
                between = between * self.upload(self._scales)[:, each.adapter : each.adapter + 1]
            y = self._linear(between, each.out, (y, factor))
        return y
