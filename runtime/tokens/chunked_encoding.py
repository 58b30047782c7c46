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
BATCH_CHUNKS = 4  # the library encodes so many in parallel
CONTEXT_CHARS = 400  # on either side of a split, within which tokens must not change
SEARCH_CHARS = 4096  # before the end of a chunk, in which a split is searched
MAX_CANDIDATES = 20
CANDIDATE = re.compile(r"(?<=\S) (?=[^\W\d_])|(?<=\S)\n(?=\S)|(?<=\n)(?=[^\W\d_])")


def encode_in_chunks(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> Generator[int, None, list[int]]:
    """Token ids of a text of any length; yields the number of characters done for a long one."""
    if len(text) <= CHUNK_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def plain(part: str) -> list[int]:
        return backend.encode(part, add_special_tokens=False).ids

    ids: list[int] = []
    done, chunks = 0, split_text(text, plain)
    while batch := list(islice(chunks, BATCH_CHUNKS)):
        ids += _encode_batch(backend, batch)
        done += sum(map(len, batch))
        yield done
    if not add_special_tokens:
        return ids
    without_special, with_special = plain("a"), backend.encode("a", add_special_tokens=True).ids
    start = next((start for start in range(len(with_special) - len(without_special) + 1)
                  if with_special[start : start + len(without_special)] == without_special), None)
    if start is None:
        return backend.encode(text, add_special_tokens=True).ids
    return with_special[:start] + ids + with_special[start + len(without_special) :]


def exhaust(steps: Generator[object, None, Result]) -> Result:
    """Return value of a generator."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def _encode_batch(backend: tokenizers.Tokenizer, texts: list[str]) -> list[int]:
    return [token for encoding in backend.encode_batch_fast(texts, add_special_tokens=False) for token in encoding.ids]


def split_text(text: str, encode: Callable[[str], list[int]]) -> Iterator[str]:
    """The chunks of `text`, about CHUNK_CHARS characters each where it can be split."""
    start, target = 0, CHUNK_CHARS
    while target < len(text):
        split = _find_split(text, start, target, encode)
        if split is not None:
            yield text[start : split[0]]
            start = split[1]
        target += CHUNK_CHARS
    yield text[start:]


def _find_split(text: str, begin: int, end: int, encode: Callable[[str], list[int]]) -> tuple[int, int] | None:
    """(end of a chunk at or before `end`, start of the next) such that no token changes; tries the last few candidates."""
    start = max(begin + 1, end - SEARCH_CHARS)
    candidates = [match.start() for match in CANDIDATE.finditer(text, start, end)]
    for position in reversed(candidates[-MAX_CANDIDATES:]):
        left = text[max(begin, position - CONTEXT_CHARS) : position]
        together, left_ids = encode(left + text[position : position + CONTEXT_CHARS]), encode(left)
        for skipped in (0, 1) if text[position] == " " else (0,):
            if together == left_ids + encode(text[position + skipped : position + CONTEXT_CHARS]):
                return position, position + skipped
    return None
