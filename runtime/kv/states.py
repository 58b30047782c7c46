"""Recurrent states of linear attention and the like: of fixed size, whatever the context, and without a way to undo a token.

Keys and values can be truncated token by token; a state has absorbed every token before it. So states live in slots, each valid after a
number of tokens, the same slot in every layer: a pass reads one slot and writes another, and the slot it read survives until the next pass
begins. An aborted pass, or a draft of which nothing was accepted, is undone by reading the same slot again; after short passes, such as
drafts, the state after any of their tokens is rebuilt from what the pass left (`LayerStates.rebuild_slot`), without matrix products.

Further checkpoints are slots that are kept, as many as the kind of state has (`StateShape.rollback_slots`). A prompt leaves two: at its
start, and shortly before its end, since the next prompt often shares all but the tokens that open the answer; a draft model, whose tokens
are mostly rolled back, at its very end instead. The oldest are evicted. Anything in between is recomputed.
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
    own = config.compressed_attention.shapes[layer] if config.compressed_attention else config.recurrent
    beside = None if config.ngrams is None else config.ngrams.shape_of(layer)
    return own if beside is None else WithNgrams(own, beside)


def controls() -> np.ndarray:
    """The control words of a pass, int64: the slot to read (NO_SLOT: none yet), the one to write, and after how many of its tokens (0:
    none) the state is also copied to a third. Kernels of recorded passes read them in place."""
    return np.array([NO_SLOT, 0, 0, NO_SLOT], np.int64)[:CONTROLS]


class States:
    """The states of all layers that have one; their `shapes` have equally many slots. `pass_slots` is the `controls` array that the kernels
    read."""

    def __init__(self, layers: Sequence[LayerStates], shapes: Sequence[StateShape | WithNgrams], pass_slots: np.ndarray) -> None:
        self.layers, self._pass_slots = layers, pass_slots
        first = next((shape.own if isinstance(shape, WithNgrams) else shape) for shape in shapes)
        self._slots, self._rollback_slots = first.slots, first.rollback_slots
        self.guesses = False  # is this a draft model, whose tokens are mostly rolled back?
        self.nbytes, self.slot_nbytes = sum(shape.nbytes for shape in shapes), tuple(4 * shape.slot_floats for shape in shapes)
        self.clear()

    def clear(self) -> None:
        """Reset to the start of a sequence."""
        self._from, self._to, self._start, self._tokens = NO_SLOT, NO_SLOT, 0, 0  # the last pass: its slots, start position and length
        self._kept: dict[int, int] = {}  # checkpoints: slot -> position, oldest first
        self._coming = NO_SLOT, 0  # a slot that the last pass also writes, and its position
        self._tail = NO_SLOT  # the checkpoint before the end of the current prompt
        self._reading = False

    @property
    def saved_nbytes(self) -> int:
        """Bytes that `read` returns."""
        return sum(self.slot_nbytes)

    def begin(self, n: int, tokens: int, prompt: bool, keep: int = 0) -> None:
        """Begin a pass of `tokens` after `n`. `prompt`: it is part of a prompt; `keep`: the position after which a checkpoint is wanted."""
        self._settle(n)
        if prompt and not self._reading and self._from != NO_SLOT and self._from not in self._kept:
            self._make_room()
            self._kept[self._from] = n
        elif self.guesses and not prompt and self._reading and self._from not in (NO_SLOT, *self._kept):
            self._replace_tail(lambda: self._from)
            self._kept[self._from] = n
        self._tail, self._reading = self._tail if self._reading else NO_SLOT, prompt
        pass_slots = self._pass_slots
        self._tokens, self._to = tokens, self._free()
        pass_slots[FROM], pass_slots[TO], pass_slots[AFTER], pass_slots[KEPT] = self._from, self._to, 0, NO_SLOT
        if self.guesses:
            return
        if prompt and n < keep < n + tokens:
            self._replace_tail(self._free)
            self._coming = self._tail, keep
            pass_slots[AFTER], pass_slots[KEPT] = keep - n, self._tail
        elif prompt and n == keep and self._from not in (NO_SLOT, *self._kept):
            self._replace_tail(lambda: self._from)
            self._kept[self._from] = n

    def end_prompt(self) -> None:
        """Further tokens belong to another prompt."""
        self._reading = False

    def _settle(self, n: int) -> None:
        """Make the next pass read the state after `n` tokens, which the last pass left or from which it can be rebuilt."""
        ran, (slot, behind) = n - self._start, self._coming
        if ran:
            if not 0 < ran <= self._tokens or (ran < self._tokens and self._tokens > MAX_DECODE_TOKENS):
                raise RuntimeError(f"no state behind {n} tokens: the last pass took {self._tokens} behind {self._start}")
            if ran < self._tokens:
                for layer in self.layers:
                    layer.rebuild_slot(self._from, self._to, ran)
            self._from, self._start = self._to, n
        if slot != NO_SLOT and ran and behind <= n:
            self._kept[slot] = behind
        self._to, self._tokens, self._coming = NO_SLOT, 0, (NO_SLOT, 0)

    def _replace_tail(self, slot: Callable[[], int]) -> None:
        """Keep another slot for the end of the current prompt."""
        self._kept.pop(self._tail, None)
        self._make_room()
        self._tail = slot()

    def _make_room(self) -> None:
        while len(self._kept) >= self._rollback_slots:
            del self._kept[next(iter(self._kept))]

    def _free(self) -> int:
        used = {self._from, self._to, self._coming[0], *self._kept}
        return next(slot for slot in range(self._slots) if slot not in used)

    def _goes_on(self, n: int) -> bool:
        """Whether the last pass left the state after `n` tokens, or the means to rebuild it."""
        ran = n - self._start
        return ran in (0, self._tokens) or (0 < ran < self._tokens <= MAX_DECODE_TOKENS)

    def reach(self, n: int) -> int:
        """The largest checkpoint at or before `n` tokens."""
        if self._goes_on(n):
            return n
        ways = [self._start, *self._kept.values(), *([self._coming[1]] if self._coming[0] != NO_SLOT else [])]
        return max((behind for behind in ways if behind <= n), default=0)

    def truncate(self, n: int) -> None:
        """Roll back to `n` tokens, as returned by `reach`."""
        slot, behind = self._coming
        self._reading = False
        if not self._goes_on(n):
            if slot != NO_SLOT and behind <= n:
                self._kept[slot] = behind
            self._coming = NO_SLOT, 0
            self._from = next((own for own, at in self._kept.items() if at == n), NO_SLOT)
            self._start, self._to, self._tokens = n, NO_SLOT, 0
        elif behind > n:
            self._coming = NO_SLOT, 0
        self._kept = {own: at for own, at in self._kept.items() if at <= n}

    # -- kept outside ----------------------------------------------------------------------------------------------------------

    def read(self, n: int) -> list[np.ndarray]:
        """The bytes of every layer's state after the `n` tokens held; empty at the start of a sequence."""
        self._settle(n)
        return [] if self._from == NO_SLOT else [layer.read_slot(self._from) for layer in self.layers]

    def write(self, n: int, layers: Sequence[np.ndarray]) -> None:
        """Restore what `read` returned, after `n` tokens."""
        self.clear()
        self._from, self._start = 0, n
        for layer, data in zip(self.layers, layers, strict=True):
            layer.write_slot(0, data)
