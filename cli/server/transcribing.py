"""Sounds written down, by a model that hears: OpenAI's paths for it, whose requests are forms with a file. They are read as a chat about
that sound; of times of words nothing is known, so nothing is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ... import UsageError
from ...runtime.events import Call, PromptRead, Stats, TextDelta
from ...runtime.images.senses import RATE, SOUNDS
from ...runtime.sounds.sound_file import MOST_SECONDS
from ...runtime.sounds.transcription import Said, conversation
from .fields import Asked, ChatAsked
from .form_data import form_of
from .problems import Problem, problem_of
from .shapes import Shape

if TYPE_CHECKING:
    from .application import Service

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
SPOKEN = (TRANSCRIPTIONS, "/audio/transcriptions", TRANSLATIONS, "/audio/translations")
JSON, TEXT, VERBOSE = "json", "text", "verbose_json"
FORMATS = (JSON, TEXT, VERBOSE)
FILE, NUMBERS = "file", ("temperature", "top_p", "min_p")
SWITCHES = {"true": True, "1": True, "false": False, "0": False}


class Heard(Asked):
    """A form's fields, those that are known, as values."""

    language: str | None = None
    prompt: str | None = None
    response_format: str = JSON  # which is no form of the answer here


class TranscriptShape(Shape):
    """`task`, `language` and `seconds` are told again of an answer in full; `heads` as of `Said`."""

    def __init__(self, task: str, language: str | None = None, seconds: float = 0.0, format: str = JSON, heads: str = "") -> None:
        self._task, self._language, self._seconds, self._format = task, language, seconds, format
        self._texts: list[str] = []
        self._said = Said(heads)

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        if not isinstance(event, TextDelta) or event.kind != "answer":
            return []
        return self._told(self._said.add(event.text))

    def _told(self, text: str) -> list[dict[str, object]]:
        text = text if self._texts else text.lstrip()  # what was written down begins with no blank
        if text:
            self._texts.append(text)
        return [{"type": "transcript.text.delta", "delta": text}] if text else []

    def last(self, stats: Stats) -> list[dict[str, object]]:
        held = self._told(self._said.rest())
        return [*held, {"type": "transcript.text.done", "text": self.text, "usage": usage(stats)}]

    def whole(self, stats: Stats) -> dict[str, object]:
        self._told(self._said.rest())
        if self._format == VERBOSE:
            language = self._language or self._said.language
            return {"task": self._task, "language": language, "duration": self._seconds, "text": self.text}
        return {"text": self.text, "usage": usage(stats)}

    @property
    def text(self) -> str:
        return "".join(self._texts).rstrip()


class Transcribing:
    """Of the model of a `service`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route(path, partial(self.heard, path in SPOKEN[2:]), methods=["POST"]) for path in SPOKEN]

    async def heard(self, translates: bool, request: Request) -> Response:
        form = await form_of(request)
        asked = fields_of(form)
        if asked.model:
            self._service.demand_model(asked.model, "model")
        if FILE not in form:
            raise Problem(400, f"{FILE} is missing: the sound is a file of the form", param=FILE)
        sound = await self._service.sound(form[FILE], FILE)
        seconds = prod(sound.size) / RATE
        if seconds > MOST_SECONDS:
            raise Problem(400, f"{FILE}: the sound is longer than {MOST_SECONDS // 60} minutes: cut it", param=FILE)
        replies = self._service.replies
        hearing, words = replies.demand_hearing().sights[SOUNDS], replies.tokenizer.added
        try:
            messages = conversation(hearing, words, sound.mark, asked.language, asked.prompt, translates)
        except UsageError as error:
            raise problem_of(error, "model" if translates else "language") from error
        wanted = await self._service.wanted(chat_of(asked), messages, pictures=(sound,))
        wanted = replace(wanted, wish=replace(wanted.wish, think="off" if replies.tokenizer.thinks else wanted.wish.think, form=None))
        heads = "" if asked.language else hearing.heads_text  # an answer whose beginning was given goes on behind it
        shape = TranscriptShape("translate" if translates else "transcribe", asked.language, seconds, asked.response_format, heads)
        answer = await self._service.answer(request, asked, shape, partial(self._service.reply, wanted))
        if asked.response_format == TEXT and not asked.stream:
            return PlainTextResponse(f"{shape.text}\n") if answer.status_code == 200 else answer
        return answer


def chat_of(asked: Heard) -> ChatAsked:
    """The request as one of chat completions: what is likeliest is written down, unless a temperature is said."""
    common = {name: getattr(asked, name) for name in Asked.model_fields}
    return ChatAsked.model_construct(**{**common, "messages": [], "response_format": None, "temperature": asked.temperature or 0.0})


def fields_of(form: Mapping[str, bytes]) -> Heard:
    """The fields of a form but the file. Raises Problem that names one."""
    values: dict[str, Any] = {}
    for name, content in form.items():
        if name != FILE:
            values[name] = _value(name, content.decode("utf-8", "replace").strip())
    if (format := values.get("response_format") or JSON) not in FORMATS:
        raise Problem(400, f"response_format is {', '.join(FORMATS)}, not {format!r:.40}: of times nothing is known here",
                      param="response_format", code="unsupported_parameter")
    known = {name: value for name, value in values.items() if name in Heard.model_fields and value is not None}
    return Heard.model_construct(**{**dict.fromkeys(Heard.model_fields), **known, "response_format": format})


def _value(name: str, text: str) -> object:
    """Raises Problem for one that is not what the field has."""
    if not text:
        return None
    if name in NUMBERS:
        try:
            return float(text)
        except ValueError:
            raise Problem(400, f"{name} is a number, not {text!r:.40}", param=name) from None
    if name == "stream":
        if text.lower() not in SWITCHES:
            raise Problem(400, f"stream is true or false, not {text!r:.40}", param=name)
        return SWITCHES[text.lower()]
    return text if name in ("model", "language", "prompt", "response_format") else None


def usage(stats: Stats) -> dict[str, object]:
    made = len(stats.token_ids)
    return {"type": "tokens", "input_tokens": stats.prompt_tokens, "output_tokens": made, "total_tokens": stats.prompt_tokens + made}
