"""Tokenizer files of a model folder: tokenizer.json, or a vocabulary file of another kind, and the settings next to it.

tokenizer.json is read through the `tokenizers` library; without one, tiktoken-like (`tiktoken_vocabulary`), SentencePiece (`sentencepiece`)
and RWKV (`rwkv_vocabulary`) files are. Padding, truncation and dropout in tokenizer.json are training settings and are disabled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from ... import EffllmError, ModelNotFound
from ..files.bounded_read import MAX_JSON_NBYTES, MAX_TOKENIZER_NBYTES, read_bounded
from ..hub import PIECES, RANKS, WORLD
from .tokenizer_panics import is_panic, silence_panic

if TYPE_CHECKING:
    from .tiktoken_vocabulary import FileTokenizer

MOST_GROWTH = 64  # what published ones replace becomes a few letters
REFETCH = "fetch the model's files again"


class TokenizerError(EffllmError):
    """Tokenizer files are malformed or do not belong to the model."""


def open_vocabulary_file(folder: Path, settings: Mapping[str, Any]) -> FileTokenizer | None:
    """The tokenizer of a folder without tokenizer.json; None where it has no other vocabulary file either."""
    named = () if (folder / "tokenizer.json").exists() else (*RANKS, PIECES)
    path = next((path for name in named if (path := folder / name).exists()), None)
    if path is None:
        return None
    from .tiktoken_vocabulary import VocabularyError, read_tiktoken

    try:
        if path.name == PIECES:
            from .sentencepiece import read_sentencepiece

            return read_sentencepiece(path, settings)
        if path.name == WORLD:
            from .rwkv_vocabulary import read_rwkv

            return read_rwkv(path, settings)
        return read_tiktoken(path, settings)
    except VocabularyError as error:
        raise TokenizerError(f"{path} is not a readable tokenizer: {error}",
                             f"{REFETCH}, or put tokenizer.json of a repository of the same model beside it") from None
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {_reason(error)}", "check the permissions of the folder, or " + REFETCH) from None
    except BaseException as error:
        raise as_tokenizer_error(error, f"{path} is not a readable tokenizer") from None


def open_backend(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json, without truncation, padding and dropout. Raises ModelNotFound where it is missing or unreadable, TokenizerError for
    one that is damaged, too large, or expands text too much."""
    try:
        if not path.is_file():
            raise ModelNotFound(f"{path.parent} has no tokenizer.json", _without_tokenizer(path.parent))
        if path.stat().st_size > MAX_TOKENIZER_NBYTES:
            raise TokenizerError(f"{path} is {path.stat().st_size:,} bytes, too large for a tokenizer", REFETCH)
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not a readable tokenizer: byte {error.start} is not UTF-8", REFETCH) from None
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {_reason(error)}", "check the permissions of the folder, or " + REFETCH) from None
    try:
        with silence_panic():
            backend = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        raise as_tokenizer_error(error, f"{path} is not a readable tokenizer") from None
    if backend.normalizer is not None and normalizer_growth(json.loads(backend.normalizer.__getstate__())) > MOST_GROWTH:
        raise TokenizerError(f"{path} normalizes one character to more than {MOST_GROWTH}", REFETCH)
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None
    return backend


def normalizer_growth(normalizer: Mapping[str, Any]) -> float:
    """Upper bound of how many characters a normalizer makes of one. A few lines of it could exhaust memory."""
    if normalizer.get("type") == "Sequence":
        total, produced = 1.0, ""
        for step in _steps(normalizer):
            growth, pattern = normalizer_growth(step), step.get("pattern", {}).get("String") if step.get("type") == "Replace" else None
            is_independent = pattern and pattern not in produced  # it matches nothing that an earlier step produced
            total, produced = max(total, growth) if is_independent else total * growth, produced + 2 * str(step.get("content", ""))
        return total
    if normalizer.get("type") == "Prepend":
        return max(1.0, len(normalizer["prepend"]) / 1024)
    if normalizer.get("type") != "Replace":
        return 1.0
    pattern = normalizer["pattern"].get("String")
    return max(1.0, len(normalizer["content"]) / max(1, len(pattern or "")))


def _steps(normalizer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, nested sequences flattened."""
    if normalizer.get("type") != "Sequence":
        yield normalizer
        return
    for each in normalizer["normalizers"]:
        yield from _steps(each)


def as_tokenizer_error(error: BaseException, what: str) -> BaseException:
    """What to raise for an error of the tokenizers library, which raises plain Exception, or panics with a BaseException."""
    if not isinstance(error, Exception) and not is_panic(error):
        return error
    message = " ".join(str(error).split())
    return TokenizerError(f"{what}: {message[:200]}", REFETCH)


def _without_tokenizer(folder: Path) -> str:
    if (folder / "vocab.json").exists():
        return "write one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    return "copy tokenizer.json from the model's repository into the folder"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is absent."""
    try:
        if not path.exists():
            return {}
        content = json.loads(read_bounded(path, MAX_JSON_NBYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot read {path}: {_reason(error)}", REFETCH) from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} does not hold a JSON object", REFETCH)
    return content


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """role -> text of every `*_token` entry, a string or an object with `content`."""
    entries = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
    return {k: v for k, v in entries.items() if isinstance(v, str) and not any("\ud800" <= letter <= "\udfff" for letter in v)}


def token_ids(value: Any) -> list[int]:
    """`eos_token_id` as models write it: a number, a list, or nothing."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _reason(error: Exception) -> str:
    """Why a file could not be read, without the path that the message names already."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
