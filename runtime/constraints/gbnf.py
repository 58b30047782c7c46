"""Translates GBNF, llama.cpp's grammar format, into the Lark notation of llguidance.

llguidance has a lexer with longest match and no backtracking: where a number may end in blanks and a newline follows, the blanks swallow
the newline and the grammar waits for another. GBNF has no terminals. So a grammar without recursion becomes a single terminal, which means
exactly the same; otherwise the parts of rules that refer to no rule become terminals.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from .gbnf_repeats import LARGEST, Repeat

RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # what GBNF has and Lark has not
TERMINAL = re.compile(r"T\d+")
NAME = re.compile(r"[A-Za-z0-9_-]+")
BLANK, BLANK_LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
TIMES = re.compile(r"\{[ \t\r\n]*(\d+)[ \t\r\n]*(?:(,)[ \t\r\n]*(\d*)[ \t\r\n]*)?\}")
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\"\\\[\]nrt]))")
LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
NOTHING, ANY = '""', "/(?s:.)/"
ROOT = "root"
MOST = "*+?"
NEVER = re.compile(r"[*?]|\{0+[,}]")  # how often a part may come that may be absent
DEEPEST = 500  # rules in one another: llguidance takes the program's stack for each, and has no limit of its own


SHALLOWER = "nest parentheses less deeply: move what they hold into a rule"
ENDLESS_HINT = "add an alternative that does not recurse"


class GbnfError(ValueError):
    """A syntax error on one line, with a hint."""

    def __init__(self, message: str, hint: str = "GBNF begins with `root ::=`, Lark with `start:`") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Node:
    """A node of a rule's syntax tree. `kind`: "text" (a terminal in Lark notation), "rule" (a reference), "all" (sequence) or "one"
    (alternatives) of `parts`, "times" (a repeat of one part, `text` says how often)."""

    kind: str
    text: str = ""
    parts: tuple[Node, ...] = ()

    def names(self) -> Iterator[str]:
        """The rules it refers to."""
        if self.kind == "rule":
            yield self.text
        for part in self.parts:
            yield from part.names()

    def ends(self, ending: Container[str]) -> bool:
        """Can it match a finite text, given the rules that can?"""
        if self.kind == "rule":
            return self.text in ending
        if self.kind == "times" and NEVER.match(self.text):
            return True
        held = [part.ends(ending) for part in self.parts]
        return any(held) if self.kind == "one" and held else all(held)


def to_lark(text: str, as_one: bool = True) -> str:
    """The grammar in Lark notation, `as_one` terminal if possible. Raises GbnfError."""
    try:
        rules = _Parser(text).rules()
        if ROOT not in rules:
            raise GbnfError(f"there is no rule {ROOT}")
        for name, rule in rules.items():
            for other in rule.names():
                if other not in rules:
                    raise GbnfError(f"the rule {name} refers to {other}, which is not defined")
        return _Writer(_counted(rules)).written(as_one)
    except RecursionError:
        raise GbnfError("it is nested too deeply", SHALLOWER) from None


def _counted(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules with nested repeats merged where one repeat says the same, also across a rule reference."""
    made: dict[str, Node] = {}
    at: set[str] = set()

    def rule(name: str) -> Node:
        if name not in made:
            at.add(name)
            made[name] = node(rules[name])
            at.discard(name)
        return made[name]

    def node(given: Node) -> Node:
        parts = tuple(map(node, given.parts))
        if given.kind != "times":
            return replace(given, parts=parts)
        inner = parts[0]
        if inner.kind == "rule" and inner.text not in at and rules[inner.text].kind == "times":
            inner = rule(inner.text)
        count = Repeat.read(given.text)
        if inner.kind == "times" and (one := count.of(Repeat.read(inner.text))) is not None:
            count, parts = one, inner.parts
        return Node("text", NOTHING) if count.most == 0 else Node("times", str(count), parts)

    return {name: rule(name) for name in rules}


def place(text: str, lark: str, line: int) -> tuple[int, str] | None:
    """Map a line of the generated Lark back to GBNF: (line, rule name), None for a line of neither."""
    rules = _counted(_Parser(text).rules())
    lines = lark.splitlines()
    name = lines[line - 1].partition(":")[0] if 0 < line <= len(lines) else ""
    if TERMINAL.fullmatch(name):  # a part of the first rule that has it
        name = next((each.partition(":")[0] for each in lines if re.search(rf"\b{name}\b", each.partition(":")[2])), "")
    found = re.match(r"[rR](\d+)_", name)
    order, _ = _Writer(rules)._reached()
    if found is None or int(found[1]) >= len(order):
        return None
    own = order[int(found[1])]
    stands = [*re.finditer(rf"^[ \t]*{re.escape(own)}[ \t]*::=", text, re.MULTILINE)]
    return (text.count("\n", 0, stands[-1].start()) + 1, own) if stands else None


def endless(rules: Mapping[str, Node], order: Iterable[str]) -> str | None:
    """The first rule that matches no finite text, on which llguidance may not terminate; None if there is none."""
    ending: set[str] = set()
    left, before = [*order], -1
    while len(left) != before:
        before = len(left)
        for name in left:
            if rules[name].ends(ending):
                ending.add(name)
        left = [name for name in left if name not in ending]
    return next(iter(left), None)


@dataclass
class _Parser:
    text: str
    at: int = 0

    def rules(self) -> dict[str, Node]:
        """Name -> rule; the last definition of a name wins."""
        found = {}
        self._skip(BLANK_LINES)
        while self.at < len(self.text):
            name = self._name()
            self._skip(BLANK)
            if not self.text.startswith("::=", self.at):
                self._refuse("expected ::=")
            self.at += 3
            self._skip(BLANK_LINES)
            found[name] = self._one(nested=False)
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                self._refuse("expected the end of the line")
            self._skip(BLANK_LINES)
        return found

    def _one(self, nested: bool) -> Node:
        parts = [self._all(nested)]
        while self.text.startswith("|", self.at):
            self.at += 1
            self._skip(BLANK_LINES)
            parts.append(self._all(nested))
        return parts[0] if len(parts) == 1 else Node("one", parts=tuple(parts))

    def _all(self, nested: bool) -> Node:
        parts: list[Node] = []
        blank = BLANK_LINES if nested else BLANK
        while (char := self.text[self.at : self.at + 1]) and char not in "|)\r\n":
            if char == '"':
                parts.append(Node("text", self._literal()))
            elif char == "[":
                parts.append(Node("text", self._set()))
            elif char == ".":
                self.at += 1
                parts.append(Node("text", ANY))
            elif char == "(":
                self.at += 1
                self._skip(BLANK_LINES)
                parts.append(self._one(nested=True))
                if not self.text.startswith(")", self.at):
                    self._refuse("expected a closing parenthesis")
                self.at += 1
            elif parts and (char in MOST or char == "{"):
                parts[-1] = Node("times", self._times(char), (parts[-1],))
            else:
                parts.append(Node("rule", self._name()))
            self._skip(blank)
        return parts[0] if len(parts) == 1 else Node("all", parts=tuple(parts))

    def _times(self, char: str) -> str:
        if char in MOST:
            self.at += 1
            return char
        found = TIMES.match(self.text, self.at)
        if found is None or (found[3] and int(found[1]) > int(found[3])):
            self._refuse("expected a repeat count, as {2} or {2,} or {2,4}")
        if int(found[3] or found[1]) > LARGEST:
            self._refuse(f"expected a count of at most {LARGEST}")
        self.at = found.end()
        return f"{{{int(found[1])}{',' if found[2] else ''}{found[3] or ''}}}"

    def _literal(self) -> str:
        self.at += 1
        made = ""
        while not self.text.startswith('"', self.at):
            made += _escaped(self._char())
        self.at += 1
        return f"/{made}/" if made else NOTHING

    def _set(self) -> str:
        self.at += 1
        made, sign = "", ""
        if self.text.startswith("^", self.at):
            self.at, sign = self.at + 1, "^"
        while not self.text.startswith("]", self.at):
            first = last = self._char()
            if self.text.startswith("-", self.at) and not self.text.startswith("]", self.at + 1):
                self.at += 1
                last = self._char()
            if last < first:
                self._refuse("a range ends before it begins")
            made += _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"
        self.at += 1
        if not made and not sign:
            self._refuse("a character class is empty")
        return f"/[{sign}{made}]/" if made else ANY

    def _char(self) -> str:
        char = self.text[self.at : self.at + 1]
        if char != "\\":
            self.at += 1
            return char or self._refuse("the text ends in the middle of a rule")
        found = ESCAPE.match(self.text, self.at)
        number = int(found[1] or found[2] or found[3] or "0", 16) if found else -1
        if not 0 <= number <= 0x10FFFF or 0xD800 <= number < 0xE000:
            self._refuse("there is no such character")
        self.at = found.end()
        return LETTERS.get(found[4], found[4]) if found[4] else chr(number)

    def _name(self) -> str:
        found = NAME.match(self.text, self.at)
        if found is None:
            self._refuse("expected a name")
        self.at = found.end()
        return found[0]

    def _skip(self, blank: re.Pattern[str]) -> None:
        self.at = blank.match(self.text, self.at).end()

    def _refuse(self, why: str) -> str:
        line = self.text.count("\n", 0, self.at) + 1
        begin, end = max(0, self.at - 20), self.at + 20
        raise GbnfError(f"line {line}: {why} after {self.text[begin:self.at]!r}, at {self.text[self.at:end]!r}")


def _escaped(char: str) -> str:
    """A character escaped for a regular expression, also in a character class."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


@dataclass
class _Writer:
    rules: dict[str, Node]
    terminals: dict[str, str] = field(default_factory=dict)  # text -> name

    def written(self, as_one: bool) -> str:
        order, recurs = self._reached()
        self._demand_ends(order)
        whole = as_one and not recurs
        self._names = {name: f"r{number}_{re.sub('[^a-z0-9]', '_', name.lower())}" for number, name in enumerate(order)}
        if whole:
            self._names = {name: made.upper() for name, made in self._names.items()}
        lines = [f"start: {self._names[ROOT]}"]
        lines += [f"{self._names[name]}: {self._plain(self.rules[name]) if whole else self._cut(self.rules[name])}" for name in order]
        lines += [f"{name}: {text}" for text, name in self.terminals.items()]
        return "%llguidance {}\n" + "\n".join(lines) + "\n"

    def _reached(self) -> tuple[list[str], bool]:
        """The rules reachable from root, and whether any is recursive."""
        found: dict[str, None] = {}
        above, left, recurs = [""], [iter((ROOT,))], False
        while left:
            name = next(left[-1], None)
            if name is None:
                left.pop()
                above.pop()
            elif name in found:
                recurs = recurs or name in above
            else:
                found[name] = None
                above.append(name)
                left.append(iter(dict.fromkeys(self.rules[name].names())))
            if len(above) > DEEPEST:
                raise GbnfError(f"rules are nested more than {DEEPEST} deep", "make fewer rules refer to one another")
        return [*found], recurs

    def _demand_ends(self, order: list[str]) -> None:
        if (name := endless(self.rules, order[::-1])) is not None:
            raise GbnfError(f"the rule {name} never ends: each of its alternatives recurses", ENDLESS_HINT)

    def _plain(self, node: Node) -> str:
        """A node as a regular terminal."""
        if node.kind == "text":
            return node.text
        if node.kind == "rule":
            return self._names[node.text]
        if node.kind == "times":
            return f"({self._plain(node.parts[0])}){node.text}"
        said = (" " if node.kind == "all" else " | ").join(map(self._plain, node.parts))
        return f"({said})" if said else NOTHING

    def _cut(self, node: Node) -> str:
        """A node with its reference-free parts as terminals; adjacent ones are joined."""
        if next(node.names(), None) is None:
            return self.terminals.setdefault(self._plain(node), f"T{len(self.terminals)}")
        if node.kind == "rule":
            return self._names[node.text]
        if node.kind == "times":
            return f"({self._cut(node.parts[0])}){node.text}"
        if node.kind == "one":
            return f"({' | '.join(map(self._cut, node.parts))})"
        made: list[str] = []
        row: list[Node] = []
        for part in (*node.parts, None):
            if part is not None and next(part.names(), None) is None:
                row.append(part)
                continue
            if row:
                made.append(self._cut(Node("all", parts=tuple(row))))
            row = []
            if part is not None:
                made.append(self._cut(part))
        return f"({' '.join(made)})"
