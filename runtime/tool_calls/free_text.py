"""Grammars for tools that take free text (OpenAI's custom tools), embedded in a call.

As the only argument of a function the text is a JSON string, where quotes, backslashes and newlines are escaped, so a Lark grammar is
rewritten to match the escaped text. Which escaped characters a character class matches is tested with Python's regular expressions,
character by character.

Between tags the text is not escaped, and must not contain the closing marker.

A lexer with longest match has no lookahead: in a line that may contain quotes, it takes a backslash for the first half of an escaped quote,
even if it begins an escaped newline. So rules become terminals too, one of which is the whole text. This is impossible for recursive rules,
which are only supported in grammars with at most one escaped character.
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

TEXT_ARGUMENT = "input"  # name of the function argument that holds the text
REGEX_METACHARACTERS = re.compile(r"[\\^$.|?*+()\[\]{}/]")  # and the slash, which ends a regular expression in Lark
# Characters with a short escape in JSON. Other control characters, which JSON writes as four digits, are not allowed in constrained text.
JSON_ESCAPED = "\b\t\n\f\r\"\\"
JSON_ESCAPED_CLASS = r'["\\\x00-\x1F]'  # a class of all characters that JSON escapes
RANGE = re.compile(r"""("(?:\\.|[^"\\])")\s*\.\.\s*("(?:\\.|[^"\\])")""")
TOKEN = re.compile(r"""(?P<comment>(?://|\#)[^\n]*) | (?P<range>"(?:\\.|[^"\\])"\s*\.\.\s*"(?:\\.|[^"\\])")
    | (?P<text>"(?:\\.|[^"\\\n])*"i?) | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<import>%import\s+common\s*(?:\.\s*\w+(?:\s*->\s*\w+)?|\([^)]*\)))
    | (?P<special><[^<>\s]+> | %(?:json|lark|regex)\b | @\w+) | (?P<alias>->[ \t]*\w+) | (?P<mark>^[?!](?=\w)) | (?P<name>\b[a-z_]\w*)""",
                   re.VERBOSE | re.MULTILINE)
DEFINITION = re.compile(r"^[ \t]*[?!]?(\w+)(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
ATOM = re.compile(r"""(?P<flags>\(\?(?P<on>[a-z]*)(?:-(?P<off>[a-z]+))?(?P<end>[:)])) | (?P<open>\((?:\?P?<\w+>)?) | (?P<close>\))
    | (?P<count>\{\d*,?\d*\}[?+]?) | (?P<edge>\\[bBAzZ]|[\^$])
    | (?P<class>\[\^?\]?(?:\\.|[^\]\\])*\]) | (?P<one>\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[^pP]|\\p\{?[LN]\w*\}?|[^\\*+?|])
    | (?P<rest>[*+?|])""", re.VERBOSE | re.DOTALL)
# The terminals of `%import common` that match characters escaped in JSON, as regular expressions.
COMMON_TERMINALS = {"LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
                    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"'}
SUPPORTED_SYNTAX = "write it with letters, classes of letters, groups and repeats"


def arguments_grammar(function: Mapping[str, Any], guidance: Mapping[str, Any]) -> str:
    """The call arguments in Lark notation: JSON by the function's schema, or a string by its `grammar`."""
    if (grammar := function.get("grammar")) and (text_grammar := json_escaped_grammar(grammar)) is not None:
        return f'"{{" / ?/ {json.dumps(json.dumps(TEXT_ARGUMENT))} / ?/ ":" / ?/ "\\"" %lark {{\n{text_grammar}\n}} "\\"" / ?/ "}}"'
    return f"%json {json.dumps({**function['parameters'], 'x-guidance': guidance})}"


@lru_cache(64)
def json_escaped_grammar(grammar: str) -> str | None:
    """The grammar of the JSON-escaped text; None if it cannot be expressed. Raises UsageError for unsupported syntax."""
    special = {letter for token in TOKEN.finditer(grammar) for letter in _escaped_characters(token)}
    if rules := _as_terminals(grammar):
        as_terminal = f"start: {rules['start']}\n{_rewrite(grammar, rules)}"
        try:
            lark_constraint(as_terminal, TEXT_ARGUMENT, "the grammar")
        except UsageError:
            pass  # too expensive as one terminal
        else:
            return as_terminal
    return None if len(special) > 1 else _rewrite(grammar, {})


@lru_cache(64)
def grammar_until(grammar: str, end: str, is_marked: bool) -> str | None:
    """The grammar of unescaped text followed by `end`; None if it cannot be expressed. Raises UsageError for unsupported syntax.

    is_marked: a special token follows; otherwise the text must not contain `end`."""
    if not (rules := _as_terminals(grammar)):
        return None
    full_text = f"{rules['start']} {json.dumps(end, ensure_ascii=False)}" if end else rules["start"]
    exclusion = "" if is_marked else f" & ~/(?s:.*){escape_regex(end)}(?s:.+)/"
    result = f"start: WHOLE_TEXT\nWHOLE_TEXT: ({full_text}){exclusion}\n{_rewrite(grammar, rules, in_json=False)}"
    try:
        lark_constraint(result, TEXT_ARGUMENT, "the grammar")
    except UsageError:  # too expensive as one terminal
        return None
    return result


def escape_regex(text: str) -> str:
    """A text escaped for a regular expression."""
    return REGEX_METACHARACTERS.sub(r"\\\g<0>", text).replace("\n", "\\n")


def _as_terminals(grammar: str) -> dict[str, str]:
    """Rule names as terminals; empty if that is impossible."""
    rules = {name: f"RULE_{name.upper()}" for name in _rule_bodies(grammar) if name.islower()}
    return rules if "start" in rules and not _is_recursive(grammar) and "%ignore" not in grammar else {}


def _escaped_characters(found: re.Match[str]) -> Iterator[str]:
    """The characters of a terminal that JSON escapes."""
    kind, text = found.lastgroup, found.group()
    if kind == "text":
        yield from {*_literal_value(text.rstrip("i"))} & {*JSON_ESCAPED}
    bodies = {"regex": [text[1:].rpartition("/")[0]], "range": [_range_class(text)],
              "import": [COMMON_TERMINALS[name] for name in re.findall(r"\w+", text) if name in COMMON_TERMINALS]}
    for atom in ATOM.finditer("".join(bodies.get(kind, ()))) if kind in bodies else ():
        yield from _escaped_by_json(atom.group(), True, True) if atom.lastgroup in ("class", "one") else ()


def _rule_bodies(grammar: str) -> dict[str, str]:
    """The right-hand side of each rule and terminal, without string literals."""
    bare = TOKEN.sub(lambda token: token.group() if token.lastgroup == "name" else " ", grammar)
    definitions = [*DEFINITION.finditer(bare)]
    ends = [*(definition.start() for definition in definitions[1:]), len(bare)]
    return {definition[1]: bare[definition.end() : end] for definition, end in zip(definitions, ends)}


def _is_recursive(grammar: str) -> bool:
    """Whether any rule is recursive, directly or indirectly."""
    rules = _rule_bodies(grammar)
    try:
        TopologicalSorter({name: {*re.findall(r"\w+", body)} & rules.keys() for name, body in rules.items()}).prepare()
    except CycleError:
        return True
    return False


def _rewrite(grammar: str, rules: Mapping[str, str], in_json: bool = True) -> str:
    """Every terminal, JSON-escaped or not, and the rules renamed. Raises UsageError."""
    def rewritten(token: re.Match[str]) -> str:
        kind, text = token.lastgroup, token.group()
        if kind in ("comment", "alias", "mark"):
            return ""
        if kind == "name":
            return rules.get(text, text)
        if kind == "special":
            raise UsageError(f"{text} is not allowed in a grammar for text", "leave it out")
        if not in_json:
            return text
        if kind == "import":
            return _import_terminals(text)
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            return f"/{_escape_body(body, flags)}/{flags.replace('s', '')}"
        if kind == "range":
            return f"/{_escape_body(_range_class(text), '')}/"
        literal, flag = text.rstrip("i"), text[len(text.rstrip("i")) :]
        escaped = json.dumps(_literal_value(literal), ensure_ascii=False)[1:-1]
        if flag and "\\" in escaped:
            raise UsageError(f"{text:.40} ignores case and contains characters that JSON escapes", "put them in a separate string")
        return json.dumps(escaped, ensure_ascii=False) + flag

    return TOKEN.sub(rewritten, grammar)


def _literal_value(literal: str) -> str:
    try:
        return ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        raise UsageError(f"{literal:.40} in the grammar is not text", "escape letters as JSON does") from None


def _import_terminals(text: str) -> str:
    """Imported terminals; those with escaped characters are defined here."""
    names = re.findall(r"(\w+)(?:\s*->\s*(\w+))?", text.partition("common")[2])
    lines = []
    for name, alias in names:
        alias = alias or name
        statement = f"%import common.{name}" + (f" -> {alias}" if alias != name else "")
        lines.append(f"{alias}: /{_escape_body(COMMON_TERMINALS[name], '')}/" if name in COMMON_TERMINALS else statement)
    return "\n".join(lines)


def _range_class(text: str) -> str:
    """A range as a character class; empty if the text is no range."""
    if found := RANGE.fullmatch(text):
        return "[" + "-".join(re.escape(_literal_value(each)) for each in found.groups()) + "]"
    return ""


def _escape_body(body: str, flags: str) -> str:
    """The regular expression for the escaped text. Raises UsageError."""
    if {*flags} - {*"ismu"}:
        raise UsageError(f"/{body:.40}/{flags} has flags other than i and s", SUPPORTED_SYNTAX)
    return "".join(_escape_atoms(body, "s" in flags, "i" in flags))


def _escape_atoms(body: str, dot_all: bool, ignore_case: bool) -> Iterator[str]:
    outer: list[bool] = []  # per open group: whether a dot matches newlines outside of it
    position = 0
    while position < len(body):
        atom = ATOM.match(body, position)
        if atom is None:
            raise UsageError(f"/{body:.40}/ has unsupported syntax: {body[position : position + 8]}", SUPPORTED_SYNTAX)
        position, kind, text = atom.end(), atom.lastgroup, atom.group()
        kind = "flags" if atom["flags"] else kind
        if kind == "flags":
            on, off = atom["on"], atom["off"] or ""
            if {*on, *off} - {*"ismu"} or "i" in off:
                raise UsageError(f"/{body:.40}/ has flags other than i and s", SUPPORTED_SYNTAX)
            if atom["end"] == ":":
                outer.append(dot_all)
            dot_all, ignore_case = (dot_all or "s" in on) and "s" not in off, ignore_case or "i" in on
        elif kind == "open":
            outer.append(dot_all)
        elif kind == "close" and outer:
            dot_all = outer.pop()
        elif kind in ("class", "one"):
            yield _escape_atom(text, dot_all, ignore_case)
            continue
        yield text


@cache
def _escape_atom(atom: str, dot_all: bool, ignore_case: bool) -> str:
    """A regular expression for the JSON-escaped form of what an atom (a character or a class) matches."""
    escaped = _escaped_by_json(atom, dot_all, ignore_case)
    if not escaped:
        return atom
    pattern = "".join(re.escape(json.dumps(character)[2:-1]) for character in escaped)
    pattern = rf"\\{pattern}" if len(escaped) == 1 else rf"\\[{pattern}]"
    if atom == ".":
        return rf"(?:[^{JSON_ESCAPED_CLASS[1:]}|{pattern})"
    if not _compile(atom, dot_all, ignore_case).search(_unescaped_characters()):
        return pattern
    return f"(?:[{atom}--{JSON_ESCAPED_CLASS}]|{pattern})"


@cache
def _escaped_by_json(atom: str, dot_all: bool, ignore_case: bool) -> str:
    """The escaped characters that an atom of a pattern matches. Raises UsageError."""
    compiled = _compile(atom, dot_all, ignore_case) if atom[:2] != r"\p" else None
    return "".join(character for character in JSON_ESCAPED if compiled and compiled.fullmatch(character))


def _compile(atom: str, dot_all: bool, ignore_case: bool) -> re.Pattern[str]:
    try:
        return re.compile(atom, (re.DOTALL if dot_all else 0) | (re.IGNORECASE if ignore_case else 0))
    except re.error as error:
        raise UsageError(f"{atom:.40} in the grammar is not a valid character class: {error}", SUPPORTED_SYNTAX) from None


@cache
def _unescaped_characters() -> str:
    """Every character that JSON does not escape."""
    return "".join(chr(code) for code in range(32, 0x3000) if chr(code) not in '"\\')
