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

MAX_SECONDS = 60  # of a processor, and by the clock
MAX_MEMORY_NBYTES = 2 << 30  # of memory
MAX_CHARACTERS = 4 << 20  # of all pages: far more than a context holds
IN, OUT = 0, 1  # descriptors
PAGES, INVALID, LOCKED = "pages", "wrong", "locked"
ENCRYPTION_ERRORS = ("FileNotDecryptedError", "DependencyError", "WrongPasswordError")  # the library leaves most of them to another one
INSTALL_HINT = 'pip install "effllm[pdf]" where the model runs, or give its text'
TEXT_HINT = "give its text instead"


def is_pdf(data: bytes) -> bool:
    return b"%PDF-" in data[:1024]


def pages_of(data: bytes, source: str) -> list[str]:
    """The text of each page. Raises UsageError that begins with its `source`."""
    if not _has_library():
        raise UsageError(f"{source} is a PDF, and the library that reads PDFs is not installed", INSTALL_HINT)
    result = _read_in_subprocess(data, source)
    if LOCKED in result:
        raise UsageError(f"{source} is a password-protected PDF", "remove the password first")
    if INVALID in result:
        raise UsageError(f"{source} is not a PDF that can be read ({result[INVALID]})", TEXT_HINT)
    if not any(page.strip() for page in result[PAGES]):
        raise UsageError(f"{source} is a PDF without text: its pages are images", "give them as images, to a vision model")
    return result[PAGES]


def _has_library() -> bool:
    return importlib.util.find_spec("pypdf") is not None


def _read_in_subprocess(data: bytes, source: str) -> dict[str, object]:
    try:
        process = subprocess.run([sys.executable, "-P", "-m", __name__], input=data, capture_output=True, timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{source} is a PDF that takes longer than {MAX_SECONDS} s to read", TEXT_HINT) from None
    try:
        return json.loads(process.stdout)
    except ValueError:  # it was ended by one of its limits
        raise UsageError(f"{source} is a PDF that takes too much time or memory to read", TEXT_HINT) from None


def _read(data: bytes) -> dict[str, object]:
    import pypdf

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return {LOCKED: True}
        pages: list[str] = []
        for page in reader.pages:
            pages.append(page.extract_text())
            if sum(map(len, pages)) > MAX_CHARACTERS:
                return {INVALID: f"more than {MAX_CHARACTERS:,} letters"}
    except MemoryError:
        return {INVALID: f"more than {MAX_MEMORY_NBYTES >> 30} GiB of memory"}
    except Exception as error:  # whatever a broken file leads it to
        name = type(error).__name__
        return {LOCKED: True} if name in ENCRYPTION_ERRORS else {INVALID: name}
    return {PAGES: pages}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_NBYTES, MAX_MEMORY_NBYTES))
    with open(IN, "rb") as stdin, open(OUT, "wb") as stdout:
        stdout.write(json.dumps(_read(stdin.read())).encode())


if __name__ == "__main__":
    main()
