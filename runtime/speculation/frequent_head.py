"""Restricts the draft's LM head to frequent tokens: the head takes much of a small model's pass, and a missed rare token costs little.

Tokenizers number tokens in merge order, so frequent ones come first. If nearly all recent tokens are among the first rows, only a share of
the head's rows is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.tiles import ROWS
from ...quant.weight import Linear, first_rows

SHARES = (8, 4, 2)  # a head of V rows is restricted to V / share
MIN_ROWS = 8192
RECENT, MIN_COVERAGE = 256, 0.98  # share of the RECENT last tokens that the rows must cover


class FrequentHead:
    """Selects and caches the rows of a head."""

    def __init__(self) -> None:
        self._cached: tuple[Linear, Linear] | None = None  # a head, and its first rows

    @property
    def rows(self) -> int:
        """The number of rows last selected."""
        return 0 if self._cached is None else self._cached[1].weight.shape[0]

    def select(self, head: Linear, history: Sequence[int]) -> Linear:
        """The rows of `head` to score for a draft after `history`."""
        vocab_size, recent = head.weight.shape[0], history[-RECENT:]
        counts = (vocab_size // share // ROWS * ROWS for share in SHARES)
        rows = next((count for count in counts if count >= MIN_ROWS and
                     sum(token < count for token in recent) >= MIN_COVERAGE * len(recent)), vocab_size)
        if self._cached is None or self._cached[0] is not head or self.rows != rows:
            self._cached = head, Linear(first_rows(head.weight, rows))
        return self._cached[1]
