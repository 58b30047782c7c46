"""OpenAI's audio transcription and translation endpoints, for models that take audio. Requests are forms with a file; each becomes chats
about chunks of the audio, one after the other. Timestamps are those of chunks; there are none of words."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ... import UsageError
from ...runtime.audio.transcript import Transcriber, Transcript, subtitles
from ...runtime.events import Call, PromptRead, Stats, TextDelta
from ...runtime.images.modality import SAMPLE_RATE
from .form_data import form_of
from .media import MAX_WAITING_NBYTES
from .multiple_answers import AnswerEnded, in_sequence, total_stats
from .openai_requests import ChatRequest, GenerationRequest
from .problems import BUSY, RETRY, Problem, problem_of
from .serializers import AnswerSerializer

if TYPE_CHECKING:
    import numpy as np

    from .application import GenerationService

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
AUDIO_PATHS = (TRANSCRIPTIONS, "/audio/transcriptions", TRANSLATIONS, "/audio/translations")
JSON, TEXT, VERBOSE, SRT, VTT = FORMATS = "json", "text", "verbose_json", "srt", "vtt"
PLAIN = {TEXT: "text/plain", SRT: "application/x-subrip", VTT: "text/vtt"}  # formats other than JSON, with their media types
TIMED = (VERBOSE, SRT, VTT)  # formats with timestamps
FILE, NUMBERS, GRANULARITIES = "file", ("temperature", "top_p", "min_p"), "timestamp_granularities[]"
SWITCHES = {"true": True, "1": True, "false": False, "0": False}


class TranscriptionRequest(GenerationRequest):
    """The known fields of a form, as values."""

    language: str | None = None
    prompt: str | None = None
    response_format: str = JSON  # one of FORMATS; unlike a chat's, no schema


class TranscriptSerializer(AnswerSerializer):
    """Serializes the answers about the chunks of an audio file, collected in `transcript`. `task` and `seconds` are repeated in verbose
    responses."""

    def __init__(self, task: str, transcript: Transcript | None = None, seconds: float = 0.0, format: str = JSON) -> None:
        self._task, self._transcript, self._seconds, self._format = task, transcript or Transcript(()), seconds, format
        self._ended_stats: list[Stats] = []

    def add(self, event: PromptRead | TextDelta | Call | AnswerEnded) -> list[dict[str, object]]:
        if isinstance(event, AnswerEnded):
            return self._ended(event.stats)
        return _chunk(self._transcript.add(event.text)) if isinstance(event, TextDelta) and event.kind == "answer" else []

    def _ended(self, stats: Stats) -> list[dict[str, object]]:
        self._ended_stats.append(stats)
        return _chunk(self._transcript.finish_answer(stats.token_ids))

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        events = self._ended(stats)
        return [*events, {"type": "transcript.text.done", "text": self._transcript.text, "usage": usage(total_stats(self._ended_stats))}]

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        self._ended(stats)
        if self._format == VERBOSE:
            return {"task": self._task, **self._transcript.to_json(self._seconds)}
        return {"text": self._transcript.text, "usage": usage(total_stats(self._ended_stats))}

    @property
    def plain_text(self) -> str:
        """The answer in a format other than JSON."""
        return f"{self._transcript.text}\n" if self._format == TEXT else subtitles(self._transcript.segments, self._format == VTT)


def _chunk(text: str) -> list[dict[str, object]]:
    return [{"type": "transcript.text.delta", "delta": text}] if text else []


class TranscriptionPaths:
    """The endpoints of one model's `service`."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._waiting_samples: list[ref[np.ndarray]] = []  # samples of audio files, of which chunks are views

    def _waiting_nbytes(self) -> int:
        """Bytes of audio that is not transcribed yet."""
        self._waiting_samples = [each for each in self._waiting_samples if each() is not None]
        return sum(samples.nbytes for each in self._waiting_samples if (samples := each()) is not None)

    def routes(self) -> list[Route]:
        return [Route(path, partial(self.transcribe, path in AUDIO_PATHS[2:]), methods=["POST"]) for path in AUDIO_PATHS]

    async def transcribe(self, translates: bool, request: Request) -> Response:
        form = await form_of(request)
        payload = fields_of(form)
        if payload.model:
            self._service.check_model(payload.model, "model")
        if FILE not in form:
            raise Problem(400, f"{FILE} is missing: send the audio as a file in the form data", param=FILE)
        if self._waiting_nbytes() > MAX_WAITING_NBYTES:
            raise Problem(503, "too many long transcriptions are waiting", BUSY, code="queue_full", headers={"retry-after": "1"},
                          hint=RETRY)
        samples = await self._service.samples(form.pop(FILE), FILE)
        self._waiting_samples.append(ref(samples))
        seconds = len(samples) / SAMPLE_RATE
        try:
            transcriber = Transcriber(self._service.served, payload.language, payload.prompt, translates)
        except UsageError as error:
            raise problem_of(error, "model" if translates else "language") from error
        prepared = await self._service.prepare(chat_of(payload), [])
        history = prepared.messages if transcriber.accepts_messages else ()
        parts = await asyncio.to_thread(transcriber.chunks, samples, payload.response_format in TIMED)
        serializer = TranscriptSerializer("translate" if translates else "transcribe", transcriber.transcript(parts), seconds,
                                          payload.response_format)
        starts = [partial(transcriber.answer, piece, prepared.options, history, prepared.variables) for piece in parts]
        answer = await self._service.answer(request, payload, serializer, in_sequence(starts))
        if payload.response_format in PLAIN and not payload.stream and answer.status_code == 200:
            return PlainTextResponse(serializer.plain_text, media_type=PLAIN[payload.response_format])
        return answer


def chat_of(payload: TranscriptionRequest) -> ChatRequest:
    """The request as one of chat completions, with temperature 0 by default."""
    common = {name: getattr(payload, name) for name in GenerationRequest.model_fields}
    return ChatRequest.model_construct(**{**common, "messages": [], "response_format": None, "temperature": payload.temperature or 0.0})


def fields_of(form: Mapping[str, bytes]) -> TranscriptionRequest:
    """The fields of a form, without the file. Raises Problem that names one."""
    values: dict[str, Any] = {}
    for name, content in form.items():
        if name != FILE:
            values[name] = _value(name, content.decode("utf-8", "replace").strip())
    if (format := values.get("response_format") or JSON) not in FORMATS:
        raise Problem(400, f"response_format has to be {', '.join(FORMATS)}, not {format!r:.40}", param="response_format",
                      code="unsupported_parameter")
    if values.get("stream") and format in TIMED:
        raise Problem(400, f"response_format {format} does not support streaming: leave out stream", param="stream",
                      code="unsupported_parameter")
    if b"word" in map(bytes.strip, form.get(GRANULARITIES, b"").split(b",")):
        raise Problem(400, f"{GRANULARITIES} has to be segment: word timestamps are not supported", param=GRANULARITIES,
                      code="unsupported_parameter")
    known = {name: value for name, value in values.items() if name in TranscriptionRequest.model_fields and value is not None}
    return TranscriptionRequest.model_construct(**{**dict.fromkeys(TranscriptionRequest.model_fields), **known, "response_format": format})


def _value(name: str, text: str) -> object:
    """Raises Problem for an invalid value."""
    if not text:
        return None
    if name in NUMBERS:
        try:
            return float(text)
        except ValueError:
            raise Problem(400, f"{name} has to be a number, not {text!r:.40}", param=name) from None
    if name == "stream":
        if text.lower() not in SWITCHES:
            raise Problem(400, f"stream has to be true or false, not {text!r:.40}", param=name)
        return SWITCHES[text.lower()]
    return text if name in ("model", "language", "prompt", "response_format") else None


def usage(stats: Stats) -> dict[str, object]:
    num_tokens = len(stats.token_ids)
    return {"type": "tokens", "input_tokens": stats.prompt_tokens, "output_tokens": num_tokens,
            "total_tokens": stats.prompt_tokens + num_tokens}
