"""Translates GBNF, llama.cpp's grammar format, into the Lark notation of llguidance.

llguidance has a lexer with longest match and no backtracking: where a number may end in blanks and a newline follows, the blanks swallow
the newline and the grammar waits for another. GBNF has no terminals. So a grammar without recursion becomes a single terminal, which means
exactly the same; otherwise the parts of rules that refer to no rule become terminals.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from .gbnf_repeats import MAX_REPEAT, Repeat

RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # GBNF syntax that Lark does not have
TERMINAL = re.compile(r"T\d+")
NAME = re.compile(r"[A-Za-z0-9_-]+")
BLANK, BLANK_LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
TIMES = re.compile(r"\{[ \t\r\n]*(\d+)[ \t\r\n]*(?:(,)[ \t\r\n]*(\d*)[ \t\r\n]*)?\}")
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\"\\\[\]nrt]))")
ESCAPED_CHARS = {"n": "\n", "r": "\r", "t": "\t"}
NOTHING, ANY = '""', "/(?s:.)/"
ROOT = "root"
REPEAT_SIGNS = "*+?"
OPTIONAL_REPEAT = re.compile(r"[*?]|\{0+[,}]")  # repeats that allow zero times
MAX_RULE_DEPTH = 500  # nesting of rules: llguidance recurses on the program's stack, and has no limit of its own


SHALLOWER_HINT = "nest parentheses less deeply: move what they hold into a rule"
ENDLESS_HINT = "add an alternative that does not recurse"


class GbnfError(ValueError):
    """A syntax error on one line, with a hint."""

    def __init__(self, message: str, hint: str = "GBNF begins with `root ::=`, Lark with `start:`") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Node:
    """A node of a rule's syntax tree."""

    # "text" (a terminal in Lark notation), "rule" (a reference), "all" (sequence of `parts`), "one" (alternatives), "times" (a repeat of
    # one part).
    kind: str
    text: str = ""  # of a terminal; the name of a rule; how often a part is repeated
    parts: tuple[Node, ...] = ()

    def names(self) -> Iterator[str]:
        """The rules it refers to."""
        if self.kind == "rule":
            yield self.text
        for part in self.parts:
            yield from part.names()

    def is_finite(self, finite: Container[str]) -> bool:
        """Whether it can match a finite text, given the rules that can."""
        if self.kind == "rule":
            return self.text in finite
        if self.kind == "times" and OPTIONAL_REPEAT.match(self.text):
            return True
        part_finite = [part.is_finite(finite) for part in self.parts]
        return any(part_finite) if self.kind == "one" and part_finite else all(part_finite)


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
        return _Writer(_merge_repeats(rules)).write(as_one)
    except RecursionError:
        raise GbnfError("it is nested too deeply", SHALLOWER_HINT) from None


def _merge_repeats(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules with nested repeats merged where one repeat says the same, also across a rule reference."""
    merged: dict[str, Node] = {}
    open_rules: set[str] = set()

    def rule(name: str) -> Node:
        if name not in merged:
            open_rules.add(name)
            merged[name] = node(rules[name])
            open_rules.discard(name)
        return merged[name]

    def node(original: Node) -> Node:
        parts = tuple(map(node, original.parts))
        if original.kind != "times":
            return replace(original, parts=parts)
        inner = parts[0]
        if inner.kind == "rule" and inner.text not in open_rules and rules[inner.text].kind == "times":
            inner = rule(inner.text)
        count = Repeat.read(original.text)
        if inner.kind == "times" and (combined := count.of(Repeat.read(inner.text))) is not None:
            count, parts = combined, inner.parts
        return Node("text", NOTHING) if count.most == 0 else Node("times", str(count), parts)

    return {name: rule(name) for name in rules}


def gbnf_position(text: str, lark: str, line: int) -> tuple[int, str] | None:
    """Map a line of the generated Lark back to GBNF: (line, rule name), None for a line of neither."""
    rules = _merge_repeats(_Parser(text).rules())
    lines = lark.splitlines()
    name = lines[line - 1].partition(":")[0] if 0 < line <= len(lines) else ""
    if TERMINAL.fullmatch(name):  # attributed to the first rule that contains it
        name = next((each.partition(":")[0] for each in lines if re.search(rf"\b{name}\b", each.partition(":")[2])), "")
    match = re.match(r"[rR](\d+)_", name)
    order, _ = _Writer(rules)._reachable_rules()
    if match is None or int(match[1]) >= len(order):
        return None
    rule = order[int(match[1])]
    definitions = [*re.finditer(rf"^[ \t]*{re.escape(rule)}[ \t]*::=", text, re.MULTILINE)]
    return (text.count("\n", 0, definitions[-1].start()) + 1, rule) if definitions else None


def find_endless_rule(rules: Mapping[str, Node], order: Iterable[str]) -> str | None:
    """The first rule that matches no finite text, on which llguidance may not terminate; None if there is none."""
    finite: set[str] = set()
    remaining, before = [*order], -1
    while len(remaining) != before:
        before = len(remaining)
        for name in remaining:
            if rules[name].is_finite(finite):
                finite.add(name)
        remaining = [name for name in remaining if name not in finite]
    return next(iter(remaining), None)


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
            found[name] = self._alternatives(nested=False)
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                self._refuse("expected the end of the line")
            self._skip(BLANK_LINES)
        return found

    def _alternatives(self, nested: bool) -> Node:
        parts = [self._sequence(nested)]
        while self.text.startswith("|", self.at):
            self.at += 1
            self._skip(BLANK_LINES)
            parts.append(self._sequence(nested))
        return parts[0] if len(parts) == 1 else Node("one", parts=tuple(parts))

    def _sequence(self, nested: bool) -> Node:
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
                parts.append(self._alternatives(nested=True))
                if not self.text.startswith(")", self.at):
                    self._refuse("expected a closing parenthesis")
                self.at += 1
            elif parts and (char in REPEAT_SIGNS or char == "{"):
                parts[-1] = Node("times", self._times(char), (parts[-1],))
            else:
                parts.append(Node("rule", self._name()))
            self._skip(blank)
        return parts[0] if len(parts) == 1 else Node("all", parts=tuple(parts))

    def _times(self, char: str) -> str:
        if char in REPEAT_SIGNS:
            self.at += 1
            return char
        found = TIMES.match(self.text, self.at)
        if found is None or (found[3] and int(found[1]) > int(found[3])):
            self._refuse("expected a repeat count, as {2} or {2,} or {2,4}")
        if int(found[3] or found[1]) > MAX_REPEAT:
            self._refuse(f"expected a count of at most {MAX_REPEAT}")
        self.at = found.end()
        return f"{{{int(found[1])}{',' if found[2] else ''}{found[3] or ''}}}"

    def _literal(self) -> str:
        begin, made = self.at, ""
        self.at += 1
        while not self.text.startswith('"', self.at):
            self._refuse_unclosed(begin, "a text in quotes", '"')
            made += _escaped(self._char())
        self.at += 1
        return f"/{made}/" if made else NOTHING

    def _set(self) -> str:
        begin, made, sign = self.at, "", ""
        self.at += 1
        if self.text.startswith("^", self.at):
            self.at, sign = self.at + 1, "^"
        while not self.text.startswith("]", self.at):
            self._refuse_unclosed(begin, "a character class", "]")
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
        return ESCAPED_CHARS.get(found[4], found[4]) if found[4] else chr(number)

    def _name(self) -> str:
        found = NAME.match(self.text, self.at)
        if found is None:
            self._refuse("expected a name")
        self.at = found.end()
        return found[0]

    def _skip(self, blank: re.Pattern[str]) -> None:
        self.at = blank.match(self.text, self.at).end()

    def _refuse_unclosed(self, begin: int, what: str, closing: str) -> None:
        """Refuse what begins at `begin` if the text has ended: the place to mend is there, not at the end."""
        if self.at >= len(self.text):
            self.at = begin
            self._refuse(f"{what} has no closing {closing}, the text ends in the middle of it,")

    def _refuse(self, why: str) -> str:
        """Raises GbnfError with the line, and what is around the position on it."""
        start = self.text.rfind("\n", 0, self.at) + 1
        stop = self.text.find("\n", self.at)
        line = self.text.count("\n", 0, self.at) + 1
        before = self.text[max(start, self.at - 20) : self.at]
        after = self.text[self.at : min(len(self.text) if stop < 0 else stop, self.at + 20)]
        raise GbnfError(f"line {line}: {why}" + (f" after {before!r}" if before else "")
                        + (f", at {after!r}" if after else ", at the end of the line"))


def _escaped(char: str) -> str:
    """A character escaped for a regular expression, also in a character class."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


@dataclass
class _Writer:
    rules: dict[str, Node]
    terminals: dict[str, str] = field(default_factory=dict)  # text -> name

    def write(self, as_one: bool) -> str:
        order, is_recursive = self._reachable_rules()
        self._check_finite(order)
        is_terminal = as_one and not is_recursive
        self._names = {name: f"r{number}_{re.sub('[^a-z0-9]', '_', name.lower())}" for number, name in enumerate(order)}
        if is_terminal:
            self._names = {name: made.upper() for name, made in self._names.items()}
        lines = [f"start: {self._names[ROOT]}"]
        lines += [f"{self._names[name]}: {self._as_terminal(self.rules[name]) if is_terminal else self._as_rule(self.rules[name])}"
                  for name in order]
        lines += [f"{name}: {text}" for text, name in self.terminals.items()]
        return "%llguidance {}\n" + "\n".join(lines) + "\n"

    def _reachable_rules(self) -> tuple[list[str], bool]:
        """The rules reachable from root, and whether any is recursive."""
        found: dict[str, None] = {}
        path, stack, is_recursive = [""], [iter((ROOT,))], False
        while stack:
            name = next(stack[-1], None)
            if name is None:
                stack.pop()
                path.pop()
            elif name in found:
                is_recursive = is_recursive or name in path
            else:
                found[name] = None
                path.append(name)
                stack.append(iter(dict.fromkeys(self.rules[name].names())))
            if len(path) > MAX_RULE_DEPTH:
                raise GbnfError(f"rules are nested more than {MAX_RULE_DEPTH} deep", "make fewer rules refer to one another")
        return [*found], is_recursive

    def _check_finite(self, order: list[str]) -> None:
        if (name := find_endless_rule(self.rules, order[::-1])) is not None:
            raise GbnfError(f"the rule {name} never ends: each of its alternatives recurses", ENDLESS_HINT)

    def _as_terminal(self, node: Node) -> str:
        """A node as a regular terminal."""
        if node.kind == "text":
            return node.text
        if node.kind == "rule":
            return self._names[node.text]
        if node.kind == "times":
            return f"({self._as_terminal(node.parts[0])}){node.text}"
        said = (" " if node.kind == "all" else " | ").join(map(self._as_terminal, node.parts))
        return f"({said})" if said else NOTHING

    def _as_rule(self, node: Node) -> str:
        """A node with its reference-free parts as terminals; adjacent ones are joined."""
        if next(node.names(), None) is None:
            return self.terminals.setdefault(self._as_terminal(node), f"T{len(self.terminals)}")
        if node.kind == "rule":
            return self._names[node.text]
        if node.kind == "times":
            return f"({self._as_rule(node.parts[0])}){node.text}"
        if node.kind == "one":
            return f"({' | '.join(map(self._as_rule, node.parts))})"
        written: list[str] = []
        terminal_parts: list[Node] = []
        for part in (*node.parts, None):
            if part is not None and next(part.names(), None) is None:
                terminal_parts.append(part)
                continue
            if terminal_parts:
                written.append(self._as_rule(Node("all", parts=tuple(terminal_parts))))
            terminal_parts = []
            if part is not None:
                written.append(self._as_rule(part))
        return f"({' '.join(written)})"
