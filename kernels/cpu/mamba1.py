"""States of a Mamba layer on the CPU; runs the kernels in `mamba1_loops.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import reference, reference_delta, reference_mamba1
from ..mamba1_shape import Mamba1Shape
from ..workspace import address
from . import mamba1_loops as loops
from .conv_loops import MEMORY, X
from .recurrent import RecurrentStates
from .row_ops import MIN_PARALLEL_SIZE

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Mamba1
    from .ops import CpuOps


class Mamba1States(RecurrentStates):
    """See the module and `runtime/kv/states.py`. Projections are the convolution's input and z, [T, values] each; the projections to steps,
    B and C are computed here, after the convolution."""

    shape: Mamba1Shape

    def __init__(self, ops: CpuOps, shape: Mamba1Shape, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        super().__init__(ops, shape, memory, pass_slots, "channel state space", loops, (shape.values, shape.depth))
        self.reference, self.last = run_reference, None
        self.block[loops.DEPTH : loops.SLOTS] = (shape.depth,)

    def products_of(self, mixed: np.ndarray, w: Mamba1) -> tuple[np.ndarray, np.ndarray]:
        """(steps before their bias [T, values], B and C [T, 2 * depth]) from the convolution's output."""
        low, keys = self.widen(0, mixed, (w.dt_down, w.bc_proj))
        (raw,) = self.widen(2, low, (w.dt_up,), w.dt_norm)
        return raw, keys

    def recur_reference(self, mixed: np.ndarray, gates: np.ndarray, out: np.ndarray) -> None:
        """States are recomputed with the decays given to the last pass, which belong to the layer."""
        w, sizes = self.last, self.state_of(0).shape
        parts = (mixed, *np.split(gates, (self.shape.values, self.shape.values + self.shape.depth), axis=1))
        self.recurred(parts,
                      lambda *projections: reference_mamba1.recur(*projections[:-1], w.decay.reshape(sizes), w.skip, projections[-1]), out)

    def mix(self, products: list[np.ndarray], w: Mamba1, out: np.ndarray | None = None) -> np.ndarray:
        self.last = w  # `rebuild_slot` reads decays from the address in the block
        return super().mix(products, w, out)


def run(states: Mamba1States, x: np.ndarray, z: np.ndarray, w: Mamba1, out: np.ndarray) -> None:
    ops, block, shape, tokens = states.ops, states.block, states.shape, len(x)
    raw, mixed, gates = states.log_buffers(tokens)
    raw_address = 0 if raw is None else ops.address_of(raw)
    block[X:MEMORY] = ops.address_of(x), tokens, ops.address_of(mixed), raw_address, address(w.conv), address(w.conv_bias)
    at = address(block)
    ops.run(loops.mix_inputs, at, tokens * shape.values >= MIN_PARALLEL_SIZE, block)
    steps, keys = states.products_of(mixed, w)
    block[loops.Z : loops.EPS] = (ops.address_of(z), ops.address_of(steps), ops.address_of(keys), ops.address_of(gates),
                                  ops.address_of(out), address(w.decay), address(w.dt_bias),
                                  address(w.skip), *(0 if norm is None else address(norm.weight) for norm in (w.b_norm, w.c_norm)))
    block.view(np.float64)[loops.EPS] = 0.0 if w.b_norm is None else w.b_norm.eps
    ops.run(loops.make_gates, at, tokens * shape.values >= MIN_PARALLEL_SIZE, block)
    ops.run(loops.recur, at, tokens * shape.state_floats >= MIN_PARALLEL_SIZE, block)
    ops.run(loops.gate, at, tokens * shape.values >= MIN_PARALLEL_SIZE, block)


def run_reference(states: Mamba1States, x: np.ndarray, z: np.ndarray, w: Mamba1, out: np.ndarray) -> None:
    states.ops.flush()
    shape = states.shape
    raw, mixed, gates = states.log_buffers(len(x))
    if raw is not None:
        raw[:] = x
    mixed[:] = reference_delta.convolve(x, states.last_inputs(states.pass_slots()[0], x[:0]), w.conv.reshape(shape.taps, -1), w.conv_bias)
    states.keep_inputs(x)
    steps, keys = states.products_of(mixed, w)
    states.ops.flush()
    b, c = (side if norm is None else reference.normalise(side, "rms", norm.weight, None, norm.eps)
            for side, norm in zip(np.split(keys, 2, axis=1), (w.b_norm, w.c_norm)))
    gates[:] = np.concatenate([reference_mamba1.steps(steps, w.dt_bias), b, c], axis=1)
    states.recur_reference(mixed, gates, out)
    out[:] = reference_mamba1.gated(out, z)
