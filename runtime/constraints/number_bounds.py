"""Number bounds for llguidance, which reads them as float64 and rejects those beyond 64-bit integers.

Generated schemas contain the ranges of types (int64, float32, float64). A bound that would be misread is moved inwards to the next
representable one, so that every number allowed then is allowed by the original schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

MAX_EXACT = 2**63 - 1024  # the largest float64 below 2**63
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
VALUES = ("const", "enum")


def clamped(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema with bounds that llguidance reads exactly."""
    if all(_moved(key, value) == value for node in objects(schema) for key, value in node.items()):
        return schema
    result = deep_copy(schema)
    for node in objects(result):
        node |= {key: _moved(key, value) for key, value in node.items()}
    return result


def inexact_number(schema: object) -> float | None:
    """The first number in const or enum that would be misread, or overflow the stack; None if there is none."""
    pending = [node[key] for node in objects(schema) for key in VALUES if key in node]
    while pending:
        value = pending.pop()
        if type(value) in (int, float) and (abs(value) >= MAX_EXACT or type(value) is int and int(float(value)) != value):
            return value
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return None


def _moved(key: str, value: object) -> object:
    if key not in (*LOWER, *UPPER) or isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return value
    inwards = math.inf if key in LOWER else -math.inf
    clipped = max(-MAX_EXACT, value) if key in LOWER else min(MAX_EXACT, value)
    if abs(clipped) > MAX_EXACT:  # no number satisfies the bound: llguidance reports that
        return value
    read = float(clipped)
    read = math.nextafter(read, inwards) if (read < clipped if key in LOWER else read > clipped) else read
    return int(read) if isinstance(clipped, int) else read


def deep_copy(schema: Mapping[str, object]) -> dict[str, object]:
    """A deep copy, without recursion."""
    holder: list[object] = [schema]
    pending: list[tuple[list | dict, object]] = [(holder, 0)]
    while pending:
        container, key = pending.pop()
        if isinstance(container[key], dict):
            copy = container[key] = dict(container[key])
            pending += [(copy, each) for each in copy]
        elif isinstance(container[key], list):
            copy = container[key] = list(container[key])
            pending += [(copy, each) for each in range(len(copy))]
    return holder[0]


def objects(schema: object) -> Iterator[dict]:
    """All objects of a schema, except those in const and enum values."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += [value for key, value in part.items() if key not in VALUES]
        elif isinstance(part, list):
            pending += part
