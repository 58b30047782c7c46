"""Shared by recurrent layers with a state matrix per head on torch tensors (`delta.py`, `mamba2.py` and others)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..layout import MAX_DECODE_TOKENS
from .states import TorchSlots

if TYPE_CHECKING:
    import numpy as np

    from ..state_shape import StateShape
    from .states import Linears


class TorchRecurrent(TorchSlots):
    """`sizes`: of a state, as heads, rows and columns of a head's matrix. A kind's `_recur`: convolution outputs [T, channels], gates [T,
    gates] and the previous state -> (outputs [T, ...], state after them)."""

    def __init__(self, shape: StateShape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears,
                 sizes: tuple[int, ...]) -> None:
        super().__init__(shape, memory, pass_slots, linear)
        self.sizes, wide, recent = sizes, MAX_DECODE_TOKENS * shape.channels, self.rollback_log
        self._raw, self._mixed = (recent[at * wide :][:wide].view(MAX_DECODE_TOKENS, -1) for at in (0, 1))
        self._gates = recent[2 * wide :][: MAX_DECODE_TOKENS * shape.gates].view(MAX_DECODE_TOKENS, -1)

    def recurred(self, inputs: torch.Tensor, mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """The head outputs of a pass, from `_recur`; states go into the slots set for the pass, and few tokens are logged for rollback.
        `inputs`: the convolution's input."""
        if (tokens := len(mixed)) <= MAX_DECODE_TOKENS:
            self._raw[:tokens], self._mixed[:tokens], self._gates[:tokens] = inputs, mixed, gates
        return self.from_slot_to_slot(tokens, lambda own, state: self._recur(mixed[own], gates[own], state))

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        """As `kernels/cpu/states.py`."""
        self.inputs_of(target).copy_(self.last_inputs(source, self._raw[:tokens]))
        self.state_of(target).copy_(self._recur(self._mixed[:tokens], self._gates[:tokens], self.initial_state(source))[1])
