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
LARGEST = 256 << 20  # bytes of such a file
HEX = re.compile(r"[0-9a-f]*")


class Malformed(ValueError):
    """Not a saved session."""


class OtherVersion(ValueError):
    """Written by another version; `args[0]` is its number."""


@dataclass(frozen=True)
class TokenizedText:
    """How the conversation's text was tokenized: the ids of `text`, of which the first `prompt` came from the last question (None if the
    answer cannot be continued token by token)."""

    text: str
    ids: tuple[int, ...]
    prompt: int | None


@dataclass(frozen=True)
class SavedCache:
    """What a KV cache held: `tokens`, the first of them in `sealed` pages (files `pages`); `sinks` and `tail` are the exact ones, `state`
    the recurrent states after all tokens. `identity`: what the bytes depend on besides the tokens. The first `anew` tokens are exactly as
    prefilling them in one prompt with the kernels `read_by` leaves them."""

    identity: Mapping[str, object]
    tokens: tuple[int, ...]
    pages: tuple[PageFile, ...]
    sinks: PageFile | None
    tail: PageFile | None
    spoken: TokenizedText | None
    anew: int = 0
    read_by: str = ""
    state: PageFile | None = None

    @property
    def sealed(self) -> int:
        return len(self.pages)

    @property
    def files(self) -> tuple[PageFile, ...]:
        return (*self.pages, *(file for file in (self.sinks, self.tail, self.state) if file is not None))


FIRST_WORDS = 100  # characters of the first message shown in lists


@dataclass(frozen=True)
class SavedSession:
    """`conversation` as written by `conversation_file.py`; `saved`: seconds since the epoch; `cache`: None if only the text is kept."""

    name: str
    model: str
    saved: float
    conversation: Mapping[str, object]
    cache: SavedCache | None

    @property
    def messages(self) -> Sequence[object]:
        messages = self.conversation.get("messages")
        return messages if isinstance(messages, list) else []

    @property
    def begins(self) -> str:
        """The first words of the first user message, in one line."""
        said = (each.get("content") for each in self.messages if isinstance(each, dict) and each.get("role") == "user")
        text = next((each for each in said if isinstance(each, str) and each.strip()), "")
        return " ".join(describe_markers(text[: 4 * FIRST_WORDS]).split())[:FIRST_WORDS]

    def to_json(self) -> str:
        """The text of its file, checksum included."""
        cache = self.cache
        content = {
            "format": FORMAT, "version": VERSION, "name": self.name, "model": self.model, "saved": self.saved,
            "conversation": self.conversation,
            "cache": None if cache is None else {
                "identity": cache.identity, "tokens": cache.tokens, "pages": [_of_file(file) for file in cache.pages],
                "sinks": _of_file(cache.sinks), "tail": _of_file(cache.tail), "read": [cache.anew, cache.read_by],
                **({} if cache.state is None else {"state": _of_file(cache.state)}),
                "spoken": None if cache.spoken is None else
                {"text": cache.spoken.text, "ids": _without(cache.spoken.ids, cache.tokens), "prompt": cache.spoken.prompt}}}
        return json.dumps({**content, "checksum": _checksum(content)}) + "\n"  # escaped: a lone surrogate has no UTF-8 encoding


def parse_saved(data: bytes, name: str) -> SavedSession:
    """Raises Malformed for a file that is truncated, altered or not a saved session, OtherVersion for one of another version."""
    try:
        content = json.loads(data)
        stated = content.pop("checksum", None) if isinstance(content, dict) else None
        checksum = _checksum(content)
    except (ValueError, RecursionError) as error:  # what can barely be parsed may be nested too deeply to be written
        raise Malformed("it is cut short, or was altered") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Malformed("it is not a saved session")
    if content.get("version") != VERSION:
        raise OtherVersion(content.get("version"))
    if stated != checksum:
        raise Malformed("it was altered: its checksum differs")
    if content.get("name") != name:
        raise Malformed(f"it is of session {content.get('name')!r:.80}")
    model, saved, conversation = (content.get(key) for key in ("model", "saved", "conversation"))
    if not isinstance(model, str) or not _is_date(saved) or not isinstance(conversation, dict):
        raise Malformed("it lacks its model, its date or its conversation")
    raw = content.get("cache")
    return SavedSession(name, model, float(saved), conversation, None if raw is None else _cache(raw))


def _checksum(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _without(ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """`ids` as the length of the common prefix with `tokens`, and the rest: nearly all of them are common."""
    same = next((place for place, (one, other) in enumerate(zip(ids, tokens)) if one != other), min(len(ids), len(tokens)))
    return [same, *ids[same:]]


def _of_file(file: PageFile | None) -> list[object] | None:
    return None if file is None else [file.key, file.sha256, file.nbytes]


def _cache(raw: object) -> SavedCache:
    if not isinstance(raw, dict) or not _is_identity(raw.get("identity")) or not isinstance(raw.get("pages"), list):
        raise Malformed("it describes no cache")
    spoken, tokens = raw.get("spoken"), _ids(raw.get("tokens"))
    if spoken is not None:
        if not isinstance(spoken, dict) or not isinstance(spoken.get("text"), str) or not _is_count(spoken.get("prompt"), True):
            raise Malformed("it lacks its messages")
        same, *others = _ids(spoken.get("ids")) or (0,)
        spoken = TokenizedText(spoken["text"], (*tokens[:same], *others), spoken.get("prompt"))
    sinks, tail, state = (None if raw.get(key) is None else _file(raw[key]) for key in ("sinks", "tail", "state"))
    read = raw.get("read", [0, ""])
    if not (isinstance(read, list) and len(read) == 2 and _is_count(read[0]) and read[0] <= len(tokens) and isinstance(read[1], str)):
        raise Malformed("it lacks the tokens read")
    return SavedCache(raw["identity"], tokens, tuple(map(_file, raw["pages"])), sinks, tail, spoken, *read, state)


def _is_identity(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(part, str | int) for part in value.values())


def _ids(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(_is_count(each) or type(each) is int and FIRST_MEDIA_ID <= each < 2 * FIRST_MEDIA_ID for each
                                            in raw):
        raise Malformed("it lists no tokens")
    return tuple(raw)


def _file(raw: object) -> PageFile:
    if not (isinstance(raw, list) and len(raw) == 3 and _is_hex(raw[0], 32) and _is_hex(raw[1], 64) and _is_count(raw[2])):
        raise Malformed("it names no file of pages")
    return PageFile(*raw)


def _is_hex(value: object, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and HEX.fullmatch(value) is not None


def _is_date(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 40


def _is_count(value: object, optional: bool = False) -> bool:
    return (optional and value is None) or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40)
