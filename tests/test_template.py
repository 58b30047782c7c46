"""Chat templates render exactly as in transformers, from every place a model stores one; malformed ones are one-line errors."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from effllm.runtime.templates.template import ChatTemplate, TemplateError, TemplateRefused, load_template
from effllm.runtime.templates.template_limits import LimitExceeded, Meter

FABLE = Path(__file__).parents[1] / "models" / "fable"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Our own templates, each with the constructs of one published style.
HEADERS = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Tools:\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("Only one tool call at once!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML_THINKING = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
INST = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{
raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{
'[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}{{
raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}
"""
TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Conversation roles must alternate") }}{%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
EVERYTHING = """
{#- what templates may use, in one -#}
{% macro turn(role, text='') %}
<{{ role | upper }}>{{ text | replace('\\n', ' ') }}{{ caller() if caller is defined }}
{% endmacro %}
{% set ns = namespace(seen=[], count=0) %}
{% for message in messages if message.role != 'tool' %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if loop.index > 5 %}{% break %}{% endif %}
    {% generation %}{% set inner = message.content ~ '!' %}{{ turn(message.role, inner) }}{% endgeneration %}
    {% set ns.seen = ns.seen + [message.role] %}{% set ns.count = ns.count + 1 %}
{% else %}
nothing
{% endfor %}
{{ ns.seen | unique | sort | join(', ') }} {{ ns.count * 2 ** 3 // 3 % 5 - 1 }} {{ inner is defined }}
{% call turn('x') %}called{% endcall %}
{% filter lower %}LOUD {{ messages[0].role }}{% endfilter %}

{% set block %}a{{ 1 + 1 }}b{% endset %}{{ block }}
{{ {'a': 1, 'b': [1, 2.5, none, true]} | tojson }} {{ 'é<' | tojson }} {{ 'é' | tojson(ensure_ascii=true) }}
{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}
{{ messages | map(attribute='role') | list }} {{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}
{{ messages | rejectattr('role', 'in', ['user', 'system']) | list | length }} {{ (messages | last)['role'] }} {{ messages | length is odd }}
{{ "%s-%05.1f" % ("x", 2.25) }} {{ "%d" | format(3) }} {{ "{}/{name:>5}".format(1, name='n') }}
{{ '-'.join(['a', 'b']) }} {{ 'a,b'.split(',')[1:] }}
{{ range(5) | list }} {{ range(1, 10, 4) | sum }}
{{ [3, 1, 2] | sort(reverse=true) | map('string') | join }} {{ {'k': 'v'}.items() | list }}
{{ dict(a=1)['a'] }} {{ {'z': 1, 'y': 2} | dictsort }} {{ {'z': 1} | items | list }}
{{ missing | default('fallback') }} {{ none }} {{ missing }}
{{ 'text' if messages else 'none' }} {{ 1 < 2 < 3 }} {{ 'a' in 'abc' and 'x' not in ['y'] }}
{{ not true }} {{ 7 / 2 }} {{ -3 | abs }} {{ 2.567 | round(1) }}
{{ "A line\\nand another" | indent(2) }} {{ 'title case' | title }}
{{ ' x ' | trim }}{{ '**x**' | trim('*') }} {{ '12' | int + 1 }} {{ '1.5' | float }}
{{ strftime_now('%Y-%m-%d') }} {{ bos_token }}{{ eos_token }} {{ unk_token is defined }}
{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}
{% for a, b in [(1, 2), (3, 4)] recursive %}{{ loop.cycle('odd', 'even') }}{{ a }}{{ b }}{{ loop.index0 }}{{ loop.last }}
{{- loop.previtem | default }} {% endfor %}
{% for group in messages | groupby('role') %}{{ group.grouper }}{{ group.list | length }}{{ group[0] }}{% endfor %}
{% for key, value in {'p': {'q': 1}}.items() %}{{ key }}={{ value | string }}{% endfor %} {{ '<b>' | escape }}
{{ '<b>' | safe }} {{ 'ab' | list }} {{ 'abc'[::-1] }} {{ 'abc' | reverse }}
{% with x = 3 %}{{ x }}{% endwith %} {{ [1, 2, 3][-1] }} {{ [[1, 2], [3]] | sum(start=[]) }}
{{ (1, 'a') }} {{ messages[0].get('none', 'dflt') }} {{ messages[0]['role'][0] }}
"""
STYLES = {"headers": HEADERS, "chatml": CHATML_THINKING, "inst": INST, "turns": TURNS, "everything": EVERYTHING}

USER = {"role": "user", "content": "  What is 2 + 2?\nSay \"why\" – é 日本 🦊 <b> & 'c' "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nadd them\n</think>\n\nFour."}
REASONED = {"role": "assistant", "content": "Four.", "reasoning_content": "add"}
PLAIN = {"role": "assistant", "content": "Four. "}
PARTS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " look "}]}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "é", "n": [1, 2]}}}],
}
TOOL = {"role": "tool", "content": "42"}
CHATS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "dialogue": [USER, PLAIN, USER],
    "system-dialogue": [SYSTEM, USER, PLAIN, USER],
    "thought": [USER, THOUGHT, USER],
    "thought-last": [USER, THOUGHT],
    "reasoned": [USER, REASONED, USER],
    "reasoned-last": [USER, REASONED],
    "two-users": [USER, USER],
    "parts": [PARTS],
    "assistant-first": [PLAIN, USER],
    "tool": [USER, CALL, TOOL],
    "two-calls": [USER, CALL | {"tool_calls": CALL["tool_calls"] * 2}],
    "skip": [USER, {"role": "skip", "content": "x"}, PLAIN],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "Adds <b>é", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
    }
]


@pytest.fixture(scope="module")
def oracle():
    """transformers' own rendering; an exception becomes its last line."""
    from jinja2.exceptions import TemplateError as JinjaError
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(FABLE / "tokenizer.json"), **TOKENS)

    def render(source, messages, **options):
        try:
            return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
        except (JinjaError, TypeError) as error:
            return error

    return render


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", STYLES)
def test_renders_as_transformers(style, chat, oracle):
    template = ChatTemplate(STYLES[style], TOKENS)
    for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"tools": TOOLS}, {"date_string": "1 Jan 2030"}):
        for prompt in (True, False):
            expected = oracle(STYLES[style], CHATS[chat], add_generation_prompt=prompt, **options)
            if isinstance(expected, Exception):
                with pytest.raises(TemplateError) as caught:
                    template.render(CHATS[chat], add_generation_prompt=prompt, **options)
                assert " ".join(str(expected).split())[:100] in caught.value.message
            else:
                assert template.render(CHATS[chat], add_generation_prompt=prompt, **options) == expected


def test_every_style_renders_some_chat(oracle):
    for source in STYLES.values():
        assert isinstance(oracle(source, [USER], add_generation_prompt=True), str)


def test_fable_renders_as_transformers(oracle):
    config = json.loads((FABLE / "tokenizer_config.json").read_text())
    template = load_template(FABLE, config, {})
    for chat in ("user", "system-dialogue"):
        assert template.render(CHATS[chat]) == oracle(config["chat_template"], CHATS[chat], add_generation_prompt=True)


def test_refusal_carries_the_words_of_the_template():
    with pytest.raises(TemplateRefused) as caught:
        ChatTemplate(INST, TOKENS).render([SYSTEM, USER])
    assert "Conversation roles must alternate" in caught.value.message and caught.value.hint


def test_words_of_the_template_are_one_clean_line():
    with pytest.raises(TemplateRefused) as caught:
        ChatTemplate("{{ raise_exception('\\x1b[31mred\\nline ' ~ 'x' * 5000) }}").render([USER])
    assert "\n" not in caught.value.message and "\x1b" not in caught.value.message and len(caught.value.message) < 300


# ---- where templates are kept -------------------------------------------------------------------------------------------


def test_jinja_file_wins_over_config(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("from the file: {{ messages[0].content }}", encoding="utf-8")
    assert (
        load_template(tmp_path, {"chat_template": "from the config"}, {}).render([{"role": "user", "content": "é"}]) == "from the file: é"
    )


def test_json_file_wins_over_config(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_template(tmp_path, {"chat_template": "from the config"}, {}).source == "from json"


def test_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = load_template(tmp_path, {"chat_template": named}, {})
    assert template.source == "plain" and template.render([]) == template.render([], tools=[]) == "plain"
    assert template.render([], tools=[{"type": "function"}]) == "tools"
    for other in (None, 7, "x" * 70_000):  # one that is none is no reason to do without the other
        named[0]["template"] = other
        assert load_template(tmp_path, {"chat_template": named}, {}).render([], tools=[{"type": "function"}]) == "plain"


def test_base_model_has_none(tmp_path):
    assert load_template(tmp_path, {}, {}) is None and load_template(tmp_path, {"chat_template": None}, {}) is None


@pytest.mark.parametrize("entry", [3, {"default": "x"}, [{"name": ["x"], "template": 7}]])
def test_a_template_of_the_wrong_type(tmp_path, entry):
    with pytest.raises(TemplateError, match="neither text nor a list"):
        load_template(tmp_path, {"chat_template": entry}, {})


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"x" * 700_000, b"x" * 70_000])
def test_a_template_file_that_is_not_one(tmp_path, content):
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(TemplateError) as caught:
        load_template(tmp_path, {}, {})
    assert "\n" not in caught.value.message


def test_messages_must_be_plain():
    with pytest.raises(TemplateError, match="plain"):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": object()}])


# ---- life ---------------------------------------------------------------------------------------------------------------


def test_a_failure_leaves_the_template_usable():
    template = ChatTemplate(INST, TOKENS)
    with pytest.raises(TemplateRefused):
        template.render([SYSTEM])
    assert template.render([{"role": "user", "content": "a"}]) == "<s>[INST] a [/INST]"


def test_long_conversations_are_within_the_limits():
    chat = [SYSTEM, *([USER, THOUGHT] * 700), {"role": "user", "content": "word " * 400_000}]
    assert len(ChatTemplate(CHATML_THINKING, TOKENS, seconds=60).render(chat)) > 2_000_000


def test_the_sum_of_all_texts_is_limited_and_not_each_alone():
    source = "{% for i in range(COUNT) %}{% set text = ('a' ~ i) * 200000 %}{% endfor %}done"
    assert ChatTemplate(source.replace("COUNT", "9"), seconds=600).render([USER]) == "done"
    with pytest.raises(TemplateError, match="more text than any conversation needs"):
        ChatTemplate(source.replace("COUNT", "900"), seconds=600).render([USER])


def test_renders_from_several_threads():
    template, results = ChatTemplate(TURNS, TOKENS), []
    threads = [
        threading.Thread(target=lambda n=n: results.append(template.render([{"role": "user", "content": f"m{n}"}]))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [f"<s><start_of_turn>user\nm{n}<end_of_turn>\n<start_of_turn>model\n" for n in range(8)]


def test_jinja_is_imported_by_the_first_render_only():
    program = (
        "import sys; from effllm.runtime.templates.template import ChatTemplate; t = ChatTemplate('{{ 1 }}');"
        "before = 'jinja2' in sys.modules;"
        "t.render([]); print(before, 'jinja2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split() == ["False", "True"]


def test_a_long_conversation_has_more_time():
    """A template that looks at all messages for each of them, as Gemma 4's, and one without end."""
    source = "{% for m in messages %}{% for n in messages %}{% set x = n.content %}{% endfor %}{% endfor %}done"
    chat = [USER] * 300
    assert ChatTemplate(source, seconds=600).render(chat) == "done"
    begun = time.thread_time()
    with pytest.raises(TemplateError, match="longer than 0.4 s"):
        ChatTemplate("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", seconds=0.1).render(chat)
    assert time.thread_time() - begun < 5


def test_a_process_that_stood_still_is_no_endless_template():
    meter = Meter(0, seconds=0.2)
    time.sleep(0.3)
    meter.step()
    with pytest.raises(LimitExceeded, match="longer than 0.2 s"):
        while True:
            meter.step()
