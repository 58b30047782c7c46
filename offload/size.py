"""Human-readable sizes: from "6G", "512MiB" and "16k" to bytes, and back.

A bare letter is decimal, as disks and --ram values are sold (1G = 10^9); an `i` makes it binary (1Gi = 2^30). Output is always binary with
the unit spelled out, so that a printed figure can be passed back as an option without ambiguity.
"""

import re
from fractions import Fraction

from .. import MemoryTooSmall, UsageError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE | re.ASCII)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Longer than any real size; keeps a pasted megabyte of digits from becoming a slow integer.
_LONGEST = 32
# The process's own memory differs between runs, by some tenths of a MiB here: a suggested size has to fit next time too.
SPARE = 1 << 20


def parse_size(text: str) -> int:
    """Bytes in `text`. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise UsageError(f"{text[:_LONGEST]!r} is not a size", "write it as 6G, 512MiB or a number of bytes")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return int(Fraction(number) * base ** _POWER[(prefix or "").lower()])


def format_size(nbytes: int) -> str:
    """`nbytes` in the largest binary unit in which it is at least 1: "1.23 GiB"."""
    if nbytes < 1024:
        return f"{nbytes} B"
    unit, value = 0, float(nbytes)
    # 1023.995 and above would print as 1024.00 of the smaller unit.
    while value >= 1023.995 and unit < len(_UNITS) - 1:
        unit, value = unit + 1, value / 1024
    return f"{value:.2f} {_UNITS[unit]}"


def ram_argument(nbytes: int) -> str:
    """The `--ram` value for a plan of `nbytes`: "123Mi", with SPARE."""
    return f"{-(-(nbytes + SPARE) // 2**20)}Mi"


def memory_too_small(message: str, required_nbytes: int, ctx: int, fitting_ctx: int, alternative: str) -> MemoryTooSmall:
    """The error for a plan of `ctx` tokens that takes `required_nbytes`. The hint is the shorter context that fits, else `alternative`."""
    ram = f"--ram {ram_argument(required_nbytes)}"
    hint = f"-c {fitting_ctx} fits; {ctx} tokens take {ram}" if fitting_ctx else f"it takes {ram}, {alternative}"
    return MemoryTooSmall(message, hint, required_nbytes, fitting_ctx)


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
