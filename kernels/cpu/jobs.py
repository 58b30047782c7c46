"""A stage of a decode step, prepared once: the same input, weights and outputs meet again for every token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..compile import Kernel
from ..workspace import address

if TYPE_CHECKING:
    from ...quant.weight import Linear, Norm


@dataclass(frozen=True)
class Job:
    """A prepared argument block and everything it points to, kept alive by it."""

    x: np.ndarray
    norm: Norm | None
    linears: tuple[Linear, ...]
    outs: list[np.ndarray]
    act: str
    block: np.ndarray
    parallel: bool
    kernel: Kernel

    @cached_property
    def where(self) -> int:
        return address(self.block)
