"""Tool calls as models write them: what each format's parser reads from an answer, whole or split anywhere."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effllm.runtime.events import Call
from effllm.runtime.tool_calls.formats import FORMATS, Format
from effllm.runtime.tool_calls.reader import CallReader
from effllm.runtime.tool_calls.schema import closed_schema

TYPES = {"text": "string", "count": "integer", "share": "number", "on": "boolean", "things": "array", "more": "object"}
TOOLS = {name: {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}} for name in ("look_up", "say.it")}
BY_NAME = {format.name: format for format in FORMATS}


def parts_of(format: Format | str, pieces: Sequence[str], tools: Mapping[str, Any] = TOOLS) -> tuple[str, list[tuple[str, Any]]]:
    """(content, calls) of an answer that comes in these pieces."""
    reader = CallReader(BY_NAME[format] if isinstance(format, str) else format, tools)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.flush()
    calls = [part for part in parts if isinstance(part, Call)]
    assert reader.call_count == len(calls)
    return "".join(part for part in parts if isinstance(part, str)), [(call.name, json.loads(call.arguments)) for call in calls]


def xml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tagged(open: str, key: str, behind: str, end: str, close: str) -> Any:
    """How a template writes a call whose arguments stand between tags."""
    return lambda name, arguments: "".join(
        [open.format(name), *(f"{key.format(k)}{behind}{xml(v)}{end}" for k, v in arguments.items()), close])


def gemma(value: Any, top: bool = True) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(gemma(each) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def named(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {compact(arguments)}}}'


# How published templates write one call, and what stands around several.
WRITTEN = {
    "Hermes": lambda n, a: f"<tool_call>\n{named(n, a)}\n</tool_call>",
    "Qwen 3 Coder": tagged("<tool_call>\n<function={}>\n", "<parameter={}>\n", "", "\n</parameter>\n", "</function>\n</tool_call>"),
    "Seed": tagged("<seed:tool_call>\n<function={}>\n", "<parameter={}>", "", "</parameter>\n", "</function>\n</seed:tool_call>"),
    "GLM": tagged("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "", "</arg_value>\n", "</tool_call>"),
    "Hunyuan 3": tagged("<tool_call:opensource>{}<tool_sep:opensource>\n", "<arg_key:opensource>{}</arg_key:opensource>\n",
                        "<arg_value:opensource>", "</arg_value:opensource>\n", "</tool_call:opensource>"),
    "Mistral": lambda n, a: f"[TOOL_CALLS][{named(n, a)}]",
    "Mistral 3": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{compact(a)}",
    "DeepSeek V3": lambda n, a: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{compact(a)}\n```<｜tool▁call▁end｜>",
    "DeepSeek V3.1": lambda n, a: f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{compact(a)}<｜tool▁call▁end｜>",
    "DeepSeek V3.2": lambda n, a: f'<｜DSML｜invoke name="{n}">\n' + "".join(
        f'<｜DSML｜parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">{xml(v)}</｜DSML｜parameter>\n'
        for k, v in a.items()) + "</｜DSML｜invoke>\n",
    "MiniMax M2": tagged('<minimax:tool_call>\n<invoke name="{}">\n', '<parameter name="{}">', "", "</parameter>\n",
                         "</invoke>\n</minimax:tool_call>"),
    "harmony": lambda n, a: f"to=functions.{n}<|message|>{compact(a)}<|end|>",
    "Gemma 4": lambda n, a: f"<|tool_call>call:{n}{gemma(a)}<tool_call|>",
    "Granite 3": lambda n, a: f"<|tool_call|>[{named(n, a)}]",
    "Kimi K2": lambda n, a: f"<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{compact(a)}<|tool_call_end|>",
    "Cohere": lambda n, a: f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "{n}", "parameters": {compact(a)}}}\n]'
                           "<|END_ACTION|>",
    "LFM2": lambda n, a: f"<|tool_call_start|>[{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})]<|tool_call_end|>",
    "OLMo 3": lambda n, a: f"<function_calls>\n{n}({', '.join(f'{k}={compact(v)}' for k, v in a.items())})\n</function_calls>",
    "Apertus": lambda n, a: f'<|tools_prefix|>[{{"{n}": {compact(a)}}}]<|tools_suffix|>',
    "Nemotron": lambda n, a: f"<TOOLCALL>[{named(n, a)}]</TOOLCALL>",
    "Hunyuan": lambda n, a: f"<tool_call>{n}\n```json\n{compact(a)}\n```\n</tool_call>",
    "tool_calls": lambda n, a: f"<tool_calls>\n{named(n, a)}\n</tool_calls>",
    "Solar": lambda n, a: f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{n}<|tool_call:args|>{compact(a)}<|tool_call:end|>",
    "Functionary": lambda n, a: f"<function={n}>{compact(a)}</function>",
    "MiniCPM": tagged('<function name="{}">', '<param name="{}">', "", "</param>", "</function>"),
    "GigaChat": lambda n, a: f"<|function_call|>{named(n, a)}",
    "Phi 4 mini": lambda n, a: f"functools[{named(n, a)}]",
    "Llama 3": lambda n, a: named(n, a, "parameters"),
    "Llama 4": lambda n, a: f"[{n}({', '.join(f'{k}={compact(v)}' for k, v in a.items())})]",
}
AROUND = {"DeepSeek V3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
          "DeepSeek V3.1": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
          "DeepSeek V3.2": ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
          "Kimi K2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), "Solar": ("<|tool_calls|>", ""),
          "Hunyuan 3": ("<tool_calls:opensource>\n", "</tool_calls:opensource>"), "Hunyuan": ("<tool_calls>", "</tool_calls>")}
WRITTEN["DeepSeek V4"] = WRITTEN["DeepSeek V3.2"]
AROUND["DeepSeek V4"] = ("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>")
ARGUMENTS = {"text": 'Köln "7"\n5', "count": 3, "share": 0.5, "on": True, "things": ["a", 1, None], "more": {"deep": {"er": [1]}}}
BARE = [format.name for format in FORMATS if format.bare]


def written(name: str, calls: Sequence[tuple[str, Any]]) -> str:
    begin, end = AROUND.get(name, ("", ""))
    return begin + "\n".join(WRITTEN[name](*call) for call in calls) + end


def test_every_format_is_tried() -> None:
    assert WRITTEN.keys() == BY_NAME.keys(), "WRITTEN says how a template writes each of FORMATS"
    assert len(BY_NAME) == len(FORMATS), "two of FORMATS have one name"


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_however_the_text_is_cut(name: str) -> None:
    calls = [("look_up", ARGUMENTS), ("say.it", {}), ("look_up", {"text": ""})]
    said = "" if name in BARE else "Let me see.\n\n"
    text = said + written(name, calls)
    expected = (said.rstrip(), calls)
    assert parts_of(name, [text]) == expected
    assert parts_of(name, list(text)) == expected
    for at in range(len(text)):
        assert parts_of(name, [text[:at], text[at:]]) == expected, text[:at]


@pytest.mark.parametrize("name", WRITTEN)
def test_text_after_calls_is_content(name: str) -> None:
    text = written(name, [("look_up", {"count": 1})]) + "\n\nDone."
    content, calls = parts_of(name, [text])
    assert (content, calls) == parts_of(name, list(text)) and calls == [("look_up", {"count": 1})] and content == "Done."


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_cut_stays_text(name: str) -> None:
    """Every beginning of a call, as -n may leave it, is content to the letter, or the call where nothing of that is missing."""
    text = written(name, [("look_up", {"text": "a b", "count": 12})])
    for at in range(len(text)):
        content, calls = parts_of(name, list(text[:at]))
        assert calls and set(calls[0][1]) <= {"text", "count"} and not content or content == text[:at], text[:at]
        assert (content, calls) == parts_of(name, [text[:at]])


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_without_calls_is_what_it_was(name: str) -> None:
    for text in ("  Hello,\n\n\tyou. ", "", "\n", "{", "[", "a < b and <b>c</b> [1, 2] {3}", '{"a": 1}', "[1, 2]", "[f(x)]",
                 '{"name": "other"}', "x" * 600 + "<tool_call>" + "y" * 600, "<function_calls>no</function_calls>",
                 "<tool_call>" * 200):
        assert parts_of(name, [text]) == parts_of(name, list(text)) == (text, []), text


PLAIN = st.none() | st.booleans() | st.integers(-2**53, 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.text(min_size=1, max_size=8)
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)
# Texts with what a careless reader would stumble over.
HARD = st.lists(st.sampled_from(["</", "</tool_call>", "</parameter>", "<parameter=x>", "</arg_value>", "}", '"', "\\", "'", "\n", "]]",
                                 "é", "<tool_call>", "```", "[ARGS]", " ", "1", "true", "{", "<|message|>x", "😀",
                                 "</function_calls>"]),
                max_size=6).map("".join)
OF_TEXT = ("Qwen", "Seed", "GLM", "Hunyuan 3", "MiniMax", "Gemma", "LFM2", "OLMo", "MiniCPM", "DeepSeek V3.2", "DeepSeek V4")
OF_JSON = [name for name in WRITTEN if name not in BARE and not name.startswith(OF_TEXT)]


@pytest.mark.parametrize("name", OF_JSON)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(arguments=st.dictionaries(KEYS, JSON | HARD, max_size=4), cut=st.integers(0, 400))
def test_any_json(name: str, arguments: dict[str, Any], cut: int) -> None:
    text = written(name, [("look_up", arguments)])
    assert parts_of(name, [text[:cut], text[cut:]]) == ("", [("look_up", arguments)])
    assert parts_of(name, list(text)) == ("", [("look_up", arguments)])


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20) | st.sampled_from(
    ["12", "true", "null", '{"a": 1}', "[1]", "'x'", '"', " lead", "trail ", "a\nb", "a </b> c", "x < y", "\\n", "</", "é😀"])
FITTING = st.fixed_dictionaries({}, optional={
    "text": TEXTS, "count": st.integers(-10**9, 10**9), "share": st.floats(-1e6, 1e6), "on": st.booleans(),
    "things": st.lists(TEXTS, max_size=3),
    "more": st.dictionaries(st.sampled_from(["a", "b c", "d"]), TEXTS | st.integers(0, 9), max_size=3)})


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in OF_JSON and name not in ("Gemma 4", "Llama 3")])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(arguments=FITTING, cut=st.integers(0, 300))
def test_any_arguments_of_the_types_that_the_schema_states(name: str, arguments: dict[str, Any], cut: int) -> None:
    """Texts that look like numbers or JSON stay texts."""
    text = written(name, [("look_up", arguments)])
    assert parts_of(name, [text[:cut], text[cut:]]) == parts_of(name, list(text)) == ("", [("look_up", arguments)])


def test_python_as_models_write_it() -> None:
    """Strings over lines, names that Python has not, JSON's words; nothing that would have to be run."""
    tools = {"get-it": {}, "a/b": {}, "look_up": {}}
    code = "get-it(a='x\ny', b='get-it(1)'), a/b(c=null, d=-1.5, e={\"f\": [true, (1,)]}), look_up(**{'z': 1})"
    text = f"<|tool_call_start|>[{code}]<|tool_call_end|>"
    numbers = {"c": None, "d": -1.5, "e": {"f": [True, [1]]}}
    expected = [("get-it", {"a": "x\ny", "b": "get-it(1)"}), ("a/b", numbers), ("look_up", {"z": 1})]
    assert parts_of("LFM2", [text], tools) == parts_of("LFM2", list(text), tools) == ("", expected)
    for code in ("look_up(open('x'))", "look_up(1)", "look_up(a=b)", "look_up", "import os", "look_up(a=1j)", "look_up(**'x')",
                 "look_up(a=-True)", "(lambda: 1)()", "look_up(a={1: 2})", "look_up(a=" + "[" * 500,
                 "x = look_up(a=1)", "look_up(a=f'{1}')", "", "[]"):
        text = f"<|tool_call_start|>{code}<|tool_call_end|>"
        assert parts_of("LFM2", [text], tools) == parts_of("LFM2", list(text), tools) == (text, [])


@pytest.mark.parametrize(("schema", "text", "value"), [
    ({"type": "string"}, "12", "12"), ({"type": "integer"}, "12", 12), ({"type": "number"}, "12", 12), ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False), ({"type": "array"}, "['a', 1]", ["a", 1]), ({"type": "object"}, "{'a': None}", {"a": None}),
    ({"type": ["string", "null"]}, "null", None), ({"type": ["string", "null"]}, "12", "12"), ({"type": ["integer", "string"]}, "12", 12),
    ({"type": ["integer", "string"]}, "a", "a"), ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "1", "1"), ({}, "12", 12),
    ({}, "a b", "a b"), ({"enum": ["1", "2"]}, "1", "1"), ({"enum": [1, 2]}, "1", 1), ({"const": "1"}, "1", "1"),
    ({"$ref": "#/$defs/text"}, "1", "1"),
    ({"$ref": "#/$defs/none"}, "1", 1), ({"$ref": "#/$defs/self"}, "1", 1), ({"type": "integer"}, "about 3", "about 3"),
    ({"type": "number"}, "NaN", "NaN"), ({"type": "object"}, "[" * 9999, "[" * 9999), (None, "1", 1), ({"type": 3, "anyOf": 4}, "1", 1),
])
def test_bare_text_is_read_by_the_schema(schema: Any, text: str, value: Any) -> None:
    tools = {"f": {"properties": {"x": schema}, "$defs": {"text": {"type": "string"}, "self": {"$ref": "#/$defs/self"}}}}
    for name, written in (("Qwen 3 Coder", f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"),
                          ("GLM", f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>")):
        assert parts_of(name, [written], tools) == ("", [("f", {"x": value})])


def test_objects_have_the_properties_that_they_name() -> None:
    def shut(schema: dict) -> dict:
        return {**schema, "additionalProperties": False}

    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    for each in ({"type": "object"}, {"type": "string"}, {**inner, "additionalProperties": True}, {**inner, "patternProperties": {"x": {}}},
                 {"allOf": [inner, {"properties": {"b": {}}}]}, {**inner, "allOf": [inner]}, True, {"properties": 3}, {"items": 3}, "x"):
        assert closed_schema(each) == each
    assert closed_schema(inner) == shut(inner) and closed_schema({"properties": {}}) == shut({"properties": {}})
    assert closed_schema({"type": "array", "items": inner}) == {"type": "array", "items": shut(inner)}
    assert closed_schema({"anyOf": [inner, {"type": "null"}], "$defs": {"d": inner}}) == {
        "anyOf": [shut(inner), {"type": "null"}], "$defs": {"d": shut(inner)}}
    assert closed_schema({"properties": {"properties": inner}}) == shut({"properties": {"properties": shut(inner)}})


@pytest.mark.parametrize("text", ['{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {"a": 1e999}}', '{"name": 1}',
                                  "{}", "[]", "1", '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "x"}',
                                  '{"name": "f", "arguments": {]}',
                                  '{"a":' * 3000 + "1" + "}" * 3000, '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}"])
def test_json_that_is_no_call_stays_text(text: str) -> None:
    text = f"<tool_call>{text}</tool_call>"
    assert parts_of("Hermes", [text]) == (text, [])


def test_json_as_models_write_it() -> None:
    """Line feeds within strings, arguments as text once more, none at all, half a character by its number, OpenAI's own form."""
    for written, arguments in (('{"name": "f", "arguments": {"a": "x\ny"}}', {"a": "x\ny"}),
                               ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
                               ('{"name": "f"}', {}), ('{"name": "f", "arguments": null}', {}), ('{"name": "f", "arguments": ""}', {}),
                               ('{"name": "f", "parameters": {"a": "\\ud800"}}', {"a": "\ud800"}),
                               ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', {"a": 1})):
        assert parts_of("Hermes", [f"<tool_call>{written}</tool_call>"]) == ("", [("f", arguments)])
        call, = CallReader(BY_NAME["Hermes"], TOOLS).push(f"<tool_call>{written}</tool_call>")
        assert isinstance(call, Call) and call.arguments.encode()


@pytest.mark.slow
def test_long_calls_are_read_in_time() -> None:
    """A file of 200,000 characters as an argument, and an answer of marks alone."""
    for name, text in (("Hermes", "x{}\\n" * 40_000), ("Qwen 3 Coder", "x{}>\n" * 40_000)):
        arguments = {"text": text}
        pieces = written(name, [("look_up", arguments)])
        begin = time.thread_time()
        assert parts_of(name, [pieces[at : at + 400] for at in range(0, len(pieces), 400)]) == ("", [("look_up", arguments)])
        assert time.thread_time() - begin < 5
    begin = time.thread_time()
    assert parts_of("Hermes", ["<tool_call>{" * 10_000]) == ("<tool_call>{" * 10_000, [])
    assert time.thread_time() - begin < 5


MARKS = sorted({mark for format in FORMATS for mark in (*format.opens, *format.closers)})
PIECES = MARKS + """look_up say.it functions.look_up:0 ( ) text= 'x' , = {"name":"look_up","arguments":{}} [ ] { } " :
    </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <parameter=text> </parameter> </function> > [ARGS] ```json ``` <|message|>
    <|tool_call_end|> <tool_call|> <|"|> </invoke> text 1 é""".split() + ["\n", " "]


@pytest.mark.parametrize("name", WRITTEN)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_marks_in_any_order_are_read_alike_however_they_are_cut(name: str, data: st.DataObject) -> None:
    """No answer ends in an error, and each letter of it is content or a part of calls."""
    own = [*BY_NAME[name].opens, *BY_NAME[name].closers]
    text = "".join(data.draw(st.lists(st.sampled_from(own) | st.sampled_from(PIECES), max_size=14)))
    whole = parts_of(name, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    assert whole == parts_of(name, list(text)) == parts_of(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])])
    assert whole[1] or whole[0] == text
