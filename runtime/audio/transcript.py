"""Transcription of long audio: one prompt per chunk, and a transcript with timestamps and language from the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from ..events import Event, Progress
from ..images.modality import AUDIO_INPUT, SAMPLE_RATE
from .audio_tower import AudioTower
from .chunking import MAX_TIMED_CHUNK_S, AudioChunk, split_at_pauses
from .transcription import AnswerParser, transcription_messages

if TYPE_CHECKING:
    import numpy as np

    from ..generation.served_model import GenerationOptions, ServedModel

MIN_CHUNK_S = 10.0  # chunks are not halved below this, even if one takes more than half the context
WIDE = ("F", "W")  # East Asian width classes of scripts that are written without spaces


@dataclass(frozen=True)
class Transcriber:
    """Transcribes with a model. Raises UsageError if the model cannot do what is asked."""

    served: ServedModel
    language: str | None = None  # code or name, None to detect it
    hint: str | None = None  # words that may occur
    translate: bool = False  # into English

    def __post_init__(self) -> None:
        self.messages("")

    @property
    def tower(self) -> AudioTower:
        return self.served.require_audio().encoders[AUDIO_INPUT]

    def messages(self, marker: str) -> list[dict[str, str]]:
        """The messages that request a transcript of the clip with this marker."""
        return transcription_messages(self.tower, self.served.tokenizer.added, marker, self.language, self.hint, self.translate)

    @property
    def accepts_messages(self) -> bool:
        """Whether other messages may precede the audio: ASR-only models take none, or use them as a hint."""
        return not self.tower.transcript_start_token and self.tower.constrain_logits is None

    def chunks(self, samples: np.ndarray, timed: bool) -> list[AudioChunk]:
        """Split samples float32 [n] into chunks of one request each: as long as the model takes, or shorter if `timed`."""
        max_seconds, context = self.tower.max_seconds, self.served.engine.n_ctx
        while max_seconds > MIN_CHUNK_S and self.tower.token_count(int(max_seconds * SAMPLE_RATE)) > context // 2:
            max_seconds /= 2
        return split_at_pauses(samples, min(max_seconds, MAX_TIMED_CHUNK_S) if timed else max_seconds)

    def answer(self, chunk: AudioChunk, options: GenerationOptions, before: Sequence[dict[str, Any]] = (),
               variables: dict[str, Any] | None = None, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The answer for a chunk, after the messages `before`. The chunk's embedding rows are released afterwards."""
        clip = (media := self.served.require_audio()).add(chunk.samples)
        if self.served.engine.batched_passes is None:  # without notices of how long each chunk took
            yield from (event for event in media.encode([clip], cancelled) if isinstance(event, Progress))
        options = replace(options, think="off" if self.served.tokenizer.thinks else options.think, constraint=None,
                          translate=self.translate, may_shift=False)
        yield from self.served.reply([*before, *self.messages(clip.marker)], options, None, variables, cancelled)

    def transcript(self, chunks: Sequence[AudioChunk]) -> Transcript:
        """An empty transcript, to be filled by the answers for these chunks."""
        # With a language the prompt already contains the preamble and its end.
        start_token = "" if self.language else self.tower.transcript_start_token
        return Transcript(chunks, start_token, self.language or "", self.tower.stated_language)


class Transcript:
    """The transcript of a clip, from one answer per chunk.

    chunks: in the order of their answers
    start_token: as in `AnswerParser`
    language: if known beforehand, else empty
    stated_language: the language by an answer's tokens, for models whose text does not state it
    """

    def __init__(self, chunks: Sequence[AudioChunk], start_token: str = "", language: str = "",
                 stated_language: Callable[[Sequence[int]], str] = lambda tokens: "") -> None:
        self.text, self.language, self._chunks = "", language, chunks
        self._start_token, self._stated_language = start_token, stated_language
        self._texts: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._parser, self._trailing_space = AnswerParser(self._start_token), ""  # dropped if a chunk ends with it
        self._texts.append("")

    def add(self, text: str) -> str:
        """Add streamed text; returns what it adds to the transcript, stripped at both ends."""
        return self._append(self._parser.add(text))

    def finish_answer(self, tokens: Sequence[int]) -> str:
        """Complete an answer, which has these tokens; returns what that adds to the transcript."""
        added = self._append(self._parser.rest())
        self.language = self.language or self._parser.language or self._stated_language(tokens)
        self._begin()
        return added

    def _append(self, text: str) -> str:
        text = self._trailing_space + text if self._texts[-1] else text.lstrip()
        visible = text.rstrip()
        self._trailing_space = text[len(visible) :]
        if not visible:
            return ""
        added = visible if self._texts[-1] else separator(self.text) + visible
        self._texts[-1] += visible
        self.text += added
        return added

    @property
    def segments(self) -> list[tuple[float, float, str]]:
        """(begin_s, end_s, text) of chunks with text."""
        texts = zip(self._chunks, self._texts, strict=False)
        return [(round(chunk.begin_s, 2), round(chunk.end_s, 2), text) for chunk, text in texts if text]

    def to_json(self, seconds: float) -> dict[str, object]:
        """As OpenAI's verbose_json."""
        segments = [{"id": number, "start": start, "end": end, "text": text} for number, (start, end, text) in enumerate(self.segments)]
        return {"language": self.language, "duration": seconds, "text": self.text, "segments": segments}


def separator(text: str) -> str:
    """What to put between `text` and the next chunk's: a space, but not at the start or after scripts written without spaces."""
    return " " if text and east_asian_width(text[-1]) not in WIDE else ""


def subtitles(segments: Iterable[tuple[float, float, str]], as_vtt: bool) -> str:
    """Subtitles in SRT or WebVTT format. Each text becomes one line, since blank lines end a cue."""
    cues = [f"{number}\n{_clock(begin, as_vtt)} --> {_clock(end, as_vtt)}\n{' '.join(text.split())}\n" for number, (begin, end, text) in
             enumerate(segments, 1)]
    return "\n".join(["WEBVTT\n", *cues] if as_vtt else cues)


def _clock(seconds: float, as_vtt: bool) -> str:
    thousandths = round(seconds * 1000)
    minutes, remainder = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{remainder // 1000:02}{'.' if as_vtt else ','}{remainder % 1000:03}"
