"""States of a Mamba 2 layer on the CPU; runs the kernels in `mamba2_loops.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import reference_delta, reference_mamba2
from ..mamba2_shape import Mamba2Shape
from ..workspace import address
from . import mamba2_loops as loops
from .conv_loops import MEMORY, X
from .recurrent import RecurrentStates
from .row_ops import MIN_PARALLEL_SIZE

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Mamba2
    from .ops import CpuOps


class Mamba2States(RecurrentStates):
    """See the module and `runtime/kv/states.py`. Projections are the convolution's input [T, channels], z [T, values] and steps [T, heads].
    """

    shape: Mamba2Shape

    def __init__(self, ops: CpuOps, shape: Mamba2Shape, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        super().__init__(ops, shape, memory, pass_slots, "state space", loops, (shape.heads, shape.head_dim, shape.depth))
        self.reference = run_reference
        self.block[loops.HEADS : loops.SLOTS] = shape.heads, shape.head_dim, shape.groups, shape.depth

    def recur_reference(self, mixed: np.ndarray, gates: np.ndarray, out: np.ndarray) -> None:
        """Recomputes the state only: the head outputs are unused, so the skip term is left out."""
        recur_reference(self, mixed, gates, np.zeros(self.shape.heads), out)


def run(states: Mamba2States, xbc: np.ndarray, z: np.ndarray, steps: np.ndarray, w: Mamba2, out: np.ndarray) -> None:
    ops, block, shape, tokens = states.ops, states.block, states.shape, len(xbc)
    raw, mixed, gates = states.log_buffers(tokens)
    raw_address = 0 if raw is None else ops.address_of(raw)
    block[X:MEMORY] = ops.address_of(xbc), tokens, ops.address_of(mixed), raw_address, address(w.conv), address(w.conv_bias)
    block[loops.Z : loops.EPS] = (ops.address_of(z), ops.address_of(steps), ops.address_of(gates), ops.address_of(out), address(w.decay),
                                  address(w.dt_bias), address(w.skip),
                                  0 if w.norm is None else address(w.norm.weight))
    block.view(np.float64)[loops.EPS : loops.HEADS] = 0.0 if w.norm is None else w.norm.eps, w.gate_multiplier, w.dt_multiplier
    at = address(block)
    ops.run(loops.mix_inputs, at, tokens * shape.channels >= MIN_PARALLEL_SIZE, block)
    ops.run(loops.recur, at, tokens * shape.state_floats >= MIN_PARALLEL_SIZE, block)
    ops.run(loops.gated_norm, at, tokens * shape.values >= MIN_PARALLEL_SIZE, block)


def run_reference(states: Mamba2States, xbc: np.ndarray, z: np.ndarray, steps: np.ndarray, w: Mamba2, out: np.ndarray) -> None:
    states.ops.flush()
    shape, tokens = states.shape, len(xbc)
    raw, mixed, gates = states.log_buffers(tokens)
    if raw is not None:
        raw[:] = xbc
    before = states.last_inputs(states.pass_slots()[0], xbc[:0])
    mixed[:] = reference_delta.convolve(xbc, before, w.conv.reshape(shape.taps, -1), w.conv_bias)
    gates[:] = np.concatenate(reference_mamba2.steps(steps * np.float64(w.dt_multiplier), w.decay, w.dt_bias), axis=1)
    states.keep_inputs(xbc)
    recur_reference(states, mixed, gates, w.skip, out)
    norm = (None, 0.0) if w.norm is None else (w.norm.weight, w.norm.eps)
    out[:] = reference_mamba2.gated_norm(out, z * np.float64(w.gate_multiplier), norm[0], shape.groups, norm[1])


def recur_reference(states: Mamba2States, mixed: np.ndarray, gates: np.ndarray, skip: np.ndarray, out: np.ndarray) -> None:
    shape = states.shape
    ends = shape.values, shape.values + shape.groups * shape.depth
    x, b, c = (part.reshape(len(mixed), count, -1) for part, count in zip(np.split(mixed, ends, axis=1),
                                                                         (shape.heads, shape.groups, shape.groups)))
    states.recurred((x, b, c, *np.split(gates, 2, axis=1)), lambda *own: reference_mamba2.recur(*own[:-1], skip, own[-1]),
                    out.reshape(len(out), shape.heads, -1))
