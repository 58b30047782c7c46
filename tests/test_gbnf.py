"""GBNF as llama.cpp reads it: grammars match what Python's own regular expressions match; grammars like those shipped with llama.cpp;
errors are one line."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_constraint import engine, narrowed, tokenizer

from effllm import UsageError
from effllm.runtime.constraints.constraint import CompiledConstraint, read_grammar_flag
from effllm.runtime.constraints.gbnf import GbnfError, to_lark

__all__ = ["engine", "tokenizer"]  # fixtures


@pytest.fixture
def opened(engine, tokenizer):
    return lambda grammar: read_grammar_flag(grammar).compile(tokenizer, engine.config.vocab_size)


def is_of(vocabulary: CompiledConstraint, tokenizer, text: str) -> bool:
    """May every token of a text come next, and then its end?"""
    held = vocabulary.begin()
    for token in tokenizer.encode(text, add_special_tokens=False):
        logits = np.zeros(vocabulary.rows, np.float32)
        held.mask_logits(logits)
        if logits[token] != 0:
            return False
        held.accept(token, False)
    return held.is_whole


# ---- against regular expressions

TEXTS = st.text("ab\n- ", max_size=6)
LEAVES = st.one_of(st.text("ab\n-", max_size=3).map(lambda text: (f'"{text}"'.replace("\n", "\\n"), re.escape(text))),
                   st.sampled_from([("[ab]", "[ab]"), ("[^a]", "[^a]"), ("[a-b-]", "[ab-]"), (".", "[\\s\\S]"), ("[ \\n]", "[ \\n]")]))


def joined(parts: list[tuple[str, str]]) -> tuple[str, str]:
    return " ".join(own for own, _ in parts), "".join(python for _, python in parts)


def either(parts: list[tuple[str, str]]) -> tuple[str, str]:
    return f"({' | '.join(own for own, _ in parts)})", f"(?:{'|'.join(python for _, python in parts)})"


TREES = st.recursive(LEAVES, lambda inner: st.one_of(
    st.lists(inner, min_size=1, max_size=3).map(joined), st.lists(inner, min_size=1, max_size=3).map(either),
    st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}"])).map(
        lambda pair: (f"({pair[0][0]}){pair[1]}", f"(?:{pair[0][1]}){pair[1]}"))), max_leaves=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TREES, TREES, TEXTS)
def test_a_grammar_without_recursion_is_its_regular_expression(opened, tokenizer, first, second, text):
    vocabulary = opened(f"root ::= a-part b_part | b_part\na-part ::= {first[0]}\nb_part ::= {second[0]} # and so on\n")
    python = re.fullmatch(f"(?:{first[1]})?(?:{second[1]})", text)
    assert is_of(vocabulary, tokenizer, text) == (python is not None)


# ---- what llama.cpp's own grammars are made of

ARITHMETIC = r"""root  ::= (sum "=" ws term "\n")+
sum   ::= term ([-+*/] term)*
term  ::= name | num | "(" ws sum ")" ws
name  ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*"""
VALUE = r"""# white space where it may be
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}"""


@pytest.mark.parametrize(("grammar", "texts", "others"), [
    (ARITHMETIC, ["a+1=2\n", "(a +b)*c = d\n", "a=1\nb=2\n"], ["a=1", "a + b=1\n", "a+=1\n", "\n"]),
    (VALUE, ['{"a": 1}', '{"a": [1, "\u00e4\\n", null], "b": {}}', '{\n  "a": -1.5e3\n}'], ['{"a":', "[1]", '{"a": 01}']),
    ('root ::= ("- " [^\\r\\n\\x0b\\u2028]+ "\\n")+', ["- a\n- \u00e4 \U0001f600\n"], ["- \n", "- a"]),
    ('root ::= any "END"\nany ::= .*', ["hello\nEND", "END"], ["hello EN"]),
    ('root ::= "\\u00e4\\u0020" [\\u3041-\\u309f\\U0001F600]+', ["\u00e4 \u304b\U0001f600"], ["\u00e4 a"]),
    ('root ::= ([0-9]+)? "x"', ["12x", "x"], ["12"]),
    ("root ::= [a&&b]+ [/\\]\\[^]", ["a&b/", "b]", "a^"], ["a"]),
    ('root ::= start My-Rule myRule\nstart ::= "s"\nMy-Rule ::= "M"\nmyRule ::= "m"', ["sMm"], ["smM"]),
    ('root ::= "(" root ")" |\n "x"', ["((x))", "x"], ["((x)"]),
    ('root ::= "a" root{00,2} r*\nr ::= "b" root? "c"', ["a", "aaa", "abc", "abac"], ["ab", "b"]),
    ("root ::=", [""], ["a"]),
], ids=["arithmetic", "JSON", "list", "up to a word", "numbers of characters", "twice how often", "sets", "names", "recursion",
        "one that may be absent", "nothing"])
def test_grammars_as_they_are_written(opened, tokenizer, grammar, texts, others):
    vocabulary = opened(grammar)
    assert [text for text in texts if not is_of(vocabulary, tokenizer, text)] == []
    assert [text for text in others if is_of(vocabulary, tokenizer, text)] == []


@pytest.mark.parametrize(("grammar", "expected"), [
    ('foo ::= "a"', "there is no rule root"), ("root ::= foo", "the rule root refers to foo, which is not defined"),
    ('root ::= "a', "the text ends in the middle"), ("root ::= [ab", "the text ends in the middle"),
    ('root ::= "a"\n | "b"', "line 2: expected a name"),
    ('root ::= ("a"', "expected a closing parenthesis"), ('root ::= "a")', "expected the end of the line"),
    ('root ::= "a"{2,1}', "a repeat count"),
    ("root ::= [b-a]", "ends before it begins"), ("root ::= []", "is empty"), ('root ::= "\\ud800"', "no such character"),
    ('root ::= "\\q"', "no such character"), ('root "a"\nb ::= "b"', "expected ::="), ("root ::= <think>", "expected a name"),
    ('root ::= "a" root', "the rule root never ends"), ('root ::= "b" | r{1,2}\nr ::= "x"+ r .', "the rule r never ends"),
    ("root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "nested too deeply")])
def test_what_is_wrong_is_one_line(grammar, expected):
    with pytest.raises(GbnfError) as refused:
        to_lark(grammar)
    assert expected in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="--grammar: the grammar: ") as told:
        read_grammar_flag(grammar)
    assert told.value.hint == ("add an alternative that does not recurse" if "never ends" in expected else refused.value.hint)


def chain(rules: int) -> str:
    names = "".join(f'r{number} ::= "w" r{number + 1}\n' for number in range(rules))
    return f'root ::= r0\n{names}r{rules} ::= "x"'


def test_rules_in_one_another_have_an_end(opened, tokenizer):
    """Past some 1,500 the library ends the whole program."""
    vocabulary = opened(chain(400))
    assert tokenizer.vocabulary()["w"] in narrowed(vocabulary.begin(), vocabulary.rows)
    with pytest.raises(UsageError, match="rules are nested more than 500 deep"):
        read_grammar_flag(chain(3000))


def test_what_is_too_much_for_one_terminal_is_cut(opened, tokenizer):
    double = "".join(f"r{number} ::= r{number + 1} r{number + 1}\n" for number in range(40))
    assert is_of(opened(f'root ::= r0\n{double}r40 ::= "x"?'), tokenizer, "")
    with pytest.raises(UsageError) as refused:
        read_grammar_flag("root ::= " + "(" * 100 + '"x"' + ' "y")?' * 100)
    assert "too deeply nested" in refused.value.message and len(refused.value.message) < 400
    assert "nest parentheses" in refused.value.hint
    assert is_of(opened("root ::= " + "(" * 100 + '"x"' + ")?" * 100), tokenizer, "x"), "one count says what all of them say"
