"""Rules for arguments that stand between tags, each with its value as text: what the tags are is told by a call that a template wrote.

Of the sample is known what it says: two arguments, the first a text, the other a number. What stands before the first, between name and
value, between the two and behind the last is what a grammar asks for; where the last two begin alike, a value ends. Arguments come in the
order of the schema, those that are required all of them. A text is any text up to the mark that ends it; a value of another type is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from .schema import kinds_of
from .style import ARGUMENTS

SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/]")  # letters that mean something in a pattern
_TAG = re.compile(r".*[>\]|}]", re.DOTALL)  # a mark to its end
Literal = Callable[[str], str]


@dataclass(frozen=True)
class TagRules:
    """`lead` stands between the name of the function and that of the first argument, `of_text` and `of_json` between the name of an
    argument and its value, `between` two arguments, `behind` the last, `without` behind the name where there are none. `end`: what
    `between` and `behind` begin with."""

    lead: str
    of_text: str
    of_json: str
    between: str
    behind: str
    without: str
    end: str

    def rules(self, name: str, parameters: Mapping[str, Any], literal: Literal, mark: str | None, guidance: Mapping[str, Any]) -> list[str]:
        """Lines in Lark's notation, of which the rule `name` is what stands behind the function's name. `literal` writes a text as Lark has
        it; `mark`: the token within what a value ends with, which no text can have. The rule `letters` is any text."""
        properties, required = parameters.get("properties") or {}, {*(parameters.get("required") or ())}
        last = len(properties)
        lines = [f"{name}: {name}_first_0", f"{name}_first_{last}: {literal(self.without)}",
                 f"{name}_rest_{last}: {literal(self.behind.removeprefix(self.end))}"]
        for number, (key, schema) in enumerate(properties.items()):
            value, told = f"{name}_value_{number}", self.of_text
            kinds, words = kinds_of(schema, parameters), schema.get("enum") if isinstance(schema, Mapping) else None
            if words and all(isinstance(word, str) for word in words):
                lines.append(f"{value}: ({' | '.join(map(literal, words))}) {literal(self.end)}")
            elif kinds and "string" not in kinds:
                shared = {each: parameters[each] for each in ("$defs", "definitions") if each in parameters}
                told = self.of_json
                lines += [f"{value}: {value}_json {literal(self.end)}",
                          f"{value}_json: %json {json.dumps({**schema, **shared, 'x-guidance': guidance})}"]
            elif mark:
                lines.append(f"{value}: letters? {literal(self.end[self.end.index(mark) :])}")
            else:
                lines.append(f"{value}[lazy]: /(?s:.*){pattern(self.end)}/")
            for kind, opening in (("first", self.lead), ("rest", self.between.removeprefix(self.end))):
                skipped = "" if key in required else f" | {name}_{kind}_{number + 1}"
                lines.append(f"{name}_{kind}_{number}: {literal(opening + key + told)} {value} {name}_rest_{number + 1}{skipped}")
        return lines


def tag_rules(rest: str) -> TagRules | None:
    """The rules of a sample, given what it says behind the function's name; None where it is not of this kind."""
    (text, said), (number, count) = ARGUMENTS.items()
    found = re.fullmatch(f"(?s)(.*?){text}(.*?){said}(.*){number}(.*?){count}(.*)", rest)
    if not found:
        return None
    lead, of_text, between, of_json, behind = found.groups()
    end = commonprefix([between, behind])
    tag = _TAG.match(end)
    end = tag.group() if tag else end  # not into a mark that they begin alike
    key = between[len(commonprefix([between, behind])) :]
    if not end or not key or not lead.endswith(key):
        return None
    begun = commonprefix([between, behind])[len(end) :] + key  # what begins an argument
    without = lead.removesuffix(key) + behind[len(commonprefix([between, behind])) :]
    return TagRules(lead, of_text, of_json, between, behind, without, end) if lead.endswith(begun.strip()) else None


def pattern(text: str) -> str:
    """A text as a pattern has it."""
    return SPECIAL.sub(r"\\\g<0>", text).replace("\n", "\\n")
