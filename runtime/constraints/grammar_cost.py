"""Whether a Lark grammar is too expensive to prepare, where llguidance has no limit of its own, or matches no finite text: judged from its
text before a minute, a gigabyte or the stack is spent.

Nesting: llguidance recurses into references and parentheses on the program's stack, and an overflow kills the process. Parts: cost is
quadratic in the parts of a rule. Intersections (`&`, or `~` of alternatives): each doubles the time, and repeats within them, such as
`(a{97})*`, multiply their states.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .gbnf import ENDLESS_HINT, MAX_RULE_DEPTH, Node, find_endless_rule
from .lark_notation import IGNORED, START, Rule

MOST_STEPS = 1000  # rules and parentheses in one another: the 8 MB of a stack end at some 3,000
MOST_PARTS = 20_000  # of rules: two seconds, and four times that for twice as many. A terminal may have more
MOST_AT_ONCE = 16  # terminals: 20 take 3 s, 22 take 12
MOST_WAYS = 100_000  # half a second
REGEX = re.compile(r"\\[pPx]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[a-zA-Z-]*[:)]?|[()|*+?]|\{(\d*)(,?)(\d*)\}|.", re.DOTALL)
UNLIMITED = re.compile(r"[*+]|\{\d+,\}")


def too_much_of_rules(rules: Mapping[str, Rule]) -> tuple[str, str] | None:
    """(what is too expensive, hint), None if nothing is. Embedded schemas are judged separately."""
    starts = [name for name in (f"0:{START}", f"0:{IGNORED}") if name in rules]
    if any(_is_deep(rules, start) for start in starts):
        return (f"rules are nested more than {MAX_RULE_DEPTH} deep, or {MOST_STEPS} with parentheses",
                "make fewer rules refer to one another")
    parts = sum(token.kind != "mark" for name, rule in rules.items() if not _is_terminal(name) for token in rule.tokens)
    if parts > MOST_PARTS:
        return f"its rules have {parts} parts, more than the {MOST_PARTS} allowed", 'put word lists into a terminal, as WORD: "a" | "b"'
    order = _reached(rules, starts)
    nodes = {name: rules[name].parts(rules) for name in order}
    if (name := find_endless_rule(nodes, order)) is not None:
        return f"the rule {name.partition(':')[2]} never ends: each of its alternatives recurses", ENDLESS_HINT
    return _too_much_at_once(nodes) if any(token.text in "&~" for rule in rules.values() for token in rule.tokens) else None


def _too_much_at_once(nodes: Mapping[str, Node]) -> tuple[str, str] | None:
    """`nodes`: each rule after those it refers to."""
    known: dict[tuple[str, bool], Size] = {}
    for name, node in nodes.items():
        known[name, True], known[name, False] = (_size(node, flipped, known) for flipped in (True, False))
        size = known[name, False]
        if size.at_once > MOST_AT_ONCE:
            return f"{size.at_once} terminals must match at once, more than the {MOST_AT_ONCE} allowed", "combine them into fewer"
        if size.ways > MOST_WAYS:
            return (f"combined terminals repeat in {size.ways} ways, more than the {MOST_WAYS} allowed",
                    "combine fewer or shorter ones with &")
    return None


def _is_terminal(name: str) -> bool:
    return name.partition(":")[2].lstrip("_")[:1].isupper()


def _is_deep(rules: Mapping[str, Rule], start: str) -> bool:
    """Each rule is visited once, in both orders, because llguidance's order is not known."""
    for step in (1, -1):
        met: set[str] = set()
        left = [(start, 1, 1)]
        while left:
            name, depth, steps = left.pop()
            if depth > MAX_RULE_DEPTH or steps > MOST_STEPS:
                return True
            if name not in met:
                met.add(name)
                left += [(other, depth + 1, steps + more) for other, more in [*rules[name].deeper(rules)][::step]]
    return False


def _reached(rules: Mapping[str, Rule], starts: list[str]) -> list[str]:
    """The reachable rules, each after those it refers to."""
    found: dict[str, None] = {}
    met = set(starts)
    left = [(name, iter([*rules[name].deeper(rules)])) for name in starts]
    while left:
        name, inner = left[-1]
        other = next((each for each, _ in inner if each not in met), None)
        if other is None:
            found[name] = None
            left.pop()
        else:
            met.add(other)
            left.append((other, iter([*rules[other].deeper(rules)])))
    return [*found]


@dataclass(frozen=True)
class Size:
    """How many terminals are intersected, the product of their repeat lengths, the repeat length of a single one, and the number of
    characters without repeat."""

    at_once: int = 1
    ways: int = 1
    round: int = 1
    characters: int = 1


def _size(node: Node, flipped: bool, known: Mapping[tuple[str, bool], Size]) -> Size:
    """`flipped`: for the complement."""
    if node.kind == "rule":
        return known.get((node.text, flipped), Size())  # none yet: it recurs, and is no terminal
    if node.kind == "text":
        return _size_of_regex(node.text[1 : node.text.rfind("/")]) if node.text.startswith("/") else Size(characters=len(node.text))
    inner = [_size(part, flipped != (node.kind == "not"), known) for part in node.parts] or [Size()]
    at_once, ways, rounds, characters = (
        [getattr(each, name) for each in inner] for name in ("at_once", "ways", "round", "characters"))
    if node.kind == ("one" if flipped else "and"):
        whole = math.prod(rounds)
        return Size(sum(at_once), max(*ways, whole), whole, max(characters))
    length, longest = (max if node.kind == "one" else sum)(characters), max(rounds)
    if node.kind == "times":
        longest = max(longest, length) if UNLIMITED.fullmatch(node.text) else longest
        length *= max(1, *map(int, re.findall(r"\d+", node.text)), 1)
    return Size(max(at_once), max(ways), longest, length)


def _size_of_regex(text: str) -> Size:
    longest, groups, last = 1, [(0, 0)], 0  # of each group that is open the characters of its alternative, and of the longest before
    for found in REGEX.finditer(text):
        token, (length, before) = found[0], groups[-1]
        if token.startswith("("):
            groups.append((0, 0))
            last = 0
        elif token == "|":
            groups[-1] = 0, max(length, before)
        elif token == ")" and len(groups) > 1:
            groups.pop()
            last = max(length, before)
            groups[-1] = groups[-1][0] + last, groups[-1][1]
        elif token in "*+" or found[2] == "," and not found[3]:
            longest = max(longest, last * int(found[1] or 1))
        elif found[2] is not None:
            times = int(found[3] or found[1] or 1)
            groups[-1] = length + last * (times - 1), before
            last *= times
        elif token not in "?)":
            last = 1
            groups[-1] = length + 1, before
    return Size(round=longest, characters=max(1, *groups[0]))
