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

MAX_NESTING = 1000  # of rules and parentheses: an 8 MB stack overflows at some 3,000
MAX_RULE_PARTS = 20_000  # two seconds, and the cost is quadratic. A terminal may have more
MAX_INTERSECTED = 16  # terminals that must match at once: 20 take 3 s, 22 take 12
MAX_REPEAT_STATES = 100_000  # of repeats within intersected terminals: half a second
REGEX = re.compile(r"\\[pPx]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[a-zA-Z-]*[:)]?|[()|*+?]|\{(\d*)(,?)(\d*)\}|.", re.DOTALL)
UNLIMITED = re.compile(r"[*+]|\{\d+,\}")


def rules_too_expensive(rules: Mapping[str, Rule]) -> tuple[str, str] | None:
    """(reason, hint) why a grammar is too expensive; None if it is not. Embedded schemas are judged separately."""
    starts = [name for name in (f"0:{START}", f"0:{IGNORED}") if name in rules]
    if any(_is_deep(rules, start) for start in starts):
        return (f"rules are nested more than {MAX_RULE_DEPTH} deep, or {MAX_NESTING} with parentheses",
                "make fewer rules refer to one another")
    parts = sum(token.kind != "mark" for name, rule in rules.items() if not _is_terminal(name) for token in rule.tokens)
    if parts > MAX_RULE_PARTS:
        return f"its rules have {parts} parts, more than the {MAX_RULE_PARTS} allowed", 'put word lists into a terminal, as WORD: "a" | "b"'
    order = _reachable(rules, starts)
    nodes = {name: rules[name].parts(rules) for name in order}
    if (name := find_endless_rule(nodes, order)) is not None:
        return f"the rule {name.partition(':')[2]} never ends: each of its alternatives recurses", ENDLESS_HINT
    return _intersections_too_expensive(nodes) if any(token.text in "&~" for rule in rules.values() for token in rule.tokens) else None


def _intersections_too_expensive(nodes: Mapping[str, Node]) -> tuple[str, str] | None:
    """`nodes`: each rule after those it refers to."""
    sizes: dict[tuple[str, bool], Size] = {}
    for name, node in nodes.items():
        sizes[name, True], sizes[name, False] = (_size(node, flipped, sizes) for flipped in (True, False))
        size = sizes[name, False]
        if size.at_once > MAX_INTERSECTED:
            return f"{size.at_once} terminals must match at once, more than the {MAX_INTERSECTED} allowed", "combine them into fewer"
        if size.ways > MAX_REPEAT_STATES:
            return (f"combined terminals repeat in {size.ways} ways, more than the {MAX_REPEAT_STATES} allowed",
                    "combine fewer or shorter ones with &")
    return None


def _is_terminal(name: str) -> bool:
    return name.partition(":")[2].lstrip("_")[:1].isupper()


def _is_deep(rules: Mapping[str, Rule], start: str) -> bool:
    """Each rule is visited once, in both orders, because llguidance's order is not known."""
    for step in (1, -1):
        seen: set[str] = set()
        pending = [(start, 1, 1)]
        while pending:
            name, depth, steps = pending.pop()
            if depth > MAX_RULE_DEPTH or steps > MAX_NESTING:
                return True
            if name not in seen:
                seen.add(name)
                pending += [(other, depth + 1, steps + more) for other, more in [*rules[name].references(rules)][::step]]
    return False


def _reachable(rules: Mapping[str, Rule], starts: list[str]) -> list[str]:
    """The reachable rules, each after those it refers to."""
    result: dict[str, None] = {}
    seen = set(starts)
    pending = [(name, iter([*rules[name].references(rules)])) for name in starts]
    while pending:
        name, references = pending[-1]
        next_rule = next((each for each, _ in references if each not in seen), None)
        if next_rule is None:
            result[name] = None
            pending.pop()
        else:
            seen.add(next_rule)
            pending.append((next_rule, iter([*rules[next_rule].references(rules)])))
    return [*result]


@dataclass(frozen=True)
class Size:
    """The size of a terminal's automaton."""

    at_once: int = 1  # terminals that are intersected
    ways: int = 1  # product of their repeat lengths
    round: int = 1  # length of the longest repeated part
    characters: int = 1  # without repeats


def _size(node: Node, complement: bool, sizes: Mapping[tuple[str, bool], Size]) -> Size:
    """The size of a syntax tree, or of its complement."""
    if node.kind == "rule":
        return sizes.get((node.text, complement), Size())  # not known yet if the rule is recursive, and then it is no terminal
    if node.kind == "text":
        return _size_of_regex(node.text[1 : node.text.rfind("/")]) if node.text.startswith("/") else Size(characters=len(node.text))
    parts = [_size(part, complement != (node.kind == "not"), sizes) for part in node.parts] or [Size()]
    at_once, ways, rounds, characters = (
        [getattr(each, name) for each in parts] for name in ("at_once", "ways", "round", "characters"))
    if node.kind == ("one" if complement else "and"):
        whole = math.prod(rounds)
        return Size(sum(at_once), max(*ways, whole), whole, max(characters))
    length, longest = (max if node.kind == "one" else sum)(characters), max(rounds)
    if node.kind == "times":
        longest = max(longest, length) if UNLIMITED.fullmatch(node.text) else longest
        length *= max(1, *map(int, re.findall(r"\d+", node.text)), 1)
    return Size(max(at_once), max(ways), longest, length)


def _size_of_regex(text: str) -> Size:
    groups = [(0, 0)]  # per open group: characters of the current alternative, and of the longest one before it
    longest, last = 1, 0
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
