"""Documents in requests, given to the model as text: PDFs, and text files."""

import asyncio
import base64
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from pypdf import PdfReader
from server_process import ServerProcess

from effllm import UsageError
from effllm.cli.server import documents
from effllm.cli.server.messages_requests import MessagesRequest
from effllm.cli.server.messages_requests import chat_of as chat_of_messages
from effllm.cli.server.openai_requests import ChatRequest, Message, messages_of
from effllm.cli.server.problems import Problem
from effllm.cli.server.responses_requests import ResponsesRequest, chat_of
from effllm.runtime.files import pdf_pages
from effllm.runtime.files.pdf_pages import pages_of

TEXT = "Foxes rule.\n"
# What the library is to the process that reads: each word of the file is a page, and some words are what a broken file may do.
LIBRARY = """
class Page:
    def __init__(self, text):
        self.text = text
    def extract_text(self):
        if self.text == "crowd":
            return [bytearray(1 << 30) for _ in range(9)]
        if self.text == "die":
            import os
            os._exit(9)
        while self.text == "for-ever":
            continue
        if self.text == "broken":
            return int(self.text)
        return {"blank": " ", "endless": "x" * (5 << 20)}.get(self.text, self.text)
class PdfReader:
    def __init__(self, file):
        words = file.read().decode().split()[1:]
        self.is_encrypted, self.pages = words[:1] == ["locked"], [Page(word) for word in words]
    def decrypt(self, password):
        return 0
"""


def pdf(*pages: str) -> bytes:
    """A file of that format with a line of text on each page."""
    count = len(pages)
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>",
               f"<< /Type /Pages /Count {count} /Kids [{' '.join(f'{4 + 2 * at} 0 R' for at in range(count))}] >>".encode(),
               b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    for at, page in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({page}) Tj ET".encode()
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * at} 0 R "
                       "/Resources << /Font << /F1 3 0 R >> >> >>".encode())
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn))
    body, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + b"".join(b"%010d 00000 n \n" % at for at in places)
    return body + table + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(body))


def as_data(data: bytes, kind: str = "application/pdf") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def read(sent: Iterator[documents.DocumentPart], notes: list[str] | None = None) -> None:
    asyncio.run(documents.DocumentReader([].append if notes is None else notes.append).all(sent))


def chat(role: str = "user", **file: object) -> ChatRequest:
    content = [{"type": "text", "text": "What is it?"}, {"type": "file", "file": file}]
    return ChatRequest(messages=[Message(role=role, content=content, tool_call_id="a")])


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pypdf.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(pdf_pages, "_has_library", lambda: True)


def test_text_is_read_wherever_a_file_may_be() -> None:
    asked = chat(filename="fox.md", file_data=as_data(TEXT.encode(), "text/markdown"))
    read(documents.in_chat(asked))
    assert [part["text"] for part in messages_of(asked)[0]["content"]] == ["What is it?", f"fox.md\n{TEXT}"]
    plain = chat(file_data="data:text/plain,Foxes%20rule.")
    read(documents.in_chat(plain))
    assert messages_of(plain)[0]["content"][1]["text"] == "Foxes rule."
    file = {"type": "input_file", "filename": "fox.txt", "file_data": base64.b64encode(TEXT.encode()).decode()}
    items = [{"role": "user", "content": [dict(file)]}, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "a", "output": [dict(file)]}]
    read(documents.in_responses(asked := ResponsesRequest(input=items)))
    _, messages, _ = chat_of(asked)
    assert messages[0]["content"][0]["text"] == messages[2]["content"] == f"fox.txt\n{TEXT}"
    block = {"type": "document", "title": "Of foxes", "source": {"type": "base64", "media_type": "text/plain",
                                                                 "data": base64.b64encode(TEXT.encode()).decode()}}
    turns = [{"role": "user", "content": [dict(block)]}, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [dict(block)]}]}]
    read(documents.in_messages(asked := MessagesRequest(max_tokens=1, messages=turns)))
    _, messages = chat_of_messages(asked)
    assert [part["text"] for part in messages[0]["content"]] == ["Of foxes", TEXT] and messages[2]["content"] == f"Of foxes\n{TEXT}"


@pytest.mark.parametrize(("file", "words"), [
    ({"file_id": "file-1"}, "file ids are not supported, as no files are stored: send it"), ({}, "not a base64-encoded file"),
    ({"file_data": "?"}, "not a base64-encoded file"),
    ({"file_data": as_data(b"\x00\x01")}, "neither a PDF nor UTF-8 text"),
    ({"file_data": as_data(b"\xff\xfe")}, "send its content as text"),
    ({"file_data": 7}, "send its bytes as file_data")])
def test_what_is_refused_says_what_to_send(file: dict, words: str) -> None:
    with pytest.raises(Problem, match=words) as raised:
        read(documents.in_chat(chat(**file)))
    assert raised.value.status == 400 and raised.value.param == "messages[0].content[1]"
    notes: list[str] = []
    read(documents.in_chat(asked := chat("tool", **file)), notes)
    (told,) = [part["text"] for part in messages_of(asked)[0]["content"][1:]]
    assert told.startswith("[file left out: ") and words in told and words in notes[0]


def test_addresses_are_not_fetched() -> None:
    named = {"type": "input_file", "file_url": "http://a/b"}
    for sent in (documents.in_responses(ResponsesRequest(input=[{"role": "user", "content": [named]}])),
                 documents.in_messages(MessagesRequest(
            max_tokens=1, messages=[{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "http://a/b"}}]}]))):
        with pytest.raises(Problem, match="not fetched from URLs: send it in the request, as "):
            read(sent)


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(Problem, match=r'the library that reads PDFs is not installed.*pip install "effllm\[pdf\]"') as raised:
        read(documents.in_chat(chat(file_data=as_data(b"%PDF-1.4"))))
    assert raised.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(("words", "said"), [
    (b"locked", "password-protected"), pytest.param(b"broken", r"not a PDF that can be read \(ValueError\)", marks=pytest.mark.slow),
    pytest.param(b"", "without text", marks=pytest.mark.slow), pytest.param(b"blank", "without text", marks=pytest.mark.slow),
    pytest.param(b"endless", "more than 4,194,304 letters", marks=pytest.mark.slow),
    pytest.param(b"crowd", "more than 2 GiB of memory", marks=pytest.mark.slow), (b"die", "too much time or memory")])
def test_pages_come_from_a_process_that_may_break(library: None, words: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=f"it is .*{said}") as raised:
        pages_of(b"%PDF- " + words, "it")
    assert raised.value.hint


def test_pages_are_those_that_come_in_time(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages_of(b"%PDF- one two", "it") == ["one", "two"]
    monkeypatch.setattr(pdf_pages, "MAX_SECONDS", 0.5)
    with pytest.raises(UsageError, match="takes longer than 0.5 s"):
        pages_of(b"%PDF- for-ever", "it")


def test_a_file_that_comes_again_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[bytes] = []
    monkeypatch.setattr(documents, "pages_of", lambda data, source: (count.append(data), ["one", "two"])[1])
    monkeypatch.setattr(documents, "MAX_CACHED_CHARS", 60)
    reading = documents.DocumentReader([].append)
    for data in (b"%PDF-1", b"%PDF-1", b"%PDF-2", b"%PDF-1", b"%PDF-3", b"%PDF-2"):
        asyncio.run(reading.all(documents.in_chat(asked := chat(file_data=as_data(data)))))
        assert messages_of(asked)[0]["content"][1]["text"] == "Page 1:\none\n\nPage 2:\ntwo"
    assert count == [b"%PDF-1", b"%PDF-2", b"%PDF-3", b"%PDF-2"], "the one that was used longest ago makes room"


def test_the_library_reads_and_the_model_is_told(server: ServerProcess) -> None:
    said = ["The fox is king.", "The sea is calm."]
    assert len(PdfReader(BytesIO(pdf(*said))).pages) == 2, "a file that others read"
    assert [page.strip() for page in pages_of(pdf(*said), "it")] == said
    with pytest.raises(UsageError, match="not a PDF that can be read"):
        pages_of(pdf("x")[:40], "it")
    data = as_data(pdf("The fox is king."))
    sent = server.chat([{"role": "user", "content": [{"type": "file", "file": {"filename": "a.pdf", "file_data": data}}]}])
    written = server.chat([{"role": "user", "content": "a.pdf\nThe fox is king."}])
    assert sent.json["choices"] == written.json["choices"] and sent.json["usage"]["prompt_tokens"] == written.json["usage"]["prompt_tokens"]
    item = {"role": "user", "content": [{"type": "input_file", "filename": "a.pdf", "file_data": data}]}
    first = server.respond([item]).json
    assert first["usage"]["input_tokens"] == written.json["usage"]["prompt_tokens"]
    again = server.respond("So?", previous_response_id=first["id"]).json
    assert again["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    block = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": data.partition(",")[2]}}
    assert server.message([{"role": "user", "content": [block]}]).status == 200
