"""States of an RWKV 7 layer on the CPU; runs the kernels in `rwkv7_loops.py`.

A block requests the rows its projections read (`shifted`), the projections, and the layer's output (`mix`). Projections are stored in
buffers of rows that are no longer needed, so that a prompt takes seven buffers of the model's width instead of thirteen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import reference, reference_rwkv7
from ..layout import MAX_DECODE_TOKENS, NORMS
from ..registry import Call
from ..rwkv7_shape import PARTS, Rwkv7Shape
from ..state_shape import NO_SLOT
from ..workspace import address
from . import linear
from . import rwkv7_loops as loops
from .conv_loops import RAW, TOKENS, X
from .row_ops import MIN_PARALLEL_SIZE
from .states import Slots

if TYPE_CHECKING:
    from ...quant.recurrent_weights import Rwkv7
    from ...quant.weight import Linear, LowRank, Norm
    from .ops import CpuOps

ROWS = ("mixed", "y1", "y2", "y3", "y4", "y5")  # buffers of the interpolated rows of r, decays, k, v, rates and gates
# Buffers of products; the others replace their rows. SPARE is free after the values are computed.
R, K, V, SPARE = "y0", "mixed", "y2", "y3"


class Rwkv7States(Slots):
    """See the module and `runtime/kv/states.py`. Arguments of `mix` are r, k, v, raw decays, raw rates and gates, [T, values] each."""

    shape: Rwkv7Shape

    def __init__(self, ops: CpuOps, shape: Rwkv7Shape, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        super().__init__(ops, shape, memory, pass_slots, "time mix", loops.SLOTS)
        width, begin = shape.values, 2 * MAX_DECODE_TOKENS * shape.values
        self._rows = self.rollback_log[:begin].reshape(MAX_DECODE_TOKENS, 2, width)
        part_size = MAX_DECODE_TOKENS * width
        self._parts = [self.rollback_log[begin + part * part_size :][:part_size].reshape(MAX_DECODE_TOKENS, width) for part in range(PARTS)]
        self._log_views: dict[int, list[np.ndarray]] = {}  # views of the log, by number of tokens
        self.block[loops.HEADS : loops.SLOTS] = shape.heads, shape.head_dim
        self._shift, self._squash, self._blend = (ops.registry.select(Call(op)).candidate.run
                                                  for op in ("shift tokens", "squash", "blend values"))

    def mixed(self, tokens: int) -> np.ndarray:
        """Output buffer of `mix` for this many tokens."""
        return self.ops.workspace.take("attend", tokens, self.shape.values)

    def rows(self, tokens: int, count: int) -> list[np.ndarray]:
        """Buffers for the first `count` of the rows that `shifted` returns for this many tokens."""
        return [self.ops.workspace.take(name, tokens, self.shape.values) for name in ROWS[:count]]

    def shifted(self, x: np.ndarray, norm: Norm, mix: np.ndarray, half: int, outs: list[np.ndarray] | None = None) -> list[np.ndarray]:
        """Token-shifted rows of norm(x), [T, values] for each row of `mix`, flat; `half`: of the layer, whose last row is stored. `outs`:
        destination."""
        outs = self.rows(len(x), mix.size // x.shape[1]) if outs is None else outs
        self._shift(self, x, norm, mix, half, outs)
        return outs

    def products(self, rows: list[np.ndarray], linears: tuple[Linear, ...], w: Rwkv7, first: np.ndarray | None) -> list[np.ndarray]:
        """The arguments of `mix`, from the rows that `shifted` gave, values third; `first`: the first layer's values, None in that layer.
        """
        decay = self._low_rank(rows, 1, w.w_lora, True)
        r, k, v = (self._product(rows[row], matrix, name) for row, matrix, name in zip((0, 2, 3), linears, (R, K, V)))
        if first is not None:
            self._blend(self, v, first, self._low_rank(rows, 3, w.v_lora, None))
        return [r, k, v, decay, self._low_rank(rows, 4, w.a_lora, None), self._low_rank(rows, 5, w.g_lora, False)]

    def mix(self, products: list[np.ndarray], w: Rwkv7, out: np.ndarray | None = None) -> np.ndarray:
        """The layer's head outputs, [T, values], normed and gated, in `out` if given; advances the state. Raw keys, decays and rates may be
        overwritten."""
        out = self.mixed(len(products[0])) if out is None else out
        self.run(self, products, w, out)
        return out

    def _product(self, x: np.ndarray, matrix: Linear, name: str) -> np.ndarray:
        if (outs := self.ops._run_cached(x, None, (matrix,), linear.PLAIN, "none")) is None:
            outs = [self.ops.workspace.take(name, len(x), matrix.weight.shape[0])]
            self.ops._run_stage(x, None, [matrix], outs, linear.PLAIN, "none")
        return outs[0]

    def _low_rank(self, rows: list[np.ndarray], which: int, pair: LowRank, doubled: bool | None) -> np.ndarray:
        """Two matrices applied to some of the rows, in place, with sigmoid in between, tanh if `doubled`, nothing for None."""
        low = self._product(rows[which], pair.down, "low rank")
        if doubled is not None:
            self._squash(self, low, doubled)
        return self._product(low, pair.up, ROWS[which])

    def parts(self, products: list[np.ndarray]) -> list[np.ndarray]:
        """Buffers of the recurrence's inputs: in the rollback log if tokens are few, else in place of the projections."""
        r, k, v, decay, rate, _ = products
        tokens = len(r)
        if tokens > MAX_DECODE_TOKENS:
            return [r, k, v, decay, self.ops.workspace.take(SPARE, *r.shape), rate]
        if tokens not in self._log_views:
            self._log_views[tokens] = [part[:tokens] for part in self._parts]
        return self._log_views[tokens]

    def rebuild_from_log(self, source: int, target: int, tokens: int) -> None:
        """Implements `rebuild_slot`, which has set the slots."""
        self.inputs_of(target)[:] = self._rows[tokens - 1]
        out = self.mixed(tokens)
        parts = [part[:tokens] for part in self._parts]
        if self.run is run_reference:
            self.recurred(parts, reference_rwkv7.recur, out)
            return
        block = self.block
        block[TOKENS], block[loops.OUT] = tokens, self.ops.address_of(out)
        block[loops.RECEPTANCE : loops.PUT + 1] = [address(part) for part in parts]
        self.ops.run(loops.recur, address(block), True, block)

    def state_of(self, slot: int) -> np.ndarray:
        """S of a slot, [heads, head dim, head dim]."""
        return self.state_in(slot).reshape(self.shape.heads, self.shape.head_dim, -1)


def run(states: Rwkv7States, products: list[np.ndarray], w: Rwkv7, out: np.ndarray) -> None:
    ops, block, shape, (r, k, v, decay, rate, gate) = states.ops, states.block, states.shape, products
    tokens, parts = len(r), states.parts(products)
    is_decode = tokens <= MAX_DECODE_TOKENS
    block[TOKENS] = tokens
    block[loops.RAW_KEY : loops.RECEPTANCE] = ops.address_of(k), ops.address_of(decay), ops.address_of(rate)
    block[loops.RECEPTANCE : loops.PUT + 1] = [ops.address_of(array) for array in (r, parts[1], v, *parts[3:])]
    block[loops.GATE : loops.KEEP_R] = ops.address_of(gate), ops.address_of(out)
    block[loops.KEEP_R : loops.DIRECTION] = (address(parts[0]), address(parts[2])) if is_decode else (0, 0)
    block[loops.DIRECTION : loops.G_EPS] = [address(array) for array in (w.k_k, w.k_a, w.r_k, w.norm.weight, w.norm.bias)]
    block.view(np.float64)[loops.G_EPS] = w.norm.eps
    at, shared = address(block), tokens * shape.values >= MIN_PARALLEL_SIZE
    ops.run(loops.make_gates, at, shared, block)
    ops.run(loops.recur, at, tokens * shape.state_floats >= MIN_PARALLEL_SIZE, block)
    ops.run(loops.finish, at, shared, block)


def run_reference(states: Rwkv7States, products: list[np.ndarray], w: Rwkv7, out: np.ndarray) -> None:
    states.ops.flush()
    heads, (r, k, v, decay, rate, gate) = states.shape.heads, products
    gates = reference_rwkv7.gates(k, decay, rate, w.k_k, w.k_a, heads)
    parts = states.parts(products)
    for part, values in zip(parts, (r, gates[0], v, *gates[1:])):
        part[:] = values
    states.recurred(parts, reference_rwkv7.recur, out)
    out[:] = reference_rwkv7.finished(out, *parts[:3], gate, w.r_k, w.norm.weight, w.norm.bias, w.norm.eps, heads)


def shift(states: Rwkv7States, x: np.ndarray, norm: Norm, mix: np.ndarray, half: int, outs: list[np.ndarray]) -> None:
    ops, block = states.ops, np.zeros(loops.SHIFT_SLOTS, np.int64)
    block[: loops.OWN] = states.block[: loops.OWN]
    block[X], block[TOKENS] = ops.address_of(x), len(x)
    block[RAW] = address(states._rows) if len(x) <= MAX_DECODE_TOKENS else 0
    block[loops.HALF : loops.EPS] = half, NORMS[norm.kind], address(norm.weight), address(norm.bias)
    block[loops.MIX : loops.OUTS] = address(mix), len(outs), ops.scratch, ops.scratch_stride
    block[loops.OUTS : loops.OUTS + len(outs)] = [ops.address_of(out) for out in outs]
    block.view(np.float64)[loops.EPS] = norm.eps
    ops.run(loops.shift, address(block), len(outs) * x.size >= MIN_PARALLEL_SIZE, block)


def shift_reference(states: Rwkv7States, x: np.ndarray, norm: Norm, mix: np.ndarray, half: int, outs: list[np.ndarray]) -> None:
    states.ops.flush()
    source, target, after, kept = states.pass_slots()
    rows = reference.normalise(x, norm.kind, norm.weight, norm.bias, norm.eps).astype(np.float32)
    before = np.zeros(x.shape[1]) if source == NO_SLOT else states.inputs_of(source)[half].copy()
    for out, shifted in zip(outs, reference_rwkv7.shifted(rows, before, mix.reshape(len(outs), -1)), strict=True):
        out[:] = shifted
    if len(x) <= MAX_DECODE_TOKENS:
        states._rows[: len(x), half] = rows
    states.inputs_of(target)[half] = rows[-1]
    if after:
        states.inputs_of(kept)[half] = rows[after - 1]


def squash(states: Rwkv7States, y: np.ndarray, doubled: bool) -> None:
    ops = states.ops
    ops.args[: loops.Q_DOUBLED + 1] = ops.address_of(y), *y.shape, doubled
    ops.run(loops.squash, ops.args_address, y.size >= MIN_PARALLEL_SIZE, ops.args)


def squash_reference(states: Rwkv7States, y: np.ndarray, doubled: bool) -> None:
    states.ops.flush()
    y[:] = np.tanh(y.astype(np.float64)) if doubled else reference_rwkv7.sigmoid(y)


def blend(states: Rwkv7States, values: np.ndarray, first: np.ndarray, shares: np.ndarray) -> None:
    ops = states.ops
    ops.args[: loops.B_WIDTH + 1] = *map(ops.address_of, (values, first, shares)), *values.shape
    ops.run(loops.blend, ops.args_address, values.size >= MIN_PARALLEL_SIZE, ops.args)


def blend_reference(states: Rwkv7States, values: np.ndarray, first: np.ndarray, shares: np.ndarray) -> None:
    states.ops.flush()
    values[:] = reference_rwkv7.blended(values, first, shares)
