"""A lenient parser of Lark grammars, to judge them before llguidance compiles one: how rules nest, which match a finite text, and their
parts. Syntax errors are left to llguidance: what is not understood here is skipped or taken for text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .gbnf import Node

START, IGNORED = "start", "%ignore"
MOST_OPEN = 60  # parentheses in one another: the library refuses 30
TOKEN = re.compile(r"""
    (?P<blank> (?:\#|//)[^\n]* | [ \t\r]+ ) | (?P<line> \n ) | (?P<text> "(?:\\.|[^"\\\n])*"i? ) | (?P<regex> /(?:\\.|[^/\\])+/[imslux]* )
    | (?P<json> %json | %regex | %llguidance ) | (?P<inner> %lark[ \t]*\{ ) | (?P<word> %\w+ ) | (?P<special> <[^<>\s]+> | @[\w-]+ )
    | (?P<name> !?[_?]?[a-z][_a-z0-9-]* | _?[A-Z][_A-Z0-9-]* ) | (?P<number> [+-]?\d+ ) | (?P<mark> :: | -> | \.\. | (?s:.) )
    """, re.VERBOSE)
BLANKS = re.compile(r"\s*")
OPEN, CLOSE = {"(": ")", "[": "]"}, (")", "]")
NO_HEAD = ("line", "inner", "json", "regex")  # what stands between the name of a rule and its colon never


@dataclass(frozen=True)
class Token:
    """A lexer token, by `kind`."""

    kind: str
    text: str
    value: object = None  # of JSON


@dataclass
class Rule:
    """`grammar`: the number of the grammar it belongs to. `is_held`: it has attributes in brackets, which make it a terminal."""

    grammar: int = 0
    tokens: list[Token] = field(default_factory=list)
    is_held: bool = False

    def named(self, token: Token) -> str:
        """The key in `rules_of` of the rule that a token refers to."""
        return token.text if token.kind == "inner" else f"{self.grammar}:{token.text}"

    def deeper(self, rules: Mapping[str, Rule]) -> Iterator[tuple[str, int]]:
        """The rules it refers to, with the nesting depth of each: one, plus one for each parenthesis."""
        depth = 0
        for token in self.tokens:
            depth += (token.text in OPEN) - (token.text in CLOSE) if token.kind == "mark" else 0
            if token.kind in ("name", "inner") and self.named(token) in rules:
                yield self.named(token), 1 + max(0, depth)

    def parts(self, rules: Mapping[str, Rule]) -> Node:
        """Its syntax tree, with GBNF's node kinds plus "and" and "not". Unknown references are text."""
        try:
            return Node("text") if self.is_held else _Parts(self, rules).whole()
        except _NotUnderstood:
            return Node("text")


def rules_of(text: str) -> dict[str, Rule]:
    """All rules, those of embedded grammars included, by "number:name": "0:start" is the first. %ignore is a rule too, "0:%ignore"."""
    found: dict[str, Rule] = {}
    left = [*_tokens(text)]
    open_, grammars, at, begins = [(Rule(), 0)], 1, 0, True  # the rule that is read in each grammar, and braces open in it
    while at < len(left):
        token, (rule, braces) = left[at], open_[-1]
        colon = _colon(left, at) if begins and token.kind == "name" else None
        if colon is not None or (begins and token.kind == "word"):
            end = at if colon is None else colon
            rule = Rule(rule.grammar, is_held=any(each.text == "[" for each in left[at:end]))
            if colon is not None or token.text == IGNORED:
                found.setdefault(f"{rule.grammar}:{token.text.lstrip('!?')}", rule)
            open_[-1], at = (rule, braces), end
        elif token.kind == "inner":
            rule.tokens.append(Token("inner", f"{grammars}:{START}"))
            open_.append((Rule(grammars), 0))
            grammars += 1
        elif token.text == "}" and token.kind == "mark" and braces == 0 and len(open_) > 1:
            open_.pop()
        elif token.kind != "line":
            rule.tokens.append(token)
            if token.kind == "mark":
                open_[-1] = rule, braces + (token.text == "{") - (token.text == "}")
        begins = token.kind in ("line", "inner")
        at += 1
    return found


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        at, value = found.end(), None
        if found.lastgroup == "json":
            try:
                value, at = json.JSONDecoder().raw_decode(text, BLANKS.match(text, at).end())
            except (ValueError, RecursionError):
                return  # the library refuses it too
        if found.lastgroup != "blank":
            yield Token(found.lastgroup, found[0], value)


def _colon(tokens: list[Token], at: int) -> int | None:
    """Position of the colon after a rule's name; None if this is no rule head."""
    for place in range(at + 1, len(tokens)):
        if tokens[place].text == ":":
            return place
        if tokens[place].kind in NO_HEAD:
            break
    return None


class _NotUnderstood(ValueError):
    pass


class _Parts:
    def __init__(self, rule: Rule, rules: Mapping[str, Rule]) -> None:
        self._rule, self._rules, self._at, self._open = rule, rules, 0, 0

    def whole(self) -> Node:
        made = self._one()
        if self._next().kind != "end":
            raise _NotUnderstood
        return made

    def _next(self) -> Token:
        return self._rule.tokens[self._at] if self._at < len(self._rule.tokens) else Token("end", "")

    def _take(self, *texts: str) -> Token:
        token = self._next()
        if texts and token.text not in texts:
            raise _NotUnderstood
        self._at += 1
        return token

    def _one(self) -> Node:
        parts = [self._all()]
        while self._next() == Token("mark", "|"):
            self._at += 1
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else Node("one", parts=tuple(parts))

    def _all(self) -> Node:
        sides: list[list[Node]] = [[]]  # of each &
        while (token := self._next()).kind != "end" and not (token.kind == "mark" and token.text in ("|", *CLOSE)):
            if token.text == "->":
                self._at += 2  # a name for what is found
            elif token.text == "%if":
                self._at += 2
                self._skip_parentheses()
            elif token == Token("mark", "&"):
                self._at += 1
                sides.append([])
            else:
                sides[-1].append(self._times())
        made = [side[0] if len(side) == 1 else Node("all", parts=tuple(side)) for side in sides]
        return made[0] if len(made) == 1 else Node("and", parts=tuple(made))

    def _times(self) -> Node:
        part, token = self._atom(), self._next()
        if token.kind != "mark" or token.text not in ("?", "*", "+", "~", "{"):
            return part
        self._at += 1
        if token.text not in "~{":
            return Node("times", token.text, (part,))
        least = most = "0" if self._next().text == "," else self._take().text
        if self._next().text in ("..", ","):
            self._at += 1
            most = self._take().text if self._next().kind == "number" else ""
        if token.text == "{":
            self._take("}")
        if not (least + most).isdecimal():
            raise _NotUnderstood
        return Node("times", f"{{{least},{most}}}", (part,))

    def _atom(self) -> Node:
        token = self._take()
        if token.kind == "mark" and token.text in OPEN:
            self._open += 1
            if self._open > MOST_OPEN:
                raise _NotUnderstood
            inner = self._one()
            self._take(OPEN[token.text])
            self._open -= 1
            return inner if token.text == "(" else Node("times", "?", (inner,))
        if token.kind == "mark" and token.text == "~":
            self._open += 1
            if self._open > MOST_OPEN:
                raise _NotUnderstood
            inner = self._times()
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
        raise _NotUnderstood

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
