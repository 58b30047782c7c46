"""The file of a saved session: a conversation, and the pages of its KV cache. JSON with a checksum, validated on read.

It does not contain keys and values; those are in page files (`offload/page_file.py`), shared by sessions with a common prefix.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...offload.page_file import PageFile
from ..images.media import FIRST_MEDIA_ID
from ..images.media_markers import describe_markers

FORMAT, VERSION = "effllm-saved-session", 1
MAX_FILE_NBYTES = 256 << 20  # bytes of such a file
HEX = re.compile(r"[0-9a-f]*")


class Malformed(ValueError):
    """Not a saved session."""


class OtherVersion(ValueError):
    """Written by another version; `args[0]` is its number."""


@dataclass(frozen=True)
class TokenizedText:
    """A conversation's rendered text and its token ids."""

    text: str
    ids: tuple[int, ...]
    prompt: int | None  # how many of the ids are the last prompt; None if the answer cannot be continued token by token


@dataclass(frozen=True)
class SavedCache:
    """The contents of a KV cache."""

    identity: Mapping[str, object]  # what the bytes depend on besides the tokens
    tokens: tuple[int, ...]
    pages: tuple[PageFile, ...]  # sealed pages
    sinks: PageFile | None  # exact tokens at the beginning
    tail: PageFile | None  # exact tokens after the sealed pages
    tokenized_text: TokenizedText | None
    # The first `num_fresh_tokens` are exactly what prefilling them in one prompt with the kernels of `kernel_identity` gives.
    num_fresh_tokens: int = 0
    kernel_identity: str = ""
    state: PageFile | None = None  # recurrent states after all tokens

    @property
    def sealed(self) -> int:
        """Number of sealed pages."""
        return len(self.pages)

    @property
    def files(self) -> tuple[PageFile, ...]:
        """All page files of the cache."""
        return (*self.pages, *(file for file in (self.sinks, self.tail, self.state) if file is not None))


FIRST_WORDS = 100  # characters of the first message shown in lists


@dataclass(frozen=True)
class SavedSession:
    """A saved conversation with its KV cache."""

    name: str
    model: str
    saved: float  # seconds since the epoch
    conversation: Mapping[str, object]  # as written by `conversation_file.py`
    cache: SavedCache | None  # None if only the text is kept

    @property
    def messages(self) -> Sequence[object]:
        messages = self.conversation.get("messages")
        return messages if isinstance(messages, list) else []

    @property
    def begins(self) -> str:
        """The first words of the first user message, in one line."""
        contents = (message.get("content") for message in self.messages if isinstance(message, dict) and message.get("role") == "user")
        text = next((content for content in contents if isinstance(content, str) and content.strip()), "")
        return " ".join(describe_markers(text[: 4 * FIRST_WORDS]).split())[:FIRST_WORDS]

    def to_json(self) -> str:
        """The text of its file, checksum included."""
        content = {"format": FORMAT, "version": VERSION, "name": self.name, "model": self.model, "saved": self.saved,
                   "conversation": self.conversation, "cache": None if self.cache is None else _cache_to_json(self.cache)}
        return json.dumps({**content, "checksum": _checksum(content)}) + "\n"  # escaped: a lone surrogate has no UTF-8 encoding


def _cache_to_json(cache: SavedCache) -> dict[str, object]:
    text = cache.tokenized_text
    return {"identity": cache.identity, "tokens": cache.tokens, "pages": [_file_to_json(file) for file in cache.pages],
            "sinks": _file_to_json(cache.sinks), "tail": _file_to_json(cache.tail),
            "read": [cache.num_fresh_tokens, cache.kernel_identity],
            **({} if cache.state is None else {"state": _file_to_json(cache.state)}),
            "spoken": None if text is None else
            {"text": text.text, "ids": _without_prefix(text.ids, cache.tokens), "prompt": text.prompt}}


def parse_saved(data: bytes, name: str) -> SavedSession:
    """Raises Malformed for a file that is truncated, altered or not a saved session, OtherVersion for one of another version."""
    try:
        content = json.loads(data)
        stated_checksum = content.pop("checksum", None) if isinstance(content, dict) else None
        checksum = _checksum(content)
    except (ValueError, RecursionError) as error:  # what can barely be parsed may be nested too deeply to be written
        raise Malformed("it is cut short, or was altered") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Malformed("it is not a saved session")
    if content.get("version") != VERSION:
        raise OtherVersion(content.get("version"))
    if stated_checksum != checksum:
        raise Malformed("it was altered: its checksum differs")
    if content.get("name") != name:
        raise Malformed(f"it is of session {content.get('name')!r:.80}")
    model, saved, conversation = (content.get(key) for key in ("model", "saved", "conversation"))
    if not isinstance(model, str) or not _is_date(saved) or not isinstance(conversation, dict):
        raise Malformed("it lacks its model, its date or its conversation")
    raw = content.get("cache")
    return SavedSession(name, model, float(saved), conversation, None if raw is None else _parse_cache(raw))


def _checksum(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _without_prefix(ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """`ids` as the length of the common prefix with `tokens`, and the rest: nearly all of them are common."""
    common = next((index for index, (one, other) in enumerate(zip(ids, tokens)) if one != other), min(len(ids), len(tokens)))
    return [common, *ids[common:]]


def _file_to_json(file: PageFile | None) -> list[object] | None:
    return None if file is None else [file.key, file.sha256, file.nbytes]


def _parse_cache(raw: object) -> SavedCache:
    if not isinstance(raw, dict) or not _is_identity(raw.get("identity")) or not isinstance(raw.get("pages"), list):
        raise Malformed("it describes no cache")
    tokens = _parse_ids(raw.get("tokens"))
    tokenized_text = None if raw.get("spoken") is None else _parse_text(raw["spoken"], tokens)
    sinks, tail, state = (None if raw.get(key) is None else _parse_file(raw[key]) for key in ("sinks", "tail", "state"))
    fresh = raw.get("read", [0, ""])
    if not (isinstance(fresh, list) and len(fresh) == 2 and _is_count(fresh[0]) and fresh[0] <= len(tokens) and isinstance(fresh[1], str)):
        raise Malformed("it lacks the tokens read")
    return SavedCache(raw["identity"], tokens, tuple(map(_parse_file, raw["pages"])), sinks, tail, tokenized_text, *fresh, state)


def _parse_text(raw: object, tokens: tuple[int, ...]) -> TokenizedText:
    if not isinstance(raw, dict) or not isinstance(raw.get("text"), str) or not _is_count(raw.get("prompt"), True):
        raise Malformed("it lacks its messages")
    common, *rest = _parse_ids(raw.get("ids")) or (0,)
    return TokenizedText(raw["text"], (*tokens[:common], *rest), raw.get("prompt"))


def _is_identity(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(part, str | int) for part in value.values())


def _parse_ids(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(map(_is_token_id, raw)):
        raise Malformed("it lists no tokens")
    return tuple(raw)


def _is_token_id(value: object) -> bool:
    return _is_count(value) or type(value) is int and FIRST_MEDIA_ID <= value < 2 * FIRST_MEDIA_ID


def _parse_file(raw: object) -> PageFile:
    if not (isinstance(raw, list) and len(raw) == 3 and _is_hex(raw[0], 32) and _is_hex(raw[1], 64) and _is_count(raw[2])):
        raise Malformed("it names no file of pages")
    return PageFile(*raw)


def _is_hex(value: object, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and HEX.fullmatch(value) is not None


def _is_date(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 40


def _is_count(value: object, optional: bool = False) -> bool:
    return (optional and value is None) or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40)
