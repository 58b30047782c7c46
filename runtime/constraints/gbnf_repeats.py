"""Repeat counts in GBNF, and merging nested ones.

llguidance keeps a state for each way in which nested counts can be used up, and fails in mid-answer where there are too many: after some
dozen letters of `(("a"{1,100}){1,100}){1,100}`. One count means the same if the allowed totals have no gap.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MAX_REPEAT = 2**31 - 1  # that llguidance reads
SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
NUMBERS = re.compile(r"\{(\d+)(,?)(\d*)\}")


@dataclass(frozen=True)
class Repeat:
    """From `least` to `most` times, None for no limit."""

    least: int
    most: int | None

    @classmethod
    def read(cls, text: str) -> Repeat:
        """Parse `*`, `+`, `?`, `{2}`, `{2,}` or `{2,4}`."""
        if text in SIGNS:
            return cls(*SIGNS[text])
        least, comma, most = NUMBERS.fullmatch(text).groups()
        return cls(int(least), int(most) if most else None if comma else int(least))

    def __str__(self) -> str:
        if (sign := next((sign for sign, bounds in SIGNS.items() if bounds == (self.least, self.most)), None)) is not None:
            return sign
        return f"{{{self.least}}}" if self.most == self.least else f"{{{self.least},{'' if self.most is None else self.most}}}"

    def of(self, inner: Repeat) -> Repeat | None:
        """The single repeat equal to this repeat of `inner`; None if there is none: "aa" twice or three times is four or six."""
        most = None if None in (self.most, inner.most) else self.most * inner.most
        if self.most == 0 or inner.most == 0:
            most = 0
        product = Repeat(self.least * inner.least, most)
        if max(product.least, product.most or 0) > MAX_REPEAT:
            return None
        # Totals of `times` repetitions must join those of `times + 1`. If they do for the first two numbers, they do for all later ones.
        steps = [times for times in (self.least, self.least + 1) if self.most is None or times < self.most]
        return product if all(inner.has_no_gap(times) for times in steps) else None

    def has_no_gap(self, times: int) -> bool:
        """Whether the totals of `times + 1` repetitions begin no later than right after those of `times` end."""
        most = math.inf if self.most is None and times else times * (self.most or 0)
        return (times + 1) * self.least <= most + 1
