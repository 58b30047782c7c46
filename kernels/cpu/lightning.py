"""States of a lightning attention layer on the CPU; runs the kernels in `lightning_loops.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import reference_lightning
from ..lightning_shape import LightningShape
from ..workspace import address
from . import lightning_loops as loops
from .conv_loops import MEMORY, X
from .recurrent import RecurrentStates
from .row_ops import MIN_PARALLEL_SIZE

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Lightning
    from .ops import CpuOps


class LightningStates(RecurrentStates):
    """See the module and `runtime/kv/states.py`. Products are what is activated [T, channels] and z [T, values]."""

    shape: LightningShape

    def __init__(self, ops: CpuOps, shape: LightningShape, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        super().__init__(ops, shape, memory, pass_slots, "lightning attention", loops, (shape.heads, shape.head_dim, shape.head_dim))
        self.reference, self.decay = run_reference, np.empty(0, np.float32)
        self.block[loops.HEADS : loops.SLOTS] = shape.heads, shape.head_dim

    def recur_reference(self, mixed: np.ndarray, gates: np.ndarray, out: np.ndarray) -> None:
        """States are recomputed with the decays of the last pass."""
        v, k, q = (part.reshape(len(mixed), self.shape.heads, -1) for part in np.split(mixed, 3, axis=1))
        self.recurred((v, k, q), lambda v, k, q, s: reference_lightning.recur(v, k, q, self.decay, s), out.reshape(v.shape))


def run(states: LightningStates, vkq: np.ndarray, z: np.ndarray, w: Lightning, out: np.ndarray) -> None:
    ops, block, shape, tokens = states.ops, states.block, states.shape, len(vkq)
    raw, mixed, _ = states.log_buffers(tokens)
    block[X:MEMORY] = ops.address_of(vkq), tokens, ops.address_of(mixed), 0 if raw is None else ops.address_of(raw), 0, 0
    block[loops.Z : loops.EPS] = ops.address_of(z), 0, ops.address_of(out), address(w.decay), address(w.norm.weight)
    block.view(np.float64)[loops.EPS] = w.norm.eps
    at = address(block)
    ops.run(loops.mix_inputs, at, tokens * shape.channels >= MIN_PARALLEL_SIZE, block)
    ops.run(loops.recur, at, tokens * shape.state_floats >= MIN_PARALLEL_SIZE, block)
    ops.run(loops.normed_gates, at, tokens * shape.values >= MIN_PARALLEL_SIZE, block)


def run_reference(states: LightningStates, vkq: np.ndarray, z: np.ndarray, w: Lightning, out: np.ndarray) -> None:
    states.ops.flush()
    raw, mixed, gates = states.log_buffers(len(vkq))
    if raw is not None:
        raw[:] = vkq
    mixed[:], states.decay = reference_lightning.activated(vkq), w.decay
    states.recur_reference(mixed, gates, out)
    out[:] = reference_lightning.normed_gates(out, z, w.norm.weight, w.norm.eps)
