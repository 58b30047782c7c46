"""The states of a layer of linear attention on the CPU, and running its kernels (`delta_loops.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import reference_delta as reference
from ..delta_shape import AFTER, FROM, KEPT, NO_SLOT, TO, DeltaShape
from ..layout import REPEATED
from ..registry import Call
from ..workspace import Dims, address
from . import delta_loops as loops
from .rows import SHARE_FROM

if TYPE_CHECKING:
    from ...quant.weight import Delta
    from .ops import CpuOps


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the buffers for what follows q, and what a layer's first product or its convolution makes."""
    kv, shape = dims.kv_heads * dims.head_dim, dims.delta
    if shape is None:
        return {"y1": chunk * kv, "y2": chunk * kv, "queries": chunk * dims.heads * dims.head_dim * dims.gated_queries}
    return {"y1": chunk * max(kv, shape.values), "y2": chunk * max(kv, shape.value_heads), "y3": chunk * shape.value_heads,
            "queries": chunk * dims.heads * dims.head_dim * dims.gated_queries, "mixed": chunk * shape.channels,
            "gates": 2 * chunk * shape.value_heads}


def state_layer(ops: CpuOps, shape: DeltaShape, slots: int, memory: np.ndarray, told: np.ndarray) -> LayerStates:
    """The states of one layer in uint8 memory (`shape.nbytes(slots)`), in `slots` slots of which `told` says those of a pass."""
    return LayerStates(ops, shape, slots, memory, told)


class LayerStates:
    """See the module and `runtime/states.py`."""

    def __init__(self, ops: CpuOps, shape: DeltaShape, slots: int, memory: np.ndarray, told: np.ndarray) -> None:
        self.ops, self.shape, self._told = ops, shape, told
        memory = memory.view(np.float32)
        self._slots, recent = memory[: slots * shape.slot_floats].reshape(slots, -1), memory[slots * shape.slot_floats :]
        wide, heads = REPEATED * shape.channels, shape.value_heads
        self._raw, self._mixed = (recent[at * wide :][:wide].reshape(REPEATED, -1) for at in (0, 1))
        self._gates = recent[2 * wide :][: 2 * REPEATED * heads].reshape(REPEATED, 2, heads)
        self._run = ops.registry.select(Call("delta")).candidate.run
        self.block = np.zeros(loops.SLOTS, np.int64)
        self.block[loops.MEMORY : loops.TILED + 1] = (address(self._slots), 4 * shape.slot_floats, 4 * shape.state_offset, address(told),
                                                     shape.key_heads, heads, shape.key_dim, shape.value_dim, shape.taps, shape.tiled)
        self._recent: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def mix(self, qkv: np.ndarray, z: np.ndarray, b: np.ndarray, a: np.ndarray, w: Delta) -> np.ndarray:
        """What the layer's heads read of the text, [T, values], gated by z [T, values] and normed; the state goes on. qkv [T, channels],
        b and a [T, value heads]."""
        out = self.ops.workspace.take("attend", len(qkv), self.shape.values)
        self._run(self, qkv, z, b, a, w, out)
        return out

    def passing(self, tokens: int) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
        """Where inputs, results of the convolution, and gates of so many tokens go: where they stay if they are few."""
        if tokens > REPEATED:
            take = self.ops.workspace.take
            return None, take("mixed", tokens, self.shape.channels), take("gates", tokens, 2, self.shape.value_heads)
        if tokens not in self._recent:
            self._recent[tokens] = self._raw[:tokens], self._mixed[:tokens], self._gates[:tokens]
        return self._recent[tokens]

    def again(self, source: int, target: int, tokens: int) -> None:
        """Slot `target` becomes the state behind the first `tokens` of the last pass, which was of few and began with `source`."""
        ops, told = self.ops, self._told
        before = tuple(told)
        told[FROM], told[TO], told[AFTER], told[KEPT] = source, target, 0, NO_SLOT
        try:
            self.inputs_of(target)[:] = self.last_inputs(source, self._raw[:tokens])
            self._run_again(tokens, ops.workspace.take("attend", tokens, self.shape.values))
        finally:
            told[:] = before

    def _run_again(self, tokens: int, out: np.ndarray) -> None:
        _, mixed, gates = self.passing(tokens)
        if self._run is run_reference:
            recur_reference(self, mixed, gates, out)
            return
        self.block[loops.TOKENS], self.block[loops.MIXED : loops.OUT + 1] = tokens, (address(mixed), address(gates), self.ops.at(out))
        self.ops.run(loops.recur, address(self.block), True, self.block)

    # -- slots -----------------------------------------------------------------------------------------------------------------

    def inputs_of(self, slot: int) -> np.ndarray:
        """The last inputs [taps - 1, channels] of a slot."""
        shape = self.shape
        return self._slots[slot][: (shape.taps - 1) * shape.channels].reshape(shape.taps - 1, shape.channels)

    def state_of(self, slot: int) -> np.ndarray:
        """S [value heads, value dim, key dim] of a slot."""
        shape = self.shape
        return self._slots[slot][shape.state_offset :][: shape.state_floats].reshape(shape.value_heads, shape.value_dim, shape.key_dim)

    def last_inputs(self, source: int, x: np.ndarray) -> np.ndarray:
        """[taps - 1, channels], a copy: of what came before and x [T, channels]."""
        before = np.zeros_like(self.inputs_of(0)) if source == NO_SLOT else self.inputs_of(source)
        return np.concatenate([before, x])[len(x) :]

    def told(self) -> tuple[int, ...]:
        """The slots of the pass."""
        return tuple(int(each) for each in self._told)

    def read_slot(self, slot: int) -> np.ndarray:
        """Its bytes, a copy: what `write_slot` of another backend's layer of this shape takes."""
        return self._slots[slot].view(np.uint8).copy()

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        self._slots[slot].view(np.uint8)[:] = data


def run(states: LayerStates, qkv: np.ndarray, z: np.ndarray, b: np.ndarray, a: np.ndarray, w: Delta, out: np.ndarray) -> None:
    ops, block, shape, tokens = states.ops, states.block, states.shape, len(qkv)
    raw, mixed, gates = states.passing(tokens)
    block[: loops.EPS] = (ops.at(qkv), tokens, ops.at(z), ops.at(b), ops.at(a), ops.at(mixed), ops.at(gates), ops.at(out),
                          0 if raw is None else ops.at(raw), address(w.conv), address(w.decay), address(w.dt), address(w.norm.weight))
    block.view(np.float64)[loops.EPS] = w.norm.eps
    at = address(block)
    ops.run(loops.mix_inputs, at, tokens * shape.channels >= SHARE_FROM, block)
    ops.run(loops.recur, at, tokens * shape.state_floats >= SHARE_FROM, block)
    ops.run(loops.gated_norm, at, tokens * shape.values >= SHARE_FROM, block)


def run_reference(states: LayerStates, qkv: np.ndarray, z: np.ndarray, b: np.ndarray, a: np.ndarray, w: Delta, out: np.ndarray) -> None:
    states.ops.flush()
    shape, tokens = states.shape, len(qkv)
    source, target, after, kept = states.told()
    raw, mixed, gates = states.passing(tokens)
    if raw is not None:
        raw[:] = qkv
    mixed[:] = reference.convolve(qkv, states.last_inputs(source, qkv[:0]), w.conv.reshape(shape.taps, -1))
    gates[:, 0], gates[:, 1] = reference.gates(a, b, w.decay, w.dt)
    states.inputs_of(target)[:] = states.last_inputs(source, qkv)
    if after:
        states.inputs_of(kept)[:] = states.last_inputs(source, qkv[:after])
    recur_reference(states, mixed, gates, out)
    heads = out.reshape(tokens, shape.value_heads, -1)
    heads[:] = reference.gated_norm(heads, z.reshape(heads.shape), w.norm.weight, w.norm.eps)


def recur_reference(states: LayerStates, mixed: np.ndarray, gates: np.ndarray, out: np.ndarray) -> None:
    """The recurrence, from slot to slot as the pass was told."""
    shape, (source, target, after, kept) = states.shape, states.told()
    q, k, v = (part.reshape(len(mixed), heads, -1) for part, heads in zip(np.split(mixed, (shape.keys, 2 * shape.keys), axis=1),
                                                                         (shape.key_heads, shape.key_heads, shape.value_heads)))
    s, at = np.zeros_like(states.state_of(0)) if source == NO_SLOT else states.state_of(source), 0
    heads = out.reshape(len(out), shape.value_heads, -1)
    for end, slot in ((after, kept), (len(out), target)):
        if end > at:
            heads[at:end], s = reference.recur(q[at:end], k[at:end], v[at:end], gates[at:end, 0], gates[at:end, 1], s, shape.tiled)
            states.state_of(slot)[:], at = s, end
