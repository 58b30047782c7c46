"""Grammar rules for arguments that are written one by one, each behind its name; what is between them is read from a template's own call.

Of the sample is known what it says: two arguments, one a text, the other a number. What stands before the first, between name and value,
between the two and behind the last is what a grammar asks for. Arguments come in the order of the schema, or in that of the alphabet where
the sample has them so; those that are required all of them.

Between tags a text is bare: any text up to the mark that ends it, which is how the last two begin alike. Elsewhere it stands in quotes,
Python's or Gemma's. Values of other types are JSON, but for lists and objects of Gemma's own notation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from .call_style import ARGUMENTS
from .free_text import FREE, before, pattern
from .gemma import QUOTE
from .schema import kinds_of

QUOTES = (QUOTE, "'", '"')
_TAG = re.compile(r".*[>\]|}]", re.DOTALL)  # a mark to its end


@dataclass(frozen=True)
class Lark:
    """How rules are written: `literal` makes a text as Lark has it, `token_in` names the token within a text that no other text can have;
    `guidance` is what schemas say beside. There is a rule `letters`, which is any text."""

    literal: Callable[[str], str]
    token_in: Callable[[str], str | None]
    guidance: Mapping[str, Any]


@dataclass(frozen=True)
class TagRules:
    """`lead` stands between the name of the function and that of the first argument, `of_text` and `of_json` between the name of an
    argument and its value, `between` two arguments, `behind` the last, `without` behind the name where there are none. `end`: what a
    value ends with, with which `between` and `behind` begin; `quote`: what stands around texts. `in_order`: of the alphabet."""

    lead: str
    of_text: str
    of_json: str
    between: str
    behind: str
    without: str
    end: str = ""
    quote: str = ""
    in_order: bool = False

    def rules(self, name: str, parameters: Mapping[str, Any], lark: Lark, root: Mapping[str, Any] | None = None,
              grammar: str | None = None) -> list[str]:
        """Lines in Lark's notation, of which the rule `name` is what stands behind the function's name. `root`: the schema in which those
        that `parameters` refers to are; `grammar`: of the text that a tool of free text takes."""
        if grammar and (text := self._free(grammar, lark)) is not None:
            return [f"{name}: {lark.literal(self.lead + FREE + self.of_text)} {text} {lark.literal(self.behind.removeprefix(self.end))}"]
        properties, required = parameters.get("properties") or {}, {*(parameters.get("required") or ())}
        given = sorted(properties.items()) if self.in_order else properties.items()
        last, literal = len(properties), lark.literal
        lines = [f"{name}: {name}_first_0", f"{name}_first_{last}: {literal(self.without)}",
                 f"{name}_rest_{last}: {literal(self.behind.removeprefix(self.end))}"]
        for number, (key, schema) in enumerate(given):
            value = f"{name}_value_{number}"
            is_text = self._add_value(lines, value, schema, root or parameters, lark)
            told = key + (self.of_text if is_text else self.of_json)
            for kind, opening in (("first", self.lead), ("rest", self.between.removeprefix(self.end))):
                skipped = "" if key in required else f" | {name}_{kind}_{number + 1}"
                lines.append(f"{name}_{kind}_{number}: {literal(opening + told)} {value} {name}_rest_{number + 1}{skipped}")
        return lines

    def holds(self, grammar: str, lark: Lark) -> bool:
        """Whether a text is held to it here. Raises UsageError for what is not read."""
        return self._free(grammar, lark) is not None

    def _free(self, grammar: str, lark: Lark) -> str | None:
        """A text of a grammar of its own, with the mark that ends it; None in quotes of letters, which are written otherwise within."""
        ending, mark = self.quote + self.end, lark.token_in(self.quote + self.end)
        if self.quote not in ("", QUOTE) or not ending or self.quote and not mark:
            return None
        end = ending[: ending.index(mark)] if mark else ending
        if (inner := before(grammar, end, mark is not None)) is None:
            return None
        return f"{lark.literal(self.quote)} %lark {{\n{inner}\n}} {lark.literal(ending[len(end) :])}".strip()

    def _add_value(self, lines: list[str], value: str, schema: Any, root: Mapping[str, Any], lark: Lark) -> bool:
        """Add the rule `value`; whether it is text."""
        kinds, literal, stated = kinds_of(schema, root), lark.literal, schema if isinstance(schema, Mapping) else {}
        words, ending = stated.get("enum"), self.quote + self.end
        if words and all(isinstance(word, str) and not {*word} & {*self.quote, "\\"} for word in words):
            lines.append(f"{value}: ({' | '.join(literal(self.quote + word) for word in words)}) {literal(ending)}")
        elif self.quote == QUOTE and kinds == {"array"} and "items" in stated:
            lines.append(f'{value}: "[" ({value}_item ("," {value}_item)*)? "]"')
            self._add_value(lines, f"{value}_item", stated["items"], root, lark)
        elif self.quote == QUOTE and kinds == {"object"} and "properties" in stated:
            lines += NESTED.rules(value, stated, lark, root)
        elif kinds and "string" not in kinds:
            shared = {each: root[each] for each in ("$defs", "definitions") if each in root}
            lines += [f"{value}: {value}_json {literal(self.end)}",
                      f"{value}_json: %json {json.dumps({**stated, **shared, 'x-guidance': lark.guidance})}"]
            return False
        elif self.quote in ("'", '"'):
            lines.append(f"{value}: /{self.quote}([^{self.quote}\\\\\n]|\\\\.)*{self.quote}/")
        elif mark := lark.token_in(ending):
            lines.append(f"{value}: {literal(self.quote)} letters? {literal(ending[ending.index(mark) :])}")
        else:
            lines += [f"{value}: {literal(self.quote)} {value}_text", f"{value}_text[lazy]: /(?s:.*){pattern(ending)}/"]
        return True


NESTED = TagRules("{", ":", ":", ",", "}", "{}", quote=QUOTE, in_order=True)  # Gemma's objects within one another


def tag_rules(rest: str) -> TagRules | None:
    """The rules of a sample, given what it says behind the function's name; None where it is not of this kind."""
    (text, said), (number, count) = ARGUMENTS.items()
    quote = next((mark for mark in QUOTES if f"{mark}{said}{mark}" in rest), "")
    rest = rest.replace(f"{quote}{said}{quote}", said)
    if found := re.fullmatch(f"(?s)(.*?){text}(.*?){said}(.*){number}(.*?){count}(.*)", rest):
        lead, of_text, between, of_json, behind = found.groups()
    elif found := re.fullmatch(f"(?s)(.*?){number}(.*?){count}(.*){text}(.*?){said}(.*)", rest):
        lead, of_json, between, of_text, behind = found.groups()
    else:
        return None
    in_order = rest.index(number) < rest.index(text)
    if quote:
        return TagRules(lead, of_text, of_json, between, behind, lead + behind, "", quote, in_order)
    alike = commonprefix([between, behind])
    tag = _TAG.match(alike)
    end, key = tag.group() if tag else alike, between[len(alike) :]  # not into a mark that they begin alike
    if not end or not key or not lead.endswith((alike[len(end) :] + key).strip()):
        return None
    return TagRules(lead, of_text, of_json, between, behind, lead.removesuffix(key) + behind[len(alike) :], end, "", in_order)
