"""Converts bare-text arguments by the types of the tool's schema.

A string stays as it is, digits or not; numbers, booleans, arrays and objects are parsed as JSON, or as Python literals, which some
templates write. Without a type, valid JSON is parsed and everything else is text.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from .cursor import Mismatch, parse_json

Tools = Mapping[str, Mapping[str, Any]]  # name of a function -> JSON schema of its arguments
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
_DEPTH = 8  # of references and alternatives within one another


def typed_argument(text: str, tools: Tools, name: str, key: str) -> Any:
    """The value of argument `key` of function `name`."""
    schema = tools.get(name, {})
    properties = schema.get("properties")
    kinds = kinds_of(properties.get(key) if isinstance(properties, Mapping) else None, schema)
    if kinds == {"string"}:
        return text
    try:
        value = parse_literal(text)
    except Mismatch:
        return text
    kind = _KINDS.get(type(value))
    fits = not kinds or kind in kinds or kind == "integer" and "number" in kinds or kind == "number" and "integer" in kinds
    return value if fits or "string" not in kinds else text


def parse_literal(text: str) -> Any:
    """Parse a JSON or Python literal. Raises Mismatch."""
    try:
        return parse_json(text)
    except Mismatch:
        try:
            value = ast.literal_eval(text.strip())
            return json.loads(json.dumps(value, allow_nan=False))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise Mismatch from None


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema allows; empty if it states none."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return set()
    stated = schema.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {kind for kind in stated if isinstance(kind, str)}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        return kinds_of(found, root, depth + 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    kinds = {_KINDS.get(type(value), "object") for value in values}
    for word in ("anyOf", "oneOf", "allOf"):
        for each in schema[word] if isinstance(schema.get(word), list) else ():
            kinds |= kinds_of(each, root, depth + 1)
    return kinds


_WITHIN = ("properties", "$defs", "definitions", "patternProperties")  # schemas by name
_AMONG = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties", "contains")  # a schema, or a list of them
_OPEN = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "$ref", "allOf", "if"})


def closed_schema(schema: Any) -> Any:
    """The schema with `additionalProperties: false` where it says nothing about them: functions take no unknown arguments, and a model
    that may name any invents some. Combined schemas stay as they are."""
    if isinstance(schema, list):
        return [closed_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in _WITHIN:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: closed_schema(each) for name, each in made[key].items()}
    for key in _AMONG:
        if key in made:
            made[key] = closed_schema(made[key])
    if isinstance(made.get("properties"), Mapping) and _OPEN.isdisjoint(made):
        made["additionalProperties"] = False
    return made
