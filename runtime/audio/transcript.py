"""What is written down of a sound, piece after piece: asked of a model, and what of its answers was said, when and in which language."""

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
    """How a model is asked to write down what it hears: in a `language`, None for the one that it hears; `hint`: words that may be in it;
    or a translation into English. Raises UsageError for what the model cannot."""

    replies: ServedModel
    language: str | None = None
    hint: str | None = None
    translates: bool = False

    def __post_init__(self) -> None:
        self.messages("")

    @property
    def hearing(self) -> AudioTower:
        return self.replies.demand_hearing().encoders[AUDIO_INPUT]

    def messages(self, mark: str) -> list[dict[str, str]]:
        """A chat about the sound of a mark."""
        return transcription_messages(self.hearing, self.replies.tokenizer.added, mark, self.language, self.hint, self.translates)

    @property
    def takes_words(self) -> bool:
        """Whether other messages may stand before the sound: a model that does nothing else takes none, or takes them for its hint."""
        return not self.hearing.heads_text and self.hearing.constrain_logits is None

    def pieces(self, samples: np.ndarray, timed: bool) -> list[AudioChunk]:
        """Of a sound float32 [n], each to be written down at once: as long as the model takes, or shorter where times are to be told."""
        most, context = self.hearing.most_seconds, self.replies.engine.n_ctx
        while most > SHORTEST_S and self.hearing.token_count(int(most * SAMPLE_RATE)) > context // 2:
            most /= 2
        return split_at_pauses(samples, min(most, TIMED_S) if timed else most)

    def answer(self, piece: AudioChunk, wish: GenerationOptions, before: Sequence[dict[str, Any]] = (),
               variables: dict[str, Any] | None = None,
               cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The answer about a piece, whose rows are not held longer, behind messages that stand `before` it."""
        sound = (media := self.replies.demand_hearing()).add(piece.samples)
        if self.replies.engine.shares is None:  # of each of many pieces nobody wants to know how long it is
            yield from (each for each in media.encode([sound], cancelled) if isinstance(each, Progress))
        wish = replace(wish, think="off" if self.replies.tokenizer.thinks else wish.think, form=None, translates=self.translates,
                       shifts=False)
        yield from self.replies.reply([*before, *self.messages(sound.mark)], wish, None, variables, cancelled)

    def transcript(self, pieces: Sequence[AudioChunk]) -> Transcript:
        """For the answers about these."""
        heads = "" if self.language else self.hearing.heads_text  # an answer whose beginning was given goes on behind it
        return Transcript(pieces, heads, self.language or "", self.hearing.language_of)


class Transcript:
    """Of the `pieces` of a sound, for each of which comes an answer; `heads` as of `Said`. `language_of` says in which language an answer
    is, by its tokens, where its text does not."""

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
        """More of an answer, and what that adds to the whole, which neither begins nor ends with a blank."""
        return self._told(self._said.add(text))

    def ended(self, tokens: Sequence[int]) -> str:
        """An answer of these tokens is over; as `add`."""
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
        """Of pieces in which something is said: when what is heard there begins and ends, in seconds, and that."""
        told = zip(self._pieces, self._texts, strict=False)
        return [(round(piece.begin_s, 2), round(piece.end_s, 2), text) for piece, text in told if text]

    def to_json(self, seconds: float) -> dict[str, object]:
        """As OpenAI tells one in full."""
        segments = [{"id": number, "start": start, "end": end, "text": text} for number, (start, end, text) in enumerate(self.segments)]
        return {"language": self.language, "duration": seconds, "text": self.text, "segments": segments}


def separator(text: str) -> str:
    """What stands between what was said in pieces of a sound: a blank, but at the beginning and behind what is written without blanks."""
    return " " if text and east_asian_width(text[-1]) not in WIDE else ""


def subtitles(segments: Iterable[tuple[float, float, str]], as_vtt: bool) -> str:
    """Subtitles of what is said from one second to another: as SubRip's files, or as WebVTT. A text is a line: blank
    ones end it."""
    found = [f"{number}\n{_clock(begin, as_vtt)} --> {_clock(end, as_vtt)}\n{' '.join(text.split())}\n" for number, (begin, end, text) in
             enumerate(segments, 1)]
    return "\n".join(["WEBVTT\n", *found] if as_vtt else found)


def _clock(second: float, as_vtt: bool) -> str:
    thousandths = round(second * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{'.' if as_vtt else ','}{rest % 1000:03}"
