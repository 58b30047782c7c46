"""Images, videos and audio in requests of each API. Their bytes come with the request, whose messages get markers instead."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from ... import EffllmError
from ...runtime.audio.audio_file import MAX_SECONDS
from ...runtime.images.image_file import MOST_POINTS
from ...runtime.images.modality import AUDIO_INPUT, IMAGE_INPUT, SAMPLE_RATE, Modality
from .content_parts import of_chat, of_messages, of_responses
from .gemini_requests import attached_files
from .message_builder import TOOL
from .problems import BUSY, RETRY, Problem, problem_of

if TYPE_CHECKING:
    import numpy as np

    from ...runtime.generation.served_model import ServedModel
    from ...runtime.images.media import MediaItem
    from .gemini_requests import GenerateContentRequest
    from .messages_requests import CountTokensRequest
    from .ollama_requests import OllamaChatRequest, OllamaGenerateRequest
    from .openai_requests import ChatRequest
    from .responses_requests import ResponsesRequest

Result = TypeVar("Result")
WHITESPACE = str.maketrans("", "", " \r\n\t")
MAX_WAITING_NBYTES = 1 << 30  # bytes of pixels that wait to be encoded: a request of some thousand bytes may decode to 192 million
AUDIO_NOT_FETCHED = "audio is not fetched from URLs: send it base64-encoded in the request, as data of input_audio"
VIDEO = "video_url"  # vLLM's, in chat completions
KINDS = {"image_url": IMAGE_INPUT, "input_image": IMAGE_INPUT, "image": IMAGE_INPUT, VIDEO: IMAGE_INPUT, "input_audio": AUDIO_INPUT,
         "audio_url": AUDIO_INPUT}  # of parts
TYPES = {"image": IMAGE_INPUT, "video": IMAGE_INPUT, "audio": AUDIO_INPUT}  # by main MIME type
OMITTED, OMITTED_NOTE = "[{} left out: {}]", "{} in a tool result left out (the model is told so): {}"
NOT_FETCHED = "images are not fetched from URLs: send it in the request, as data:image/png;base64,..."
VIDEOS_NOT_FETCHED = "videos are not fetched from URLs: send it in the request, as data:video/mp4;base64,..."


@dataclass(frozen=True)
class MediaPart:
    """An image, a video or audio in a request."""

    text: Callable[[], object]  # returns it in base64 or as a URL
    where: str  # its field, for errors
    put: Callable[[str], None]  # replaces it by a text
    modality: Modality = IMAGE_INPUT
    from_tool: bool = False  # a tool returned it: an error becomes a text instead of refusing the request
    is_video: bool = False  # its frames are the images

    @property
    def noun(self) -> str:
        return "video" if self.is_video else self.modality.noun


def in_chat(payload: ChatRequest) -> Iterator[MediaPart]:
    """Chat completions: `{"type": "image_url", "image_url": {"url": "data:..."}}` among a message's parts, `{"type": "input_audio",
    "input_audio": {"data": ...}}`, and vLLM's `audio_url` and `video_url`."""
    for place in of_chat(payload):
        yield from _in_parts(*place)


def in_responses(payload: ResponsesRequest) -> Iterator[MediaPart]:
    """Responses: `{"type": "input_image", "image_url": "data:..."}` in messages and tool outputs."""
    for place in of_responses(payload):
        yield from _in_parts(*place)


def in_messages(payload: CountTokensRequest) -> Iterator[MediaPart]:
    """Anthropic's messages: `{"type": "image", "source": {"type": "base64", "data": ...}}`, among blocks and inside tool_result."""
    for place in of_messages(payload):
        yield from _in_parts(*place)


def in_contents(payload: GenerateContentRequest) -> Iterator[MediaPart]:
    """Google's API: `{"inlineData": {"mimeType": "image/png", "data": ...}}` among parts and inside function responses."""
    for each in attached_files(payload):
        if (modality := TYPES.get(each.kind)) is not None:
            yield MediaPart(partial(getattr, each, "text"), each.where, each.put, modality, each.from_tool, each.kind == "video")


def in_ollama_chat(payload: OllamaChatRequest) -> Iterator[MediaPart]:
    """Ollama's chat: the base64 `images` of a message go before its text."""
    for number, turn in enumerate(payload.messages or ()):
        images, turn.images = turn.images or [], None
        marks: list[str] = []
        for at, image in enumerate(images):
            yield MediaPart(partial(str, image), f"messages[{number}].images[{at}]", marks.append, from_tool=turn.role.lower() == TOOL)
        if isinstance(turn.content, list):
            turn.content[:0] = [{"type": "text", "text": each} for each in marks]
        elif marks:
            turn.content = "\n".join([*marks, turn.content or ""])


def in_ollama_text(payload: OllamaGenerateRequest) -> Iterator[MediaPart]:
    """Ollama's generate: `images` beside the prompt."""
    images, payload.images = payload.images or [], None
    if images and (payload.raw or payload.suffix):
        raise Problem(400, "images are not supported in a raw prompt: leave out raw and suffix", param="images")
    marks: list[str] = []
    for at, image in enumerate(images):
        yield MediaPart(partial(str, image), f"images[{at}]", marks.append)
    if marks:
        payload.prompt = "\n".join([*marks, payload.prompt or ""])


class MediaLoader:
    """Decodes the media of requests to one model, one request at a time: this bounds the decoders' memory and leaves threads to other
    requests. Raises Problem that names the field."""

    def __init__(self, served: ServedModel, note: Callable[[str], None]) -> None:
        """`note` is called with a line about each item of a tool that is left out."""
        self._served, self._note, self._lock = served, note, asyncio.Lock()

    async def all(self, sent: Iterable[MediaPart]) -> tuple[MediaItem, ...]:
        """The media of a request, replaced by markers in it. The caller keeps them until the answer has ended."""
        rest = iter(sent)
        if (first := next(rest, None)) is None:
            return ()
        async with self._lock:
            return await asyncio.to_thread(_load_all, chain([first], rest), self._served, self._note)

    async def samples(self, data: bytes, where: str) -> np.ndarray:
        """Decode an uploaded audio file to samples, float32 [n]."""
        async with self._lock:
            return await asyncio.to_thread(_with_location, where, lambda: self._served.audio_samples(data, where))


def _load_all(sent: Iterable[MediaPart], served: ServedModel, note: Callable[[str], None]) -> tuple[MediaItem, ...]:
    items, points, samples = [], 0, 0
    if served.accepts_images and served.require_vision().pending_nbytes() > MAX_WAITING_NBYTES:
        raise Problem(503, "too many large images are waiting to be encoded", BUSY, code="queue_full", headers={"retry-after": "1"},
                      hint=RETRY)
    for each in sent:
        try:
            loaded = _load(each, served)
        except Problem as problem:
            if not each.from_tool:
                raise
            reason = each.noun, problem.message.removeprefix(f"{each.where}: ")
            each.put(OMITTED.format(*reason))
            note(OMITTED_NOTE.format(*reason))
            continue
        size = sum(prod(picture.size) for _, picture in loaded)
        points, samples = (points + size, samples) if each.modality is IMAGE_INPUT else (points, samples + size)
        if samples > MAX_SECONDS * SAMPLE_RATE:
            raise Problem(400, f"{each.where}: the audio in this request is longer than {MAX_SECONDS // 60} minutes in all: shorten it",
                          param=each.where)
        if points > MOST_POINTS:
            raise Problem(400, f"{each.where}: the images in this request have more than {MOST_POINTS:,} pixels in all: make them smaller",
                          param=each.where)
        each.put("\n".join(piece for words, picture in loaded for piece in (words, picture.marker) if piece))
        items += (picture for _, picture in loaded)
    return tuple(items)


def _load(sent: MediaPart, served: ServedModel) -> list[tuple[str, MediaItem]]:
    """(preceding text, item) of each image or clip in a part. Raises Problem that begins with its field."""
    def taken() -> list[tuple[str, MediaItem]]:
        if sent.modality is AUDIO_INPUT:
            served.require_audio()
            return [("", served.add_audio(_bytes_of(sent), sent.where))]
        served.require_vision()
        return served.add_video(_bytes_of(sent), sent.where) if sent.is_video else [("", served.add_image(_bytes_of(sent), sent.where))]

    return _with_location(sent.where, taken)


def _with_location(where: str, taken: Callable[[], Result]) -> Result:
    """The result of a function. Raises Problem that begins with the field `where`."""
    try:
        return taken()
    except EffllmError as error:
        problem = problem_of(error, where)
        if not problem.message.startswith(where):
            problem.message = f"{where}: {problem.message}"
        raise problem from error


def _in_parts(content: object, where: str, from_tool: bool = False) -> Iterator[MediaPart]:
    for at, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in KINDS:
            continue

        def put(text: str, at: int = at, parts: list[Any] = content) -> None:
            parts[at] = {"type": "text", "text": text}

        yield MediaPart(partial(_text_of, part, kind, f"{where}[{at}]"), f"{where}[{at}]", put, KINDS[kind], from_tool, kind == VIDEO)


def _text_of(part: dict[str, Any], kind: str, where: str) -> object:
    if kind == "image":
        source = part.get("source")
        source = source if isinstance(source, dict) else {}
        if source.get("type") != "base64":
            raise Problem(400, f"{where}.source: {NOT_FETCHED if source.get('type') == 'url' else 'type has to be base64, with data'}",
                          param=f"{where}.source")
        return source.get("data")
    if kind == "input_image" and part.get("file_id"):
        raise Problem(400, f"{where}: file ids are not supported: send an image_url, as data:image/png;base64,...", param=where)
    if kind == "input_audio":
        inside = part.get("input_audio")
        return inside.get("data") if isinstance(inside, dict) else inside
    url = part.get(kind if kind in ("audio_url", VIDEO) else "image_url")
    return url.get("url") if isinstance(url, dict) else url


def _bytes_of(sent: MediaPart) -> bytes:
    """The bytes of a part. Raises Problem for anything but base64 and data URLs."""
    text, where = sent.text(), sent.where
    scheme = text[:16].strip().lower() if isinstance(text, str) else ""
    if scheme.startswith(("http:", "https:", "file:", "ftp:")):
        unfetched = VIDEOS_NOT_FETCHED if sent.is_video else NOT_FETCHED if sent.modality is IMAGE_INPUT else AUDIO_NOT_FETCHED
        raise Problem(400, f"{where}: {unfetched}", param=where)
    if scheme.startswith("data:"):
        head, comma, text = text.partition(",")
        text = unquote(text) if comma and head.rstrip().lower().endswith(";base64") else None
    try:
        data = base64.b64decode(text.translate(WHITESPACE), validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    if not data:
        shown = f"data:{'video/mp4' if sent.is_video else 'image/png'};base64,..."
        form = shown if sent.modality is IMAGE_INPUT else '{"data": ...} of input_audio'
        raise Problem(400, f"{where} is not a base64-encoded {sent.noun}: send it as {form}", param=where)
    return data

