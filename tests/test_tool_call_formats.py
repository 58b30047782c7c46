"""Detection of a model's tool-call format from its chat template: the format, and how the template expects messages with calls."""

import json
import time
from typing import Any

import pytest

from effllm import UsageError
from effllm.runtime.events import Call
from effllm.runtime.templates.template import ChatTemplate
from effllm.runtime.tool_calls import call_style
from effllm.runtime.tool_calls.call_style import detect_style
from effllm.runtime.tool_calls.messages import parameters_of, prepare_messages, validate_tools
from effllm.runtime.tool_calls.reader import CallReader

# Our own templates, each with the way of published ones to tell of tools and to write a call.
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TOLD = "{% if tools %}Tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chat(call: str, told: str = TOLD, between: str = "\n") -> str:
    """A template whose calls are written by `call`, with `name`, `args` and `id`."""
    return told + TURN + "{{ m.content or '' }}{% for tool_call in m.tool_calls or [] %}{% set name = tool_call.function.name %}" \
        "{% set args = tool_call.function.arguments %}{% set id = tool_call.id %}{% if not loop.first %}" + between + "{% endif %}" + call \
        + "{% endfor %}" + END


VALUES = "{{ value if value is string else value | tojson }}"
ITEMS = "{% for key, value in args.items() %}"
TEMPLATES = {
    "Hermes": chat('<tool_call>\n{"name": "{{ name }}", "arguments": {{ args | tojson }}}\n</tool_call>'),
    "Qwen 3 Coder": chat("<tool_call>\n<function={{ name }}>\n" + ITEMS + "<parameter={{ key }}>\n" + VALUES
                         + "\n</parameter>\n{% endfor %}</function>\n</tool_call>"),
    "Seed": chat("<seed:tool_call>\n<function={{ name }}>\n" + ITEMS + "<parameter={{ key }}>" + VALUES
                 + "</parameter>\n{% endfor %}</function>\n</seed:tool_call>"),
    "GLM": chat("<tool_call>{{ name }}\n" + ITEMS + "<arg_key>{{ key }}</arg_key>\n<arg_value>" + VALUES
                + "</arg_value>\n{% endfor %}</tool_call>"),
    "Mistral": chat('{% if id | length != 9 %}{{ raise_exception("nine letters") }}{% endif %}[TOOL_CALLS][{"name": "{{ name }}", '
                    '"arguments": {{ args | tojson }}, "id": "{{ id }}"}]'),
    "Mistral 3": chat('{% if id | length != 9 %}{{ raise_exception("nine letters") }}{% endif %}[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}'
                      '[ARGS]{{ args | tojson }}'),
    "DeepSeek V3": chat("{% if m.content is none %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
                        "<｜tool▁call▁begin｜>{{ tool_call.type }}"
                        "<｜tool▁sep｜>{{ name }}\n```json\n{{ args + '' }}\n```<｜tool▁call▁end｜>"
                        "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"
                        "{% endif %}", told=""),
    "DeepSeek V3.1": chat("{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>{{ name }}"
                          "<｜tool▁sep｜>{{ args | tojson }}"
                          "<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}", told="", between=""),
    "MiniMax M2": chat("<minimax:tool_call>\n" '<invoke name="{{ name }}">\n' + ITEMS + '<parameter name="{{ key }}">' + VALUES
                       + "</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>"),
    "Kimi K2": chat("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ args | tojson }}"
                    "<|tool_call_end|>"
                    "<|tool_calls_section_end|>"),
    "harmony": TOLD + "{% for m in messages %}<|start|>{{ m.role }}{% for call in m.tool_calls or [] %}"
               " to=functions.{{ call.function.name }}"
               "<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% else %}"
               "<|message|>{{ m.content }}<|end|>"
               "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "Cohere": chat('<|START_ACTION|>[\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ name }}", "parameters": '
                   "{{ args | tojson }}}"
                   "\n]<|END_ACTION|>"),
    "Apertus": chat('<|tools_prefix|>[{"{{ name }}": {{ args | tojson }}}]<|tools_suffix|>'),
    "Llama 3": chat('{% if m.tool_calls | length != 1 %}{{ raise_exception("one call at once") }}{% endif %}{"name": "{{ name }}", '
                    '"parameters": {{ args | tojson }}}'),
}
TOOLS = validate_tools([{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}}}])
ARGUMENTS = {"place": "Köln <b>", "days": 3}
CALLED = [{"role": "user", "content": "Rain?"},
          {"role": "assistant", "content": None, "tool_calls": [
              {"id": "call_77", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}]},
          {"role": "tool", "tool_call_id": "call_77", "content": [{"type": "text", "text": "none"}]}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_shows_the_format(name: str) -> None:
    """What a client sends back reaches the model in the very words that the reader takes for the same call."""
    template = ChatTemplate(TEMPLATES[name])
    call_style = detect_style(template.render)
    assert (call_style.format.name, call_style.renders_calls, call_style.role) == (name, True, "tool")
    assert call_style.variable == ("" if name.startswith("DeepSeek") else "tools")
    messages, options = prepare_messages(CALLED, TOOLS, call_style)
    text = template.render(messages, **options)
    assert "Tells it." in text and "none" in text
    answer = text[text.rindex("Rain?") :].partition("tool\n")[0]
    if call_style.format.bare:
        answer = answer.partition("assistant\n")[2]
    reader = CallReader(call_style.format, parameters_of(TOOLS))
    calls = [part for part in [*reader.push(answer), *reader.flush()] if isinstance(part, Call)]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", ARGUMENTS)]


def test_what_templates_want_of_messages() -> None:
    styles = {name: detect_style(ChatTemplate(source).render) for name, source in TEMPLATES.items()}
    assert [name for name, call_style in styles.items() if call_style.short_ids] == ["Mistral", "Mistral 3"]
    assert [name for name, call_style in styles.items() if call_style.numbered_ids] == ["Kimi K2"]
    assert [name for name, call_style in styles.items() if call_style.arguments_as_text or call_style.content is None] == ["DeepSeek V3"]
    for name, expected in (("Kimi K2", "functions.weather:0"), ("Hermes", "call_77")):
        messages, _ = prepare_messages(CALLED, TOOLS, styles[name])
        assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == expected and messages[2]["name"] == "weather"
    messages, _ = prepare_messages(CALLED, TOOLS, styles["Mistral"])
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] and len(messages[2]["tool_call_id"]) == 9


def test_marks_in_the_vocabulary_or_in_what_the_model_is_told() -> None:
    """Templates that tell of tools and write no calls: these become words of the assistant, as the model would have written them."""
    silent = TOLD + TURN + "{{ m.content }}" + END
    for words, told, name, said in (
            (["<|tool_call_start|>"], "", "LFM2", "<|tool_call_start|>[weather(place='Köln <b>', days=3)]<|tool_call_end|>"),
            ([], "Answer with <|tool_call|> and a list.", "Granite 3", '<|tool_call|>[{"name": "weather", "arguments": '),
            ([], "{% if xml_tools %}{{ xml_tools | tojson }} in <tool_call></tool_call>{% endif %}", "Hermes", "<tool_call>\n{")):
        template = ChatTemplate(told + silent.replace("tools", "unknown" if "xml" in told else "tools"))
        call_style = detect_style(template.render, words)
        assert (call_style.format.name, call_style.renders_calls, call_style.role) == (name, False, "tool")
        assert call_style.variable == ("xml_tools" if "xml" in told else "tools")
        messages, options = prepare_messages(CALLED, TOOLS, call_style)
        text = template.render(messages, **options)
        assert "Tells it." in text and said in text and "tool\nnone" in text


@pytest.mark.parametrize("source", [TURN + "{{ m.content }}" + END,
                                    TURN.replace("{{ m.role }}", "{% if m.role not in ['user', 'assistant', 'system'] %}"
                                                 "{{ raise_exception('roles') }}{% endif %}") + "{{ m.content }}" + END,
                                    TOLD + TURN + "{{ m.content }}{{ m.tool_calls and '<<unknown form>>' }}" + END])
def test_templates_without_tools(source: str) -> None:
    """A system prompt tells of them, calls are the assistant's words and what they gave back a user's, together with what follows."""
    template = ChatTemplate(source)
    call_style = detect_style(template.render)
    assert (call_style.format.name, call_style.knows_tools, call_style.renders_calls, call_style.role) == ("Hermes", False, False, "")
    said = [{"role": "system", "content": "Be kind."}, *CALLED, CALLED[2], {"role": "user", "content": "Sure?"}]
    messages, options = prepare_messages(said, TOOLS, call_style)
    text = template.render(messages, **options)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"] and not options
    assert messages[0]["content"].startswith("Be kind.\n\n") and "Tells it." in text and call_style.sample in text
    assert messages[3]["content"] == "<tool_response>\nnone\n</tool_response>\n<tool_response>\nnone\n</tool_response>\nSure?"
    reader = CallReader(call_style.format, parameters_of(TOOLS))
    found, = reader.push(messages[2]["content"])
    assert isinstance(found, Call) and json.loads(found.arguments) == ARGUMENTS


@pytest.mark.parametrize("tool", [{"type": "function"}, {"type": "function", "function": {"name": ""}}, {"type": "web_search"}, "f",
                                  {"type": "function", "function": {"name": "f", "parameters": [1]}},
                                  {"type": "function", "function": {"name": 'f"'}}])
def test_what_is_no_function_is_refused(tool: Any) -> None:
    with pytest.raises(UsageError, match=r"tools\[0\]"):
        validate_tools([tool])


def test_functions_without_words_get_empty_ones() -> None:
    tool, = validate_tools([{"function": {"name": "f"}}])
    assert tool["function"] == {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(("call", "said"), [({"function": {"arguments": "{}"}}, "no function with"), ("f", "no function with"),
                                            ({"function": {"name": "f", "arguments": "{"}}, "not a JSON object"),
                                            ({"function": {"name": "f", "arguments": "[1]"}}, "not a JSON object")])
def test_calls_that_are_none_are_refused(call: Any, said: str) -> None:
    call_style = detect_style(ChatTemplate(TEMPLATES["Hermes"]).render)
    with pytest.raises(UsageError, match=said):
        prepare_messages([{"role": "assistant", "tool_calls": [call]}], [], call_style)


def test_calls_without_identifiers_are_answered_in_order() -> None:
    call_style = detect_style(ChatTemplate(TEMPLATES["Mistral"]).render)
    calls = [{"function": {"name": name, "arguments": ""}} for name in ("one", "two")]
    messages, _ = prepare_messages([{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "1"},
                            {"role": "tool", "content": "2"}], [], call_style)
    ids = [call["id"] for call in messages[0]["tool_calls"]]
    assert len({*ids}) == 2 and [(message["tool_call_id"], message["name"]) for message in messages[1:]] == [*zip(ids, ("one", "two"))]
    assert [call["function"]["arguments"] for call in messages[0]["tool_calls"]] == [{}, {}]


def test_templates_that_write_one_call_a_message() -> None:
    """Several calls of a message are told one by one, each with what it gave back."""
    call_style = detect_style(ChatTemplate(TEMPLATES["Llama 3"]).render)
    assert call_style.one_call_per_message and not detect_style(ChatTemplate(TEMPLATES["Hermes"]).render).one_call_per_message
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("one", "two")]
    messages, _ = prepare_messages([{"role": "user", "content": "Both."}, {"role": "assistant", "content": "So.", "tool_calls": calls},
                            {"role": "tool", "tool_call_id": "two", "content": "2"},
                            {"role": "tool", "tool_call_id": "one", "content": "1"},
                            {"role": "user", "content": "Thanks."}], TOOLS, call_style)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [message["content"] for message in messages] == ["Both.", "So.", "1", "", "2", "Thanks."]
    assert "one call" not in ChatTemplate(TEMPLATES["Llama 3"]).render(messages, tools=TOOLS)


@pytest.mark.parametrize(("key", "role", "words", "name"), [("tools", "tool", ["<|tool_call|>"], "Granite 3"),
                                                          ("functions", "environment", [], "OLMo 3")])
def test_tools_in_the_message_of_the_system(key: str, role: str, words: list[str], name: str) -> None:
    """As text under a key, as Phi 4 mini and OLMo 3 have it; other roles for what they gave back."""
    told = "{% if m.KEY %} Functions: {{ m.KEY }}{% if m.KEY and 'KEY' == 'functions' %} in <function_calls>{% endif %}{% endif %}"
    guard = f"{{% if m.role not in ['system', 'user', 'assistant', '{role}'] %}}{{{{ raise_exception('roles') }}}}{{% endif %}}"
    template = ChatTemplate(TURN + guard + "{{ m.content }}" + told.replace("KEY", key) + END)
    call_style = detect_style(template.render, words)
    assert (call_style.format.name, call_style.variable, call_style.key, call_style.role, call_style.knows_tools) == (
        name, "", key, role, True)
    for system in ([], [{"role": "system", "content": "Be kind."}]):
        messages, options = prepare_messages([*system, *CALLED], TOOLS, call_style)
        text = template.render(messages, **options)
        assert not options and [message["role"] for message in messages] == ["system", "user", "assistant", role]
        assert "Tells it." in text and ("Be kind." in text) == bool(system)
        assert f"{role}\nnone" in text and "weather" in messages[2]["content"]


def test_a_mark_in_the_vocabulary_of_a_template_without_tools() -> None:
    call_style = detect_style(ChatTemplate(TURN + "{{ m.content }}" + END).render, ["<|tool_call|>"])
    assert call_style.format.name == "Granite 3" and not call_style.knows_tools and call_style.sample.startswith("<|tool_call|>[")


def test_a_template_without_an_end_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_style, "MAX_PROBE_S", 0.5)
    template = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", seconds=1.0)
    begin = time.thread_time()
    assert not detect_style(template.render).knows_tools and time.thread_time() - begin < 3


def test_a_machine_that_does_other_work_is_no_template_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is held for as long as the model is: a server that stood still meanwhile had no tools until its end."""
    template, stands = ChatTemplate(TEMPLATES["Hermes"]), [1.1]
    monkeypatch.setattr(call_style, "MAX_PROBE_S", 1.0)

    def slowly(*given: object, **more: object) -> str:
        time.sleep(stands.pop() if stands else 0)
        return template.render(*given, **more)

    assert detect_style(slowly) == detect_style(template.render) and not stands and detect_style(slowly).knows_tools
