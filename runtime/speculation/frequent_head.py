"""The rows of a head among which a guess is looked for: of a small model the head is a good part of a pass, and a guess of a rare token is
one that costs time.

Tokenizers number tokens in the order in which they were merged, so the frequent ones come first. Where the newest tokens of a text are
nearly all among the first of some share of the head's rows, a guess is looked for there.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.tiles import ROWS
from ...quant.weight import Linear, first_rows

# Of so many RECENT tokens; not in fewer than LEAST_ROWS.
SHARES, RECENT, NEARLY_ALL, LEAST_ROWS = (8, 4, 2), 256, 0.98, 8192


class FrequentHead:
    """One that is asked again and again, and is kept as it was asked last. `rows`: how many that was."""

    def __init__(self) -> None:
        self._known: tuple[Linear, Linear] | None = None  # a head, and what of it is asked

    @property
    def rows(self) -> int:
        return 0 if self._known is None else self._known[1].weight.shape[0]

    def of(self, head: Linear, history: Sequence[int]) -> Linear:
        """The rows of `head` for a guess behind `history`."""
        whole, newest = head.weight.shape[0], history[-RECENT:]
        counts = (whole // share // ROWS * ROWS for share in SHARES)
        rows = next((each for each in counts if each >= LEAST_ROWS and
                     sum(token < each for token in newest) >= NEARLY_ALL * len(newest)), whole)
        if self._known is None or self._known[0] is not head or self.rows != rows:
            self._known = head, Linear(first_rows(head.weight, rows))
        return self._known[1]
