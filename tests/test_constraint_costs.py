"""The cost of schemas and grammars: repetitions, definitions and rules that refer to each other, and what is too large."""

from __future__ import annotations

import json

import pytest
from test_constraint import engine, tokenizer

from effllm import UsageError
from effllm.runtime.constraints.constraint import (
    grammar_constraint,
    read_grammar_flag,
    read_schema_flag,
)
from effllm.runtime.constraints.multiple_of import MAX_LISTED_VALUES, list_multiples
from effllm.runtime.constraints.schema_cost import (
    MAX_PATTERNS,
    MAX_SCHEMA_DEPTH,
    max_patterns,
    max_remainders,
    schema_too_expensive,
    without_slow_keywords,
)
from effllm.runtime.constraints.schema_rewrites import rewritten

__all__ = ["engine", "tokenizer"]  # fixtures


@pytest.mark.parametrize("value", [1, 0.01, 2.5, 1_000_000, 65536, 0.00333, 60, 99_991])
def test_multiples_that_are_quick(value: float) -> None:
    assert read_schema_flag(json.dumps({"type": "number", "multipleOf": value, "minimum": 0})).grammar


@pytest.mark.parametrize("value", [999_910, 655_360, 10_000_000, 1e9, 5_000_000])
def test_zeros_at_the_end_of_a_multiple_are_no_help(value: float) -> None:
    """999,910 took a minute and a half and 670 MB, and 10**9 up to 7 s for each digit."""
    with pytest.raises(UsageError, match=f"multipleOf needs {value:.0f} remainders, more than the 100000 allowed") as refused:
        read_schema_flag(json.dumps({"type": "integer", "multipleOf": value, "minimum": 0}))
    assert "the type integer with a narrow range" in refused.value.hint
    assert without_slow_keywords(multiple(value)) == {"type": "integer"}


@pytest.mark.parametrize(("schema", "expected"), [
    ({"type": "integer", "multipleOf": 30030, "minimum": 0, "maximum": 100_000}, [0, 30030, 60060, 90090]),
    ({"type": "integer", "multipleOf": 10**9, "minimum": 0, "maximum": 10**9}, [0, 10**9]),
    ({"type": "integer", "multipleOf": -50_000, "exclusiveMinimum": -100_000, "exclusiveMaximum": 100_000}, [-50_000, 0, 50_000]),
    ({"type": "number", "multipleOf": 2.50125, "minimum": 0.1, "maximum": 10}, [2.50125, 5.0025, 7.50375]),
    ({"type": "integer", "multipleOf": 2.50125, "minimum": 1, "maximum": 6000}, [2001, 4002]),
    ({"type": "integer", "multipleOf": 30030, "minimum": 5, "exclusiveMinimum": 30030, "maximum": 70_000}, [60060]),
    ({"type": "integer", "multipleOf": 30030, "minimum": 5, "maximum": 30_000}, None),  # none
    ({"type": "integer", "multipleOf": 30030, "minimum": 0}, None),
    ({"type": "integer", "multipleOf": 30030, "minimum": 0, "maximum": 30030 * MAX_LISTED_VALUES}, None),  # too many
    ({"type": "integer", "multipleOf": 25_000, "minimum": 0, "maximum": 50_000}, None),  # told quickly enough
    ({"type": ["integer", "null"], "multipleOf": 30030, "minimum": 0, "maximum": 60_000}, [0, 30030, None]),
    ({"type": ["integer", "string"], "multipleOf": 30030, "minimum": 0, "maximum": 60_000}, None),
    ({"type": "integer", "multipleOf": 30030, "minimum": 0, "maximum": 9, "enum": [0]}, None),
    ({"type": "integer", "multipleOf": 30030, "exclusiveMinimum": True, "minimum": 0, "maximum": 100_000}, None),
    ({"type": "number", "multipleOf": 0.12345678901234567, "minimum": 0, "maximum": 5}, None)])  # no float64 is three of them
def test_multiples_of_which_bounds_leave_few_are_listed(schema: dict, expected: list[float] | None) -> None:
    """A number of five digits and bounds of nine ended answers with an error."""
    wanted = schema if expected is None else {"type": schema["type"], "enum": expected}
    assert list_multiples({"properties": {"x": [schema], "y": {"const": schema}}}) == {"properties": {
        "x": [wanted], "y": {"const": schema}}}


@pytest.mark.parametrize("schema", [
    {"type": "integer", "multipleOf": 10**400 + 7, "minimum": 0, "maximum": 3 * 10**400},
    {"type": "integer", "multipleOf": 2**50, "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "multipleOf": 2**50, "minimum": 0, "maximum": 2**64 - 1},
    {"allOf": [{"multipleOf": 10**3000 + 1}, {"multipleOf": 10**2999 + 7}]}])
def test_numbers_of_any_size_end_in_one_line(schema: dict) -> None:
    """They ended in tracebacks, of a float and of a text that is too long, or in a number that nobody wrote."""
    try:
        assert read_schema_flag(json.dumps({"properties": {"x": schema}})).grammar
    except UsageError as error:
        assert len(error.message) < 400 and "cannot be represented exactly" not in error.message
    assert isinstance(without_slow_keywords(rewritten(schema)), dict)


def test_what_is_listed_may_lie_deep() -> None:
    schema = leaf = {"type": "integer", "multipleOf": 30001, "minimum": 0, "maximum": 90003}
    for _ in range(2000):
        schema = {"type": "object", "properties": {"a": schema}}
    found = rewritten(schema)
    for _ in range(2000):
        found = found["properties"]["a"]
    assert found == {"type": "integer", "enum": [0, 30001, 60002, 90003]} and "enum" not in leaf


def test_what_is_listed_of_a_whole_schema_has_an_end() -> None:
    large = multiple(30030, minimum=30030, maximum=30030 * (MAX_LISTED_VALUES - 5))
    found = list_multiples({"items": [large, multiple(30030, minimum=30030, maximum=30030 * 5), dict(large)]})["items"]
    assert sorted(len(each.get("enum", ())) for each in found) == [0, 5, MAX_LISTED_VALUES - 5]


@pytest.mark.parametrize("bounds", [{"maximum": 10**12}, {"minimum": 12_345}, {"exclusiveMaximum": 7}, {"minimum": -(10**9)}])
def test_a_large_multiple_between_bounds_is_refused_before_an_answer(bounds: dict) -> None:
    for schema in (multiple(99_991, **bounds), {"properties": {"x": multiple(99_991)}, "allOf": [{"properties": {"x": bounds}}]}):
        with pytest.raises(UsageError, match="needs 99991 remainders, more than the 25000 allowed with bounds"):
            read_schema_flag(json.dumps(schema))
    assert read_schema_flag(json.dumps(multiple(24_999, **bounds))).grammar
    assert read_schema_flag(json.dumps(multiple(99_991, minimum=-5))).grammar
    assert read_schema_flag(json.dumps({"properties": {"x": multiple(99_991), "y": bounds}})).grammar, "of another number"


def test_a_tool_is_held_to_the_rest_of_its_schema() -> None:
    slow = {"type": "object", "properties": {"multipleOf": {"type": "integer", "multipleOf": 1000003}, "b": {"type": "string"}}}
    assert without_slow_keywords(slow) == {"type": "object", "properties": {"multipleOf": {"type": "integer"}, "b": {"type": "string"}}}
    assert without_slow_keywords({"multipleOf": 7}) == {"multipleOf": 7}


def test_what_is_no_number_has_no_multiples() -> None:
    assert max_remainders({"properties": {"multipleOf": {"multipleOf": 9}}, "multipleOf": True, "allOf": [5], "anyOf": "x"}) == 9
    assert max_remainders({"multipleOf": float("nan"), "allOf": [{"multipleOf": 0}, {"multipleOf": float("inf")}]}) == 1


REF = {"$ref": "#/$defs/a"}
OTHER = {"$ref": "#/$defs/b"}


def multiple(of: int, **more: object) -> dict:
    return {"type": "integer", "multipleOf": of, **more}


@pytest.mark.parametrize("schema", [
    multiple(1009, **REF), {"allOf": [REF, OTHER]}, {"anyOf": [multiple(1009), multiple(997)]}, {"oneOf": [multiple(1009), REF]},
    {"properties": {"x": multiple(1009)}, "allOf": [{"properties": {"x": REF}}]},
    {"properties": {"x": multiple(1009)}, "allOf": [{"additionalProperties": REF}]},
    {"properties": {"x": multiple(1009)}, "patternProperties": {"^x": REF}},
    {"items": multiple(1009), "allOf": [{"items": REF}]}, {"prefixItems": [multiple(1009)], "allOf": [{"items": REF}]},
    {"items": [multiple(1009)], "allOf": [{"prefixItems": [REF]}]}])
def test_multiples_that_meet_by_whatever_way_are_one(schema: dict) -> None:
    """1,006,009 remainders took 12 s and 700 MB, three of them minutes."""
    whole = schema | {"$defs": {"a": multiple(997), "b": {"allOf": [multiple(1009)]}}}
    assert max_remainders(whole) in (997 * 1009, 997 * 1009 + 997)  # others' own beside
    with pytest.raises(UsageError, match="needs 100(5973|6970) remainders"):
        read_schema_flag(json.dumps(whole))


def test_multiples_apart_are_a_sum() -> None:
    apart = {"properties": {"x": REF, "y": multiple(1009), "z": {"anyOf": [REF, {"type": "null"}]}, "items": {"items": REF}},
             "$defs": {"a": multiple(997)}}
    assert max_remainders(apart) == 997 + 1009 and read_schema_flag(json.dumps(apart)).grammar
    many = [99_907 + 2 * number for number in range(40) if (99_907 + 2 * number) % 5]
    with pytest.raises(UsageError, match=f"needs {sum(many)} remainders"):
        read_schema_flag(json.dumps({"properties": {f"x{number}": multiple(number) for number in many}}))


def kind(name: str, of: int) -> dict:
    return {"type": "object", "properties": {"kind": {"const": name}, "x": multiple(of)}, "required": ["kind", "x"]}


@pytest.mark.parametrize(("schema", "expected"), [
    ({"anyOf": [kind("a", 1009), kind("b", 997)]}, 1009 + 997),
    ({"oneOf": [kind("a", 1009), {"allOf": [kind("b", 997)]}, kind("c", 997)]}, 1009 + 997),
    ({"anyOf": [{"items": multiple(1009)}, {"items": multiple(997)}]}, 1009 + 997),
    ({"anyOf": [{"properties": {"deep": kind("a", 1009)}}, {"properties": {"deep": kind("b", 997)}}]}, 1009 + 997),
    ({"properties": {"x": multiple(3)}, "anyOf": [kind("a", 1009), kind("b", 997)]}, 3 * (1009 + 997)),
    ({"anyOf": [kind("a", 7), kind("b", 11)], "allOf": [{"anyOf": [kind("a", 13), kind("b", 17)]}]}, 7 * 13 + 7 * 17 + 11 * 13 + 11 * 17),
    ({"allOf": [kind("a", 7), {"anyOf": [kind("a", 11)] * 200}]}, 77)])
def test_multiples_of_alternative_objects_are_apart(schema: dict, expected: int) -> None:
    assert max_remainders(schema | {"title": {"multipleOf": 99_991}}) == expected  # what is no schema does not count
    assert read_schema_flag(json.dumps(schema)).grammar


def chain(links: int, link) -> dict:
    """So many definitions of which each names the next."""
    return {"$ref": "#/$defs/0", "$defs": {str(each): link({"$ref": f"#/$defs/{each + 1}"}) if each < links else {"type": "integer"}
                                           for each in range(links + 1)}}


@pytest.mark.parametrize("link", [lambda ref: ref, lambda ref: {"properties": {"x": ref}}, lambda ref: {"anyOf": [ref, {"type": "null"}]},
                                  lambda ref: {"items": ref}, lambda ref: {"additionalProperties": ref}, lambda ref: {"allOf": [ref]},
                                  lambda ref: {"properties": {"a": {"type": "null"}, "b": ref}}])
def test_definitions_that_name_one_another_have_an_end(link) -> None:
    """Of some hundreds in one another the library took the end of the program's stack for its own."""
    for links in (2000, 20_000):
        with pytest.raises(UsageError, match=f"schemas are nested more than {MAX_SCHEMA_DEPTH} deep"):
            read_schema_flag(json.dumps(chain(links, link)))
    assert read_schema_flag(json.dumps(chain(300, link))).grammar
    ring = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": REF, "y": OTHER}}, "b": {"items": [REF, OTHER, {"$ref": "#"}]}}}
    assert schema_too_expensive(ring) is None


def test_a_ring_of_definitions_is_as_deep_as_it_is_long() -> None:
    """Each is met once, in one another all the same."""
    def ring(links: int) -> dict:
        return {"$ref": "#/$defs/0", "$defs": {str(each): {"items": {"$ref": f"#/$defs/{(each + 1) % links}"}} for each in range(links)}}

    assert read_schema_flag(json.dumps(ring(300))).grammar
    for links in (MAX_SCHEMA_DEPTH // 2 + 1, 5000):  # a schema and its items, each
        with pytest.raises(UsageError, match=f"schemas are nested more than {MAX_SCHEMA_DEPTH} deep") as refused:
            read_schema_flag(json.dumps(ring(links)))
        assert "fewer of $defs" in refused.value.hint


def test_rules_in_larks_notation_have_an_end_too(tmp_path) -> None:
    own = tmp_path / "own.lark"
    for rule in ("r{0}", "R{0}"):
        rules = (f'{rule.format(each)}: "x" /[a-z]/ {rule.format(each + 1)} // as r{each}\n' for each in range(8000))
        own.write_text(f"start: {rule.format(0)}\n{''.join(rules)}{rule.format(8000)}: \"y\"")
        with pytest.raises(UsageError, match="rules are nested more than 500 deep"):
            read_grammar_flag(str(own))
    own.write_text("start: " + " | ".join(f"r{each}" for each in range(800)) + "\n" + "".join(
        f'r{each}: "r{each} : r{each + 1}" // r{each + 1}\n' for each in range(800)))
    assert read_grammar_flag(str(own)).grammar


def links(count: int, rule: str) -> str:
    """So many rules of which each names the next; `rule` has two places, for its own number and for that."""
    return "".join(f"{rule.format(each, each + 1)}\n" for each in range(count))


@pytest.mark.parametrize("text", [
    "start: r-0\n" + links(3000, 'r-{}: "x" r-{}') + 'r-3000: "y"',
    "start: r0\n" + links(400, "r{}: " + "(" * 20 + '"x" r{}' + ")?" * 20) + 'r400: "y"',
    "start: R0\n" + links(400, "R{}: " + "(" * 20 + '"x" R{}' + ' "q")' * 20) + 'R400: "y"',
    "start: r0\n" + links(3000, 'r{}: "x" r{}') + 'r3000: within\nwithin: %lark {\nstart: "x"\n}\n',
    'start: within\nwithin: %lark {\nstart: r0\n' + links(3000, 'r{}: "x" r{}') + 'r3000: "y"\n}\n'])
def test_rules_and_parentheses_by_whatever_way_have_an_end(text: str) -> None:
    """Each of these ended the program: rules that are named with a dash, with many parentheses, beside or in a grammar within."""
    with pytest.raises(UsageError, match="rules are nested more than 500 deep, or 1000 with parentheses"):
        grammar_constraint(text, "--grammar", "it")


@pytest.mark.parametrize(("text", "rule"), [
    ("start: start", "start"), ('start: "a" start', "start"), ('start: start "a" | ("b" start)+', "start"),
    ('start: "q" a\na: b\nb: "x" a', "b"),
    ('start: "a"\n  | b\nb: ("x" | "y") b{2,5}', "b"), ('start: a::0\na::_: "x" a::incr(_) %if lt(_, 5)', "a"),
    ('start: "a" [b] // b: "end"\nb: "b: \\" |" b', "b"), ('start: %lark {\nstart: within\nwithin: "a" within\n} | "b"', "within")])
def test_a_rule_in_larks_notation_that_no_text_ends_is_refused(text: str, rule: str) -> None:
    with pytest.raises(UsageError, match=f"the rule {rule} never ends:") as refused:
        grammar_constraint(text, "--grammar", "it")
    assert refused.value.hint == "add an alternative that does not recurse"


@pytest.mark.parametrize("text", [
    'start: "a" start?', 'start: ("a" start)*', 'start: "a" [start]', 'start: ["b"] "a" start~0..3', 'start: ("a" start){,3}', 'start:',
    'start: "a" start |', 'start: a\n%import common.INT\na: INT a | INT', 'start: "a"\nunused: unused "x"',
    "start: a\n!a: /[|]/i a\n\n | B\nB: ~/a/",
    'start: a::0\na::_: "x" a::incr(_) %if lt(_, 5)\n | ""', 'start: a -> one | "b" start -> more\na[max_tokens=5]: /.*/',
    "start: a # b: b\na: /x\ny/ | a",
    'start: %lark {\nstart: /}/ start | "{"\n} | "b" start', 'start: %json {"const": "} a: a"} | "b" start\n%ignore / +/',
    'start: "a".."c" start | "\\""'])
def test_grammars_in_larks_notation_that_end_are_taken(text: str) -> None:
    assert grammar_constraint(text, "--grammar", "it").grammar


@pytest.mark.parametrize(("text", "said"), [
    ("start: A\nA: /(a{97})*/ & /(a{101})*/ & /(a{103})*/", "repeat in 1009091 ways"),
    ("start: A\nA: ~(~B | ~C)\nB: (X)+\nC: /(?:[a-c]x{500})+/\nX: /a/~997", "repeat in 499497 ways"),
    ("start: A\nA: " + " & ".join(f"/.*a.{{{each}}}b.*/" for each in range(22)), "22 terminals must match at once"),
    ("start: A\nA: B & C\nB: /a/ & D & E\nC: ~(" + " | ".join(f"/{each}/" for each in range(14)) + ")\nD: /b/\nE: /c/",
     "17 terminals must match"),
    ("start: " + " | ".join(f'"w{each}"' for each in range(30_000)), "its rules have 30000 parts"),
    ("start: " + " | ".join(f"j{each}" for each in range(30)) + "".join(
        f'\nj{each}: %json {{"type": "integer", "multipleOf": {99_901 + 2 * each}}}' for each in range(30)), "in its schemas needs")])
def test_what_takes_a_grammar_minutes_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        grammar_constraint(text, "--grammar", "it")


def test_terminals_may_have_many_words_and_few_conditions() -> None:
    words = "start: WORD (\" \" WORD)*\nWORD: " + " | ".join(f'"w{each}"' for each in range(30_000))
    for text in (words, "start: A\nA: /(?:[a-z ]{1,40}\\.)+/ & ~/.*secret.*/ & /.{5,2000}/", "start: A\nA: /(?:" + "x" * 997 + ")*y/",
                 "start: A\nA: " + " | ".join(f"/{each}*/" for each in range(90))):
        assert grammar_constraint(text, "--grammar", "it").grammar


@pytest.mark.parametrize("text", [
    "", "\n", "start", "start:: a", "start: (", "start: " + "(" * 50_000, "start: " + "~" * 50_000 + "A\nA: /a/", 'start: "a', "start: /a",
    "start: %json {", "start: %lark {", "start: }", "start: a::", 'start: "a"{', 'start: "a"{,}', "start: %json " + "[" * 50_000,
    "a: b", "start: a\na: a a a | \nstart: b", 'start: "\\ud800"', "start: \x00", "start: /a{9,1}/", "start: /(a/", "start: %if",
    "%ignore", "%ignore a\na: a", "start: a-\na-: a-", "start: <[0-9]>"])
def test_what_is_no_grammar_is_one_line_or_none(text: str) -> None:
    """The reader here passes over what it does not understand: what is wrong says the library."""
    try:
        assert grammar_constraint(text, "--grammar", "it").grammar
    except UsageError as refused:
        assert "\n" not in refused.message and len(refused.message) < 400 and refused.hint


@pytest.mark.parametrize(("schema", "expected"), [(multiple(1_000_003), "needs 1000003 remainders"),
                                                  (chain(2000, lambda ref: {"items": ref}), "schemas are nested more than")])
def test_a_schema_within_a_grammar_is_judged_as_one(tmp_path, schema: dict, expected: str) -> None:
    (tmp_path / "own.lark").write_text('start: "so: " said\nsaid: %json ' + json.dumps(schema) + "\n")
    with pytest.raises(UsageError, match=expected):
        read_grammar_flag(str(tmp_path / "own.lark"))


@pytest.mark.parametrize("schema", [{"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, {"exclusiveMaximum": -9.3e18},
                                    {"allOf": [{"type": "integer", "minimum": -1e30}, {"properties": {"a": {"maximum": -1e19}}}]}])
def test_largest_numbers_below_those_of_64_bits_are_refused(schema: dict) -> None:
    with pytest.raises(UsageError, match="is below the 64-bit range"):
        read_schema_flag(json.dumps(schema))
    assert read_schema_flag(json.dumps({"type": "integer", "minimum": -(2**63) + 4096, "maximum": -(2**63) + 4096})).grammar


def test_names_that_are_many() -> None:
    """Each pattern of names is held against each other, and each name that may be left out is a way for all behind it."""
    many = {f"^p{number}x": {"type": "integer"} for number in range(120)}
    first, *rest = ({key: many[key]} for key in many)
    for whole in ({"patternProperties": many}, {"patternProperties": first, "allOf": [{"patternProperties": each} for each in rest]}):
        with pytest.raises(UsageError, match="120 patternProperties"):
            read_schema_flag(json.dumps(whole))
    assert read_schema_flag(json.dumps({"properties": {f"x{number}": {"patternProperties": first} for number in range(120)}})).grammar
    many = {f"x{number}": {"type": "integer"} for number in range(4100)}
    with pytest.raises(UsageError, match="an object has 4100 optional properties"):
        read_schema_flag(json.dumps({"properties": many}))
    assert read_schema_flag(json.dumps({"type": "object", "properties": many, "required": [*many][200:]})).grammar


@pytest.mark.parametrize("schema", [{"enum": [f"{number} and more of it" for number in range(120_000)]},
                                    {"allOf": [{"anyOf": [{"type": "object", "properties": {f"k{number}": {"const": each}}}
                                                          for each in range(3)]} for number in range(10)]}])
def test_what_is_too_large_is_told_to_be_made_smaller(schema: dict) -> None:
    with pytest.raises(UsageError) as refused:
        read_schema_flag(json.dumps(schema))
    assert "too " in refused.value.message and "make it smaller" in refused.value.hint


def test_texts_that_must_fit_many_patterns() -> None:
    """Each more takes twice the time."""
    many = [{"pattern": f"a.{{{number}}}b"} for number in range(1, 40)]
    for whole in ({"allOf": many}, {"pattern": "c", "$ref": "#/$defs/a", "$defs": {"a": {"allOf": many}}},
                  {"properties": {"x": {"allOf": many[:12]}}, "allOf": [{"properties": {"x": {"allOf": many[12:]}}}]}):
        with pytest.raises(UsageError, match="patterns must match at once"):
            read_schema_flag(json.dumps(whole))
        assert max_patterns(without_slow_keywords(whole)) == 0
    deep = chain(900, lambda ref: {**ref, "pattern": "a"})
    assert max_patterns(deep) > MAX_PATTERNS and max_patterns(without_slow_keywords(deep)) == 0
    assert max_patterns({"anyOf": many}) == 1 and read_schema_flag(json.dumps({"type": "string", "anyOf": many})).grammar
    apart = {f"x{number}": {"$ref": "#/$defs/a"} for number in range(40)}
    assert max_patterns({"properties": apart, "$defs": {"a": {"pattern": "b", "allOf": many[:2]}}}) == 3 <= MAX_PATTERNS
