"""The text of an answer as its tokens make it: what is certain of it, told apart into answer, reasoning and calls of tools."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..events import Call, TextDelta
from ..sampling.token_chances import Trail
from ..tokens.stream_filters import Indented, StopStrings
from ..tokens.text_stream import TextStream

if TYPE_CHECKING:
    from ..engine import Step
    from .answering import Answer


class AnswerText:
    """What `answer` says, by its stop strings, its indentation and its `think`, into its `shown`, `thought` and `calls`. `has_line`: a line
    of it is whole. Of the last token, `is_thought`: what it completed is reasoning; `reasons`: so is the token. `think` in the end: as it
    stands behind the last token."""

    def __init__(self, answer: Answer, stream: TextStream) -> None:
        self.think, self._stream = answer.think, stream
        self.stops, self.indented = StopStrings(answer.stops, answer.said), Indented(answer.indent)
        self.has_line = self.is_thought = self.reasons = False
        self._trail = None if answer.sampler.tells is None else Trail()
        self._shown = answer.shown
        self._into = {"answer": answer.shown, "thinking": answer.thought, "call": answer.calls}

    def took(self, step: Step) -> Iterator[TextDelta | Call]:
        """What a token makes certain; the token that ends the text says nothing."""
        think, trail, ends = self.think, self._trail, step.finish == "stop"
        text, at_answer = "" if ends else self._stream.push(step.token), think is None or think.at_answer
        may_open = think is not None and think.may_open
        certain = self.indented.push(self.stops.push(text))
        parts = self._split(certain)
        self.is_thought = think is not None and not think.at_answer
        self.reasons = self.is_thought or not at_answer
        self.has_line = self.has_line or "\n" in text
        if trail and not ends:
            was_thought = self.is_thought or not (at_answer or may_open)
            trail.took(step.chances, text, None if may_open and think.may_open else "thinking" if was_thought else "answer")
        return self._events(parts, len(certain))

    def ended(self) -> Iterator[TextDelta | Call]:
        """What was held back of a text that ends here."""
        think, parts, certain = self.think, [], ""
        if not self.stops.hit:
            certain = self.indented.push(self.stops.push(self._stream.flush()) + self.stops.flush()) + self.indented.flush()
            parts = self._split(certain)
        self.think = copy.copy(think)
        for kind, part in think.flush() if think else ():
            self._into[kind].append(part)
            parts.append((kind, part))
        return self._events(parts, len(certain))

    def _split(self, text: str) -> list[tuple[str, str | Call]]:
        """Parts of a piece, noted. What was said before loses half a character that is whole now, and how a stop string began."""
        shown = self._shown
        shown[0] = shown[0].removesuffix(self._stream.taken_back)
        shown[0] = shown[0][: len(shown[0]) - self.stops.overlap]
        self._stream.taken_back, self.stops.overlap = "", 0
        parts = self.think.push(text) if self.think else [("answer", text)] if text else []
        for kind, part in parts:
            self._into[kind].append(part)
        return parts

    def _events(self, parts: list[tuple[str, str | Call]], letters: int) -> Iterator[TextDelta | Call]:
        return self._trail.events(parts, letters) if self._trail else map(_event, parts)


def _event(part: tuple[str, str | Call]) -> TextDelta | Call:
    kind, found = part
    return found if isinstance(found, Call) else TextDelta(found, kind)
