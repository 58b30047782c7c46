"""Rewrites a JSON schema for llguidance: parts that it would misread, or take too long to match, are expressed in another way."""

from __future__ import annotations

from collections.abc import Mapping

from .multiple_of import list_multiples
from .number_bounds import clamped, deep_copy, objects


def rewritten(schema: Mapping[str, object]) -> Mapping[str, object]:
    """An equivalent schema that llguidance reads correctly."""
    return list_multiples(clamped(_without_idle(schema)))


def _without_idle(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Drop `additionalItems` where it has no effect: beside `prefixItems` llguidance misreads both."""
    if not any(map(_is_idle, objects(schema))):
        return schema
    made = deep_copy(schema)
    for node in filter(_is_idle, objects(made)):
        del node["additionalItems"]
    return made


def _is_idle(node: Mapping[str, object]) -> bool:
    return "additionalItems" in node and isinstance(node.get("prefixItems"), list) and not isinstance(node.get("items"), list)
