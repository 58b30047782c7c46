"""How the state of a gated delta rule lies: the one definition, in float32. Pure arithmetic, no array is touched here.

A layer of linear attention remembers a text in two things of fixed size: the last inputs of its convolution, and for every value head a
matrix that maps keys to values. Both lie in a slot, behind so many tokens of the text; a layer has a few slots:

    x[taps - 1, channels]   then, on a cache line,   S[value_heads, value_dim, key_dim]

Behind the slots lies what the last pass of few tokens went through, from which the state behind any of them can be made again: inputs of
the convolution and its results, [REPEATED, channels] each, and decay and beta [REPEATED, 2, value_heads].
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import ALIGN, REPEATED, align

FROM, TO, AFTER, KEPT, CONTROLS = range(5)  # what a pass is told, see `controls` in runtime/states.py
NO_SLOT = -1  # the state of a text that has not begun: zeros


@dataclass(frozen=True)
class DeltaShape:
    """Heads of keys (and queries) and of values, the width of one of each, and the taps of the convolution over all of them.

    Heads of values that read the keys of one head lie side by side; `tiled`: once around all heads of keys instead, again and again, as
    GGUF files have them.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token, in this order."""
        return 2 * self.keys + self.values

    @property
    def state_offset(self) -> int:
        """Floats of a slot before S."""
        return align(4 * (self.taps - 1) * self.channels) // 4

    @property
    def state_floats(self) -> int:
        return self.value_heads * self.value_dim * self.key_dim

    @property
    def slot_floats(self) -> int:
        return align(4 * (self.state_offset + self.state_floats)) // 4

    @property
    def recent_floats(self) -> int:
        return align(4 * REPEATED * 2 * (self.channels + self.value_heads), ALIGN) // 4

    def nbytes(self, slots: int) -> int:
        """Bytes of a layer."""
        return 4 * (slots * self.slot_floats + self.recent_floats)
