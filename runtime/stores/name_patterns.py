"""Linear-time matching of name patterns from an untrusted config: `re` may backtrack forever.

Supports letters, `.`, `\\.` and `\\d`, classes, groups of alternatives, `*`, `+`, `?` and both anchors, which is what tools write.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import lru_cache

MOST, DEPTH = 2_000, 20  # characters of a pattern, groups within groups
WORD = frozenset(string.ascii_letters + string.digits + "_")
KNOWN = {"d": frozenset(string.digits).__contains__, "w": WORD.__contains__, "D": lambda one: one not in string.digits,
         "W": lambda one: one not in WORD}
SPECIAL = "()[]{}|*+?.^$\\"

Places = frozenset[int]  # of a name, up to which it fits
Step = Callable[[str, Places], Places]


class NotUnderstood(ValueError):
    """A pattern with something else in it."""


def matches(pattern: str, name: str, anywhere: bool = False) -> bool:
    """Does a name begin like a pattern, or hold it `anywhere`? One that is not understood fits none."""
    try:
        step = _compiled(pattern)
    except NotUnderstood:
        return False
    return bool(step(name, frozenset(range(len(name) + 1)) if anywhere else frozenset((0,))))


@lru_cache(256)
def _compiled(pattern: str) -> Step:
    if len(pattern) > MOST:
        raise NotUnderstood
    step, at = _either(pattern, 0, 0)
    if at != len(pattern):
        raise NotUnderstood
    return step


def _either(text: str, at: int, depth: int) -> tuple[Step, int]:
    """Alternatives from a place on, and where they end."""
    if depth > DEPTH:
        raise NotUnderstood
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
        step, at = _one(text, at, depth)
        if at < len(text) and text[at] in "*+?":
            step, at = _times(step, text[at]), at + 1
            at += text.startswith("?", at)  # what is taken first makes no difference here
        steps.append(step)

    def through(name: str, places: Places) -> Places:
        for step in steps:
            places = step(name, places)
        return places

    return through, at


def _times(step: Step, sign: str) -> Step:
    def repeated(name: str, places: Places) -> Places:
        found = frozenset() if sign == "+" else places
        new = places
        while new:
            new = step(name, new) - found
            found |= new
            if sign == "?":
                break
        return found

    return repeated


def _one(text: str, at: int, depth: int) -> tuple[Step, int]:
    """What one sign or group from a place on stands for, and where it ends."""
    sign = text[at]
    if sign == "(":
        at += 3 if text.startswith("(?:", at) else 1
        step, at = _either(text, at, depth + 1)
        if not text.startswith(")", at):
            raise NotUnderstood
        return step, at + 1
    if sign in "^$":
        return (lambda name, places: places & {0 if sign == "^" else len(name)}), at + 1
    if sign == "[":
        return _class(text, at)
    if sign == "\\" and at + 1 < len(text) and (text[at + 1] in KNOWN or text[at + 1] not in WORD):
        own = text[at + 1]
        return _letter(KNOWN.get(own, own.__eq__)), at + 2
    if sign == ".":
        return _letter(lambda one: True), at + 1
    if sign in SPECIAL:
        raise NotUnderstood
    return _letter(sign.__eq__), at + 1


def _class(text: str, at: int) -> tuple[Step, int]:
    end = text.find("]", at + 2)
    inner = text[at + 1 : end]
    if end < 0 or "\\" in inner or "[" in inner:
        raise NotUnderstood
    signs, turned, inner = set(), inner.startswith("^"), inner.removeprefix("^")
    while inner:
        wide = inner[1:2] == "-" and len(inner) > 2
        low, high = inner[0], inner[2 if wide else 0]
        if not low <= high <= "\x7f":
            raise NotUnderstood
        signs |= {chr(code) for code in range(ord(low), ord(high) + 1)}
        inner = inner[3 if wide else 1 :]
    return _letter(lambda one: (one in signs) != turned), end + 1


def _letter(fits: Callable[[str], bool]) -> Step:
    return lambda name, places: frozenset(at + 1 for at in places if at < len(name) and fits(name[at]))
