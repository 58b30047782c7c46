"""How what a layer remembers in a fixed size lies in memory: the one definition, in float32. Pure arithmetic, no array is touched here.

A layer has a few slots, each behind so many tokens of a text. In one lie the last inputs of a convolution and, of kinds that have one, a
state that every token before has gone into:

    x[taps - 1, channels]   then, on a cache line,   the state

Behind the slots lies what the last pass of few tokens went through, `recent` floats of each, from which the slot behind any of them can be
made again. A kind is one more class here, in a file of its own, with kernels for it on each backend (`kernels/cpu/states.py`,
`kernels/cuda/states.py`), its meaning (`reference_*.py`), and what its weights are (`runtime/weights/state_weights.py`); nothing
else knows it.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from .layout import REPEATED, align

FROM, TO, AFTER, KEPT, CONTROLS = range(5)  # what a pass is told, see `controls` in runtime/kv/states.py
NO_SLOT = -1  # the state of a text that has not begun: zeros
STRETCH = 64  # tokens of a prompt that torch takes together


class StateShape(Protocol):
    """What a kind says: the members without a body here are its own. `title` is what a person reads of it."""

    title: ClassVar[str]
    ways_back: ClassVar[int] = 2  # slots that are kept beside the two of a pass
    taps: int

    @property
    def channels(self) -> int:
        """Of the convolution."""
        ...

    @property
    def values(self) -> int:
        """What a token reads, the input of the layer's last product."""
        ...

    @property
    def products(self) -> tuple[int, ...]:
        """Widths of the products that `mix` is given."""
        ...

    @property
    def widened(self) -> tuple[int, ...]:
        """Widths of the products that `mix` makes itself, of some that it is given or of what it convolved."""
        return ()

    @property
    def gates(self) -> int:
        """Floats of a token beside its convolved channels."""
        return 0

    @property
    def state_floats(self) -> int:
        """Of a slot, beside the inputs of the convolution."""
        return 0

    @property
    def recent(self) -> int:
        """Floats of a token that are kept while it may be taken back."""
        ...

    def card_floats(self, tokens: int) -> int:
        """Floats at most that torch has at once for so many tokens of a layer, beside its products and the stream."""
        ...

    def described(self) -> str:
        """Its heads and widths, for a person."""
        ...

    @property
    def state_offset(self) -> int:
        """Floats of a slot before the state."""
        return align(4 * (self.taps - 1) * self.channels) // 4

    @property
    def slot_floats(self) -> int:
        return align(4 * (self.state_offset + self.state_floats)) // 4

    @property
    def recent_floats(self) -> int:
        return align(4 * REPEATED * self.recent) // 4

    @property
    def slots(self) -> int:
        return 2 + self.ways_back

    @property
    def nbytes(self) -> int:
        """Bytes of a layer."""
        return 4 * (self.slots * self.slot_floats + self.recent_floats)
