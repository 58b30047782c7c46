"""A lenient parser of Lark grammars, to judge their cost before llguidance compiles them: nesting, finiteness and parts of rules.

Syntax errors are left to llguidance: unknown syntax is skipped or treated as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .gbnf import Node

START, IGNORED = "start", "%ignore"
MAX_OPEN_PARENTHESES = 60  # nesting limit of this parser; the library refuses 30 already
TOKEN = re.compile(r"""
    (?P<blank> (?:\#|//)[^\n]* | [ \t\r]+ ) | (?P<line> \n ) | (?P<text> "(?:\\.|[^"\\\n])*"i? ) | (?P<regex> /(?:\\.|[^/\\])+/[imslux]* )
    | (?P<json> %json | %regex | %llguidance ) | (?P<inner> %lark[ \t]*\{ ) | (?P<word> %\w+ ) | (?P<special> <[^<>\s]+> | @[\w-]+ )
    | (?P<name> !?[_?]?[a-z][_a-z0-9-]* | _?[A-Z][_A-Z0-9-]* ) | (?P<number> [+-]?\d+ ) | (?P<mark> :: | -> | \.\. | (?s:.) )
    """, re.VERBOSE)
BLANKS = re.compile(r"\s*")
OPEN, CLOSE = {"(": ")", "[": "]"}, (")", "]")
NOT_IN_RULE_HEAD = ("line", "inner", "json", "regex")  # tokens that cannot occur between a rule's name and its colon


@dataclass(frozen=True)
class Token:
    """A lexer token, by `kind`."""

    kind: str
    text: str
    value: object = None  # of JSON


@dataclass
class Rule:
    """The definition of a rule."""

    grammar: int = 0  # number of the grammar it belongs to: 0 for the outer one, then embedded ones
    tokens: list[Token] = field(default_factory=list)
    is_terminal: bool = False  # it has attributes in brackets, which make it one

    def named(self, token: Token) -> str:
        """The key in `parse_rules` of the rule that a token refers to."""
        return token.text if token.kind == "inner" else f"{self.grammar}:{token.text}"

    def references(self, rules: Mapping[str, Rule]) -> Iterator[tuple[str, int]]:
        """The rules it refers to, with the nesting depth of each: one, plus one for each parenthesis."""
        depth = 0
        for token in self.tokens:
            depth += (token.text in OPEN) - (token.text in CLOSE) if token.kind == "mark" else 0
            if token.kind in ("name", "inner") and self.named(token) in rules:
                yield self.named(token), 1 + max(0, depth)

    def parts(self, rules: Mapping[str, Rule]) -> Node:
        """Its syntax tree, with GBNF's node kinds plus "and" and "not". Unknown references are text."""
        try:
            return Node("text") if self.is_terminal else _RuleParser(self, rules).parse()
        except _UnsupportedSyntax:
            return Node("text")


def parse_rules(text: str) -> dict[str, Rule]:
    """All rules, including those of embedded grammars, by "grammar number:name", such as "0:start". %ignore is a rule too, "0:%ignore"."""
    rules: dict[str, Rule] = {}
    tokens = [*_tokens(text)]
    open_grammars = [(Rule(), 0)]  # of each nested grammar the current rule and the number of open braces in it
    grammars, position, at_line_start = 1, 0, True
    while position < len(tokens):
        token, (rule, braces) = tokens[position], open_grammars[-1]
        colon = _find_colon(tokens, position) if at_line_start and token.kind == "name" else None
        if colon is not None or (at_line_start and token.kind == "word"):
            end = position if colon is None else colon
            rule = Rule(rule.grammar, is_terminal=any(each.text == "[" for each in tokens[position:end]))
            if colon is not None or token.text == IGNORED:
                rules.setdefault(f"{rule.grammar}:{token.text.lstrip('!?')}", rule)
            open_grammars[-1], position = (rule, braces), end
        elif token.kind == "inner":
            rule.tokens.append(Token("inner", f"{grammars}:{START}"))
            open_grammars.append((Rule(grammars), 0))
            grammars += 1
        elif token.text == "}" and token.kind == "mark" and braces == 0 and len(open_grammars) > 1:
            open_grammars.pop()
        elif token.kind != "line":
            rule.tokens.append(token)
            if token.kind == "mark":
                open_grammars[-1] = rule, braces + (token.text == "{") - (token.text == "}")
        at_line_start = token.kind in ("line", "inner")
        position += 1
    return rules


def _tokens(text: str) -> Iterator[Token]:
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        position, value = match.end(), None
        if match.lastgroup == "json":
            try:
                value, position = json.JSONDecoder().raw_decode(text, BLANKS.match(text, position).end())
            except (ValueError, RecursionError):
                return  # the library refuses it too
        if match.lastgroup != "blank":
            yield Token(match.lastgroup, match[0], value)


def _find_colon(tokens: list[Token], start: int) -> int | None:
    """Position of the colon after a rule's name; None if this is no rule head."""
    for position in range(start + 1, len(tokens)):
        if tokens[position].text == ":":
            return position
        if tokens[position].kind in NOT_IN_RULE_HEAD:
            break
    return None


class _UnsupportedSyntax(ValueError):
    pass


class _RuleParser:
    def __init__(self, rule: Rule, rules: Mapping[str, Rule]) -> None:
        self._rule, self._rules, self._at, self._open = rule, rules, 0, 0

    def parse(self) -> Node:
        node = self._alternatives()
        if self._next().kind != "end":
            raise _UnsupportedSyntax
        return node

    def _next(self) -> Token:
        return self._rule.tokens[self._at] if self._at < len(self._rule.tokens) else Token("end", "")

    def _take(self, *texts: str) -> Token:
        token = self._next()
        if texts and token.text not in texts:
            raise _UnsupportedSyntax
        self._at += 1
        return token

    def _alternatives(self) -> Node:
        parts = [self._sequence()]
        while self._next() == Token("mark", "|"):
            self._at += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Node("one", parts=tuple(parts))

    def _sequence(self) -> Node:
        operands: list[list[Node]] = [[]]  # of each &
        while (token := self._next()).kind != "end" and not (token.kind == "mark" and token.text in ("|", *CLOSE)):
            if token.text == "->":
                self._at += 2  # a name for what is found
            elif token.text == "%if":
                self._at += 2
                self._skip_parentheses()
            elif token == Token("mark", "&"):
                self._at += 1
                operands.append([])
            else:
                operands[-1].append(self._repeat())
        nodes = [side[0] if len(side) == 1 else Node("all", parts=tuple(side)) for side in operands]
        return nodes[0] if len(nodes) == 1 else Node("and", parts=tuple(nodes))

    def _repeat(self) -> Node:
        part, token = self._atom(), self._next()
        if token.kind != "mark" or token.text not in ("?", "*", "+", "~", "{"):
            return part
        self._at += 1
        if token.text not in "~{":
            return Node("times", token.text, (part,))
        low = high = "0" if self._next().text == "," else self._take().text
        if self._next().text in ("..", ","):
            self._at += 1
            high = self._take().text if self._next().kind == "number" else ""
        if token.text == "{":
            self._take("}")
        if not (low + high).isdecimal():
            raise _UnsupportedSyntax
        return Node("times", f"{{{low},{high}}}", (part,))

    def _atom(self) -> Node:
        token = self._take()
        if token.kind == "mark" and token.text in OPEN:
            self._open += 1
            if self._open > MAX_OPEN_PARENTHESES:
                raise _UnsupportedSyntax
            inner = self._alternatives()
            self._take(OPEN[token.text])
            self._open -= 1
            return inner if token.text == "(" else Node("times", "?", (inner,))
        if token.kind == "mark" and token.text == "~":
            self._open += 1
            if self._open > MAX_OPEN_PARENTHESES:
                raise _UnsupportedSyntax
            inner = self._repeat()
            self._open -= 1
            return Node("not", parts=(inner,))
        if token.kind in ("name", "inner"):
            if self._next().text == "::":
                self._at += 2
                self._skip_parentheses()
            name = self._rule.named(token)
            return Node("rule", name) if name in self._rules else Node("text")
        if token.kind in ("text", "regex") and self._next().text == "..":
            self._at += 2
        if token.kind in ("text", "regex", "json", "special"):
            return Node("text", token.text)
        raise _UnsupportedSyntax

    def _skip_parentheses(self) -> None:
        """Skip a parameter or a condition."""
        depth = 0
        while self._next().kind != "end":
            depth += (self._next().text == "(") - (self._next().text == ")")
            if depth == 0 and self._next().text != ")":
                return
            self._at += 1
            if depth == 0:
                return
