"""Free-text tool calls: what a model may write in JSON, on a channel and between tags, where the text has a grammar."""

import json
from types import SimpleNamespace

import pytest
from test_tool_call_generation import ASKED, CHANNELS, FABLE, HERMES, marked

from effllm import UsageError
from effllm.runtime.config import read_config
from effllm.runtime.tool_calls.tool_calling import UNCONSTRAINED_TEXT, ToolCalling, tools_of

GIVEN = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
FREE = {"type": "function", "function": {"name": "patch", "parameters": GIVEN, "strict": True, "grammar": r"""start: LINE+
LINE: /[+-].*\n/"""}}
ROUND = {"type": "function", "function": {**FREE["function"], "name": "list", "grammar": r"""start: "[" (start | /"[^"]*\n"/)* "]" """}}


@pytest.fixture(scope="module")
def engine() -> SimpleNamespace:
    """As much of one as a tokenizer asks for."""
    return SimpleNamespace(config=read_config(FABLE))


@pytest.mark.parametrize("template", ["in text", "channels"])
def test_free_text_is_held_to_its_grammar_within_a_call(engine, template):
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
    tokenizer = marked(engine, HERMES) if template == "in text" else marked(engine, CHANNELS, *marks)
    calling, tools = ToolCalling(tokenizer), tools_of([FREE], "required")
    assert calling.fallbacks(tools) == [] and calling.fallbacks(tools_of([FREE, ROUND])) == [UNCONSTRAINED_TEXT.format("list")]
    assert "LINE" not in json.dumps(calling.prepare([ASKED], tools)), "what it is held to is not what the model is told"

    def written(text):
        """Whether the model may end its answer behind a call with it. Raises where it may not write it at all."""
        arguments = json.dumps({"input": text})
        call = f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>' if template == "in text" else \
            f" to=functions.patch<|channel|>commentary json<|message|>{arguments}"
        held = calling.constraint(tools, None).compile(tokenizer, tokenizer.vocab_size).begin()
        for token in tokenizer.encode(call, add_special_tokens=False):
            held.accept(token, False)
        return held.is_whole

    assert written('+say "so" \\ here\n-\n')
    for text in ("+say\nso\n", "+say", ""):
        with pytest.raises(UsageError, match="satisfy the grammar"):
            written(text)


TAGGED = ("<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n"
          "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>")
KEYED = ("<tool_call>{{ c.function.name }}\n{% for key, value in c.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
         "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>")
QUOTED = ("<|tool_call>call:{{ c.function.name }}{days:{{ c.function.arguments.days }},place:<|\"|>{{ c.function.arguments.place }}<|\"|>}"
          "<tool_call|>")


@pytest.mark.parametrize(("call", "words", "around"), [
    (TAGGED, [], ("<tool_call>\n<function=patch>\n<parameter=input>\n", "\n</parameter>\n</function>\n</tool_call>")),
    (TAGGED, ["<tool_call>", "</parameter>", "</tool_call>"],
     ("<tool_call>\n<function=patch>\n<parameter=input>\n", "\n</parameter>\n</function>\n</tool_call>")),
    (KEYED, ["<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
     ("<tool_call>patch\n<arg_key>input</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>")),
    (QUOTED, ["<|tool_call>", "<tool_call|>", '<|"|>'], ('<|tool_call>call:patch{input:<|"|>', '<|"|>}<tool_call|>'))])
def test_free_text_is_held_to_its_grammar_between_tags(engine, call, words, around):
    begin, end = HERMES.index("<tool_call>"), HERMES.index("</tool_call>") + len("</tool_call>")
    tokenizer = marked(engine, HERMES[:begin] + call + HERMES[end:], *words)
    calling, tools = ToolCalling(tokenizer), tools_of([FREE], "required")
    assert calling.fallbacks(tools) == [] and calling.fallbacks(tools_of([FREE, ROUND])) == [UNCONSTRAINED_TEXT.format("list")]

    def written(text):
        held = calling.constraint(tools, None).compile(tokenizer, tokenizer.vocab_size).begin()
        tokens = tokenizer.encode(around[0] + text + around[1], add_special_tokens=False)
        for token in tokens:
            held.accept(token, False)
        stream, filter = tokenizer.stream((), calling.visible_tokens), calling.call_filter(None, tools)
        found = [part for token in tokens for part in filter.push(stream.push(token))] + filter.push(stream.flush()) + filter.flush()
        (kind, made), = found
        assert kind == "call" and made.name == "patch" and json.loads(made.arguments) == {"input": text}
        return held.is_whole

    assert written('+say "so" \\ here <b>\n-\n')
    for text in ("+say\nso\n", "+say", ""):
        with pytest.raises(UsageError, match="satisfy the grammar"):
            written(text)
