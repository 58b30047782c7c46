"""Grammars for tools that take free text (OpenAI's custom tools), embedded in a call.

As the only argument of a function the text is a JSON string, where quotes, backslashes and newlines are escaped, so a Lark grammar is
rewritten to match the escaped text. What a character class allows of the escaped characters is tested with Python's regular expressions,
character by character.

Between tags the text is bare, and must not contain the closing marker.

A lexer with longest match has no lookahead: in a line that may contain quotes, a backslash is taken for the first half of an escaped quote,
not of the newline. So rules become terminals too, one of which is the whole text. Recursive rules cannot; they are only supported where at
most one character is escaped.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ... import UsageError
from ..constraints.constraint import lark_constraint

FREE = "input"  # the argument
SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/]")  # letters that mean something in a pattern
WRITTEN_OTHERWISE = "\b\t\n\f\r\"\\"  # of the others below a blank, which are four digits there, a text that is held to a grammar has none
INSIDE = r'["\\\x00-\x1F]'  # what stands for itself nowhere, as a class
RANGE = re.compile(r"""("(?:\\.|[^"\\])")\s*\.\.\s*("(?:\\.|[^"\\])")""")
TOKEN = re.compile(r"""(?P<comment>(?://|\#)[^\n]*) | (?P<range>"(?:\\.|[^"\\])"\s*\.\.\s*"(?:\\.|[^"\\])")
    | (?P<text>"(?:\\.|[^"\\\n])*"i?) | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<import>%import\s+common\s*(?:\.\s*\w+(?:\s*->\s*\w+)?|\([^)]*\)))
    | (?P<special><[^<>\s]+> | %(?:json|lark|regex)\b | @\w+) | (?P<alias>->[ \t]*\w+) | (?P<mark>^[?!](?=\w)) | (?P<name>\b[a-z_]\w*)""",
                   re.VERBOSE | re.MULTILINE)
DEFINED = re.compile(r"^[ \t]*[?!]?(\w+)(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
ATOM = re.compile(r"""(?P<flags>\(\?(?P<on>[a-z]*)(?:-(?P<off>[a-z]+))?(?P<end>[:)])) | (?P<open>\((?:\?P?<\w+>)?) | (?P<close>\))
    | (?P<count>\{\d*,?\d*\}[?+]?) | (?P<edge>\\[bBAzZ]|[\^$])
    | (?P<class>\[\^?\]?(?:\\.|[^\]\\])*\]) | (?P<one>\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[^pP]|\\p\{?[LN]\w*\}?|[^\\*+?|])
    | (?P<rest>[*+?|])""", re.VERBOSE | re.DOTALL)
# Of the terminals that grammars take from elsewhere those with letters that are written otherwise.
COMMON = {"LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
          "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"'}
PLAIN = "write it with letters, classes of letters, groups and repeats"


def arguments(function: Mapping[str, Any], guidance: Mapping[str, Any]) -> str:
    """The call arguments in Lark notation: JSON by the function's schema, or a string by its `grammar`."""
    if (grammar := function.get("grammar")) and (inner := within_json(grammar)) is not None:
        return f'"{{" / ?/ {json.dumps(json.dumps(FREE))} / ?/ ":" / ?/ "\\"" %lark {{\n{inner}\n}} "\\"" / ?/ "}}"'
    return f"%json {json.dumps({**function['parameters'], 'x-guidance': guidance})}"


@lru_cache(64)
def within_json(grammar: str) -> str | None:
    """The grammar of a text, JSON-escaped; None if it cannot be expressed. Raises UsageError for unsupported syntax."""
    special = {letter for found in TOKEN.finditer(grammar) for letter in _special(found)}
    if rules := _as_terminals(grammar):
        made = f"start: {rules['start']}\n{_rewrite(grammar, rules)}"
        try:
            lark_constraint(made, FREE, "the grammar")
        except UsageError:
            pass  # as one terminal it is too much
        else:
            return made
    return None if len(special) > 1 else _rewrite(grammar, {})


@lru_cache(64)
def before(grammar: str, end: str, is_marked: bool) -> str | None:
    """The grammar of bare text followed by `end`; `is_marked`: a special token follows, otherwise the text must not contain `end`. None
    if it cannot be expressed. Raises UsageError for unsupported syntax."""
    if not (rules := _as_terminals(grammar)):
        return None
    whole = f"{rules['start']} {json.dumps(end, ensure_ascii=False)}" if end else rules["start"]
    only = "" if is_marked else f" & ~/(?s:.*){pattern(end)}(?s:.+)/"
    made = f"start: WHOLE_TEXT\nWHOLE_TEXT: ({whole}){only}\n{_rewrite(grammar, rules, in_json=False)}"
    try:
        lark_constraint(made, FREE, "the grammar")
    except UsageError:  # as one terminal it is too much
        return None
    return made


def pattern(text: str) -> str:
    """A text escaped for a regular expression."""
    return SPECIAL.sub(r"\\\g<0>", text).replace("\n", "\\n")


def _as_terminals(grammar: str) -> dict[str, str]:
    """Rule names as terminals; empty if that is impossible."""
    rules = {name: f"RULE_{name.upper()}" for name in _rules(grammar) if name.islower()}
    return rules if "start" in rules and not _goes_round(grammar) and "%ignore" not in grammar else {}


def _special(found: re.Match[str]) -> Iterator[str]:
    """The characters of a terminal that JSON escapes."""
    kind, text = found.lastgroup, found.group()
    if kind == "text":
        yield from {*_text(text.rstrip("i"))} & {*WRITTEN_OTHERWISE}
    bodies = {"regex": [text[1:].rpartition("/")[0]], "range": [_class(text)],
              "import": [COMMON[name] for name in re.findall(r"\w+", text) if name in COMMON]}
    for atom in ATOM.finditer("".join(bodies.get(kind, ()))) if kind in bodies else ():
        yield from _otherwise(atom.group(), True, True) if atom.lastgroup in ("class", "one") else ()


def _rules(grammar: str) -> dict[str, str]:
    """The right-hand side of each rule and terminal, without string literals."""
    bare = TOKEN.sub(lambda found: found.group() if found.lastgroup == "name" else " ", grammar)
    begins = [*DEFINED.finditer(bare)]
    ends = [*(each.start() for each in begins[1:]), len(bare)]
    return {each[1]: bare[each.end() : end] for each, end in zip(begins, ends)}


def _goes_round(grammar: str) -> bool:
    """Is a rule recursive, directly or not?"""
    rules = _rules(grammar)
    try:
        TopologicalSorter({name: {*re.findall(r"\w+", body)} & rules.keys() for name, body in rules.items()}).prepare()
    except CycleError:
        return True
    return False


def _rewrite(grammar: str, rules: Mapping[str, str], in_json: bool = True) -> str:
    """Every terminal, JSON-escaped or not, and the rules renamed. Raises UsageError."""
    def rewritten(found: re.Match[str]) -> str:
        kind, text = found.lastgroup, found.group()
        if kind in ("comment", "alias", "mark"):
            return ""
        if kind == "name":
            return rules.get(text, text)
        if kind == "special":
            raise UsageError(f"{text} is not allowed in a grammar for text", "leave it out")
        if not in_json:
            return text
        if kind == "import":
            return _imported(text)
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            return f"/{_regex(body, flags)}/{flags.replace('s', '')}"
        if kind == "range":
            return f"/{_regex(_class(text), '')}/"
        said, flag = text.rstrip("i"), text[len(text.rstrip("i")) :]
        inner = json.dumps(_text(said), ensure_ascii=False)[1:-1]
        if flag and "\\" in inner:
            raise UsageError(f"{text:.40} ignores case and contains characters that JSON escapes", "put them in a separate string")
        return json.dumps(inner, ensure_ascii=False) + flag

    return TOKEN.sub(rewritten, grammar)


def _text(said: str) -> str:
    try:
        return ast.literal_eval(said)
    except (ValueError, SyntaxError):
        raise UsageError(f"{said:.40} in the grammar is not text", "escape letters as JSON does") from None


def _imported(text: str) -> str:
    """Imported terminals; those with escaped characters are defined here."""
    names = re.findall(r"(\w+)(?:\s*->\s*(\w+))?", text.partition("common")[2])
    lines = []
    for name, called in names:
        called = called or name
        kept = f"%import common.{name}" + (f" -> {called}" if called != name else "")
        lines.append(f"{called}: /{_regex(COMMON[name], '')}/" if name in COMMON else kept)
    return "\n".join(lines)


def _class(text: str) -> str:
    """A range as a character class; empty if the text is no range."""
    if found := RANGE.fullmatch(text):
        return "[" + "-".join(re.escape(_text(each)) for each in found.groups()) + "]"
    return ""


def _regex(body: str, flags: str) -> str:
    """The regular expression for the escaped text. Raises UsageError."""
    if {*flags} - {*"ismu"}:
        raise UsageError(f"/{body:.40}/{flags} has flags other than i and s", PLAIN)
    return "".join(_rewritten(body, "s" in flags, "i" in flags))


def _rewritten(body: str, dot_is_all: bool, any_case: bool) -> Iterator[str]:
    around: list[bool] = []  # what a dot is outside of each group that is open
    at = 0
    while at < len(body):
        found = ATOM.match(body, at)
        if found is None:
            raise UsageError(f"/{body:.40}/ has unsupported syntax: {body[at : at + 8]}", PLAIN)
        at, kind, text = found.end(), found.lastgroup, found.group()
        kind = "flags" if found["flags"] else kind
        if kind == "flags":
            on, off = found["on"], found["off"] or ""
            if {*on, *off} - {*"ismu"} or "i" in off:
                raise UsageError(f"/{body:.40}/ has flags other than i and s", PLAIN)
            if found["end"] == ":":
                around.append(dot_is_all)
            dot_is_all, any_case = (dot_is_all or "s" in on) and "s" not in off, any_case or "i" in on
        elif kind == "open":
            around.append(dot_is_all)
        elif kind == "close" and around:
            dot_is_all = around.pop()
        elif kind in ("class", "one"):
            yield _letter(text, dot_is_all, any_case)
            continue
        yield text


@cache
def _letter(atom: str, dot_is_all: bool, any_case: bool) -> str:
    """One character of a pattern, as escaped."""
    special = _otherwise(atom, dot_is_all, any_case)
    if not special:
        return atom
    made = "".join(re.escape(json.dumps(each)[2:-1]) for each in special)
    made = rf"\\{made}" if len(special) == 1 else rf"\\[{made}]"
    if atom == ".":
        return rf"(?:[^{INSIDE[1:]}|{made})"
    return f"(?:[{atom}--{INSIDE}]|{made})" if _pattern(atom, dot_is_all, any_case).search(_all()) else made


@cache
def _otherwise(atom: str, dot_is_all: bool, any_case: bool) -> str:
    """The escaped characters that an atom of a pattern matches. Raises UsageError."""
    found = _pattern(atom, dot_is_all, any_case) if atom[:2] != r"\p" else None
    return "".join(each for each in WRITTEN_OTHERWISE if found and found.fullmatch(each))


def _pattern(atom: str, dot_is_all: bool, any_case: bool) -> re.Pattern[str]:
    try:
        return re.compile(atom, (re.DOTALL if dot_is_all else 0) | (re.IGNORECASE if any_case else 0))
    except re.error as error:
        raise UsageError(f"{atom:.40} in the grammar is not a valid character class: {error}", PLAIN) from None


@cache
def _all() -> str:
    """Every character that JSON does not escape."""
    return "".join(chr(each) for each in range(32, 0x3000) if chr(each) not in '"\\')
