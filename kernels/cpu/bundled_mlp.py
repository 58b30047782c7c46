"""The MLP op over neuron bundles (sparse activation): gates first, then only the active neurons, fetched by the bundles' holder.

A holder (`Bundles.source`) has `few(active)` and `groups()`. `few` takes the indices of the active neurons, ascending, and yields batches
of them, ascending, whose bundles are in memory: the `ready` ones immediately, the `late` ones after its `wait()`; a batch is valid until
the next. `groups` yields all neurons as runs (first, count, address, bytes between two), valid until the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..layout import STORED_TYPES
from ..workspace import Dims, address
from . import bundles as kernels
from . import linear
from .inner_loops import TILE_COLUMNS, TILE_ROWS

if TYPE_CHECKING:
    from ...quant.weight import Bundles, Linear, Norm
    from .ops import CpuOps

FEW_TOKENS = 8  # as for whole matrices: more tokens use the tiled kernels


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the partial sums kept between batches and groups."""
    if not dims.bundled:
        return {}
    columns = -(-chunk // TILE_COLUMNS) * TILE_COLUMNS
    return {"lanes": max(FEW_TOKENS * kernels.MAX_LANES * dims.hidden_size, (dims.hidden_size + TILE_ROWS) * columns)}


def bundled_mlp(ops: CpuOps, x: np.ndarray, norm: Norm, gate: Linear, bundles: Bundles, act: str,
                observer: Callable[[np.ndarray], None] | None = None, post_norm: Norm | None = None, factor: float = 1.0) -> np.ndarray:
    """`CpuOps.gated_mlp` with `up` and `down` in bundles; `CpuOps.mlp` if they hold no `up`, and `gate` is its matrix. In place."""
    if (outs := ops._run_cached(x, norm, (gate,), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take("gate", len(x), gate.weight.shape[0])]
        ops._run_stage(x, norm, [gate], outs, linear.PLAIN, "none")
    adds_separately = post_norm is not None or factor != 1.0
    out = ops.workspace.take("y0", *x.shape) if adds_separately else x
    run = _few if len(x) <= FEW_TOKENS else _many
    run(ops, x, norm, outs[0], bundles, act, out, linear.PLAIN if adds_separately else linear.ADD)
    if observer is not None:
        observer(outs[0])
    if adds_separately:
        ops._add_with(ops, out, post_norm, x, factor)
    return x


def _few(ops: CpuOps, x: np.ndarray, norm: Norm, hidden: np.ndarray, bundles: Bundles, act: str, out: np.ndarray, mode: int) -> None:
    _activate(ops, hidden, bundles, act)
    ops.flush()
    active = np.flatnonzero(hidden[0] if len(hidden) == 1 else hidden.any(axis=0))
    block = _fill(ops, x, norm, hidden, bundles, act, out, mode)
    block[kernels.BEGINS] = 1
    for batch in bundles.source.few(active):
        if bundles.has_up:
            _neurons(ops, block, batch.ready, batch.addresses(batch.ready))
            ops.run(kernels.active_up, address(block), True, block)
            if len(batch.late):
                ops.flush()
        batch.wait()
        if bundles.has_up and len(batch.late):
            _neurons(ops, block, batch.late, batch.addresses(batch.late))
            ops.run(kernels.active_up, address(block), True, block)
        _neurons(ops, block, batch.neurons, batch.addresses(batch.neurons))
        block[kernels.ENDS] = batch.last
        ops.run(kernels.active_down, address(block), True, block)
        ops.flush()
        block[kernels.BEGINS] = 0


def _activate(ops: CpuOps, hidden: np.ndarray, bundles: Bundles, act: str) -> None:
    """Gates, with those below their thresholds set to zero."""
    ops.gate(hidden, None, act)
    if bundles.thresholds is not None:
        ops.flush()
        hidden[np.abs(hidden) < bundles.thresholds] = 0


def _many(ops: CpuOps, x: np.ndarray, norm: Norm, hidden: np.ndarray, bundles: Bundles, act: str, out: np.ndarray, mode: int) -> None:
    tokens, depth = x.shape
    columns = -(-tokens // TILE_COLUMNS) * TILE_COLUMNS
    if bundles.has_up:
        panels = ops.workspace.take("panels", columns, depth)
        ops.fill(ops.address_of(x), tokens, depth, norm, linear.PLAIN, act, (), ())
        ops.args[linear.FIRST + linear.OUT] = ops.address_of(panels)
        ops.run(linear.pack_columns, ops.args_address, True, ops.args)
    else:
        panels = None
    if panels is None or bundles.thresholds is not None:
        _activate(ops, hidden, bundles, act)
        act = "none"
    block = _fill(ops, x, None, hidden, bundles, act, out, mode)
    block[kernels.X] = 0 if panels is None else ops.address_of(panels)
    block[kernels.PANELS] = ops.address_of(ops.workspace.take("up", columns, hidden.shape[1]))
    block[kernels.BEGINS] = 1
    for first, count, group_address, pitch in bundles.source.groups():
        block[kernels.COUNT], block[kernels.ADDRESSES], block[kernels.NEURONS], block[kernels.PITCH] = count, group_address, first, pitch
        block[kernels.ENDS] = first + count == hidden.shape[1]
        for kernel in ((kernels.group_up,) if bundles.has_up else ()) + (kernels.pack_group, kernels.group_down):
            ops.run(kernel, address(block), True, block)
        ops.flush()
        block[kernels.BEGINS] = 0


def _fill(ops: CpuOps, x: np.ndarray, norm: Norm | None, hidden: np.ndarray, bundles: Bundles, act: str, out: np.ndarray,
          mode: int) -> np.ndarray:
    """The argument block of these kernels, except for the neurons."""
    tokens, depth = x.shape
    ops.fill(ops.address_of(x), tokens, depth, norm, mode, act, (), ())
    block = ops.args[: kernels.SLOTS].copy()
    block[kernels.DTYPE : kernels.FFN + 1] = STORED_TYPES[bundles.scheme], bundles.column_offset, bundles.width, hidden.shape[1]
    block[kernels.HIDDEN], block[kernels.LANES] = ops.address_of(hidden), address(ops.workspace.take("lanes", 1))
    block[kernels.OUT], block[kernels.OUT_STRIDE] = ops.address_of(out), out.strides[0] // 4
    block[kernels.UP_BIAS], block[kernels.DOWN_BIAS] = address(bundles.up_bias), address(bundles.down_bias)
    return block


def _neurons(ops: CpuOps, block: np.ndarray, neurons: np.ndarray, addresses: np.ndarray) -> None:
    """Set the neurons of a batch; the arrays are kept alive until the collected jobs have run."""
    block[kernels.COUNT], block[kernels.ADDRESSES], block[kernels.NEURONS] = len(neurons), address(addresses), address(neurons)
    ops.keep_alive(neurons)
    ops.keep_alive(addresses)
