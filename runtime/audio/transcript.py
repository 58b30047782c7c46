"""Transcription of long audio: a prompt per chunk, and the transcript with timestamps and language from the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from ..events import Event, Progress
from ..images.modality import AUDIO_INPUT, SAMPLE_RATE
from .audio_tower import AudioTower
from .chunking import TIMED_S, AudioChunk, split_at_pauses
from .transcription import AnswerParser, transcription_messages

if TYPE_CHECKING:
    import numpy as np

    from ..generation.served_model import GenerationOptions, ServedModel

SHORTEST_S, WIDE = 10.0, ("F", "W")


@dataclass(frozen=True)
class Transcriber:
    """Transcribes with a model: `language` None for automatic detection; `hint`: words that may occur; `translate` into English. Raises
    UsageError for what the model cannot do."""

    replies: ServedModel
    language: str | None = None
    hint: str | None = None
    translate: bool = False

    def __post_init__(self) -> None:
        self.messages("")

    @property
    def hearing(self) -> AudioTower:
        return self.replies.require_audio().encoders[AUDIO_INPUT]

    def messages(self, mark: str) -> list[dict[str, str]]:
        """The chat about the clip of a marker."""
        return transcription_messages(self.hearing, self.replies.tokenizer.added, mark, self.language, self.hint, self.translate)

    @property
    def takes_words(self) -> bool:
        """Whether other messages may precede the audio: ASR-only models take none, or use them as hint."""
        return not self.hearing.heads_text and self.hearing.constrain_logits is None

    def pieces(self, samples: np.ndarray, timed: bool) -> list[AudioChunk]:
        """Chunks of audio float32 [n], each for one request: as long as the model takes, or shorter for timestamps."""
        most, context = self.hearing.most_seconds, self.replies.engine.n_ctx
        while most > SHORTEST_S and self.hearing.token_count(int(most * SAMPLE_RATE)) > context // 2:
            most /= 2
        return split_at_pauses(samples, min(most, TIMED_S) if timed else most)

    def answer(self, chunk: AudioChunk, options: GenerationOptions, before: Sequence[dict[str, Any]] = (),
               variables: dict[str, Any] | None = None,
               cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The answer about a chunk after the messages `before`. Its rows are released afterwards."""
        clip = (media := self.replies.require_audio()).add(chunk.samples)
        if self.replies.engine.batched_passes is None:  # of each of many pieces nobody wants to know how long it is
            yield from (each for each in media.encode([clip], cancelled) if isinstance(each, Progress))
        options = replace(options, think="off" if self.replies.tokenizer.thinks else options.think, constraint=None,
                          translate=self.translate,
                       may_shift=False)
        yield from self.replies.reply([*before, *self.messages(clip.marker)], options, None, variables, cancelled)

    def transcript(self, pieces: Sequence[AudioChunk]) -> Transcript:
        """An empty transcript for the answers about these chunks."""
        heads = "" if self.language else self.hearing.heads_text  # an answer whose beginning was given goes on behind it
        return Transcript(pieces, heads, self.language or "", self.hearing.language_of)


class Transcript:
    """The transcript of a clip, from one answer per chunk of `pieces`; `heads` as in `AnswerParser`. `language_of`: language by an answer's
    tokens, where its text does not state it."""

    def __init__(self, pieces: Sequence[AudioChunk], heads: str = "", language: str = "",
                 language_of: Callable[[Sequence[int]], str] = lambda tokens: "") -> None:
        self.text, self.language, self._pieces = "", language, pieces
        self._heads, self._language_of = heads, language_of
        self._texts: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._said, self._blanks = AnswerParser(self._heads), ""  # blanks that may be the last of a piece
        self._texts.append("")

    def add(self, text: str) -> str:
        """Add streamed text; returns what it adds to the transcript, stripped at both ends."""
        return self._told(self._said.add(text))

    def ended(self, tokens: Sequence[int]) -> str:
        """An answer with these tokens is complete; returns as `add`."""
        held = self._told(self._said.rest())
        self.language = self.language or self._said.language or self._language_of(tokens)
        self._begin()
        return held

    def _told(self, text: str) -> str:
        text = self._blanks + text if self._texts[-1] else text.lstrip()
        written = text.rstrip()
        self._blanks = text[len(written) :]
        if not written:
            return ""
        told = written if self._texts[-1] else separator(self.text) + written
        self._texts[-1] += written
        self.text += told
        return told

    @property
    def segments(self) -> list[tuple[float, float, str]]:
        """(begin_s, end_s, text) of chunks with text."""
        told = zip(self._pieces, self._texts, strict=False)
        return [(round(piece.begin_s, 2), round(piece.end_s, 2), text) for piece, text in told if text]

    def to_json(self, seconds: float) -> dict[str, object]:
        """As OpenAI's verbose_json."""
        segments = [{"id": number, "start": start, "end": end, "text": text} for number, (start, end, text) in enumerate(self.segments)]
        return {"language": self.language, "duration": seconds, "text": self.text, "segments": segments}


def separator(text: str) -> str:
    """What joins the text of two chunks: a space, but not at the start or after scripts written without spaces."""
    return " " if text and east_asian_width(text[-1]) not in WIDE else ""


def subtitles(segments: Iterable[tuple[float, float, str]], as_vtt: bool) -> str:
    """Subtitles in SRT or WebVTT format. Each text becomes one line, since blank lines end a cue."""
    found = [f"{number}\n{_clock(begin, as_vtt)} --> {_clock(end, as_vtt)}\n{' '.join(text.split())}\n" for number, (begin, end, text) in
             enumerate(segments, 1)]
    return "\n".join(["WEBVTT\n", *found] if as_vtt else found)


def _clock(second: float, as_vtt: bool) -> str:
    thousandths = round(second * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{'.' if as_vtt else ','}{rest % 1000:03}"
