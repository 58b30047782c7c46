"""Constraints on a request's answer, whatever a client calls them: OpenAI's `response_format`, llama.cpp's `grammar`, vLLM's
`structured_outputs` and the older `guided_json` and the like, SGLang's `regex` and `ebnf`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ... import EffllmError
from ...runtime.constraints.constraint import (
    ANY_OBJECT,
    Constraint,
    choice_constraint,
    grammar_constraint,
    regex_constraint,
    schema_constraint,
)
from ...runtime.tool_calls.schema import closed_schema
from .openai_requests import GenerationRequest
from .problems import LEAVE_ONE_OUT, Problem, problem_of

FORMAT, GRAMMAR, STRUCTURED = "response_format", "grammar", "structured_outputs"
THE_SCHEMA, THE_GRAMMAR, THE_REGEX, THE_CHOICES = "the schema", "the grammar", "the regular expression", "the choices"
DIRECT_FIELDS = {"json_schema": "json", GRAMMAR: GRAMMAR, "regex": "regex", "ebnf": GRAMMAR}  # field -> kind: llama.cpp's and SGLang's
IGNORED_FIELDS = ("whitespace_pattern", "disable_any_whitespace", "disable_fallback", "disable_additional_properties")  # vLLM's, ignored
VALUES = {"json": ("value",), "regex": ("value", "pattern"), GRAMMAR: (GRAMMAR, "value")}  # types that others have beside OpenAI's
KINDS = ("json", "json_object", "regex", "choice", GRAMMAR)  # of vLLM's fields


def requested_constraint(payload: GenerationRequest, default: Constraint | None) -> Constraint | None:
    """The constraint that a request asks for, else `default`, that of the command line. `{"type": "text"}` asks for none.

    Objects may only have the properties that a schema names, as in llama-server: schemas generated from classes do not forbid others, and
    small models invent them. Raises Problem that names the field.
    """
    requested = [*_requested(payload)]
    if len(requested) > 1:
        (first, *_), (second, *_) = requested[:2]
        raise Problem(400, f"{first} and {second} both constrain the answer", param=second, hint=LEAVE_ONE_OUT)
    if not requested:
        return None if payload.response_format is not None else default
    field, kind, value = requested[0]
    try:
        return _constraint(field, kind, value)
    except EffllmError as error:
        raise problem_of(error, field) from error


def _requested(payload: GenerationRequest) -> Iterator[tuple[str, str, Any]]:
    """(field, kind, value) of each constraint that a request asks for."""
    if payload.response_format is not None and (named := _parse_response_format(payload.response_format)) is not None:
        yield FORMAT, *named
    for field, kind in DIRECT_FIELDS.items():
        if (value := getattr(payload, field)) not in (None, ""):
            yield field, kind, value
    for key, value in (payload.structured_outputs or {}).items():
        if value not in (None, False, ""):
            if key in KINDS:
                yield f"{STRUCTURED}.{key}", key, value
            elif key not in IGNORED_FIELDS:
                raise Problem(400, f"{STRUCTURED}.{key} is not supported: {', '.join(KINDS)} are", param=f"{STRUCTURED}.{key}",
                              code="unsupported_parameter")
    for kind in KINDS:
        if (value := getattr(payload, f"guided_{kind}", None)) not in (None, ""):
            yield f"guided_{kind}", kind, value


def _parse_response_format(response_format: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Kind and value of a `response_format`; None if it asks for nothing."""
    kind = response_format.get("type")
    names = VALUES.get(kind, ()) if isinstance(kind, str) else ()
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema") or response_format.get("value")
        return ("json", schema) if schema else ("json_object", True)
    if (value := next((response_format[name] for name in names if response_format.get(name)), None)) is not None:
        return kind, value
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else response_format.get("schema")
        if not isinstance(schema, dict):
            raise Problem(400, f"{FORMAT}.json_schema.schema is missing", param=f"{FORMAT}.json_schema.schema")
        return "json", schema
    raise Problem(400, f"{FORMAT}.type has to be text, json_object or json_schema, not {kind!r:.40}", param=f"{FORMAT}.type")


def _constraint(field: str, kind: str, value: Any) -> Constraint:
    if kind == "json_object":
        return schema_constraint({"type": "object"}, field, ANY_OBJECT)
    if kind == "json":
        return schema_constraint(closed_schema(_schema(value, field)), field, THE_SCHEMA)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise Problem(400, f"{field} has to be a list of non-empty strings", param=field)
        return choice_constraint(value, field, THE_CHOICES)
    if not isinstance(value, str):
        raise Problem(400, f"{field} has to be a string", param=field)
    return regex_constraint(value, field, THE_REGEX) if kind == "regex" else grammar_constraint(value, field, THE_GRAMMAR)


def _schema(value: Any, field: str) -> Any:
    """A schema, which vLLM also accepts as a JSON string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Problem(400, f"{field} is not a JSON schema: its text is not JSON", param=field) from None
