"""Restricts the draft's LM head to frequent tokens: the head is a good part of a small model's pass, and drafts of rare tokens cost time.

Tokenizers number tokens in merge order, so frequent ones come first. If nearly all recent tokens are among the first rows, only a share of
the head's rows is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.tiles import ROWS
from ...quant.weight import Linear, first_rows

# Of so many RECENT tokens; not in fewer than LEAST_ROWS.
SHARES, RECENT, NEARLY_ALL, LEAST_ROWS = (8, 4, 2), 256, 0.98, 8192


class FrequentHead:
    """Caches the last choice. `rows`: how many rows that was."""

    def __init__(self) -> None:
        self._known: tuple[Linear, Linear] | None = None  # a head, and what of it is asked

    @property
    def rows(self) -> int:
        return 0 if self._known is None else self._known[1].weight.shape[0]

    def of(self, head: Linear, history: Sequence[int]) -> Linear:
        """The rows of `head` to score for a draft after `history`."""
        whole, newest = head.weight.shape[0], history[-RECENT:]
        counts = (whole // share // ROWS * ROWS for share in SHARES)
        rows = next((each for each in counts if each >= LEAST_ROWS and
                     sum(token < each for token in newest) >= NEARLY_ALL * len(newest)), whole)
        if self._known is None or self._known[0] is not head or self.rows != rows:
            self._known = head, Linear(first_rows(head.weight, rows))
        return self._known[1]
