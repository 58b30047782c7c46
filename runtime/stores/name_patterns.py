"""Linear-time matching of name patterns from an untrusted config: `re` may backtrack forever.

Supports letters, `.`, `\\.` and `\\d`, classes, groups of alternatives, `*`, `+`, `?` and both anchors, which is what tools write.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import lru_cache

MAX_LENGTH, MAX_DEPTH = 2_000, 20  # characters of a pattern, groups within groups
WORD = frozenset(string.ascii_letters + string.digits + "_")
ESCAPES = {"d": frozenset(string.digits).__contains__, "w": WORD.__contains__, "D": lambda one: one not in string.digits,
         "W": lambda one: one not in WORD}
SPECIAL = "()[]{}|*+?.^$\\"

Positions = frozenset[int]  # of a name, up to which it fits
Step = Callable[[str, Positions], Positions]


class UnsupportedPattern(ValueError):
    """A pattern with something else in it."""


def matches(pattern: str, name: str, anywhere: bool = False) -> bool:
    """Does a name begin like a pattern, or hold it `anywhere`? One that is not understood fits none."""
    try:
        step = _compiled(pattern)
    except UnsupportedPattern:
        return False
    return bool(step(name, frozenset(range(len(name) + 1)) if anywhere else frozenset((0,))))


@lru_cache(256)
def _compiled(pattern: str) -> Step:
    if len(pattern) > MAX_LENGTH:
        raise UnsupportedPattern
    step, at = _alternatives(pattern, 0, 0)
    if at != len(pattern):
        raise UnsupportedPattern
    return step


def _alternatives(text: str, at: int, depth: int) -> tuple[Step, int]:
    """Alternatives from a place on, and where they end."""
    if depth > MAX_DEPTH:
        raise UnsupportedPattern
    ways = []
    while True:
        step, at = _sequence(text, at, depth)
        ways.append(step)
        if at == len(text) or text[at] != "|":
            return lambda name, places: frozenset().union(*(way(name, places) for way in ways)), at
        at += 1


def _sequence(text: str, at: int, depth: int) -> tuple[Step, int]:
    steps: list[Step] = []
    while at < len(text) and text[at] not in "|)":
        step, at = _atom(text, at, depth)
        if at < len(text) and text[at] in "*+?":
            step, at = _quantified(step, text[at]), at + 1
            at += text.startswith("?", at)  # what is taken first makes no difference here
        steps.append(step)

    def through(name: str, places: Positions) -> Positions:
        for step in steps:
            places = step(name, places)
        return places

    return through, at


def _quantified(step: Step, sign: str) -> Step:
    def repeated(name: str, places: Positions) -> Positions:
        found = frozenset() if sign == "+" else places
        new = places
        while new:
            new = step(name, new) - found
            found |= new
            if sign == "?":
                break
        return found

    return repeated


def _atom(text: str, at: int, depth: int) -> tuple[Step, int]:
    """What one sign or group from a place on stands for, and where it ends."""
    sign = text[at]
    if sign == "(":
        at += 3 if text.startswith("(?:", at) else 1
        step, at = _alternatives(text, at, depth + 1)
        if not text.startswith(")", at):
            raise UnsupportedPattern
        return step, at + 1
    if sign in "^$":
        return (lambda name, places: places & {0 if sign == "^" else len(name)}), at + 1
    if sign == "[":
        return _character_class(text, at)
    if sign == "\\" and at + 1 < len(text) and (text[at + 1] in ESCAPES or text[at + 1] not in WORD):
        own = text[at + 1]
        return _character(ESCAPES.get(own, own.__eq__)), at + 2
    if sign == ".":
        return _character(lambda one: True), at + 1
    if sign in SPECIAL:
        raise UnsupportedPattern
    return _character(sign.__eq__), at + 1


def _character_class(text: str, at: int) -> tuple[Step, int]:
    end = text.find("]", at + 2)
    inner = text[at + 1 : end]
    if end < 0 or "\\" in inner or "[" in inner:
        raise UnsupportedPattern
    signs, turned, inner = set(), inner.startswith("^"), inner.removeprefix("^")
    while inner:
        wide = inner[1:2] == "-" and len(inner) > 2
        low, high = inner[0], inner[2 if wide else 0]
        if not low <= high <= "\x7f":
            raise UnsupportedPattern
        signs |= {chr(code) for code in range(ord(low), ord(high) + 1)}
        inner = inner[3 if wide else 1 :]
    return _character(lambda one: (one in signs) != turned), end + 1


def _character(fits: Callable[[str], bool]) -> Step:
    return lambda name, places: frozenset(at + 1 for at in places if at < len(name) and fits(name[at]))
