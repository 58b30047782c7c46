"""llguidance's messages about a grammar on one line: the position and what is wrong there, without the grammar, which it quotes whole."""

from __future__ import annotations

import re

# Line, column, what is wrong there, and lines of the source around it.
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*?)(?: \(at \"[^\n]*)?(?:\n +\d+ \| .*)?", re.DOTALL)
# The error about a regular expression: the pattern, with a mark below the place, and what is wrong there.
_PATTERN = re.compile(r'invalid regex ".*" \(in regex\): regex parse error:\n(?P<marked>.*)\nerror: (?P<what>[^\n]*)', re.DOTALL)
_MARGIN = 4  # of the marked pattern
AROUND = 24  # characters of a pattern shown on each side of the place


def located(message: str) -> str:
    """The message with its position as "line 2, column 4: ..."; unchanged if it has none."""
    match = _POSITION.fullmatch(message.rstrip())
    return message if match is None else f"line {match[1]}, column {match[2]}: {_pattern_error(match[3])}"


def without_position(message: str) -> str:
    """The message about a grammar that was made from something else, where a position says nothing."""
    return re.sub(r": line \d+, column \d+: ", ": ", message, count=1)


def _pattern_error(text: str) -> str:
    """What is wrong, with the place in the pattern for an error about a regular expression."""
    match = _PATTERN.search(text)
    if match is None:
        return text
    pattern, *marks = match["marked"].split("\n")
    if len(marks) != 1 or "^" not in marks[0]:  # several lines, which are numbered
        return f"{match['what']} (in a regular expression)"
    pattern, at = pattern[_MARGIN:], marks[0].index("^") - _MARGIN
    begin, end = max(0, at - AROUND), at + AROUND
    excerpt = f"{'…' * (begin > 0)}{pattern[begin:end]}{'…' * (end < len(pattern))}"
    return f"{match['what']}, at character {at + 1} of the regular expression {excerpt}"
