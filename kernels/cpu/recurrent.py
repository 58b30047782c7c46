"""Shared by recurrent layers with a state matrix per head on the CPU (`delta.py`, `mamba2.py` and others)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..layout import MAX_DECODE_TOKENS
from ..workspace import address
from .conv_loops import MIXED, TOKENS
from .states import Slots

if TYPE_CHECKING:
    from types import ModuleType

    from ..state_shape import StateShape
    from .ops import CpuOps


class RecurrentStates(Slots):
    """`loops`: the kernel module, with GATES, OUT, SLOTS and `recur`; `reference`: used if no kernel accepts the call; `op` as for `Slots`;
    `sizes`: of a state, as heads, rows and columns of a head's matrix. Behind the slots are the convolution inputs and outputs and the
    gates of the last pass of few tokens."""

    def __init__(self, ops: CpuOps, shape: StateShape, memory: np.ndarray, pass_slots: np.ndarray, op: str, loops: ModuleType,
                 sizes: tuple[int, ...]) -> None:
        super().__init__(ops, shape, memory, pass_slots, op, loops.SLOTS)
        self.loops, self.sizes = loops, sizes
        wide, recent = MAX_DECODE_TOKENS * shape.channels, self.rollback_log
        self._raw, self._mixed = (recent[at * wide :][:wide].reshape(MAX_DECODE_TOKENS, -1) for at in (0, 1))
        self._gates = recent[2 * wide :][: MAX_DECODE_TOKENS * shape.gates].reshape(MAX_DECODE_TOKENS, -1)
        self._recent: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def mixed(self, tokens: int) -> np.ndarray:
        """Output buffer of `mix` for this many tokens."""
        return self.ops.workspace.take("side stream" if self.ops.dims.parallel_hybrid else "attend", tokens, self.shape.values)

    def mix(self, products: list[np.ndarray], w: object, out: np.ndarray | None = None) -> np.ndarray:
        """The layer's head outputs, [T, values], gated and normed, in `out` if given; advances the state. Projections are as in the shape,
        with the convolution's input [T, channels] first."""
        out = self.mixed(len(products[0])) if out is None else out
        self.run(self, *products, w, out)
        return out

    def log_buffers(self, tokens: int) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
        """Buffers for inputs, convolution outputs and gates of this many tokens: in the rollback log if they are few."""
        if tokens > MAX_DECODE_TOKENS:
            take = self.ops.workspace.take
            return None, take("mixed", tokens, self.shape.channels), take("gates", tokens, self.shape.gates)
        if tokens not in self._recent:
            self._recent[tokens] = self._raw[:tokens], self._mixed[:tokens], self._gates[:tokens]
        return self._recent[tokens]

    def rebuild_from_log(self, source: int, target: int, tokens: int) -> None:
        """Implements `rebuild_slot`, which has set the slots."""
        self.inputs_of(target)[:] = self.last_inputs(source, self._raw[:tokens])
        out = self.ops.workspace.take("attend", tokens, self.shape.values)
        _, mixed, gates = self.log_buffers(tokens)
        if self.run is self.reference:
            self.recur_reference(mixed, gates, out)
            return
        block, loops = self.block, self.loops
        block[TOKENS], block[MIXED], block[loops.GATES], block[loops.OUT] = tokens, address(mixed), address(gates), self.ops.address_of(out)
        self.ops.run(loops.recur, address(block), True, block)

    def state_of(self, slot: int) -> np.ndarray:
        """S of a slot, with shape `sizes`."""
        return self.state_in(slot).reshape(self.sizes)
