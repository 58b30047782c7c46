"""`multipleOf` in JSON schemas: what recognising multiples costs, and enumerating those that bounds leave few of.

llguidance recognises a multiple by its remainder, one state each. Trailing zeros multiply the remainders by ten; only powers of ten are
cheap. Bounds are checked digit by digit together with the remainder, and a vocabulary with three-digit tokens makes each step slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction

from .number_bounds import LOWER, UPPER, VALUES, copied, objects

MULTIPLE, MOST_REMAINDERS = "multipleOf", 100_000  # some 3 s and 50 MB
MOST_TENS = 1_000_000  # a power of ten: each digit takes a second where tokens have three, and ten times that for the next power
MOST_BOUNDED = 25_000  # with bounds: 3 s for a digit, and 30,000 end an answer
MOST_LISTED = 40_000  # numbers of a whole schema: 4 s


def remainders(values: Iterable[object]) -> int:
    """The number of remainder states for multiples of all `values`; 1 for non-numbers."""
    parts = [Decimal(int(value) if value == int(value) else repr(value)).as_tuple() for value in values if is_number(value)]
    least = min([0, *(part.exponent for part in parts)])
    return math.lcm(*(int("".join(map(str, part.digits))) * 10 ** (part.exponent - least) for part in parts)) or 1


def states_of(count: int) -> int:
    """The cost of `count` remainders without bounds: none for a power of ten."""
    return 1 if count <= MOST_TENS and count == 10 ** (len(str(count)) - 1) else count


def are_bounded(said: Iterable[Mapping[str, object]]) -> bool:
    """Whether schemas of one place have bounds that are checked digit by digit."""
    return any(is_number(bound := node.get(key)) and (key in UPPER or abs(bound) > 9) for node in said for key in (*LOWER, *UPPER))


def multiples_listed(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema with expensive multiples replaced by an enum where bounds leave few."""
    room, made = MOST_LISTED, {}
    for place, node in enumerate(objects(schema)):
        if (found := _numbers(node, room)) is not None:
            made[place] = found
            room -= len(found)
    if not made:
        return schema
    changed = copied(schema)
    for place, node in enumerate([*objects(changed)]):
        if place in made:
            for key in (MULTIPLE, *LOWER, *UPPER):
                node.pop(key, None)
            node["enum"] = [*made[place], None] if isinstance(node["type"], list) else made[place]
    return changed


def _numbers(node: Mapping[str, object], most: int) -> list[int | float] | None:
    """All numbers that a schema allows, sorted; None if that is unnecessary, or there are too many."""
    step, kind = node.get(MULTIPLE), node.get("type")
    if isinstance(kind, list) and len(kind) == 2 and "null" in kind:  # or nothing
        kind = kind[kind[0] == "null"]
    if kind not in ("integer", "number") or not is_number(step) or not step or remainders([step]) <= MOST_BOUNDED or node.keys() & VALUES:
        return None
    bounds = {key: node[key] for key in (*LOWER, *UPPER) if key in node}
    if not all(map(is_number, bounds.values())):
        return None
    step, bounds = abs(_exact(step)), {key: _exact(bound) for key, bound in bounds.items()}
    least = [math.ceil(bounds[LOWER[0]] / step)] if LOWER[0] in bounds else []
    least += [math.floor(bounds[LOWER[1]] / step) + 1] if LOWER[1] in bounds else []
    last = [math.floor(bounds[UPPER[0]] / step)] if UPPER[0] in bounds else []
    last += [math.ceil(bounds[UPPER[1]] / step) - 1] if UPPER[1] in bounds else []
    if not least or not last or not 0 <= min(last) - max(least) < most:
        return None
    exact = [step * number for number in range(max(least), min(last) + 1)]
    found = [int(number) if number.denominator == 1 else float(number) for number in exact if number.denominator == 1 or kind == "number"]
    return found if found and all(map(_is_written, found, exact if kind == "number" else found)) else None


def _is_written(number: float, exact: Fraction | float) -> bool:
    """Whether JSON prints a number exactly."""
    return float(number) == number and _exact(number) == exact


def _exact(number: float) -> Fraction:
    """The exact value of a number as written in JSON."""
    return Fraction(Decimal(repr(number)))


def is_number(value: object) -> bool:
    return type(value) is int or type(value) is float and math.isfinite(value)
