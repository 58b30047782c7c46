"""A JSON schema as llguidance is given it, so that what it makes of it is what the schema says: where it would read a part otherwise, or
could not tell it in time, that part is written in another way."""

from __future__ import annotations

from collections.abc import Mapping

from .multiple_of import multiples_listed
from .number_bounds import clamped, copied, objects


def rewritten(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The same schema, as it is read."""
    return multiples_listed(clamped(_without_idle(schema)))


def _without_idle(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Without `additionalItems` where it says nothing, which is beside `prefixItems`: both together were read as neither."""
    if not any(map(_is_idle, objects(schema))):
        return schema
    made = copied(schema)
    for node in filter(_is_idle, objects(made)):
        del node["additionalItems"]
    return made


def _is_idle(node: Mapping[str, object]) -> bool:
    return "additionalItems" in node and isinstance(node.get("prefixItems"), list) and not isinstance(node.get("items"), list)
