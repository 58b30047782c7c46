"""Number bounds for llguidance, which reads them as float64 and rejects those beyond 64-bit integers.

Generated schemas contain the ranges of types (int64, float32, float64). A bound that would be misread is moved inwards to the next
representable one, so that every number allowed then is allowed by the original schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

FURTHEST = 2**63 - 1024  # a float64, as its negative is
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
VALUES = ("const", "enum")


def clamped(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema with bounds that llguidance reads exactly."""
    if all(_moved(key, value) == value for node in objects(schema) for key, value in node.items()):
        return schema
    made = copied(schema)
    for node in objects(made):
        node |= {key: _moved(key, value) for key, value in node.items()}
    return made


def inexact_number(schema: object) -> float | None:
    """The first number in const or enum that would be misread, or overflow the stack; None if there is none."""
    left = [node[key] for node in objects(schema) for key in VALUES if key in node]
    while left:
        value = left.pop()
        if type(value) in (int, float) and (abs(value) >= FURTHEST or type(value) is int and int(float(value)) != value):
            return value
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return None


def _moved(key: str, value: object) -> object:
    if key not in (*LOWER, *UPPER) or isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return value
    inwards = math.inf if key in LOWER else -math.inf
    clear = max(-FURTHEST, value) if key in LOWER else min(FURTHEST, value)
    if abs(clear) > FURTHEST:  # no number is in its reach, which is said by who reads it
        return value
    read = float(clear)
    read = math.nextafter(read, inwards) if (read < clear if key in LOWER else read > clear) else read
    return int(read) if isinstance(clear, int) else read


def copied(schema: Mapping[str, object]) -> dict[str, object]:
    """A deep copy, without recursion."""
    holder: list[object] = [schema]
    left: list[tuple[list | dict, object]] = [(holder, 0)]
    while left:
        place, key = left.pop()
        if isinstance(place[key], dict):
            own = place[key] = dict(place[key])
            left += [(own, each) for each in own]
        elif isinstance(place[key], list):
            own = place[key] = list(place[key])
            left += [(own, each) for each in range(len(own))]
    return holder[0]


def objects(schema: object) -> Iterator[dict]:
    """All objects of a schema, except those in const and enum values."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left += [value for key, value in part.items() if key not in VALUES]
        elif isinstance(part, list):
            left += part
