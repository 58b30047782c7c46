"""Bounds of numbers as llguidance tells them, which reads them in float64 and takes none that is further out than whole numbers of 64 bits.

Ranges of types (those of 64 bits, of float32 and float64) stand in schemas that programs write. A bound that would be read as another is
moved inwards to the next one: what is of the schema then is of the one that was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

FURTHEST = 2**63 - 1024  # a float64, as its negative is
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
VALUES = ("const", "enum")


def clamped(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The same schema with bounds that are read as they are written."""
    if all(_moved(key, value) == value for node in objects(schema) for key, value in node.items()):
        return schema
    made = copied(schema)
    for node in objects(made):
        node |= {key: _moved(key, value) for key, value in node.items()}
    return made


def inexact_number(schema: object) -> float | None:
    """The first number among the values that a schema names which would be written as another, or take the whole stack; None for none."""
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
    """The same schema, to be changed; however deep it is."""
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
    """All objects of a schema but those of the values that it names."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left += [value for key, value in part.items() if key not in VALUES]
        elif isinstance(part, list):
            left += part
