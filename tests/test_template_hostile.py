"""Templates written to escape, to hang or to exhaust memory: each ends as a one-line TemplateError, in a process of limited memory.

All attacks run in one child whose address space and processor time are capped by the system, half of them off the main thread; an attack
that gets through shows as a missing result, as a rendered text, or as a MemoryError instead of a refusal.
"""

import json
import subprocess
import sys

import pytest

GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def grow(start, step):
    """Doubles a value sixty times."""
    return GROW.replace("START", start).replace("STEP", step)


LONG = "('a' * 900000)"
ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "subscript": "{{ ''['__class__'] }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "map attribute": "{{ ['']|map(attribute='__class__')|list }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format_map": "{{ '{a.__init__}'.format_map({'a': 1}) }}",
    "mapped format": "{{ ['{.__class__}']|map('format', 1)|list }} {{ ''.__class__ }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "namespace": "{{ namespace.__init__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "macro": "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
    "loop": "{% for i in [1] %}{{ loop._iterator }}{% endfor %}",
    "undefined": "{{ missing.__class__ }}",
    "undefined class": "{{ (missing|default(none)).__class__ }}",
    "namespace write": "{% set ns = namespace() %}{% set ns.__class__ = 'x' %}",
    "namespace init": "{{ namespace(__class__=1) }}",
    "append": "{{ messages.append(1) }}",
    "pop": "{{ messages[0].pop('role') }}",
    "fromkeys": "{{ {}.fromkeys('ab') }}",
    "encode": "{{ 'a'.encode() }}",
    "type call": "{{ dict.mro() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends '/etc/passwd' %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "autoescape": "{% autoescape true %}{{ 'a' }}{% endautoescape %}",
    "trans": "{% trans %}{% endtrans %}",
    "view": "{{ messages[0].keys() - [1] }}",
}
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop with output": "{% for a in range(99999) %}{% for b in range(99999) %}0123456789{% endfor %}{% endfor %}",
    "loop in a set block": "{% set y %}{% for a in range(99999) %}{% for b in range(99999) %}012345{% endfor %}{% endfor %}{% endset %}",
    "loop filter": "{% for a in range(99999) if [a] * 99999 == [a] * 99999 and false %}{% endfor %}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "tree recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "caller": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% macro g(n) %}{% call f() %}{{ g(n-1) if n else 'x' * 1000 }}{% endcall %}{% endmacro %}{{ g(60) }}",
    "search": "{% for i in range(99999) %}{{ " + LONG + ".find('a' * 450000 + 'b') }}{% endfor %}",
    "rfind": "{{ " + LONG + ".rfind('b' + 'a' * 450000) }}",
    "rsplit": "{{ " + LONG + ".rsplit('b' + 'a' * 450000) }}",
    "strip": "{{ " + LONG + ".strip('b' * 900000 + 'a') }}",
    "trim": "{{ " + LONG + "|trim('b' * 900000 + 'a') }}",
    "sort": "{% for i in range(9999) %}{{ range(99999)|sort(attribute='a,b,c')|length }}{% endfor %}",
    "membership": "{% for i in range(99999) %}{{ 'a' in range(100000) }}{% endfor %}",
    "groupby": "{% for i in range(9999) %}{{ ([{'a': 1}] * 90000)|groupby('a')|length }}{% endfor %}",
    "depth": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "deep comparison": "{% set ns = namespace(x=[], y=[]) %}"
    "{% for i in range(3000) %}{% set ns.x = [ns.x] %}{% set ns.y = [ns.y] %}{% endfor %}"
    "{{ ns.x == ns.y }}",
}
BOMBS = {
    "text times": "{{ 'a' * 10000000000 }}",
    "times text": "{{ 10000000000 * 'a' }}",
    "list times": "{{ [1] * 1000000000 }}",
    "tuple times": "{{ 1000000000 * (1,) }}",
    "power": "{{ 2 ** 10000000000 }}",
    "negative power": "{{ (-7) ** 99999999 }}",
    "squares": grow("3", "ns.x * ns.x"),
    "sums": grow("'aaaa'", "ns.x + ns.x"),
    "tildes": grow("'aaaa'", "ns.x ~ ns.x"),
    "list sums": grow("['a']", "ns.x + ns.x"),
    "shared lists": grow("['a']", "[ns.x, ns.x]"),
    "shared tuples": grow("('a',)", "(ns.x, ns.x)"),
    "hash": grow("('a',)", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "shared dicts": grow("{}", "{'a': ns.x, 'b': ns.x}"),
    "dict()": grow("{}", "dict(a=ns.x, b=ns.x)"),
    "views": grow("{'a': 'b'}", "{'a': ns.x.items(), 'b': ns.x.items()}"),
    "groups": grow("['a']", "[{'k': 1, 'v': ns.x}, {'k': 1, 'v': ns.x}]|groupby('k')"),
    "cycler": grow("['a']", "cycler(ns.x, ns.x).items"),
    "comparison": "{% set ns = namespace(x=['a'], y=['a']) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "varargs": "{% macro f(n) %}{{ f(n+1, varargs, varargs) if n < 60 else varargs }}{% endmacro %}{{ f(0, 'aaaa') }}",
    "kwargs": "{% macro f(n) %}{% if n < 60 %}{{ f(n+1, a=kwargs, b=kwargs) }}"
    "{% else %}{{ kwargs }}{% endif %}{% endmacro %}{{ f(0, a='aaaa') }}",
    "many texts": "".join(f"{{% set a{i} = 'a{i}' * 200000 %}}" for i in range(1500)),
    "many wide texts": "".join(f"{{% set a{i} = '🦊{i}' * 180000 %}}" for i in range(1500)),
    "center filter": "{{ 'a'|center(10000000000) }}",
    "center": "{{ 'a'.center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "keyword": "{{ 'a'.ljust(width=10000000000) }}",
    "filter block": "{% filter center(10000000000) %}a{% endfilter %}",
    "join": "{{ " + LONG + ".join(" + LONG + ") }}",
    "join filter": "{{ range(100000)|join(" + LONG + ") }}",
    "replace": "{{ " + LONG + ".replace('', " + LONG + ") }}",
    "replace filter": "{{ " + LONG + "|replace('a', " + LONG + ") }}",
    "indent": "{{ ('a\n' * 90000)|indent(100000) }}",
    "indent text": "{{ ('a\n' * 90000)|indent('a' * 100000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "precision": "{{ '%.1000000000f' % 1 }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format filter star": "{{ '%*d'|format(1000000000, 1) }}",
    "percent name": "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}",
    "percent often": "{{ ('%(a)s' * 100000) % {'a': " + LONG + "} }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format inner width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format often": "{{ ('{0}' * 100000).format(" + LONG + ") }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "long strftime": "{{ strftime_now('%c' * 100000) }}",
    "json indent": "{{ [[1]]|tojson(indent=1000000000) }}",
    "json separators": "{{ [[1]]|tojson(separators=('a' * 900000, 'b')) }}",
    "json depth": "{% set ns = namespace(x=range(50000)|list) %}"
    "{% for i in range(800) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson(indent=60) }}",
    "range": "{{ range(10000000000)|list }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "list sum": "{{ [[1] * 300000] * 3 }}{{ [[1] * 90000, [1] * 90000]|map('list')|sum(start=[1] * 900000) }}",
}
MALFORMED = {
    "open if": "{% if %}",
    "no end": "{% for a in b %}",
    "unknown tag": "{% frobnicate %}",
    "unknown filter": "{{ 1|frobnicate }}",
    "unclosed": "{{ 'a",
    "operator": "{{ 1 + }}",
    "parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "brackets": "{{ " + "[" * 20000 + "]" * 20000 + " }}",
    "minus": "{{ " + "-" * 60000 + " 1 }}",
    "nots": "{{ " + "not " * 15000 + " 1 }}",
    "dots": "{{ a" + ".a" * 30000 + " }}",
    "pluses": "{{ 'a'" + "+'a'" * 15000 + " }}",
    "ifs": "{% if a %}" * 6000,
    "deep loops": "{% for a in range(9) %}" * 30 + "{% endfor %}" * 30,
    "integer": "{{ " + "1" * 60000 + " }}",
    "comment": "{#" * 30000,
    "undefined": "{{ a.b }}",
    "type": "{{ 1 + 'a' }}",
    "zero": "{{ 1 / 0 }}",
    "not callable": "{{ 'a'() }}",
    "generation": "{% generation %}",
}
ATTACKS = {
    f"{group}: {name}": source
    for group, attacks in (("escape", ESCAPES), ("endless", ENDLESS), ("bomb", BOMBS), ("malformed", MALFORMED))
    for name, source in attacks.items()
}

CHILD = """
import json, resource, sys, threading
from effllm.runtime.templates.template import ChatTemplate, TemplateError
import effllm.runtime.templates.template_sandbox
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (200, 200))
results = {}
def attack(name, source):
    try:
        results[name] = {"rendered": ChatTemplate(source, seconds=0.1).render([{"role": "user", "content": "x"}])[:100]}
    except TemplateError as error:
        results[name] = {"message": error.message, "hint": error.hint}
for number, (name, source) in enumerate(json.load(sys.stdin).items()):
    if number % 2:
        thread = threading.Thread(target=attack, args=(name, source))
        thread.start()
        thread.join()
    else:
        attack(name, source)
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def results():
    child = subprocess.run([sys.executable, "-c", CHILD], input=json.dumps(ATTACKS), capture_output=True, text=True, timeout=400)
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout)


@pytest.mark.parametrize("name", ATTACKS)
def test_ends_as_one_line(name, results):
    result = results[name]
    assert "message" in result, f"rendered {result['rendered']!r}"
    assert "\n" not in result["message"] and len(result["message"]) < 300 and "MemoryError" not in result["message"] and result["hint"]


@pytest.mark.parametrize("name", [n for n in ATTACKS if n.startswith(("endless", "bomb"))])
def test_was_stopped_and_did_not_fail_by_chance(name, results):
    expected = ("was stopped", "Range too big", "'lipsum' is undefined", "No filter named 'batch'")
    assert any(words in results[name]["message"] for words in expected)
