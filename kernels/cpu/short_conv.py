"""States of a layer with a gated short convolution on the CPU; runs the kernel in `short_conv_loops.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import reference_conv as reference
from ..conv_shape import ConvShape
from ..layout import MAX_DECODE_TOKENS
from ..workspace import address
from . import short_conv_loops as loops
from .conv_loops import BIAS, X
from .row_ops import MIN_PARALLEL_SIZE
from .states import Slots

if TYPE_CHECKING:
    from ...quant.recurrent_weights import ShortConv
    from .ops import CpuOps


class ConvStates(Slots):
    """See the module and `runtime/kv/states.py`."""

    shape: ConvShape

    def __init__(self, ops: CpuOps, shape: ConvShape, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        super().__init__(ops, shape, memory, pass_slots, "short convolution", loops.SLOTS)
        self._raw = self.rollback_log[: MAX_DECODE_TOKENS * shape.width].reshape(MAX_DECODE_TOKENS, -1)

    def mixed(self, tokens: int) -> np.ndarray:
        """Output buffer of `mix` for this many tokens."""
        return self.ops.workspace.take("attend", tokens, self.shape.width)

    def mix(self, products: list[np.ndarray], w: ShortConv, out: np.ndarray | None = None) -> np.ndarray:
        """The layer's output, [T, width], in `out` if given; advances the state. The projection is [T, 3 * width]."""
        out = self.mixed(len(products[0])) if out is None else out
        self.run(self, products[0], w, out)
        return out

    def log_buffers(self, tokens: int) -> np.ndarray | None:
        """Where the inputs of this many tokens are logged, if they are few."""
        return self._raw[:tokens] if tokens <= MAX_DECODE_TOKENS else None

    def rebuild_from_log(self, source: int, target: int, tokens: int) -> None:
        """Implements `rebuild_slot`, which has set the slots."""
        self.inputs_of(target)[:] = self.last_inputs(source, self._raw[:tokens])


def run(states: ConvStates, bcx: np.ndarray, w: ShortConv, out: np.ndarray) -> None:
    ops, block, tokens = states.ops, states.block, len(bcx)
    raw = address(states._raw) if tokens <= MAX_DECODE_TOKENS else 0
    block[X:BIAS] = ops.address_of(bcx), tokens, 0, raw, address(w.conv)
    block[loops.OUT] = ops.address_of(out)
    ops.run(loops.mix, address(block), out.size >= MIN_PARALLEL_SIZE, block)


def run_reference(states: ConvStates, bcx: np.ndarray, w: ShortConv, out: np.ndarray) -> None:
    states.ops.flush()
    b, c, x = np.split(bcx, 3, axis=1)
    gated, raw = b * x, states.log_buffers(len(bcx))
    out[:] = reference.mix(b, c, x, states.last_inputs(states.pass_slots()[0], gated[:0]), w.conv.reshape(states.shape.taps, -1))
    states.keep_inputs(gated)
    if raw is not None:
        raw[:] = gated
