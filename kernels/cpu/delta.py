"""States of a gated delta rule layer (linear attention) on the CPU; runs the kernels in `delta_loops.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .. import reference_delta as reference
from ..delta_shape import DeltaShape
from ..workspace import address
from . import delta_loops as loops
from . import kda_loops
from .conv_loops import BIAS, X
from .recurrent import RecurrentStates
from .row_ops import MIN_PARALLEL_SIZE

if TYPE_CHECKING:
    from ...quant.recurrent_weights import GatedDelta
    from .ops import CpuOps


class DeltaStates(RecurrentStates):
    """See the module and `runtime/kv/states.py`. Products are qkv [T, channels], z [T, values], b and a [T, value heads]."""

    shape: DeltaShape
    op, kernels = "delta", loops

    def __init__(self, ops: CpuOps, shape: DeltaShape, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        super().__init__(ops, shape, memory, pass_slots, self.op, self.kernels, (shape.value_heads, shape.value_dim, shape.key_dim))
        self.reference = self.meaning
        self.block[loops.KEY_HEADS : loops.TILED + 1] = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.tiled)
        self.block.view(np.float64)[loops.WRITES] = shape.beta_scale

    @property
    def meaning(self) -> Callable[..., None]:
        """The reference, used if no kernel accepts the call."""
        return run_reference

    def recur_reference(self, mixed: np.ndarray, gates: np.ndarray, out: np.ndarray) -> None:
        shape = self.shape
        q, k, v = (part.reshape(len(mixed), heads, -1) for part, heads in zip(np.split(mixed, (shape.keys, 2 * shape.keys), axis=1),
                                                                             (shape.key_heads, shape.key_heads, shape.value_heads)))
        parts = (q, k, v, *np.split(gates, (-shape.value_heads,), axis=1))
        self.recurred(parts, lambda *projections: reference.recur(*projections, shape.tiled), out.reshape(v.shape))


def run(states: DeltaStates, qkv: np.ndarray, z: np.ndarray, b: np.ndarray, a: np.ndarray, w: GatedDelta, out: np.ndarray) -> None:
    ops, block, shape, loops, tokens = states.ops, states.block, states.shape, states.kernels, len(qkv)
    raw, mixed, gates = states.log_buffers(tokens)
    block[X:BIAS] = ops.address_of(qkv), tokens, ops.address_of(mixed), 0 if raw is None else ops.address_of(raw), address(w.conv)
    block[loops.Z : loops.EPS] = (ops.address_of(z), ops.address_of(b), ops.address_of(a), ops.address_of(gates), ops.address_of(out),
                                  address(w.decay), address(w.dt_bias),
                                  address(w.norm.weight))
    block.view(np.float64)[loops.EPS] = w.norm.eps
    at = address(block)
    ops.run(loops.mix_inputs, at, tokens * shape.channels >= MIN_PARALLEL_SIZE, block)
    ops.run(loops.recur, at, tokens * shape.state_floats >= MIN_PARALLEL_SIZE, block)
    ops.run((kda_loops if shape.sigmoid_gate else loops).gated_norm, at, tokens * shape.values >= MIN_PARALLEL_SIZE, block)


def run_reference(states: DeltaStates, qkv: np.ndarray, z: np.ndarray, b: np.ndarray, a: np.ndarray, w: GatedDelta,
                  out: np.ndarray) -> None:
    states.ops.flush()
    read(states, qkv, reference.gates(a, b, w.decay, w.dt_bias, states.shape.beta_scale), w, out)
    heads = out.reshape(len(out), states.shape.value_heads, -1)
    norm = reference.sigmoid_norm if states.shape.sigmoid_gate else reference.gated_norm
    heads[:] = norm(heads, z.reshape(heads.shape), w.norm.weight, w.norm.eps)


def read(states: DeltaStates, qkv: np.ndarray, gates_in: tuple[np.ndarray, np.ndarray], w: GatedDelta, out: np.ndarray) -> None:
    """Head outputs before the norm, from convolution inputs, decays and betas."""
    raw, mixed, gates = states.log_buffers(len(qkv))
    if raw is not None:
        raw[:] = qkv
    mixed[:] = reference.convolve(qkv, states.last_inputs(states.pass_slots()[0], qkv[:0]), w.conv.reshape(states.shape.taps, -1))
    gates[:] = np.concatenate(gates_in, axis=1)
    states.keep_inputs(qkv)
    states.recur_reference(mixed, gates, out)
