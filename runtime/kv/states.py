"""Recurrent states of linear attention and the like: of fixed size, whatever the context, and without a way to undo a token.

Keys and values can be truncated token by token, but a state has absorbed every token before it. So states are stored in slots, each holding
the state after some number of tokens, with the same slot in every layer. A pass reads one slot and writes another, and the slot it read
survives until the next pass begins: an aborted pass, or a rejected draft, is undone by reading it again. After short passes, such as
drafts, the state after any of their tokens is rebuilt from what the pass left (`LayerStates.rebuild_slot`), without matrix products.

Further slots are checkpoints, as many as the kind of state allows (`StateShape.rollback_slots`); the oldest are evicted. A prompt leaves
two: at its start, and shortly before its end, since the next prompt often shares all but the tokens that open the answer. A draft model,
whose tokens are mostly rolled back, leaves one at the very end instead. Anything in between is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...kernels.layout import MAX_DECODE_TOKENS
from ...kernels.ngram_shape import WithNgrams
from ...kernels.state_shape import AFTER, CONTROLS, FROM, KEPT, NO_SLOT, TO

if TYPE_CHECKING:
    from ...kernels.state_shape import StateShape
    from ..config import ModelConfig

TAIL = 32  # tokens before the end of a prompt, more than any kernel treats as decode


class LayerStates(Protocol):
    """A backend's states of one layer (`kernels/cpu/states.py`, `kernels/cuda/states.py`)."""

    def mix(self, products: Sequence[object], w: object) -> object: ...
    def rebuild_slot(self, source: int, target: int, tokens: int) -> None: ...
    def read_slot(self, slot: int) -> np.ndarray: ...
    def write_slot(self, slot: int, data: np.ndarray) -> None: ...


class ShiftedStates(LayerStates, Protocol):
    """States of a layer with token shift (RWKV 7): inputs of its matrices, and their products."""

    def shifted(self, x: object, norm: object, mix: object, half: int) -> list[object]: ...
    def products(self, rows: Sequence[object], linears: Sequence[object], w: object, first: object | None) -> list[object]: ...


def states_nbytes(config: ModelConfig) -> tuple[int, ...]:
    """Bytes of the state of every layer, 0 for attention layers."""
    return tuple(shape_of(config, layer).nbytes if layer in config.recurrent_layers else 0 for layer in range(config.num_hidden_layers))


def shape_of(config: ModelConfig, layer: int) -> StateShape | WithNgrams | None:
    """The state shape of a layer."""
    shape = config.compressed_attention.shapes[layer] if config.compressed_attention else config.recurrent
    ngrams = None if config.ngrams is None else config.ngrams.shape_of(layer)
    return shape if ngrams is None else WithNgrams(shape, ngrams)


def controls() -> np.ndarray:
    """The control words of a pass, int64. Kernels of recorded passes read them in place.

    They are the slot to read (NO_SLOT: none yet), the slot to write, the number of tokens after which the state is also copied to a third
    slot (0: never), and that slot.
    """
    return np.array([NO_SLOT, 0, 0, NO_SLOT], np.int64)[:CONTROLS]


class States:
    """The recurrent states of all layers that have one, and their checkpoints.

    shapes: of each layer's state; all have the same number of slots
    pass_slots: the array of `controls`, which kernels read
    """

    def __init__(self, layers: Sequence[LayerStates], shapes: Sequence[StateShape | WithNgrams], pass_slots: np.ndarray) -> None:
        self.layers, self._pass_slots = layers, pass_slots
        first = next((shape.base if isinstance(shape, WithNgrams) else shape) for shape in shapes)
        self._slots, self._rollback_slots = first.slots, first.rollback_slots
        self.is_draft = False  # of a draft model, whose tokens are mostly rolled back
        self.nbytes, self.slot_nbytes = sum(shape.nbytes for shape in shapes), tuple(4 * shape.slot_floats for shape in shapes)
        self.clear()

    def clear(self) -> None:
        """Reset to the start of a sequence."""
        # The last pass: the slots that it read and wrote, its first position, and its length.
        self._read_slot, self._write_slot, self._start, self._tokens = NO_SLOT, NO_SLOT, 0, 0
        self._checkpoints: dict[int, int] = {}  # slot -> position, oldest first
        self._pending_checkpoint = NO_SLOT, 0  # a third slot that the last pass writes, and its position
        self._tail_slot = NO_SLOT  # the checkpoint before the end of the current prompt
        self._in_prompt = False

    @property
    def saved_nbytes(self) -> int:
        """Bytes that `read` returns."""
        return sum(self.slot_nbytes)

    def begin(self, n: int, tokens: int, prompt: bool, keep: int = 0) -> None:
        """Begin a pass of `tokens` after `n`.

        prompt: whether the pass is part of a prompt
        keep: position of the checkpoint to leave before the end of the prompt
        """
        self._settle(n)
        if prompt and not self._in_prompt and self._read_slot != NO_SLOT and self._read_slot not in self._checkpoints:
            self._make_room()
            self._checkpoints[self._read_slot] = n
        elif self.is_draft and not prompt and self._in_prompt and self._read_slot not in (NO_SLOT, *self._checkpoints):
            self._replace_tail(lambda: self._read_slot)
            self._checkpoints[self._read_slot] = n
        self._tail_slot, self._in_prompt = self._tail_slot if self._in_prompt else NO_SLOT, prompt
        pass_slots = self._pass_slots
        self._tokens, self._write_slot = tokens, self._free_slot()
        pass_slots[FROM], pass_slots[TO], pass_slots[AFTER], pass_slots[KEPT] = self._read_slot, self._write_slot, 0, NO_SLOT
        if self.is_draft:
            return
        if prompt and n < keep < n + tokens:
            self._replace_tail(self._free_slot)
            self._pending_checkpoint = self._tail_slot, keep
            pass_slots[AFTER], pass_slots[KEPT] = keep - n, self._tail_slot
        elif prompt and n == keep and self._read_slot not in (NO_SLOT, *self._checkpoints):
            self._replace_tail(lambda: self._read_slot)
            self._checkpoints[self._read_slot] = n

    def end_prompt(self) -> None:
        """Further tokens belong to another prompt."""
        self._in_prompt = False

    def _settle(self, n: int) -> None:
        """Make the next pass read the state after `n` tokens, which the last pass left or from which it can be rebuilt."""
        ran, (slot, checkpoint_position) = n - self._start, self._pending_checkpoint
        if ran:
            if not 0 < ran <= self._tokens or (ran < self._tokens and self._tokens > MAX_DECODE_TOKENS):
                raise RuntimeError(f"no state behind {n} tokens: the last pass took {self._tokens} behind {self._start}")
            if ran < self._tokens:
                for layer in self.layers:
                    layer.rebuild_slot(self._read_slot, self._write_slot, ran)
            self._read_slot, self._start = self._write_slot, n
        if slot != NO_SLOT and ran and checkpoint_position <= n:
            self._checkpoints[slot] = checkpoint_position
        self._write_slot, self._tokens, self._pending_checkpoint = NO_SLOT, 0, (NO_SLOT, 0)

    def _replace_tail(self, slot: Callable[[], int]) -> None:
        """Replace the checkpoint for the end of the current prompt by another slot."""
        self._checkpoints.pop(self._tail_slot, None)
        self._make_room()
        self._tail_slot = slot()

    def _make_room(self) -> None:
        while len(self._checkpoints) >= self._rollback_slots:
            del self._checkpoints[next(iter(self._checkpoints))]

    def _free_slot(self) -> int:
        used = {self._read_slot, self._write_slot, self._pending_checkpoint[0], *self._checkpoints}
        return next(slot for slot in range(self._slots) if slot not in used)

    def _is_reachable(self, n: int) -> bool:
        """Whether the last pass left the state after `n` tokens, or the means to rebuild it."""
        ran = n - self._start
        return ran in (0, self._tokens) or (0 < ran < self._tokens <= MAX_DECODE_TOKENS)

    def reachable_length(self, n: int) -> int:
        """The largest checkpoint at or before `n` tokens."""
        if self._is_reachable(n):
            return n
        positions = [self._start, *self._checkpoints.values()]
        if self._pending_checkpoint[0] != NO_SLOT:
            positions.append(self._pending_checkpoint[1])
        return max((position for position in positions if position <= n), default=0)

    def truncate(self, n: int) -> None:
        """Roll back to `n` tokens, as returned by `reachable_length`."""
        slot, checkpoint_position = self._pending_checkpoint
        self._in_prompt = False
        if not self._is_reachable(n):
            if slot != NO_SLOT and checkpoint_position <= n:
                self._checkpoints[slot] = checkpoint_position
            self._pending_checkpoint = NO_SLOT, 0
            self._read_slot = next((checkpoint_slot for checkpoint_slot, position in self._checkpoints.items() if position == n), NO_SLOT)
            self._start, self._write_slot, self._tokens = n, NO_SLOT, 0
        elif checkpoint_position > n:
            self._pending_checkpoint = NO_SLOT, 0
        self._checkpoints = {checkpoint_slot: position for checkpoint_slot, position in self._checkpoints.items() if position <= n}

    # -- kept outside ----------------------------------------------------------------------------------------------------------

    def read(self, n: int) -> list[np.ndarray]:
        """The bytes of every layer's state after the `n` tokens held; empty at the start of a sequence."""
        self._settle(n)
        return [] if self._read_slot == NO_SLOT else [layer.read_slot(self._read_slot) for layer in self.layers]

    def write(self, n: int, layers: Sequence[np.ndarray]) -> None:
        """Restore what `read` returned, after `n` tokens."""
        self.clear()
        self._read_slot, self._start = 0, n
        for layer, data in zip(self.layers, layers, strict=True):
            layer.write_slot(0, data)
