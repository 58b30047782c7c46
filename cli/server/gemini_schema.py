"""Google's schemas (OpenAPI 3.0) as JSON schemas: types in capitals, `nullable`, bounds that are strings, as 64-bit integers are, and a
separate order of properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .problems import Problem

BOUNDS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
GOOGLE_ONLY = {"nullable", "propertyOrdering", "example"}  # fields that JSON schemas do not have
# Fields in snake case, which Google accepts too.
FIELD_NAMES = {"any_of": "anyOf", "property_ordering": "propertyOrdering", **{name[:3] + "_" + name[3:].lower(): name for name in BOUNDS}}
UNSPECIFIED_TYPE = "TYPE_UNSPECIFIED"


def schema_of(source: Any, where: str) -> dict[str, Any]:
    """The schema as a JSON schema. Raises Problem if it is not an object."""
    if not isinstance(source, Mapping):
        raise Problem(400, f"{where} has to be a schema, an object", param=where)
    fields = {FIELD_NAMES.get(name, name): value for name, value in source.items() if value is not None}
    schema = {name: _field_value(name, value, where) for name, value in fields.items()
              if name not in GOOGLE_ONLY and value != UNSPECIFIED_TYPE}
    if isinstance(order := fields.get("propertyOrdering"), list) and isinstance(properties := schema.get("properties"), dict):
        first = [name for name in order if isinstance(name, str) and name in properties]
        schema["properties"] = {name: properties[name] for name in dict.fromkeys([*first, *properties])}
    return _nullable(schema) if fields.get("nullable") is True else schema


def _field_value(name: str, value: Any, where: str) -> Any:
    """The value of a field in JSON schema's notation."""
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name in BOUNDS and isinstance(value, str) and value.isdecimal():
        return int(value)
    if name in ("items", "additionalProperties") and isinstance(value, Mapping):
        return schema_of(value, f"{where}.{name}")
    if name in ("properties", "$defs", "defs") and isinstance(value, Mapping):
        return {key: schema_of(inner, f"{where}.{name}.{key}") for key, inner in value.items()}
    if name in ("anyOf", "prefixItems") and isinstance(value, list):
        return [schema_of(inner, f"{where}.{name}[{index}]") for index, inner in enumerate(value)]
    return value


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, which also matches null."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    enum = {"enum": [*schema["enum"], None]} if isinstance(schema.get("enum"), list) else {}
    return {**schema, **({"type": [schema["type"], "null"]} if isinstance(schema.get("type"), str) else {}), **enum}
