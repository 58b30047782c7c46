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

from ..files.bounded_read import MAX_TOKENIZER_NBYTES, read_bounded
from ..gguf.tokenizer import CONTROL, NORMAL, UNUSED, USER, Vocabulary, backend
from .tiktoken_vocabulary import FileTokenizer, VocabularyError

# Protobuf field numbers: of the model, of a piece, of the trainer spec (MODEL_TYPE, SPECIAL_IDS) and of the normalizer spec.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
TEXT, SCORE, KIND = 1, 2, 3
MODEL_TYPE, BPE = 3, 2
SPECIAL_IDS = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2), "padding": (43, -1)}  # role -> (field, default)
CHARSMAP, ADD_DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES = 2, 3, 4
VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # wire types
MAX_TOKENS = 1 << 22
Field = tuple[int, int, Any]


def read_sentencepiece(path: Path, settings: Mapping[str, Any]) -> FileTokenizer:
    """The tokenizer of a tokenizer.model; `settings`: tokenizer_config.json next to it. Raises VocabularyError, OSError."""
    data = read_bounded(path, MAX_TOKENIZER_NBYTES)
    pieces, trainer, normalizer = [], {}, {}
    for number, wire_type, value in _fields(data):
        if wire_type != BYTES:
            continue
        if number == PIECES:
            pieces.append(dict(_fields_by_number(value)))
        elif number == TRAINER:
            trainer |= dict(_fields_by_number(value))
        elif number == NORMALIZER:
            normalizer |= dict(_fields_by_number(value))
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
    stated_ids = {role: _signed(trainer.get(field, default)) for role, (field, default) in SPECIAL_IDS.items()}
    ids = {role: number for role, number in stated_ids.items() if 0 <= number < len(pieces)}
    has_prefix = normalizer.get(ADD_DUMMY_PREFIX, 1) == 1
    vocabulary = Vocabulary(path, "llama", "", tokens, np.array(kinds), np.array(scores), [], ids, True, has_prefix, None)
    tokenizer = backend(vocabulary)
    if steps := _normalizers(normalizer):
        tokenizer.normalizer = normalizers.Sequence([*steps, tokenizer.normalizer])
    return FileTokenizer(path, tokenizer, vocabulary.special_tokens, True)


def _normalizers(spec: Mapping[int, Any]) -> list[normalizers.Normalizer]:
    """Normalization before spaces are escaped."""
    steps = []
    if spec.get(CHARSMAP):
        steps.append(normalizers.Precompiled(bytes(spec[CHARSMAP])))
    if spec.get(REMOVE_EXTRA_WHITESPACES, 1) == 1:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps


def _added(path: Path, settings: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Id -> (text, is special) of added tokens. Raises VocabularyError."""
    entries = settings.get("added_tokens_decoder")
    added = {}
    for number, entry in (entries if isinstance(entries, dict) else {}).items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and number.isdecimal() and len(number) < 10:
            added[int(number)] = entry["content"], entry.get("special") is True
    older_file = path.with_name("added_tokens.json")
    if not added and older_file.exists():
        try:
            content = json.loads(read_bounded(older_file, MAX_TOKENIZER_NBYTES))
        except ValueError as error:
            raise VocabularyError(f"{older_file.name} beside it is not JSON: {str(error)[:80]}") from None
        added = {number: (text, True) for text, number in content.items() if type(number) is int} if isinstance(content, dict) else {}
    if any(not 0 <= number < MAX_TOKENS for number in added):
        raise VocabularyError("an added token has an id out of range")
    return added


def _add(tokens: list[str], kinds: list[int], scores: list[float], added: Mapping[int, tuple[str, bool]]) -> None:
    """Place added tokens at their ids, after the pieces or in place of some."""
    for number in range(len(tokens), max(added, default=-1) + 1):
        tokens.append(f"<unused {number}>")
        kinds.append(UNUSED)
        scores.append(0.0)
    for number, (text, special) in added.items():
        tokens[number], kinds[number] = text, CONTROL if special else USER


def _fields_by_number(data: bytes) -> Iterator[tuple[int, Any]]:
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
        wire_type = key & 7
        if wire_type == VARINT:
            value, at = _varint(data, at)
        elif wire_type in (EIGHT, FOUR):
            width = 8 if wire_type == EIGHT else 4
            if at + width > end:
                raise VocabularyError("it ends within a number")
            value, at = struct.unpack_from("<d" if wire_type == EIGHT else "<f", data, at)[0], at + width
        elif wire_type == BYTES:
            length, at = _varint(data, at)
            if at + length > end:
                raise VocabularyError("it ends within a piece")
            value, at = data[at : at + length], at + length
        else:
            raise VocabularyError("it is not a valid SentencePiece model")
        yield key >> 3, wire_type, value


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
