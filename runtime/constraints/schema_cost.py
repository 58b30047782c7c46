"""Limits on JSON schemas that are too expensive for llguidance to compile, where it has no limit of its own.

A schema is judged from its text, before compiling it takes minutes, gigabytes or the program's stack. The expensive parts:

- `multipleOf` (multiple_of.py): multiples are recognised digit by digit through remainders, one state each; where two apply to one value,
  as in allOf or anyOf, there is one state per pair.
- Patterns: each further one doubles the time to find out whether any text matches all of them; patterns of property names are checked
  against one another.
- Nesting: the library recurses on the program's stack, and an overflow kills the process.

Costs of plain grammars are in grammar_cost.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar
from urllib.parse import unquote

from .grammar_cost import rules_too_expensive
from .lark_notation import parse_rules
from .multiple_of import MAX_BOUNDED_REMAINDERS, MAX_REMAINDERS, MULTIPLE, are_bounded, is_number, num_states, remainders
from .number_bounds import inexact_number

SMALLER_MULTIPLES = "leave it out, use a smaller one, or the type integer with a narrow range"
MAX_SHOWN_COUNT = 10**18  # larger counts are not printed: Python refuses to convert thousands of digits
PATTERN, MAX_PATTERNS = "pattern", 16  # that one string must match: 20 take a second, 24 half a minute
MAX_PATTERN_PROPERTIES = 100  # of one object: the cost is quadratic, 400 take 22 s
MAX_OPTIONAL_PROPERTIES = 4000  # of one object: these take a second, and the cost is quadratic
MAX_SCHEMA_DEPTH = 1000  # an 8 MB stack overflows at 1,800
MIN_UPPER_BOUND = -(2**63) + 1024  # integers whose bounds are both below the 64-bit range overflow the stack
MAX_SEARCH_STEPS = 150_000  # of `_schemas_by_value`, half a second; beyond, all multiples are combined and other costs are per schema
MAX_CHOICES = 100  # among the alternatives of one value that are judged separately; beyond, alternatives are combined
# JSON Schema keywords, by what their value is
ALTERNATIVES = ("anyOf", "oneOf")
COMBINING_KEYWORDS = ("allOf", *ALTERNATIVES)
LIST_KEYWORDS = (*COMBINING_KEYWORDS, "prefixItems", "items")  # a list of schemas
SCHEMA_KEYWORDS = ("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
                   "propertyNames", "not", "if", "then", "else")  # one schema
MAP_KEYWORDS = ("properties", "patternProperties", "dependentSchemas")  # schemas by name
Node = TypeVar("Node")


def too_expensive(grammar: str) -> tuple[str, str] | None:
    """(reason, hint) why a grammar in llguidance's format is too expensive; None if it is not."""
    for part in _parts(grammar):
        reason = schema_too_expensive(part.get("json_schema")) or _lark_too_expensive(str(part.get("lark_grammar") or ""))
        if reason is not None:
            return reason
    return None


def _parts(grammar: str) -> list[dict[str, object]]:
    """The grammars within a grammar in llguidance's JSON format; any other text is one Lark grammar."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    try:
        return [part for part in _list(json.loads(grammar), "grammars") if isinstance(part, dict)]
    except RecursionError:  # the library refuses that too
        return []
    except ValueError:
        return [{"lark_grammar": grammar}]


def _lark_too_expensive(text: str) -> tuple[str, str] | None:
    rules = parse_rules(text)
    schemas = [token.value for rule in rules.values() for token in rule.tokens if token.text == "%json"]
    for schema in schemas:
        if (reason := schema_too_expensive(schema)) is not None:
            return reason
    if (count := sum({max_remainders(schema) for schema in schemas})) > MAX_REMAINDERS:
        return f"multipleOf in its schemas needs {_shown(count)} remainders, more than the {MAX_REMAINDERS} allowed", SMALLER_MULTIPLES
    return rules_too_expensive(rules)


def schema_too_expensive(schema: object) -> tuple[str, str] | None:
    """(reason, hint) why a schema is too expensive; None if it is not."""
    if _is_deep(schema):
        return f"schemas are nested more than {MAX_SCHEMA_DEPTH} deep", "make fewer of $defs refer to one another"
    if (bound := next(_bounds_below_64_bits(schema), None)) is not None:
        return f"the upper bound {bound} is below the 64-bit range", "leave it out, or use a larger one"
    if (number := inexact_number(schema)) is not None:
        return f"{number} cannot be represented exactly", "make it a string, or allow any number there"
    if (reason := _multiples_too_expensive(schema)) is not None:
        return reason, SMALLER_MULTIPLES
    if (patterns := max_patterns(schema)) > MAX_PATTERNS:
        return f"{patterns} patterns must match at once, more than the {MAX_PATTERNS} allowed", "combine them into fewer patterns"
    limit = MAX_PATTERN_PROPERTIES
    if (keys := _max_per_value(schema, lambda node: len(_dict(node, "patternProperties")), limit)) > limit:
        return f"an object has {keys} patternProperties, more than the {limit} allowed", "combine them into fewer patterns"
    limit = MAX_OPTIONAL_PROPERTIES
    if (optional := _max_per_value(schema, _num_optional, limit)) > limit:
        return f"an object has {optional} optional properties, more than the {limit} allowed", "make more of them required"
    return None


def without_slow_keywords(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema without multipleOf or patterns if these are too expensive, for constraints that are best effort."""
    if _is_deep(schema):  # `schema_too_expensive` refuses it
        return schema
    slow = {MULTIPLE} if _multiples_too_expensive(schema) else set()
    slow |= {PATTERN} if max_patterns(schema) > MAX_PATTERNS else set()
    if not slow:
        return schema
    return json.loads(json.dumps(schema), object_hook=lambda part: {
        key: each for key, each in part.items() if key not in slow or isinstance(each, dict)})


def _multiples_too_expensive(schema: object) -> str | None:
    if (count := max_remainders(schema)) > MAX_REMAINDERS:
        return f"multipleOf needs {_shown(count)} remainders, more than the {MAX_REMAINDERS} allowed"
    if remainders(_multiples(_all_objects(schema))) <= MAX_BOUNDED_REMAINDERS:
        return None
    bounded = [schemas for schemas in _schemas_by_value(schema) or [[*_all_objects(schema)]] if are_bounded(schemas)]
    if (count := max((remainders(_multiples(schemas)) for schemas in bounded), default=0)) > MAX_BOUNDED_REMAINDERS:
        return f"multipleOf needs {_shown(count)} remainders, more than the {MAX_BOUNDED_REMAINDERS} allowed with bounds"
    return None


def _shown(count: int) -> str:
    return str(count) if count < MAX_SHOWN_COUNT else "10^18 and more"


def max_remainders(schema: object) -> int:
    """Remainder states that the multiples in a schema need.

    Multiples that apply to the same value (allOf, anyOf, oneOf, $ref and siblings) combine: their states multiply. Powers of ten are free,
    but not powers of two or five alone: 2**24 took minutes."""
    multiples = _multiples(_all_objects(schema))
    product = remainders(multiples)
    if product <= MAX_REMAINDERS and sum({remainders([multiple]) for multiple in multiples}) <= MAX_REMAINDERS:
        # no combination can exceed the limit: the search is not worth its time
        return num_states(product)
    by_value = _schemas_by_value(schema)
    if by_value is None:
        return product
    return sum({num_states(remainders(_multiples(schemas))) for schemas in by_value} - {1}) or 1


def _multiples(schemas: Iterable[dict]) -> list[float]:
    return [node[MULTIPLE] for node in schemas if is_number(node.get(MULTIPLE)) and node[MULTIPLE]]


def max_patterns(schema: object) -> int:
    """The largest number of patterns that one string must match."""
    total = sum(isinstance(node.get(PATTERN), str) for node in _all_objects(schema))
    if total <= MAX_PATTERNS:
        return total
    by_value = _schemas_by_value(schema) or ([node] for node in _all_objects(schema))
    return max((_num_patterns_at_once(schemas, schema) for schemas in by_value), default=0)


def _bounds_below_64_bits(schema: object) -> Iterator[float]:
    for node in _all_objects(schema):
        for value in (node.get("maximum"), node.get("exclusiveMaximum")):
            if isinstance(value, int | float) and not isinstance(value, bool) and value < MIN_UPPER_BOUND:
                yield value


def _num_optional(node: dict) -> int:
    return len(_dict(node, "properties")) - len(_list(node, "required"))


def _max_per_value(schema: object, count: Callable[[dict], int], limit: int) -> int:
    """The largest sum of `count` over the schemas that apply to one value. Up to `limit` it is only an upper bound."""
    total = sum(max(0, count(node)) for node in _all_objects(schema))
    if total <= limit:
        return total
    by_value = _schemas_by_value(schema) or ([node] for node in _all_objects(schema))
    return max((sum(max(0, count(node)) for node in schemas) for schemas in by_value), default=0)


def _num_patterns_at_once(schemas: list[dict], root: object) -> int:
    """The number of patterns that are matched together for one value: of alternatives only the largest counts."""
    counted: dict[int, int] = {}

    def count(node: object) -> int:
        if not isinstance(node, dict) or id(node) in counted:
            return 0
        counted[id(node)] = 0  # a schema that refers to itself, or is referred to twice, counts once
        alternatives = [part for key in ALTERNATIVES for part in [_list(node, key)] if part]
        return (isinstance(node.get(PATTERN), str) + sum(map(count, _list(node, "allOf"))) + count(_ref_target(node, root))
                + sum(max(map(count, part)) for part in alternatives))

    nested = {id(part) for node in schemas for key in COMBINING_KEYWORDS for part in _list(node, key)}
    nested |= {id(_ref_target(node, root)) for node in schemas}
    try:
        return sum(count(node) for node in schemas if id(node) not in nested)
    except RecursionError:  # hundreds of nested schemas
        return sum(isinstance(node.get(PATTERN), str) for node in schemas)


def _schemas_by_value(schema: object) -> list[list[dict]] | None:
    """For each value that the schema describes, all schemas that apply to it; None if that takes too long to find."""
    result, pending, seen, steps = [], [[schema]], set(), 0
    while pending:
        group = pending.pop()
        key = frozenset(map(id, group))
        if key in seen:
            continue
        seen.add(key)
        schemas, unread, ids = [], [*group], set()
        while unread:
            steps += 1
            node = unread.pop()
            if isinstance(node, dict) and id(node) not in ids:
                ids.add(id(node))
                schemas.append(node)
                unread += [each for key in COMBINING_KEYWORDS for each in _list(node, key)]
                unread.append(_ref_target(node, schema))
        result.append(schemas)
        for choices in _alternative_choices(group, schema) or [schemas]:
            for subvalue in _subvalues(choices):
                steps += len(subvalue)
                if steps > MAX_SEARCH_STEPS:
                    return None
                pending.append(subvalue)
    return result


def _alternative_choices(group: list[object], root: object) -> list[list[dict]]:
    """The schemas that a value must match, for every choice among alternatives, since parts of different alternatives are not matched
    together. Empty if there are too many choices."""
    result: list[list[dict]] = []
    pending: list[tuple[list[dict], list[object], list[list[object]]]] = [([], group, [])]
    while pending:  # (schemas that apply, schemas still to be read, lists of alternatives still to be chosen from)
        if len(pending) + len(result) > MAX_CHOICES:
            return []
        schemas, unread, choices = ([*each] for each in pending.pop())
        ids = set(map(id, schemas))
        while unread:
            node = unread.pop()
            if isinstance(node, dict) and id(node) not in ids:
                ids.add(id(node))
                schemas.append(node)
                unread += [*_list(node, "allOf"), _ref_target(node, root)]
                choices += [each for key in ALTERNATIVES for each in [_list(node, key)] if each]
        if choices:
            pending += [(schemas, [each], choices[:-1]) for each in choices[-1]]
        else:
            result.append(schemas)
    return result


def _subvalues(schemas: list[dict]) -> Iterator[list[object]]:
    """For each property, for all other properties, and for each item: the subschemas that apply to it."""
    properties, by_pattern = ([_dict(node, key) for node in schemas] for key in MAP_KEYWORDS[:2])
    additional = [node.get("additionalProperties") for node in schemas]
    by_any_pattern = [each for named in by_pattern for each in named.values()]
    for name in dict.fromkeys(name for named in properties for name in named):
        yield [named.get(name, other) for named, other in zip(properties, additional, strict=True)] + by_any_pattern
    yield additional + by_any_pattern
    prefixes = [_list(node, "prefixItems") or _list(node, "items") for node in schemas]
    remaining = [node.get("additionalItems" if isinstance(node.get("items"), list) else "items") for node in schemas]
    for index in range(max(map(len, prefixes), default=0)):
        yield [named[index] if index < len(named) else other for named, other in zip(prefixes, remaining, strict=True)]
    yield remaining


def _deepest(start: Node, children: Callable[[Node], Iterable[Node]], key: Callable[[Node], Hashable], limit: int) -> int:
    """The nesting depth of a graph; the search ends above `limit`. Each node is visited once, in both orders of its children."""
    deepest = 0
    for step in (1, -1):
        seen, pending = set(), [(start, 1)]
        while pending:
            node, depth = pending.pop()
            if key(node) in seen:
                continue
            seen.add(key(node))
            deepest = max(deepest, depth)
            if deepest > limit:
                return deepest
            pending += [(child, depth + 1) for child in [*children(node)][::step]]
    return deepest


def _is_deep(schema: object) -> bool:
    def children(node: object) -> list[dict]:
        return [each for each in _subschemas(node, schema) if isinstance(each, dict)]

    return _deepest(schema, children, id, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH


def _subschemas(node: object, root: object) -> Iterator[object]:
    """Direct subschemas."""
    if not isinstance(node, dict):
        return
    for key in LIST_KEYWORDS:
        yield from _list(node, key)
    for key in SCHEMA_KEYWORDS:
        yield node.get(key)
    for key in MAP_KEYWORDS:
        yield from _dict(node, key).values()
    yield _ref_target(node, root)


def _ref_target(node: dict, root: object) -> object:
    """The target of a local $ref; None if there is none."""
    reference = node.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        else:
            target = target.get(step) if isinstance(target, dict) else None
    return target


def _all_objects(schema: object) -> Iterator[dict]:
    """All objects in it, whether schemas or not."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
        pending += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _list(node: dict, key: str) -> list[object]:
    return found if isinstance(found := node.get(key), list) else []


def _dict(node: dict, key: str) -> dict[str, object]:
    return found if isinstance(found := node.get(key), dict) else {}
