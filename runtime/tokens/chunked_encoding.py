"""Tokenizes long texts in chunks: the library needs 150 bytes of memory per character that it encodes at once.

A text is split before a space and a letter, or at a line end, where the surrounding tokens are the same with and without the split. Where a
vocabulary prepends a space to every text, one is removed from the chunk. Without such a place the text stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import TypeVar

import tokenizers

Result = TypeVar("Result")

CHUNK_CHARS = 1 << 17  # characters
AT_ONCE = 4  # pieces, which the library encodes side by side
AROUND = 400  # characters on either side of a cut that are looked at
WITHIN = 4096  # characters before the end of a piece in which a cut is looked for
TRIES = 20
LIKELY = re.compile(r"(?<=\S) (?=[^\W\d_])|(?<=\S)\n(?=\S)|(?<=\n)(?=[^\W\d_])")


def encode_in_chunks(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> Generator[int, None, list[int]]:
    """Token ids of a text of any length; yields the number of characters done for a long one."""
    if len(text) <= CHUNK_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def plain(part: str) -> list[int]:
        return backend.encode(part, add_special_tokens=False).ids

    ids: list[int] = []
    done, waiting = 0, split_text(text, plain)
    while some := list(islice(waiting, AT_ONCE)):
        ids += _ids(backend, some)
        done += sum(map(len, some))
        yield done
    if not add_special_tokens:
        return ids
    bare, whole = plain("a"), backend.encode("a", add_special_tokens=True).ids
    at = next((at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare), None)
    return backend.encode(text, add_special_tokens=True).ids if at is None else whole[:at] + ids + whole[at + len(bare) :]


def exhaust(steps: Generator[object, None, Result]) -> Result:
    """Return value of a generator."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def _ids(backend: tokenizers.Tokenizer, texts: list[str]) -> list[int]:
    return [token for made in backend.encode_batch_fast(texts, add_special_tokens=False) for token in made.ids]


def split_text(text: str, encode: Callable[[str], list[int]]) -> Iterator[str]:
    """The chunks of `text`, about CHUNK_CHARS characters each where it can be split."""
    begin, target = 0, CHUNK_CHARS
    while target < len(text):
        cut = _place(text, begin, target, encode)
        if cut is not None:
            yield text[begin : cut[0]]
            begin = cut[1]
        target += CHUNK_CHARS
    yield text[begin:]


def _place(text: str, begin: int, end: int, encode: Callable[[str], list[int]]) -> tuple[int, int] | None:
    """(end of a chunk at or before `end`, start of the next) such that no token changes; tries the last few candidates."""
    start = max(begin + 1, end - WITHIN)
    found = [match.start() for match in LIKELY.finditer(text, start, end)]
    for at in reversed(found[-TRIES:]):
        left = text[max(begin, at - AROUND) : at]
        whole, head = encode(left + text[at : at + AROUND]), encode(left)
        for skipped in (0, 1) if text[at] == " " else (0,):
            if whole == head + encode(text[at + skipped : at + AROUND]):
                return at, at + skipped
    return None
