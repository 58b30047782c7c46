"""Multiples in a JSON schema: what telling them costs, and those of which bounds leave few, which are listed.

llguidance tells a multiple by the remainder that is left, a state for each. Zeros at the end of a number are remainders too, ten times as
many for each; only of powers of ten it finds a multiple at once. Bounds beside it are told digit by digit together with the remainder, and
where a vocabulary has tokens of three digits, all of them are looked through at each step.
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
    """By how many remainders a number is told to be a multiple of all `values`; 1 for what are no numbers."""
    parts = [Decimal(int(value) if value == int(value) else repr(value)).as_tuple() for value in values if is_number(value)]
    least = min([0, *(part.exponent for part in parts)])
    return math.lcm(*(int("".join(map(str, part.digits))) * 10 ** (part.exponent - least) for part in parts)) or 1


def states_of(count: int) -> int:
    """What so many remainders cost to tell where nothing is beside them: nothing of a power of ten."""
    return 1 if count <= MOST_TENS and count == 10 ** (len(str(count)) - 1) else count


def are_bounded(said: Iterable[Mapping[str, object]]) -> bool:
    """Whether schemas of one place have bounds that are told digit by digit, as all but a single digit's are below."""
    return any(is_number(bound := node.get(key)) and (key in UPPER or abs(bound) > 9) for node in said for key in (*LOWER, *UPPER))


def multiples_listed(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The same schema with multiples that would take too long to tell as the numbers that they are, where bounds leave few."""
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
    """All numbers of which a schema speaks, in their order; None where telling them is no trouble, or they are too many, or not told
    here."""
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
    """Whether what JSON has for a number is that number."""
    return float(number) == number and _exact(number) == exact


def _exact(number: float) -> Fraction:
    """What is written of a number in JSON."""
    return Fraction(Decimal(repr(number)))


def is_number(value: object) -> bool:
    return type(value) is int or type(value) is float and math.isfinite(value)
