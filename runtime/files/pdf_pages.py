"""Text of PDF pages, through the optional library pypdf.

The file is untrusted, and a PDF reader follows references, decompresses streams and interprets font programs: one file may exhaust
memory or loop forever. So parsing runs in a subprocess with limits on memory and time, which returns the pages as JSON.
"""

from __future__ import annotations

import importlib.util
import io
import json
import resource
import subprocess
import sys

from ... import UsageError

MOST_S = 60  # of a processor, and by the clock
MOST_NBYTES = 2 << 30  # of memory
MOST_LETTERS = 4 << 20  # of all pages: far more than a context holds
IN, OUT = 0, 1  # descriptors
PAGES, WRONG, LOCKED = "pages", "wrong", "locked"
CIPHERS = ("FileNotDecryptedError", "DependencyError", "WrongPasswordError")  # the library leaves most of them to another one
INSTALL = 'pip install "effllm[pdf]" where the model runs, or give its text'
ITS_TEXT = "give its text instead"


def is_pdf(data: bytes) -> bool:
    return b"%PDF-" in data[:1024]


def pages_of(data: bytes, source: str) -> list[str]:
    """The text of each page. Raises UsageError that begins with its `source`."""
    if not _has_library():
        raise UsageError(f"{source} is a PDF, and the library that reads PDFs is not installed", INSTALL)
    told = _read_apart(data, source)
    if LOCKED in told:
        raise UsageError(f"{source} is a password-protected PDF", "remove the password first")
    if WRONG in told:
        raise UsageError(f"{source} is not a PDF that can be read ({told[WRONG]})", ITS_TEXT)
    if not any(page.strip() for page in told[PAGES]):
        raise UsageError(f"{source} is a PDF without text: its pages are images", "give them as images, to a vision model")
    return told[PAGES]


def _has_library() -> bool:
    return importlib.util.find_spec("pypdf") is not None


def _read_apart(data: bytes, source: str) -> dict[str, object]:
    try:
        done = subprocess.run([sys.executable, "-P", "-m", __name__], input=data, capture_output=True, timeout=MOST_S)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{source} is a PDF that takes longer than {MOST_S} s to read", ITS_TEXT) from None
    try:
        return json.loads(done.stdout)
    except ValueError:  # it was ended by one of its limits
        raise UsageError(f"{source} is a PDF that takes too much time or memory to read", ITS_TEXT) from None


def _read(data: bytes) -> dict[str, object]:
    import pypdf

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return {LOCKED: True}
        pages: list[str] = []
        for page in reader.pages:
            pages.append(page.extract_text())
            if sum(map(len, pages)) > MOST_LETTERS:
                return {WRONG: f"more than {MOST_LETTERS:,} letters"}
    except MemoryError:
        return {WRONG: f"more than {MOST_NBYTES >> 30} GiB of memory"}
    except Exception as error:  # whatever a broken file leads it to
        name = type(error).__name__
        return {LOCKED: True} if name in CIPHERS else {WRONG: name}
    return {PAGES: pages}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_NBYTES, MOST_NBYTES))
    with open(IN, "rb") as given, open(OUT, "wb") as told:
        told.write(json.dumps(_read(given.read())).encode())


if __name__ == "__main__":
    main()
