"""Grammar rules for calls whose arguments are written one by one (XML-like tags and similar); the syntax comes from the template's own
sample call.

The sample has two arguments, a string and a number. What it has before the first, between name and value, between the two and after the
last becomes the grammar. Arguments come in the schema's order, or alphabetically if the sample has them so; required ones must be present.

Between tags a string is bare text up to its end marker, the common prefix of the last two separators. Elsewhere it is quoted, as in Python
or Gemma. Other values are JSON, except for lists and objects in Gemma's syntax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from .call_style import ARGUMENTS
from .free_text import TEXT_ARGUMENT, escape_regex, grammar_until
from .gemma import QUOTE
from .schema import kinds_of

QUOTES = (QUOTE, "'", '"')
_TAG = re.compile(r".*[>\]|}]", re.DOTALL)  # a mark to its end


@dataclass(frozen=True)
class Lark:
    """Helpers for writing rules: `literal` renders a text in Lark, `token_in` names the special token in a text; `guidance` is added to
    schemas. The rule `letters` matches any text."""

    literal: Callable[[str], str]
    token_in: Callable[[str], str | None]
    guidance: Mapping[str, Any]


@dataclass(frozen=True)
class TagRules:
    """`lead` stands between the function's name and the first argument, `of_text` and `of_json` between argument name and value,
    `between` two arguments, `behind` the last, `without` after the name if there are no arguments. `end` ends a value (the common prefix
    of `between` and `behind`); `quote` surrounds strings. `in_order`: alphabetically."""

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
        """Lark rules, `name` being what follows the function's name. `root`: the schema that references in `parameters` resolve in;
        `grammar`: of a free-text tool."""
        if grammar and (text := self._free(grammar, lark)) is not None:
            begin, rest = self.lead + TEXT_ARGUMENT + self.of_text, self.behind.removeprefix(self.end)
            return [f"{name}: {lark.literal(begin)} {text} {lark.literal(rest)}"]
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

    def can_constrain_text(self, grammar: str, lark: Lark) -> bool:
        """Whether free text can be constrained to the grammar here. Raises UsageError for unsupported syntax."""
        return self._free(grammar, lark) is not None

    def _free(self, grammar: str, lark: Lark) -> str | None:
        """Free text by its grammar, with the end marker; None within quotes, where it would be escaped."""
        ending, mark = self.quote + self.end, lark.token_in(self.quote + self.end)
        if self.quote not in ("", QUOTE) or not ending or self.quote and not mark:
            return None
        end = ending[: ending.index(mark)] if mark else ending
        if (inner := grammar_until(grammar, end, mark is not None)) is None:
            return None
        return f"{lark.literal(self.quote)} %lark {{\n{inner}\n}} {lark.literal(ending[len(end) :])}".strip()

    def _add_value(self, lines: list[str], value: str, schema: Any, root: Mapping[str, Any], lark: Lark) -> bool:
        """Add the rule `value`; returns whether it is a string."""
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
            lines += [f"{value}: {literal(self.quote)} {value}_text", f"{value}_text[lazy]: /(?s:.*){escape_regex(ending)}/"]
        return True


NESTED = TagRules("{", ":", ":", ",", "}", "{}", quote=QUOTE, in_order=True)  # Gemma's objects within one another


def tag_rules(rest: str) -> TagRules | None:
    """The rules from a sample's text after the function's name; None if it has another syntax."""
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
