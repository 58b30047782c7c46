"""What is wrong with a schema or a grammar is one line, what helps is in its hint; what programs put around a schema is left out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from effllm import EffllmError, UsageError
from effllm.runtime.forms.bounds import FURTHEST, within_reach
from effllm.runtime.forms.constraint import (
    form_of,
    form_of_choices,
    form_of_grammar,
    form_of_regex,
    form_of_schema,
    grammar_form,
    schema_form,
)
from effllm.runtime.forms.schema_cost import MOST_NODES, MOST_PATTERNS, most_patterns, most_remainders, too_much_of_schema, without_slow

sys.path.insert(0, str(Path(__file__).parent))
from test_constraint import FOX, PERSON, engine, narrowed, tokenizer

__all__ = ["engine", "tokenizer"]  # fixtures

@pytest.mark.parametrize(("schema", "grammar", "expected"), [
    ('{"type": "objekt"}', None, "--schema: the schema: Invalid type: objekt"),
    ('{"not": {}}', None, 'Unimplemented keys: ["not"]'),
    ('{"enum": [1, {"id": 123456789012345678}]}', None, "123456789012345678 is not told from the numbers"),
    ('{"const": -9223372036854775808}', None, "-9223372036854775808 is not told from"),
    ('{"properties": {"a": {"enum": [[9223372036854775808]]}}}', None, "9223372036854775808 is not told from"),
    ("{bad", None, "is not JSON"),
    ('{"type": "integer", "multipleOf": 1000003}', None, "multipleOf takes 1000003 remainders"),
    ('{"type": "number", "multipleOf": 24414062.5}', None, "multipleOf takes 244140625 remainders"),
    ('{"type": "integer", "multipleOf": 16777216000}', None, "multipleOf takes 16777216 remainders"),
    ('{"items": {"multipleOf": 7, "allOf": [{"multipleOf": 211}, {"anyOf": [{"multipleOf": 227}]}]}}', None, "takes 335279 remainders"),
    ("nowhere.json", None, "cannot read nowhere.json: No such file"),
    ("~nobody-of-this-name/x.json", None, "cannot read ~nobody-of-this-name/x.json: No such file"),
    (None, "nowhere.gbnf", "cannot read nowhere.gbnf: No such file"),
    (None, "root ::= foo", "names foo, which is not a rule"),
    (None, 'root ::= "a', "--grammar: the grammar: "),
    ("json", 'root ::= "a"', "both say what the answer is"),
    ('{"$ref": "http://localhost/x"}', None, "--schema: the schema: $ref names http://localhost/x, which is not in it"),
    ('{"$ref": "other.json"}', None, "$ref names other.json, which is not in it"),
    ('{"items": {"$ref": "#/$defs/a"}}', None, "$ref names #/$defs/a, which is not in it"),
    ('{"$ref": "#a"}', None, "$ref names #a, which is not in it"),
    ('{"type": "string", "pattern": "(?=a)b"}', None, "look-around"),
    ('{"a":' * 5000 + "1" + "}" * 5000, None, "--schema: the schema"),
    ('{"enum": ["\\ud800"]}', None, "--schema: the schema: "),
    ('{"const": 100000000000000000000000}', None, "--schema: the schema: "),
    ('{"typ": "object"}', None, "'typ' is not a keyword"),
    ('{"name": "x", "parameters": {"type": "object"}}', None, "'name' is not a keyword"),
])
def test_a_form_that_cannot_be_is_one_line(schema, grammar, expected):
    with pytest.raises(UsageError) as refused:
        form_of(schema, grammar)
    assert expected in refused.value.message and "\n" not in refused.value.message and refused.value.hint


@pytest.mark.parametrize(("made", "asked"), [
    (form_of_grammar, "{2} root"), (form_of_grammar, '{"grammars": 5}'), (form_of_grammar, 'start: "\ud800"'), (form_of_regex, "a\ud800"),
    (form_of_choices, ["\ud800"]), (form_of_schema, {"type": "integer", "const": -1e100})])
def test_what_the_library_takes_for_something_else_is_one_line(made, asked):
    with pytest.raises(UsageError) as refused:
        made(asked, "grammar", "it")
    assert refused.value.message.startswith("grammar: it: ") and "\n" not in refused.value.message and refused.value.hint


@pytest.mark.parametrize(("schema", "key"), [('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "coerce_one_of"),
                                             ('{"type": "string", "format": "color"}', "lenient"), ('{"not": {}}', "lenient")])
def test_what_a_hint_says_helps(schema, key):
    with pytest.raises(UsageError) as refused:
        schema_form(schema)
    assert f'"x-guidance": {{"{key}": true}}' in refused.value.hint
    assert schema_form(json.dumps(json.loads(schema) | {"x-guidance": {key: True}}))


def test_hints_of_a_file_that_is_not_there_say_what_else_could_be_written():
    for flags, expected in ((("a.json", None), "the schema itself"), ((None, 'root := "a"'), "GBNF itself")):
        with pytest.raises(UsageError) as refused:
            form_of(*flags)
        assert expected in refused.value.hint


def test_what_a_form_that_cannot_be_met_says_is_short(engine, tokenizer):
    for form in (form_of_grammar("start: A\nA: /a/ & /b/", "--grammar", "it"), schema_form('{"$ref": "#"}')):
        with pytest.raises(EffllmError) as refused:
            narrowed(form.opened(tokenizer, engine.config.vocab_size).begin(), engine.config.vocab_size)
        assert len(refused.value.message) < 120 and refused.value.message.endswith(": nothing can come next")


@pytest.mark.parametrize("around", [
    lambda schema: {"name": "answer", "strict": True, "schema": schema},
    lambda schema: {"type": "json_schema", "name": "", "schema": schema},
    lambda schema: {"type": "json_schema", "json_schema": {"name": "answer", "description": "one", "schema": schema}},
    lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}])
def test_what_servers_are_sent_is_the_schema_in_it(around):
    assert schema_form(json.dumps(around(PERSON))).grammar == schema_form(json.dumps(PERSON)).grammar


def test_a_property_of_that_name_is_none(engine, tokenizer):
    """`schema` beside a type is a word that JSON Schema does not know, and passes over."""
    form = schema_form('{"type": "integer", "schema": {"type": "boolean"}}').opened(tokenizer, engine.config.vocab_size)
    assert tokenizer.vocabulary()["7"] in narrowed(form.begin(), engine.config.vocab_size)


def test_a_file_with_a_mark_of_its_bytes(tmp_path):
    (tmp_path / "own.json").write_text("\ufeff" + FOX)
    (tmp_path / "own.gbnf").write_text('\ufeffroot ::= "fox"')
    assert schema_form(str(tmp_path / "own.json")).grammar == schema_form(FOX).grammar
    assert grammar_form(str(tmp_path / "own.gbnf")).grammar == grammar_form('root ::= "fox"').grammar


def test_a_grammar_that_is_no_file_tells_how_one_is_given_itself():
    with pytest.raises(UsageError) as refused:
        grammar_form("yes|no")
    assert refused.value.hint.startswith("GBNF itself, as 'root ::= ")


@pytest.mark.parametrize("text", [b"[1]", b"\xff{", b"3"])
def test_a_file_that_is_no_schema_is_one_line(tmp_path, text):
    (tmp_path / "own.json").write_bytes(text)
    with pytest.raises(UsageError, match=r"--schema: .*own\.json is no"):
        schema_form(str(tmp_path / "own.json"))


def test_forms_are_read_from_files(tmp_path):
    (tmp_path / "one.json").write_text('{"enum": ["fox"]}')
    (tmp_path / "one.gbnf").write_text('root ::= "fox" | ws\nws ::= [ \\n]*\n')
    (tmp_path / "one.lark").write_text('start: "fox" | /[a-c]+/\n')
    assert form_of(str(tmp_path / "one.json"), None).name.endswith("one.json")
    assert all(form_of(None, str(tmp_path / name)).flag == "--grammar" for name in ("one.gbnf", "one.lark"))
    assert form_of(None, None) is None


INT64, FLOAT64 = 2**63 - 1, 1.7976931348623157e308


@pytest.mark.parametrize(("bounds", "within", "beyond"), [
    ({"type": "integer", "minimum": -INT64 - 1, "maximum": INT64}, ["-9223372036854770000", "0", "9223372036854770000"],
     ["9223372036854775808", "-9223372036854775809"]),
    ({"type": "integer", "exclusiveMinimum": -1e21}, ["-4", "70"], []),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**64}, ["9007199254740994"], ["9007199254740992"]),
    ({"type": "number", "minimum": -FLOAT64, "maximum": FLOAT64}, ["-2.5", "1000000000000000000"], ["x"]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 3.4028234663852886e38}, ["0.25"], ["-1"])])
def test_bounds_are_those_of_types_or_a_little_within(engine, tokenizer, bounds, within, beyond):
    form = schema_form(json.dumps(bounds)).opened(tokenizer, engine.config.vocab_size)
    assert all(form.begin(text).is_whole for text in within)
    for text in beyond:
        try:
            assert not form.begin(text).is_whole
        except UsageError as refused:
            assert "so far is not of" in refused.message


def test_bounds_that_are_read_as_written_are_left_and_values_are_no_bounds():
    schema = {"properties": {"minimum": {"type": "number", "minimum": 0.1, "exclusiveMaximum": True}}, "const": {"minimum": -1e300}}
    assert within_reach(schema) is schema
    moved = {"minimum": -1e300, "enum": [{"maximum": 1e300}], "items": [{"exclusiveMaximum": 2**60 + 1, "minimum": 1e300}]}
    assert within_reach(moved) == {"minimum": -float(FURTHEST), "enum": [{"maximum": 1e300}],
                                   "items": [{"exclusiveMaximum": 2**60, "minimum": 1e300}]}


@pytest.mark.parametrize("value", [1, 0.01, 2.5, 1_000_000, 65536, 0.00333, 60, 99_991])
def test_multiples_that_are_quick(value: float) -> None:
    assert schema_form(json.dumps({"type": "number", "multipleOf": value, "minimum": 0})).grammar


def test_a_tool_is_held_to_the_rest_of_its_schema() -> None:
    slow = {"type": "object", "properties": {"multipleOf": {"type": "integer", "multipleOf": 1000003}, "b": {"type": "string"}}}
    assert without_slow(slow) == {"type": "object", "properties": {"multipleOf": {"type": "integer"}, "b": {"type": "string"}}}
    assert without_slow({"multipleOf": 7}) == {"multipleOf": 7}


def test_what_is_no_number_has_no_multiples() -> None:
    assert most_remainders({"properties": {"multipleOf": {"multipleOf": 9}}, "multipleOf": True, "allOf": [5], "anyOf": "x"}) == 9
    assert most_remainders({"multipleOf": float("nan"), "allOf": [{"multipleOf": 0}, {"multipleOf": float("inf")}]}) == 1


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
    assert most_remainders(whole) in (997 * 1009, 997 * 1009 + 997)  # others' own beside
    with pytest.raises(UsageError, match="takes 100(5973|6970) remainders"):
        schema_form(json.dumps(whole))


def test_multiples_apart_are_a_sum() -> None:
    apart = {"properties": {"x": REF, "y": multiple(1009), "z": {"anyOf": [REF, {"type": "null"}]}, "items": {"items": REF}},
             "$defs": {"a": multiple(997)}}
    assert most_remainders(apart) == 997 + 1009 and schema_form(json.dumps(apart)).grammar
    many = [99_907 + 2 * number for number in range(40) if (99_907 + 2 * number) % 5]
    with pytest.raises(UsageError, match=f"takes {sum(many)} remainders"):
        schema_form(json.dumps({"properties": {f"x{number}": multiple(number) for number in many}}))


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
    assert most_remainders(schema | {"title": {"multipleOf": 99_991}}) == expected  # what is no schema does not count
    assert schema_form(json.dumps(schema)).grammar


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
        with pytest.raises(UsageError, match=f"more than {MOST_NODES} schemas lie in one another"):
            schema_form(json.dumps(chain(links, link)))
    assert schema_form(json.dumps(chain(300, link))).grammar
    ring = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": REF, "y": OTHER}}, "b": {"items": [REF, OTHER, {"$ref": "#"}]}}}
    assert too_much_of_schema(ring) is None


def test_a_ring_of_definitions_is_as_deep_as_it_is_long() -> None:
    """Each is met once, in one another all the same."""
    def ring(links: int) -> dict:
        return {"$ref": "#/$defs/0", "$defs": {str(each): {"items": {"$ref": f"#/$defs/{(each + 1) % links}"}} for each in range(links)}}

    assert schema_form(json.dumps(ring(300))).grammar
    for links in (MOST_NODES // 2 + 1, 5000):  # a schema and its items, each
        with pytest.raises(UsageError, match=f"more than {MOST_NODES} schemas lie in one another") as refused:
            schema_form(json.dumps(ring(links)))
        assert "fewer of $defs" in refused.value.hint


def test_rules_in_larks_notation_have_an_end_too(tmp_path) -> None:
    own = tmp_path / "own.lark"
    for rule in ("r{0}", "R{0}"):
        rules = (f'{rule.format(each)}: "x" /[a-z]/ {rule.format(each + 1)} // as r{each}\n' for each in range(8000))
        own.write_text(f"start: {rule.format(0)}\n{''.join(rules)}{rule.format(8000)}: \"y\"")
        with pytest.raises(UsageError, match="more than 500 rules lie in one another"):
            grammar_form(str(own))
    own.write_text("start: " + " | ".join(f"r{each}" for each in range(800)) + "\n" + "".join(
        f'r{each}: "r{each} : r{each + 1}" // r{each + 1}\n' for each in range(800)))
    assert grammar_form(str(own)).grammar


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
    with pytest.raises(UsageError, match="more than 500 rules lie in one another, or 1000 with parentheses"):
        form_of_grammar(text, "--grammar", "it")


@pytest.mark.parametrize(("text", "rule"), [
    ("start: start", "start"), ('start: "a" start', "start"), ('start: start "a" | ("b" start)+', "start"),
    ('start: "q" a\na: b\nb: "x" a', "b"),
    ('start: "a"\n  | b\nb: ("x" | "y") b{2,5}', "b"), ('start: a::0\na::_: "x" a::incr(_) %if lt(_, 5)', "a"),
    ('start: "a" [b] // b: "end"\nb: "b: \\" |" b', "b"), ('start: %lark {\nstart: within\nwithin: "a" within\n} | "b"', "within")])
def test_a_rule_in_larks_notation_that_no_text_ends_is_refused(text: str, rule: str) -> None:
    with pytest.raises(UsageError, match=f"no text ends the rule {rule}:") as refused:
        form_of_grammar(text, "--grammar", "it")
    assert refused.value.hint == "give it an alternative that ends"


@pytest.mark.parametrize("text", [
    'start: "a" start?', 'start: ("a" start)*', 'start: "a" [start]', 'start: ["b"] "a" start~0..3', 'start: ("a" start){,3}', 'start:',
    'start: "a" start |', 'start: a\n%import common.INT\na: INT a | INT', 'start: "a"\nunused: unused "x"',
    "start: a\n!a: /[|]/i a\n\n | B\nB: ~/a/",
    'start: a::0\na::_: "x" a::incr(_) %if lt(_, 5)\n | ""', 'start: a -> one | "b" start -> more\na[max_tokens=5]: /.*/',
    "start: a # b: b\na: /x\ny/ | a",
    'start: %lark {\nstart: /}/ start | "{"\n} | "b" start', 'start: %json {"const": "} a: a"} | "b" start\n%ignore / +/',
    'start: "a".."c" start | "\\""'])
def test_grammars_in_larks_notation_that_end_are_taken(text: str) -> None:
    assert form_of_grammar(text, "--grammar", "it").grammar


@pytest.mark.parametrize(("text", "said"), [
    ("start: A\nA: /(a{97})*/ & /(a{101})*/ & /(a{103})*/", "repeat themselves in 1009091 ways"),
    ("start: A\nA: ~(~B | ~C)\nB: (X)+\nC: /(?:[a-c]x{500})+/\nX: /a/~997", "repeat themselves in 499497 ways"),
    ("start: A\nA: " + " & ".join(f"/.*a.{{{each}}}b.*/" for each in range(22)), "fit 22 terminals at once"),
    ("start: A\nA: B & C\nB: /a/ & D & E\nC: ~(" + " | ".join(f"/{each}/" for each in range(14)) + ")\nD: /b/\nE: /c/",
     "fit 17 terminals"),
    ("start: " + " | ".join(f'"w{each}"' for each in range(30_000)), "its rules have 30000 parts"),
    ("start: " + " | ".join(f"j{each}" for each in range(30)) + "".join(
        f'\nj{each}: %json {{"type": "integer", "multipleOf": {99_901 + 2 * each}}}' for each in range(30)), "of its schemas takes")])
def test_what_takes_a_grammar_minutes_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        form_of_grammar(text, "--grammar", "it")


def test_terminals_may_have_many_words_and_few_conditions() -> None:
    words = "start: WORD (\" \" WORD)*\nWORD: " + " | ".join(f'"w{each}"' for each in range(30_000))
    for text in (words, "start: A\nA: /(?:[a-z ]{1,40}\\.)+/ & ~/.*secret.*/ & /.{5,2000}/", "start: A\nA: /(?:" + "x" * 997 + ")*y/",
                 "start: A\nA: " + " | ".join(f"/{each}*/" for each in range(90))):
        assert form_of_grammar(text, "--grammar", "it").grammar


@pytest.mark.parametrize("text", [
    "", "\n", "start", "start:: a", "start: (", "start: " + "(" * 50_000, "start: " + "~" * 50_000 + "A\nA: /a/", 'start: "a', "start: /a",
    "start: %json {", "start: %lark {", "start: }", "start: a::", 'start: "a"{', 'start: "a"{,}', "start: %json " + "[" * 50_000,
    "a: b", "start: a\na: a a a | \nstart: b", 'start: "\\ud800"', "start: \x00", "start: /a{9,1}/", "start: /(a/", "start: %if",
    "%ignore", "%ignore a\na: a", "start: a-\na-: a-", "start: <[0-9]>"])
def test_what_is_no_grammar_is_one_line_or_none(text: str) -> None:
    """The reader here passes over what it does not understand: what is wrong says the library."""
    try:
        assert form_of_grammar(text, "--grammar", "it").grammar
    except UsageError as refused:
        assert "\n" not in refused.message and len(refused.message) < 400 and refused.hint


@pytest.mark.parametrize(("schema", "expected"), [(multiple(1_000_003), "takes 1000003 remainders"),
                                                  (chain(2000, lambda ref: {"items": ref}), "schemas lie in one another")])
def test_a_schema_within_a_grammar_is_judged_as_one(tmp_path, schema: dict, expected: str) -> None:
    (tmp_path / "own.lark").write_text('start: "so: " said\nsaid: %json ' + json.dumps(schema) + "\n")
    with pytest.raises(UsageError, match=expected):
        grammar_form(str(tmp_path / "own.lark"))


@pytest.mark.parametrize("schema", [{"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, {"exclusiveMaximum": -9.3e18},
                                    {"allOf": [{"type": "integer", "minimum": -1e30}, {"properties": {"a": {"maximum": -1e19}}}]}])
def test_largest_numbers_below_those_of_64_bits_are_refused(schema: dict) -> None:
    with pytest.raises(UsageError, match="is less than numbers of 64 bits hold"):
        schema_form(json.dumps(schema))
    assert schema_form(json.dumps({"type": "integer", "minimum": -(2**63) + 4096, "maximum": -(2**63) + 4096})).grammar


def test_names_that_are_many() -> None:
    """Each pattern of names is held against each other, and each name that may be left out is a way for all behind it."""
    many = {f"^p{number}x": {"type": "integer"} for number in range(120)}
    first, *rest = ({key: many[key]} for key in many)
    for whole in ({"patternProperties": many}, {"patternProperties": first, "allOf": [{"patternProperties": each} for each in rest]}):
        with pytest.raises(UsageError, match="120 patternProperties"):
            schema_form(json.dumps(whole))
    assert schema_form(json.dumps({"properties": {f"x{number}": {"patternProperties": first} for number in range(120)}})).grammar
    many = {f"x{number}": {"type": "integer"} for number in range(4100)}
    with pytest.raises(UsageError, match="4100 properties of an object may be left out"):
        schema_form(json.dumps({"properties": many}))
    assert schema_form(json.dumps({"type": "object", "properties": many, "required": [*many][200:]})).grammar


@pytest.mark.parametrize("schema", [{"enum": [f"{number} and more of it" for number in range(120_000)]},
                                    {"allOf": [{"anyOf": [{"type": "object", "properties": {f"k{number}": {"const": each}}}
                                                          for each in range(3)]} for number in range(10)]}])
def test_what_is_too_large_is_told_to_be_made_smaller(schema: dict) -> None:
    with pytest.raises(UsageError) as refused:
        schema_form(json.dumps(schema))
    assert "too " in refused.value.message and "make it smaller" in refused.value.hint


def test_texts_that_must_fit_many_patterns() -> None:
    """Each more takes twice the time."""
    many = [{"pattern": f"a.{{{number}}}b"} for number in range(1, 40)]
    for whole in ({"allOf": many}, {"pattern": "c", "$ref": "#/$defs/a", "$defs": {"a": {"allOf": many}}},
                  {"properties": {"x": {"allOf": many[:12]}}, "allOf": [{"properties": {"x": {"allOf": many[12:]}}}]}):
        with pytest.raises(UsageError, match="patterns at once"):
            schema_form(json.dumps(whole))
        assert most_patterns(without_slow(whole)) == 0
    deep = chain(900, lambda ref: {**ref, "pattern": "a"})
    assert most_patterns(deep) > MOST_PATTERNS and most_patterns(without_slow(deep)) == 0
    assert most_patterns({"anyOf": many}) == 1 and schema_form(json.dumps({"type": "string", "anyOf": many})).grammar
    apart = {f"x{number}": {"$ref": "#/$defs/a"} for number in range(40)}
    assert most_patterns({"properties": apart, "$defs": {"a": {"pattern": "b", "allOf": many[:2]}}}) == 3 <= MOST_PATTERNS
