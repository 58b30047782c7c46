"""Layer states of compressed convolutional attention on the CPU; runs the kernel in `cca_loops.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import reference_cca as reference
from ..cca_shape import CcaShape
from ..layout import MAX_DECODE_TOKENS
from ..workspace import Dims, address
from . import cca_loops as loops
from .conv_loops import MEMORY, X
from .states import Slots

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Cca
    from .ops import CpuOps


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the buffers, none without such layers."""
    shape = dims.recurrent
    if not isinstance(shape, CcaShape):
        return {}
    return {"conv q": chunk * shape.values, **dict.fromkeys(("conv k", "conv v"), chunk * 2 * shape.half_value_channels)}


def scratch_floats(dims: Dims) -> int:
    """Per worker."""
    return dims.recurrent.second * dims.recurrent.depth if isinstance(dims.recurrent, CcaShape) else 0


class CcaStates(Slots):
    """See the module and `runtime/kv/states.py`."""

    shape: CcaShape

    def __init__(self, ops: CpuOps, shape: CcaShape, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        super().__init__(ops, shape, memory, pass_slots, "convolve heads", loops.SLOTS)
        self._raw = self.rollback_log[: MAX_DECODE_TOKENS * shape.channels].reshape(MAX_DECODE_TOKENS, -1)

    def places(self, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Destination of queries, keys and values of this many tokens."""
        take, kv_width = self.ops.workspace.take, 2 * self.shape.half_value_channels
        return take("conv q", tokens, self.shape.values), take("conv k", tokens, kv_width), take("conv v", tokens, kv_width)

    def convolved(self, product: np.ndarray, w: Cca, outs: tuple[np.ndarray, ...] | None = None) -> tuple[np.ndarray, ...]:
        """Queries [T, heads * depth], keys and values [T, kv_heads * depth] from a projection [T, channels + half], in `outs` if given;
        advances the state."""
        outs = self.places(len(product)) if outs is None else outs
        self.run(self, product, w, outs)
        return outs

    def log_buffers(self, tokens: int) -> np.ndarray | None:
        """Where the inputs of this many tokens are logged, if they are few."""
        return self._raw[:tokens] if tokens <= MAX_DECODE_TOKENS else None

    def rebuild_from_log(self, source: int, target: int, tokens: int) -> None:
        """Implements `rebuild_slot`, which has set the slots."""
        self.inputs_of(target)[:] = self.last_inputs(source, self._raw[:tokens])


def run(states: CcaStates, product: np.ndarray, w: Cca, outs: tuple[np.ndarray, ...]) -> None:
    ops, block, shape, tokens = states.ops, states.block, states.shape, len(product)
    raw = address(states._raw) if tokens <= MAX_DECODE_TOKENS else 0
    block[X:MEMORY] = ops.address_of(product), tokens, 0, raw, address(w.conv), address(w.conv_bias)
    block[loops.HEADS :] = (shape.heads, shape.kv_heads, shape.depth, shape.first, shape.second, product.shape[1], address(w.head_conv),
                            address(w.head_conv_bias), address(w.key_temperatures), *map(ops.address_of, outs), ops.scratch,
                            ops.scratch_stride)
    ops.run(loops.convolve_heads, address(block), True, block)


def run_reference(states: CcaStates, product: np.ndarray, w: Cca, outs: tuple[np.ndarray, ...]) -> None:
    states.ops.flush()
    shape, raw = states.shape, states.log_buffers(len(product))
    inputs = product[:, : shape.channels]
    results = reference.mix(product, states.last_inputs(states.pass_slots()[0], inputs[:0]), w.conv.reshape(shape.first, -1), w.conv_bias,
                            w.head_conv.reshape(shape.qk_channels, shape.second, shape.depth), w.head_conv_bias, w.key_temperatures, shape)
    for out, result in zip(outs, results, strict=True):
        out[:] = result
    states.keep_inputs(inputs)
    if raw is not None:
        raw[:] = inputs
