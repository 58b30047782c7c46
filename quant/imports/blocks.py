"""Scales of blocks that cover a weight: how many values share one, where only their number is known."""

from __future__ import annotations


def block_size(size: int, count: int) -> int:
    """Values of a block, of which `count` cover `size`, the last one perhaps in part: a power of two, as all published ones are.

    Raises ValueError where there is none.
    """
    block = 1
    while count > 0 and -(-size // block) > count:
        block *= 2
    if -(-size // block) != count:
        raise ValueError(f"{count} scales for {size} values")
    return block
