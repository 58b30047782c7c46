"""SentencePiece's tokenizer.model, converted for the `tokenizers` library: a protocol buffer of pieces with scores, the same data that GGUF
files hold, so both share the construction (`gguf/tokenizer.py`).

BPE models are supported, with their whitespace and character normalization. tokenizer_config.json next to the file names added tokens, some
of which replace unused pieces.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, normalizers

from ..files.bounded_read import TOKENIZER_NBYTES, read_bounded
from ..gguf.tokenizer import CONTROL, NORMAL, UNUSED, USER, Vocabulary, backend
from .tiktoken_vocabulary import FileTokenizer, VocabularyError

# Numbers of fields: of the model, of a piece, of what it was trained with, of what is done to a text first.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
TEXT, SCORE, KIND = 1, 2, 3
MODEL_TYPE, BPE = 3, 2
IDS = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2), "padding": (43, -1)}  # role -> field, and what is meant where it is absent
CHARACTERS, PREFIX, FEWER_SPACES = 2, 3, 4
VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # how a field is written
MOST_TOKENS = 1 << 22
Field = tuple[int, int, Any]


def read_sentencepiece(path: Path, settings: Mapping[str, Any]) -> FileTokenizer:
    """The tokenizer of a tokenizer.model; `settings`: tokenizer_config.json next to it. Raises VocabularyError, OSError."""
    data = read_bounded(path, TOKENIZER_NBYTES)
    pieces, trainer, normalizer = [], {}, {}
    for number, how, value in _fields(data):
        if how != BYTES:
            continue
        if number == PIECES:
            pieces.append(dict(_numbered(value)))
        elif number == TRAINER:
            trainer |= dict(_numbered(value))
        elif number == NORMALIZER:
            normalizer |= dict(_numbered(value))
    if not pieces:
        raise VocabularyError("it holds no pieces")
    if trainer.get(MODEL_TYPE, 1) != BPE:
        raise VocabularyError("it is not a BPE model")
    try:
        tokens = [bytes(piece.get(TEXT, b"")).decode() for piece in pieces]
        scores = [float(piece.get(SCORE, 0.0)) for piece in pieces]
    except (UnicodeDecodeError, TypeError):
        raise VocabularyError("one of its pieces lacks a text or a score") from None
    kinds = [piece.get(KIND, NORMAL) for piece in pieces]
    _add(tokens, kinds, scores, _added(path, settings))
    found = {role: _signed(trainer.get(field, usual)) for role, (field, usual) in IDS.items()}
    ids = {role: number for role, number in found.items() if 0 <= number < len(pieces)}
    prefix = normalizer.get(PREFIX, 1) == 1
    made = Vocabulary(path, "llama", "", tokens, np.array(kinds), np.array(scores), [], ids, True, prefix, None)
    own = backend(made)
    if first := _normalizers(normalizer):
        own.normalizer = normalizers.Sequence([*first, own.normalizer])
    return FileTokenizer(path, own, made.special_tokens, True)


def _normalizers(said: Mapping[int, Any]) -> list[normalizers.Normalizer]:
    """Normalization before spaces are escaped."""
    steps = []
    if said.get(CHARACTERS):
        steps.append(normalizers.Precompiled(bytes(said[CHARACTERS])))
    if said.get(FEWER_SPACES, 1) == 1:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps


def _added(path: Path, settings: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Id -> (text, is special) of added tokens. Raises VocabularyError."""
    stated = settings.get("added_tokens_decoder")
    found = {}
    for number, entry in (stated if isinstance(stated, dict) else {}).items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and number.isdecimal() and len(number) < 10:
            found[int(number)] = entry["content"], entry.get("special") is True
    older = path.with_name("added_tokens.json")
    if not found and older.exists():
        try:
            listed = json.loads(read_bounded(older, TOKENIZER_NBYTES))
        except ValueError as error:
            raise VocabularyError(f"{older.name} beside it is not JSON: {str(error)[:80]}") from None
        found = {number: (text, True) for text, number in listed.items() if type(number) is int} if isinstance(listed, dict) else {}
    if any(not 0 <= number < MOST_TOKENS for number in found):
        raise VocabularyError("an added token has an id out of range")
    return found


def _add(tokens: list[str], kinds: list[int], scores: list[float], added: Mapping[int, tuple[str, bool]]) -> None:
    """Place added tokens at their ids, after the pieces or in place of some."""
    for number in range(len(tokens), max(added, default=-1) + 1):
        tokens.append(f"<unused {number}>")
        kinds.append(UNUSED)
        scores.append(0.0)
    for number, (text, special) in added.items():
        tokens[number], kinds[number] = text, CONTROL if special else USER


def _numbered(data: bytes) -> Iterator[tuple[int, Any]]:
    return ((number, value) for number, _, value in _fields(data))


def _signed(value: object) -> int:
    """An int32 as protobuf encodes it: negative numbers take ten bytes."""
    number = value if isinstance(value, int) else -1
    return number - (1 << 64) if number >= 1 << 63 else number


def _fields(data: bytes) -> Iterator[Field]:
    """(field number, wire type, value) of a message. Raises VocabularyError."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        how = key & 7
        if how == VARINT:
            value, at = _varint(data, at)
        elif how in (EIGHT, FOUR):
            width = 8 if how == EIGHT else 4
            if at + width > end:
                raise VocabularyError("it ends within a number")
            value, at = struct.unpack_from("<d" if how == EIGHT else "<f", data, at)[0], at + width
        elif how == BYTES:
            length, at = _varint(data, at)
            if at + length > end:
                raise VocabularyError("it ends within a piece")
            value, at = data[at : at + length], at + length
        else:
            raise VocabularyError("it is not a valid SentencePiece model")
        yield key >> 3, how, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise VocabularyError("it is not a valid SentencePiece model")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
