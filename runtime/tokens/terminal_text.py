"""Removes control characters and escape sequences from text for a terminal, whole or streaming."""

import re

_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC: titles, links, clipboard
    r"|\x9b[0-?]*[ -/]*[@-~]"  # CSI as one character
    r"|\x1b[ -/]*[0-~]"  # other escapes
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # the carriage return too: it would overwrite its line
    r"|[\u202a-\u202e\u2066-\u2069]"  # bidirectional overrides: text that reads otherwise than it is
)
_UNFINISHED = re.compile(r"(?:\x1b\[[0-?]*[ -/]*|\x9b[0-?]*[ -/]*|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*\x1b?|\x1b[ -/]*)\Z")
_SURROGATES = re.compile(r"[\ud800-\udfff]")
HELD_LIMIT = 256  # an escape sequence longer than this is not waited for: its first character is dropped and the rest shown


class TerminalFilter:
    """Removes control characters and escape sequences, also when one is split over several pieces. Keeps newline and tab."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        unfinished = _UNFINISHED.search(text, max(0, len(text) - HELD_LIMIT))
        cut = unfinished.start() if unfinished else len(text)
        self._held = text[cut:]
        return _clean(text[:cut])

    def flush(self) -> str:
        text, self._held = self._held, ""
        return _clean(text)


def _clean(text: str) -> str:
    return _SURROGATES.sub("\ufffd", _CONTROL.sub("", text))


def sanitize(text: str) -> str:
    """`text` without control characters and escape sequences; newline and tab stay."""
    return _clean(text)
