"""Document files in requests that are given to the model as text: a PDF, page by page, or plain text. Their bytes come with the request,
and their text replaces them in it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from ... import EffllmError
from ...runtime.files.pdf_pages import is_pdf, pages_of
from .content_parts import of_chat, of_messages, of_responses
from .gemini_requests import attached_files
from .media import OMITTED, OMITTED_NOTE, TYPES, WHITESPACE
from .problems import Problem, problem_of

if TYPE_CHECKING:
    from .gemini_requests import GenerateContentRequest
    from .messages_requests import CountTokensRequest
    from .openai_requests import ChatRequest
    from .responses_requests import ResponsesRequest

NOT_FETCHED = "files are not fetched from URLs: send it in the request, as {}"
NO_STORED_FILES = "file ids are not supported, as no files are stored: send it in the request, as {}"
AS_DATA, AS_SOURCE = "file_data, data:application/pdf;base64,...", '{"type": "base64", "media_type": "application/pdf", "data": ...}'
AS_INLINE = 'inlineData: {"mimeType": "application/pdf", "data": ...}'
MAX_CACHED_CHARS = 1 << 20  # characters of texts cached for clients that resend a file with each question


@dataclass(frozen=True)
class DocumentPart:
    """A file in a request."""

    data: object  # base64 or a data URL
    name: str
    where: str  # its field, for errors
    put: Callable[[str], None]  # replaces it by a text
    from_tool: bool = False  # a tool returned it: an error becomes a text instead of refusing the request


def in_chat(payload: ChatRequest) -> Iterator[DocumentPart]:
    """Chat completions: `{"type": "file", "file": {"filename", "file_data": "data:application/pdf;base64,..."}}`."""
    for parts, where, from_tool in of_chat(payload):
        yield from _in_parts(parts, "file", where, from_tool)


def in_responses(payload: ResponsesRequest) -> Iterator[DocumentPart]:
    """Responses: `{"type": "input_file", "filename", "file_data"}` in messages and tool outputs."""
    for parts, where, from_tool in of_responses(payload):
        yield from _in_parts(parts, "input_file", where, from_tool)


def in_messages(payload: CountTokensRequest) -> Iterator[DocumentPart]:
    """Anthropic's messages: documents with a base64 source, which becomes a text source; titles are kept."""
    for blocks, where, from_tool in of_messages(payload):
        yield from _in_blocks(blocks, where, from_tool)


def in_contents(payload: GenerateContentRequest) -> Iterator[DocumentPart]:
    """Google's API: parts with data that is neither image, video nor audio."""
    for each in attached_files(payload):
        if each.kind not in TYPES:
            is_address = each.text[:5].lower() != "data:" and each.part.inline_data is None
            data = Problem(400, f"{each.where}: {NOT_FETCHED.format(AS_INLINE)}", param=each.where) if is_address else each.text
            yield DocumentPart(data, each.name, each.where, each.put, each.from_tool)


class DocumentReader:
    """Reads the files of requests, one at a time, each in a process. `note` is called with a line about each file of a tool that is left
    out."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._lock = note, asyncio.Lock()
        self._cache: dict[bytes, str] = {}  # by SHA-256 of the file, least recently used first

    async def all(self, sent: Iterable[DocumentPart]) -> None:
        """Replace the files of a request by their texts. Raises Problem that names the field."""
        for each in sent:
            async with self._lock:
                try:
                    text = await asyncio.to_thread(self._text, each)
                except EffllmError as error:
                    problem = problem_of(error, each.where)
                except Problem as raised:
                    problem = raised
                else:
                    each.put("\n".join(filter(None, (each.name, text))))
                    continue
            if not each.from_tool:
                raise problem
            reason = "file", problem.message.removeprefix(f"{each.where}: ").removeprefix(f"{each.where} ")
            each.put(OMITTED.format(*reason))
            self._note(OMITTED_NOTE.format(*reason))

    def _text(self, sent: DocumentPart) -> str:
        """The text of a file, from the cache if it was sent before. Raises Problem and UsageError that begin with its field."""
        data = _bytes_of(sent)
        key = hashlib.sha256(data).digest()
        text = self._cache.pop(key, None)
        if text is None:
            text = _pages(pages_of(data, sent.where)) if is_pdf(data) else _plain(data, sent.where)
        self._cache[key] = text
        while sum(map(len, self._cache.values())) > MAX_CACHED_CHARS:
            del self._cache[next(iter(self._cache))]
        return text


def _pages(pages: list[str]) -> str:
    """The pages as one text, numbered so that questions can refer to them."""
    return pages[0] if len(pages) == 1 else "\n\n".join(f"Page {number}:\n{page}" for number, page in enumerate(pages, 1))


def _plain(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8-sig")
        if "\0" not in text:
            return text
    except UnicodeDecodeError:
        text = ""
    raise Problem(400, f"{where} is neither a PDF nor UTF-8 text", param=where, hint="send its content as text")


def _in_parts(content: object, kind: str, where: str, from_tool: bool) -> Iterator[DocumentPart]:
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, dict) or part.get("type") != kind:
            continue
        file = part.get("file") if kind == "file" else part
        file, place = file if isinstance(file, dict) else {}, f"{where}[{at}]"

        def put(text: str, at: int = at, parts: list[Any] = content) -> None:
            parts[at] = {"type": "text", "text": text}

        name = file["filename"] if isinstance(file.get("filename"), str) else ""
        yield DocumentPart(_file_data(file, place), name, place, put, from_tool)


def _file_data(file: dict[str, Any], where: str) -> object:
    """The data of a file, or the problem with one that has none."""
    if file.get("file_data") is None:
        for field, said in (("file_url", NOT_FETCHED), ("file_id", NO_STORED_FILES)):
            if file.get(field):
                return Problem(400, f"{where}: {said.format(AS_DATA)}", param=where)
    return file.get("file_data")


def _in_blocks(content: object, where: str, from_tool: bool) -> Iterator[DocumentPart]:
    for at, block in enumerate(content if isinstance(content, list) else ()):
        source = block.get("source") if isinstance(block, dict) and block.get("type") == "document" else None
        kind, place = source.get("type") if isinstance(source, dict) else None, f"{where}[{at}]"
        if kind not in ("base64", "url", "file"):
            continue

        def put(text: str, block: dict[str, Any] = block) -> None:
            block["source"] = {"type": "text", "media_type": "text/plain", "data": text}

        said = {"url": NOT_FETCHED, "file": NO_STORED_FILES}.get(kind)
        data = source.get("data") if said is None else Problem(400, f"{place}: {said.format(AS_SOURCE)}", param=place)
        yield DocumentPart(data, "", place, put, from_tool)


def _bytes_of(sent: DocumentPart) -> bytes:
    """The bytes of a file. Raises Problem for anything but base64 and data URLs."""
    text, where = sent.data, sent.where
    if isinstance(text, Problem):
        raise text
    head, comma, rest = text.partition(",") if isinstance(text, str) and text[:5].lower() == "data:" else ("", "", text)
    if comma and not head.rstrip().lower().endswith(";base64"):
        return unquote_to_bytes(rest)
    try:
        data = base64.b64decode(rest.translate(WHITESPACE), validate=True) if isinstance(rest, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    if not data:
        raise Problem(400, f"{where} is not a base64-encoded file", param=where, hint=f"send its bytes as {AS_DATA}")
    return data
