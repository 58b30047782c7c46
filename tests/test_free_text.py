"""Grammars for text inside JSON strings: the constraint of a free-text tool, against the library's own reading of both."""

import json
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from effllm import UsageError
from effllm.cli.server.custom_tools import function_of, input_of, regex_grammar
from effllm.cli.server.problems import Problem
from effllm.runtime.tool_calls.free_text import TEXT_ARGUMENT, arguments_grammar, grammar_until, json_escaped_grammar

LIST = """// what a person would write down
start: title item+ end?
title: "# " NAME LF
item: ("-" | "*") " " NAME (" \\"" /[^"\\n]*/ "\\"")? LF -> item
?end: "the end"i LF
NAME: /[a-z .\\\\]+/
%import common.LF
"""
SUMS = """start: sum
sum: term (SIGN term)* -> sum
term: "(" sum ")" | INT
SIGN: "+" | "-"
%import common.INT
"""
QUOTED = 'start: list\nlist: "[" (list | ESCAPED_STRING)* "]" WS?\n%import common (ESCAPED_STRING, WS)'
PATTERNS = (
    r'[^"]*', r"\s+x\S+", r"(?s:.)*q.", r".+", r"\W{2,3}", r"[\n\r]x",
    r'a|"\\', r"(a(?i:b)|[^a-f\]\\])+?", r"\/\d+\/", r"[ -~]+", r"\x41é\\?", r"(?s)a.b")


@cache
def read(grammar: str):
    import llguidance

    made = llguidance.LLMatcher.grammar_from_lark(grammar)
    return llguidance.LLTokenizer("byte"), made


def takes(grammar: str, text: str) -> bool:
    import llguidance

    tokenizer, made = read(grammar)
    matcher = llguidance.LLMatcher(tokenizer, made)
    assert not matcher.get_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@given(st.sampled_from(PATTERNS), st.text(st.sampled_from('ab xBqA"\\\n\t\r/1]é!(~'), max_size=6))
@example(r"[^\"]*", '\\\n"')
@example(r".+", "\n")
def test_a_pattern_takes_within_json_what_it_takes_outside(pattern: str, text: str) -> None:
    grammar = regex_grammar(pattern)
    assert takes(json_escaped_grammar(grammar), json.dumps(text, ensure_ascii=False)[1:-1]) == takes(grammar, text)


@pytest.mark.parametrize(("text", "is_right"), [
    ('# foxes\n- a fox "its \\ name"\n* b\n', True), ("# foxes\n- a\\\nThe END\n", True), ("# foxes\n", False), ("# foxes\n- \n", False),
    ('# foxes\n- a "b\n', False), ("# foxes\n- a\nthe end\n- b\n", False)])
def test_a_grammar_of_lines_takes_within_json_what_it_takes_outside(text: str, is_right: bool) -> None:
    """A line may have quotes and backslashes before it ends: what ends it looks like them at first."""
    call = f"start: {arguments_grammar({'grammar': LIST}, {})}"
    spaced, compact = json.dumps({TEXT_ARGUMENT: text}), json.dumps({TEXT_ARGUMENT: text}, separators=(",", ":"))
    assert takes(call, spaced) == takes(call, compact) == is_right


def test_rules_that_go_round_are_held_where_no_two_letters_are_written_otherwise() -> None:
    for text, is_right in (("(1+2)-3", True), ("(1+2", False), ("1 + 2", False)):
        assert takes(json_escaped_grammar(SUMS), text) == is_right
    assert json_escaped_grammar(QUOTED) is None and json_escaped_grammar("start: A\n%ignore /[ \\n\"]+/\nA: \"a\"") is None
    assert arguments_grammar({"grammar": QUOTED, "parameters": {"type": "object"}}, {}).startswith("%json ")


def test_what_would_be_too_much_as_one_terminal_is_left_to_the_model() -> None:
    doubled = "".join(f"a{at}: a{at + 1} a{at + 1}\n" for at in range(24))
    assert json_escaped_grammar(f'start: a0\n{doubled}a24: "x" /[^"]/') is None
    assert takes(json_escaped_grammar('start: a\na: b b\nb: "x" LF\n%import common.LF'), "x\\nx\\n")


@given(st.sampled_from(PATTERNS), st.text(st.sampled_from('ab xB"\\\n/1]</p>'), max_size=8), st.sampled_from(("\n</p>", "</p>", "\n", "")))
def test_a_pattern_takes_before_a_mark_what_it_takes_alone(pattern: str, text: str, end: str) -> None:
    """Behind a mark in letters no more may come, so these are nowhere in the text; one that is a token is in no text."""
    grammar = regex_grammar(pattern)
    assert takes(grammar_until(grammar, end, True), text + end) == takes(grammar, text)
    if end:
        assert takes(grammar_until(grammar, end, False), text + end) == (takes(grammar, text) and (text + end).find(end) == len(text))


def test_a_grammar_of_lines_before_a_mark() -> None:
    for text, is_right in (("# abc\n- abc\n", True), ('# abc\n- abc "q"\n', True), ("# abc\n", False), ("# abc\n- </p>\n", False)):
        assert takes(grammar_until(LIST, "</p>", False), text + "</p>") == is_right
    assert grammar_until(SUMS, "</p>", False) is None and grammar_until("start: A\n%ignore /[ ]+/\nA: \"a\"", "</p>", True) is None


@pytest.mark.parametrize(("grammar", "words"), [
    ("start: <|end|>", "is not allowed in a grammar for text"), ("start: %json {}", "is not allowed in a grammar for text"),
    ("start: /a/x", "flags other than"),
    ("start: /(?x:a)/", "flags other than"), ("start: /\\p{P}/", "has unsupported syntax"), ('start: "a\\n"i', "ignores case"),
    ("start: /[z-a]/", "not a valid character class"), ('start: "\\x"', "is not text")])
def test_what_is_not_read_says_so(grammar: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        json_escaped_grammar(grammar)
    assert raised.value.hint


@pytest.mark.parametrize("format", [
    {"type": "grammar"}, {"type": "xml"}, "text", {"type": "grammar", "syntax": "gbnf", "definition": "root ::= 1"},
    {"type": "grammar", "syntax": "lark", "definition": " "}, {"type": "grammar", "syntax": "lark", "definition": "start: lost"},
    {"type": "grammar", "syntax": "regex", "definition": "(a"}, {"type": "grammar", "grammar": {"syntax": "regex"}}])
def test_formats_that_are_none_are_named(format: object) -> None:
    with pytest.raises(Problem) as raised:
        function_of("f", None, format, "tools[0].format")
    assert raised.value.status == 400 and raised.value.param == "tools[0].format"


def test_the_model_is_told_of_the_grammar_and_a_pattern_is_of_the_whole_text() -> None:
    made = function_of("f", "Adds.", {"type": "grammar", "syntax": "regex", "definition": "^[0-9]/[0-9]$"}, "")
    assert made["description"].startswith("Adds.\n\n") and made["description"].endswith("^[0-9]/[0-9]$") and made["strict"]
    assert takes(made["grammar"], "1/2") and not takes(made["grammar"], "1/23") and regex_grammar("a\\$") == "start: /a\\$/"
    assert "grammar" not in function_of("f", None, {"type": "text"}, "") and input_of('{"input": "a"}') == "a"
    assert input_of("[1") == "[1" and input_of('{"text": "a"}') == '{"text": "a"}'
