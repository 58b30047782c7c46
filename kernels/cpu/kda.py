"""States of a Kimi Delta Attention layer on the CPU; runs the kernels in `kda_loops.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .. import reference_delta as reference
from ..kda_shape import KdaShape
from . import delta, kda_loops
from .delta import DeltaStates

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Kda


class KdaStates(DeltaStates):
    """Projections are qkv [T, channels], the low-rank inputs of gates z and decays a [T, head dim] each (or z [T, values] and a [T, keys]),
    and b [T, heads]."""

    shape: KdaShape
    op, kernels = "channel delta", kda_loops

    @property
    def meaning(self) -> Callable[..., None]:
        return run_reference

    def mix(self, products: list[np.ndarray], w: Kda, out: np.ndarray | None = None) -> np.ndarray:
        qkv, z, a, b = products
        out = self.mixed(len(qkv)) if out is None else out
        if self.shape.low_rank_gates:
            (z,), (a,) = self.widen(0, z, (w.gate_up,)), self.widen(1, a, (w.decay_up,))
        self.block.view(np.float64)[kda_loops.BOUND] = self.shape.decay_bound or 0.0
        self.run(self, qkv, z, b, a, w, out)
        return out


def run_reference(states: KdaStates, qkv: np.ndarray, z: np.ndarray, b: np.ndarray, a: np.ndarray, w: Kda, out: np.ndarray) -> None:
    states.ops.flush()
    delta.read(states, qkv, reference.channel_gates(a, b, w.decay, w.dt_bias, states.shape.decay_bound), w, out)
    heads = out.reshape(len(out), states.shape.value_heads, -1)
    heads[:] = reference.sigmoid_norm(heads, z.reshape(heads.shape), w.norm.weight, w.norm.eps)
