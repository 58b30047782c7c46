"""What is wrong with a schema or a grammar is one line, what helps is in its hint; what programs put around a schema is left out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from effllm import EffllmError, UsageError
from effllm.runtime.constraint import form_of, grammar_form, most_remainders, schema_form, without_slow

sys.path.insert(0, str(Path(__file__).parent))
from test_constraint import FOX, PERSON, engine, narrowed, tokenizer

__all__ = ["engine", "tokenizer"]  # fixtures

@pytest.mark.parametrize(("schema", "grammar", "expected"), [
    ('{"type": "objekt"}', None, "--schema: the schema: Invalid type: objekt"),
    ('{"not": {}}', None, 'Unimplemented keys: ["not"]'),
    ("{bad", None, "is no JSON"),
    ('{"type": "integer", "multipleOf": 1000003}', None, "multipleOf takes 1000003 remainders"),
    ('{"items": {"multipleOf": 7, "allOf": [{"multipleOf": 211}, {"anyOf": [{"multipleOf": 227}]}]}}', None, "takes 335279 remainders"),
    ("nowhere.json", None, "cannot read nowhere.json: No such file"),
    ("~nobody-of-this-name/x.json", None, "cannot read ~nobody-of-this-name/x.json: No such file"),
    (None, "nowhere.gbnf", "cannot read nowhere.gbnf: No such file"),
    (None, "root ::= foo", "names foo, which is no rule"),
    (None, 'root ::= "a', "--grammar: the grammar: "),
    ("json", 'root ::= "a"', "both say what the answer is"),
    ('{"$ref": "http://localhost/x"}', None, "--schema: the schema: "),
    ('{"type": "string", "pattern": "(?=a)b"}', None, "look-around"),
    ('{"a":' * 5000 + "1" + "}" * 5000, None, "--schema: the schema"),
    ('{"enum": ["\\ud800"]}', None, "--schema: the schema: "),
    ('{"const": 100000000000000000000000}', None, "--schema: the schema: "),
    ('{"typ": "object"}', None, "'typ' is no keyword"),
    ('{"name": "x", "parameters": {"type": "object"}}', None, "'name' is no keyword"),
])
def test_a_form_that_cannot_be_is_one_line(schema, grammar, expected):
    with pytest.raises(UsageError) as refused:
        form_of(schema, grammar)
    assert expected in refused.value.message and "\n" not in refused.value.message and refused.value.hint


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
    for form in (grammar_form("root ::= root"), schema_form('{"$ref": "#"}')):
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
