"""What a constraint costs to prepare where llguidance has no limit of its own, judged from its text before a minute, a gigabyte or the
program's stack is spent.

`multipleOf` (multiple_of.py): multiples are recognised digit by digit through remainders, one state each; where two must hold at once, or
either may, one state for each pair. Patterns: whether any text matches all of them takes twice the time with each more, and patterns of
property names are checked against one another. Nesting: the library recurses on the program's stack, and an overflow kills the process.
Costs of plain grammars are in grammar_cost.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar
from urllib.parse import unquote

from .grammar_cost import too_much_of_rules
from .lark_notation import rules_of
from .multiple_of import MOST_BOUNDED, MOST_REMAINDERS, MULTIPLE, are_bounded, is_number, remainders, states_of
from .number_bounds import inexact_number

SMALLER_MULTIPLES = "leave it out, use a smaller one, or the type integer with a narrow range"
MOST_SHOWN = 10**18  # of a count; Python writes none of thousands of digits
PATTERN, MOST_PATTERNS = "pattern", 16  # 20 take a second, 24 half a minute
MOST_KEYS = 100  # patternProperties of one object, each held against each other: 400 take 22 s
MOST_OPTIONAL = 4000  # properties that may be left out: a second, and four times that for twice as many
MOST_NODES = 1000  # schemas in one another: the 8 MB of a stack end at 1,800
LEAST_INTEGER = -(2**63) + 1024  # whole numbers between two bounds that both are below what 64 bits hold take the whole stack
MOST_STEPS = 150_000  # in looking for what a value must fit, half a second; beyond, numbers are taken together, all else apart
MOST_WAYS = 100  # of choosing among alternatives that are told apart; beyond, they are taken together
ALTERNATIVES = ("anyOf", "oneOf")
JOINING = ("allOf", *ALTERNATIVES)
LISTS = (*JOINING, "prefixItems", "items")
SINGLE = ("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains", "propertyNames",
          "not", "if", "then", "else")
NAMED = ("properties", "patternProperties", "dependentSchemas")
Node = TypeVar("Node")


def too_expensive(grammar: str) -> tuple[str, str] | None:
    """(what of a grammar is too expensive, hint), None if nothing is. `grammar` is in llguidance's format."""
    for part in _parts(grammar):
        found = schema_too_expensive(part.get("json_schema")) or _too_much_of_lark(str(part.get("lark_grammar") or ""))
        if found is not None:
            return found
    return None


def _parts(grammar: str) -> list[dict[str, object]]:
    """What is not JSON is plain Lark."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    try:
        return [each for each in _list(json.loads(grammar), "grammars") if isinstance(each, dict)]
    except RecursionError:  # the library refuses that too
        return []
    except ValueError:
        return [{"lark_grammar": grammar}]


def _too_much_of_lark(text: str) -> tuple[str, str] | None:
    rules = rules_of(text)
    schemas = [token.value for rule in rules.values() for token in rule.tokens if token.text == "%json"]
    for schema in schemas:
        if (said := schema_too_expensive(schema)) is not None:
            return said
    if (count := sum({most_remainders(schema) for schema in schemas})) > MOST_REMAINDERS:
        return f"multipleOf in its schemas needs {_shown(count)} remainders, more than the {MOST_REMAINDERS} allowed", SMALLER_MULTIPLES
    return too_much_of_rules(rules)


def schema_too_expensive(schema: object) -> tuple[str, str] | None:
    """As `too_expensive`, for one schema."""
    if _is_deep(schema):
        return f"schemas are nested more than {MOST_NODES} deep", "make fewer of $defs refer to one another"
    if (bound := next(_too_low(schema), None)) is not None:
        return f"the upper bound {bound} is below the 64-bit range", "leave it out, or use a larger one"
    if (named := inexact_number(schema)) is not None:
        return f"{named} cannot be represented exactly", "make it a string, or allow any number there"
    if (said := _too_much_of_multiples(schema)) is not None:
        return said, SMALLER_MULTIPLES
    if (patterns := most_patterns(schema)) > MOST_PATTERNS:
        return f"{patterns} patterns must match at once, more than the {MOST_PATTERNS} allowed", "combine them into fewer patterns"
    if (keys := _most(schema, lambda node: len(_dict(node, "patternProperties")), MOST_KEYS)) > MOST_KEYS:
        return f"an object has {keys} patternProperties, more than the {MOST_KEYS} allowed", "combine them into fewer patterns"
    if (optional := _most(schema, _optional, MOST_OPTIONAL)) > MOST_OPTIONAL:
        return f"an object has {optional} optional properties, more than the {MOST_OPTIONAL} allowed", "make more of them required"
    return None


def without_slow(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema without the number and string keywords that are too expensive, for constraints that are best effort."""
    if _is_deep(schema):  # which is refused
        return schema
    slow = {MULTIPLE} if _too_much_of_multiples(schema) else set()
    slow |= {PATTERN} if most_patterns(schema) > MOST_PATTERNS else set()
    if not slow:
        return schema
    return json.loads(json.dumps(schema), object_hook=lambda part: {
        key: each for key, each in part.items() if key not in slow or isinstance(each, dict)})


def _too_much_of_multiples(schema: object) -> str | None:
    if (count := most_remainders(schema)) > MOST_REMAINDERS:
        return f"multipleOf needs {_shown(count)} remainders, more than the {MOST_REMAINDERS} allowed"
    if remainders(_multiples(_dicts(schema))) <= MOST_BOUNDED:
        return None
    bounded = [said for said in _places(schema) or [[*_dicts(schema)]] if are_bounded(said)]
    if (count := max((remainders(_multiples(said)) for said in bounded), default=0)) > MOST_BOUNDED:
        return f"multipleOf needs {_shown(count)} remainders, more than the {MOST_BOUNDED} allowed with bounds"
    return None


def _shown(count: int) -> str:
    return str(count) if count < MOST_SHOWN else "10^18 and more"


def most_remainders(schema: object) -> int:
    """The largest product of remainder states over the places of a value. Powers of ten are free (but not powers of two or five alone:
    2**24 took minutes); what is combined at one place (allOf, anyOf, oneOf, $ref and siblings) multiplies."""
    every = _multiples(_dicts(schema))
    whole = remainders(every)
    if whole <= MOST_REMAINDERS and sum({remainders([each]) for each in every}) <= MOST_REMAINDERS:  # nothing that can come is more
        return states_of(whole)
    places = _places(schema)
    if places is None:
        return whole
    return sum({states_of(remainders(_multiples(said))) for said in places} - {1}) or 1


def _multiples(said: Iterable[dict]) -> list[float]:
    return [node[MULTIPLE] for node in said if is_number(node.get(MULTIPLE)) and node[MULTIPLE]]


def most_patterns(schema: object) -> int:
    """The most patterns that one string must match."""
    every = sum(isinstance(node.get(PATTERN), str) for node in _dicts(schema))
    if every <= MOST_PATTERNS:
        return every
    places = _places(schema) or ([node] for node in _dicts(schema))
    return max((_at_once(said, schema) for said in places), default=0)


def _too_low(schema: object) -> Iterator[float]:
    for node in _dicts(schema):
        for value in (node.get("maximum"), node.get("exclusiveMaximum")):
            if isinstance(value, int | float) and not isinstance(value, bool) and value < LEAST_INTEGER:
                yield value


def _optional(node: dict) -> int:
    return len(_dict(node, "properties")) - len(_list(node, "required"))


def _most(schema: object, count: Callable[[dict], int], most: int) -> int:
    """The largest count over the schemas of one place; beyond `most` the exact number does not matter."""
    every = sum(max(0, count(node)) for node in _dicts(schema))
    if every <= most:
        return every
    places = _places(schema) or ([node] for node in _dicts(schema))
    return max((sum(max(0, count(node)) for node in said) for said in places), default=0)


def _at_once(said: list[dict], root: object) -> int:
    """The schemas of one place that are matched together, alternatives apart."""
    counted: dict[int, int] = {}

    def count(node: object) -> int:
        if not isinstance(node, dict) or id(node) in counted:
            return 0
        counted[id(node)] = 0  # one that names itself, or that is named twice
        others = [each for key in ALTERNATIVES for each in [_list(node, key)] if each]
        return (isinstance(node.get(PATTERN), str) + sum(map(count, _list(node, "allOf"))) + count(_target(node, root))
                + sum(max(map(count, each)) for each in others))

    inner = {id(each) for node in said for key in JOINING for each in _list(node, key)} | {id(_target(node, root)) for node in said}
    try:
        return sum(count(node) for node in said if id(node) not in inner)
    except RecursionError:  # hundreds in one another
        return sum(isinstance(node.get(PATTERN), str) for node in said)


def _places(schema: object) -> list[list[dict]] | None:
    """For each place of a value, the schemas that apply; None if that takes too long to find."""
    found, left, met, steps = [], [[schema]], set(), 0
    while left:
        group = left.pop()
        key = frozenset(map(id, group))
        if key in met:
            continue
        met.add(key)
        said, open_, here = [], [*group], set()
        while open_:
            steps += 1
            node = open_.pop()
            if isinstance(node, dict) and id(node) not in here:
                here.add(id(node))
                said.append(node)
                open_ += [each for key in JOINING for each in _list(node, key)]
                open_.append(_target(node, schema))
        found.append(said)
        for ways in _ways(group, schema) or [said]:
            for inner in _inner(ways):
                steps += len(inner)
                if steps > MOST_STEPS:
                    return None
                left.append(inner)
    return found


def _ways(group: list[object], root: object) -> list[list[dict]]:
    """The schemas that a value must match, once per choice among alternatives, because parts of different alternatives are not matched
    together. Empty if there are too many choices."""
    made: list[list[dict]] = []
    left: list[tuple[list[dict], list[object], list[list[object]]]] = [([], group, [])]
    while left:  # each with what is said, what is to be read, and the choices that are to be made
        if len(left) + len(made) > MOST_WAYS:
            return []
        said, open_, choices = ([*each] for each in left.pop())
        here = set(map(id, said))
        while open_:
            node = open_.pop()
            if isinstance(node, dict) and id(node) not in here:
                here.add(id(node))
                said.append(node)
                open_ += [*_list(node, "allOf"), _target(node, root)]
                choices += [each for key in ALTERNATIVES for each in [_list(node, key)] if each]
        if choices:
            left += [(said, [each], choices[:-1]) for each in choices[-1]]
        else:
            made.append(said)
    return made


def _inner(said: list[dict]) -> Iterator[list[object]]:
    """The subschemas of each property, of other properties, of each item."""
    own, by_pattern = ([_dict(node, key) for node in said] for key in NAMED[:2])
    others = [node.get("additionalProperties") for node in said]
    patterned = [each for mine in by_pattern for each in mine.values()]
    for name in dict.fromkeys(name for mine in own for name in mine):
        yield [mine.get(name, other) for mine, other in zip(own, others, strict=True)] + patterned
    yield others + patterned
    first = [_list(node, "prefixItems") or _list(node, "items") for node in said]
    rest = [node.get("additionalItems" if isinstance(node.get("items"), list) else "items") for node in said]
    for place in range(max(map(len, first), default=0)):
        yield [mine[place] if place < len(mine) else other for mine, other in zip(first, rest, strict=True)]
    yield rest


def _deepest(start: Node, within: Callable[[Node], Iterable[Node]], key: Callable[[Node], Hashable], most: int) -> int:
    """The nesting depth, each node visited once, in both orders; stops above `most`."""
    deepest = 0
    for step in (1, -1):
        met, left = set(), [(start, 1)]
        while left:
            node, depth = left.pop()
            if key(node) in met:
                continue
            met.add(key(node))
            deepest = max(deepest, depth)
            if deepest > most:
                return deepest
            left += [(each, depth + 1) for each in [*within(node)][::step]]
    return deepest


def _is_deep(schema: object) -> bool:
    return _deepest(schema, lambda node: [each for each in _within(node, schema) if isinstance(each, dict)], id, MOST_NODES) > MOST_NODES


def _within(node: object, root: object) -> Iterator[object]:
    """Direct subschemas."""
    if not isinstance(node, dict):
        return
    for key in LISTS:
        yield from _list(node, key)
    for key in SINGLE:
        yield node.get(key)
    for key in NAMED:
        yield from _dict(node, key).values()
    yield _target(node, root)


def _target(node: dict, root: object) -> object:
    """The target of a local $ref; None if there is none."""
    reference = node.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found


def _dicts(schema: object) -> Iterator[dict]:
    """All objects in it, whether schemas or not."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _list(node: dict, key: str) -> list[object]:
    return found if isinstance(found := node.get(key), list) else []


def _dict(node: dict, key: str) -> dict[str, object]:
    return found if isinstance(found := node.get(key), dict) else {}
