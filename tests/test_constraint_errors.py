"""An invalid schema or grammar is a one-line error with a hint; what clients wrap around a schema is ignored."""

from __future__ import annotations

import json

import pytest
from test_constraint import FOX, PERSON, engine, narrowed, tokenizer

from effllm import EffllmError, UsageError
from effllm.runtime.constraints.constraint import (
    choice_constraint,
    grammar_constraint,
    read_constraint_flags,
    read_grammar_flag,
    read_schema_flag,
    regex_constraint,
    schema_constraint,
)
from effllm.runtime.constraints.number_bounds import MAX_EXACT, clamped
from effllm.runtime.constraints.schema_rewrites import rewritten

__all__ = ["engine", "tokenizer"]  # fixtures

@pytest.mark.parametrize(("schema", "grammar", "expected"), [
    ('{"type": "objekt"}', None, "--schema: the schema: Invalid type: objekt"),
    ('{"not": {}}', None, 'Unimplemented keys: ["not"]'),
    ('{"enum": [1, {"id": 123456789012345678}]}', None, "123456789012345678 cannot be represented exactly"),
    ('{"const": -9223372036854775808}', None, "-9223372036854775808 cannot be represented exactly"),
    ('{"type": "integer", "enum": [2, 1e20]}', None, "1e+20 cannot be represented exactly"),  # written as 9223372036854775807
    ('{"const": 9223372036854774784}', None, "9223372036854774784 cannot be represented exactly"),
    ('{"properties": {"a": {"enum": [[9223372036854775808]]}}}', None, "9223372036854775808 cannot be represented exactly"),
    ("{bad", None, "is not JSON"),
    ('{"type": "integer", "multipleOf": 1000003}', None, "multipleOf needs 1000003 remainders"),
    ('{"type": "number", "multipleOf": 24414062.5}', None, "multipleOf needs 244140625 remainders"),
    ('{"type": "integer", "multipleOf": 16777216000}', None, "multipleOf needs 16777216000 remainders"),
    ('{"items": {"multipleOf": 7, "allOf": [{"multipleOf": 211}, {"anyOf": [{"multipleOf": 227}]}]}}', None, "needs 335279 remainders"),
    ("nowhere.json", None, "cannot read nowhere.json: No such file"),
    ("~nobody-of-this-name/x.json", None, "cannot read ~nobody-of-this-name/x.json: No such file"),
    (None, "nowhere.gbnf", "cannot read nowhere.gbnf: No such file"),
    (None, "root ::= foo", "refers to foo, which is not defined"),
    (None, 'root ::= "a', "--grammar: the grammar: "),
    ("json", 'root ::= "a"', "cannot be combined"),
    ('{"$ref": "http://localhost/x"}', None, "--schema: the schema: $ref names http://localhost/x, which does not exist in the schema"),
    ('{"$ref": "other.json"}', None, "$ref names other.json, which does not exist in the schema"),
    ('{"items": {"$ref": "#/$defs/a"}}', None, "$ref names #/$defs/a, which does not exist in the schema"),
    ('{"$ref": "#a"}', None, "$ref names #a, which does not exist in the schema"),
    ('{"type": "string", "pattern": "(?=a)b"}', None, "look-around"),
    ('{"a":' * 5000 + "1" + "}" * 5000, None, "--schema: the schema"),
    ('{"enum": ["\\ud800"]}', None, "--schema: the schema: "),
    ('{"const": 100000000000000000000000}', None, "--schema: the schema: "),
    ('{"typ": "object"}', None, "no keyword of JSON Schema: 'typ'"),
    ('{"name": "x", "parameters": {"type": "object"}}', None, "no keyword of JSON Schema: 'name'"),
])
def test_a_form_that_cannot_be_is_one_line(schema, grammar, expected):
    with pytest.raises(UsageError) as refused:
        read_constraint_flags(schema, grammar)
    assert expected in refused.value.message and "\n" not in refused.value.message and refused.value.hint


@pytest.mark.parametrize(("made", "asked"), [
    (grammar_constraint, "{2} root"), (grammar_constraint, '{"grammars": 5}'), (grammar_constraint, 'start: "\ud800"'),
    (regex_constraint, "a\ud800"),
    (choice_constraint, ["\ud800"]), (schema_constraint, {"type": "integer", "const": -1e100})])
def test_what_the_library_takes_for_something_else_is_one_line(made, asked):
    with pytest.raises(UsageError) as refused:
        made(asked, "grammar", "it")
    assert refused.value.message.startswith("grammar: it: ") and "\n" not in refused.value.message and refused.value.hint


@pytest.mark.parametrize(("schema", "key"), [('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "coerce_one_of"),
                                             ('{"type": "string", "format": "color"}', "lenient"), ('{"not": {}}', "lenient")])
def test_what_a_hint_says_helps(schema, key):
    with pytest.raises(UsageError) as refused:
        read_schema_flag(schema)
    assert f'"x-guidance": {{"{key}": true}}' in refused.value.hint
    assert read_schema_flag(json.dumps(json.loads(schema) | {"x-guidance": {key: True}}))


def test_hints_of_a_file_that_is_not_there_say_what_else_could_be_written():
    for flags, expected in ((("a.json", None), "the schema itself"), ((None, 'root := "a"'), "GBNF itself")):
        with pytest.raises(UsageError) as refused:
            read_constraint_flags(*flags)
        assert expected in refused.value.hint


def test_what_a_form_that_cannot_be_met_says_is_short(engine, tokenizer):
    for form in (grammar_constraint("start: A\nA: /a/ & /b/", "--grammar", "it"), read_schema_flag('{"$ref": "#"}')):
        with pytest.raises(EffllmError) as refused:
            narrowed(form.compile(tokenizer, engine.config.vocab_size).begin(), engine.config.vocab_size)
        assert len(refused.value.message) < 120 and refused.value.message.endswith(": nothing can come next")


@pytest.mark.parametrize("around", [
    lambda schema: {"name": "answer", "strict": True, "schema": schema},
    lambda schema: {"type": "json_schema", "name": "", "schema": schema},
    lambda schema: {"type": "json_schema", "json_schema": {"name": "answer", "description": "one", "schema": schema}},
    lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}])
def test_what_servers_are_sent_is_the_schema_in_it(around):
    assert read_schema_flag(json.dumps(around(PERSON))).grammar == read_schema_flag(json.dumps(PERSON)).grammar


def test_a_property_of_that_name_is_none(engine, tokenizer):
    """`schema` beside a type is a word that JSON Schema does not know, and passes over."""
    form = read_schema_flag('{"type": "integer", "schema": {"type": "boolean"}}').compile(tokenizer, engine.config.vocab_size)
    assert tokenizer.vocabulary()["7"] in narrowed(form.begin(), engine.config.vocab_size)


def test_a_file_with_a_mark_of_its_bytes(tmp_path):
    (tmp_path / "own.json").write_text("\ufeff" + FOX)
    (tmp_path / "own.gbnf").write_text('\ufeffroot ::= "fox"')
    assert read_schema_flag(str(tmp_path / "own.json")).grammar == read_schema_flag(FOX).grammar
    assert read_grammar_flag(str(tmp_path / "own.gbnf")).grammar == read_grammar_flag('root ::= "fox"').grammar


def test_a_grammar_that_is_no_file_tells_how_one_is_given_itself():
    with pytest.raises(UsageError) as refused:
        read_grammar_flag("yes|no")
    assert refused.value.hint.startswith("GBNF itself, as 'root ::= ")


@pytest.mark.parametrize("text", [b"[1]", b"\xff{", b"3"])
def test_a_file_that_is_no_schema_is_one_line(tmp_path, text):
    (tmp_path / "own.json").write_bytes(text)
    with pytest.raises(UsageError, match=r"--schema: .*own\.json is no"):
        read_schema_flag(str(tmp_path / "own.json"))


def test_forms_are_read_from_files(tmp_path):
    (tmp_path / "one.json").write_text('{"enum": ["fox"]}')
    (tmp_path / "one.gbnf").write_text('root ::= "fox" | ws\nws ::= [ \\n]*\n')
    (tmp_path / "one.lark").write_text('start: "fox" | /[a-c]+/\n')
    assert read_constraint_flags(str(tmp_path / "one.json"), None).name.endswith("one.json")
    assert all(read_constraint_flags(None, str(tmp_path / name)).flag == "--grammar" for name in ("one.gbnf", "one.lark"))
    assert read_constraint_flags(None, None) is None


INT64, FLOAT64 = 2**63 - 1, 1.7976931348623157e308


@pytest.mark.parametrize(("bounds", "within", "beyond"), [
    ({"type": "integer", "minimum": -INT64 - 1, "maximum": INT64}, ["-9223372036854770000", "0", "9223372036854770000"],
     ["9223372036854775808", "-9223372036854775809"]),
    ({"type": "integer", "exclusiveMinimum": -1e21}, ["-4", "70"], []),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**64}, ["9007199254740994"], ["9007199254740992"]),
    ({"type": "number", "minimum": -FLOAT64, "maximum": FLOAT64}, ["-2.5", "1000000000000000000"], ["x"]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 3.4028234663852886e38}, ["0.25"], ["-1"])])
def test_bounds_are_those_of_types_or_a_little_within(engine, tokenizer, bounds, within, beyond):
    form = read_schema_flag(json.dumps(bounds)).compile(tokenizer, engine.config.vocab_size)
    assert all(form.begin(text).is_whole for text in within)
    for text in beyond:
        try:
            assert not form.begin(text).is_whole
        except UsageError as refused:
            assert "so far does not match" in refused.message


def test_bounds_that_are_read_as_written_are_left_and_values_are_no_bounds():
    schema = {"properties": {"minimum": {"type": "number", "minimum": 0.1, "exclusiveMaximum": True}}, "const": {"minimum": -1e300}}
    assert clamped(schema) is schema
    moved = {"minimum": -1e300, "enum": [{"maximum": 1e300}], "items": [{"exclusiveMaximum": 2**60 + 1, "minimum": 1e300}]}
    assert clamped(moved) == {"minimum": -float(MAX_EXACT), "enum": [{"maximum": 1e300}],
                              "items": [{"exclusiveMaximum": 2**60, "minimum": 1e300}]}


def test_additional_items_beside_the_first_ones_say_nothing(engine, tokenizer):
    """The first ones were left out together with them."""
    schema = {"type": "array", "prefixItems": [{"const": "a"}], "additionalItems": {"const": "b"}, "minItems": 1, "maxItems": 2}
    form = read_schema_flag(json.dumps(schema)).compile(tokenizer, engine.config.vocab_size)
    assert form.begin('["a"]').is_whole and form.begin('["a", 5]').is_whole
    for text in ('["b"]', "[5]"):
        with pytest.raises(UsageError, match="so far does not match"):
            form.begin(text)
    older = {"items": [{"const": "a"}], "additionalItems": {"const": "b"}, "properties": {"prefixItems": {}, "additionalItems": {}}}
    assert rewritten(older) is older, "where they say something, and where they are names"


LONG = "start: a b\n" + "".join(f'a{number}: "{"x" * 40}"\n' for number in range(60))


@pytest.mark.parametrize("text, expected", (
    (LONG + 'a: "x" | /[0-9/\nb: "y"\n', "line 62, column 4: unclosed character class, at character 1 of the regular expression [0-9"),
    (f'start: /{"a" * 400}(/\n', f"unclosed group, at character 401 of the regular expression …{'a' * 24}("),
    (LONG + "a: ( b\n", "line 62, column 7: Expected token ')', found '\\n'"),
    (LONG, 'unknown name: "a"'),
    ('root ::= "a" b\nb ::= "x" | [0-9\nc ::= "y"\n',
     "line 2: a character class has no closing ], the text ends in the middle of it, after 'b ::= \"x\" | ', at '[0-9'"),
    ('root ::= "a\n' + 'b ::= "c"\n' * 9 + "c ::= d", 'line 10: a text in quotes has no closing "'),
    ('root ::= "a" |= b\n', "line 1: expected"),
))
def test_an_error_names_its_place_and_leaves_out_the_grammar(text: str, expected: str) -> None:
    """llguidance quotes the grammar around the place: an error was 300 characters of it."""
    with pytest.raises(UsageError) as refused:
        grammar_constraint(text, "--grammar", "it")
    assert expected in refused.value.message
    assert len(refused.value.message) < 160 and "\n" not in refused.value.message and " | start" not in refused.value.message


@pytest.mark.parametrize("regex, expected", (
    ("(a|b[0-9", "unclosed character class, at character 5 of the regular expression (a|b[0-9"),
    ("x" * 500 + "{3,1}", "at character 501 of the regular expression …" + "x" * 24 + "{3,1}"),
))
def test_an_error_of_a_regular_expression_names_the_character(regex: str, expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        regex_constraint(regex, "grammar", "it")
    assert expected in refused.value.message and "line " not in refused.value.message and len(refused.value.message) < 200
