"""Calls of tools in answers of the real model: a grammar makes any model call one, and what it says is read as it streams."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken

import effllm
from effllm import EffllmError, UsageError
from effllm.runtime.constraints.constraint import read_grammar_flag, read_schema_flag
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Call, Done, Notice, TextDelta
from effllm.runtime.generation.served_model import GenerationOptions, ServedModel
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.templates.template import ChatTemplate
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tool_calls.call_style import ARGUMENTS, NAME, TOOL
from effllm.runtime.tool_calls.tool_calling import NO_TOOLS, UNHELD, ToolCalling, tools_of

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
WISH = GenerationOptions(SamplerSettings(temperature=0), max_tokens=160)
ASKED = {"role": "user", "content": "Tell me of the fox."}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "properties": {"place": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"], "additionalProperties": False}}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TIME = {"type": "function", "function": {"name": "time.now", "parameters": NOTHING}}
HERMES = ('{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}'
          '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", '
          '"arguments": {{ c.function.arguments | tojson }}}'
          "\n</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")


@pytest.fixture(scope="module")
def engine():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu")))[-1]
    yield engine
    engine.close()


@pytest.fixture
def replies(engine):
    engine.reset()
    return ServedModel(engine, Tokenizer.load(FABLE, engine.config))


def calls_of(events) -> list[tuple[str, dict]]:
    return [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, Call)]


def said_in(events) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


LISTED = HERMES.replace("<tool_call>", "[TOOL_CALLS][").replace("</tool_call>", "]")
BARE = HERMES.replace("<tool_call>\n", "").replace("\n</tool_call>", "").replace('"arguments"', '"parameters"')


@pytest.mark.parametrize("template", ["", HERMES, LISTED, BARE])
@pytest.mark.parametrize("choice", ["required", "weather", "time.now"])
def test_a_call_that_must_be_is_made(replies, template, choice):
    """By a model that never saw one, with arguments of the schema and whole at the end."""
    if template:
        replies.tokenizer.template = ChatTemplate(template)
    events = [*replies.reply([ASKED], WISH, tools_of([WEATHER, TIME], choice))]
    (name, arguments), = calls_of(events)
    assert name == choice or choice == "required" and name in ("weather", "time.now")
    assert arguments == {} if name == "time.now" else arguments["place"] in ("Oslo", "Bergen") and 1 <= arguments["days"] <= 9
    assert not said_in(events) and events[-1].stats.finish_reason == "stop"
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices == ([] if template else [NO_TOOLS])


def test_no_arguments_are_made_up(replies):
    """Where a schema does not say that there are others."""
    replies.tokenizer.template = ChatTemplate(HERMES)
    loose = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"place": {"type": "string", "maxLength": 8}}, "required": ["place"]}}}
    (_, arguments), = calls_of(replies.reply([ASKED], WISH, tools_of([loose], "required")))
    assert arguments.keys() == {"place"} and len(arguments["place"]) <= 8
    bare = {"type": "function", "function": {"name": "weather"}}
    assert calls_of(replies.reply([ASKED], WISH, tools_of([bare], "required"))) == [("weather", {})]


def test_a_call_that_is_cut_is_text(replies):
    for length in (1, 9, 24):
        events = [*replies.reply([ASKED], replace(WISH, max_tokens=length), tools_of([WEATHER], "required"))]
        assert not calls_of(events) and events[-1].stats.finish_reason == "length" and len(said_in(events)) >= length


def test_what_the_model_said_before_reaches_it(replies):
    """Calls and what they gave back are in the next prompt, most of which the cache holds already."""
    replies.tokenizer.template = ChatTemplate(HERMES)
    first = [*replies.reply([ASKED], WISH, tools_of([WEATHER], "required"))]
    call = next(event for event in first if isinstance(event, Call))
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]},
        {"role": "tool", "tool_call_id": "x", "content": "Rain."}]
    second = [*replies.reply(messages, replace(WISH, max_tokens=4), tools_of([WEATHER]))][-1].stats
    assert second.cached_tokens >= first[-1].stats.prompt_tokens + 8
    without = [*replies.reply(messages, replace(WISH, max_tokens=4))]
    assert isinstance(without[-1], Done) and not calls_of(without)


def answering(replies, monkeypatch, text):
    """The model says just this."""
    tokenizer = replies.tokenizer
    ids = [*tokenizer.encode(text, add_special_tokens=False), min(tokenizer.stop_ids)]

    class Step:
        def __init__(self, token):
            self.token, self.finish = token, "stop" if token in tokenizer.stop_ids else None

    monkeypatch.setattr(replies.engine, "generate", lambda *_: iter([Step(token) for token in ids]))


def test_calls_amid_text(replies, monkeypatch):
    replies.tokenizer.template = ChatTemplate(HERMES)
    call = '<tool_call>\n{"name": "time.now", "arguments": {}}\n</tool_call>'
    answering(replies, monkeypatch, f"I look.\n{call}\n{call}")
    events = [*replies.reply([ASKED], WISH, tools_of([TIME]))]
    assert calls_of(events) == [("time.now", {})] * 2 and said_in(events) == "I look."
    events = [*replies.reply([ASKED], WISH, tools_of([TIME], several=False))]
    assert calls_of(events) == [("time.now", {})] and events[-1].stats.finish_reason == "stop"
    events = [*replies.reply([ASKED], WISH)]
    assert not calls_of(events) and said_in(events) == f"I look.\n{call}\n{call}"


def test_a_schema_for_answers_that_call_nothing(replies):
    replies.tokenizer.template = ChatTemplate(HERMES)
    form = read_schema_flag(json.dumps({**NOTHING, "properties": {"animal": {"enum": ["fox"]}}, "required": ["animal"]}))
    events = [*replies.reply([ASKED], replace(WISH, constraint=form), tools_of([WEATHER]))]
    assert calls_of(events) or json.loads(said_in(events)) == {"animal": "fox"}
    with pytest.raises(UsageError, match="not to a grammar"):
        [*replies.reply([ASKED], replace(WISH, constraint=read_grammar_flag('root ::= "a"')), tools_of([WEATHER]))]


def test_what_is_refused(replies):
    with pytest.raises(UsageError, match="not one of the tools"):
        [*replies.reply([ASKED], WISH, tools_of([WEATHER], "time.now"))]
    replies.tokenizer.template = None
    with pytest.raises(EffllmError, match="base model"):
        [*ServedModel(replies.engine, replies.tokenizer).reply([ASKED], WISH, tools_of([WEATHER]))]


def marked(engine, template, *words):
    """The tokenizer of fable with a template and with words for marks."""
    tokenizer = Tokenizer.load(FABLE, engine.config)
    tokenizer.template = ChatTemplate(template)
    tokenizer._backend.add_special_tokens([AddedToken(word, special=True) for word in words])
    tokenizer._model_rows = tokenizer.vocab_size
    return tokenizer


@pytest.mark.parametrize(("call", "words", "told"), [
    ("<|tool_call>call:{{ c.function.name }}{days:{{ c.function.arguments.days }},place:<|\"|>{{ c.function.arguments.place }}<|\"|>}"
     "<tool_call|>", ["<|tool_call>", "<tool_call|>", '<|"|>'], []),
    ('<function name="{{ c.function.name }}">{% for key, value in c.function.arguments.items() %}<param name="{{ key }}">'
     "{% if value is string %}<![CDATA[{{ value }}]]>{% else %}{{ value }}{% endif %}</param>{% endfor %}</function>",
     ["</param>", "</function>"], [UNHELD]),
    ("[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
     ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"], []),
])
def test_marks_that_are_tokens(engine, call, words, told):
    """They are a part of the text of an answer with calls, and a grammar asks for them by their number."""
    begin, end = HERMES.index("<tool_call>"), HERMES.index("</tool_call>") + len("</tool_call>")
    tokenizer = marked(engine, HERMES[:begin] + call + HERMES[end:], *words)
    calling = ToolCalling(tokenizer)
    assert set(words) == set(calling.marks.values())
    tools = tools_of([TOOL], "required")
    assert calling.fallbacks(tools) == told
    sample = calling.style.sample.replace("call_a1b2c3d4e5f6a7b8c9d0e1f2", "a1b2c3d4e")
    tokens = tokenizer.encode(sample, add_special_tokens=False)
    stream, filter = tokenizer.stream((), calling.marks), calling.reading(None, tools)
    found = [part for token in tokens for part in filter.push(stream.push(token))] + filter.push(stream.flush()) + filter.flush()
    (kind, made), = found
    assert kind == "call" and (made.name, json.loads(made.arguments)) == (NAME, ARGUMENTS)
    held = calling.constraint(tools, None).opened(tokenizer, tokenizer.vocab_size).begin()
    for token in tokens:
        held.took(token, False)
    assert held.is_whole


CHANNELS = ("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}"
            "{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
            "{{ c.function.arguments | tojson }}<|call|>{% else %}<|message|>{{ m.content }}<|end|>{% endfor %}{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant{% endif %}")


def test_channels(engine):
    """gpt-oss calls on a channel of its own, whichever part of the header names the function."""
    tokenizer = marked(engine, CHANNELS, "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
    calling = ToolCalling(tokenizer)
    tools = tools_of([WEATHER], "required")
    assert calling.style.format.name == "harmony" and not calling.fallbacks(tools)
    arguments = '{"place": "Oslo", "days": 2}'
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for header in (" to=functions.weather<|channel|>commentary json", "<|channel|>commentary to=functions.weather <|constrain|>json"):
        text = f"{thought}{header}<|message|>{arguments}"
        for calls in (True, False):
            prompt = tokenizer.encode("<|start|>assistant", add_special_tokens=False)
            think = tokenizer.reasoning(prompt, calls)
            filter = calling.reading(think, tools)
            stream = tokenizer.stream((), calling.marks)
            parts = [part for token in tokenizer.encode(text, add_special_tokens=False) for part in filter.push(stream.push(token))]
            parts += filter.flush()
            assert "".join(part for kind, part in parts if kind == "thinking").startswith("Hm.")
            assert [kind for kind, _ in parts if kind == "call"] == ["call"] * calls
            if calls:
                assert (parts[-1][1].name, json.loads(parts[-1][1].arguments)) == ("weather", json.loads(arguments))


def took_all(held, tokens) -> bool:
    """Is the text of the tokens whole, if it may be?"""
    for token in tokens:
        held.took(token, True)
    return held.is_whole


def test_turns_of_channels_are_held_as_a_whole(engine):
    """Reasoning as the model likes, then a call of either header, or an answer of a schema."""
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
    for words in (marks, [*marks, "<|constrain|>"]):
        tokenizer = marked(engine, CHANNELS, *words)
        tokenizer.stop_ids = frozenset(tokenizer.added[word] for word in ("<|return|>", "<|call|>"))  # fable ends texts with <|end|>
        calling = ToolCalling(tokenizer)
        must = calling.constraint(tools_of([WEATHER, TIME], "weather"), None)
        may = calling.constraint(tools_of([WEATHER, TIME]),
                                 read_schema_flag('{"type": "object", "properties": {"a": {"type": "integer"}}}'))
        strict = calling.constraint(tools_of([{"type": "function", "function": {**WEATHER["function"], "strict": True}}]), None)
        right, wrong = '{"place": "Oslo", "days": 2}', '{"place": "Rome"'
        thought = "<|channel|>analysis<|message|>Hm {1}.<|end|><|start|>assistant"
        final = '<|channel|>final<|message|>{"a": 1}'
        headers = [" to=functions.weather<|channel|>commentary json<|message|>", "<|channel|>commentary to=functions.weather<|message|>"]
        headers += ["<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"] * ("<|constrain|>" in words)
        texts = [(f"{before}{header}{right}", (must, may, strict), ()) for before in ("", thought, thought * 2) for header in headers]
        texts += [(f"{thought}{header}{wrong}", (), (must, may, strict)) for header in headers]
        texts += [(thought + final, (may, strict), (must,)), ("<|channel|>final<|message|>Yes.", (strict,), (must, may))]
        for text, fits, others in texts:
            for form in (*fits, *others):
                held = form.opened(tokenizer, tokenizer.vocab_size).begin(think=tokenizer.reasoning(tokenizer.encode("<|start|>assistant")))
                assert not held.free

                tokens = tokenizer.encode(text, add_special_tokens=False)
                if form in fits:
                    assert took_all(held, tokens)
                else:
                    with pytest.raises(EffllmError):
                        assert took_all(held, tokens) is None


@pytest.mark.parametrize("mark", [True, False])
def test_strict_functions_are_held_to_their_schema_once_a_call_has_begun(engine, mark):
    """Whether the mark is a token or letters; other text is as it comes."""
    tokenizer = marked(engine, HERMES, *(["<tool_call>", "</tool_call>"] if mark else []))
    calling = ToolCalling(tokenizer)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert calling.constraint(tools_of([WEATHER]), None) is None
    assert "strict" not in json.dumps(calling.prepared([ASKED], tools_of([strict]))[1])
    form = calling.constraint(tools_of([strict, TIME]), None).opened(tokenizer, tokenizer.vocab_size)
    for text, whole in (('Hm <b>. <tool_call>\n{"name": "weather", "arguments": {"place": "Oslo", "days": 2}}\n</tool_call>', True),
                        ("Only words, {1}.", True), ('<tool_call>\n{"name": "time.now", "arguments": {}}\n</tool_call>\n', True),
                        ('<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"', False),
                        ('Hm. <tool_call>\n{"name": "else"', False)):
        matcher = form.begin()
        if whole:
            for token in tokenizer.encode(text, add_special_tokens=False):
                matcher.took(token, False)
            assert matcher.is_whole
        else:
            with pytest.raises(EffllmError):
                for token in tokenizer.encode(text, add_special_tokens=False):
                    matcher.took(token, False)


ITEMS = "{% for key, value in c.function.arguments.items() %}"
VALUE = "{{ value if value is string else value | tojson }}"
TAGGED = {
    "Qwen 3 Coder": "<tool_call>\n<function={{ c.function.name }}>\n" + ITEMS + "<parameter={{ key }}>\n" + VALUE
                    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "GLM": "<tool_call>{{ c.function.name }}\n" + ITEMS + "<arg_key>{{ key }}</arg_key>\n<arg_value>" + VALUE
           + "</arg_value>\n{% endfor %}</tool_call>",
    "Gemma 4": "{% macro show(value) %}{% if value is string %}<|\"|>{{ value }}<|\"|>{% elif value is sequence %}[{% for each in value %}"
               "{{ ',' if not loop.first }}{{ show(each) }}{% endfor %}]{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
               "<|tool_call>call:{{ c.function.name }}{{ '{' }}{% for key, value in c.function.arguments | dictsort %}"
               "{{ ',' if not loop.first }}{{ key }}:{{ show(value) }}{% endfor %}{{ '}' }}<tool_call|>",
    "LFM2": "<|tool_call_start|>[{{ c.function.name }}(" + ITEMS + "{{ ', ' if not loop.first }}{{ key }}="
            "{% if value is string %}'{{ value }}'{% else %}{{ value | tojson }}{% endif %}{% endfor %})]<|tool_call_end|>",
    "DeepSeek V3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ c.function.name }}">\n' + ITEMS
                     + '<｜DSML｜parameter name="{{ key }}" '
                     'string="{{ "true" if value is string else "false" }}">' + VALUE + "</｜DSML｜parameter>\n{% endfor %}"
                     "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
}
MANY = {"type": "function", "function": {"name": "plan-it", "parameters": {"type": "object", "required": ["when", "note"], "properties": {
    "note": {"type": "string"}, "when": {"enum": ["now", "later"]}, "days": {"$ref": "#/$defs/days"},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}, "mood": {"type": ["string", "null"]}},
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}}}}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("words", [[], ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
                                        "｜DSML｜"]])
def test_arguments_between_tags_are_held_to_the_schema(engine, name, words):
    begin, end = HERMES.index("<tool_call>"), HERMES.index("</tool_call>") + len("</tool_call>")
    tokenizer = marked(engine, HERMES[:begin] + TAGGED[name] + HERMES[end:], *words)
    calling, tools = ToolCalling(tokenizer), tools_of([MANY, TIME], "required")
    assert calling.style.format.name == name and not calling.fallbacks(tools)
    form = calling.constraint(tools, None).opened(tokenizer, tokenizer.vocab_size)

    def said(arguments, function="plan-it"):
        message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": function, "arguments": json.dumps(arguments)}}]}
        messages, _ = calling.prepared([ASKED, message], None)
        text = tokenizer.render_chat(messages, add_generation_prompt=False)
        return text[text.rindex("assistant: ") + len("assistant: ") :].rstrip("\n")

    def held(text):
        matcher = form.begin()
        for token in tokenizer.encode(text, add_special_tokens=False):
            matcher.took(token, False)
        return matcher.is_whole

    note = 'a <b> 12 "x"' if name == "LFM2" else 'a <b>\n12 "x"\n'  # whose template writes lines in quotes that Python has for one
    for arguments in ({"note": note, "when": "now"}, {"note": "", "when": "later", "days": 3},
                      {"note": "1", "when": "now", "days": 9, "tags": ["a", "b"], "mood": "fine"},
                      {"note": "x", "when": "now", "mood": "no"}):
        assert held(said(arguments)), said(arguments)
    assert held(said({}, "time.now"))
    for wrong in ({"when": "now"}, {"note": "x", "when": "never"}, {"note": "x", "when": "now", "days": 10},
                  {"note": "x", "when": "now", "x": 1},
                  {"note": "x", "when": "now", "tags": [1]}):
        with pytest.raises(EffllmError):
            assert held(said(wrong)) is None


@pytest.mark.parametrize("name", TAGGED)
def test_any_model_makes_a_call_between_tags(replies, name):
    begin, end = HERMES.index("<tool_call>"), HERMES.index("</tool_call>") + len("</tool_call>")
    replies.tokenizer.template = ChatTemplate(HERMES[:begin] + TAGGED[name] + HERMES[end:])
    (called, arguments), = calls_of(replies.reply([ASKED], WISH, tools_of([WEATHER], "required")))
    assert called == "weather" and arguments["place"] in ("Oslo", "Bergen") and 1 <= arguments["days"] <= 9
