"""Float products of many columns: activations are packed as panels, once for all matrices that read them, and multiplied by tiles.

Each kind is a `PanelProduct`, called like every other way to multiply a stage (`stages.py`). It applies no gate itself: a gate and its up
matrix are multiplied apart and joined afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..compile import Kernel
from . import linear
from .inner_loops import TILE_COLUMNS

if TYPE_CHECKING:
    from ...quant.weight import Linear, Norm
    from .ops import CpuOps


def fill_raw(ops: CpuOps, panels: int, tokens: int, depth: int, mode: int, linears: Sequence[Linear], outs: Sequence[np.ndarray]) -> None:
    """Fill in the argument block of a product with raw weights, from panels at an address."""
    ops.fill(panels, tokens, depth, None, mode, "none", linears, outs)


@dataclass(frozen=True)
class PanelProduct:
    """One kind of product; kernels take argument blocks in the order of `linear.py`, `multiply` one that `fill` writes."""

    floats: Callable[[int, int], int]  # of the panels, from tokens and inputs
    pack: Kernel  # norms and packs X into panels at matrix slot 0's OUT; products with the same one share panels
    multiply: Kernel  # modes PLAIN and ADD
    fill: Callable[..., None] = fill_raw
    fine: PanelProduct | None = None  # the product in mode FINE, for kinds that round activations

    def __call__(self, ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int,
                 act: str) -> None:
        """x: float32 [T, K]; outs: float32 [T, N] of each matrix, with GATED one for both."""
        if mode == linear.FINE and self.fine is not None:
            self.fine(ops, x, norm, linears, outs, mode, act)
            return
        if mode == linear.GATED:
            gate, up = outs[0], ops.workspace.take("up", *outs[0].shape)
            self(ops, x, norm, linears, [gate, up], linear.PLAIN, act)
            ops.gate(gate, up, act)
            return
        tokens, depth = x.shape
        panels = ops.address_of(ops.workspace.take("panels", self.floats(tokens, depth)))
        if ops.must_pack("panels", self.pack):
            ops.fill(ops.address_of(x), tokens, depth, norm, linear.PLAIN, "none", (), ())
            ops.args[linear.FIRST + linear.OUT] = panels
            ops.run(self.pack, ops.args_address, True, ops.args)
        self.fill(ops, panels, tokens, depth, mode, linears, outs)
        ops.run(self.multiply, ops.args_address, True, ops.args)


def panel_floats(tokens: int, depth: int) -> int:
    """Floats of panels in float32."""
    return -(-tokens // TILE_COLUMNS) * TILE_COLUMNS * depth


FLOAT32 = PanelProduct(panel_floats, linear.pack_columns, linear.many_columns)  # weights widened to float32, tile by tile
