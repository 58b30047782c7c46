"""Memory layout of recurrent layer states (of fixed size, in float32). Pure arithmetic, no arrays.

A layer has a few slots, each holding the state after some number of tokens. A slot contains the last inputs of a convolution and, for kinds
that have one, a state that accumulates all tokens so far:

    x[taps - 1, channels]   then, on a cache line,   the state

After the slots comes the rollback log of the last pass of up to MAX_DECODE_TOKENS tokens, `log_floats_per_token` floats per token, from
which the state after any of them can be rebuilt.

A new kind is a class in a file of its own, with kernels on each backend (`kernels/cpu/states.py`, `kernels/cuda/states.py`), a reference
(`reference_*.py`), and its weights (`runtime/weights/state_weights.py`); no other code depends on it.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from .layout import MAX_DECODE_TOKENS, align

FROM, TO, AFTER, KEPT, CONTROLS = range(5)  # indices into the slots of a pass, see `controls` in runtime/kv/states.py
NO_SLOT = -1  # the state before the first token: zeros
CHUNK_TOKENS = 64  # tokens of a prompt that torch processes at once


class StateShape(Protocol):
    """Interface of a kind of state: it provides the members that have no body here."""

    title: ClassVar[str]  # shown to the user
    rollback_slots: ClassVar[int] = 2  # in addition to the two slots that a pass reads and writes
    taps: int  # of the convolution: a slot keeps the inputs of taps - 1 tokens

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        ...

    @property
    def values(self) -> int:
        """Layer outputs per token, the input of its last projection."""
        ...

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """Widths of the projections passed to `mix`."""
        ...

    @property
    def inner_projection_widths(self) -> tuple[int, ...]:
        """Widths of the projections that `mix` computes itself, from some of its inputs or from the convolution's output."""
        return ()

    @property
    def gates(self) -> int:
        """Floats per token of gates and similar inputs of the recurrence, besides the convolved channels."""
        return 0

    @property
    def state_floats(self) -> int:
        """Floats of a slot besides the convolution's inputs."""
        return 0

    @property
    def log_floats_per_token(self) -> int:
        """Floats logged per token while it may be rolled back."""
        ...

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace for this many tokens of a layer, besides its projections and the residual stream; an upper bound in floats."""
        ...

    def described(self) -> str:
        """Heads and widths, to show to the user."""
        ...

    @property
    def state_offset(self) -> int:
        """Floats of a slot before the state."""
        return align(4 * (self.taps - 1) * self.channels) // 4

    @property
    def slot_floats(self) -> int:
        return align(4 * (self.state_offset + self.state_floats)) // 4

    @property
    def log_floats(self) -> int:
        return align(4 * MAX_DECODE_TOKENS * self.log_floats_per_token) // 4

    @property
    def slots(self) -> int:
        return 2 + self.rollback_slots

    @property
    def nbytes(self) -> int:
        """Bytes per layer."""
        return 4 * (self.slots * self.slot_floats + self.log_floats)
