"""Recurrent layer states on the CPU, whatever their kind: slots of memory, and the class that runs each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..cca_shape import CcaShape
from ..compressed_shape import CompressedShape
from ..conv_shape import ConvShape
from ..delta_shape import DeltaShape
from ..kda_shape import KdaShape
from ..lightning_shape import LightningShape
from ..mamba1_shape import Mamba1Shape
from ..mamba2_shape import Mamba2Shape
from ..ngram_shape import WithNgrams
from ..registry import Call
from ..rwkv7_shape import Rwkv7Shape
from ..state_shape import AFTER, FROM, KEPT, NO_SLOT, TO, StateShape
from ..workspace import Dims, address
from . import conv_loops as loops
from . import linear

if TYPE_CHECKING:
    from ...quant.weight import Linear, Norm
    from .ops import CpuOps


class LayerStates(Protocol):
    """The states of one layer. `products`: the layer's projections of T tokens, [T, width] each."""

    def mixed(self, tokens: int) -> np.ndarray: ...
    def mix(self, products: list[np.ndarray], w: object, out: np.ndarray | None = None) -> np.ndarray: ...
    def rebuild_slot(self, source: int, target: int, tokens: int) -> None: ...
    def read_slot(self, slot: int) -> np.ndarray: ...
    def write_slot(self, slot: int, data: np.ndarray) -> None: ...


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the buffers of a layer's projections and of the inputs of the state update."""
    kv, shape = dims.num_key_value_heads * dims.head_dim, dims.recurrent
    products = () if shape is None else shape.projection_widths[1:]
    widths = [max(pair) for pair in zip((kv, kv, *products[2:]), (*products, 0, 0))]
    buffers = {f"y{i}": chunk * width for i, width in enumerate(widths, 1)}
    queries = {"queries": chunk * dims.num_attention_heads * dims.head_dim * dims.output_gate_in_q}
    if dims.output_gate and dims.mla is None:  # gates of the attention output
        buffers["y3"] = max(buffers.get("y3", 0), chunk * dims.num_attention_heads * dims.head_dim)
    if dims.parallel_hybrid:  # the output of attention until it is added
        buffers["side stream"] = chunk * shape.values
    if shape is None:
        return buffers | queries
    return {**buffers, **queries, "mixed": chunk * shape.channels, "gates": chunk * shape.gates,
            **{f"inner{i}": chunk * width for i, width in enumerate(shape.inner_projection_widths)}}


def state_layer(ops: CpuOps, shape: StateShape | WithNgrams, memory: np.ndarray, pass_slots: np.ndarray) -> LayerStates:
    """The states of one layer in uint8 memory (`shape.nbytes`); `pass_slots` holds the slots of the current pass."""
    from .cca import CcaStates
    from .compressed import CompressedStates
    from .delta import DeltaStates
    from .kda import KdaStates
    from .lightning import LightningStates
    from .mamba1 import Mamba1States
    from .mamba2 import Mamba2States
    from .ngrams import CpuStatesWithNgrams
    from .rwkv7 import Rwkv7States
    from .short_conv import ConvStates

    kinds = {CcaShape: CcaStates, CompressedShape: CompressedStates, ConvShape: ConvStates, DeltaShape: DeltaStates, KdaShape: KdaStates,
             LightningShape: LightningStates, Mamba1Shape: Mamba1States, Mamba2Shape: Mamba2States, Rwkv7Shape: Rwkv7States,
             WithNgrams: CpuStatesWithNgrams}
    return kinds[type(shape)](ops, shape, memory, pass_slots)


class Slots:
    """A layer's slots, the argument block of its kernels, and its convolution inputs. `op`: the op's name in the registry; `size`: length
    of the argument block. `self.rollback_log`, after the slots, is the rollback log of a pass of few tokens."""

    def __init__(self, ops: CpuOps, shape: StateShape, memory: np.ndarray, pass_slots: np.ndarray, op: str, size: int) -> None:
        self.ops, self.shape, self._pass_slots = ops, shape, pass_slots
        memory = memory.view(np.float32)
        end = shape.slots * shape.slot_floats
        self._slots, self.rollback_log = memory[:end].reshape(shape.slots, -1), memory[end:]
        self.run = ops.registry.select(Call(op)).candidate.run
        self.block = np.zeros(size, np.int64)
        self.block[loops.MEMORY : loops.OWN] = (address(self._slots), 4 * shape.slot_floats, 4 * shape.state_offset, address(pass_slots),
                                               shape.taps, shape.channels)

    def widen(self, first: int, x: np.ndarray, linears: tuple[Linear, ...], norm: Norm | None = None) -> list[np.ndarray]:
        """norm(x) @ W.T + b of each: the shape's `inner_projection_widths` from `first` on."""
        if (outs := self.ops._run_cached(x, norm, linears, linear.PLAIN, "none")) is None:
            outs = [self.ops.workspace.take(f"inner{i}", len(x), matrix.weight.shape[0]) for i, matrix in enumerate(linears, first)]
            self.ops._run_stage(x, norm, linears, outs, linear.PLAIN, "none")
        return outs

    def inputs_of(self, slot: int) -> np.ndarray:
        """The last inputs [taps - 1, channels] of a slot."""
        shape = self.shape
        return self._slots[slot][: (shape.taps - 1) * shape.channels].reshape(shape.taps - 1, shape.channels)

    def state_in(self, slot: int) -> np.ndarray:
        """The rest of a slot, flat."""
        return self._slots[slot][self.shape.state_offset :][: self.shape.state_floats]

    def last_inputs(self, source: int, x: np.ndarray) -> np.ndarray:
        """[taps - 1, channels], a copy: of the previous inputs and x [T, channels]."""
        before = np.zeros_like(self.inputs_of(0)) if source == NO_SLOT else self.inputs_of(source)
        return np.concatenate([before, x])[len(x) :]

    def keep_inputs(self, x: np.ndarray) -> None:
        """Store the last inputs in the slots of the pass."""
        source, target, after, kept = self.pass_slots()
        self.inputs_of(target)[:] = self.last_inputs(source, x)
        if after:
            self.inputs_of(kept)[:] = self.last_inputs(source, x[:after])

    def recurred(self, parts: Sequence[np.ndarray], recur: Callable[..., tuple[np.ndarray, np.ndarray]], out: np.ndarray) -> None:
        """Run a reference recurrence from slot to slot as set for the pass. `recur` maps `parts`, [T, ...] each, and a state to the output
        and the next state."""
        source, target, after, kept = self.pass_slots()
        s, at = np.zeros_like(self.state_of(0)) if source == NO_SLOT else self.state_of(source), 0
        for end, slot in ((after, kept), (len(out), target)):
            if end > at:
                out[at:end], s = recur(*(part[at:end] for part in parts), s)
                self.state_of(slot)[:], at = s, end

    def pass_slots(self) -> tuple[int, ...]:
        """The slots of the pass."""
        return tuple(int(slot) for slot in self._pass_slots)

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        """Rebuild slot `target` as the state after the first `tokens` of the last pass, which had few tokens and started from `source`."""
        pass_slots, before = self._pass_slots, tuple(self._pass_slots)
        pass_slots[FROM], pass_slots[TO], pass_slots[AFTER], pass_slots[KEPT] = source, target, 0, NO_SLOT
        try:
            self.rebuild_from_log(source, target, tokens)
        finally:
            pass_slots[:] = before

    def read_slot(self, slot: int) -> np.ndarray:
        """A slot's bytes, a copy: the input of `write_slot` of another backend's layer of this shape."""
        return self._slots[slot].view(np.uint8).copy()

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        self._slots[slot].view(np.uint8)[:] = data
