"""`multipleOf` in JSON schemas: what recognising multiples costs, and enumerating those that bounds leave few of.

llguidance recognises a multiple by its remainder, one state each. Trailing zeros multiply the remainders by ten; only powers of ten are
cheap. Bounds are checked digit by digit together with the remainder, and a vocabulary with three-digit tokens makes each step slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction

from .number_bounds import LOWER, UPPER, VALUES, deep_copy, objects

MULTIPLE, MAX_REMAINDERS = "multipleOf", 100_000  # some 3 s and 50 MB
MAX_POWER_OF_TEN = 1_000_000  # with three-digit tokens each digit takes a second; ten times that for the next power
MAX_BOUNDED_REMAINDERS = 25_000  # with bounds: 3 s per digit; with 30,000 llguidance ends the answer
MAX_LISTED_VALUES = 40_000  # in the enums of a whole schema: 4 s


def remainders(values: Iterable[object]) -> int:
    """The number of remainder states for multiples of all `values`; 1 for non-numbers."""
    parts = [Decimal(int(value) if value == int(value) else repr(value)).as_tuple() for value in values if is_number(value)]
    exponent = min([0, *(part.exponent for part in parts)])
    return math.lcm(*(int("".join(map(str, part.digits))) * 10 ** (part.exponent - exponent) for part in parts)) or 1


def num_states(count: int) -> int:
    """The cost of `count` remainders without bounds: none for a power of ten."""
    return 1 if count <= MAX_POWER_OF_TEN and count == 10 ** (len(str(count)) - 1) else count


def are_bounded(schemas: Iterable[Mapping[str, object]]) -> bool:
    """Whether the schemas of one value have bounds that are checked digit by digit."""
    return any(is_number(bound := node.get(key)) and (key in UPPER or abs(bound) > 9) for node in schemas for key in (*LOWER, *UPPER))


def list_multiples(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema with expensive multiples replaced by an enum where bounds leave few."""
    remaining, values_by_index = MAX_LISTED_VALUES, {}
    for index, node in enumerate(objects(schema)):
        if (values := _numbers(node, remaining)) is not None:
            values_by_index[index] = values
            remaining -= len(values)
    if not values_by_index:
        return schema
    changed = deep_copy(schema)
    for index, node in enumerate([*objects(changed)]):
        if index in values_by_index:
            for key in (MULTIPLE, *LOWER, *UPPER):
                node.pop(key, None)
            node["enum"] = [*values_by_index[index], None] if isinstance(node["type"], list) else values_by_index[index]
    return changed


def _numbers(node: Mapping[str, object], limit: int) -> list[int | float] | None:
    """All numbers that a schema allows, sorted; None if that is unnecessary, or there are too many."""
    step, kind = node.get(MULTIPLE), node.get("type")
    if isinstance(kind, list) and len(kind) == 2 and "null" in kind:  # or nothing
        kind = kind[kind[0] == "null"]
    if kind not in ("integer", "number") or node.keys() & VALUES:
        return None
    if not is_number(step) or not step or remainders([step]) <= MAX_BOUNDED_REMAINDERS:
        return None
    bounds = {key: node[key] for key in (*LOWER, *UPPER) if key in node}
    if not all(map(is_number, bounds.values())):
        return None
    step, bounds = abs(_exact(step)), {key: _exact(bound) for key, bound in bounds.items()}
    firsts = [math.ceil(bounds[LOWER[0]] / step)] if LOWER[0] in bounds else []
    firsts += [math.floor(bounds[LOWER[1]] / step) + 1] if LOWER[1] in bounds else []
    lasts = [math.floor(bounds[UPPER[0]] / step)] if UPPER[0] in bounds else []
    lasts += [math.ceil(bounds[UPPER[1]] / step) - 1] if UPPER[1] in bounds else []
    if not firsts or not lasts or not 0 <= min(lasts) - max(firsts) < limit:
        return None
    multiples = [step * number for number in range(max(firsts), min(lasts) + 1)]
    numbers = [int(number) if number.denominator == 1 else float(number) for number in multiples
               if number.denominator == 1 or kind == "number"]
    return numbers if numbers and all(map(_is_written, numbers, multiples if kind == "number" else numbers)) else None


def _is_written(number: float, exact: Fraction | float) -> bool:
    """Whether JSON prints a number exactly."""
    return float(number) == number and _exact(number) == exact


def _exact(number: float) -> Fraction:
    """The exact value of a number as written in JSON."""
    return Fraction(Decimal(repr(number)))


def is_number(value: object) -> bool:
    return type(value) is int or type(value) is float and math.isfinite(value)
