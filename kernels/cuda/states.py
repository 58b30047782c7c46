"""Recurrent layer states on torch tensors, whatever their kind: slots of memory, and the class that runs each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..cca_shape import CcaShape
from ..compressed_shape import CompressedShape
from ..conv_shape import ConvShape
from ..delta_shape import DeltaShape
from ..kda_shape import KdaShape
from ..lightning_shape import LightningShape
from ..mamba1_shape import Mamba1Shape
from ..mamba2_shape import Mamba2Shape
from ..ngram_shape import WithNgrams
from ..ngram_states import StatesWithNgrams
from ..rwkv7_shape import Rwkv7Shape
from ..state_shape import NO_SLOT, StateShape

if TYPE_CHECKING:
    from ...quant.weight import Linear

    Linears = Callable[[torch.Tensor, Linear], torch.Tensor]


def state_layer(shape: StateShape | WithNgrams, memory: torch.Tensor, pass_slots: np.ndarray,
                linear: Linears) -> TorchSlots | StatesWithNgrams:
    """The states of one layer in uint8 `memory` on the device, in the layout of `shape`; `pass_slots` is on the host. `linear`: x @ W.T +
    b."""
    if isinstance(shape, WithNgrams):
        from .ngrams import TorchNgrams

        base = state_layer(shape.base, memory[: shape.base.nbytes], pass_slots, linear)
        return StatesWithNgrams(base, TorchNgrams(shape.ngrams, memory[shape.base.nbytes :], pass_slots, linear))
    from .cca import TorchCca
    from .compressed import TorchCompressed
    from .delta import TorchDelta
    from .kda import TorchKda
    from .lightning import TorchLightning
    from .mamba1 import TorchMamba1
    from .mamba2 import TorchMamba2
    from .rwkv7 import TorchRwkv7
    from .short_conv import TorchConv

    kinds = {CcaShape: TorchCca, CompressedShape: TorchCompressed, ConvShape: TorchConv, DeltaShape: TorchDelta, KdaShape: TorchKda,
             LightningShape: TorchLightning, Mamba1Shape: TorchMamba1, Mamba2Shape: TorchMamba2, Rwkv7Shape: TorchRwkv7}
    return kinds[type(shape)](shape, memory, pass_slots, linear)


class TorchSlots:
    """A layer's slots and its convolution inputs; `self.rollback_log`, behind the slots, is the rollback log of a pass of few tokens."""

    sizes: tuple[int, ...]  # shape of a state

    def __init__(self, shape: StateShape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        self.shape, self._pass_slots, self.linear = shape, pass_slots, linear
        memory = memory.view(torch.float32)
        end = shape.slots * shape.slot_floats
        self._slots, self.rollback_log = memory[:end].view(shape.slots, -1), memory[end:]

    def pass_slots(self) -> tuple[int, ...]:
        """The slots of the pass."""
        return tuple(int(slot) for slot in self._pass_slots)

    def read_slot(self, slot: int) -> np.ndarray:
        """A slot's bytes, uint8 on the host: the input of `write_slot` of another backend's layer of this shape."""
        return self._slots[slot].view(torch.uint8).cpu().numpy().copy()

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        self._slots[slot].view(torch.uint8).copy_(torch.from_numpy(np.array(data)))

    def inputs_of(self, slot: int) -> torch.Tensor:
        """The last inputs [taps - 1, channels] of a slot."""
        shape = self.shape
        return self._slots[slot][: (shape.taps - 1) * shape.channels].view(shape.taps - 1, shape.channels)

    def state_in(self, slot: int) -> torch.Tensor:
        """The rest of a slot, flat."""
        return self._slots[slot][self.shape.state_offset :][: self.shape.state_floats]

    def state_of(self, slot: int) -> torch.Tensor:
        """A state with the shape `sizes` of its kind."""
        return self.state_in(slot).view(self.sizes)

    def initial_state(self, source: int) -> torch.Tensor:
        """The state that a pass starts from."""
        return torch.zeros_like(self.state_of(0)) if source == NO_SLOT else self.state_of(source)

    def from_slot_to_slot(self, tokens: int, recur: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The outputs of a pass; states go into the slots set for it. `recur` maps some of its tokens and the state before them to outputs
        and the state after them."""
        source, target, after, kept = self.pass_slots()
        state, parts, at = self.initial_state(source), [], 0
        for end, slot in ((after, kept), (tokens, target)):
            if end > at:
                read, state = recur(slice(at, end), state)
                self.state_of(slot).copy_(state)
                parts.append(read)
                at = end
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def last_inputs(self, source: int, x: torch.Tensor) -> torch.Tensor:
        """[taps - 1, channels]: of the previous inputs and x [T, channels]."""
        before = torch.zeros_like(self.inputs_of(0)) if source == NO_SLOT else self.inputs_of(source)
        return torch.cat([before, x])[len(x) :]

    def convolve(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, channels], following the previous inputs, convolved per channel by `weight` [taps, channels]; the last inputs are stored.
        """
        taps, inputs = weight.view(self.shape.taps, -1), self.append_inputs(x)
        return sum(taps[tap] * inputs[tap : tap + len(x)] for tap in range(self.shape.taps))

    def append_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """[taps - 1 + T, channels]: the previous inputs followed by x [T, channels]; the last inputs are stored."""
        source, target, after, kept = self.pass_slots()
        inputs = torch.cat([self.last_inputs(source, x[:0]), x])
        if after:
            self.inputs_of(kept).copy_(inputs[after:][: self.shape.taps - 1])
        self.inputs_of(target).copy_(inputs[len(x) :])
        return inputs
